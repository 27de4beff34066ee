"""What `solve` takes and what it refuses: every message names the argument, what was found and what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import seminode as sn

NAN, INF = math.nan, math.inf


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


Y0 = vector(1.0, 2.0, 3.0)
META = torch.empty(3, dtype=torch.float64, device="meta")


def decay(t: Tensor, y: Any) -> Any:
    return -y


def pair_decay(t: Tensor, y: Any) -> Any:
    """The rotation of two leaves, in tuples."""
    return (y[1], -y[0])


def oscillator(t: Tensor, y: Any) -> Any:
    return {"q": y["p"], "p": -y["q"]}


def solve(field: Any = decay, y0: Any = Y0, ts: Any = (0.0, 1.0), **options: Any) -> sn.Solution:
    """`sn.solve` with a good problem, whatever of it is changed."""
    return sn.solve(field, y0, ts, **options)


def refused(cases: dict[str, tuple[Any, Any, str]]) -> Any:
    """One test a bad value: the value, the error, and what its message starts with and says."""
    return pytest.mark.parametrize(("value", "error", "message"), cases.values(), ids=cases.keys())


# field


@refused(
    {
        "nothing": (None, TypeError, r"^field: expected a callable field\(t, y, \*args\), found NoneType"),
        "number": (3.0, TypeError, r"^field: expected a callable .* found float"),
        "tensor": (Y0, TypeError, r"^field: expected a callable .* found Tensor"),
        "name": ("decay", TypeError, r"^field: expected a callable .* found str"),
    }
)
def test_bad_field(value, error, message):
    with pytest.raises(error, match=message):
        solve(field=value)


# y0


@refused(
    {
        "nothing": (None, TypeError, r"^y0: expected a tensor, found NoneType"),
        "number": (1.0, TypeError, r"^y0: expected a tensor, found float"),
        "array": (np.ones(3), TypeError, r"^y0: expected a tensor, found ndarray"),
        "numbers": ([1.0, 2.0], TypeError, r"^y0\[0\]: expected a tensor, found float"),
        "a number among tensors": (
            {"q": Y0, "p": (Y0, 1)},
            TypeError,
            r"^y0\['p'\]\[1\]: expected a tensor, found int",
        ),
        "int": (torch.ones(3, dtype=torch.int64), TypeError, r"^y0: expected a floating-point .* found torch\.int64"),
        "bool": (torch.ones(3) > 0, TypeError, r"^y0: expected a floating-point .* found torch\.bool"),
        "nested int": ((Y0, [torch.arange(3)]), TypeError, r"^y0\[1\]\[0\]: expected .* found torch\.int64"),
        "float8": (
            torch.ones(3).to(torch.float8_e4m3fn),
            TypeError,
            r"^y0: expected float32, .* found torch\.float8_e4m3fn",
        ),
        "two dtypes": (
            {"q": Y0, "p": Y0.float()},
            TypeError,
            r"^y0: expected one dtype throughout, found torch\.float64 in y0\['q'\] and torch\.float32 in y0\['p'\]",
        ),
        "real and complex": (
            (Y0, Y0.to(torch.complex128)),
            TypeError,
            r"^y0: expected one dtype throughout, found torch\.float64 in y0\[0\] and torch\.complex128 in y0\[1\]",
        ),
        "two devices": (
            [Y0, META],
            ValueError,
            r"^y0: expected one device throughout, found cpu in y0\[0\] and meta in y0\[1\]",
        ),
        "empty": (torch.empty(0), ValueError, r"^y0: expected at least one element, found none"),
        "empty matrix": (torch.empty(3, 0), ValueError, r"^y0: expected at least one element, found none"),
        "empty leaves": ((torch.empty(0), torch.empty(0, 2)), ValueError, r"^y0: expected at least one element"),
        "empty tuple": ((), ValueError, r"^y0: expected at least one tensor, found an empty tuple"),
        "empty list": ([], ValueError, r"^y0: expected at least one tensor, found an empty list"),
        "empty dict": ({}, ValueError, r"^y0: expected at least one tensor, found an empty dict"),
        "nested, no leaves": (
            {"q": [], "p": ()},
            ValueError,
            r"^y0: expected at least one tensor, found an empty dict",
        ),
    }
)
def test_bad_y0(value, error, message):
    with pytest.raises(error, match=message):
        solve(y0=value)


class Pair(NamedTuple):
    q: Any
    p: Any


@pytest.mark.parametrize(
    "nest",
    [
        lambda y: (y,),
        lambda y: [y, y[:1]],
        lambda y: {"q": y, "p": [y, (y,)]},
        lambda y: Pair(y, {"x": y}),
        lambda y: (y, torch.empty(0, dtype=y.dtype)),
        lambda y: {"none": (), "y": y[0]},
    ],
    ids=["tuple", "list", "nested", "named tuple", "empty leaf", "0-d leaf"],
)
def test_any_nesting_of_y0(nest):
    def field(t, y):
        return pytree.tree_map(torch.neg, y)

    y0 = nest(Y0)
    sol = solve(field, y0, [0.0, 0.5, 1.0], rtol=1e-9, atol=1e-9)
    ys, spec = pytree.tree_flatten(sol.ys)
    leaves, expected_spec = pytree.tree_flatten(y0)
    assert spec == expected_spec
    for leaf, start in zip(ys, leaves, strict=True):
        assert leaf.shape == (3, *start.shape)
        torch.testing.assert_close(leaf[1], start * math.exp(-0.5), rtol=1e-7, atol=1e-7)


# ts


@refused(
    {
        "nothing": (None, TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found NoneType"),
        "number": (1.0, TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found float"),
        "words": (["start", "end"], TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found list"),
        "digits": (["0", "1"], TypeError, r"^ts: expected "),
        "a word": ("now", TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found str"),
        "a string of digits": ("01", TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found str"),
        "list of lists": ([[0.0, 1.0]], TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found list"),
        "complex tensor": (torch.tensor([0j, 1j]), TypeError, r"^ts: expected real times, found torch\.complex64"),
        "complex numbers": ([0j, 1j], TypeError, r"^ts: expected a 1-D tensor or a sequence of times, found list"),
        "bool tensor": (torch.tensor([False, True]), TypeError, r"^ts: expected real times, found torch\.bool"),
        "empty list": ([], ValueError, r"^ts: expected shape \(n,\) with n >= 1, found \(0,\)"),
        "empty tensor": (torch.empty(0), ValueError, r"^ts: expected shape \(n,\) with n >= 1, found \(0,\)"),
        "0-d": (torch.tensor(1.0), ValueError, r"^ts: expected shape \(n,\) with n >= 1, found \(\)"),
        "2-D": (torch.zeros(2, 3), ValueError, r"^ts: expected shape \(n,\) with n >= 1, found \(2, 3\)"),
        "NaN": ([0.0, NAN, 1.0], ValueError, r"^ts\[1\]: expected a finite time, found nan"),
        "NaN at the start": (torch.tensor([NAN, 1.0]), ValueError, r"^ts\[0\]: expected a finite time, found nan"),
        "infinity": ([0.0, INF], ValueError, r"^ts\[1\]: expected a finite time, found inf"),
        "up and down": (
            [0.0, 2.0, 1.0, 3.0],
            ValueError,
            r"^ts: expected monotone times; they are increasing overall, but ts\[2\] = 1\.0 after 2\.0",
        ),
        "down and up": (
            torch.tensor([3.0, 1.0, 2.0, 0.0]),
            ValueError,
            r"^ts: expected monotone times; they are decreasing overall, but ts\[2\] = 2\.0 after 1\.0",
        ),
        "there and back": ([0.0, 1.0, 0.0], ValueError, r"^ts: expected monotone times.* ts\[2\] = 0\.0 after 1\.0"),
        "no way to differentiate": (
            torch.zeros(3, requires_grad=True),
            ValueError,
            r"^ts: all times are the same, .* pass ts\.detach\(\)",
        ),
    }
)
def test_bad_ts(value, error, message):
    with pytest.raises(error, match=message):
        solve(ts=value)


@pytest.mark.parametrize(
    "ts",
    [
        [0, 1, 2],
        (0.0, 1.0, 2.0),
        range(3),
        np.array([0.0, 1.0, 2.0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64),
        torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16),
    ],
    ids=["ints", "tuple", "range", "array", "int tensor", "float32", "float64", "bfloat16"],
)
def test_times_of_any_kind(ts):
    sol = solve(ts=ts, rtol=1e-9, atol=1e-9)
    assert sol.ts.tolist() == [0.0, 1.0, 2.0]
    assert sol.ts.is_floating_point()
    expected = Y0 * torch.exp(-torch.arange(3, dtype=torch.float64))[:, None]
    torch.testing.assert_close(sol.ys, expected, rtol=1e-7, atol=1e-7)


def test_tensors_of_times_in_a_list_keep_their_gradient_or_are_refused():
    end = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    try:
        sol = solve(ts=[torch.zeros(()), end])
    except (TypeError, ValueError) as error:
        assert str(error).startswith("ts")  # noqa: PT017
    else:
        (grad,) = torch.autograd.grad(sol.ys[-1].sum(), end)
        assert float(grad) == pytest.approx(-6.0 * math.exp(-1.0), rel=1e-4)


def test_times_may_be_repeated():
    sol = solve(ts=[0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0])
    once = solve(ts=[0.0, 0.5, 1.0])
    torch.testing.assert_close(sol.ys, once.ys[[0, 0, 1, 1, 1, 2, 2]], rtol=1e-14, atol=0.0)
    assert sol.stats == once.stats


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
@pytest.mark.parametrize("ts", [[2.0], [2.0, 2.0, 2.0]], ids=["one", "all the same"])
def test_an_interval_without_length(ts, adjoint):
    y0 = Y0.clone().requires_grad_()
    sol = solve(y0=y0, ts=ts, adjoint=adjoint)
    assert sol.stats.nfe == 0
    assert torch.equal(sol.ys, Y0.expand(len(ts), 3))
    sol.ys.sum().backward()
    assert y0.grad is not None
    assert torch.equal(y0.grad, torch.full_like(Y0, len(ts)))


# solver


@refused(
    {
        "typo": ("dorpi5", ValueError, r"^solver: unknown name 'dorpi5'; did you mean 'dopri5'\?"),
        "capitals": ("DOPRI8", ValueError, r"^solver: unknown name 'DOPRI8'; did you mean 'dopri8'\?"),
        "another typo": ("eular", ValueError, r"^solver: unknown name 'eular'; did you mean 'euler'\?"),
        "nothing near": ("zzz", ValueError, r"^solver: unknown name 'zzz'.*Known: euler, .*tsit5"),
        "class": (sn.Dopri5, TypeError, r"^solver: expected an object, found the class Dopri5; pass Dopri5\(\)"),
        "number": (5, TypeError, r"^solver: expected a name or a Solver, found int"),
        "nothing": (None, TypeError, r"^solver: expected a name or a Solver, found NoneType"),
    }
)
def test_bad_solver(value, error, message):
    with pytest.raises(error, match=message):
        solve(solver=value)


@pytest.mark.parametrize("name", ["bosh3", "adaptive_heun", "fehlberg2", "dopri5", "tsit5", "dopri8"])
def test_a_solver_by_name_is_the_object(name):
    objects = (sn.Bosh3(), sn.AdaptiveHeun(), sn.Fehlberg2(), sn.Dopri5(), sn.Tsit5(), sn.Dopri8())
    (solver,) = [solver for solver in objects if solver.name == name]
    by_name, by_object = solve(solver=name), solve(solver=solver)
    assert torch.equal(by_name.ys, by_object.ys)
    assert by_name.stats == by_object.stats


# controller


@refused(
    {
        "class": (sn.PID, TypeError, r"^controller: expected a Controller, found the class PID"),
        "number": (0.1, TypeError, r"^controller: expected a Controller, found float"),
        "name": ("pid", TypeError, r"^controller: expected a Controller, found str"),
    }
)
def test_bad_controller(value, error, message):
    with pytest.raises(error, match=message):
        solve(controller=value)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "heun", "ralston", "rk4"])
def test_a_solver_without_an_error_estimate_needs_fixed_steps(solver):
    with pytest.raises(
        ValueError, match=rf"^controller: solver '{solver}' has no error estimate .*sn\.FixedStep\(0\.1\)"
    ):
        solve(solver=solver)
    for controller in (sn.Integral(), sn.PID()):
        kind = type(controller).__name__
        with pytest.raises(ValueError, match=rf"^controller: {kind} needs an error estimate, which solver '{solver}'"):
            solve(solver=solver, controller=controller)
    assert solve(solver=solver, controller=sn.FixedStep(0.25)).stats.accepted == 4


@pytest.mark.parametrize("controller", [sn.FixedStep(0.25), sn.PrescribedSteps([0.25])], ids=["fixed", "prescribed"])
@pytest.mark.parametrize("options", [{"rtol": 1e-3}, {"atol": 1e-3}, {"norm": "rms"}], ids=lambda o: next(iter(o)))
def test_options_that_would_do_nothing_are_refused(controller, options):
    (name,) = options
    kind = type(controller).__name__
    with pytest.raises(ValueError, match=rf"^{name}: does nothing with {kind}, which ignores the error"):
        solve(controller=controller, **options)


def controllers(name: str, make: Callable[..., Any], *values: Any) -> list[Any]:
    return [pytest.param(name, partial(make, **{name: value}), id=f"{name}={value!r}") for value in values]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *controllers("dt", sn.FixedStep, 0.0, -0.1, NAN, "a", None),
        *controllers("dts", sn.PrescribedSteps, [0.1, 0.0], [-0.1], [NAN], 0.1, ["a"]),
        *controllers("step_to", partial(sn.FixedStep, dt=0.1), [0.5, NAN], [INF], 0.5, ["a"]),
        *controllers("step_to", sn.Integral, [0.5, NAN], [INF], 0.5, ["a"]),
        *controllers("safety", sn.Integral, 0.0, -0.9, NAN, 1.5, "a"),
        *controllers("factor_min", sn.PID, 0.0, -0.2, 1.0, NAN),
        *controllers("factor_max", sn.PID, 0.5, 1.0, -1.0, NAN),
        *controllers("dt0", sn.Integral, 0.0, -1.0, NAN, "a"),
        *controllers("dt_min", sn.Integral, -1.0, NAN, "a"),
        *controllers("dt_min", partial(sn.Integral, dt_max=0.1), 0.2),
        *controllers("dt_max", sn.Integral, 0.0, -1.0, NAN),
        *controllers("at_dt_min", partial(sn.Integral, dt_min=0.1), "ignore", True),
        *controllers("at_dt_min", sn.Integral, "accept"),
        *controllers("pcoeff", sn.PID, NAN, INF),
        *controllers("icoeff", sn.PID, NAN),
        *controllers("dcoeff", sn.PID, NAN),
        *controllers("name", sn.PID.preset, "PI43", "pi34"),
    ],
)
def test_bad_option_of_a_controller(name, make):
    with pytest.raises((TypeError, ValueError), match=rf"^({name}(\[\d\])?|factor_min, factor_max): ") as caught:
        make()
    assert "expected" in str(caught.value) or "does nothing" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sn.FixedStep(-0.1), r"^dt: expected a positive number, found -0\.1$"),
        (lambda: sn.PrescribedSteps([0.1, -0.1]), r"^dts\[1\]: expected a positive step, found -0\.1$"),
        (lambda: sn.PID(step_to=[0.0, NAN]), r"^step_to\[1\]: expected a finite time, found nan$"),
        (lambda: sn.PID(dt_min=2.0, dt_max=1.0), r"^dt_min: expected 0 <= dt_min <= dt_max = 1\.0, found 2\.0$"),
        (
            lambda: sn.PID(at_dt_min="x", dt_min=1e-3),  # type: ignore[arg-type]
            r"^at_dt_min: expected 'raise' or 'accept', found 'x'$",
        ),
        (lambda: sn.PID(at_dt_min="accept"), r"^at_dt_min: 'accept' does nothing without a dt_min$"),
        (lambda: sn.PID.preset("PI43"), r"^name: expected one of PI33, .*, found 'PI43'$"),  # type: ignore[arg-type]
    ],
)
def test_what_a_controller_says(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# rtol and atol

NUMBERS = {
    "negative": (-1e-3, ValueError, "expected a finite number of at least 0, found -0.001"),
    "NaN": (NAN, ValueError, "expected a finite number of at least 0, found nan"),
    "infinite": (INF, ValueError, "expected a finite number of at least 0, found inf"),
    "NaN tensor": (torch.tensor(NAN), ValueError, "expected a finite number of at least 0, found nan"),
    "a negative entry": (torch.tensor([1e-3, -1e-3, 0.0]), ValueError, "expected a finite number of at least 0"),
    "name": ("tight", TypeError, "expected a number or the nesting of y0, found str"),
    "flag": (True, TypeError, "expected a number or the nesting of y0, found bool"),
    "complex": (1e-3j, TypeError, "expected a number or the nesting of y0, found complex"),
    "list": ([1e-3, 1e-3, 1e-3], TypeError, "expected a number or the nesting of y0, found list"),
    "dict": ({"q": 1e-3}, TypeError, "expected a number or the nesting of y0, found dict"),
    "shape": (torch.full((2,), 1e-3), ValueError, r"expected a shape that broadcasts to \(3,\), found \(2,\)"),
    "too many axes": (torch.ones(1, 3), ValueError, r"expected a shape that broadcasts to \(3,\), found \(1, 3\)"),
}


@pytest.mark.parametrize("name", ["rtol", "atol"])
@refused(NUMBERS)
def test_bad_tolerance(name, value, error, message):
    with pytest.raises(error, match=rf"^{name}: {message}"):
        solve(**{name: value})


@pytest.mark.parametrize("name", ["rtol", "atol"])
@refused(
    {
        "one too few": ((1e-3,), TypeError, r": expected a number or the nesting of y0, found tuple"),
        "list for tuple": ([1e-3, 1e-3], TypeError, r": expected a number or the nesting of y0, found list"),
        "tensor": (torch.full((6,), 1e-3), TypeError, r": expected a number or the nesting of y0, found Tensor"),
        "too deep": ((1e-3, (1e-3,)), TypeError, r": expected a number or the nesting of y0, found tuple"),
        "negative": ((1e-3, -1.0), ValueError, r"\[1\]: expected a finite number of at least 0, found -1\.0"),
        "NaN": ((torch.tensor(NAN), 1e-3), ValueError, r"\[0\]: expected a finite number of at least 0"),
        "shape": (
            (1e-3, torch.ones(2)),
            ValueError,
            r"\[1\]: expected a shape that broadcasts to \(3,\), found \(2,\)",
        ),
        "word": ((1e-3, "tight"), TypeError, r"\[1\]: expected a number .*found str"),
        "nothing": ((1e-3, None), TypeError, r"\[1\]: expected a number .*found NoneType"),
    }
)
def test_bad_tolerance_of_a_structure(name, value, error, message):
    with pytest.raises(error, match=rf"^{name}{message}"):
        solve(pair_decay, (Y0, Y0), **{name: value})


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.zeros(3)], ids=repr)
def test_both_tolerances_zero(zero):
    with pytest.raises(ValueError, match=r"^rtol, atol: expected at least one above zero, found both zero"):
        solve(rtol=zero, atol=zero)


@pytest.mark.filterwarnings("ignore::seminode.ToleranceWarning")
def test_both_tolerances_zero_in_one_leaf():
    with pytest.raises(ValueError, match=r"zero"):
        solve(pair_decay, (Y0, Y0), rtol=(0.0, 1e-3), atol=(0.0, 1e-3), max_steps=1000)


def run(options: dict[str, Any], y0: Any = None, field: Any = oscillator) -> sn.Solution:
    y0 = {"q": Y0, "p": 2 * Y0} if y0 is None else y0
    return solve(field, y0, [0.0, 3.0], record=True, **options)


def assert_same_run(one: sn.Solution, other: sn.Solution, same: bool = True) -> None:
    assert one.record is not None
    assert other.record is not None
    assert (one.record.ratios == pytest.approx(other.record.ratios, rel=1e-4)) is same


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_a_tolerance_for_each_leaf(name):
    """The same number in each leaf, or spread over the entries, is the number itself; another in one leaf is not."""
    scalar = run({name: 1e-5})
    assert_same_run(run({name: {"q": 1e-5, "p": 1e-5}}), scalar)
    assert_same_run(run({name: {"q": vector(1e-5)[0], "p": vector(1e-5, 1e-5, 1e-5)}}), scalar)
    assert_same_run(run({name: {"q": vector(1e-5), "p": 1e-5}}), scalar)
    assert_same_run(run({name: vector(1e-5)[0]}), scalar)
    assert_same_run(run({name: {"q": 1e-7, "p": 1e-5}}), scalar, same=False)


def test_tolerances_belong_to_their_leaf():
    """Leaf p is zero throughout, so only q's tolerance decides the steps."""

    def field(t, y):
        return {"q": torch.cos(20 * t) * y["q"], "p": 0 * y["p"]}

    y0 = {"q": Y0, "p": 0 * Y0}
    loose = run({"rtol": {"q": 1e-3, "p": 1e-9}, "atol": 1e-9}, y0, field)
    tight = run({"rtol": {"q": 1e-9, "p": 1e-3}, "atol": 1e-9}, y0, field)
    assert_same_run(loose, run({"rtol": 1e-3, "atol": 1e-9}, y0, field))
    assert_same_run(tight, run({"rtol": 1e-9, "atol": 1e-9}, y0, field))
    assert tight.stats.accepted > 4 * loose.stats.accepted


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances_go_by_key_not_by_order(name):
    assert_same_run(run({name: {"p": 1e-3, "q": 1e-9}}), run({name: {"q": 1e-9, "p": 1e-3}}))


