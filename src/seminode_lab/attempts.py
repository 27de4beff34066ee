"""One run with its display, a summary of its result, and one-line explanations of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seminode.errors import SolveError

from .data.errors import DataError
from .display import Display, share, showing
from .ranks import joined
from .running import CHECKPOINT_MINUTES, Root, comes_first, run, start_folder
from .settings import Settings
from .store import Busy, StoreError, Taken
from .training import TrainingFailed

#: Exit statuses of a process. DIED stands for an unexpected error, BUSY for a run that another process works on.
DONE, FAILED, UNUSABLE, DIED, BUSY, STOPPED = 0, 1, 2, 70, 75, 130


def attempt(
    settings: Settings,
    out: Path,
    root: Root = None,
    resume: bool = True,
    display: Display = "bar",
    tensorboard: bool = True,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
) -> dict[str, Any]:
    """Make a run and display its progress; return its result. If it needs starting weights, train them first.

    If `torchrun` has started several processes, they make the run together.
    """
    with joined(settings.device) as ranks:
        if not ranks.first:
            display, tensorboard = "nothing", False
        given: dict[str, Any] = {"checkpoint_minutes": checkpoint_minutes, "ranks": ranks}
        first = comes_first(settings, out)
        if first is not None:
            place = start_folder(first, out)
            with showing(place / first.name, display, tensorboard) as progress:
                run(first, place, root, progress, wait=True, **given)
        with showing(out / settings.name, display, tensorboard) as progress:
            return run(settings, out, root, progress, resume, **given)


def explained(error: Exception) -> tuple[int, str] | None:
    """The exit status and the message of an expected error; `None` for others, which deserve a traceback."""
    if isinstance(error, Busy):
        return BUSY, str(error)
    if isinstance(error, Taken | ValueError | NotADirectoryError):
        return UNUSABLE, str(error)
    if isinstance(error, TrainingFailed | StoreError | DataError | SolveError | OSError):
        return FAILED, str(error)
    return None


def in_one_line(message: str) -> str:
    return " ".join(message.split())


def summary(settings: Settings, result: Mapping[str, Any], out: Path) -> str:
    """The result of a run, to be printed."""
    test, totals, seconds = result["test"], result["totals"], result["seconds"]
    accuracy = f", {100 * test['accuracy']:.2f} % correct" if "accuracy" in test else ""
    rejected = share(totals["backward_accepted"], totals["backward_rejected"])
    best = f", best after epoch {result['best_epoch'] + 1}" if settings.schedule.selects else ""
    rows = (
        ("folder", out / settings.name),
        ("epochs", f"{result['epochs']}{best}"),
        ("test", f"loss {test['loss']:.5g}{accuracy}"),
        ("training", f"{totals['forward_nfe']:,} evaluations forward, {totals['backward_nfe']:,} backward"),
        ("rejected", f"{100 * rejected:.1f} % of backward steps"),
        ("seconds", f"{seconds['training']:.1f} in training, {seconds['evaluation']:.1f} in evaluations"),
    )
    return "\n".join([settings.name, *(f"    {name:<9} {value}" for name, value in rows)])
