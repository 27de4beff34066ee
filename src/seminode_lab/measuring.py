"""Work and precision of all adjoints on one batch of an experiment: the cost of a gradient and its error.

The whole model is measured, as in training: including its initial maps and readouts, and all blocks of a flow. If there
is a run whose checkpoint holds trained weights, the model has these. Errors are relative to a gradient in float64 with
tight tolerances, from the same samples, parameters and noise.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import seminode as sn
from seminode.adjoints import Adjoint
from seminode.controllers import Controller
from seminode.diagnostics.contenders import Contender
from seminode.diagnostics.isolation import Snapshot
from seminode.diagnostics.measurement import Course
from seminode.diagnostics.reference import default_double
from seminode.diagnostics.results import Reference
from seminode.diagnostics.subject import flat_gradient, relative_error
from seminode.solution import BackwardReport, Stats
from seminode.solvers import Bosh3, Dopri5, Dopri8, Solver

from .modes import oversized_seminorm, solve_options
from .provenance import circumstances
from .running import Root, task_of
from .settings import EXPERIMENTS, Settings, rows
from .store import read_json, write_json
from .tasks import ModelTask
from .weights import TrainedWeights, trained

ADJOINTS: dict[str, Adjoint] = {
    "Backsolve, mixed norm, fresh": sn.Backsolve(norm="mixed", restart="fresh"),
    "Backsolve, mixed per tensor, fresh": sn.Backsolve(norm="mixed_per_tensor", restart="fresh"),
    "Backsolve, seminorm, fresh": sn.Backsolve(restart="fresh"),
    "Backsolve, published slice, fresh": sn.Backsolve(norm=oversized_seminorm, restart="fresh"),
    "Backsolve, mixed norm, carry": sn.Backsolve(norm="mixed"),
    "Backsolve, seminorm, carry": sn.Backsolve(),
    "Quadrature": sn.Quadrature(),
    "Reversible": sn.Reversible(),
    "Interpolating": sn.Interpolating(),
    "Replay": sn.Replay(),
    "Checkpointed(10)": sn.Checkpointed(10),
    "Direct": sn.Direct(),
}
#: The solvers of adjoints that need one of their own.
SOLVERS: dict[str, Solver] = {"Reversible": sn.ReversibleRK("dopri5")}
#: Left out of short measurements.
LENGTHY = (
    "Backsolve, mixed per tensor, fresh",
    "Backsolve, mixed norm, carry",
    "Reversible",
    "Interpolating",
    "Checkpointed(10)",
)
#: The rtol of the reference is `TIGHTER` times the tightest that is measured. A second gradient, whose rtol is `LOOSER`
#: times that of the reference, shows how accurate the reference is.
TIGHTER, LOOSER = 1e-3, 100.0
MAX_STEPS, TIME_LIMIT = 100_000, 3600.0


@dataclass(frozen=True)
class PrecisionPlan:
    """What is measured for an experiment.

    Attributes:
        tolerances: pairs of rtol and atol.
        adjoints: names from `ADJOINTS`.
        batch: number of samples.
        fitted: iterations of regression with which the pendulum's network is initialised.
        repeats: timed passes of each adjoint, interleaved, after an untimed first pass; with 0 the first pass is timed.
        memory: whether peak memory is measured, which takes an additional, slow pass.
        grid: steps between two knots in the reference of the neural CDE.
        reduced: what is smaller than in the runs of the preset, in words.
    """

    tolerances: tuple[tuple[float, float], ...]
    adjoints: tuple[str, ...]
    batch: int
    fitted: int = 0
    repeats: int = 3
    memory: bool = True
    grid: int = 16
    reduced: str = ""

    def __post_init__(self) -> None:
        unknown = [name for name in self.adjoints if name not in ADJOINTS]
        if unknown:
            raise ValueError(f"adjoints: expected names from {', '.join(ADJOINTS)}, found {unknown[0]!r}")
        if not self.tolerances or not self.adjoints:
            raise ValueError("tolerances, adjoints: expected at least one of each")

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))


class Size(NamedTuple):
    """How much of an experiment is measured."""

    batch: int
    levels: tuple[float, ...]  # factors of the row's tolerances
    repeats: int
    memory: bool = False


#: QUICK takes well under a minute for all three on one core, THOROUGH some minutes for each. The reference of the
#: neural CDE is accurate to better than a thousandth, which is not enough to compare tight tolerances.
QUICK = {"ncde": Size(27, (10.0, 1.0), 0), "cnf": Size(8, (1.0, 0.1), 0), "hnn": Size(32, (1.0, 0.1), 0)}
THOROUGH = {
    "ncde": Size(32, (10.0, 1.0, 0.1), 2),
    "cnf": Size(8, (10.0, 1.0, 0.1), 2),
    "hnn": Size(64, (1.0, 0.1, 0.01), 3, memory=True),
}


def plan_of(settings: Settings) -> PrecisionPlan:
    """The plan for a row of a preset: short for `quick`, thorough for the others."""
    quick = settings.preset == "quick"
    size = (QUICK if quick else THOROUGH)[settings.experiment]
    tolerances = tuple((_rounded(settings.rtol * x), _rounded(settings.atol * x)) for x in size.levels)
    left_out = LENGTHY if quick else ()
    adjoints = [name for name in ADJOINTS if settings.experiment == "hnn" or "published slice" not in name]
    batch = min(settings.batch, size.batch)
    fitted = min(settings.fitted, 100) if quick else settings.fitted
    reduced = [
        f"a batch of {batch} instead of {settings.batch}" if batch < settings.batch else "",
        f"{fitted} iterations of regression instead of {settings.fitted}" if fitted < settings.fitted else "",
        f"{', '.join(left_out)} left out" if left_out else "",
        "one pass of each" if size.repeats == 0 else "",
        "" if size.memory else "memory not measured",
    ]
    chosen = tuple(name for name in adjoints if name not in left_out)
    text = "; ".join(filter(None, reduced))
    return PrecisionPlan(tolerances, chosen, batch, fitted, size.repeats, size.memory, reduced=text)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


class Answer(NamedTuple):
    """A loss, and the model that computed it and counted its solves."""

    ys: Tensor
    model: Any

    @property
    def stats(self) -> Stats:
        """The sum over all solves, including their backward passes."""
        back = [each.backward for each in self.model.stats if each.backward is not None]
        total = Stats.total(self.model.stats)
        return dataclasses.replace(total, report=BackwardReport(stats=Stats.total(back) if back else None))


class OneBatch:
    """A batch of a task, which is solved and differentiated with the options of each contender."""

    def __init__(self, task: ModelTask[Any, Any], experiment: str):
        self.task, self.experiment = task, experiment
        self.rows = torch.arange(task.samples("train"))
        fields = [part.field for part in task.model.modules() if isinstance(getattr(part, "field", None), nn.Module)]
        self.found = list({id(x): x for field in fields for x in field.parameters()}.values())

    @property
    def leaf(self) -> Tensor:
        return self.found[0]

    @property
    def targets(self) -> list[Tensor]:
        """All parameters. Those outside the fields come first; their gradients come from initial values and outputs."""
        inside = {id(x) for x in self.found}
        return [*(x for x in self.task.model.parameters() if id(x) not in inside), *self.found]

    def loss(self, value: Tensor) -> Tensor:
        return value

    def solve(self, contender: Contender, max_steps: int, **more: Any) -> Answer:
        options = {"solver": contender.solver, "adjoint": contender.adjoint, "compile": contender.compile}
        options |= {"rtol": contender.rtol, "atol": contender.atol, "max_steps": max_steps, "record": False}
        if getattr(contender.adjoint, "fresh", False):  # the published procedure, also in the forward pass
            options = solve_options(self.experiment, "mixed") | options
        self.task.model.options = options | more
        return Answer(self.task.loss("train", self.rows)[0], self.task.model)

    def widened(self) -> OneBatch:
        """The same batch in float64."""
        task = copy.copy(self.task)
        task.model = copy.deepcopy(task.model).double()
        task.data = {"train": _wide(task.data["train"])}
        return OneBatch(task, self.experiment)


def _wide(samples: Any) -> Any:
    if isinstance(samples, Tensor):
        return samples.double() if samples.is_floating_point() else samples
    return dataclasses.replace(samples, x=samples.x.double())


class SingleDraws(TorchFunctionMode):
    """Draws noise in float32 and converts it, because other numbers would be drawn in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.rand_like, torch.randn_like) and args[0].dtype == torch.float64:
            return func(args[0].float(), *args[1:], **(kwargs or {})).double()
        return func(*args, **(kwargs or {}))