def test_a_tolerance_for_each_entry():
    def field(t, y):
        return torch.cos(20 * t) * y

    y0 = vector(1.0, 0.0, 0.0)
    loose = vector(1e-3, 1e-9, 1e-9)
    tight = vector(1e-9, 1e-3, 1e-3)
    assert_same_run(run({"rtol": loose, "atol": 1e-9}, y0, field), run({"rtol": 1e-3, "atol": 1e-9}, y0, field))
    assert_same_run(run({"rtol": tight, "atol": 1e-9}, y0, field), run({"rtol": 1e-9, "atol": 1e-9}, y0, field))


def test_tolerances_broadcast_over_a_matrix():
    y0 = vector(1.0, 0.0, 0.0).repeat(4, 1)

    def field(t, y):
        return torch.cos(20 * t) * y

    row = vector(1e-4, 1e-9, 1e-9)
    assert_same_run(run({"rtol": row, "atol": 1e-9}, y0, field), run({"rtol": 1e-4, "atol": 1e-9}, y0, field))
    assert_same_run(
        run({"rtol": row.expand(4, 3), "atol": 1e-9}, y0, field), run({"rtol": row, "atol": 1e-9}, y0, field)
    )


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (torch.float64, 1e-6, 1e-8),
        (torch.complex128, 1e-6, 1e-8),
        (torch.float32, 1e-4, 1e-6),
        (torch.complex64, 1e-4, 1e-6),
        (torch.bfloat16, 1e-2, 1e-4),
        (torch.float16, 1e-2, 1e-4),
    ],
    ids=str,
)
def test_default_tolerances_follow_the_dtype(dtype, rtol, atol):
    y0 = Y0.to(dtype)
    default, given = (run(options, y0, decay) for options in ({}, {"rtol": rtol, "atol": atol}))
    assert_same_run(default, given)


