"""Norms, compared with values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from seminode import norms
from seminode._error_norm import ROW_PART, ErrorNorm
from seminode._field.pytree import Layout
from seminode._ranks import ALONE
from seminode.norms import AdjointState, Moments


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NAN, INF = math.nan, math.inf
EMPTY = vector()
PAIR = (vector(3.0, 4.0), vector(0.0, 2.0, -6.0, 3.0))  # sums of squares 25 and 49

FORWARD = {
    "tensor, rms": (norms.rms, vector(3.0, 4.0), math.sqrt(12.5)),
    "tensor, max": (norms.max, vector(3.0, -4.0), 4.0),
    "tensor, mixed": (norms.mixed, vector(3.0, 4.0), math.sqrt(12.5)),
    "tensor, mixed_per_tensor": (norms.mixed_per_tensor, vector(3.0, 4.0), math.sqrt(12.5)),
    "matrix, rms": (norms.rms, torch.full((2, 5), -2.0), 2.0),
    "scalar, rms": (norms.rms, torch.tensor(-7.0), 7.0),
    "scalar, max": (norms.max, torch.tensor(-7.0), 7.0),
    "pair, rms": (norms.rms, PAIR, math.sqrt(74 / 6)),
    "pair, max": (norms.max, PAIR, 6.0),
    "pair, mixed": (norms.mixed, PAIR, math.sqrt(12.5)),
    "pair, mixed_per_tensor": (norms.mixed_per_tensor, PAIR, math.sqrt(12.5)),
    "second leaf larger": (
        norms.mixed_per_tensor,
        {"q": vector(1.0, 1.0), "p": [vector(0.0, 0.0, 6.0)]},
        math.sqrt(12),
    ),
    "one leaf in a list": (norms.mixed_per_tensor, [vector(3.0, 4.0)], math.sqrt(12.5)),
    "nested, rms": (norms.rms, {"q": vector(3.0), "p": [vector(4.0, 0.0), (vector(0.0),)]}, 2.5),
    "complex, rms": (norms.rms, torch.tensor([3.0 + 4.0j, 0.0]), math.sqrt(12.5)),
    "complex, max": (norms.max, torch.tensor([3.0 + 4.0j, 0.0]), 5.0),
    "zeros, rms": (norms.rms, torch.zeros(3), 0.0),
    "infinity, rms": (norms.rms, vector(1.0, INF), INF),
    "infinity, max": (norms.max, (vector(1.0), vector(-INF)), INF),
}


@pytest.mark.parametrize(("norm", "y", "expected"), FORWARD.values(), ids=FORWARD.keys())
def test_value(norm, y, expected):
    value = norm(y)
    assert value.numel() == 1
    assert not value.is_complex()
    assert float(value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", norms.FORWARD)
def test_nan_propagates(name):
    norm = norms.FORWARD[name]
    assert math.isnan(norm(vector(1.0, NAN)))
    assert math.isnan(norm((vector(1.0), vector(NAN, 0.0))))
    assert math.isnan(norm((vector(NAN), vector(1.0, 0.0))))


@pytest.mark.parametrize("name", norms.FORWARD)
@pytest.mark.parametrize("leaves", [(EMPTY, *PAIR), (PAIR[0], EMPTY, PAIR[1]), (*PAIR, EMPTY, EMPTY)])
def test_empty_leaves_are_ignored(name, leaves):
    norm = norms.FORWARD[name]
    assert float(norm(leaves)) == float(norm(PAIR))


def test_the_rms_does_not_depend_on_how_a_state_is_split():
    y = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64)
    whole = float(norms.rms(y))
    assert float(norms.rms(y.split(3))) == pytest.approx(whole)
    assert float(norms.rms({"a": y[:1], "b": (y[1:2], y[2:])})) == pytest.approx(whole)


# Norms of an adjoint state.

STATE = AdjointState(
    a_t=vector(10.0),
    z=vector(3.0, 4.0),
    a_z=vector(1.0, 7.0),
    a_params=(vector(20.0), vector(0.0, 0.0, 0.0)),
)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # The gradients of all parameters as one vector: sqrt(400 / 4) = 10, as large as a_t.
        ("mixed", {}, 10.0),
        ("mixed", {"a_t": vector(0.0)}, 10.0),
        ("mixed", {"a_t": vector(-11.0)}, 11.0),
        ("mixed", {"z": vector(50.0, 50.0)}, 50.0),
        ("mixed", {"a_z": (vector(1.0), vector(60.0))}, 60.0),
        ("mixed", {"a_t": vector(0.0), "a_params": ()}, 5.0),
        # Each parameter tensor by itself: sqrt(400 / 1) = 20.
        ("mixed_per_tensor", {}, 20.0),
        ("mixed_per_tensor", {"a_params": (vector(0.0),)}, 10.0),
        ("mixed_per_tensor", {"a_t": vector(0.0), "a_params": ()}, 5.0),
        ("seminorm", {}, 5.0),
        ("seminorm", {"z": vector(6.0, 8.0)}, math.sqrt(50.0)),
        ("seminorm", {"a_z": {"q": vector(1.0, 1.0), "p": vector(9.0)}}, 9.0),
        ("seminorm", {"a_params": ()}, 5.0),
        ("seminorm_rms", {}, math.sqrt(75 / 4)),
        ("seminorm_rms", {"z": (vector(3.0), vector(4.0, 0.0))}, math.sqrt(75 / 5)),
    ],
)
def test_adjoint_norm(name, changes, expected):
    assert float(norms.BACKWARD[name](STATE._replace(**changes))) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["seminorm", "seminorm_rms"])
@pytest.mark.parametrize("segment", ["a_t", "a_params"])
@pytest.mark.parametrize("value", [1e9, INF, NAN])
def test_a_seminorm_does_not_read_plain_integrals(name, segment, value):
    norm = norms.BACKWARD[name]
    assert float(norm(STATE._replace(**{segment: vector(value, 1.0)}))) == float(norm(STATE))


@pytest.mark.parametrize("name", ["mixed", "mixed_per_tensor"])
@pytest.mark.parametrize("segment", AdjointState._fields)
def test_a_mixed_norm_reads_every_segment(name, segment):
    assert float(norms.BACKWARD[name](STATE._replace(**{segment: vector(100.0)}))) == pytest.approx(100.0)


@pytest.mark.parametrize("segment", ["z", "a_z"])
@pytest.mark.parametrize("name", ["seminorm", "seminorm_rms"])
def test_a_seminorm_reads_state_and_adjoint(name, segment):
    assert float(norms.BACKWARD[name](STATE._replace(**{segment: vector(100.0)}))) > 50.0


@pytest.mark.parametrize("name", norms.BACKWARD)
@pytest.mark.parametrize("empty", [(), [], EMPTY, (EMPTY,), {"w": EMPTY}], ids=repr)
@pytest.mark.parametrize("segment", ["a_t", "a_params"])
def test_a_segment_without_entries_is_ignored(name, segment, empty):
    norm = norms.BACKWARD[name]
    zero = STATE._replace(**{segment: vector(0.0)})
    assert float(norm(STATE._replace(**{segment: empty}))) == pytest.approx(float(norm(zero)))


@pytest.mark.parametrize("name", ["seminorm", "seminorm_rms"])
@pytest.mark.parametrize("y", [vector(1.0), (vector(1.0),) * 4], ids=["tensor", "tuple of four"])
def test_a_seminorm_refuses_other_states(name, y):
    with pytest.raises(TypeError, match=rf"norms\.{name} expects an AdjointState .*, found (Tensor|tuple)"):
        norms.BACKWARD[name](y)


@pytest.mark.parametrize("name", ["mixed", "mixed_per_tensor"])
def test_mixed_norms_agree_on_an_ordinary_state(name):
    four = (vector(1.0), vector(2.0), vector(3.0), (vector(20.0), vector(0.0, 0.0, 0.0)))
    assert float(norms.BACKWARD[name](four)) == 20.0


# The norm of an error relative to the tolerances.


def error_norm(y: Any, rtol: Any, atol: Any, norm: norms.Norm = norms.max) -> ErrorNorm:
    layout = Layout.of(y)
    return ErrorNorm(layout, norm, rtol, atol, layout.pack(y))


def test_allowed_error():
    error = error_norm(vector(0.0, 0.0), 0.1, 0.5)
    assert error.allowed(vector(2.0, 10.0)).tolist() == pytest.approx([0.7, 1.5])
    error = error_norm(vector(0.0, 0.0), vector(0.1, 0.2), vector(0.5, 0.0))
    assert error.allowed(vector(2.0, 10.0)).tolist() == pytest.approx([0.7, 2.0])


def test_size_and_ratio():
    error = error_norm(vector(0.0, 0.0), 0.1, 0.5)
    assert float(error.size(vector(1.4, 1.5), vector(-2.0, 10.0))) == pytest.approx(2.0)
    # Each entry uses the larger of |y0| and |y1|.
    ratio = error.ratio(vector(-1.4, 3.0), vector(2.0, 0.0), vector(1.0, -10.0))
    assert float(ratio) == pytest.approx(2.0)


def test_ratio_of_a_complex_state_is_real():
    y = torch.tensor([3.0 + 4.0j, 0.0j], dtype=torch.complex128)
    error = error_norm(y, 0.1, 0.5)
    ratio = error.ratio(torch.tensor([0.6 + 0.8j, 0.0j], dtype=torch.complex128), y, 0 * y)
    assert isinstance(ratio, float)
    assert float(ratio) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_that_stays_zero_has_no_error(dtype):
    zero = torch.zeros(2, dtype=dtype)
    assert float(error_norm(zero, 1e-3, 0.0).ratio(zero, zero, zero)) == 0.0


def test_the_norm_receives_the_structure_of_the_state():
    received = []

    def norm(ratio):
        received.append(ratio)
        return norms.rms(ratio)

    y = {"q": vector(1.0, 2.0), "p": (torch.ones(2, 2, dtype=torch.float64),)}
    error = error_norm(y, 0.0, 2.0, norm)
    error.size(vector(2.0, 4.0, 6.0, 8.0, 10.0, 12.0), torch.zeros(6, dtype=torch.float64))
    (ratio,) = received
    assert list(ratio) == ["q", "p"]
    assert ratio["q"].tolist() == [1.0, 2.0]
    assert ratio["p"][0].tolist() == [[3.0, 4.0], [5.0, 6.0]]


def test_worst_leaf():
    y = {"q": vector(0.0, 0.0), "none": EMPTY, "p": vector(0.0)}
    error = error_norm(y, 0.0, vector(1.0, 1.0, 100.0))
    zero = torch.zeros(3, dtype=torch.float64)
    assert error.worst_leaf(vector(0.0, 2.0, 50.0), zero, zero) == "y['q']"
    assert error.worst_leaf(vector(0.0, 2.0, 500.0), zero, zero) == "y['p']"
    assert error_norm(vector(1.0), 0.0, 1.0).worst_leaf(vector(1.0), vector(1.0), vector(1.0)) is None


@pytest.mark.parametrize(
    ("value", "found"),
    [(0.5, "float"), (None, "NoneType"), (torch.ones(2), r"\(2,\)"), (torch.ones(0), r"\(0,\)")],
    ids=repr,
)
def test_a_norm_must_return_a_0d_tensor(value, found):
    def norm(_: Any) -> Any:
        return value

    with pytest.raises(ValueError, match=rf"norm: expected a function that returns a 0-d tensor, found {found}"):
        error_norm(vector(1.0), 0.0, 1.0, norm).size(vector(1.0), vector(1.0))


def test_entries_are_measured_by_their_rows() -> None:
    y = {"a": torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
    layout = error_norm(y, 0.1, 1.0).layout
    flat = layout.pack(y)
    norm = ErrorNorm(layout, norms.max, 0.1, 1.0, flat, in_rows=(True, False))
    part = ROW_PART * 2.0
    expected = [1.0 + 0.1 * (4.0 + part), 1.0 + 0.1 * part, 1.0, 1.0, 1.1, 1.1, 1.1]
    assert norm.allowed(flat).tolist() == pytest.approx(expected, rel=1e-15)
    assert torch.equal(norm.scaled(0.5).allowed(flat), 0.5 * norm.allowed(flat))


def test_large_rows_do_not_overflow() -> None:
    y = torch.full((2, 4), 1e30)
    norm = ErrorNorm(error_norm(y, 0.1, 1.0).layout, norms.max, 0.1, 1.0, y, in_rows=(True,))
    assert norm.allowed(y.flatten()).isfinite().all()


def test_moments_make_the_norm_of_one_process() -> None:
    y = (torch.randn(5, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64))
    for norm in (norms.rms, norms.max, norms.mixed_per_tensor, norms.Without((False, True))):
        moments = norms.Moments(norm)
        counts = [] if norm is norms.max else ALONE.sums(moments.counts(y))
        assert math.isclose(moments.value(moments(y), counts, ALONE), float(norm(y)), rel_tol=1e-14)


@pytest.mark.parametrize("norm", [norms.seminorm, norms.seminorm_rms])
def test_moments_make_the_norm_of_an_adjoint_state(norm: Any) -> None:
    """Which does not read the gradients of times and parameters; z may have no leaves, or be the larger part."""
    large = vector(1e9, -1e9)
    for z in (vector(3.0, -4.0, 0.5), (vector(30.0), vector(1.0, 2.0)), ()):
        y = AdjointState(a_t=large, z=z, a_z=vector(6.0, -1.0), a_params=(large,))
        moments = Moments(norm)
        found = moments.value(moments(y), ALONE.sums(moments.counts(y)), ALONE)
        assert found == pytest.approx(float(norm(y)), rel=1e-14)


def test_moments_of_ranks_without_entries() -> None:
    """A rank may hold none of a leaf; the largest of nothing is zero."""
    for norm in (norms.rms, norms.max, norms.mixed_per_tensor):
        moments = Moments(norm)
        y = (EMPTY, EMPTY)
        counts = [] if norm is norms.max else ALONE.sums(moments.counts(y))
        assert moments(y).dtype == torch.float64
        assert moments.value(moments(y), counts, ALONE) == 0.0
        assert not any(counts)


def test_norms_that_read_part_of_an_adjoint_state() -> None:
    state = AdjointState(a_t=vector(7.0), z=vector(1.0), a_z=vector(2.0), a_params=vector(3.0))
    for segment in ("a_t", "z", "a_z", "a_params"):
        reading = norms.Reading(lambda y, name=segment: norms.max(getattr(y, name)), time=True)
        assert float(reading(state)) == float(getattr(state, segment))
    assert (norms.Reading(norms.rms).time, norms.Reading(norms.rms).params) == (False, False)
    assert (norms.Reading(norms.rms, params=True).time, norms.Reading(norms.rms, params=True).params) == (False, True)


def test_what_is_left_out_is_not_everything() -> None:
    with pytest.raises(ValueError, match=r"^integrals: expected at least one leaf .*, found \(True, True\)$"):
        norms.Without((True, True))
    without = norms.Without([True, False])
    assert repr(without) == "Without((True, False))"
    assert hash(without) == hash(norms.Without((True, False)))
    assert without != norms.Without((False, True))
    assert float(without((vector(9.0), vector(3.0, 4.0)))) == pytest.approx(math.sqrt(12.5))


def test_a_distributed_norm_is_named_by_its_norm() -> None:
    names = {None: "", "auto": "auto", "rms": "rms", norms.Without((True, False)): "Without((True, False))"}
    for norm, name in names.items():
        assert repr(norms.distributed(norm)) == f"distributed({name})"
    with pytest.raises(
        TypeError, match=r"^norms.distributed\('auto'\) depends on a field: it is an argument of solve$"
    ):
        norms.distributed("auto")(vector(1.0))
    group: Any = object()
    assert norms.Distributed(norms.rms, group).over(norms.max) == norms.Distributed(norms.max, group)


def test_only_norms_of_the_library_depend_on_the_state_only() -> None:
    own = (*norms.FORWARD.values(), *norms.BACKWARD.values(), norms.Without((True, False)))
    for norm in own:
        assert norms.depends_on_state_only(norm)
        assert norms.depends_on_state_only(Moments(norm))
        assert norms.depends_on_state_only(norms.EachSample(norm))
    for other in (lambda y: y.sum(), norms.Reading(norms.rms)):
        assert not norms.depends_on_state_only(other)
        assert not norms.depends_on_state_only(norms.EachSample(other))


def test_moments_keep_nan() -> None:
    y = torch.tensor([1.0, math.nan])
    moments = norms.Moments(norms.rms)
    assert math.isnan(moments.value(moments(y), [2.0], ALONE))


@pytest.mark.parametrize("name", [*norms.FORWARD, "auto", None])
def test_a_distributed_norm_is_that_of_all_processes_by_default(name: str | None) -> None:
    norm = norms.distributed(name)
    assert norm.group is None
    assert norm.norm is norms.FORWARD.get(name or "", name)


def test_a_distributed_norm_refuses_what_is_no_group_and_no_norm() -> None:
    group: Any = 3
    with pytest.raises(TypeError, match=r"^group: expected a torch.distributed.ProcessGroup or None, found int$"):
        norms.distributed("rms", group)
    with pytest.raises(ValueError, match=r"^norm: expected one of .* or auto, found 'seminorm'$"):
        norms.distributed("seminorm")
    with pytest.raises(TypeError, match=r"^norm: expected .* of one rank, found a distributed one$"):
        norms.distributed(norms.distributed())
    with pytest.raises(TypeError, match=r"^norm: expected one of .*all_reduce itself"):
        norms.distributed(lambda y: y.sum())


def test_moments_are_equal_if_their_norms_are() -> None:
    assert Moments(norms.rms) == Moments(norms.rms)
    assert hash(Moments(norms.rms)) == hash(Moments(norms.rms))
    assert Moments(norms.rms) != Moments(norms.max)
    assert Moments(norms.rms) != norms.rms


@pytest.mark.parametrize("name", [*norms.FORWARD, None])
def test_a_distributed_norm_of_one_process_is_that_norm(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name, that of `solve`."""
    monkeypatch.setattr(norms, "Ranks", lambda group: ALONE)
    expected = norms.FORWARD[name or "mixed_per_tensor"](PAIR)
    found = norms.distributed(name)(PAIR)
    assert (found.shape, found.dtype) == ((), torch.float64)
    assert float(found) == pytest.approx(float(expected), rel=1e-14)


