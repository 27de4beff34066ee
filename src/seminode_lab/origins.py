"""Where the savings of the seminorm come from: a controlled experiment, and a prediction of every saving.

A backward solve with the mixed norm is watched: which segment of the adjoint state sets the error ratio of each step,
and how large the ratio would be without the parameters. From that alone follows how many steps the seminorm will take,
before it is tried. The experiment varies what the paper's section 3.4 discusses: parameters per state, tolerances, the
scale of the loss and the depth of the network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import seminode as sn
from seminode.models import MatrixField, NeuralCDE
from seminode.norms import AdjointState, rms

from . import data as sets
from .counting import STRIDE
from .provenance import circumstances
from .store import read_json, write_json

FILE = "origins.json"
#: The constants of the controller of the paper.
SAFETY, LEAST, MOST, POWER = 0.9, 0.2, 10.0, 0.2
#: How the error of a step grows with its length. The field has kinks (ReLU), so the right-hand side of the adjoint
#: equation jumps, and one jump within a step makes an error in proportion to its length, whatever the solver's order.
ORDER = 1.0


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
        >>> steps_predicted([Longest(0.5, 1.0)] * 10, first=0.5)
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

    def options(self) -> dict[str, Any]:
        return {name: x for name, x in dataclasses.asdict(self).items() if name != "varied"}


def cases() -> Iterator[Case]:
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
    predicted: int  # of the seminorm
    by_params: float  # share of steps whose error ratio was set by the parameters

    @property
    def saving(self) -> float:
        return 100.0 * (1.0 - self.seminorm / self.mixed)

    @property
    def predicted_saving(self) -> float:
        return 100.0 * (1.0 - self.predicted / self.mixed)


BATCH = 64


def samples() -> sets.SeriesSet:
    """Some of the shipped series, of all speakers."""
    train, _ = sets.japanese_vowels()
    train = train.normalised(*train.statistics())
    rows = torch.arange(0, len(train), len(train) // BATCH)[:BATCH]
    return dataclasses.replace(train, x=train.x[rows], lengths=train.lengths[rows], labels=train.labels[rows])


def solved(case: Case, series: sets.SeriesSet, norm: Any) -> tuple[sn.Stats, sn.Record]:
    """The statistics and the record of the backward pass of an untrained model."""
    torch.manual_seed(0)
    field = MatrixField(case.hidden, series.channels + 1, width=case.width, layers=case.layers)
    adjoint = sn.Backsolve(norm=norm, restart="fresh")
    options: dict[str, Any] = {"rtol": case.rtol, "atol": case.atol, "adjoint": adjoint, "record": True}
    model = NeuralCDE(series.channels, case.hidden, 9, field=field, path="linear", **options)
    loss = functional.cross_entropy(model(series.x, lengths=series.lengths), series.labels)
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
    predicted = stats.nfe - STRIDE * len(steps) + STRIDE * steps_predicted(ordered, abs(first.t1 - first.t0))
    share = sum(size.params > size.state for size in steps) / len(steps)
    return Outcome(stats.nfe, solved(case, series, "seminorm")[0].nfe, predicted, share)


def explained(found: Sequence[Outcome]) -> float:
    """The share of the variance of the savings that the prediction explains.

    Example:
        >>> explained([Outcome(100, 50, 50, 1.0), Outcome(100, 100, 100, 0.0)])
        1.0
    """
    mean = sum(each.saving for each in found) / len(found)
    spread = sum((each.saving - mean) ** 2 for each in found)
    left = sum((each.saving - each.predicted_saving) ** 2 for each in found)
    return 1.0 - left / spread if spread else math.nan


def measure(out: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Make the experiment and write `out/origins.json`, unless that file exists with the same cases."""
    path, chosen = out / FILE, list(cases())
    asked = [dataclasses.asdict(case) for case in chosen]
    if path.exists() and read_json(path).get("cases") == asked:
        return path
    if progress is not None:
        progress(f"where savings come from: {len(chosen)} cases")
    series = samples()
    found = [outcome(case, series) for case in chosen]
    rows = [dataclasses.asdict(each) for each in found]
    about = {"circumstances": circumstances(), "batch": BATCH, "explained": explained(found)}
    write_json(path, {"cases": asked, "outcomes": rows, **about})
    return path