@pytest.mark.parametrize(
    ("dtype", "rtol", "warns"),
    [
        (torch.float64, 8.0e-16, True),
        (torch.float64, 9.0e-16, False),
        (torch.float32, 4.0e-7, True),
        (torch.float32, 5.0e-7, False),
        (torch.complex64, 4.0e-7, True),
        (torch.complex128, 4.0e-7, False),
        (torch.bfloat16, 4.0e-7, True),
    ],
    ids=str,
)
def test_an_rtol_below_rounding_warns(dtype, rtol, warns):
    make = partial(solve, y0=Y0.to(dtype), rtol=rtol, atol=1.0)
    if not warns:
        make()  # a warning is an error here
        return
    with pytest.warns(sn.ToleranceWarning, match=rf"^rtol = {rtol:g} is below .*four times .* looser rtol") as caught:
        make()
    assert len(caught) == 1


def test_the_smallest_rtol_of_a_structure_counts():
    with pytest.warns(sn.ToleranceWarning, match=r"^rtol = 1e-17 is below"):
        solve(pair_decay, (Y0, Y0), rtol=(1e-3, 1e-17), atol=1.0)


def test_the_warning_points_at_the_call():
    with pytest.warns(sn.ToleranceWarning) as caught:
        sn.solve(decay, Y0, [0.0, 1.0], rtol=1e-17, atol=1.0)
    assert caught[0].filename == __file__


