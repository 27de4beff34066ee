"""`tsit5`, which torchdiffeq 0.2.5 does not have, beside a plain method with the step-size control of torchdiffeq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode.compat.torchdiffeq as ours

DOUBLE = torch.float64
#: Tsitouras (2011): nodes, stages, weights, and weights minus those of the embedded method.
C = (0.161, 0.327, 0.9, 0.9800255409045097, 1.0, 1.0)
A = (
    (0.161,),
    (-0.008480655492356989, 0.335480655492357),
    (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
    (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
    (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
    (0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774),
)
E = (
    -0.00178001105222577714,
    -0.0008164344596567469,
    0.007880878010261995,
    -0.1447110071732629,
    0.5823571654525552,
    -0.45808210592918697,
    1 / 66,
)

Field = Callable[[float, Tensor], Tensor]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def first_step(f: Field, t: float, y: Tensor, k: Tensor, rtol: float, atol: float) -> float:
    """The selection of Hairer, Nørsett and Wanner (section II.4), for a method of order 5 as torchdiffeq counts it."""
    scale = atol + rtol * y.abs()
    size, slope = rms(y / scale), rms(k / scale)
    h = 1e-6 if size < 1e-5 or slope < 1e-5 else 0.01 * size / slope
    curvature = rms((f(t + h, y + h * k) - k) / scale) / h
    return min(100 * h, (0.01 / max(slope, curvature)) ** (1 / 5))


def plain(f: Field, y: Tensor, t: float, end: float, rtol: float, atol: float) -> None:
    """Step past the end, with the factors of torchdiffeq."""
    k1 = f(t, y)
    h = first_step(f, t, y, k1, rtol, atol)
    while t < end:
        k, y1 = [k1], y
        for c, row in zip(C, A, strict=True):
            y1 = y + h * sum(a * x for a, x in zip(row, k, strict=True))
            k.append(f(t + c * h, y1))
        error = h * sum(e * x for e, x in zip(E, k, strict=True))
        ratio = rms(error / (atol + rtol * torch.maximum(y.abs(), y1.abs())))
        factor = min(10.0, max(0.9 * ratio ** (-1 / 5), 1.0 if ratio < 1 else 0.2))
        if ratio <= 1:
            t, y, k1 = t + h, y1, k[-1]
        h *= factor


def oscillator(t: Any, y: Tensor) -> Tensor:
    x, v = y
    return torch.stack([v, 3.0 * (1 - x * x) * v - x + 0.3 * torch.cos(torch.as_tensor(t, dtype=DOUBLE))])


def pendulum(t: Any, y: Tensor) -> Tensor:
    return torch.stack([y[1], -4.0 * y[0].sin() - 0.1 * y[1]])


@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("field", [oscillator, pendulum])
def test_evaluations_are_those_of_a_plain_method(field: Field, rtol: float) -> None:
    y0 = torch.tensor([2.0, 0.5], dtype=DOUBLE)
    expected: list[float] = []
    found: list[float] = []

    def noted(times: list[float]) -> Field:
        return lambda t, y: (times.append(float(t)), field(t, y))[1]

    plain(noted(expected), y0, 0.0, 4.0, rtol, 1e-2 * rtol)
    ours.odeint(
        noted(found), y0, torch.tensor([0.0, 1.3, 4.0], dtype=DOUBLE), method="tsit5", rtol=rtol, atol=1e-2 * rtol
    )
    assert len(found) > 30
    # The error of a very short step is not far above the rounding error, which then shows in the next step.
    assert found == pytest.approx(expected, rel=1e-4)
