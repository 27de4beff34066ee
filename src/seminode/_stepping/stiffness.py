"""Whether a problem looks stiff: computed only when a solve with an explicit method has failed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._ranks import ALONE, Alone
from .engine import Engine
from .schedule import Plan

#: Evaluations that are spent on the estimate.
ITERATIONS = 20
#: Explicit Runge–Kutta methods are stable for |eigenvalue·dt| up to 2 … 6; steps that accuracy limits are far below.
BOUNDARY = 1.0, 12.0


def stiffness(engine: Engine, plan: Plan, y: Tensor, ranks: Alone = ALONE) -> str | None:
    """Advice, if the steps of an explicit method are as long as stability allows; else `None`.

    The dominant eigenvalue of ∂f/∂y is estimated by the power method with differences of the field in the place of the
    Jacobian. At the stability boundary, its product with dt is of order one and its real part negative.
    """
    solver = engine.solver
    if solver.implicit or not solver.general:
        return None
    with torch.no_grad():
        found = dominant_eigenvalue(engine, plan.stage_time(0.0), y.detach(), ranks)
    if found is None:
        return None
    direction = math.copysign(1.0, plan.dt)
    size, real = abs(found), found * direction
    if not (real < 0.0 and BOUNDARY[0] < size * abs(plan.dt) < BOUNDARY[1]):
        return None
    return (
        f"The problem looks stiff: the Jacobian of the field has an eigenvalue of about {found:.2g}, and eigenvalue × "
        f"dt = {found * plan.dt:.2g} is at the stability boundary of {solver.name!r}. Take solver='kvaerno5', or "
        "'kvaerno3' at loose tolerances."
    )


def dominant_eigenvalue(engine: Engine, t: float, y: Tensor, ranks: Alone = ALONE) -> float | None:
    """An estimate of the real part of the eigenvalue of ∂f/∂y that is largest in magnitude, if it is mostly real.

    With several ranks, y is what one of them has of a state. All of them make the same evaluations.
    """

    def evaluate(y: Tensor) -> Tensor:
        try:
            return engine.evaluate(t, y)
        except Exception:  # the field may not be defined beside the solution
            return torch.full_like(y, math.nan)

    def products(*pairs: tuple[Tensor, Tensor]) -> list[float]:
        parts = [torch.vdot(a.reshape(-1), b.reshape(-1)).real.double() for a, b in pairs]
        return ranks.sums(torch.stack(parts))

    f = evaluate(y)
    scale = math.sqrt(products((y, y))[0]) + 1.0
    eps = math.sqrt(torch.finfo(y.dtype).eps) * scale
    v = f + torch.linspace(0.5, 1.0, f.numel(), dtype=torch.float64).to(f.device, f.dtype).reshape(f.shape)
    value = size = 0.0
    for _ in range(ITERATIONS):
        norm = math.sqrt(products((v, v))[0])
        if not 0.0 < norm < math.inf:
            return None
        v = v / norm
        product = (evaluate(torch.add(y, v, alpha=eps)) - f) / eps
        value, square = products((v, product), (product, product))
        size = math.sqrt(square)
        v = product
    return value if math.isfinite(value) and abs(value) > 0.5 * size else None
