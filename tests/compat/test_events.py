"""Events of the drop-in for torchdiffeq."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn

import seminode.compat.torchdiffeq as ours

DOUBLE = torch.float64


class Ball(nn.Module):
    """A ball in free fall: (height, speed)."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(9.81, dtype=DOUBLE))

    def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return y[1], -self.g * torch.ones_like(y[1])


def floor(t: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    """The floor, and a speed that is not reached."""
    return torch.stack([y[0], y[1] + 100.0])


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=DOUBLE, requires_grad=True)


def landing(library: Any, interface: Any, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    ball, height, speed, t0 = Ball(), number(10.0), number(0.5), number(0.2)
    settings = {"rtol": 1e-9, "atol": 1e-9, **settings}
    t, (heights, speeds) = library.odeint_event(
        ball, (height, speed), t0, event_fn=floor, odeint_interface=interface, **settings
    )
    assert heights.shape == speeds.shape == (2,)
    return t, list(torch.autograd.grad(t + 2.0 * speeds[-1] + heights[-1], [height, speed, t0, ball.g]))


def exact() -> tuple[Tensor, list[Tensor]]:
    height, speed, t0, g = number(10.0), number(0.5), number(0.2), number(9.81)
    fall = (speed + torch.sqrt(speed**2 + 2 * g * height)) / g
    t, end = t0 + fall, speed - g * fall
    return t, list(torch.autograd.grad(t + 2.0 * end, [height, speed, t0, g]))


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("settings", [{}, {"method": "rk4", "options": {"step_size": 0.01}}, {"method": "bosh3"}])
def test_event_times_and_their_gradients_are_exact(name: str, settings: dict[str, Any]) -> None:
    if (name, settings.get("method")) == ("odeint_adjoint", "bosh3"):
        settings = {**settings, "adjoint_method": "dopri5"}
    time, grads = landing(ours, getattr(ours, name), **settings)
    expected, expected_grads = exact()
    torch.testing.assert_close(time, expected, rtol=1e-12, atol=0.0)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_the_original_agrees(name: str) -> None:
    theirs, found = (landing(library, getattr(library, name)) for library in (original, ours))
    torch.testing.assert_close(found[0], theirs[0], rtol=1e-8, atol=1e-8)
    for a, b in zip(found[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_an_interface_of_the_users_own() -> None:
    time, grads = landing(ours, functools.partial(ours.odeint, method="dopri8"))
    expected, expected_grads = exact()
    torch.testing.assert_close(time, expected, rtol=1e-10, atol=0.0)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def falling(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], torch.full_like(y[1], -9.81)])


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_without_odeint_event_the_time_is_held(name: str) -> None:
    results = []
    for library in (original, ours):
        y0 = torch.tensor([10.0, 0.5], dtype=DOUBLE, requires_grad=True)
        options: dict[str, Any] = {"adjoint_params": ()} if name == "odeint_adjoint" else {}
        t = torch.tensor([0.0, 1.0], dtype=DOUBLE)
        time, ys = getattr(library, name)(falling, y0, t, event_fn=lambda t, y: y[0], **options)
        results.append((time.detach(), ys.detach(), torch.autograd.grad(ys[-1].sum(), y0)[0]))
    assert not ours.odeint(falling, y0, t, event_fn=lambda t, y: y[0])[0].requires_grad
    for a, b in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_backwards_in_time() -> None:
    results = []
    for library in (original, ours):
        y0 = torch.tensor([10.0, 0.5], dtype=DOUBLE, requires_grad=True)
        t0 = torch.tensor(0.0, dtype=DOUBLE)
        t, ys = library.odeint_event(falling, y0, t0, event_fn=lambda t, y: y[0] - 5.0, reverse_time=True)
        assert float(t.detach()) < 0.0
        results.append((t.detach(), ys.detach(), torch.autograd.grad(t, y0)[0]))
    for a, b in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_parameters_of_the_event_get_gradients() -> None:
    """In torchdiffeq they do not."""
    height = number(5.0)
    y0 = torch.tensor([10.0, 0.0], dtype=DOUBLE)
    t, _ = ours.odeint_event(falling, y0, torch.tensor(0.0, dtype=DOUBLE), event_fn=lambda t, y: y[0] - height)
    (grad,) = torch.autograd.grad(t, height)
    torch.testing.assert_close(grad, -1.0 / (9.81 * t.detach()), rtol=1e-8, atol=0.0)


def test_a_zero_at_the_start_ends_the_solve_there() -> None:
    y0 = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    t = torch.tensor([0.5, 1.0], dtype=DOUBLE)
    for library in (original, ours):
        time, ys = library.odeint(falling, y0, t, event_fn=lambda t, y: y[0])
        assert float(time) == 0.5
        torch.testing.assert_close(ys, torch.stack([y0, y0]))


def test_an_event_that_never_comes_is_an_error() -> None:
    """torchdiffeq goes on for ever."""
    t = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    with pytest.raises(AssertionError, match="event_fn did not become zero between t = 0 and t = 1e"):
        ours.odeint(lambda t, y: 0.0 * y, torch.ones(1, dtype=DOUBLE), t, event_fn=lambda t, y: y[0])