# norm


@refused(
    {
        "unknown": ("l2", ValueError, r"^norm: expected one of rms, max, .* or a callable, found 'l2'"),
        "seminorm": (
            "seminorm",
            ValueError,
            r"^norm: 'seminorm' reads the segments of an adjoint state.* expected one of",
        ),
        "seminorm_rms": ("seminorm_rms", ValueError, r"^norm: 'seminorm_rms' reads the segments of an adjoint state"),
        "seminorm itself": (sn.norms.seminorm, TypeError, r"^norms\.seminorm expects an AdjointState .* found Tensor"),
        "number": (2, TypeError, r"^norm: expected a name or a callable, found int"),
        "returns a number": (lambda e: 0.5, ValueError, r"^norm: .* returns a 0-d tensor, found float"),
        "returns nothing": (lambda e: None, ValueError, r"^norm: .* returns a 0-d tensor, found NoneType"),
        "returns a vector": (lambda e: e.abs(), ValueError, r"^norm: .* returns a 0-d tensor, found \(3,\)"),
        "returns a complex number": (
            lambda e: torch.tensor(1j),
            (TypeError, ValueError),
            r"^norm: .*complex",
        ),
    }
)
def test_bad_norm(value, error, message):
    with pytest.raises(error, match=message):
        solve(norm=value)


