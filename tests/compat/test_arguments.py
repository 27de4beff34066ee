"""Options, tolerances, errors and warnings of the drop-in for torchdiffeq, beside those of the original."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn

import seminode as sn
import seminode.compat.torchdiffeq as ours

Y0 = torch.tensor([1.0, 2.0])
T = torch.tensor([0.0, 0.5, 1.0])


def decay(t: Tensor, y: Any) -> Any:
    return tuple(-x for x in y) if isinstance(y, tuple) else -y


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(1.0))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.rate * y


def grid(f: Any, y: Any, t: Tensor) -> Tensor:
    return t[1:]


def tolerance() -> Tensor:
    return torch.tensor(1e-3, requires_grad=True)


def backward(library: Any, **options: Any) -> None:
    library.odeint_adjoint(Decay(), Y0.clone().requires_grad_(), T, **options).sum().backward()


#: A wrong call, the type of error that the original raises, and what our message says about the remedy.
WRONG: dict[str, tuple[Callable[[Any], Any], type[BaseException], str]] = {
    "y0 list": (lambda lib: lib.odeint(decay, [Y0], T), AssertionError, r"write tuple\(y0\)"),
    "y0 number": (lambda lib: lib.odeint(decay, 1.0, T), AssertionError, "found float"),
    "t list": (lambda lib: lib.odeint(decay, Y0, [0.0, 1.0]), AssertionError, r"pass torch\.tensor"),
    "t whole": (lambda lib: lib.odeint(decay, Y0, torch.tensor([0, 1])), TypeError, r"pass t\.to\(y0\.dtype\)"),
    "t matrix": (lambda lib: lib.odeint(decay, Y0, T[None]), AssertionError, r"pass t\.reshape"),
    "t repeated": (lambda lib: lib.odeint(decay, Y0, T[[0, 1, 1]]), AssertionError, r"0\.5 after 0\.5 .index 2.*Sort"),
    "t zigzag": (lambda lib: lib.odeint(decay, Y0, T[[0, 2, 1]]), AssertionError, r"0\.5 after 1\.0"),
    "rtol": (
        lambda lib: lib.odeint(decay, Y0, T, rtol=torch.tensor(1e-3, requires_grad=True)),
        AssertionError,
        r"pass rtol\.detach",
    ),
    "rtols": (lambda lib: lib.odeint(decay, (Y0, Y0), T, rtol=(1e-3,)), AssertionError, "1 tolerances for 2 tensors"),
    "method": (lambda lib: lib.odeint(decay, Y0, T, method="rk5"), ValueError, 'Invalid method "rk5"'),
    "grid": (
        lambda lib: lib.odeint(decay, Y0, T, method="euler", options={"grid_constructor": grid}),
        AssertionError,
        r"must start at t\[0\] = 0\.0 .* found 0\.5 and 1\.0\. Return",
    ),
    "two grids": (
        lambda lib: lib.odeint(decay, Y0, T, method="euler", options={"step_size": 0.1, "grid_constructor": grid}),
        ValueError,
        "mutually exclusive",
    ),
    "interp": (
        lambda lib: lib.odeint(decay, Y0, T, method="euler", options={"interp": "quintic"}),
        ValueError,
        "Unknown interpolation method quintic",
    ),
    "max_order": (
        lambda lib: lib.odeint(decay, Y0, T, method="fixed_adams", options={"max_order": 13}),
        AssertionError,
        "at most 12, found 13",
    ),
    "repeated step": (
        lambda lib: lib.odeint(decay, Y0, T, options={"step_t": T[1:2], "jump_t": T[1:2]}),
        ValueError,
        "repeated elements",
    ),
    "no module": (lambda lib: lib.odeint_adjoint(decay, Y0, T), ValueError, "adjoint_params=()"),
    "adjoint_options": (
        lambda lib: lib.odeint_adjoint(Decay(), Y0, T, method="dopri5", adjoint_method="rk4", options={}),
        ValueError,
        "`adjoint_options` must be passed",
    ),
    "event times": (lambda lib: lib.odeint(decay, Y0, T, event_fn=lambda t, y: y[0]), ValueError, r"len\(t\) == 2"),
    "event step": (
        lambda lib: lib.odeint(decay, Y0, T[:2], event_fn=lambda t, y: y[0] - 0.5, method="euler"),
        AssertionError,
        r'options=\{"step_size": 0\.01\}',
    ),
    "max_num_steps": (
        lambda lib: lib.odeint(decay, Y0, T, options={"max_num_steps": 2}),
        AssertionError,
        r"max_num_steps exceeded \(2>=2\).*raise rtol",
    ),
    "blow-up": (lambda lib: lib.odeint(lambda t, y: 10 * y**2, Y0, T), AssertionError, "underflow in dt.*looser rtol"),
    "nan": (lambda lib: lib.odeint(decay, Y0 * float("nan"), T), AssertionError, "y0 holds a NaN"),
    "nan later": (
        lambda lib: lib.odeint(lambda t, y: -y * torch.where(t > 0.6, torch.nan, 1.0), Y0, T),
        AssertionError,
        r"just after t = 0\.6 the field or the state is NaN",
    ),
    "t number": (lambda lib: lib.odeint(decay, Y0, torch.tensor(1.0)), AssertionError, r"pass t\.reshape"),
    "t nan": (lambda lib: lib.odeint(decay, Y0, T * float("nan")), AssertionError, "found .nan, nan, nan.*Sort"),
    "atol": (lambda lib: lib.odeint(decay, Y0, T, atol=tolerance()), AssertionError, r"pass atol\.detach"),
    "atols": (lambda lib: lib.odeint(decay, (Y0, Y0), T, atol=[1e-3]), AssertionError, "1 tolerances for 2 tensors"),
    "dense y0": (lambda lib: lib.odeint_dense(decay, [Y0], T[0], T[2]), AssertionError, r"write tuple\(y0\)"),
    "dense t": (
        lambda lib: lib.odeint_dense(decay, Y0, T[0], T[2])(torch.tensor(-1.0)),
        AssertionError,
        r"known on \[0, .*found -1; pass t0 and t1",
    ),
    "event y0": (
        lambda lib: lib.odeint_event(decay, [Y0], T[0], event_fn=lambda t, y: y[0][0] - 0.5),
        AssertionError,
        r"write tuple\(y0\)",
    ),
    "event max_num_steps": (
        lambda lib: lib.odeint(decay, Y0, T[:2], event_fn=lambda t, y: y[0] + 1, options={"max_num_steps": 2}),
        AssertionError,
        r"max_num_steps exceeded \(2>=2\).*raise rtol",
    ),
    "event interp": (
        lambda lib: lib.odeint(
            decay, Y0, T[:2], event_fn=lambda t, y: y[0] - 0.5, method="rk4", options={"step_size": 0.1, "interp": "x"}
        ),
        ValueError,
        "Unknown interpolation method x",
    ),
    "event blow-up": (
        lambda lib: lib.odeint(lambda t, y: 10 * y**2, Y0, T[:2], event_fn=lambda t, y: y[0] + 1),
        AssertionError,
        "underflow in dt.*looser rtol",
    ),
    "adjoint_rtol": (lambda lib: backward(lib, adjoint_rtol=tolerance()), AssertionError, r"adjoint_rtol\.detach"),
    "adjoint_atol": (lambda lib: backward(lib, adjoint_atol=tolerance()), AssertionError, r"adjoint_atol\.detach"),
    "adjoint_method": (lambda lib: backward(lib, adjoint_method="rk5"), ValueError, 'Invalid method "rk5"'),
    "adjoint max_num_steps": (
        lambda lib: backward(lib, adjoint_options={"max_num_steps": 1}),
        AssertionError,
        "on the backward pass: max_num_steps.*raise rtol",
    ),
    "adjoint grid": (
        lambda lib: backward(lib, method="euler", adjoint_options={"grid_constructor": grid}),
        AssertionError,
        r"must start at t\[0\] = 1\.0 .* Return",
    ),
    "adjoint max_order": (
        lambda lib: backward(lib, method="rk4", adjoint_method="fixed_adams", adjoint_options={"max_order": 13}),
        AssertionError,
        "at most 12, found 13",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_raise_the_errors_of_torchdiffeq_with_a_remedy(name: str) -> None:
    call, error, remedy = WRONG[name]
    with pytest.raises(error):
        call(original)
    with pytest.raises(error, match=remedy):
        call(ours)


@pytest.mark.parametrize("name", ["max_num_steps", "blow-up", "nan"])
def test_failed_solves_are_seminode_errors_too(name: str) -> None:
    with pytest.raises(sn.SolveError) as caught:
        WRONG[name][0](ours)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.stats.accepted >= 0
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_the_limit_on_steps_holds_between_outputs_and_backwards() -> None:
    t = torch.linspace(0, 1, 21)
    ours.odeint(decay, Y0, t, rtol=1e-4, atol=1e-5, options={"max_num_steps": 3})
    y0 = Y0.clone().requires_grad_()
    ys = ours.odeint_adjoint(Decay(), y0, T, adjoint_options={"max_num_steps": 1})
    with pytest.raises(AssertionError, match=r"on the backward pass: max_num_steps exceeded \(1>=1\)"):
        ys.sum().backward()


def messages(call: Callable[[Any], Any], library: Any) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(library)
    return {str(each.message) for each in caught}


def called_back() -> Any:
    field: Any = Decay()
    field.callback_accept_step = lambda t, y, dt: None
    return field


@pytest.mark.parametrize(
    "call",
    [
        lambda lib: lib.odeint(decay, Y0, T, options={"foo": 1}),
        lambda lib: lib.odeint(decay, Y0, T, method="euler", options={"foo": 1, "max_num_steps": 3}),
        lambda lib: lib.odeint(decay, Y0, T, method="fixed_adams", options={"max_order": 3}),
        lambda lib: lib.odeint(called_back(), Y0, T, method="euler"),
    ],
    ids=["option", "options of another method", "order", "callback"],
)
def test_the_same_warnings(call: Callable[[Any], Any]) -> None:
    theirs = messages(call, original)
    assert theirs
    assert messages(call, ours) == theirs


def test_default_tolerances_do_not_warn_in_single_precision() -> None:
    y0 = Y0.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.odeint(decay, Y0, T)
        ours.odeint_adjoint(Decay(), y0, T).sum().backward()
    with pytest.warns(sn.ToleranceWarning):
        sn.solve(decay, Y0, T, rtol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"min_step": 0.1, "max_step": 0.2},
        {"first_step": 0.25, "safety": 0.8, "ifactor": 5.0, "dfactor": 0.3},
        {"dtype": torch.float32},
        {"norm": lambda x: x.abs().max()},
        {"step_t": torch.tensor([0.3, 0.7]), "jump_t": torch.tensor([0.51])},
    ],
    ids=["bounds", "controller", "dtype", "norm", "step_t"],
)
def test_options_of_adaptive_methods(options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"options": options, "rtol": 1e-6, "atol": 1e-8}
    calls = []
    for library in (original, ours):
        field = mock.Mock(side_effect=lambda t, y: -y * torch.cos(9 * t), spec=["__call__"])
        y = library.odeint(field, Y0.double(), T.double(), **settings)
        calls.append((y, field.call_count))
    torch.testing.assert_close(calls[1][0], calls[0][0], rtol=1e-5, atol=1e-7)
    assert calls[1][1] <= calls[0][1]


def test_tolerances_for_each_tensor_of_a_tuple() -> None:
    y0 = Y0.double(), 3.0 * Y0[:1].double()
    rtol, atol = [1e-3, 1e-6], (1e-5, torch.tensor(1e-8))
    theirs, found = (lib.odeint(decay, y0, T.double(), rtol=rtol, atol=atol) for lib in (original, ours))
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    leafwise = ours.odeint(decay, Y0.double(), T.double(), rtol=torch.tensor([1e-3, 1e-6]), atol=1e-8)
    torch.testing.assert_close(leafwise[:, 0], Y0[0] * torch.exp(-T.double()), rtol=1e-4, atol=0.0)


def test_fields_of_any_kind() -> None:
    expected = ours.odeint(decay, Y0, T)
    for field in (mock.Mock(side_effect=decay), mock.MagicMock(side_effect=decay), lambda t, y: (-y).double()):
        torch.testing.assert_close(ours.odeint(field, Y0, T), expected)
    torch.testing.assert_close(ours.odeint_adjoint(mock.Mock(side_effect=decay), Y0, T, adjoint_params=()), expected)
    lists = ours.odeint(lambda t, y: [-y[0], -y[1].reshape(-1)], (Y0, Y0[None]), T)
    torch.testing.assert_close(lists[1][:, 0], expected)
    mixed = ours.odeint(decay, (Y0, Y0.double()), T)
    assert [x.dtype for x in mixed] == [torch.float64] * 2


def test_one_time_is_the_start_itself() -> None:
    for method in ("dopri5", "rk4", "explicit_adams"):
        y0 = Y0.clone().requires_grad_()
        for ys in (
            ours.odeint(decay, y0, T[:1], method=method),
            ours.odeint_adjoint(Decay(), y0, T[:1], method=method),
        ):
            assert ys.shape == (1, 2)
            torch.testing.assert_close(torch.autograd.grad(ys.sum(), y0)[0], torch.ones(2))


def test_a_field_with_too_few_tensors() -> None:
    with pytest.raises(ValueError, match="one tensor for each of the 2 tensors of y0, found 1"):
        ours.odeint(lambda t, y: (-y[0],), (Y0, Y0), T)


@pytest.mark.slow
def test_fixed_steps_that_meet_no_event_end() -> None:
    options: dict[str, Any] = {"method": "euler", "options": {"step_size": 1e-3}, "event_fn": lambda t, y: y[0] + 1}
    for library in (original, ours):
        with pytest.raises(RuntimeError, match=r"20000"):
            library.odeint(decay, Y0, T[:2], **options)


def test_fixed_point_iterations_that_do_not_converge_warn() -> None:
    call = lambda lib: lib.odeint(
        lambda t, y: -50 * y, Y0, torch.linspace(0, 1, 12), method="implicit_adams", options={"max_iters": 1}
    )
    for library in (original, ours):
        assert any("Functional iteration did not converge" in each for each in messages(call, library))
