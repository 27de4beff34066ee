"""The content of the report, which the templates lay out: sentences, tables, findings and figures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import measures, repeats, tables
from ..grid import Column, Table
from ..intervals import published_saving
from ..measures import Gathered, ProblemRuns, result
from ..reductions import NAMES, reductions
from ..regime import evaluations_per_solve, in_regime
from ..repeats import Noise
from ..settings import EXPERIMENTS, PRESETS, Settings, all_runs
from ..sources import sentences
from ..spread import Spread, counted, ratio
from ..store import Finished
from .claims import claims
from .errata import errata
from .findings import (
    ALIKE,
    NOTHING,
    SPACE,
    Conclusion,
    compatible_saving,
    correct_saving,
    listed,
    percent,
    saving_interval,
    verdict,
)
from .objections import objections
from .pictures import Shown, missing

#: The groups of columns and their explanations.
TRUTHS = (
    ("as published", "the numbers of the paper"),
    (
        "published-compatible",
        "our runs, counted as in the paper and, for the pendulum, with the error in its code",
    ),
    (
        "correct",
        "our runs with the norms as the paper defines them; every evaluation and step is counted when it is made",
    ),
    ("best", "our runs with seminode's choice, an adjoint that goes over the accepted steps of the forward pass"),
)


def content(
    gathered: Gathered, runs: Sequence[Finished], pictures: list[Shown], trouble: str, folder: Path
) -> dict[str, Any]:
    """The variables of the templates."""
    presets = sorted({run.settings["preset"] for run in runs})
    reduced = reductions(runs)
    noise = repeats.noise_of(folder)
    own = {table.name: _without(table, reduced) for table in tables.all_tables(runs, noise)}
    return {
        "presets": presets,
        "known_presets": [name for name in presets if name in PRESETS],
        "summary": summary(gathered, runs, noise),
        "truths": TRUTHS,
        "savings": tables.savings(runs, noise),
        "bars": [_bars(problem, _several(gathered, problem), folder) for problem in gathered.problems],
        "tables": own,
        "experiments": [(name, own[name]) for name in EXPERIMENTS if name in own],
        "claims": claims(gathered, noise, folder),
        "errata": errata(gathered),
        "objections": objections(gathered, folder, [picture.name for picture in pictures]),
        "sources": sentences(folder),
        "nothing": percent(NOTHING, 0),
        "alike": f"{ALIKE:.0f}",
        "gains": gains(gathered, noise),
        "repeats": repeats.table(folder),
        "libraries": tables.libraries([*runs, *(run for peer in gathered.peers for run in peer.runs)]),
        "reductions": reduced,
        "left_out": dict(gathered.left_out),
        "still_missing": missing_runs(runs, presets, gathered.left_out),
        "circumstances": circumstances(runs),
        "runs": run_table(runs),
        "pictures": pictures,
        "missing": missing(pictures),
        "trouble": trouble,
    }


def _without(table: Table, notes: Sequence[str]) -> Table:
    """The table without notes that are in another section of the page."""
    return replace(table, notes=tuple(note for note in table.notes if note not in notes))


# Sentences.


def summary(gathered: Gathered, runs: Sequence[Finished], noise: Noise) -> list[str]:
    """The result in a few sentences."""
    minutes = sum(measures.seconds(run) for run in runs) / 60
    spent = f"{minutes:.1f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
    hours = sum(map(measures.core_hours, runs))
    counts = f"{counted(len(runs), 'complete run')} and {counted(len(gathered.problems), 'row')}"
    found = [
        f"{counts} of the paper's tables are compared. Training took {spent}; with preparation and evaluation, the "
        f"runs took {hours:.1f} core-hours{_apart(runs)}."
    ]
    found += [said for name in ("ncde", "cnf") for said in _saved(name, gathered.of(name))]
    found += [said for problem in gathered.of("hnn") for said in _pendulum(problem)]
    found += _best(gathered.problems, noise)
    tested = [
        finding for finding in errata(gathered) if finding.conclusion not in (Conclusion.UNTESTED, Conclusion.MEASURED)
    ]
    good = [finding for finding in tested if finding.conclusion is not Conclusion.REFUTED]
    found.append(
        f"These runs can test {len(tested)} errors and omissions of the paper and its code; {len(good)} are confirmed."
    )
    return found


def _apart(runs: Sequence[Finished]) -> str:
    """What the core-hours leave out: training of initial weights that is not itself a run of the report."""
    known = [run.settings for run in runs]
    firsts = (Settings.of_json(settings).before() for settings in known)
    apart = any(first is not None and first.as_json() not in known for first in firsts)
    return ", without the common training of initial weights" if apart else ""


def _saved(name: str, problems: Sequence[ProblemRuns]) -> list[str]:
    both = [(correct_saving(problem), problem) for problem in problems if problem.published]
    known = [(own, problem) for own, problem in both if own is not None]
    if not known:
        return []
    own = listed([percent(saved) for saved, _ in known])
    theirs = listed([percent(problem.published.saving) for _, problem in known if problem.published])
    where = f" (rtol {listed([f'{problem.settings.rtol:g}' for _, problem in known])})" if name == "ncde" else ""
    subject = {"ncde": "On the neural CDE", "cnf": "On flows"}[name]
    easy = [evaluations_per_solve(problem) for _, problem in known if not in_regime(problem)]
    counts = listed([found.words() for found in easy if found is not None]) if easy else ""
    note = f" The regime of the paper is not reached, with {counts}." if easy else ""
    return [
        f"{subject}, the seminorm saves {own} of the backward evaluations{where}; the paper reports {theirs}.{note}"
    ]


def _pendulum(problem: ProblemRuns) -> list[str]:
    own, theirs, row = correct_saving(problem), compatible_saving(problem), problem.published
    if own is None or row is None:
        return []
    slip = "" if theirs is None else f"{percent(theirs)} with the error in the paper's code and "
    return [
        f"On the pendulum, the paper reports a saving of {percent(row.saving)}. These runs save {slip}{percent(own)} "
        "with the seminorm as the paper defines it."
    ]


def _speed_up(problem: ProblemRuns) -> float | None:
    return ratio(problem.spread("mixed", measures.seconds), problem.spread("best", measures.seconds))


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _best(problems: Sequence[ProblemRuns], noise: Noise) -> list[str]:
    saved = [x for x in (correct_saving(problem, "best") for problem in problems) if x is not None]
    both = [(problem.experiment, _speed_up(problem)) for problem in problems]
    faster = [x for name, x in both if x is not None and not noise.hides(name, x)]
    if not saved or not faster:
        return []
    return [
        f"seminode's best saves {_range(saved, 1)}{SPACE}% of the backward evaluations. Its speed-up over the mixed "
        f"norm in training is {_range(faster, 2)}."
    ]


def missing_runs(runs: Sequence[Finished], presets: Sequence[str], begun: Collection[str] = ()) -> list[str]:
    """The runs of presets that are not complete, by row and mode, with their seeds."""
    done = {run.path.name for run in runs}
    found: dict[str, list[str]] = {}
    for settings in (each for preset in presets if preset in PRESETS for each in all_runs(preset)):
        if settings.name not in done:
            seed = f"{settings.seed}{' (begun)' * (settings.name in begun)}"
            found.setdefault(f"{settings.row}-{settings.mode}", []).append(seed)
    return [f"{name}: seed{'s' * (len(seeds) > 1)} {listed(seeds)}" for name, seeds in found.items()]


# Comparisons.


def _several(gathered: Gathered, problem: ProblemRuns) -> bool:
    """Whether the experiment of a row was made with several data sets."""
    return len({other.settings.data for other in gathered.of(problem.experiment)}) > 1


def _bars(problem: ProblemRuns, several: bool, folder: Path) -> dict[str, Any]:
    """The savings in each of the four columns and the verdict, for a small chart."""
    row = problem.published
    values = (
        None if row is None else row.saving,
        compatible_saving(problem),
        correct_saving(problem),
        correct_saving(problem, "best"),
    )
    bars = [
        {"index": i, "truth": truth, "text": percent(value), "width": f"{min(100.0, max(0.0, value)):.1f}"}
        for i, ((truth, _), value) in enumerate(zip(TRUTHS, values, strict=True))
        if value is not None
    ]
    own = saving_interval(problem)
    judged = None if row is None or own is None else verdict(problem, own, published_saving(row), folder)
    return {"title": _short_title(problem, several), "bars": bars, "verdict": judged}


def _short_title(problem: ProblemRuns, several: bool) -> str:
    """The name of a row that fits on a line of a phone; with its data if the experiment has several."""
    if problem.experiment == "hnn":
        return problem.title.capitalize()
    if problem.experiment == "ncde" and not several:
        return f"{measures.KINDS['ncde']}, rtol {problem.settings.rtol:g}"
    return problem.full_title.partition(", atol")[0]


def gains(gathered: Gathered, noise: Noise) -> Table:
    """Best compared with the paper's two norms: evaluations, seconds, memory and quality of the model."""
    modes = ("mixed", "seminorm", "best")
    measured = any(problem.spread(mode, measures.memory) for problem in gathered.problems for mode in modes)
    weighed = modes if measured else ()  # not if runs share a process
    columns = (
        Column(""),
        *(Column(name, "backward NFE saved") for name in ("seminorm", "best")),
        *(Column(name, "speed-up") for name in ("seminorm", "best")),
        *(Column(name, "peak memory (MB)", minor=True) for name in weighed),
        *(Column(name, "quality", minor=True) for name in ("mixed", "best")),
    )
    rows = []
    for problem in gathered.problems:
        seconds = {mode: problem.spread(mode, measures.seconds) for mode in modes}
        faster = (ratio(seconds["mixed"], seconds[mode]) for mode in ("seminorm", "best"))
        quality = problem.quality
        rows.append(
            (
                problem.full_title,
                *(_cell(correct_saving(problem, mode), "{:.1f} %") for mode in ("seminorm", "best")),
                *("" if x is None else noise.told(problem.experiment, x) for x in faster),
                *(_text(problem.spread(mode, measures.memory), 0, 1e-6) for mode in weighed),
                *(_text(problem.spread(mode, quality), quality.digits) for mode in ("mixed", "best")),
            )
        )
    memory = " Memory is the peak of the whole process, including data and libraries." if weighed else ""
    notes = (
        f"Savings and speed-ups are relative to the mixed norm, in training; on a CPU from processor time.{memory}",
        f"Quality: {listed([f'{quality.name} ({NAMES[name]})' for name, quality in measures.QUALITIES.items()])}.",
    )
    return Table("gains", "Best compared with the paper's norms", columns, tuple(rows), notes)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _text(spread: Spread | None, digits: int, scale: float = 1.0) -> str:
    return "" if spread is None else spread.text(digits, scale)


def run_table(runs: Sequence[Finished]) -> Table:
    """All runs of the report."""
    columns = tuple(map(Column, ("run", "epochs", "best epoch", "backward NFE", "seconds", "commit")))
    rows = []
    for run in runs:
        found, with_what = result(run), run.config.get("circumstances", {})
        nfe = Spread(measures.true_nfe(run)).count()
        spent = f"{measures.seconds(run):,.1f}"
        rows.append(
            (
                run.path.name,
                str(found["epochs"]),
                str(found["best_epoch"]) if found["best_epoch"] >= 0 else "last",
                nfe,
                spent,
                str(with_what.get("commit")),
            )
        )
    return Table("runs", "The runs", columns, tuple(rows))


def circumstances(runs: Sequence[Finished]) -> list[tuple[str, str]]:
    """The versions and the machine with which the runs were made; all values if they differ."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in run.config.get("circumstances", {}).items():
            found.setdefault(name, {})[str(value)] = None
        for name in ("device", "compile"):
            found.setdefault(name, {})[str(run.settings[name])] = None
    return [(name, ", ".join(values)) for name, values in found.items()]
