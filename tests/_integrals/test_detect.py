"""Which leaves of a state a field never reads, and that no way of reading one goes unnoticed."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import dlpack

from seminode._field.pytree import Layout
from seminode._integrals.detect import BETWEEN, GIVEN, OTHERS, Reader, integral_leaves, looked_at
from seminode._integrals.nan_probe import NanProbe

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
in_every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)

#: What a field may do with z, which is two numbers for each of four, and with an integral l of one number for each.
Use = Callable[[Tensor, Tensor], Tensor]


def state(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    z = torch.tensor([[0.5, -1.0], [2.0, 0.25], [-0.75, 1.5], [1.0, -2.0]]).to(dtype)
    return z, torch.tensor([0.5, 1.5, 2.5, 0.75]).to(dtype)


def field_of(use: Use) -> Callable[[Tensor, Any], Any]:
    def field(t: Tensor, y: Any) -> Any:
        z, l = y
        return use(z, l) - z, torch.ones_like(l)

    return field


def rare(x: Any) -> Any:
    """True where no value happens to be: a read that changes nothing, and that trying other values does not show."""
    return (x > 1e3) & (x < 1e4)


def bump(x: Tensor) -> Tensor:
    """The same without a comparison: zero but for the window, and of a NaN a NaN."""
    return (x - 1e3).clamp(0.0, 1.0) * (1e4 - x).clamp(0.0, 1.0)


class StraightThrough(torch.autograd.Function):
    """Has a gradient for what it does not use; one that sums to zero."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, l: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0][:, 0] - grads[0][:, 1]