def reference_of(batch: OneBatch, plan: PrecisionPlan, restore: Callable[[], None]) -> tuple[Reference, Tensor]:
    """The reference gradient in float64, and how far a gradient with looser tolerances is from it."""
    wide = batch.widened()

    def gradient(looser: bool) -> Tensor:
        restore()
        contender, controller, _ = _tight(batch, plan, looser)
        with default_double(), SingleDraws():
            loss = wide.solve(contender, MAX_STEPS, controller=controller).ys
        return flat_gradient(torch.autograd.grad(loss, wide.targets, allow_unused=True), wide.targets)

    best = gradient(looser=False)
    good_to = relative_error(gradient(looser=True), best)
    contender, _, note = _tight(batch, plan, looser=False)
    return Reference("float64", contender.rtol or float("nan"), good_to, note), best


def _tight(batch: OneBatch, plan: PrecisionPlan, looser: bool) -> tuple[Contender, Controller, str]:
    """The options with which a reference is solved, and their description.

    The field of the neural CDE has kinks (ReLU). Its Jacobian jumps there, which the error control of a forward solve
    does not see, and solvers lose their order. Small steps of low order give the most accurate gradient. The others use
    dopri8. Its steps end on all outputs, because its interpolating polynomial has a lower order.
    """
    if batch.experiment == "ncde":
        steps = plan.grid // 2 if looser else plan.grid
        return Contender(sn.Replay(), Bosh3()), sn.FixedStep(1 / steps), f"bosh3, {steps} steps between knots"
    rtol, atol = (x * TIGHTER * (LOOSER if looser else 1.0) for x in min(plan.tolerances))
    ts = getattr(batch.task, "ts", None)
    controller = sn.Integral(step_to=() if ts is None else ts[1:-1].tolist())
    return Contender(sn.Replay(), Dopri8(), rtol=rtol, atol=atol), controller, f"dopri8, rtol {rtol:.0e}"


