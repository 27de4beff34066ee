"""What programs do with torchdiffeq beyond its documentation: fields, states and results of unusual kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn

import seminode.compat.torchdiffeq as ours

DOUBLE = torch.float64
T = torch.tensor([0.0, 0.4, 1.0], dtype=DOUBLE)


class Constant(nn.Module):
    """A field of a fixed shape, which does not depend on the state."""

    def __init__(self, *shape: int):
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(1, 2, torch.Size(shape).numel(), dtype=DOUBLE).view(shape))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.slope * (1 + t)


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
@pytest.mark.parametrize(("y_shape", "f_shape"), [((3, 2), (2, 3)), ((4,), (4, 1)), ((4, 1), (4,)), ((6,), (3, 2))])
def test_fields_of_other_shapes_are_refused(y_shape: Any, f_shape: Any, method: str, name: str) -> None:
    y0 = torch.zeros(y_shape, dtype=DOUBLE)
    with pytest.raises(RuntimeError):
        getattr(original, name)(Constant(*f_shape), y0, T, method=method)
    with pytest.raises(RuntimeError, match=r"func must return a tensor of the shape of y0, .* found .*; transpose"):
        getattr(ours, name)(Constant(*f_shape), y0, T, method=method)


@pytest.mark.parametrize("f_shape", [(1, 2), (2,), (3, 1), ()])
def test_only_methods_on_a_grid_broadcast(f_shape: Any) -> None:
    y0, results = torch.zeros(3, 2, dtype=DOUBLE), []
    for library in (original, ours):
        field = Constant(*f_shape)
        ys = library.odeint(field, y0, T, method="rk4")
        results.append((ys, *torch.autograd.grad(ys.square().sum(), field.slope)))
        with pytest.raises(RuntimeError):
            library.odeint(field, y0, T, method="dopri5")
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("method", ["dopri5", "rk4", "scipy_solver"])
@pytest.mark.parametrize(("y_shape", "f_shape"), [((1, 3), (3,)), ((3,), (1, 3)), ((), (1,)), ((1, 1), ())])
def test_leading_axes_of_length_one_may_differ(y_shape: Any, f_shape: Any, method: str) -> None:
    y0 = torch.ones(y_shape, dtype=DOUBLE)
    theirs, found = (lib.odeint(Constant(*f_shape), y0, T, method=method) for lib in (original, ours))
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-6)


def test_tensors_of_a_tuple_have_their_numbers_of_entries() -> None:
    y0 = torch.zeros(2, 1), torch.zeros(3)
    ys = ours.odeint(lambda t, y: (torch.ones(2), torch.ones(1, 3)), y0, T.float())
    torch.testing.assert_close(ys[0][-1], torch.ones(2, 1))
    for wrong in ((torch.ones(3), torch.ones(2)), (torch.ones(2), torch.ones(1))):
        with pytest.raises(RuntimeError, match=r"y0\[\d\] has shape .*, found"):
            ours.odeint(lambda t, y, wrong=wrong: wrong, y0, T.float())


class Fall(nn.Module):
    """Returns the first slope without the last axis of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(9.8, dtype=DOUBLE))

    def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return y[1].reshape(-1), -self.g * torch.ones_like(y[1])


def through_an_interface(library: Any, field: Fall, y0: Any, interface: Any) -> Any:
    options = {"event_fn": lambda t, y: y[0].sum() - 5, "odeint_interface": functools.partial(interface, rtol=1e-9)}
    return library.odeint_event(field, y0, torch.zeros(1, dtype=DOUBLE), **options)


def directly(library: Any, field: Fall, y0: Any, interface: Any) -> Any:
    return interface(field, y0, T[::2], event_fn=lambda t, y: y[0].sum() - 5, rtol=1e-9)


