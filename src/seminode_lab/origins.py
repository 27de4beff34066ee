"""Where the savings of the seminorm come from: a controlled experiment, and a prediction of every saving.

A backward solve with the mixed norm is watched: which segment of the adjoint state sets the error ratio of each step,
and how large the ratio would be without the parameters. From that alone follows how many steps the seminorm will take,
before it is tried. The experiment varies what the paper's section 3.4 discusses: parameters per state, tolerances, the
scale of the loss and the depth of the network.

The rule that predicts was chosen after several others had been tried, on the cases of the first seed. Its success there
says little. It is therefore judged by the other seeds, which have other weights and samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import seminode as sn
from seminode.models import MatrixField, NeuralCDE
from seminode.norms import AdjointState, rms

from . import data as sets
from .counting import STRIDE
from .provenance import circumstances
from .store import read_json, write_json
from .training import drifts

FILE = "origins.json"
#: The constants of the controller of the paper.
SAFETY, LEAST, MOST, POWER = 0.9, 0.2, 10.0, 0.2
#: How the error of a step grows with its length: the orders that were tried, and the one that was chosen. A reason for
#: it could be that the field has kinks (ReLU): the right-hand side of the adjoint equation jumps, and a jump within a
#: step makes an error in proportion to its length, whatever the order of the solver.
ORDERS, ORDER = (1.0, 1.5, 2.0, 3.0, 5.0), 1.0
#: The seed on which the order was chosen, and those that judge it.
CHOSEN_ON, HELD_OUT = 0, (1, 2)


class Sizes(NamedTuple):
    """The norm of an adjoint state, and that of its segments without and with the parameters only."""

    mixed: float
    state: float
    params: float


class SegmentWatch:
    """The mixed norm, which remembers the norms of the segments in all its calls."""

    def __init__(self) -> None:
        self.calls: list[Sizes] = []

    def __call__(self, y: AdjointState) -> Tensor:
        state, params = torch.maximum(rms(y.z), rms(y.a_z)), rms(y.a_params)
        both = torch.maximum(state, params)
        self.calls.append(Sizes(float(both), float(state), float(params)))
        return both

    def of_steps(self, ratios: Sequence[float]) -> list[Sizes]:
        """The calls that computed these error ratios; the others were made to choose the first step."""
        found, wanted = [], iter([*ratios, None])
        ratio = next(wanted)
        for call in self.calls:
            if ratio is not None and math.isclose(call.mixed, ratio, rel_tol=1e-6, abs_tol=1e-12):
                found.append(call)
                ratio = next(wanted)
        if ratio is not None:
            raise ValueError(f"ratios: expected {len(ratios)} among the calls of the norm, found {len(found)}")
        return found


class Longest(NamedTuple):
    """The longest accepted step between two knots, and its error ratio."""

    length: float
    ratio: float


def steps_predicted(knots: Sequence[Longest], first: float, order: float = ORDER) -> int:
    """The number of steps that the controller takes over intervals of length 1, each with its own size of errors.

    Every step ends at the next knot at the latest.

    Example:
        >>> steps_predicted([Longest(1.0, 0.5)] * 10, first=1.0)
        10
        >>> steps_predicted([Longest(0.5, 0.01)] * 10, first=0.5)  # two for the first interval, then steps are longer
        11
        >>> steps_predicted([Longest(0.5, 0.6)] * 10, first=0.5)
        20
    """
    step, steps = first, 0
    for longest in knots:
        left = 1.0
        while left > 1e-9:
            length = min(step, left)
            ratio = longest.ratio * (length / longest.length) ** order
            steps += 1
            if ratio <= 1.0:
                left -= length
            grown = MOST if ratio == 0.0 else SAFETY * ratio**-POWER
            step = length * min(MOST, max(grown, 1.0 if ratio < 1.0 else LEAST))
    return steps


@dataclass(frozen=True)
class Case:
    """A setting of the experiment: a neural CDE, its tolerances and the scale of its loss."""

    varied: str = "the base case"
    hidden: int = 24
    width: int = 24
    layers: int = 4
    rtol: float = 1e-4
    atol: float = 1e-7
    scale: float = 1.0
    seed: int = CHOSEN_ON  # of the weights and the samples
    smooth: bool = False  # whether softplus replaces ReLU

    def options(self) -> dict[str, Any]:
        return {name: x for name, x in dataclasses.asdict(self).items() if name not in ("varied", "seed", "smooth")}


def cases() -> Iterator[Case]:
    """Every variation with every seed, and with a smooth network with the first."""
    for seed, smooth in ((CHOSEN_ON, False), *((seed, False) for seed in HELD_OUT), (CHOSEN_ON, True)):
        yield from (dataclasses.replace(case, seed=seed, smooth=smooth) for case in variations())


def variations() -> Iterator[Case]:
    """One quantity after the other, from the same base case."""
    yield Case()
    values: dict[str, tuple[Any, ...]] = {
        "width": (2, 6, 80),
        "hidden": (4, 8, 90),
        "atol": (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-9),
        "scale": (1e-3, 1e-2, 1e-1, 1e1, 1e2, 1e3),
        "layers": (1, 2, 6),
    }
    for name, found in values.items():
        yield from (dataclasses.replace(Case(), varied=name, **{name: value}) for value in found)
    for rtol, atol in ((1e-3, 1e-6), (1e-5, 1e-8), (1e-5, 1e-5), (1e-3, 1e-9)):
        yield Case("rtol", rtol=rtol, atol=atol)


@dataclass(frozen=True)
class Outcome:
    """What was predicted from the solve with the mixed norm, and what the seminorm then needed."""

    mixed: int  # backward evaluations
    seminorm: int
    predictions: dict[str, int]  # of the seminorm, by order
    by_params: float  # share of steps whose error ratio was set by the parameters

    @property
    def saving(self) -> float:
        return 100.0 * (1.0 - self.seminorm / self.mixed)

    def predicted_saving(self, order: float = ORDER) -> float:
        return 100.0 * (1.0 - self.predictions[f"{order:g}"] / self.mixed)


BATCH = 64


def samples(seed: int) -> sets.SeriesSet:
    """Some of the shipped series, of all speakers. The first three seeds have no series in common."""
    train, _ = sets.japanese_vowels()
    train = train.normalised(*train.statistics())
    rows = torch.arange(seed, len(train), len(train) // BATCH)[:BATCH]
    return dataclasses.replace(train, x=train.x[rows], lengths=train.lengths[rows], labels=train.labels[rows])


def solved(case: Case, series: sets.SeriesSet, norm: Any) -> tuple[sn.Stats, sn.Record]:
    """The statistics and the record of the backward pass of an untrained model."""
    torch.manual_seed(case.seed)
    field = MatrixField(case.hidden, series.channels + 1, width=case.width, layers=case.layers)
    if case.smooth:
        for name, part in list(field.named_modules()):
            if isinstance(part, nn.ReLU):
                field.set_submodule(name, nn.Softplus())
    adjoint = sn.Backsolve(norm=norm, restart="fresh")
    options: dict[str, Any] = {"rtol": case.rtol, "atol": case.atol, "adjoint": adjoint, "record": True}
    model = NeuralCDE(series.channels, case.hidden, 9, field=field, path="linear", **options)
    loss = functional.cross_entropy(model(series.x, lengths=series.lengths), series.labels)
    with drifts():  # the published procedure drifts at loose tolerances
        (case.scale * loss).backward()
    stats, record = model.stats[0].backward, model.records[0].backward
    assert stats is not None
    assert record is not None
    return stats, record


def outcome(case: Case, series: sets.SeriesSet) -> Outcome:
    """Watch the mixed norm, predict the evaluations of the seminorm, and then count them."""
    watch = SegmentWatch()
    stats, record = solved(case, series, watch)
    steps = watch.of_steps(record.ratios)
    accepted = [size for size in steps if size.mixed <= 1.0]
    knots: dict[int, Longest] = {}
    for plan, size in zip(record.accepted, accepted, strict=True):
        knot, length = math.floor((plan.t0 + plan.t1) / 2), abs(plan.t1 - plan.t0)
        if knot not in knots or length > knots[knot].length:
            knots[knot] = Longest(length, size.state)
    first = record.accepted[0]
    ordered = [knots[knot] for knot in sorted(knots, reverse=True)]
    others = stats.nfe - STRIDE * len(steps)  # evaluations that belong to no step
    length = abs(first.t1 - first.t0)
    predictions = {f"{order:g}": others + STRIDE * steps_predicted(ordered, length, order) for order in ORDERS}
    share = sum(size.params > size.state for size in steps) / len(steps)
    return Outcome(stats.nfe, solved(case, series, "seminorm")[0].nfe, predictions, share)


def explained(found: Sequence[Outcome], order: float = ORDER) -> float | None:
    """The share of the variance of the savings that the prediction explains; `None` if all savings are equal.

    Example:
        >>> explained([Outcome(100, 50, {"1": 50}, 1.0), Outcome(100, 100, {"1": 100}, 0.0)])
        1.0
    """
    mean = sum(each.saving for each in found) / len(found)
    spread = sum((each.saving - mean) ** 2 for each in found)
    left = sum((each.saving - each.predicted_saving(order)) ** 2 for each in found)
    return 1.0 - left / spread if spread else None


def groups(chosen: Sequence[Case], found: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes on which the order was chosen, those that judge it, and those of smooth networks."""
    kinds = ["smooth" if case.smooth else "chosen on" if case.seed == CHOSEN_ON else "held out" for case in chosen]
    return {name: [x for x, kind in zip(found, kinds, strict=True) if kind == name] for name in dict.fromkeys(kinds)}


def measure(out: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Make the experiment and write `out/origins.json`, unless that file exists with the same cases."""
    path, chosen = out / FILE, list(cases())
    asked = [dataclasses.asdict(case) for case in chosen]
    if path.exists() and read_json(path).get("cases") == asked:
        return path
    if progress is not None:
        progress(f"where savings come from: {len(chosen)} cases")
    series = {seed: samples(seed) for seed in {case.seed for case in chosen}}
    found = [outcome(case, series[case.seed]) for case in chosen]
    rows = [dataclasses.asdict(each) for each in found]
    shares = {
        name: {f"{order:g}": explained(each, order) for order in ORDERS} for name, each in groups(chosen, found).items()
    }
    about = {"circumstances": circumstances(), "batch": BATCH, "explained": shares}
    write_json(path, {"cases": asked, "outcomes": rows, **about})
    return path
