"""What a field may return, in which precision it is asked, and that it is a function: dropout and buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import seminode as sn

Y0 = torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64)
ADJOINTS = [sn.Direct(), sn.Replay(), sn.Replay(every=3)]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
every_half = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


# What comes back from a field.


def other_nesting(expected: str, found: str) -> str:
    return rf"^field: expected the nesting of y0, {expected}, found {found}$"


BAD_OF_A_TENSOR: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "nothing": (lambda t, y: None, TypeError, r"^field: returned None; expected the derivative of y"),
    "number": (lambda t, y: 1.0, TypeError, r"^field\(t, y\): expected a tensor, found float"),
    "array": (lambda t, y: y.numpy(), TypeError, r"^field\(t, y\): expected a tensor, found ndarray"),
    "tuple": (lambda t, y: (y,), TypeError, other_nesting("tensor", r"\(tensor,\)")),
    "dict": (lambda t, y: {"y": y}, TypeError, other_nesting("tensor", r"\{'y': tensor\}")),
    "shape": (lambda t, y: y[:2], ValueError, r"^field\(t, y\): expected shape \(3,\) as in y0, found \(2,\)"),
    "a shape that would broadcast": (
        lambda t, y: y[:1],
        ValueError,
        r"^field\(t, y\): expected shape \(3,\) as in y0, found \(1,\)",
    ),
    "0-d": (lambda t, y: y.sum(), ValueError, r"^field\(t, y\): expected shape \(3,\) as in y0, found \(\)"),
    "an axis more": (
        lambda t, y: y[None],
        ValueError,
        r"^field\(t, y\): expected shape \(3,\) as in y0, found \(1, 3\)",
    ),
    "lower precision": (
        lambda t, y: y.float(),
        TypeError,
        r"^field\(t, y\): expected dtype torch\.float64 as in y0, found torch\.float32",
    ),
    "int": (lambda t, y: y.long(), TypeError, r"^field\(t, y\): expected dtype torch\.float64 .* found torch\.int64"),
    "complex": (
        lambda t, y: y * 1j,
        TypeError,
        r"^field\(t, y\): expected dtype torch\.float64 .* found torch\.complex128",
    ),
    "another device": (
        lambda t, y: torch.empty_like(y, device="meta"),
        (TypeError, ValueError),
        r"^field\(t, y\): expected device cpu .*found meta",
    ),
}


@every_adjoint
@pytest.mark.parametrize(("field", "error", "message"), BAD_OF_A_TENSOR.values(), ids=BAD_OF_A_TENSOR.keys())
def test_bad_derivative_of_a_tensor(field, error, message, adjoint):
    with pytest.raises(error, match=message):
        sn.solve(field, Y0, [0.0, 1.0], adjoint=adjoint)


def test_double_from_single_precision():
    with pytest.raises(TypeError, match=r"expected dtype torch\.float32 as in y0, found torch\.float64"):
        sn.solve(lambda t, y: y.double(), Y0.float(), [0.0, 1.0])


def test_real_from_complex():
    with pytest.raises(TypeError, match=r"expected dtype torch\.complex128 as in y0, found torch\.float64"):
        sn.solve(lambda t, y: y.real, Y0.to(torch.complex128), [0.0, 1.0])


STATE = {"q": Y0, "p": (Y0[:2], Y0[:1])}
NESTING = r"\{'q': tensor, 'p': \(tensor, tensor,\)\}"

BAD_OF_A_STRUCTURE: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "nothing": (lambda q, p: None, TypeError, r"^field: returned None; expected the derivative of y"),
    "tensor": (lambda q, p: q, TypeError, other_nesting(NESTING, "tensor")),
    "list for tuple": (
        lambda q, p: {"q": q, "p": list(p)},
        TypeError,
        other_nesting(NESTING, r"\{'q': tensor, 'p': \[tensor, tensor\]\}"),
    ),
    "missing key": (lambda q, p: {"q": q}, TypeError, other_nesting(NESTING, r"\{'q': tensor\}")),
    "another key": (
        lambda q, p: {"q": q, "v": p},
        TypeError,
        other_nesting(NESTING, r"\{'q': tensor, 'v': \(tensor, tensor,\)\}"),
    ),
    "a key more": (
        lambda q, p: {"q": q, "p": p, "v": q},
        TypeError,
        other_nesting(NESTING, r"\{'q': tensor, 'p': \(tensor, tensor,\), 'v': tensor\}"),
    ),
    "too short": (lambda q, p: {"q": q, "p": p[:1]}, TypeError, other_nesting(NESTING, ".*")),
    "a number inside": (
        lambda q, p: {"q": q, "p": (p[0], 0.0)},
        TypeError,
        r"^field\(t, y\)\['p'\]\[1\]: expected a tensor, found float",
    ),
    "nothing inside": (
        lambda q, p: {"q": None, "p": p},
        TypeError,
        r"^field\(t, y\)\['q'\]: expected a tensor, found NoneType",
    ),
    "shapes swapped": (
        lambda q, p: {"q": q, "p": p[::-1]},
        ValueError,
        r"^field\(t, y\)\['p'\]\[0\]: expected shape \(2,\) as in y0, found \(1,\)",
    ),
    "dtype of one": (
        lambda q, p: {"q": q, "p": (p[0], p[1].float())},
        TypeError,
        r"^field\(t, y\)\['p'\]\[1\]: expected dtype torch\.float64 as in y0, found torch\.float32",
    ),
}


@pytest.mark.parametrize(("answer", "error", "message"), BAD_OF_A_STRUCTURE.values(), ids=BAD_OF_A_STRUCTURE.keys())
def test_bad_derivative_of_a_structure(answer, error, message):
    with pytest.raises(error, match=message):
        sn.solve(lambda t, y: answer(y["q"], y["p"]), STATE, [0.0, 1.0])


@every_adjoint
def test_a_bad_value_that_comes_late_is_found_as_well(adjoint):
    with pytest.raises(ValueError, match=r"^field\(t, y\): expected shape \(3,\) as in y0, found \(1,\)"):
        sn.solve(lambda t, y: -y if t < 0.5 else -y[:1], Y0, [0.0, 1.0], adjoint=adjoint)


@every_adjoint
def test_dicts_go_by_key_not_by_order(adjoint):
    def solve(field):
        q, p = Y0.clone().requires_grad_(), Y0.clone().requires_grad_()
        sol = sn.solve(field, {"q": q, "p": p}, [0.0, 1.0], adjoint=adjoint)
        return sol.ys, torch.autograd.grad(sol.ys["q"][-1].sum(), [q, p])

    ordered, ordered_grads = solve(lambda t, y: {"q": y["p"], "p": -4 * y["q"]})
    swapped, swapped_grads = solve(lambda t, y: {"p": -4 * y["q"], "q": y["p"]})
    assert list(swapped) == ["q", "p"]
    for key in ordered:
        assert torch.equal(ordered[key], swapped[key])
    for one, other in zip(ordered_grads, swapped_grads, strict=True):
        assert torch.equal(one, other)


class Pair(NamedTuple):
    q: Any
    p: Any


def test_a_plain_tuple_may_answer_for_a_named_one():
    sol = sn.solve(lambda t, y: (y.p, -y.q), Pair(Y0, Y0), [0.0, 1.0])
    assert type(sol.ys) is Pair
    torch.testing.assert_close(sol.ys.q[-1], Y0 * (math.cos(1.0) + math.sin(1.0)), rtol=1e-5, atol=1e-5)


@every_adjoint
@pytest.mark.parametrize("nest", [False, True])
def test_a_result_that_the_next_evaluation_overwrites(nest, adjoint):
    """A field that writes all its answers into one tensor: refused, or copied in time."""
    out = torch.empty_like(Y0)

    def field(t, y):
        torch.neg(y["q"] if nest else y, out=out)
        return {"q": out} if nest else out

    try:
        ys: Any = sn.solve(field, {"q": Y0} if nest else Y0, [0.0, 1.0], adjoint=adjoint).ys
    except ValueError as error:
        assert str(error).startswith("field: ")  # noqa: PT017
    else:
        torch.testing.assert_close((ys["q"] if nest else ys)[-1], Y0 * math.exp(-1.0), rtol=1e-5, atol=1e-5)


@every_adjoint
def test_a_result_that_is_always_the_same_tensor(adjoint):
    slope = torch.full_like(Y0, 2.0)
    ys = sn.solve(lambda t, y: slope, Y0, [0.0, 0.5, 1.0], adjoint=adjoint).ys
    torch.testing.assert_close(ys[-1], Y0 + 2.0, rtol=1e-14, atol=0.0)


@every_adjoint
def test_y_itself_may_be_the_result_but_not_be_written_to(adjoint):
    ys = sn.solve(lambda t, y: y, Y0, [0.0, 1.0], adjoint=adjoint).ys
    torch.testing.assert_close(ys[-1], Y0 * math.e, rtol=1e-5, atol=0.0)
    with pytest.raises(ValueError, match=r"^field: changed y in place"):
        sn.solve(lambda t, y: y.neg_(), Y0.clone(), [0.0, 1.0], adjoint=adjoint)


def test_an_error_in_the_field_comes_through():
    def field(t, y):
        raise LookupError("my own")

    with pytest.raises(LookupError, match=r"^my own$"):
        sn.solve(field, Y0, [0.0, 1.0])


# Which tensors a field is asked with.


@every_adjoint
@pytest.mark.parametrize(
    ("dtype", "time"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_dtypes_that_a_field_sees(dtype, time, adjoint):
    seen = set()

    def field(t, y):
        seen.add((t.dtype, t.ndim, y.dtype, y.shape))
        return -y

    y0 = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    sol = sn.solve(field, y0, [0.0, 0.3, 1.0], adjoint=adjoint)
    assert sol.ys.dtype == dtype
    sol.ys.abs().sum().backward()
    assert y0.grad is not None
    assert y0.grad.dtype == dtype
    assert seen == {(time, 0, dtype, (2, 3))}


def rotation(dtype: torch.dtype, adjoint: Any) -> tuple[Tensor, Tensor]:
    y0 = torch.tensor([1.0 + 0.5j, -0.3j], dtype=dtype, requires_grad=True)
    sol = sn.solve(lambda t, y: 1j * y, y0, [0.0, 0.4, 1.0], adjoint=adjoint)
    (grad,) = torch.autograd.grad(sol.ys[-1].real.sum(), y0)
    return sol.ys, grad


@every_adjoint
@pytest.mark.parametrize(("dtype", "tol"), [(torch.complex64, 1e-3), (torch.complex128, 1e-5)], ids=str)
def test_complex_rotation(dtype, tol, adjoint):
    ys, grad = rotation(dtype, adjoint)
    assert ys.dtype == grad.dtype == dtype
    turned = torch.exp(1j * torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64))[:, None]
    torch.testing.assert_close(ys, (turned * ys[0].detach()).to(dtype), rtol=tol, atol=tol)
    # For a real loss torch's gradient of z -> Re(w z) is the conjugate of w.
    torch.testing.assert_close(grad, turned[-1].conj().expand(2).to(dtype), rtol=tol, atol=tol)


# Half precision.


@every_adjoint
@every_half
def test_a_module_in_half_precision(half, adjoint):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    narrow = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(half)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())  # the same rounded numbers
    ts = [0.0, 0.7, 2.0]
    results = []
    for net, dtype in ((narrow, half), (wide, torch.float64)):
        y0 = Y0.to(half).to(dtype).requires_grad_()
        sol = sn.solve(lambda t, y, net=net: net(y), y0, ts, adjoint=adjoint)
        assert sol.ys.dtype == dtype
        results.append([sol.ys, *torch.autograd.grad(sol.ys.double().sum(), [y0, *net.parameters()])])
    for value, expected in zip(*results, strict=True):
        assert value.dtype == half
        torch.testing.assert_close(value.double(), expected, rtol=2e-2, atol=2e-2)


@every_half
def test_half_precision_is_integrated_in_single(half):
    """400 steps of 2.5e-3: each adds less than bfloat16 can resolve at 1, and all together they add 1."""
    ys = sn.solve(
        lambda t, y: torch.ones_like(y),
        torch.ones(3, dtype=half),
        [0.0, 1.0],
        solver="euler",
        controller=sn.FixedStep(0.0025),
    ).ys
    assert ys.dtype == half
    assert ys[-1].tolist() == [2.0] * 3


@pytest.mark.parametrize("every", [1, 3])
@every_half
def test_gradients_in_half_precision_are_summed_in_single(half, every):
    """y(1) = w·1 over 1024 steps: each adds 1/1024 to the gradient, too little for bfloat16 once the sum is near 1."""
    w = torch.ones((), dtype=half, requires_grad=True)
    sol = sn.solve(
        lambda t, y: w.expand_as(y),
        torch.zeros(3, dtype=half),
        [0.0, 1.0],
        solver="euler",
        controller=sn.FixedStep(1 / 1024),
        adjoint=sn.Replay(every),
    )
    sol.ys[-1].sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == half
    assert float(w.grad) == pytest.approx(3.0, rel=1e-2)


@every_half
def test_a_structure_in_half_precision(half):
    sol = sn.solve(lambda t, y: {"q": y["p"], "p": -y["q"]}, {"q": Y0.to(half), "p": Y0.to(half)}, [0.0, 1.0])
    assert sol.ys["q"].dtype == sol.ys["p"].dtype == half
    expected = Y0 * (math.cos(1.0) + math.sin(1.0))
    torch.testing.assert_close(sol.ys["q"][-1].double(), expected, rtol=2e-2, atol=2e-2)


def test_a_lambda_in_half_precision_with_dense_output():
    sol = sn.solve(lambda t, y: -y * t, torch.ones(2, dtype=torch.float16), [0.0, 1.0], dense=True)
    assert sol.dense is not None
    middle = sol.dense(0.5)
    assert middle.dtype == torch.float16
    assert middle.tolist() == pytest.approx([math.exp(-0.125)] * 2, rel=1e-2)


# Autocast.


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))


@every_adjoint
def test_a_linear_field_under_autocast(adjoint):
    net = network()
    seen = set()

    def field(t, y):
        k = net(y)
        seen.add((y.dtype, k.dtype))
        return k

    y0 = Y0.float().requires_grad_()
    inputs = [y0, *net.parameters()]
    plain = sn.solve(field, y0, [0.0, 0.6, 1.0], adjoint=adjoint)
    expected = torch.autograd.grad(plain.ys.sum(), inputs)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        sol = sn.solve(field, y0, [0.0, 0.6, 1.0], adjoint=adjoint)
    grads = torch.autograd.grad(sol.ys.sum(), inputs)  # outside, as usual: the solve remembers the mode
    assert seen == {(torch.float32, torch.bfloat16)}
    assert sol.ys.dtype == torch.float32
    torch.testing.assert_close(sol.ys, plain.ys, rtol=2e-2, atol=2e-2)
    for grad, other in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, other, rtol=5e-2, atol=5e-2)


@every_adjoint
def test_autocast_changes_the_field_only(adjoint):
    """A field without matrix products is not cast; then neither solution nor gradient may change at all."""
    ts = torch.linspace(0.0, 2.0, 12)
    rate = torch.tensor(1.5, requires_grad=True)
    results = []
    for enabled in (False, True):
        y0 = Y0.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            sol = sn.solve(lambda t, y: -rate * y, y0, ts, adjoint=adjoint, dense=True)
            assert sol.dense is not None
            results.append([sol.ys, sol.dense(0.77)])
        results[-1] += torch.autograd.grad(sol.ys.sum(), [y0, rate])
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


# One evaluation must be like another: random numbers.


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(20, 20).double()

    def forward(self, t, y):
        return torch.tanh(self.net(functional.dropout(y, 0.5)))


DROPOUT = Dropout()
RANDOM_Y0 = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64)
TS = [0.0, 0.3, 1.0]


@pytest.mark.usefixtures("no_other_threads")
@every_adjoint
def test_a_dropout_mask_is_drawn_once_a_solve(adjoint):
    torch.manual_seed(3)
    mask = functional.dropout(torch.ones_like(RANDOM_Y0), 0.5)
    assert 0 < mask.count_nonzero() < 20
    expected = sn.solve(lambda t, y: torch.tanh(DROPOUT.net(y * mask)), RANDOM_Y0, TS, adjoint=adjoint)
    torch.manual_seed(3)
    sol = sn.solve(DROPOUT, RANDOM_Y0, TS, adjoint=adjoint)
    torch.testing.assert_close(sol.ys, expected.ys, rtol=1e-12, atol=1e-12)
    assert sol.stats == expected.stats


@every_adjoint
def test_the_next_solve_draws_another_mask(adjoint):
    torch.manual_seed(3)
    first, second = (sn.solve(DROPOUT, RANDOM_Y0, TS, adjoint=adjoint).ys for _ in range(2))
    assert not torch.allclose(first, second, rtol=1e-3, atol=1e-3)


@every_adjoint
def test_a_solve_moves_the_generator_on_as_one_evaluation_does(adjoint):
    torch.manual_seed(3)
    sn.solve(DROPOUT, RANDOM_Y0, TS, adjoint=adjoint)
    after_solve = torch.rand(3)
    torch.manual_seed(3)
    DROPOUT(0.0, RANDOM_Y0)
    assert torch.equal(torch.rand(3), after_solve)


@every_adjoint
def test_a_field_without_random_numbers_leaves_the_generator_alone(adjoint):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    y0 = Y0.clone().requires_grad_()
    sn.solve(lambda t, y: -y, y0, TS, adjoint=adjoint).ys.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def dropout_gradient(adjoint: Any) -> tuple[Tensor, ...]:
    y0 = RANDOM_Y0.clone().requires_grad_()
    torch.manual_seed(3)
    sol = sn.solve(DROPOUT, y0, TS, adjoint=adjoint)
    torch.rand(5)  # the backward pass must not depend on where the generator has got to
    return torch.autograd.grad(sol.ys.square().sum(), [y0, *DROPOUT.parameters()])


@pytest.mark.parametrize("every", [1, 3])
def test_replay_differentiates_with_the_mask_of_its_solve(every):
    for one, other in zip(dropout_gradient(sn.Replay(every)), dropout_gradient(sn.Direct()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("create_graph", [False, True])
@every_adjoint
def test_a_backward_pass_leaves_the_generator_alone(adjoint, create_graph):
    y0 = RANDOM_Y0.clone().requires_grad_()
    sol = sn.solve(DROPOUT, y0, TS, adjoint=adjoint)
    torch.rand(5)  # now the generator is not where an evaluation leaves it
    before = torch.get_rng_state()
    torch.autograd.grad(sol.ys.sum(), y0, create_graph=create_graph)
    assert torch.equal(torch.get_rng_state(), before)


# One evaluation must be like another: buffers.


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.double()

    def forward(self, t, y):
        return self.last(torch.tanh(self.norm(self.first(y))))


BATCH = torch.linspace(-2.0, 3.0, 24, dtype=torch.float64).reshape(8, 3).sin() + 0.5
stateful = pytest.warns(
    sn.StatefulFieldWarning, match=r"^field: an evaluation changes .*num_batches_tracked.* once per solve"
)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_buffers(actual: nn.Module, expected: nn.Module) -> None:
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(actual.get_buffer(name), buffer, rtol=1e-12, atol=1e-12, msg=name)


@every_adjoint
def test_batch_norm_updates_its_buffers_once_a_solve(adjoint):
    field, once = BatchNorm(), BatchNorm()
    y0 = BATCH.clone().requires_grad_()
    once(0.0, BATCH)
    with stateful:
        sol = sn.solve(field, y0, TS, adjoint=adjoint)
    assert int(field.norm.num_batches_tracked) == 1  # pyright: ignore[reportArgumentType]
    assert_buffers(field, once)
    sol.ys.sum().backward()
    assert_buffers(field, once)
    once(0.0, BATCH)
    with stateful:
        sn.solve(field, y0, TS, adjoint=adjoint)
    assert int(field.norm.num_batches_tracked) == 2  # pyright: ignore[reportArgumentType]
    assert_buffers(field, once)


def test_the_warning_names_every_buffer_that_changes():
    field = BatchNorm()
    with pytest.warns(sn.StatefulFieldWarning) as caught:
        sn.solve(field, BATCH, TS)
    (warning,) = caught
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert name in str(warning.message)


@every_adjoint
def test_several_modules_of_one_class(adjoint):
    first, second = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    with stateful:
        sn.solve(lambda t, y: second(torch.tanh(first(y))), BATCH, TS, adjoint=adjoint)
    assert int(first.num_batches_tracked) == 1  # pyright: ignore[reportArgumentType]
    assert int(second.num_batches_tracked) == 1  # pyright: ignore[reportArgumentType]


@every_adjoint
def test_a_backward_pass_does_not_undo_a_later_solve(adjoint):
    field = BatchNorm()
    y0 = BATCH.clone().requires_grad_()
    with stateful:
        first = sn.solve(field, y0, TS, adjoint=adjoint)
    (alone,) = torch.autograd.grad(first.ys.sum(), y0, retain_graph=True)
    with stateful:
        sn.solve(field, y0, TS, adjoint=adjoint)
    before = buffers_of(field)
    (after,) = torch.autograd.grad(first.ys.sum(), y0)
    assert torch.equal(after, alone)
    for name, buffer in field.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("every", [1, 3])
def test_a_backward_pass_does_not_undo_what_the_user_did(every):
    field = BatchNorm()
    y0 = BATCH.clone().requires_grad_()
    with stateful:
        sol = sn.solve(field, y0, TS, adjoint=sn.Replay(every))
    field.norm.reset_running_stats()
    sol.ys.sum().backward()
    assert_buffers(field, BatchNorm())


def spectral() -> nn.Module:
    torch.manual_seed(5)
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3), n_power_iterations=1).double()


class Layer(nn.Module):
    """Any layer as a field."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, t, y):
        return torch.tanh(self.layer(y))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("make", [BatchNorm, lambda: Layer(spectral())], ids=["batch norm", "spectral norm"])
