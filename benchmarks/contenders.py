"""The contenders of the race: libraries and their settings as plain data, which processes refer to by name.

Settings are those that a user who wants speed would choose. Further settings are included so that each library is
represented by its best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .peer_contenders import checkpointing, forward_only, samplers
from .settings import Contender, both

ADJOINTS = ("Direct", "Replay", "Backsolve", "Quadrature", "Interpolating")
TSIT5 = ("Direct, tsit5", {"adjoint": "Direct", "solve": {"solver": "tsit5"}})
#: `Backsolve` with the solvers of diffrax's BacksolveAdjoint, and with looser tolerances of its backward pass:
#: "backward" has the factors on rtol and atol.
BACKSOLVES = (
    ("Backsolve, tsit5", {"adjoint": "Backsolve", "solve": {"solver": "tsit5"}}),
    ("Backsolve, backward 10", {"adjoint": "Backsolve", "backward": (10.0, 10.0)}),
    ("Backsolve, backward 30, 1000", {"adjoint": "Backsolve", "backward": (30.0, 1000.0)}),
)
#: Further settings of seminode by the first word of the problem: (setting, options).
EXTRAS: dict[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    # For a field with kinks, many steps of low order are better than a few steps of high order.
    "cde": (
        ("Direct, bosh3", {"adjoint": "Direct", "solve": {"solver": "bosh3"}}),
        ("Direct, bosh3, fixed", {"adjoint": "Direct", "solve": {"solver": "bosh3"}, "fixed": 1 / 3, "order": 3}),
        # The same if Direct needs too much memory.
        ("Replay, bosh3", {"adjoint": "Replay", "solve": {"solver": "bosh3"}}),
        ("Replay, bosh3, fixed", {"adjoint": "Replay", "solve": {"solver": "bosh3"}, "fixed": 1 / 3, "order": 3}),
        ("Backsolve, bosh3", {"adjoint": "Backsolve", "solve": {"solver": "bosh3"}}),
        (
            "Backsolve, bosh3, backward 30, 1000",
            {"adjoint": "Backsolve", "backward": (30.0, 1000.0), "solve": {"solver": "bosh3"}},
        ),
    ),
    "flow": (("Direct, norm auto", {"adjoint": "Direct", "solve": {"norm": "auto"}}),),
}
#: Settings of seminode for single problems. Contenders may use 8 GB, and the data and the programs need a part of it.
OF_PROBLEM: dict[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "cde-1024": (
        (
            "Direct(6GB), bosh3",
            {"adjoint": "Direct", "adjoint_options": {"memory": "6GB"}, "solve": {"solver": "bosh3"}},
        ),
        ("Direct(6GB)", {"adjoint": "Direct", "adjoint_options": {"memory": "6GB"}}),
    ),
}


def seminode(problem: str) -> list[Contender]:
    settings = [(name, {"adjoint": name}) for name in ADJOINTS]
    extras = (*EXTRAS.get(problem.split("-")[0], ()), *OF_PROBLEM.get(problem, ()))
    entries = both((*settings, TSIT5, *BACKSOLVES, *extras))
    # In eager mode these are too similar to others to justify the time.
    left_out = {"Quadrature", "Interpolating", *(name for name, _ in BACKSOLVES)}
    return [each for each in entries if each.setting not in left_out]


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
            Contender(library, "direct, rk4, fixed", {"adjoint": False, "method": "rk4", "fixed": 1 / 2, "order": 4}),
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


#: For problems whose passes take minutes, and for a race in an hour: the usual settings of each library, and those that
#: were its fastest in races of all of them.
SHORT_LIST = {
    "seminode": (
        *("Direct", "Direct, compiled", "Direct, tsit5, compiled", "Direct, bosh3, compiled", "Replay, compiled"),
        *("Direct, norm auto, compiled", "Direct(6GB), bosh3, compiled", "Direct(6GB), compiled"),
        *("Backsolve, compiled", "Backsolve, tsit5, compiled", "Backsolve, bosh3, compiled"),
        "Backsolve, bosh3, backward 30, 1000, compiled",
    ),
    "torchdiffeq": ("adjoint, seminorm", "direct", "direct, field compiled"),
    "torchcde": ("direct",),
    "diffrax": (
        *("RecursiveCheckpoint, Dopri5", "RecursiveCheckpoint, Bosh3"),
        *("RecursiveCheckpoint, all kept, Dopri5", "RecursiveCheckpoint, all kept, Tsit5"),
        *("RecursiveCheckpoint, all kept, Bosh3", "Backsolve, seminorm, Dopri5", "Backsolve, seminorm, Tsit5"),
        "Backsolve, seminorm, Bosh3",
    ),
}
#: Those that are left out where a pass takes minutes: they do not fit into memory, or are slower than others.
TOO_SLOW = {
    "cde-1024": {
        *("seminode: Direct", "seminode: Direct, compiled", "seminode: Direct, tsit5, compiled"),
        *("seminode: Direct, bosh3, compiled", "seminode: Backsolve, tsit5, compiled"),
        *("diffrax: RecursiveCheckpoint, all kept, Dopri5", "diffrax: RecursiveCheckpoint, all kept, Bosh3"),
        *("diffrax: RecursiveCheckpoint, all kept, Tsit5", "diffrax: Backsolve, seminorm, Tsit5"),
        "torchdiffeq: direct, field compiled",
    },
}


def contenders(problem: str, short: bool = False) -> list[Contender]:
    """All contenders that support a problem, by its name; with `short`, those of `SHORT_LIST`."""
    if problem.startswith("sampling"):
        return samplers(problem.split("-")[-1])
    if problem == "reversible":
        return checkpointing()
    if problem.endswith("-forward"):
        return forward_only()
    libraries = (seminode, torchdiffeq, torchode, torchcde, diffrax)
    entries = [contender for library in libraries for contender in library(problem)]
    if not short and problem not in TOO_SLOW:
        return entries
    left_out = TOO_SLOW.get(problem, ())
    return [each for each in entries if each.setting in SHORT_LIST.get(each.library, ()) and each.name not in left_out]


def named(problem: str, name: str) -> Contender:
    return next(contender for contender in contenders(problem) if contender.name == name)
