"""The tables of the paper, made from run folders.

Each number is given as published; published-compatible, counted as in the paper and with the error of its code;
correct; and as seminode's best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from . import measures, published
from .grid import Column, Table
from .measures import Gathered, ProblemRuns, Quantity, gather, tested
from .modes import ALL_MODES
from .reductions import reductions
from .regime import evaluations_per_solve, in_regime
from .repeats import Noise
from .settings import EXPERIMENTS
from .spread import Spread, ratio, saving
from .store import Finished

__all__ = ["Table", "ncde", "cnf", "hnn", "rejections", "savings", "libraries", "all_tables", "reductions"]


class Truth(NamedTuple):
    """A column: the name of its group, its own name, and the index of the column that it is compared with."""

    group: str
    name: str
    base: int


TRUTHS = (
    Truth("as published", "mixed", 0),
    Truth("as published", "seminorm", 0),
    Truth("published-compatible", "mixed", 2),
    Truth("published-compatible", "seminorm", 2),
    Truth("correct", "mixed", 4),
    Truth("correct", "seminorm", 4),
    Truth("best", "best", 4),
)
#: Narrow screens leave out what is counted as in the paper.
COLUMNS = (Column(""), *(Column(truth.name, truth.group, truth.base == 2) for truth in TRUTHS))
Cells = list[Spread | None]
#: Every speed-up is shown.
UNKNOWN = Noise()


@dataclass(frozen=True)
class Line:
    """A quantity with one number per column: of the paper, of runs counted as in the paper, and counted correctly."""

    label: str
    paper: Callable[[published.Norm], Spread | None]
    compatible: Quantity
    true: Quantity
    show: Callable[[Spread], str] = Spread.count

    def cells(self, problem: ProblemRuns) -> Cells:
        row = problem.published
        said: Cells = [None, None] if row is None else [self.paper(row.mixed), self.paper(row.seminorm)]
        counted = [problem.spread(mode, self.compatible) for mode in ("mixed", problem.compatible)]
        return said + counted + [problem.spread(mode, self.true) for mode in ("mixed", "seminorm", "best")]

    def texts(self, cells: Cells) -> list[str]:
        return ["" if cell is None else self.show(cell) for cell in cells]


def _nothing(norm: published.Norm) -> None:
    return None


def _relative(
    cells: Cells, compare: Callable[[Spread | None, Spread | None], float | None], show: Callable[[float], str]
) -> list[str]:
    """Every column compared with the mixed norm of its group. The columns of mixed norms stay empty."""
    found = [compare(cell, cells[truth.base]) for cell, truth in zip(cells, TRUTHS, strict=True)]
    bases = {truth.base for truth in TRUTHS}
    return ["" if x is None or i in bases else show(x) for i, x in enumerate(found)]


def _repeats(problem: ProblemRuns) -> list[str]:
    row = problem.published
    said = ["", ""] if row is None else [str(row.mixed.nfe.n), str(row.seminorm.nfe.n)]
    modes = ("mixed", problem.compatible, "mixed", "seminorm", "best")
    return said + [str(len(problem.modes.get(mode, ()))) for mode in modes]


NFE = Line("backward NFE in training", lambda norm: norm.nfe, measures.published_nfe, measures.true_nfe)
FORWARD = Line("forward NFE in training", _nothing, measures.forward_nfe, measures.forward_nfe)
MEMORY = Line("peak memory (MB)", _nothing, measures.memory, measures.memory, lambda spread: spread.text(0, scale=1e-6))
SECONDS = Line(
    "seconds in training",
    _nothing,
    measures.seconds,
    measures.seconds,
    lambda spread: spread.text(1 if spread.mean < 100 else 0),
)
DRIFTED = Line("drifted backward solves", _nothing, measures.drifted, measures.drifted)
REJECTED = Line("rejected steps", lambda norm: norm.rejected, tested("published_rejected"), tested("backward_rejected"))
ACCEPTED = Line("accepted steps", lambda norm: norm.accepted, tested("published_accepted"), tested("backward_accepted"))


def _per_batch(problem: ProblemRuns) -> Line:
    row = problem.published
    each = 1.0 if row is None else 1.0 / row.updates

    def paper(norm: published.Norm) -> Spread:
        return Spread(norm.nfe.mean * each, (norm.nfe.sd or 0.0) * each, norm.nfe.n)

    return Line("backward NFE per batch", paper, measures.published_per_batch, measures.true_per_batch)


def _heading(problem: ProblemRuns) -> str:
    row = problem.published
    if row is None:
        return f"{problem.title} (not in the paper)"
    return problem.title if row.name == problem.row else f"{problem.title} – compared with the paper's {row.title}"


def _faster(problem: ProblemRuns, spent: Cells, noise: Noise) -> list[str]:
    """Speed-ups over the mixed norm."""
    return _relative(spent, lambda less, more: ratio(more, less), partial(noise.told, problem.experiment))


def _training_rows(problem: ProblemRuns, noise: Noise) -> list[tuple[str, ...]]:
    quality = problem.quality
    judged = Line(quality.name, lambda norm: norm.quality, quality, quality, lambda spread: spread.text(quality.digits))
    evaluations, spent = NFE.cells(problem), SECONDS.cells(problem)
    per_batch = _per_batch(problem)
    found = [
        [judged.label, *judged.texts(judged.cells(problem))],
        [NFE.label, *NFE.texts(evaluations)],
        [per_batch.label, *per_batch.texts(per_batch.cells(problem))],
        ["saved compared with mixed (%)", *_relative(evaluations, saving, "{:.1f}".format)],
        [FORWARD.label, *FORWARD.texts(FORWARD.cells(problem))],
        [SECONDS.label, *SECONDS.texts(spent)],
        ["speed-up over mixed", *_faster(problem, spent, noise)],
        ["runs", *_repeats(problem)],
    ]
    memory = MEMORY.cells(problem)
    if any(memory):  # it is not measured if runs share a process
        found.insert(-1, [MEMORY.label, *MEMORY.texts(memory)])
    drifted = DRIFTED.cells(problem)
    if any(cell is not None and cell.mean for cell in drifted):
        found.insert(-1, [DRIFTED.label, *DRIFTED.texts(drifted)])
    return [(_heading(problem),), *(tuple(row) for row in found)]


def _rejection_rows(problem: ProblemRuns) -> list[tuple[str, ...]]:
    row = problem.published
    rejected, accepted = REJECTED.cells(problem), ACCEPTED.cells(problem)
    said = [None, None] if row is None else [row.mixed.proportion, row.seminorm.proportion]
    shares = [*said, *(proportion(r, a) for r, a in zip(rejected[2:], accepted[2:], strict=True))]
    found = [
        [REJECTED.label, *REJECTED.texts(rejected)],
        [ACCEPTED.label, *ACCEPTED.texts(accepted)],
        ["rejected (%)", *("" if x is None else f"{x:.2f}" for x in shares)],
        ["runs", *_repeats(problem)],
    ]
    return [(f"{measures.KINDS[problem.experiment]}: {_heading(problem)}",), *(tuple(row) for row in found)]


def proportion(rejected: Spread | None, accepted: Spread | None) -> float | None:
    """Rejected steps among all steps, from the means, in per cent; `None` if there are no steps."""
    if rejected is None or accepted is None or rejected.mean + accepted.mean == 0:
        return None
    return 100 * rejected.mean / (rejected.mean + accepted.mean)


# Notes.

COUNTS = (
    "Mean ± sample standard deviation over seeds; k and M are thousands and millions. NFE is the number of function "
    "evaluations. An evaluation of the field with its vector–Jacobian product counts as one; so does a vector–Jacobian "
    "product alone if the evaluation was stored. Seconds are processor time if the model was trained on a CPU."
)
STEPS = (
    "Backward steps in one pass over the test set. Published-compatible: every sixth evaluation is taken for the end "
    "of a step. Correct and best: the steps that the solver took. The backward pass of best goes over the accepted "
    "steps of the forward pass."
)
DRIFT = "A backward solve has drifted if the initial state that it reconstructs differs from that of the forward solve."
LIBRARY = (
    "The other library has the same model, initial weights, batches, tolerances and tableau; its own step-size control "
    "and adjoint are used, without compiling. per_tensor is its default norm, which takes the maximum over all tensors "
    "of parameters; mixed takes all parameters as one vector, as in the paper. If a step of torchdiffeq ends exactly "
    "on a jump of a neural CDE, it misses all later jumps and rejects many steps there."
)
PENDULUM = (
    "The published-compatible seminorm slices the adjoint state as the paper's code does, with eight times the correct "
    "size. The correct seminorm leaves out exactly the parameters."
)


def _schedules(problems: Sequence[ProblemRuns]) -> str:
    """How the paper's count was computed for these runs."""
    found = {
        (run.settings["schedule"]["every"], len(run.metrics), measures.result(run)["epochs"])
        for problem in problems
        for run in problem.runs
        if measures.extrapolated(run)
    }
    if not found:
        return "Published-compatible, correct and best NFE are sums over all training steps, as the paper describes it."
    said = [
        f"{every} × the {passes} passes {_when(every)}: {every * passes} epochs instead of {epochs}"
        for every, passes, epochs in sorted(found)
    ]
    return (
        "Published-compatible NFE are extrapolated from evaluation passes over the training set, as in the paper "
        f"({'; '.join(said)}). Correct and best NFE are sums over all training steps."
    )


