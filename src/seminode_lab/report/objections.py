"""What a sceptical reader objects to such a reproduction, and what the runs and measurements in a folder answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from .. import measures
from ..ablation import file_of
from ..loss_scale import measured, nats
from ..measures import Gathered, ProblemRuns
from ..origins import FILE as ORIGINS
from ..origins import ORDER
from ..reductions import reduced
from ..regime import evaluations_per_solve
from ..repeats import noise_of
from ..side_by_side import measured_rows
from ..spread import counted
from ..store import StoreError, read_json
from .findings import SPACE, Conclusion, Finding, listed, percent, saving_interval

#: Per cent: an accuracy from which on a neural CDE counts as trained.
TRAINED = 84.0
#: Seeds from which on intervals are meaningful, and backward evaluations per block from which on a flow is hard.
SEEDS, HARD = 3, 100.0


def objections(gathered: Gathered, folder: Path, figures: Collection[str]) -> list[Finding]:
    """The objections with their answers. `figures` are the names of the figures on the page."""
    found = [
        _training(gathered.of("ncde")),
        _regime(gathered.of("cnf"), folder),
        _pendulum(gathered.of("hnn")),
        _solver(gathered, folder),
        _origin(folder),
        _parts(folder),
        _gradients(folder),
        _seeds(gathered),
        _timing(gathered, folder),
    ]
    return [each if each.figure in figures else _without_figure(each) for each in found]


def _without_figure(found: Finding) -> Finding:
    return Finding(found.name, found.title, found.said, found.found, found.conclusion, found.items)


def _state(good: Collection[bool]) -> Conclusion:
    """Answered if all is as it should be, in part if some of it is, otherwise open."""
    if not any(good):
        return Conclusion.OPEN
    return Conclusion.ANSWERED if all(good) else Conclusion.ANSWERED_PARTLY


def _training(problems: list[ProblemRuns]) -> Finding:
    said = f"The models must be trained: at least {TRAINED:.0f}{SPACE}% in all modes on the data at hand."
    items, good = [], []
    for problem in problems:
        means = {mode: problem.spread(mode, problem.quality) for mode in ("mixed", "seminorm", "best")}
        own = [spread.mean for spread in means.values() if spread is not None]
        row = problem.published
        beside = "" if row is None else f"; paper: {row.mixed.quality.mean:.1f} and {row.seminorm.quality.mean:.1f}"
        texts = [f"{mode} {spread.mean:.1f}" for mode, spread in means.items() if spread is not None]
        items.append(f"{problem.title}: {', '.join(texts)}{beside}")
        good.append(len(own) == 3 and min(own) >= TRAINED)
    text = "Test accuracy in per cent:" if items else "There are no complete runs."
    title = "“Your neural CDEs are not trained as far as ours”"
    return Finding("objection-training", title, said, text, _state(good), tuple(items), "f1a-accuracy")


def _regime(problems: list[ProblemRuns], folder: Path) -> Finding:
    said = (
        "The solves must be hard, as the paper's are (see the numbers below): here, at least "
        f"{HARD:.0f} backward evaluations per block."
    )
    items, hard = [], []
    for problem in problems:
        counts, own = evaluations_per_solve(problem), saving_interval(problem)
        if counts is None or own is None:
            continue
        items.append(
            f"{problem.title}: {counts[0]:.0f} per block with the mixed norm (paper: {counts[1]:.0f}); the seminorm "
            f"saves {own.text(1, f'{SPACE}%')}"
        )
        if counts[0] >= HARD:
            hard.append(len({run.settings["seed"] for run in problem.runs}))
        items += _scaled(folder, problem)
    # Counts differ between seeds as much as between easy and hard solves.
    state = Conclusion.OPEN if not hard else _state([True, max(hard) >= SEEDS])
    text = "Backward evaluations:"
    if not items:
        text = "There are no complete runs of both norms. The figure shows counts that were made during training."
    title = "“Your flows are too easy”"
    return Finding("objection-regime", title, said, text, state, tuple(items), "flow-regime")


def _scaled(folder: Path, problem: ProblemRuns) -> list[str]:
    """What the seminorm saves with the loss in other units, if that was measured."""
    found = measured(folder, problem.settings)
    if found is None:
        return []
    dims, own = found
    said = [f"{percent(each.saving)} at {each.factor:.3g} ({each.mixed} evaluations)" for each in own]
    return [
        "the saving depends on the scale of the loss, which the paper does not name; on one batch, with the loss in "
        f"bits per dimension times a factor ({nats(dims):.3g} makes it nats per image): {listed(said)}"
    ]


def _pendulum(problems: list[ProblemRuns]) -> Finding:
    said = "A saving that one network shows, or does not show, may be an accident of its weights."
    items, good = [], []
    for problem in problems:
        own = saving_interval(problem)
        size = "at reduced size" if reduced(problem) else "at published size"
        if own is not None:
            items.append(f"the seminorm as defined saves {own.text(1, f'{SPACE}%')}, {size}")
            good += [own.n >= SEEDS, not reduced(problem)]
    text = (
        "A window takes 98 evaluations if every interval needs two steps, and 56 if one is enough. The figure shows, "
        "for one network, how that changes with the interval, the tolerance, the scale of the loss and the window."
    )
    title = "“One pendulum proves nothing”"
    return Finding("objection-pendulum", title, said, text, _state(good), tuple(items), "knife")


def _solver(gathered: Gathered, folder: Path) -> Finding:
    said = "The same models must be solved, and trained, on the same batches with the library of the paper."
    trained, measured = {peer.row for peer in gathered.peers}, measured_rows(folder)
    items = []
    for problem in gathered.problems:
        ways = ["trained" * (problem.row in trained), "on one batch" * (problem.row in measured)]
        items.append(f"{problem.full_title}: {listed(list(filter(None, ways))) if any(ways) else 'not yet'}")
    text = "With torchdiffeq beside ours, in the tables of libraries:"
    good = [problem.row in trained | measured for problem in gathered.problems]
    return Finding("objection-solver", "“It is your solver, not ours”", said, text, _state(good), tuple(items))


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return read_json(path)
    except StoreError:
        return None  # the figure names the damage


def _origin(folder: Path) -> Finding:
    said = "A saving that nobody can predict is not understood."
    title, found = "“Where does the saving come from?”", _read(folder / ORIGINS)
    held = ((found or {}).get("explained") or {}).get("held out") or {}
    share = held.get(f"{ORDER:g}")
    if share is None:
        return Finding("objection-origin", title, said, "It was not measured here.", Conclusion.OPEN)
    text = (
        f"From the errors that one solve with the mixed norm records, the saving of the seminorm is predicted; the "
        f"prediction explains {percent(100 * share, 0)} of the variance of the savings on cases that the rule was not "
        "chosen on (untrained neural CDEs)."
    )
    good = Conclusion.ANSWERED if share >= 0.8 else Conclusion.ANSWERED_PARTLY
    return Finding("objection-origin", title, said, text, good, figure="origins")


def _parts(folder: Path) -> Finding:
    said = "The mode best changes the adjoint, the norm, the step-size control and the engine at once."
    there = [name for name in measures.KINDS if (folder / file_of(name)).exists()]
    title = "“Best is many changes at once”"
    text = f"The table of the parts of best takes them apart for {counted(len(there), 'experiment')}, on one batch."
    if not there:
        text = "It was not measured here."
    return Finding("objection-parts", title, said, text, _state([name in there for name in measures.KINDS]))


def _gradients(folder: Path) -> Finding:
    said = "Fewer evaluations are worth nothing if the gradient becomes worse."
    title = "“You save evaluations and lose accuracy”"
    items, good = [], []
    for name, kind in measures.KINDS.items():
        found = _read(folder / f"precision-{name}.json")
        if found is not None:
            weights = found.get("weights")
            state = "untrained" if not weights else f"weights after {weights['updates']:,} updates"
            items.append(f"{kind}: {state}")
        good.append(found is not None and bool(found.get("weights")))
    text = "The figures of work and precision show the error of every gradient over its cost. Measured with:"
    if not items:
        text = "It was not measured here."
    return Finding("objection-gradients", title, said, text, _state(good), tuple(items), "precision-ncde")


def _seeds(gathered: Gathered) -> Finding:
    said = f"Differences need intervals, and intervals need at least {SEEDS} seeds."
    found = [(problem, len(problem.modes.get("mixed", ()))) for problem in gathered.problems]
    items = tuple(f"{problem.full_title}: {counted(n, 'seed')}" for problem, n in found)
    text = "All comparisons are paired by seed, and verdicts follow from intervals (Student’s t, 95 %):"
    state = _state([n >= SEEDS for _, n in found])
    return Finding("objection-seeds", "“Too few seeds”", said, text, state, items)


def _timing(gathered: Gathered, folder: Path) -> Finding:
    said = "Seconds of several versions on a shared machine cannot be compared."
    runs = [run for problem in gathered.problems for run in problem.runs]
    commits = {str(run.config.get("circumstances", {}).get("commit")) for run in runs}
    text = (
        f"The runs are from {counted(len(commits), 'commit')}. Seconds are processor time, which other processes "
        "change less than elapsed time, though they share caches; compilation is apart. Evaluations are exact. The "
        "table of the parts of best has the fastest of several passes in turn, in one process."
    )
    noise, items = noise_of(folder), []
    for name in dict.fromkeys(problem.experiment for problem in gathered.problems):
        known = noise.of(name)
        told = "not measured" if known is None else f"by up to {percent(100 * known)}"
        items.append(f"{measures.KINDS[name]}: {told}")
    text += " By how much the seconds of identical runs differ:"
    good = len(commits) == 1 and not any("not measured" in item for item in items)
    state = Conclusion.ANSWERED if good else Conclusion.ANSWERED_PARTLY
    return Finding("objection-timing", "“Your timings are noise”", said, text, state, tuple(items), "costs")