library = torch.library.Library("seminode_tests", "DEF")
library.define("all_but_one(Tensor x) -> Tensor")
library.define("one_part(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
library.impl("all_but_one", lambda x: torch.cat([x[:1], x[1:].nan_to_num()]), "CompositeExplicitAutograd")
library.impl("one_part", lambda x: torch.complex(x.real, x.imag.nan_to_num()), "CompositeExplicitAutograd")


def swallow(z: Tensor, l: Tensor) -> Tensor:
    try:
        torch.multinomial(l.abs(), 1)  # refuses NaNs
    except RuntimeError:
        return 2 * z
    return 2 * z


def through_memory(z: Tensor, l: Tensor) -> Tensor:
    other = dlpack.from_dlpack(dlpack.to_dlpack(l.detach()))  # pyright: ignore[reportPrivateImportUsage]
    return z * rare(other)[:, None]


def copied_by_foreach(z: Tensor, l: Tensor) -> Tensor:
    other = torch.zeros(4)
    torch._foreach_copy_([other], [l.detach()])  # pyright: ignore[reportPrivateImportUsage]
    return z * rare(other)[:, None]


def mapped_in_python(z: Tensor, l: Tensor) -> Tensor:
    return z * torch.zeros(4).map_(l.detach(), lambda a, b: float(rare(b)))[:, None]  # type: ignore[attr-defined]


def written_under_a_mask(z: Tensor, l: Tensor) -> Tensor:
    x = z.clone()
    x[rare(l)] = 0.0
    return x


def partly_lost(z: Tensor, l: Tensor) -> Tensor:
    """Of the first two the maximum stays a NaN."""
    return z * bump(torch.fmax(l, torch.stack([l[0], l[1], torch.zeros(()), torch.zeros(())])))[2]


READS: dict[str, Use] = {
    "as it is": lambda z, l: z + l[:, None],
    "times zero": lambda z, l: z + 0.0 * l[:, None],
    "detached": lambda z, l: z * l.detach()[:, None],
    "its sum": lambda z, l: z + l.sum(),
    "a matrix product": lambda z, l: z + l @ torch.zeros(4),
    "in place": lambda z, l: z.clone().add_(l[:, None]),
    "a value and its negative": lambda z, l: z + (l - l.detach())[:, None],
    "a comparison": lambda z, l: torch.where(l[:, None] > 0, z, 2 * z),
    "a comparison with a number far away": lambda z, l: torch.where(l[:, None] > 1e30, z, 2 * z),
    "a window far away": lambda z, l: torch.where(rare(l)[:, None], z, 2 * z),
    "equal to a number": lambda z, l: (l == 77.0).float()[:, None] * z,
    "where of itself": lambda z, l: z * bump(torch.where(z[:, 0] == z[:, 0], l.nan_to_num(), l))[:, None],
    "an if": lambda z, l: z if l.sum() > 0 else 2 * z,
    "an if far away": lambda z, l: z if rare(l.sum()) else 2 * z,
    "an if of an entry": lambda z, l: z if l[0] == 77.0 else 2 * z,
    "a mask": lambda z, l: z.masked_fill(rare(l)[:, None], 0.0),
    "a write under a mask": written_under_a_mask,
    "a masked selection": lambda z, l: z + z[rare(l)].sum(),
    "nan_to_num": lambda z, l: z + bump(l.nan_to_num())[:, None],
    "isnan": lambda z, l: z * ~torch.isnan(l)[:, None],
    "isfinite": lambda z, l: z if torch.isfinite(l).all() else 2 * z,
    "a maximum": lambda z, l: z + bump(torch.fmax(l, torch.zeros(())))[:, None],
    "a maximum, partly": partly_lost,
    "a clamp": lambda z, l: z + bump(l)[:, None],
    "a rectifier": lambda z, l: z + nn.functional.relu(l - 1e6)[:, None],
    "a power of one": lambda z, l: z * (torch.ones(()) ** l)[:, None],
    "its sign": lambda z, l: z * torch.sign(l)[:, None],
    "the sign of another": lambda z, l: torch.copysign(z, l[:, None]).abs(),
    "nansum": lambda z, l: z * bump(torch.nansum(l)),
    "an operation of one's own": lambda z, l: z * bump(torch.ops.seminode_tests.all_but_one(l.detach()))[1],
    "an integer": lambda z, l: z * rare(l.long())[:, None],
    "its bits": lambda z, l: z * rare(l.detach().view(torch.int32)).any(),
    "half its bits": lambda z, l: z * rare(l.detach().view(torch.float16)[::2]).any(),
    "an order": lambda z, l: z[l.argsort()],
    "a sort": lambda z, l: z * rare(l.sort().values).any(),
    "a place in a table": lambda z, l: z * (torch.bucketize(l, torch.tensor([1e3, 1e4])) == 1)[:, None],
    "an index": lambda z, l: z[rare(l).long()],
    "equality": lambda z, l: z if torch.equal(l, torch.full((4,), 77.0)) else 2 * z,
    "membership": lambda z, l: z if 77.0 in l else 2 * z,
    "an item": lambda z, l: z * (1.0 if rare(l[0].item()) else 2.0),
    "a float": lambda z, l: z * (1.0 if rare(float(l[0].detach())) else 2.0),
    "a list": lambda z, l: z * (1.0 if rare(l.tolist()[0]) else 2.0),
    "numpy": lambda z, l: z * (1.0 if rare(l.detach().numpy()).any() else 2.0),
    "an array": lambda z, l: z * (1.0 if rare(np.asarray(l.detach())).any() else 2.0),
    "an array by dlpack": lambda z, l: z * (1.0 if rare(np.from_dlpack(l.detach())).any() else 2.0),
    "the same memory": through_memory,
    "its address": lambda z, l: z * (1.0 if l.data_ptr() == 1 else 2.0),
    "its storage": lambda z, l: z * (1.0 if l.detach().untyped_storage()[3] == 1 else 2.0),
    "text": lambda z, l: z * (1.0 if "77" in repr(l) else 2.0),
    "formatted": lambda z, l: z * (1.0 if "77" in f"{l[0].detach():.2f}" else 2.0),
    "a tensor of a list": lambda z, l: z * rare(torch.tensor([l[0].detach(), l[1].detach()])).any(),
    "a tensor of a deque": lambda z, l: z * rare(torch.tensor(collections.deque([l[0].detach()]))).any(),
    "a tensor of the old kind": lambda z, l: z * rare(torch.Tensor([l[0].detach()])).any(),
    "a deep copy": lambda z, l: z * rare(copy.deepcopy(l.detach())).any(),
    "a pickle": lambda z, l: z * rare(pickle.loads(pickle.dumps(l.detach()))).any(),
    "a function of Python": mapped_in_python,
    "a copy of many": copied_by_foreach,
    "under vmap": lambda z, l: torch.func.vmap(lambda a, b: torch.where(rare(b), a, 2 * a))(z, l),
    "in a concatenation": lambda z, l: rare(torch.cat([z, l[:, None]], 1))[:, 2:] * z,
    "softmax of a concatenation": lambda z, l: torch.cat([z, l[:, None]], 1).softmax(1)[:, :2],
    "chance": lambda z, l: z * torch.bernoulli(torch.sigmoid(l))[:, None],
    "an error that is swallowed": swallow,
    "a gradient of its own making": lambda z, l: StraightThrough.apply(z, l),  # type: ignore[return-value]
    "a write to it": lambda z, l: (l.detach().zero_(), z)[1],
}


@in_every_mode
@pytest.mark.parametrize("use", READS.values(), ids=READS)
def test_a_leaf_that_is_read_is_no_integral(use: Use, mode: Callable[[], Any]) -> None:
    with mode():
        assert integral_leaves(field_of(use), state()) == (False, False)


def split_again(z: Tensor, l: Tensor) -> Tensor:
    return torch.cat([z, l[:, None]], 1).split([2, 1], 1)[0].sin()


def entrywise_then_split(z: Tensor, l: Tensor) -> Tensor:
    flat = torch.cat([z.reshape(-1), l]) * 2.0 + 1.0
    return flat.tanh()[:8].view(4, 2)


def packed_in_place(z: Tensor, l: Tensor) -> Tensor:
    both = z.new_empty(4, 3)
    both[:, :2] = z
    both[:, 2] = l
    both *= 2.0
    return both[:, :2].clone().mul_(3.0)


def natural_nans(z: Tensor, l: Tensor) -> Tensor:
    """What the field does with NaNs of its own is no concern of the leaf."""
    return torch.where(z > 0, z.log(), z) + torch.nan_to_num(z.sqrt())


def hamiltonian(z: Tensor, l: Tensor) -> Tensor:
    with torch.enable_grad():
        q = z.detach().requires_grad_()
        return torch.autograd.grad((q**4).sum(), q)[0]


def gradient_of_all(z: Tensor, l: Tensor) -> Tensor:
    with torch.enable_grad():
        q, m = z.detach().requires_grad_(), l.detach().requires_grad_()
        return torch.autograd.grad((q**4).sum(), [q, m], allow_unused=True)[0]


def about_it(z: Tensor, l: Tensor) -> Tensor:
    assert l.requires_grad in (True, False)
    assert l.is_contiguous()
    assert not l.is_cuda
    assert l.dtype == z.dtype
    assert l.device == z.device
    return z * len(l) * l.shape[0] * l.dim() * l.numel() * l.stride(0) * l.size(-1) * l.element_size()


def like_it(z: Tensor, l: Tensor) -> Tensor:
    filled = torch.zeros_like(l) + torch.ones_like(l) + torch.full_like(l, 2.0) + l.new_zeros(4) + l.new_full((4,), 3.0)
    drawn = torch.rand_like(l) + torch.randn_like(l) + l.new_ones(4) + l.new_tensor([1.0]) + torch.empty_like(l).zero_()
    return z + (filled + drawn + torch.ones(()).expand_as(l) + torch.ones(4).view_as(l).type_as(l))[:, None]


def computed_in_vain(z: Tensor, l: Tensor) -> Tensor:
    _ = (
        l.sum(),
        l.mean(),
        (2.0 * l).exp() + 1.0,
        l @ l,
        l.double(),
        l.clone().mul_(2.0),
        l.detach(),
        torch.stack([l, l]),
    )
    return z


NO_READS: dict[str, Use] = {
    "ignored": lambda z, l: z.sin(),
    "its shape and the like": about_it,
    "tensors like it": like_it,
    "overwritten": lambda z, l: z + l.clone().zero_()[:, None],
    "concatenated and split": split_again,
    "concatenated, changed and split": entrywise_then_split,
    "packed in place": packed_in_place,
    "computed in vain": computed_in_vain,
    "asked for a gradient": lambda z, l: (l.requires_grad_(), z)[1],
    "NaNs of the field": natural_nans,
    "NaNs in the output": lambda z, l: z.log(),
    "an inner gradient": hamiltonian,
    "an inner gradient by all": gradient_of_all,
    "an inner Jacobian": lambda z, l: torch.func.vmap(torch.func.jacrev(torch.sin))(z).sum(2),
    "an inner tangent": lambda z, l: torch.func.jvp(torch.sin, (z,), (torch.ones_like(z),))[1],
    "dropout": lambda z, l: nn.functional.dropout(z, 0.5),
    "noise": lambda z, l: z + torch.randn(4, 2),
    "another in numpy": lambda z, l: torch.from_numpy(np.sin(z.detach().numpy())),
    "another in a branch": lambda z, l: z if z.sum() > 0 else 2 * z,
    "another sorted": lambda z, l: z[z[:, 0].argsort()],
}


@in_every_mode
@pytest.mark.parametrize("use", NO_READS.values(), ids=NO_READS)
def test_a_leaf_that_is_not_read_is_an_integral(use: Use, mode: Callable[[], Any]) -> None:
    with mode():
        assert integral_leaves(field_of(use), state()) == (False, True)


class Flow(nn.Module):
    """A continuous normalising flow with its log-probability and kinetic energy."""

    def __init__(self, dim: int = 2, *layers: nn.Module):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 8), nn.Tanh(), *layers, nn.Linear(8, dim))

    def forward(self, t: Tensor, y: dict[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            z = y["z"] if y["z"].requires_grad else y["z"].detach().requires_grad_()
            dz = self.net(z) + t
            rows = [torch.autograd.grad(dz[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(z.shape[1])]
        return {"z": dz, "sums": (-torch.stack(rows).sum(0), [dz.square().sum(1)])}


def flow_state() -> dict[str, Any]:
    z, l = state()
    return {"z": z, "sums": (l, [l.clone()])}


FOUND = {"z": False, "sums": (True, [True])}


@in_every_mode
def test_a_flow(mode: Callable[[], Any]) -> None:
    flow = Flow()
    with mode():
        assert integral_leaves(flow, flow_state(), (0.0, 1.0)) == FOUND


def test_a_state_and_parameters_that_require_gradients() -> None:
    y0 = flow_state()
    y0["z"].requires_grad_()
    y0["sums"][0].requires_grad_()
    assert integral_leaves(Flow(), y0) == FOUND
    assert y0["z"].grad is None
    assert y0["sums"][0].grad is None


def test_every_kind_of_nesting_comes_back() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    one = torch.ones(2)
    assert integral_leaves(lambda t, y: torch.sin(y), one) is False
    assert integral_leaves(lambda t, y: torch.ones(2) * t, one) is True
    assert integral_leaves(lambda t, y: [y[1], t * one], [one, one]) == [True, False]
    assert integral_leaves(lambda t, y: Pair(y.a, y.a), Pair(one, one)) == Pair(False, True)  # type: ignore[arg-type]
    nested = integral_leaves(lambda t, y: {"p": (y["p"][0], [y["p"][0]])}, {"p": (one, [one])})
    assert nested == {"p": (False, [True])}
    assert integral_leaves(lambda t, y: (y[0], y[1]), (one, torch.zeros(0))) == (False, False)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128], ids=str
)
def test_every_dtype(dtype: torch.dtype) -> None:
    times = []

    def field(t: Tensor, y: Any) -> Any:
        times.append(t)
        return -y[0] * t, y[0].sum(1)

    assert integral_leaves(field, state(dtype), (0.0, 1.0)) == (False, True)
    assert {t.dtype for t in times} == {torch.float32 if dtype.itemsize == 2 else dtype.to_real()}
    assert {t.ndim for t in times} == {0}
    for use in (split_again, lambda z, l: z + l[:, None], lambda z, l: z * (l.abs() > 6e4)[:, None]):
        assert integral_leaves(field_of(use), state(dtype)) == (False, use is split_again)


def test_parts_of_a_complex_leaf() -> None:
    y0 = state(torch.complex64)
    assert integral_leaves(field_of(lambda z, l: z + l.imag[:, None]), y0) == (False, False)
    assert integral_leaves(field_of(lambda z, l: z * rare(l.real)[:, None]), y0) == (False, False)
    one = torch.ops.seminode_tests.one_part
    assert integral_leaves(field_of(lambda z, l: z * rare(one(l.detach()).imag)[:, None]), y0) == (False, False)
    assert integral_leaves(field_of(lambda z, l: (l.real.sum(), l.conj(), z.conj())[2]), y0) == (False, True)


def test_a_leaf_that_is_read_late() -> None:
    def field(t: Tensor, y: Any) -> Any:
        z, l = y
        return (z + l[:, None] if t > 0.9 else z), torch.ones_like(l)

    assert integral_leaves(field, state()) == (False, True)
    assert integral_leaves(field, state(), (0.0, 1.0)) == (False, False)
    assert integral_leaves(field, state(), torch.tensor([1.0, 0.0])) == (False, False)
    assert integral_leaves(field, state(), [0.0, 0.5]) == (False, True)


def test_of_several_leaves_only_the_one_that_is_read_late_drops_out() -> None:
    def field(t: Tensor, y: Any) -> Any:
        z, l, m = y
        return (z + m[:, None] if t > 0.4 else z), torch.ones_like(l), torch.ones_like(m)

    z, l = state()
    assert integral_leaves(field, (z, l, l), (0.0, 1.0)) == (False, True, False)


def test_times_looked_at() -> None:
    assert looked_at([1.0]) == (1.0,)
    assert looked_at([2.0, 0.0])[:2] == (2.0, 1.75)
    many = looked_at([i / 1000 for i in range(1001)])
    assert many[0] == 0.0
    assert many[-1] == 1.0
    assert len(many) <= GIVEN + BETWEEN


def test_args_reach_the_field() -> None:
    def field(t: Tensor, y: Any, scale: Tensor, which: int) -> Any:
        return y[0] * scale + y[which].sum(), torch.ones_like(y[1])

    with torch.inference_mode():
        scale = torch.ones(())
        assert integral_leaves(field, state(), args=(scale, 0)) == (False, True)
    assert integral_leaves(field, state(), args=[torch.ones(()), 1]) == (False, False)  # type: ignore[arg-type]


def test_a_stateful_field_that_reads_the_leaf_of_the_call_before() -> None:
    class Late:
        last = torch.zeros(4)

        def __call__(self, t: Tensor, y: Any) -> Any:
            z, l = y[0] + (self.last > 1e9)[:, None], y[1]
            self.last = y[1]
            return z, torch.ones_like(l)

    assert integral_leaves(Late(), state()) == (False, False)


def test_the_random_numbers_of_the_caller_are_left_alone() -> None:
    flow = Flow(2, nn.Dropout(0.5))
    before = torch.get_rng_state()
    assert integral_leaves(flow, flow_state(), (0.0, 1.0)) == FOUND
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_normalisation_in_training_is_left_alone() -> None:
    flow = Flow(2, nn.BatchNorm1d(8))
    before = copy.deepcopy(flow.state_dict())
    assert integral_leaves(flow, flow_state(), (0.0, 1.0)) == FOUND
    for name, value in flow.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_a_field_writes_to_tensors_of_its_own_holds_no_altered_values() -> None:
    class Logged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(())
            self.register_buffer("largest", torch.zeros(4))

        def forward(self, t: Tensor, y: Any) -> Any:
            self.mean.mul_(0.5).add_(0.5 * y[1].detach().mean())
            self.largest = torch.stack([self.largest, y[1].detach()]).amax(0)
            return -y[0], torch.ones_like(y[1])

    field = Logged()
    assert integral_leaves(field, state()) == (False, True)
    assert float(field.mean) == 0.5 * float(state()[1].mean())
    assert torch.equal(field.largest, torch.zeros(4))


def test_activations_in_place_are_not_kept() -> None:
    z, kept = state()[0], torch.zeros(4, 2)
    with contextlib.closing(NanProbe([z], [])) as watch, watch:
        for _ in range(5):
            (z + 1.0).relu_()
        kept.add_(1.0)
        assert len(watch._written) == 1  # only what was there before
    assert torch.equal(kept, torch.zeros(4, 2))


def test_compiled_fields_are_followed() -> None:
    far = torch.compile(lambda z, l: torch.where(rare(l)[:, None], z, 2 * z), backend="eager")
    near = torch.compile(lambda z, l: torch.where(z > 0, z, 2 * z), backend="eager")
    z, l = state()
    far(z, l)
    near(z, l)
    assert integral_leaves(field_of(far), (z, l)) == (False, False)
    assert integral_leaves(field_of(near), (z, l)) == (False, True)


def test_autocast() -> None:
    net = nn.Linear(2, 2)
    with torch.autocast("cpu"):
        assert integral_leaves(field_of(lambda z, l: net(z)), state()) == (False, True)
        assert integral_leaves(field_of(lambda z, l: net(z) * rare(l)[:, None]), state()) == (False, False)


def test_inside_a_transform_nothing_is_known() -> None:
    def loss(z: Tensor) -> Tensor:
        assert integral_leaves(field_of(lambda z, l: z), (z, z[:, 0])) == (False, False)
        return z.sum()

    assert torch.equal(torch.func.grad(loss)(state()[0]), torch.ones(4, 2))


def test_warnings_of_the_field_are_given_once() -> None:
    def field(t: Tensor, y: Any) -> Any:
        warnings.warn("slow", UserWarning, stacklevel=1)
        return y[0], y[0].sum(1)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert integral_leaves(field, state()) == (False, True)
    assert [str(warning.message) for warning in given] == ["slow"]


def test_errors_of_the_field_are_seen_only_at_the_true_state() -> None:
    def careful(z: Tensor, l: Tensor) -> Tensor:
        if torch.isnan(z).any():
            raise FloatingPointError("a NaN")
        return z

    assert integral_leaves(field_of(careful), state()) == (False, True)
    z, l = state()
    with pytest.raises(FloatingPointError, match="a NaN"):
        integral_leaves(field_of(careful), (z * math.nan, l))
    with pytest.raises(TypeError, match="field: returned None"):
        integral_leaves(lambda t, y: None, (z, l))
    with pytest.raises(ValueError, match=r"field\(t, y\)\[1\]: expected shape \(4,\) as in y0, found \(4, 2\)"):
        integral_leaves(lambda t, y: (z, z), (z, l))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"field": 3}, TypeError, r"field: expected a callable field\(t, y, \*args\), found int"),
        ({"y0": ()}, ValueError, "y0: expected at least one tensor, found an empty tuple"),
        ({"y0": {"a": torch.ones(2), "b": 1.0}}, TypeError, r"y0\['b'\]: expected a tensor, found float"),
        ({"y0": torch.ones(2, dtype=torch.int64)}, TypeError, "y0: expected a floating-point or complex dtype, found"),
        ({"y0": (torch.ones(2), torch.ones(2).double())}, TypeError, r"y0\[1\]: expected torch.float32 as in y0\[0\]"),
        ({"ts": 0.0}, TypeError, "ts: expected a 1-D tensor or a sequence of times, found float"),
        ({"ts": torch.zeros(2, 2)}, TypeError, "ts: expected a 1-D tensor or a sequence of times, found Tensor"),
        ({"ts": ()}, ValueError, "ts: expected at least one time, found none"),
        ({"ts": (0.0, math.inf)}, ValueError, r"ts: expected finite times, found \[0.0, inf\]"),
        ({"args": 3}, TypeError, "args: expected a tuple of extra arguments for the field, found int"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"field": lambda t, y: y, "y0": torch.ones(2), "ts": (0.0,), "args": ()} | change
    with pytest.raises(error, match=message):
        integral_leaves(given["field"], given["y0"], given["ts"], args=given["args"])