def test_replay_differentiates_a_stateful_field_like_direct(make, every):
    grads = []
    for adjoint in (sn.Direct(), sn.Replay(every)):
        field = make()
        y0 = BATCH.clone().requires_grad_()
        with pytest.warns(sn.StatefulFieldWarning):
            sol = sn.solve(field, y0, TS, adjoint=adjoint)
        grads.append([sol.ys, *torch.autograd.grad(sol.ys.square().sum(), [y0, *field.parameters()])])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@every_adjoint
def test_a_buffer_that_is_assigned_anew(adjoint):
    class Counter(nn.Module):
        calls: Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, t, y):
            self.calls = self.calls + 1
            return -self.calls * y

    field = Counter()
    with pytest.warns(sn.StatefulFieldWarning, match="calls"):
        sol = sn.solve(field, Y0, TS, adjoint=adjoint)
    assert float(field.calls) == 1.0
    # Every evaluation after the first sees the buffer at 1 and counts to 2.
    torch.testing.assert_close(sol.ys[-1], Y0 * math.exp(-2.0), rtol=1e-5, atol=1e-6)


@every_adjoint
def test_batch_norm_in_evaluation_mode_is_no_cause_for_a_warning(adjoint):
    field = BatchNorm().eval()
    before = buffers_of(field)
    y0 = BATCH.clone().requires_grad_()
    sn.solve(field, y0, TS, adjoint=adjoint).ys.sum().backward()
    for name, buffer in field.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.filterwarnings("ignore::seminode.StatefulFieldWarning")
@every_adjoint
def test_buffers_after_a_solve_that_failed(adjoint):
    field, once = BatchNorm(), BatchNorm()
    once(0.0, BATCH)
    with pytest.raises(sn.MaxStepsReached):
        sn.solve(field, BATCH, TS, adjoint=adjoint, max_steps=2)
    assert_buffers(field, once)
