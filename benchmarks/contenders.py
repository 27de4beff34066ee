"""The contenders of the race: libraries and their settings as plain data, which processes refer to by name.

Settings are those that a user who wants speed would choose. Further settings are included so that each library is
represented by its best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """A library with a solver and an adjoint; the runner of the library interprets `options`."""

    library: str
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.library}: {self.setting}"


ADJOINTS = ("Direct", "Replay", "Backsolve", "Quadrature", "Interpolating")
TSIT5 = ("Direct, tsit5", {"adjoint": "Direct", "solve": {"solver": "tsit5"}})
#: Another library's gradient may be more accurate than the tolerance. A tighter tolerance is then one of our settings.
TIGHTER = ("Direct, tsit5, tighter", {"adjoint": "Direct", "tighter": 0.3, "solve": {"solver": "tsit5"}})
#: Further settings of seminode by the name of the problem: (setting, options).
EXTRAS: dict[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    # For a field with kinks, many steps of low order are better than a few steps of high order.
    "cde": (
        ("Direct, bosh3", {"adjoint": "Direct", "solve": {"solver": "bosh3"}}),
        ("Direct, bosh3, fixed", {"adjoint": "Direct", "solve": {"solver": "bosh3"}, "fixed": 1 / 3}),
        # The same if Direct needs too much memory.
        ("Replay, bosh3, tighter", {"adjoint": "Replay", "tighter": 0.5, "solve": {"solver": "bosh3"}}),
        ("Replay, bosh3, fixed", {"adjoint": "Replay", "solve": {"solver": "bosh3"}, "fixed": 1 / 3}),
    ),
    "flow": (
        ("Direct, norm auto", {"adjoint": "Direct", "solve": {"norm": "auto"}}),
        ("Direct, norm auto, tighter", {"adjoint": "Direct", "tighter": 0.6, "solve": {"norm": "auto"}}),
    ),
}


def seminode(problem: str) -> list[Contender]:
    settings = [(name, {"adjoint": name}) for name in ADJOINTS]
    extras = (TSIT5, TIGHTER, *EXTRAS.get(problem.split("-")[0], ()))
    # In eager mode the last two adjoints are too similar to the third to justify the time.
    eager = [Contender("seminode", name, options) for name, options in (*settings[:3], *extras)]
    return eager + [
        Contender("seminode", f"{name}, compiled", {**options, "compile": True}, compiled=True)
        for name, options in (*settings, *extras)
    ]


def torchdiffeq(problem: str) -> list[Contender]:
    library = "torchdiffeq"
    entries = [
        Contender(library, "adjoint", {"adjoint": True}),
        Contender(library, "adjoint, seminorm", {"adjoint": True, "norm": "seminorm"}),
        Contender(library, "direct", {"adjoint": False}),
        Contender(
            library,
            "adjoint, seminorm, field compiled",
            {"adjoint": True, "norm": "seminorm", "compile": True},
            compiled=True,
        ),
        Contender(library, "direct, field compiled", {"adjoint": False, "compile": True}, compiled=True),
    ]
    if problem.startswith("cde"):
        # torchdiffeq misses a jump if a step ends exactly on it, and all later ones, so it may be better without jumps.
        entries += [
            Contender(library, "adjoint, seminorm, no jumps", {"adjoint": True, "norm": "seminorm", "jumps": False}),
            Contender(library, "direct, no jumps", {"adjoint": False, "jumps": False}),
            Contender(library, "direct, bosh3", {"adjoint": False, "method": "bosh3"}),
            Contender(library, "direct, rk4, fixed", {"adjoint": False, "method": "rk4", "fixed": 1 / 2}),
        ]
    return entries


def torchode(problem: str) -> list[Contender]:
    if problem.split("-")[0] != "small":
        return []  # torchode supports only states of shape (batch, features), without jumps
    return [
        Contender("torchode", "AutoDiffAdjoint", {"adjoint": "AutoDiffAdjoint"}),
        Contender("torchode", "AutoDiffAdjoint, compiled", {"adjoint": "AutoDiffAdjoint", "compile": True}, True),
        Contender("torchode", "JointBacksolveAdjoint", {"adjoint": "JointBacksolveAdjoint"}),
        Contender("torchode", "BacksolveAdjoint", {"adjoint": "BacksolveAdjoint"}),
    ]


def torchcde(problem: str) -> list[Contender]:
    if not problem.startswith("cde"):
        return []
    return [
        Contender("torchcde", "adjoint", {"adjoint": True}),
        Contender("torchcde", "direct", {"adjoint": False}),
    ]


def diffrax(problem: str) -> list[Contender]:
    adjoints = {
        "RecursiveCheckpoint": {"adjoint": "RecursiveCheckpointAdjoint"},
        "RecursiveCheckpoint, all kept": {"adjoint": "RecursiveCheckpointAdjoint", "keep": True},
        "Backsolve, seminorm": {"adjoint": "BacksolveAdjoint"},
        "Direct": {"adjoint": "DirectAdjoint"},
    }
    entries = [
        Contender("diffrax", f"{name}, Dopri5", {**options, "solver": "Dopri5"}, True)
        for name, options in adjoints.items()
    ]
    others = ("RecursiveCheckpoint", "RecursiveCheckpoint, all kept", "Backsolve, seminorm")
    solvers = ("Tsit5", "Bosh3") if problem.startswith("cde") else ("Tsit5",)
    return entries + [
        Contender("diffrax", f"{name}, {solver}", {**adjoints[name], "solver": solver}, True)
        for solver in solvers
        for name in others
    ]


#: For problems whose passes take minutes: the usual settings of each library and those that win on shorter problems.
SHORT_LIST = {
    "seminode": (
        *("Direct", "Replay", "Direct, compiled", "Direct, bosh3, compiled", "Replay, compiled"),
        *("Replay, bosh3, tighter, compiled", "Replay, bosh3, fixed, compiled", "Backsolve, compiled"),
    ),
    "torchdiffeq": ("adjoint", "adjoint, seminorm", "direct"),
    "torchcde": ("adjoint", "direct"),
    "diffrax": ("RecursiveCheckpoint, Dopri5", "Backsolve, seminorm, Dopri5", "Backsolve, seminorm, Bosh3"),
}
SHORTENED = {"cde-1024"}


def contenders(problem: str) -> list[Contender]:
    """All contenders that support a problem, by its name."""
    libraries = (seminode, torchdiffeq, torchode, torchcde, diffrax)
    entries = [contender for library in libraries for contender in library(problem)]
    if problem not in SHORTENED:
        return entries
    return [each for each in entries if each.setting in SHORT_LIST.get(each.library, ())]


def named(problem: str, name: str) -> Contender:
    return next(contender for contender in contenders(problem) if contender.name == name)
