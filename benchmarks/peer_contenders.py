"""The contenders of problems that come from other libraries and need settings of their own."""

from __future__ import annotations

from .settings import Contender, both

#: Numbers of checkpoints in the comparison of McCallum and Foster.
CHECKPOINTS = (2, 4, 8, 16, 32, 44)


def forward_only() -> list[Contender]:
    """Solves without a gradient, with adaptive steps."""
    ours = [(solver, {"solve": {"solver": solver}}) for solver in ("dopri5", "tsit5")]
    return [
        *both(ours),
        Contender("torchdiffeq", "direct", {"adjoint": False}),
        Contender("torchdiffeq", "direct, field compiled", {"adjoint": False, "compile": True}, compiled=True),
        *(Contender("diffrax", solver, {"solver": solver}, compiled=True) for solver in ("Dopri5", "Tsit5")),
    ]


def samplers(method: str) -> list[Contender]:
    """50 fixed steps of one method over the unit interval."""
    fixed = {"fixed": 1 / 50, "order": {"euler": 1, "midpoint": 2}[method]}
    compiled = {"adjoint": False, "method": method, "compile": True, **fixed}
    return [
        *both([(method, {"solve": {"solver": method}, **fixed})]),
        Contender("torchdiffeq", method, {"adjoint": False, "method": method, **fixed}),
        Contender("torchdiffeq", f"{method}, field compiled", compiled, compiled=True),
        Contender("diffrax", method, {"solver": method.capitalize(), **fixed}, compiled=True),
    ]


def checkpointing() -> list[Contender]:
    """1,000 fixed steps of bosh3 over 20 seconds, with few states kept or none."""
    fixed = {"fixed": 1 / 50, "order": 3}
    bosh3 = {"solve": {"solver": "bosh3"}, **fixed}
    ours = [(name, {"adjoint": name, **bosh3}) for name in ("Direct", "Replay")]
    ours += [
        (f"Checkpointed({n})", {"adjoint": "Checkpointed", "adjoint_options": {"n": n}, "checkpoints": n, **bosh3})
        for n in CHECKPOINTS
    ]
    ours.append(("Reversible", {"adjoint": "Reversible", "reversible": "bosh3", **fixed}))
    theirs = [
        Contender(
            "diffrax",
            f"RecursiveCheckpoint({n}), Bosh3",
            {"adjoint": "RecursiveCheckpointAdjoint", "checkpoints": n, "solver": "Bosh3", **fixed},
            compiled=True,
        )
        for n in CHECKPOINTS
    ]
    return [*both(ours), *theirs]