def _when(every: int) -> str:
    return "at every epoch" if every == 1 else f"at every {_nth(every)} epoch and the last"


def _nth(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _left_out(gathered: Gathered, experiment: str | None) -> list[str]:
    """A note on runs that were left out. Their names start with the experiment."""
    own = [f"{name} ({why})" for name, why in gathered.left_out.items() if name.startswith(experiment or "")]
    return [f"Left out: {', '.join(own)}."] if own else []


def _differing(problems: Sequence[ProblemRuns]) -> list[str]:
    return [
        f"Runs of {problem.row} differ in more than mode and seed: {', '.join(problem.differences)}."
        for problem in problems
        if problem.differences
    ]


def _training(
    name: str, title: str, runs: Sequence[Finished], notes: Sequence[str] = (), noise: Noise = UNKNOWN
) -> Table:
    gathered = gather(runs)
    problems = gathered.of(name)
    rows = [row for problem in problems for row in _training_rows(problem, noise)]
    said = [COUNTS, _schedules(problems), *notes] if problems else []
    if any(row[0] == DRIFTED.label for row in rows):
        said.append(DRIFT)
    said += _within(rows, name, noise)
    said += [*_left_out(gathered, name), *_differing(problems), *reductions(runs, name)]
    return Table(name, title, COLUMNS, tuple(rows), tuple(said))


def _within(rows: Sequence[Sequence[str]], experiment: str, noise: Noise) -> list[str]:
    """What ≈ 1 means, if it is there."""
    known = noise.of(experiment)
    if known is None or not any("≈ 1" in row for row in rows):
        return []
    kind = measures.KINDS[experiment]
    return [f"≈ 1: within the noise. The seconds of identical runs differ by up to {100 * known:.0f} % ({kind})."]


# The tables.


def ncde(runs: Sequence[Finished], noise: Noise = UNKNOWN) -> Table:
    """Accuracy and cost of the neural CDE, by tolerance."""
    return _training("ncde", "Neural CDE: accuracy and cost", runs, (), noise)


def cnf(runs: Sequence[Finished], noise: Noise = UNKNOWN) -> Table:
    """Bits per dimension and cost of the flows, by data and size."""
    note = "It is not known how the paper counted the evaluations of its flows, because no code was released."
    return _training("cnf", "Continuous normalising flows: bits/dim and cost", runs, [note], noise)


def hnn(runs: Sequence[Finished], noise: Noise = UNKNOWN) -> Table:
    """Error and cost of the Symplectic ODE-Net."""
    return _training("hnn", "Symplectic ODE-Net on the double pendulum: error and cost", runs, [PENDULUM], noise)


def rejections(runs: Sequence[Finished]) -> Table:
    """Steps of a pass over the test set, as the paper counts them and as they were."""
    gathered = gather(runs)
    rows = [row for problem in gathered.problems for row in _rejection_rows(problem)]
    notes = [STEPS, *_left_out(gathered, None), *_differing(gathered.problems)]
    return Table("rejections", "Accepted and rejected steps", COLUMNS, tuple(rows), tuple(notes))


def savings(runs: Sequence[Finished], noise: Noise = UNKNOWN) -> Table:
    """Backward evaluations saved compared with the mixed norm, and the speed-up; one line per row of the tables."""
    names = ("", "as published", "published-compatible", "correct", "best", "best: speed-up")
    columns = tuple(map(Column, names))
    rows, easy = [], []
    for problem in gather(runs).problems:
        cells = _relative(NFE.cells(problem), saving, "{:.1f} %".format)
        spent = _faster(problem, SECONDS.cells(problem), noise)
        if not in_regime(problem):
            easy.append(problem)
        title = problem.full_title + " *" * (not in_regime(problem))
        rows.append(((title, cells[1], cells[3], cells[5], cells[6], spent[6]), problem))
    notes = [_easy(easy)] if easy else []
    for name in EXPERIMENTS:
        notes += _within([row for row, problem in rows if problem.experiment == name], name, noise)
    return Table(
        "savings",
        "Backward evaluations saved, compared with the mixed norm",
        columns,
        tuple(row for row, _ in rows),
        tuple(notes),
    )


def _easy(problems: Sequence[ProblemRuns]) -> str:
    counts = dict.fromkeys(found.words() for found in map(evaluations_per_solve, problems) if found is not None)
    return f"* Regime not reached: with {', '.join(counts)}, little can be saved, so the paper's saving is not refuted."


def libraries(runs: Sequence[Finished]) -> Table:
    """The same models on the same batches with seminode and with other libraries: cost and quality, mode by mode."""
    gathered = gather(runs)
    modes = [mode for mode in ALL_MODES if any(mode in problem.modes for problem in gathered.peers)]
    names = ("", "backward NFE per batch", "forward NFE per batch", "seconds per update", "quality")
    rows: list[tuple[str, ...]] = []
    for peer in gathered.peers:
        rows.append((peer.full_title,))
        ours = next((problem for problem in gathered.problems if problem.row == peer.row), None)
        for mode in modes:
            for name, problem in (("seminode", ours), (str(peer.settings.library), peer)):
                if problem is not None and problem.modes.get(mode):
                    rows.append((f"{mode}, {name}", *_of_library(problem, mode)))
        if ours is not None and ours.modes.get("best"):
            rows.append(("best, seminode", *_of_library(ours, "best")))
    notes = [LIBRARY] if rows else []
    return Table(
        "libraries", "The same runs with other libraries", tuple(map(Column, names)), tuple(rows), tuple(notes)
    )


def _of_library(problem: ProblemRuns, mode: str) -> tuple[str, ...]:
    quantities = (
        measures.true_per_batch,
        lambda run: measures.forward_nfe(run) / measures.updates(run),
        lambda run: measures.seconds(run) / measures.updates(run),
    )
    texts = [((spread := problem.spread(mode, quantity)) and spread.count()) or "" for quantity in quantities[:2]]
    spent, quality = problem.spread(mode, quantities[2]), problem.spread(mode, problem.quality)
    return (*texts, spent.text(3) if spent else "", quality.text(problem.quality.digits) if quality else "")


def all_tables(runs: Sequence[Finished], noise: Noise = UNKNOWN) -> list[Table]:
    """The tables of all experiments that have complete runs, and the table of steps.

    Raises:
        ValueError: if no run is complete.
    """
    gathered = gather(runs)
    if not gathered.problems:
        why = ", ".join(f"{name} ({reason})" for name, reason in gathered.left_out.items())
        raise ValueError(f"runs: expected a complete one, found {why or 'none at all'}")
    own = {"ncde": ncde, "cnf": cnf, "hnn": hnn}
    found = [*(make(runs, noise) for name, make in own.items() if gathered.of(name)), rejections(runs)]
    return [*found, libraries(runs)] if gathered.peers else found
