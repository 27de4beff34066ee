"""The claims of the paper, and whether the runs reproduce them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .. import measures, published
from ..intervals import Interval, chance_of_difference, paired_difference, paired_ratio, published_saving
from ..measures import GAINS, Gathered, ProblemRuns, result, tested
from ..regime import evaluations_per_solve, in_regime
from ..repeats import Noise
from ..sizes import sizes
from ..tables import UNKNOWN, proportion
from ..uprightness import ROUGHLY, UPRIGHT, in_words, of_run
from .findings import (
    ALIKE,
    NOTHING,
    SPACE,
    Conclusion,
    Finding,
    compatible_saving,
    correct_saving,
    listed,
    percent,
    saving_interval,
    scaled_saving,
    untested,
    verdict,
)

PERCENT = f"{SPACE}%"


def claims(gathered: Gathered, noise: Noise = UNKNOWN, folder: Path | None = None) -> list[Finding]:
    """The claims. `folder` may have measurements of the scale of a loss."""
    return [
        _saves(gathered.of("ncde"), "ncde-saving", "The seminorm saves backward evaluations of neural CDEs", folder),
        _saves(gathered.of("cnf"), "cnf-saving", "The seminorm saves backward evaluations of flows", folder),
        _pendulum(gathered.of("hnn")),
        _quality(gathered.problems),
        _rejections(gathered.problems),
        _swing_up(gathered.of("hnn")),
        _time(gathered.problems, noise),
        _size(gathered.of("cnf")),
        _ratio(gathered.problems),
    ]


def _together(conclusions: Sequence[Conclusion]) -> Conclusion:
    """The common conclusion of the rows in the regime of the paper, if they agree, otherwise PARTLY."""
    found = {each for each in conclusions if each is not Conclusion.REGIME} or {Conclusion.REGIME}
    return found.pop() if len(found) == 1 else Conclusion.PARTLY


def _saves(problems: Sequence[ProblemRuns], name: str, title: str, folder: Path | None) -> Finding:
    experiment = name.split("-")[0]
    rows = [row for row in published.ROWS if row.experiment == experiment]
    said = f"The paper reports savings of {listed([f'{percent(row.saving)} ({row.title})' for row in rows])}."
    found, conclusions = [], []
    for problem in problems:
        own, row = saving_interval(problem), problem.published
        if own is None or row is None:
            continue
        theirs = published_saving(row)
        conclusions.append(verdict(problem, own, theirs, folder))
        found.append(f"{own.text(1, PERCENT)} on {problem.title} (paper: {theirs.text(1, PERCENT)}){_regime(problem)}")
        other = scaled_saving(problem, folder)
        if other is not None and other.saving >= NOTHING and conclusions[-1] is Conclusion.UNDECIDED:
            found[-1] += (
                f"; with {other.factor:.3g} times the loss in bits per dimension, one batch saves "
                f"{percent(other.saving)}, and the paper does not name the scale of its loss"
            )
    if not found:
        return untested(name, title, said, "There are no runs of both norms.")
    text = "Counted correctly and paired by seed, with intervals of 95 %, these runs save:"
    return Finding(name, title, said, text, _together(conclusions), tuple(found))


def _regime(problem: ProblemRuns) -> str:
    counts = evaluations_per_solve(problem)
    if counts is None or in_regime(problem):
        return ""
    return f"; with {counts.words()}, little can be saved"


def _pendulum(problems: Sequence[ProblemRuns]) -> Finding:
    row = next(row for row in published.ROWS if row.experiment == "hnn")
    name, title = "hnn-saving", "The seminorm saves backward evaluations of the pendulum's network"
    said = f"The paper reports a saving of {percent(row.saving)}."
    found, conclusions = [], []
    for problem in problems:
        own, theirs = saving_interval(problem), compatible_saving(problem)
        if own is None:
            continue
        slip = "" if theirs is None else f"{percent(theirs)} with the slice in the paper's code; "
        found.append(f"{slip}{own.text(1, PERCENT)} with the seminorm as the paper defines it")
        conclusions.append(verdict(problem, own, published_saving(row)))
    if not found:
        return untested(name, title, said, "There are no runs of both norms.")
    return Finding(name, title, said, "These runs save:", _together(conclusions), tuple(found))


def _quality(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "quality", "Models are as good with the seminorm"
    hnn = next(row for row in published.ROWS if row.experiment == "hnn")
    times = hnn.seminorm.quality.mean / hnn.mixed.quality.mean
    chance = chance_of_difference(hnn.mixed, hnn.seminorm)
    said = (
        "In the paper, test accuracy, bits/dim and error of the two norms are similar. The exception is the pendulum, "
        f"whose error is {times:.1f} times as large with the seminorm of its code; by chance alone, means differ as "
        f"much with a probability of {chance:.2f}."
    )
    found, conclusions = [], []
    for problem in problems:
        quality = problem.quality
        change = paired_difference(problem, "seminorm", "mixed", quality)
        base = problem.spread("mixed", quality)
        if change is None or base is None or not change.known:
            continue
        found.append(f"{change.text(quality.digits)} on {problem.title}, {quality.name}, mixed {base.mean:.4g}")
        conclusions.append(_alike(change, quality.higher, _margin(problem)))
    if not found:
        return untested(name, title, said, "No row has two seeds of both norms, so random variation is unknown.")
    text = "The seminorm minus the mixed norm, paired by seed, with intervals of 95 %:"
    return Finding(name, title, said, text, _together(conclusions), tuple(found))


def _margin(problem: ProblemRuns) -> float:
    """The loss of quality that does not matter: twice the larger deviation over seeds in the paper."""
    row = problem.published
    return 0.0 if row is None else 2 * max(norm.quality.sd or 0.0 for norm in (row.mixed, row.seminorm))


def _alike(change: Interval, higher: bool, margin: float) -> Conclusion:
    """Whether an interval of differences shows that nothing is lost. That it contains zero does not show it."""
    best, worst = (-change.high, -change.low) if higher else (change.low, change.high)
    if best > 0.0:
        return Conclusion.FAILS
    return Conclusion.HOLDS if worst <= margin else Conclusion.UNDECIDED


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
            Conclusion.HOLDS if shares[1] < shares[0] else Conclusion.FAILS if in_regime(problem) else Conclusion.REGIME
        )
    if not found:
        return untested(name, title, said)
    text = "Steps rejected by the solver, with the mixed norm and the seminorm:"
    return Finding(name, title, said, text, _together(conclusions), tuple(found))


def _swing_up(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "swing-up", "The trained network swings the pendulum up"
    said = "In the paper, a network trained with the seminorm swings the true pendulum up and keeps it upright."
    runs = [run for problem in problems for run in problem.runs if "control" in result(run)]
    if not runs:
        return untested(name, title, said)
    found = {gains: [of_run(run, gains) for run in runs] for gains in GAINS}
    bounds = {each.bound for own in found.values() for each in own if each is not None}
    roughly = Conclusion.PARTLY if ROUGHLY in bounds else Conclusion.FAILS
    conclusion = Conclusion.HOLDS if UPRIGHT in bounds else roughly
    items = tuple(f"with {GAINS[gains]}: {in_words(own)}" for gains, own in found.items())
    text = "Networks that bring both angles near their targets and keep them there until the end (20 s):"
    return Finding(name, title, said, text, conclusion, items)


def _time(problems: Sequence[ProblemRuns], noise: Noise) -> Finding:
    name, title = "time", "Training takes roughly half the time"
    said = "According to the paper, the seminorm roughly halves the time of training."
    found, conclusions = [], []
    for problem in problems:
        own = paired_ratio(problem, "mixed", "seminorm", measures.seconds)
        if own is None:
            continue
        hidden = noise.hides(problem.experiment, own.mean)
        within = ", within the noise: identical runs differ by up to "
        within += percent(100 * (noise.of(problem.experiment) or 0.0), 0)
        found.append(f"{own.text(2)} on {problem.title}{within * hidden}")
        faster = not hidden and (own.low > 1.0 if own.known else own.mean > 1.0 + NOTHING / 100)
        half = own.high >= 2.0 if own.known else own.mean >= 2.0 - ALIKE / 100
        if not faster:
            undecided = Conclusion.UNDECIDED if own.known and half else Conclusion.FAILS
            conclusions.append(undecided if in_regime(problem) else Conclusion.REGIME)
        else:
            conclusions.append(Conclusion.HOLDS if half else Conclusion.PARTLY)
    if not found:
        return untested(name, title, said)
    text = "Seconds of training with the mixed norm, divided by those with the seminorm, paired by seed"
    text += ":" if noise.largest else " (how much the seconds of identical runs differ was not measured):"
    return Finding(name, title, said, text, _together(conclusions), tuple(found))


def _size(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "size", "Larger flows need more evaluations, and fewer more with the seminorm"
    rows = [row for row in published.ROWS if row.name.startswith("cnf-mnist")]
    sizes = listed([f"{row.mixed.nfe.count()} and {row.seminorm.nfe.count()} ({row.title})" for row in rows])
    said = f"Backward evaluations in the paper, with the mixed norm and the seminorm: {sizes}."
    found: dict[str, list[tuple[int, float, float]]] = {}
    for problem in problems:
        counts = [problem.spread(mode, measures.true_per_batch) for mode in ("mixed", "seminorm")]
        hidden = dict(problem.settings.model).get("hidden", 64)
        if counts[0] is not None and counts[1] is not None:
            found.setdefault(problem.settings.data, []).append((hidden, counts[0].mean, counts[1].mean))
    several = {data: sorted(each) for data, each in found.items() if len(each) > 1}
    if not several:
        return untested(name, title, said, "These runs have one size of each flow.")
    items = tuple(
        f"{mixed:.0f} and {semi:.0f} per batch with {hidden} channels on {measures.DATA.get(data, data)}"
        for data, each in several.items()
        for hidden, mixed, semi in each
    )
    good = [each[-1][1] > each[0][1] and each[-1][2] < each[-1][1] for each in several.values()]
    conclusion = _together([Conclusion.HOLDS if x else Conclusion.FAILS for x in good])
    return Finding(name, title, said, "With the mixed norm and the seminorm:", conclusion, items)


def _ratio(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "ratio", "The saving grows with the number of parameters per channel of the state"
    said = "The paper suggests this as an explanation of its savings, and plots six points that agree with it (F6)."
    found = []
    for problem in problems:
        own = correct_saving(problem)
        if own is not None:
            d, p = sizes(problem.settings)
            found.append(((1 + 2 * d + p) / (1 + 2 * d), own, problem))
    found.sort(key=lambda each: each[0])
    if not found:
        return untested(name, title, said, "There are no runs of both norms.")
    items = tuple(f"{percent(own)} at a ratio of {ratio:,.0f} on {problem.title}" for ratio, own, problem in found)
    reached = [(ratio, own) for ratio, own, problem in found if own >= NOTHING or in_regime(problem)]
    ratios = {round(ratio, 6) for ratio, _ in reached}
    if len(ratios) < 3:
        text = (
            f"The rows in the regime of the paper have {len(ratios)} different ratios, too few for a trend. Savings, "
            "counted correctly:"
        )
        return Finding(name, title, said, text, Conclusion.UNDECIDED, items)
    rank = rank_correlation(*zip(*reached, strict=True))
    text = (
        f"Over the rows in the regime of the paper, the rank correlation is {rank:.2f}. The savings, correctly counted:"
    )
    conclusion = Conclusion.HOLDS if rank > 0.7 else Conclusion.PARTLY if rank > 0.3 else Conclusion.FAILS
    return Finding(name, title, said, text, conclusion, items)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation.

    >>> round(rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 2)
    0.5
    """
    from scipy.stats import spearmanr

    found = float(spearmanr(x, y)[0])  # pyright: ignore[reportArgumentType]
    return 0.0 if math.isnan(found) else found