def test_a_norm_of_shape_one_will_do():
    assert_same_run(run({"norm": lambda e: sn.norms.rms(e).reshape(1)}, Y0, decay), run({"norm": "rms"}, Y0, decay))


def test_a_callable_norm_gets_the_structure_of_y0():
    seen = []

    def norm(ratio):
        seen.append(ratio)
        return sn.norms.rms(ratio)

    y0 = {"q": torch.ones(2, 3), "p": (torch.ones(4), torch.ones(()))}

    def field(t, y):
        return {"q": -y["q"], "p": (-y["p"][0], -y["p"][1])}

    solve(field, y0, norm=norm)
    assert seen
    for ratio in seen:
        assert list(ratio) == ["q", "p"]
        assert isinstance(ratio["p"], tuple)
        assert [x.shape for x in (ratio["q"], *ratio["p"])] == [(2, 3), (4,), ()]


@pytest.mark.parametrize(
    ("norm", "same_as"),
    [
        (None, lambda e: torch.maximum(sn.norms.rms(e["q"]), sn.norms.rms(e["p"]))),
        ("mixed_per_tensor", lambda e: torch.maximum(sn.norms.rms(e["q"]), sn.norms.rms(e["p"]))),
        ("mixed", "mixed_per_tensor"),
        ("rms", lambda e: torch.cat([e["q"], e["p"]]).square().mean().sqrt()),
        ("max", lambda e: torch.cat([e["q"], e["p"]]).abs().max()),
    ],
)
def test_norms_by_name(norm, same_as):
    assert_same_run(run({"norm": norm}), run({"norm": same_as}))


