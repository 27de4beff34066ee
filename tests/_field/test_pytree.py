"""Structures of tensors to one flat tensor and back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from seminode._field.pytree import Layout, flatten, same_nesting, unflatten


class Phase(NamedTuple):
    q: Any
    p: Any


def numbered(*shape: int, start: float = 0.0) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + start


A, B, C = numbered(2, 3), numbered(4, start=10.0), numbered(start=20.0)
EMPTY = numbered(3, 0)

STRUCTURES = {
    "tensor": A,
    "scalar": C,
    "tuple": (A, B),
    "one in a tuple": (A,),
    "list": [A, B, C],
    "dict": {"q": A, "p": B},
    "dict of numbers": {0: A, 1: B},
    "named tuple": Phase(A, B),
    "ordered dict": OrderedDict(q=A, p=B),
    "deep": {"x": (A, [B, {"y": C}]), "z": Phase(q=(A,), p=[])},
    "empty leaf first": (EMPTY, B),
    "empty leaf between": [A, EMPTY, C],
    "empty containers": ((), A, {}, [[]]),
}
structures = pytest.mark.parametrize("tree", STRUCTURES.values(), ids=STRUCTURES.keys())


def assert_same(actual: Any, expected: Any) -> None:
    """Equal leaves in equal containers of the same classes."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
        return
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@structures
def test_unflatten_is_the_inverse_of_flatten(tree):
    leaves, node = flatten(tree)
    assert_same(unflatten(node, iter([leaf for _, leaf in leaves])), tree)


@structures
def test_pack_and_unpack_are_inverse(tree):
    layout = Layout.of(tree)
    flat = layout.pack(tree)
    assert isinstance(flat, Tensor)
    assert_same(layout.unpack(flat), tree)


@structures
@pytest.mark.parametrize("lead", [(5,), (5, 2), (0,), (1, 1)], ids=str)
def test_lead_axes_stay_in_front(tree, lead):
    layout = Layout.of(tree)
    flat = layout.pack(tree)
    many = flat.expand(*lead, *flat.shape) + torch.arange(torch.Size(lead).numel()).reshape(
        *lead, *(1 for _ in flat.shape)
    )
    leaves = [leaf for _, leaf in flatten(tree)[0]]
    unpacked = [leaf for _, leaf in flatten(layout.unpack(many, lead=len(lead)))[0]]
    assert [leaf.shape for leaf in unpacked] == [(*lead, *leaf.shape) for leaf in leaves]
    for leaf, expected in zip(unpacked, leaves, strict=True):
        for i, row in enumerate(leaf.reshape(-1, *expected.shape) if leaf.numel() else ()):
            assert torch.equal(row, expected + i)


def test_the_flat_tensor_holds_the_leaves_in_order():
    layout = Layout.of({"x": (A, [C]), "y": B})
    flat = layout.pack({"x": (A, [C]), "y": B})
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 20, 10, 11, 12, 13]
    assert layout.shapes == (A.shape, C.shape, B.shape)


def test_leaves_are_named_by_their_path():
    tree = {"x": (A, [B, {"y": C}]), 3: Phase(q=A, p=B)}
    names = ["z['x'][0]", "z['x'][1][0]", "z['x'][1][1]['y']", "z[3][0]", "z[3][1]"]
    assert [name for name, _ in flatten(tree, "z")[0]] == names
    assert Layout.of(tree, "z").names == tuple(names)
    assert Layout.of(A, "y0").names == ("y0",)


def test_a_single_tensor_is_left_as_it_is():
    y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout.of(y)
    assert layout.single
    assert layout.pack(y) is y
    assert layout.unpack(y) is y
    assert layout.segments(y)[0] is y


def test_a_container_of_one_tensor_is_not_a_single_tensor():
    layout = Layout.of([A])
    assert not layout.single
    assert layout.pack([A]).shape == (6,)


def test_segments_are_views():
    layout = Layout.of((A, B))
    flat = layout.pack((A, B))
    first, second = layout.segments(flat)
    assert first.data_ptr() == flat.data_ptr()
    flat[-1] = 99.0
    assert second[-1] == 99.0


def test_gradients_flow_through_pack_and_unpack():
    a, b = (x.clone().requires_grad_() for x in (A, B))
    layout = Layout.of((a, b))
    first, second = layout.unpack(layout.pack((a, b)) * 3)
    (first.sum() + 2 * second.sum()).backward()
    assert a.grad is not None
    assert torch.equal(a.grad, torch.full_like(A, 3.0))
    assert b.grad is not None
    assert torch.equal(b.grad, torch.full_like(B, 6.0))


def test_a_default_dict_is_a_dict():
    tree: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()), q=A, p=B)
    layout = Layout.of(tree)
    back = layout.unpack(layout.pack(tree))
    assert isinstance(back, dict)
    assert list(back) == ["q", "p"]
    assert torch.equal(back["p"], B)


# The leaf to blame.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("index", "name"), [(0, "y['q']"), (5, "y['q']"), (6, "y['p'][1]"), (9, "y['p'][1]"), (10, "y['p'][2]")]
)
def test_non_finite_leaf_names_the_leaf(index, name, bad):
    tree = {"q": A, "p": (EMPTY, B, C)}
    layout = Layout.of(tree)
    flat = layout.pack(tree)
    assert layout.non_finite_leaf(flat) is None
    flat[index] = bad
    assert layout.non_finite_leaf(flat) == name


def test_non_finite_leaf_is_the_first_of_several():
    layout = Layout.of((A, B, C))
    assert layout.non_finite_leaf(torch.full((11,), float("nan"))) == "y[0]"


def test_non_finite_leaf_of_a_single_tensor_and_of_a_complex_one():
    assert Layout.of(A, "y0").non_finite_leaf(A) is None
    assert Layout.of(A, "y0").non_finite_leaf(A / 0.0) == "y0"
    assert Layout.of((A, B)).non_finite_leaf(torch.full((10,), complex(1.0, float("nan")))) == "y[0]"


# Nestings compared.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (A, 1e-3),
        ((1, 2), (3, 4)),
        ((1, 2), Phase(3, 4)),
        (Phase(1, 2), (3, 4)),
        ([1, (2,)], [3, (4,)]),
        ({"q": 1, "p": 2}, {"p": 3, "q": 4}),
        ({"q": 1}, OrderedDict(q=2)),
        ((), ()),
    ],
    ids=repr,
)
def test_same_nesting(one, other):
    assert same_nesting(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, (1,)),
        ((1,), 1),
        (1, [1]),
        (1, {"q": 1}),
        ((1, 2), [1, 2]),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2, 3)),
        ((1, 2), (1,)),
        ({"q": 1}, {"p": 1}),
        ({"q": 1, "p": 2}, {"q": 1}),
        ({"q": 1}, {"q": 1, "p": 2}),
        ({"q": 1}, (1,)),
        ((1, (2,)), (1, 2)),
        ((1, 2), (1, (2,))),
    ],
    ids=repr,
)
def test_other_nesting(one, other):
    assert not same_nesting(one, other)
