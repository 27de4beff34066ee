"""The claims of the paper, and whether the runs reproduce them."""

from __future__ import annotations

from collections.abc import Sequence

from .. import published
from ..measures import GAINS, Gathered, ProblemRuns, Quality, result, tested
from ..reductions import reduced
from ..spread import Spread
from ..tables import proportion
from .findings import ALIKE, NOTHING, Conclusion, Finding, compatible_saving, correct_saving, listed, percent, untested


def claims(gathered: Gathered) -> list[Finding]:
    return [
        _saves(gathered.of("ncde"), "ncde-saving", "The seminorm saves backward evaluations of neural CDEs"),
        _saves(gathered.of("cnf"), "cnf-saving", "The seminorm saves backward evaluations of flows"),
        _pendulum(gathered.of("hnn")),
        _quality(gathered.problems),
        _rejections(gathered.problems),
        _swing_up(gathered.of("hnn")),
    ]


def _together(conclusions: Sequence[Conclusion]) -> Conclusion:
    """The common conclusion if all agree, otherwise PARTLY."""
    return conclusions[0] if len(set(conclusions)) == 1 else Conclusion.PARTLY


def _saves(problems: Sequence[ProblemRuns], name: str, title: str) -> Finding:
    experiment = name.split("-")[0]
    rows = [row for row in published.ROWS if row.experiment == experiment]
    said = f"The paper reports savings of {listed([f'{percent(row.saving)} ({row.title})' for row in rows])}."
    found, conclusions = [], []
    for problem in problems:
        own, row = correct_saving(problem), problem.published
        if own is None or row is None:
            continue
        if own < NOTHING <= row.saving:
            # Less data, fewer epochs or a smaller model may be the reason; this does not refute the paper.
            conclusions.append(Conclusion.REFUTED if reduced(problem) else Conclusion.FAILS)
        else:
            conclusions.append(Conclusion.HOLDS if own >= row.saving - ALIKE else Conclusion.PARTLY)
        found.append(f"{percent(own)} on {problem.title} (paper: {percent(row.saving)})")
    if not found:
        return untested(name, title, said, "There are no runs of both norms.")
    return Finding(name, title, said, "Counted correctly, these runs save:", _together(conclusions), tuple(found))


def _pendulum(problems: Sequence[ProblemRuns]) -> Finding:
    row = next(row for row in published.ROWS if row.experiment == "hnn")
    name, title = "hnn-saving", "The seminorm saves backward evaluations of the pendulum's network"
    said = f"The paper reports a saving of {percent(row.saving)}."
    found, conclusions = [], []
    for problem in problems:
        own, theirs = correct_saving(problem), compatible_saving(problem)
        if own is None:
            continue
        slip = "" if theirs is None else f"{percent(theirs)} with the slice in the paper's code; "
        found.append(f"{slip}{percent(own)} with the seminorm as the paper defines it")
        conclusions.append(Conclusion.FAILS if own < NOTHING else Conclusion.HOLDS)
    if not found:
        return untested(name, title, said, "There are no runs of both norms.")
    return Finding(name, title, said, "These runs save:", _together(conclusions), tuple(found))


def _worse(quality: Quality, own: Spread, base: Spread) -> bool:
    """Whether the quality is worse by more than the deviation over seeds."""
    lost = (base.mean - own.mean) if quality.higher else (own.mean - base.mean)
    return lost > max(own.sd or 0.0, base.sd or 0.0)


def _quality(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "quality", "Models are as good with the seminorm"
    said = "In the paper, test accuracy, bits/dim and error of the two norms are similar."
    found, conclusions = [], []
    for problem in problems:
        quality = problem.quality
        own, base = (problem.spread(mode, quality) for mode in ("seminorm", "mixed"))
        if own is None or base is None or own.sd is None or base.sd is None:
            continue
        texts = (spread.text(quality.digits) for spread in (base, own))
        found.append(f"{' and '.join(texts)} on {problem.title}, {quality.name}")
        conclusions.append(Conclusion.FAILS if _worse(quality, own, base) else Conclusion.HOLDS)
    if not found:
        return untested(name, title, said, "No row has two seeds of both norms, so random variation is unknown.")
    return Finding(name, title, said, "With the mixed norm and the seminorm:", _together(conclusions), tuple(found))


def _rejections(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "rejections", "The seminorm reduces the proportion of rejected steps"
    fewer = sum(row.seminorm.proportion < row.mixed.proportion for row in published.ROWS)
    said = f"In the paper this holds in {fewer} of {len(published.ROWS)} rows."
    found, conclusions = [], []
    for problem in problems:
        shares = [
            proportion(*(problem.spread(mode, tested(f"backward_{kind}")) for kind in ("rejected", "accepted")))
            for mode in ("mixed", "seminorm")
        ]
        if shares[0] is None or shares[1] is None or not any(shares):
            continue
        found.append(f"{percent(shares[0])} and {percent(shares[1])} on {problem.title}")
        conclusions.append(
            Conclusion.HOLDS if shares[1] < shares[0] else Conclusion.REFUTED if reduced(problem) else Conclusion.FAILS
        )
    if not found:
        return untested(name, title, said)
    text = "Steps rejected by the solver, with the mixed norm and the seminorm:"
    return Finding(name, title, said, text, _together(conclusions), tuple(found))


def _swing_up(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "swing-up", "The trained network swings the pendulum up"
    said = "In the paper, a network trained with the seminorm swings the true pendulum up and keeps it upright."
    settled, tried = {}, 0
    for run in (run for problem in problems for run in problem.runs):
        for gains, outcome in (result(run).get("control") or {}).items():
            settled.setdefault(gains, []).append((outcome or {}).get("settled"))
        tried += "control" in result(run)
    if not tried:
        return untested(name, title, said)
    there = {gains: [t for t in times if t is not None] for gains, times in settled.items()}
    found = [
        f"{len(there[gains])} of {len(times)} networks with {GAINS.get(gains, gains)}"
        + (f", the fastest in {min(there[gains]):.1f} s" if there[gains] else "")
        for gains, times in settled.items()
    ]
    all_up, any_up = (test(bool(times) for times in there.values()) for test in (all, any))
    conclusion = Conclusion.HOLDS if all_up else Conclusion.PARTLY if any_up else Conclusion.FAILS
    return Finding(
        name, title, said, "Both cosines reach their targets within 0.01 and stay there:", conclusion, tuple(found)
    )