def test_the_norm_decides_the_steps():
    """One entry of a hundred is hard: the root mean square over all of them thinks little of its error."""

    def field(t, y):
        return {"q": torch.cos(9 * t) * y["q"], "p": 0 * y["p"]}

    y0 = {"q": vector(1.0), "p": torch.ones(99, dtype=torch.float64)}
    steps = [run({"norm": norm}, y0, field).stats.accepted for norm in ("rms", "mixed_per_tensor", "max")]
    assert steps[0] < steps[1] == steps[2]


# jumps, save, args, max_steps, flags, adjoint, params


@refused(
    {
        "number": (0.5, TypeError, r"^jumps: expected a sequence of times, found float"),
        "words": (["later"], TypeError, r"^jumps: expected a sequence of times, found list"),
        "a string of digits": ("12", TypeError, r"^jumps: expected a sequence of times, found str"),
        "complex": (torch.tensor([1j]), TypeError, r"^jumps: expected a sequence of times, found Tensor"),
        "NaN": ([0.1, NAN], ValueError, r"^jumps\[1\]: expected a finite time, found nan"),
        "infinity": (torch.tensor([-INF]), ValueError, r"^jumps\[0\]: expected a finite time, found -inf"),
    }
)
def test_bad_jumps(value, error, message):
    with pytest.raises(error, match=message):
        solve(jumps=value)