def test_norms_of_samples_are_equal_if_those_of_a_sample_are() -> None:
    each = norms.EachSample(norms.rms)
    assert each == norms.EachSample(norms.rms)
    assert hash(each) == hash(norms.EachSample(norms.rms))
    assert each != norms.EachSample(norms.max)
    assert each != norms.rms
    left_out = norms.EachSample(norms.Without((True, False)))
    assert left_out == norms.EachSample(norms.Without((True, False)))
    assert left_out != norms.EachSample(norms.Without((False, True)))


@pytest.mark.parametrize("norm", [*norms.FORWARD.values(), norms.Without((False, True))])
def test_norms_of_samples_are_those_of_each_alone(norm: Any) -> None:
    pair = (
        torch.tensor([[3.0, -4.0], [0.5, 7.0], [0.0, 0.0]]),
        torch.tensor([[[9.0, 2.0]], [[-1.0, 1.0]], [[0.0, 2.0]]]),
    )
    states: list[Any] = [pair, {"q": pair[1], "p": pair[0]}]
    if not isinstance(norm, norms.Without):
        states += [pair[0], pair[1], [pair[0]], (torch.zeros(3, 0), pair[1])]
    for state in states:
        found = norms.EachSample(norm)(state)
        assert found.shape == (3,)
        for i in range(3):
            if isinstance(state, Tensor):
                alone: Any = state[i]
            else:
                alone = [leaf[i] for leaf in (state.values() if isinstance(state, dict) else state)]
            assert float(found[i]) == pytest.approx(float(norm(alone)), rel=1e-6)
