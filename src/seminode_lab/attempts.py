"""An attempt at a run: what it shows, what came of it, and what stopped it, in one line and a status."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seminode.errors import SolveError

from .data.errors import DataError
from .display import Display, share, showing
from .running import STARTS, Root, comes_first, run
from .settings import Settings
from .store import Busy, StoreError, Taken
from .training import TrainingFailed

#: Statuses of a process: beside the usual ones, for an error nobody thought of, and for a run that another is at.
DONE, FAILED, UNUSABLE, DIED, BUSY, STOPPED = 0, 1, 2, 70, 75, 130


def attempt(
    settings: Settings,
    out: Path,
    root: Root = None,
    resume: bool = True,
    display: Display = "bar",
    tensorboard: bool = True,
) -> dict[str, Any]:
    """The result of a run, made in view, and before it what it begins with."""
    first = comes_first(settings, out)
    if first is not None:
        with showing(out / STARTS / first.name, display, tensorboard) as progress:
            run(first, out / STARTS, root, progress, wait=True)
    with showing(out / settings.name, display, tensorboard) as progress:
        return run(settings, out, root, progress, resume)


def explained(error: Exception) -> tuple[int, str] | None:
    """The status and the line for what can stop a run; nothing for what should not happen, and deserves a traceback."""
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
    """What came of a run, for people."""
    test, totals, seconds = result["test"], result["totals"], result["seconds"]
    accuracy = f", {100 * test['accuracy']:.2f} % right" if "accuracy" in test else ""
    rejected = share(totals["backward_accepted"], totals["backward_rejected"])
    best = f", the best one is {result['best_epoch'] + 1}" if settings.schedule.selects else ""
    rows = (
        ("folder", out / settings.name),
        ("epochs", f"{result['epochs']}{best}"),
        ("test", f"loss {test['loss']:.5g}{accuracy}"),
        ("training", f"{totals['forward_nfe']:,} evaluations forward, {totals['backward_nfe']:,} backward"),
        ("rejected", f"{100 * rejected:.1f} % of backward steps"),
        ("seconds", f"{seconds['training']:.1f} in training, {seconds['evaluation']:.1f} in evaluations"),
    )
    return "\n".join([settings.name, *(f"    {name:<9} {value}" for name, value in rows)])