def test_evaluations_are_counted() -> None:
    calls = 0

    def field(t: Tensor, y: Any) -> Any:
        nonlocal calls
        calls += 1
        return y[0] * t, y[0].sum(1)

    y, t = state(), torch.zeros(())
    reader = Reader(field, Layout.of(y))
    assert reader.unread(t, y) == [False, True]
    assert reader.evaluations == calls == 1 + 2 + len(OTHERS)  # the truth, a NaN in each leaf, other values
    assert reader.unread(t, y, [False, True]) == [False, True]
    assert reader.evaluations == calls == 1 + 2 + len(OTHERS) + 3  # the truth, NaNs, other values
    assert reader.still_unread(t, y, [False, True])
    assert reader.evaluations == calls == 1 + 2 + len(OTHERS) + 3 + 1


def test_a_later_look() -> None:
    def field(t: Tensor, y: Any) -> Any:
        z, l, m = y
        far = z.abs().max() > 10.0
        return (z * rare(m)[:, None] if far else z), torch.ones_like(l), torch.ones_like(m)

    z, l = state()
    t, mask = torch.zeros(()), [False, True, True]
    reader = Reader(field, Layout.of((z, l, l)))
    assert reader.unread(t, (z, l, l)) == mask
    assert reader.still_unread(t, (2 * z, l, l), mask)
    assert not reader.still_unread(t, (20 * z, l, l), mask)
    assert reader.still_unread(t, (20 * z, l, l), [False, True, False])
    assert reader.unread(t, (20 * z, l, l), mask) == [False, True, False]
    assert not reader.still_unread(t, (z, l, l), [True, True, True])
    before = reader.evaluations
    assert reader.unread(t, (20 * z, l, l), [False, False, True]) == [False, False, False]
    assert reader.evaluations == before + 2  # the truth and NaNs; one leaf need not be tried again on its own


def test_the_compiler_is_not_loaded_for_this() -> None:
    code = (
        "import sys, torch\n"
        "from seminode.integrals import integral_leaves\n"
        "assert integral_leaves(lambda t, y: (y[0], y[0]), (torch.ones(2), torch.ones(2))) == (False, True)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
