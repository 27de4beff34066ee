"""Every row of a preset on one batch, with seminode and with torchdiffeq: evaluations, seconds, loss and gradient.

All variants have the same weights, samples and noise. The passes are timed in turns, and the fastest counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from seminode.diagnostics.isolation import Snapshot
from seminode.diagnostics.subject import relative_error

from .ablation import BATCH, Contestant, Variant
from .grid import Column, Table
from .measures import DATA, KINDS
from .measuring import batch_of, up_to_date
from .modes import solve_options
from .peers import LIBRARIES
from .provenance import circumstances
from .running import Root
from .settings import EXPERIMENTS, Settings, rows
from .store import StoreError, read_json, write_json
from .tasks import ModelTask
from .weights import trained

LIBRARY = "torchdiffeq"
OURS = ("mixed", "seminorm", "per_tensor", "best")
REPEATS = 1
NOTE = (
    "One batch, forward and backward, with the same weights, samples and noise for both libraries, without compiling. "
    "Seconds are those of the fastest timed pass, of the processor on a CPU. The last column is the distance of a "
    "gradient from that of seminode in the same mode, relative to its size. per_tensor is the default norm of "
    "torchdiffeq; mixed takes all parameters as one vector, as in the paper."
)


@dataclass
class Pass:
    """What one pass costs in a mode, with a library, and what comes out."""

    mode: str
    library: str
    forward: int = 0
    backward: int = 0
    seconds: float | None = None
    loss: float | None = None
    distance: float | None = None  # of the gradient from ours in the same mode
    reason: str | None = None  # why it could not be measured


@dataclass
class _Entry:
    contestant: Contestant
    found: Pass
    gradient: Tensor | None = None


def _entries(settings: Settings, task: ModelTask[Any, Any]) -> Iterator[_Entry]:
    for mode in OURS:
        options = solve_options(settings.experiment, mode, batch=task.batch)
        yield _Entry(Contestant(task, settings, Variant(mode, "seminode", options)), Pass(mode, "seminode"))
        if mode in LIBRARIES[LIBRARY]:
            variant = Variant(mode, LIBRARY, mode=mode)
            yield _Entry(Contestant(task, settings, variant), Pass(mode, LIBRARY))


def passes(settings: Settings, task: ModelTask[Any, Any], repeats: int = REPEATS) -> list[Pass]:
    """All modes with both libraries, on the batch of a task."""
    entries = list(_entries(settings, task))
    state = Snapshot(list(task.model.modules()), [], task.device)
    for entry in entries:
        first = entry.contestant.gradient(state.restore)
        if first is not None:
            entry.gradient, entry.found.loss = first
    for _ in range(repeats):
        for entry in entries:
            entry.contestant.attempt(False, state.restore)
    state.restore()
    ours = {entry.found.mode: entry.gradient for entry in entries if entry.found.library == "seminode"}
    for entry in entries:
        cost, found = entry.contestant.cost, entry.found
        found.forward, found.backward, found.reason = cost.forward, cost.backward, cost.reason
        found.seconds = min(cost.seconds) if cost.seconds else None
        own = ours[found.mode]
        if found.library != "seminode" and entry.gradient is not None and own is not None:
            found.distance = relative_error(entry.gradient, own)
    return [entry.found for entry in entries]


def file_of(settings: Settings) -> str:
    return f"libraries-{settings.row}.json"


def measure(settings: Settings, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> Path:
    """Measure a row and write `out/libraries-<row>.json`, unless that exists with the same settings and weights."""
    path, weights = out / file_of(settings), trained(settings, out)
    batch = min(settings.batch, BATCH[settings.experiment])
    asked = {"settings": settings.as_json(), "batch": batch, "repeats": REPEATS}
    if up_to_date(path, asked, weights):
        return path
    if progress is not None:
        progress(f"beside {LIBRARY}: {settings.row}")
    task = batch_of(settings, batch, settings.fitted, root, weights).task
    found = [asdict(each) for each in passes(settings, task)]
    about = {"circumstances": circumstances(), "weights": None if weights is None else dict(weights.about)}
    write_json(path, asked | about | {"passes": found})
    return path


def measure_all(preset: str, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> list[Path]:
    """Measure all rows of a preset. Without torchdiffeq, nothing is measured."""
    if importlib.util.find_spec(LIBRARY) is None:
        return []
    return [measure(row, out, root, progress) for row in rows(preset)]


# The table.


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    settings = Settings.of_json(found["settings"])
    data, weights = DATA.get(settings.data, settings.data), found.get("weights")
    state = "untrained" if weights is None else f"weights after {weights['updates']:,} updates"
    hidden = dict(settings.model).get("hidden") if settings.experiment == "cnf" else None
    size = f", {hidden} channels" if hidden else ""
    yield (f"{KINDS[settings.experiment]}: {data}{size}, rtol {settings.rtol:g}, batch of {found['batch']}, {state}",)
    for each in (Pass(**each) for each in found["passes"]):
        label = f"{each.mode}, {each.library}"
        if each.reason is not None or each.seconds is None or each.loss is None:
            yield (label, *["not measured"] * 5)
            continue
        apart = "" if each.distance is None else f"{each.distance:.1e}"
        counts = (f"{each.forward:,}", f"{each.backward:,}", f"{each.seconds:.3g}")
        yield (label, *counts, f"{each.loss:.5g}", apart)


def table(folder: Path) -> Table:
    """The table of all rows that were measured, in the paper's order; without rows if there are none."""
    paths = sorted(folder.glob("libraries-*.json"), key=lambda path: (_place(path), path.name))
    lines: list[tuple[str, ...]] = []
    for path in paths:
        try:
            lines += _lines(read_json(path))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
            ) from error
    columns = (
        Column(""),
        Column("forward NFE"),
        Column("backward NFE"),
        Column("seconds"),
        Column("loss", minor=True),
        Column("gradient differs by", minor=True),
    )
    return Table("side-by-side", f"Every row with {LIBRARY}", columns, tuple(lines), (NOTE,) if lines else ())


def _place(path: Path) -> int:
    name = path.name.split("-")[1]
    return EXPERIMENTS.index(name) if name in EXPERIMENTS else len(EXPERIMENTS)


def measured_rows(folder: Path) -> set[str]:
    """The names of the rows that were measured."""
    return {path.stem.removeprefix("libraries-") for path in folder.glob("libraries-*.json")}
