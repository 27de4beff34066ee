"""What the parts of the mode `best` contribute: each alone, all together, and all but one.

The starting point is the mixed norm of the paper in its procedure. One batch is differentiated, with the same weights,
samples and noise for all variants. If torchdiffeq is installed, it does the same. A first pass counts evaluations and
takes the time for compiling; the passes that are timed follow, in turns, and the fastest counts.
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode.diagnostics.isolation import Snapshot

from .counting import evaluations
from .measuring import batch_of, up_to_date
from .modes import solve_options
from .peers import LIBRARIES, solved_by
from .provenance import circumstances
from .running import Root
from .settings import Settings
from .store import write_json
from .tasks import ModelTask
from .weights import trained

#: Samples of the batch, by experiment, at most; and timed passes of each variant.
BATCH = {"ncde": 128, "cnf": 16, "hnn": 64}
REPEATS = 3
#: The parts of the mode `best`, in words.
REPLAY, DIRECT, SAFETY, NORM, COMPILE = "Replay", "Direct", "safety 1.0", 'norm="auto"', "compile"
MIXED, SEMINORM, TOGETHER = "mixed norm", "seminorm", "all together"


@dataclass(frozen=True)
class Variant:
    """Options of `solve`, or another library with one of its modes."""

    name: str
    kind: str  # "start", "alone", "together", "without" or the name of a library
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = ""


def parts(experiment: str, batch: int) -> dict[str, dict[str, Any]]:
    """What the mode `best` and compiling change in the options of the mixed norm, part by part."""
    base, best = (solve_options(experiment, mode, batch=batch) for mode in ("mixed", "best"))
    found: dict[str, dict[str, Any]] = {REPLAY: {"adjoint": sn.Replay()}, DIRECT: {"adjoint": sn.Direct()}}
    if "controller" in best:
        found[SAFETY] = {"controller": best["controller"]}
    if "norm" in base:
        found[NORM] = {"norm": None}  # then the model leaves out its integrals, as with "auto"
    return found | {COMPILE: {"compile": True}}


def variants(experiment: str, batch: int) -> Iterator[Variant]:
    """All variants of an experiment, for batches of a size."""
    base = solve_options(experiment, "mixed")
    yield Variant(MIXED, "start", base)
    yield Variant(SEMINORM, "start", solve_options(experiment, "seminorm"))
    known = parts(experiment, batch)
    for name, change in known.items():
        yield Variant(name, "alone", _given(base | change))
    direct = isinstance(solve_options(experiment, "best", batch=batch)["adjoint"], sn.Direct)
    chosen, other = (DIRECT, REPLAY) if direct else (REPLAY, DIRECT)
    used = [name for name in known if name != other]

    def joined(names: list[str]) -> dict[str, Any]:
        return _given({**base, **{key: value for name in names for key, value in known[name].items()}})

    yield Variant(TOGETHER, "together", joined(used))
    for name in used:
        yield Variant(f"without {name}", "without", joined([each for each in used if each != name]))
    yield Variant(f"{other} instead of {chosen}", "without", joined([other, *(x for x in used if x != chosen)]))
    for library, modes in LIBRARIES.items():
        if importlib.util.find_spec(library) is not None:
            yield from (Variant(f"{library}, {mode}", library, mode=mode) for mode in modes)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@dataclass
class Cost:
    """What a pass of a variant costs. Times are of the processor on a CPU, so that other processes have no influence.

    Attributes:
        preparation: seconds of the first pass, which compiles.
        seconds: of the timed passes.
        note: what a reader must know, such as that a solve could not be compiled.
        reason: why a variant could not be measured.
    """

    name: str
    kind: str
    forward: int = 0
    backward: int = 0
    preparation: float = 0.0
    seconds: list[float] = field(default_factory=list)
    note: str = ""
    reason: str | None = None


class Contestant:
    """A variant with its own model, since compiled programs and another library belong to a model."""

    def __init__(self, task: ModelTask[Any, Any], settings: Settings, variant: Variant):
        self.task = copy.copy(task)
        self.task.model = copy.deepcopy(task.model)
        self.task.model.options = {"rtol": settings.rtol, "atol": settings.atol, **variant.options}
        if variant.mode:
            self.task.solves = solved_by(variant.kind, self.task.model, variant.mode)
        self.cost = Cost(variant.name, variant.kind)
        self.loss: float | None = None
        self.rows = torch.arange(task.samples("train"))

    def attempt(self, first: bool, restore: Callable[[], None], keep: bool = False) -> None:
        """Differentiate the loss of the batch once; if `keep`, the gradient stays with the parameters."""
        if self.cost.reason is not None:
            return
        try:
            self._pass(first, restore, keep)
        except Exception as error:  # it is written down, and the others go on
            self.cost.reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]

    def gradient(self, restore: Callable[[], None]) -> tuple[Tensor, float] | None:
        """The gradient, as one vector, and the loss of the batch, from a first pass; `None` if that fails."""
        self.attempt(True, restore, keep=True)
        if self.cost.reason is not None or self.loss is None:
            return None
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.task.model.parameters()]
        found = torch.cat([x.reshape(-1) for x in grads])
        self.task.model.zero_grad()
        return found, self.loss

    def _pass(self, first: bool, restore: Callable[[], None], keep: bool) -> None:
        restore()
        now = time.process_time if self.task.device.type == "cpu" else time.perf_counter
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begin = now()
            outcome = self.task.outcome(("train", self.rows), record=False)
            outcome.loss.backward()
            spent = now() - begin
        if any(issubclass(each.category, sn.CompileWarning) for each in told):
            self.cost.note = "runs eagerly: it could not be compiled"
        self.loss = outcome.loss.item()
        if not keep:
            self.task.model.zero_grad()
        if not first:
            self.cost.seconds.append(spent)
            return
        self.cost.preparation = spent
        back = [each.backward for each in outcome.stats if each.backward is not None]
        self.cost.forward = sum(each.nfe for each in outcome.stats)
        self.cost.backward = sum(map(evaluations, back))


def costs(settings: Settings, task: ModelTask[Any, Any], repeats: int = REPEATS) -> list[Cost]:
    """The costs of all variants on the batch of a task."""
    found = [Contestant(task, settings, variant) for variant in variants(settings.experiment, task.batch)]
    state = Snapshot(list(task.model.modules()), [], task.device)
    for i in range(repeats + 1):
        for each in found:
            each.attempt(i == 0, state.restore)
    state.restore()
    return [each.cost for each in found]


def file_of(experiment: str) -> str:
    return f"ablation-{experiment}.json"


def measure(settings: Settings, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> Path:
    """Measure a row and write `out/ablation-<experiment>.json`, unless that exists with the same settings."""
    path, weights = out / file_of(settings.experiment), trained(settings, out)
    batch = min(settings.batch, BATCH[settings.experiment])
    asked = {"settings": settings.as_json(), "batch": batch, "repeats": REPEATS}
    if up_to_date(path, asked, weights):
        return path
    if progress is not None:
        progress(f"what the parts of best contribute: {settings.row}")
    task = batch_of(settings, batch, settings.fitted, root, weights).task
    found = costs(settings, task)
    about = {"circumstances": circumstances(), "plan": {"fitted": settings.fitted}}
    about["weights"] = None if weights is None else dict(weights.about)
    write_json(path, asked | about | {"costs": [asdict(each) for each in found]})
    return path