def compared(batch: OneBatch, plan: PrecisionPlan) -> tuple[Reference, list[dict[str, Any]]]:
    """Measure every adjoint with every tolerance, interleaved, from the same random numbers."""
    snapshot = Snapshot(list(batch.task.model.modules()), [], batch.leaf.device)
    try:
        reference, gradient = reference_of(batch, plan, snapshot.restore)
        both = [(name, *level) for level in plan.tolerances for name in plan.adjoints]
        contenders = [
            Contender(ADJOINTS[name], SOLVERS.get(name, Dopri5()), False, rtol, atol) for name, rtol, atol in both
        ]
        # The limits are so high that no contender is left out.
        course = Course(batch, snapshot, gradient, plan.repeats, TIME_LIMIT, MAX_STEPS, 0.0, False, plan.memory)
        found = course.run(contenders)
    finally:
        snapshot.restore()
    return reference, [{"name": name} | row.as_dict() for (name, _, _), row in zip(both, found, strict=True)]


def _plain(reference: Reference) -> dict[str, Any]:
    """The reference without its tolerance, which the note contains if there is one."""
    return {"dtype": reference.dtype, "good_to": reference.good_to, "note": reference.note}


def batch_of(
    settings: Settings, batch: int, fitted: int = 0, root: Root = None, weights: TrainedWeights | None = None
) -> OneBatch:
    """One batch of an experiment, with trained weights if there are some."""
    fitted = fitted if weights is None else 0
    task = task_of(settings.changed(sizes=(batch, 1, 1), batch=batch, fitted=fitted), root)
    if weights is not None:
        task.model.load_state_dict(dict(weights.tensors))
    return OneBatch(task, settings.experiment)


def up_to_date(path: Path, asked: dict[str, Any], weights: TrainedWeights | None) -> bool:
    """Whether a file has what is asked for, with these weights or, if there are none any more, with any."""
    if not path.exists():
        return False
    there = read_json(path)
    same = {name: there.get(name) for name in asked} == asked
    return same and (weights is None or there.get("weights") == weights.about)


def measure(settings: Settings, out: Path, root: Root = None, plan: PrecisionPlan | None = None) -> Path:
    """Measure an experiment and write `out/precision-<experiment>.json`, unless that file exists with the same plan.

    Arguments:
        settings: those of the experiment's first row. The data, model, seed and preset are used.
        out: the folder of run folders. If a run in it has a checkpoint, its weights are used.
        root: the folder with data.
        plan: what to measure; by default the plan of the preset.
    """
    plan = plan_of(settings) if plan is None else plan
    path = out / f"precision-{settings.experiment}.json"
    asked = {"settings": settings.as_json(), "plan": plan.as_json()}
    weights = trained(settings, out)
    if up_to_date(path, asked, weights):
        return path
    batch = batch_of(settings, plan.batch, plan.fitted, root, weights)
    reference, found = compared(batch, plan)
    problem = {"samples": batch.task.samples("train"), "field_parameters": sum(x.numel() for x in batch.found)}
    problem["parameters"] = sum(x.numel() for x in batch.targets)
    about = {"circumstances": circumstances(), "problem": problem, "reference": _plain(reference)}
    about["weights"] = None if weights is None else dict(weights.about)
    write_json(path, asked | about | {"rows": found})
    return path


def measure_all(preset: str, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> None:
    """Measure the first row of each experiment of a preset; `progress` is called with a line about each."""
    first = {row.experiment: row for row in reversed(rows(preset))}
    for experiment in EXPERIMENTS:
        if experiment in first:
            if progress is not None:
                progress(f"work and precision: {first[experiment].row}")
            measure(first[experiment], out, root)