@pytest.mark.parametrize("call", [through_an_interface, directly])
@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_events_of_fields_of_other_shapes(name: str, call: Callable[..., Any]) -> None:
    results = []
    for library in (original, ours):
        field, y0 = Fall(), torch.tensor([[[10.0], [12.0]], [[0.0], [1.0]]], dtype=DOUBLE, requires_grad=True)
        time, ys = call(library, field, tuple(y0), getattr(library, name))
        grads = torch.autograd.grad(ys[0][-1].square().sum() + ys[1][-1].sum(), [y0, field.g])
        results.append([time.detach(), ys, grads])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.linear(y)) * torch.cos(t)


def test_one_time_gives_parameters_gradients_of_zero() -> None:
    for library in (original, ours):
        field, y0 = Net(), torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
        ys = library.odeint_adjoint(field, y0, T[:1])
        ys.sum().backward()
        torch.testing.assert_close(y0.grad, torch.ones_like(y0))
        assert all(p.grad is not None and not p.grad.any() for p in field.parameters())


def test_the_initial_state_may_be_overwritten_before_the_backward_pass_of_the_adjoint() -> None:
    grads = []
    for library in (original, ours):
        field, y0 = Net(), torch.ones(2, 3, dtype=DOUBLE)
        ys = library.odeint_adjoint(field, y0, T)
        y0.zero_()
        grads.append(torch.autograd.grad(ys.sum(), list(field.parameters())))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-7)


def test_a_registered_solver_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ours.SOLVERS, "mine", type("Mine", (), {}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r'SOLVERS\["mine"\]: expected a method of this library, found .*Mine'):
        ours.odeint(Net(), torch.ones(2, 3, dtype=DOUBLE), T, method="mine")


@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_the_switch_leaves_transforms_alone(method: str, name: str) -> None:
    field, y0, options = Net(), torch.tensor([0.3, -1.0, 0.5], dtype=DOUBLE), {"method": method, "rtol": 1e-9}

    def last(y: Tensor) -> Tensor:
        return getattr(ours, name)(field, y, T, **options)[-1]

    expected = torch.autograd.functional.jacobian(lambda y: original.odeint(field, y, T, **options)[-1], y0)
    with ours.use(adjoint="replay"):
        torch.testing.assert_close(torch.func.jacrev(last)(y0), expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(torch.func.jacfwd(last)(y0), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The following arguments have no effect")  # of the original
def test_the_switch_leaves_scipy_alone() -> None:
    options: dict[str, Any] = {"method": "scipy_solver", "options": {"solver": "RK45"}, "rtol": 1e-8, "atol": 1e-9}
    results = []
    for library in (original, ours):
        field, y0 = Net(), torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
        with ours.use(adjoint="replay"):
            assert not library.odeint(field, y0, T, **options).requires_grad
            ys = library.odeint_adjoint(field, y0, T, **options)
            results.append((ys, torch.autograd.grad(ys.sum(), [y0, *field.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_hooks_of_parameters_are_called_once() -> None:
    grads = []
    for hooked in (False, True):
        field = Net()
        if hooked:
            field.linear.weight.register_hook(lambda grad: 3 * grad)
        ours.odeint_adjoint(field, torch.ones(2, 3, dtype=DOUBLE), T).sum().backward()
        grads.append(field.linear.weight.grad)
    torch.testing.assert_close(grads[1], 3 * grads[0])


class Switched(nn.Module):
    """Another rate after t = 1/2."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.count = nn.Parameter(torch.tensor([1.0, 3.0], dtype=DOUBLE)), 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return -(self.rates[0] if t < 0.5 else self.rates[1]) * y


def test_jumps_are_respected_backwards_in_decreasing_time() -> None:
    counts = []
    for library in (original, ours):
        field, y0 = Switched(), torch.ones(2, dtype=DOUBLE)
        ys = library.odeint_adjoint(field, y0, T.flip(0), options={"jump_t": torch.tensor([0.5], dtype=DOUBLE)})
        forward = field.count
        ys[-1].sum().backward()  # y(0) = exp(rates[0] / 2 + rates[1] / 2) for each of two entries
        torch.testing.assert_close(field.rates.grad, torch.full_like(field.rates, torch.e**2), rtol=1e-5, atol=0.0)
        counts.append(field.count - forward)
    assert counts[1] < counts[0] / 2
