"""The settings of runs and the presets: settings for every row of the paper's tables, every mode and every seed.

The preset `paper` has the published settings. All reductions of the other presets are in their settings, so that the
report can list them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .modes import ALL_MODES, MODES, adjoint_name
from .peers import LIBRARIES
from .schedule import Schedule

EXPERIMENTS = ("ncde", "cnf", "hnn")
#: The data sets of each experiment.
DATA_SETS = {
    "ncde": ("speech_commands", "japanese_vowels"),
    "cnf": ("mnist", "mnist14", "cifar10", "digits"),
    "hnn": ("pendulum",),
}
#: The tolerances of the neural CDE's three rows.
TOLERANCES = ((1e-3, 1e-6), (1e-4, 1e-7), (1e-5, 1e-8))


@dataclass(frozen=True)
class CommonStart:
    """Training that provides the initial weights of all runs with the same seed, whatever their mode and tolerance.

    It uses the mode `best`, and its own tolerances if they are given, otherwise the loosest of the neural CDE.
    """

    schedule: Schedule
    sizes: tuple[int, int, int] | None = None
    rtol: float | None = None
    atol: float | None = None


@dataclass(frozen=True)
class Settings:
    """Everything that determines what a run computes.

    Attributes:
        data: name of the data set.
        sizes: samples of the three splits if they are reduced; `None` for all samples.
        model: arguments of the model's constructor that differ from the published ones.
        fitted: iterations of regression on true accelerations, with which the pendulum's network is initialised before
            it is trained through the solver; 0 in the published runs.
        start: training shared with other modes and tolerances; none in the published runs.
        adjoint: replaces the adjoint of the mode; for example `"Quadrature"` or `"Checkpointed(4)"`.
        shifts: samples by which training series of a neural CDE are shifted at random, at most; published: 0.
        library: the library that solves, if it is not seminode.
        probe: tolerance at which the backward evaluations of each block of a flow are counted on one batch, in all
            modes, whenever the model is evaluated in training; `None` for no count.
    """

    experiment: str
    preset: str
    data: str
    mode: str
    rtol: float
    atol: float
    batch: int
    schedule: Schedule
    seed: int = 0
    sizes: tuple[int, int, int] | None = None
    model: tuple[tuple[str, Any], ...] = ()
    fitted: int = 0
    compile: bool = False
    device: str = "cpu"
    adjoint: str | None = None
    start: CommonStart | None = None
    shifts: int = 0
    library: str | None = None
    probe: float | None = None

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise ValueError(f"experiment: {_expected(self.experiment, EXPERIMENTS)}")
        if self.mode not in ALL_MODES:
            raise ValueError(f"mode: {_expected(self.mode, ALL_MODES)}")
        if self.library is not None and self.library not in LIBRARIES:
            raise ValueError(f"library: {_expected(self.library, tuple(LIBRARIES))}")
        if self.adjoint is not None:
            object.__setattr__(self, "adjoint", adjoint_name(self.adjoint))

    @property
    def row(self) -> str:
        """The name of the row of the tables that the run belongs to. All seeds and modes of a row are compared."""
        hidden = dict(self.model).get("hidden")
        size = "" if self.experiment != "cnf" or hidden is None else f"-{hidden}"
        tolerance = f"-{self.rtol:g}" if self.experiment == "ncde" else ""
        return f"{self.experiment}-{self.data}{size}{tolerance}"

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        other = "" if self.adjoint is None else "-" + re.sub(r"[^a-z0-9.]+", "-", self.adjoint.lower()).strip("-")
        library = "" if self.library is None else f"-{self.library}"
        return f"{self.row}-{self.mode}{other}{library}-{self.seed}"

    def as_json(self) -> dict[str, Any]:
        """As JSON, without those later additions to the settings that have their defaults.

        A run folder from before an addition therefore holds the same settings as one from after it.
        """
        found = json.loads(json.dumps(dataclasses.asdict(self)))
        for schedule in filter(None, (found["schedule"], (found["start"] or {}).get("schedule"))):
            _without(schedule, {"decay": "plateau"})
        if found["start"] is not None:
            _without(found["start"], {"rtol": None, "atol": None})
        return _without(found, {"adjoint": None, "start": None, "shifts": 0, "library": None, "probe": None})

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Settings:
        given = dict(found)
        given["schedule"] = Schedule(**given["schedule"])
        given["sizes"] = _frozen(given["sizes"])
        if given.get("start") is not None:
            start = given["start"]
            own = {name: start.get(name) for name in ("rtol", "atol")}
            given["start"] = CommonStart(Schedule(**start["schedule"]), _frozen(start["sizes"]), **own)
        given["model"] = tuple((name, _frozen(value)) for name, value in given["model"])
        return cls(**given)

    def changed(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)

    def before(self) -> Settings | None:
        """The run that provides the initial weights of this one, if it is warm-started."""
        if self.start is None:
            return None
        rtol = self.start.rtol or max(self.rtol, TOLERANCES[0][0])
        atol = self.start.atol or max(self.atol, TOLERANCES[0][1])
        start = {
            "schedule": self.start.schedule,
            "sizes": self.start.sizes,
            "start": None,
            "adjoint": None,
            "library": None,
        }
        return self.changed(mode="best", rtol=rtol, atol=atol, **start)


def _without(found: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for name, default in defaults.items():
        if found[name] == default:
            del found[name]
    return found


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _expected(found: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(found, known, n=1)
    return f"expected one of {', '.join(known)}, found {found!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def modes_of(experiment: str) -> tuple[str, ...]:
    return MODES if experiment == "hnn" else tuple(mode for mode in MODES if mode != "published")


def _paper() -> Iterator[Settings]:
    cde = Schedule(epochs=200, lr=1.6e-3)
    for rtol, atol in TOLERANCES:
        yield Settings("ncde", "paper", "speech_commands", "mixed", rtol, atol, 1024, cde)
    flow = Schedule(epochs=100, lr=1e-3, weight_decay=0.0, every=1, warm_up=1000, selects=False, optimiser="Adam")
    for data, hidden in (("cifar10", 64), ("mnist", 32), ("mnist", 64), ("mnist", 128)):
        yield Settings("cnf", "paper", data, "mixed", 1e-5, 1e-5, 256, flow, model=(("hidden", hidden),))
    yield Settings("hnn", "paper", "pendulum", "mixed", 1e-4, 1e-4, 256, Schedule(epochs=50, lr=1e-3))


def _quick() -> Iterator[Settings]:
    """Shipped data and small models; takes minutes.

    The loosest tolerance is left out, because with it all norms need only one step per knot.
    """
    cde = Schedule(epochs=8, lr=2e-2, every=7)
    small = (("hidden", 24), ("width", 24))
    for rtol, atol in TOLERANCES[1:]:
        yield Settings(
            "ncde", "quick", "japanese_vowels", "mixed", rtol, atol, 216, cde, sizes=(216, 54, 185), model=small
        )
    flow = Schedule(epochs=2, lr=1e-2, weight_decay=0.0, every=1, warm_up=3, selects=False, optimiser="Adam")
    size = (("hidden", 16), ("scales", 2), ("blocks", 1))
    yield Settings("cnf", "quick", "digits", "mixed", 1e-5, 1e-5, 256, flow, sizes=(768, 256, 256), model=size)
    brief = Schedule(epochs=2, lr=1e-4, every=1)
    yield Settings("hnn", "quick", "pendulum", "mixed", 1e-4, 1e-4, 64, brief, sizes=(256, 64, 64), fitted=800)


def _cpu() -> Iterator[Settings]:
    """Real data and the published networks, except for the flow; takes hours.

    There are fewer samples, smaller batches and fewer epochs than in the paper. For its first hundred updates a neural
    CDE stays at the loss of random guessing, and rounding errors decide for how long. The modes are therefore
    warm-started from common weights: they are compared while the model learns, and training takes less time.
    """
    start = CommonStart(Schedule(epochs=20, lr=2e-3, every=10), sizes=(2048, 128, 256))
    given = {"sizes": (640, 128, 256), "compile": True, "start": start}
    for (rtol, atol), epochs in zip(TOLERANCES, (6, 6, 3), strict=True):
        cde = Schedule(epochs, lr=5e-4, every=epochs)
        yield Settings("ncde", "cpu", "speech_commands", "mixed", rtol, atol, 128, cde, **given)
    flow = Schedule(epochs=2, lr=2e-3, weight_decay=0.0, every=1, warm_up=20, selects=False, optimiser="Adam")
    size = (("hidden", 32), ("blocks", 1))
    yield Settings("cnf", "cpu", "mnist", "mixed", 1e-5, 1e-5, 32, flow, sizes=(640, 96, 192), model=size)
    brief = Schedule(epochs=10, lr=1e-3, every=5)
    yield Settings("hnn", "cpu", "pendulum", "mixed", 1e-4, 1e-4, 64, brief, sizes=(2560, 512, 512))


def _long() -> Iterator[Settings]:
    """Real data and the published networks, trained from scratch on all samples; takes days on two cores.

    A neural CDE is trained at the loosest tolerance. At the others, all modes continue from the weights that the mode
    `best` has reached with the same seed. Flows are trained in the mode `best` at a loose tolerance. Then all modes are
    compared at the published tolerance, from these weights. The flow that two cores can train until its solves are hard
    has one block, at half the published resolution. A second one, of digits, is smaller still. The third has the
    published resolution and width, but one block per scale instead of four, and is trained for 9,375 updates.
    """
    cde = Schedule(epochs=30, lr=1.6e-3, decay="cosine")
    given: dict[str, Any] = {"compile": True, "shifts": 8}
    yield Settings("ncde", "long", "speech_commands", "mixed", *TOLERANCES[0], 128, cde, **given)
    for rtol, atol in TOLERANCES[1:]:
        brief = Schedule(epochs=1, lr=1e-4)
        start = CommonStart(cde)
        yield Settings("ncde", "long", "speech_commands", "mixed", rtol, atol, 128, brief, start=start, **given)
    yield from _long_flows()
    yield Settings("hnn", "long", "pendulum", "mixed", 1e-4, 1e-4, 256, Schedule(epochs=50, lr=1e-3))


def _long_flows() -> Iterator[Settings]:
    adam: dict[str, Any] = {"weight_decay": 0.0, "selects": False, "optimiser": "Adam"}
    later = Schedule(epochs=1, lr=1e-4, every=1, **adam)
    one: tuple[tuple[str, Any], ...] = (("scales", 1), ("blocks", 1))

    def row(data: str, model: tuple[tuple[str, Any], ...], sizes: tuple[int, int, int], start: CommonStart) -> Settings:
        given: dict[str, Any] = {"sizes": sizes, "model": model, "start": start, "probe": 1e-5}
        return Settings("cnf", "long", data, "mixed", 1e-5, 1e-5, 32, later, **given)

    schedule = Schedule(epochs=3, lr=5e-2, every=1, warm_up=100, **adam)
    start = CommonStart(schedule, sizes=(3_200, 64, 64), rtol=1e-1, atol=1e-1)
    yield row("mnist14", (("hidden", 16), *one), (320, 64, 128), start)
    schedule = Schedule(epochs=40, lr=1e-2, every=2, warm_up=100, **adam)
    start = CommonStart(schedule, sizes=(1_408, 64, 64), rtol=1e-2, atol=1e-2)
    yield row("digits", (("hidden", 64), ("layers", 2), *one), (320, 64, 128), start)
    schedule = Schedule(epochs=5, lr=1e-3, every=1, warm_up=1000, **adam)
    start = CommonStart(schedule, sizes=(60_000, 512, 512), rtol=1e-3, atol=1e-3)
    yield row("mnist", (("hidden", 32), ("blocks", 1)), (640, 96, 192), start)


#: The rows of each preset, in the first mode and with the first seed, and the number of seeds of each experiment.
PRESETS: dict[str, tuple[tuple[Settings, ...], dict[str, int]]] = {
    "quick": (tuple(_quick()), {"ncde": 2, "cnf": 2, "hnn": 1}),
    "cpu": (tuple(_cpu()), {"ncde": 2, "cnf": 1, "hnn": 1}),
    "long": (tuple(_long()), {"ncde": 5, "cnf": 3, "hnn": 1}),
    "paper": (tuple(_paper()), {"ncde": 5, "cnf": 3, "hnn": 5}),
}


def rows(preset: str) -> tuple[Settings, ...]:
    """The rows of a preset, in the paper's order."""
    if preset not in PRESETS:
        raise ValueError(f"preset: {_expected(preset, tuple(PRESETS))}")
    return PRESETS[preset][0]


def all_runs(preset: str) -> list[Settings]:
    """Every row of a preset, in every mode and with every seed."""
    found = rows(preset)
    seeds = PRESETS[preset][1]
    return [
        row.changed(mode=mode, seed=seed)
        for row in found
        for mode in modes_of(row.experiment)
        for seed in range(seeds[row.experiment])
    ]
