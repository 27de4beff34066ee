"""The modes: how a run computes gradients.

`mixed` and `seminorm` are the two norms of the paper, as it defines them and in its procedure. `published` is what the
code of the paper did where that differs. `best` is the choice of seminode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode.adjoints import Adjoint
from seminode.diagnostics.contenders import check_adjoints, written
from seminode.norms import AdjointState

#: Points of a window of the pendulum's data. The published slice is too long by this factor.
WINDOW = 8


def oversized_seminorm(y: AdjointState, window: int = WINDOW) -> Tensor:
    """The norm in the published code of the pendulum, which is not the seminorm.

    It slices the flat state by the size of a whole window, eight times that of the state. The first slice then holds z,
    a_z and many parameters, the second holds parameters only. This divides the error of z by √8. The first step grows
    by a quarter, so that one step suffices instead of two.
    """
    flat = torch.cat([x.reshape(-1) for x in (y.z.new_zeros(1), y.z, y.a_z, *y.a_params)])
    size = window * y.z.numel()
    return torch.maximum(sn.norms.rms(flat[1 : 1 + size]), sn.norms.rms(flat[1 + size : 1 + 2 * size]))


#: Those that presets make runs in. A further mode, `per_tensor`, is the default norm of torchdiffeq since version 0.2.
MODES = ("mixed", "seminorm", "published", "best")
ALL_MODES = (*MODES, "per_tensor")


def adjoint_name(text: str) -> str:
    """The canonical name of an adjoint, from what a user typed.

    Example:
        >>> adjoint_name("quadrature"), adjoint_name("checkpointed(n=4)")
        ('Quadrature', 'Checkpointed(4)')
    """
    return written(_adjoint(text)).removeprefix("sn.").removesuffix("()")


def _adjoint(text: str) -> Adjoint:
    try:
        return check_adjoints(text)[0]
    except ValueError as error:
        raise ValueError(str(error).replace("adjoints[0]", "adjoint", 1)) from None


#: The largest batch of a neural CDE for which `Direct`, which keeps all evaluations, fits into the memory of a small
#: machine.
DIRECT_BATCH = 256


def solve_options(experiment: str, mode: str, adjoint: str | None = None, batch: int | None = None) -> dict[str, Any]:
    """Options of `solve` for an experiment (`"ncde"`, `"cnf"` or `"hnn"`) in a mode and for a batch size.

    `adjoint` replaces the adjoint of the mode. A plain `Backsolve` is that of the mode, if the mode uses `Backsolve`.

    Example:
        >>> solve_options("ncde", "seminorm")
        {'adjoint': Backsolve(restart='fresh')}
        >>> solve_options("ncde", "seminorm", "Quadrature")
        {'adjoint': Quadrature()}
        >>> solve_options("ncde", "best", batch=64)["adjoint"], solve_options("ncde", "best", batch=1024)["adjoint"]
        (Direct(), Replay(every=1))
    """
    options = _of_mode(experiment, mode)
    if experiment == "ncde" and mode == "best" and batch is not None and batch <= DIRECT_BATCH:
        options["adjoint"] = sn.Direct()
    if adjoint is None or (adjoint == "Backsolve" and isinstance(options["adjoint"], sn.Backsolve)):
        return options
    options["adjoint"] = _adjoint(adjoint)
    options.pop("controller", None)  # it was chosen for the adjoint of the mode
    if isinstance(options["adjoint"], sn.Reversible):
        options["solver"] = sn.ReversibleRK("dopri5")
    return options


def _of_mode(experiment: str, mode: str) -> dict[str, Any]:
    if mode not in ALL_MODES:
        raise ValueError(f"mode: expected one of {', '.join(ALL_MODES)}, found {mode!r}")
    # As published, the log-probability of a flow counts in the forward norm. By default seminode leaves it out.
    forward_norm = {"norm": "mixed"} if experiment == "cnf" else {}
    if mode == "best":
        # The backward pass goes over accepted steps only, so a rejected step costs a third of an accepted one. For a
        # neural CDE, whose steps end at knots, it is then cheaper to try steps without a safety factor.
        controller = {"controller": sn.Integral(safety=1.0)} if experiment == "ncde" else {}
        return {"adjoint": sn.Replay(), **controller}
    if mode == "published":
        if experiment != "hnn":
            raise ValueError(f"mode: 'published' differs from 'seminorm' for 'hnn' only, found it for {experiment!r}")
        return {"adjoint": sn.Backsolve(norm=oversized_seminorm, restart="fresh")}
    norm = "mixed_per_tensor" if mode == "per_tensor" else mode
    return {**forward_norm, "adjoint": sn.Backsolve(norm=norm, restart="fresh")}
