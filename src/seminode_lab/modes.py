"""How a run differentiates: the four columns of truth.

`mixed` and `seminorm` are the paper's two norms, in its procedure, as they are meant. `published` is what its code did
where that is something else. `best` is what we would do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode.adjoints import Adjoint
from seminode.diagnostics.contenders import check_adjoints, written
from seminode.norms import AdjointState

#: Points of a window of the pendulum's data: by so much is the published slice too long.
WINDOW = 8


def oversized_seminorm(y: AdjointState) -> Tensor:
    """The published seminorm of the pendulum, which is none.

    It slices the flat state by the size of a whole window, eight times that of the state. The first slice then holds z,
    a_z and many parameters, the second parameters only. The error of z is divided by √8, the first step grows by a
    quarter, and one step fits where there were two.
    """
    flat = torch.cat([x.reshape(-1) for x in (y.z.new_zeros(1), y.z, y.a_z, *y.a_params)])
    size = WINDOW * y.z.numel()
    return torch.maximum(sn.norms.rms(flat[1 : 1 + size]), sn.norms.rms(flat[1 + size : 1 + 2 * size]))


MODES = ("mixed", "seminorm", "published", "best")


def adjoint_name(text: str) -> str:
    """An adjoint as it is written down, from what somebody typed.

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


#: Up to this batch what all evaluations of a neural CDE keep has room in the memory of a small machine.
ROOM = 256


def solve_options(experiment: str, mode: str, adjoint: str | None = None, batch: int | None = None) -> dict[str, Any]:
    """Options of `solve` for an experiment (`"ncde"`, `"cnf"` or `"hnn"`) in a mode, for batches of some size.

    Another adjoint may take the place of the mode's own. A bare `Backsolve` is the mode's own where that is one.

    Example:
        >>> solve_options("ncde", "seminorm")
        {'adjoint': Backsolve(restart='fresh')}
        >>> solve_options("ncde", "seminorm", "Quadrature")
        {'adjoint': Quadrature()}
        >>> solve_options("ncde", "best", batch=64)["adjoint"], solve_options("ncde", "best", batch=1024)["adjoint"]
        (Direct(), Replay(every=1))
    """
    options = _of_mode(experiment, mode)
    if experiment == "ncde" and mode == "best" and batch is not None and batch <= ROOM:
        options["adjoint"] = sn.Direct()
    if adjoint is None or (adjoint == "Backsolve" and isinstance(options["adjoint"], sn.Backsolve)):
        return options
    options["adjoint"] = _adjoint(adjoint)
    options.pop("controller", None)  # it was chosen for the other one
    if isinstance(options["adjoint"], sn.Reversible):
        options["solver"] = sn.ReversibleRK("dopri5")
    return options


def _of_mode(experiment: str, mode: str) -> dict[str, Any]:
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    # The flows' log-probability steers the forward solve, as published; seminode leaves it out unless told otherwise.
    steered = {"norm": "mixed"} if experiment == "cnf" else {}
    if mode == "best":
        # On the way back only accepted steps count, so that one which is rejected costs a third of one that is not.
        # Steps of a neural CDE, which end at knots, are then rather tried as long as may pass.
        bold = {"controller": sn.Integral(safety=1.0)} if experiment == "ncde" else {}
        return {"adjoint": sn.Replay(), **bold}
    if mode == "published":
        if experiment != "hnn":
            raise ValueError(f"mode: 'published' differs from 'seminorm' for 'hnn' only, found it for {experiment!r}")
        return {"adjoint": sn.Backsolve(norm=oversized_seminorm, restart="fresh")}
    return {**steered, "adjoint": sn.Backsolve(norm=mode, restart="fresh")}