@pytest.mark.parametrize("jumps", [[0.7, 0.25, 0.25], (0.25, 0.7), torch.tensor([0.25, 0.7], dtype=torch.float64)])
def test_jumps_in_any_order(jumps):
    sol = solve(jumps=jumps, record=True)
    assert sol.stats.jumps == 2
    assert sol.record is not None
    assert {0.25, 0.7} <= {plan.t1 for plan in sol.record.accepted}


@refused(
    {
        "unknown": ("all", ValueError, r"^save: expected 'ts', 'last', 'steps' or a callable .* found 'all'"),
        "number": (3, ValueError, r"^save: expected 'ts', .* found 3"),
        "nothing": (None, ValueError, r"^save: expected 'ts', .* found None"),
        "times": ([0.5], ValueError, r"^save: expected 'ts', .* found \[0\.5\]"),
        "returns a number": (lambda t, y: 1.0, TypeError, r"^save\(t, y\): expected a tensor, found float"),
        "returns a number inside": (
            lambda t, y: {"a": (y, 1)},
            TypeError,
            r"^save\(t, y\)\['a'\]\[1\]: expected a tensor, found int",
        ),
    }
)
def test_bad_save(value, error, message):
    with pytest.raises(error, match=message):
        solve(save=value)


@refused(
    {
        "tensor": (Y0, TypeError, r"^args: expected a tuple .* found Tensor; for a single one write args=\(x,\)"),
        "nothing": (None, TypeError, r"^args: expected a tuple .* found NoneType"),
        "number": (2.0, TypeError, r"^args: expected a tuple .* found float"),
        "dict": ({"a": 1}, TypeError, r"^args: expected a tuple .* found dict"),
        "string": ("ab", TypeError, r"^args: expected a tuple .* found str"),
    }
)
def test_bad_args(value, error, message):
    with pytest.raises(error, match=message):
        solve(field=lambda t, y, *args: -y, args=value)


def test_args_reach_the_field_as_they_are():
    log: list[float] = []
    table = {"rate": torch.tensor(2.0, dtype=torch.float64), "name": "x"}

    def field(t, y, log, table, flag):
        log.append(float(t))
        assert list(table) == ["rate", "name"]
        assert flag is None
        return -table["rate"] * y

    sol = solve(field, args=(log, table, None), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sol.ys[-1], Y0 * math.exp(-2.0), rtol=1e-7, atol=0.0)
    assert len(log) == sol.stats.nfe


@refused(
    {
        "zero": (0, ValueError, r"^max_steps: expected a whole number of at least 1, found 0"),
        "negative": (-5, ValueError, r"^max_steps: expected a whole number of at least 1, found -5"),
        "fraction": (1.5, ValueError, r"^max_steps: expected a whole number of at least 1, found 1\.5"),
        "float": (100.0, ValueError, r"^max_steps: expected a whole number of at least 1, found 100\.0"),
        "flag": (True, ValueError, r"^max_steps: expected a whole number of at least 1, found True"),
        "nothing": (None, ValueError, r"^max_steps: expected a whole number of at least 1, found None"),
    }
)
def test_bad_max_steps(value, error, message):
    with pytest.raises(error, match=message):
        solve(max_steps=value)


@pytest.mark.parametrize("name", ["dense", "record", "progress", "throw"])
@pytest.mark.parametrize("value", [1, 0, None, "yes", torch.tensor(True)], ids=repr)
def test_flags_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=rf"^{name}: expected True or False, found "):
        solve(**{name: value})


@refused(
    {
        "class": (
            sn.Replay,
            TypeError,
            r"^adjoint: expected a name or an object such as sn\.Replay\(\), found the class Replay",
        ),
        "name": ("adjoint", ValueError, r"^adjoint: expected one of backsolve, direct, .* found 'adjoint'"),
        "needs a number": ("checkpointed", ValueError, r"pass sn\.Checkpointed\(n\)"),
        "nothing": (None, TypeError, r"^adjoint: expected a name or an object such as sn\.Replay\(\), found NoneType"),
    }
)
def test_bad_adjoint(value, error, message):
    with pytest.raises(error, match=message):
        solve(adjoint=value)


@pytest.mark.parametrize("every", [0, -1, 1.0, True, None, "1"], ids=repr)
def test_replay_keeps_every_whole_number_of_steps(every):
    with pytest.raises(ValueError, match=r"^every: expected a whole number of at least 1, found "):
        sn.Replay(every=every)


@refused(
    {
        "number": (3, TypeError, r"^params: expected a module or an iterable of tensors, found int"),
        "numbers": ([1.0], TypeError, r"^params\[0\]: expected a tensor, found float"),
        "name": ("weight", TypeError, r"^params\[0\]: expected a tensor, found str"),
        "modules": ([Y0, nn.Linear(1, 1)], TypeError, r"^params\[1\]: expected a tensor, found Linear"),
        "names and tensors": (
            nn.Linear(1, 1).named_parameters(),
            TypeError,
            r"^params\[0\]: expected a tensor, found tuple",
        ),
    }
)
def test_bad_params(value, error, message):
    with pytest.raises(error, match=message):
        solve(params=value)


def test_everything_after_ts_is_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        sn.solve(decay, Y0, [0.0, 1.0], "dopri5")  # pyright: ignore[reportCallIssue]


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="method"):
        solve(method="dopri5")
