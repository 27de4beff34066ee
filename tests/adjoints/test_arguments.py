"""What adjoints take and what they refuse: every message names the argument, what was found and what is expected."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn

NAN, INF = math.nan, math.inf
D = torch.float64
TURN = torch.tensor([[0.0, 1.0, 0.2], [-1.0, 0.0, 0.3], [-0.2, -0.3, 0.0]], dtype=D)
Y0 = torch.tensor([1.0, 0.5, -0.2], dtype=D)
FIXED = sn.FixedStep(0.1)
PRESCRIBED = sn.PrescribedSteps([0.25, 0.25])
CONTINUOUS = (sn.Backsolve, sn.Interpolating, sn.Quadrature)
OF_THEIR_OWN = (
    sn.Replay(),
    sn.Checkpointed(3),
    sn.Reversible(),
    sn.Backsolve(),
    sn.Interpolating(),
    sn.Quadrature(),
)
of_its_own = pytest.mark.parametrize("adjoint", OF_THEIR_OWN, ids=lambda adjoint: type(adjoint).__name__)
continuous = pytest.mark.parametrize("kind", CONTINUOUS)


def turn(t: Tensor, y: Tensor) -> Tensor:
    return y @ TURN


def of_the_solver(adjoint: Any) -> dict[str, Any]:
    """The options with which an adjoint can do its work."""
    return {"solver": sn.ReversibleRK("dopri5")} if isinstance(adjoint, sn.Reversible) else {}


def bad(cases: dict[str, tuple[Callable[[], Any], Any, str]]) -> Any:
    """One test a bad value: how it is passed, the error, and what its message starts with and says."""
    return pytest.mark.parametrize(("make", "error", "message"), cases.values(), ids=cases.keys())


# Arguments of every continuous adjoint.


def shared(kind: Any) -> dict[str, tuple[Callable[[], Any], Any, str]]:
    return {
        f"{kind.__name__}: {name}": (lambda options=options: kind(**options), error, message)
        for name, (options, error, message) in {
            "solver, typo": (
                {"solver": "dorpi5"},
                ValueError,
                r"^solver: unknown name 'dorpi5'; did you mean 'dopri5'",
            ),
            "solver, class": ({"solver": sn.Dopri5}, TypeError, r"^solver: expected an object, found the class Dopri5"),
            "solver, number": ({"solver": 5}, TypeError, r"^solver: expected a name or a Solver, found int"),
            "controller, class": (
                {"controller": sn.PID},
                TypeError,
                r"^controller: expected a Controller, found the class PID",
            ),
            "controller, number": ({"controller": 0.1}, TypeError, r"^controller: expected a Controller, found float"),
            "controller, name": ({"controller": "PID"}, TypeError, r"^controller: expected a Controller, found str"),
            "max_steps, zero": ({"max_steps": 0}, ValueError, r"^max_steps: expected a whole .* at least 1, found 0$"),
            "max_steps, float": ({"max_steps": 10.0}, ValueError, r"^max_steps: expected a whole .* found 10\.0$"),
            "max_steps, bool": ({"max_steps": True}, ValueError, r"^max_steps: expected a whole .* found True$"),
            "max_steps, text": ({"max_steps": "many"}, ValueError, r"^max_steps: expected a whole .* found 'many'$"),
        }.items()
    }


@bad({name: case for kind in CONTINUOUS for name, case in shared(kind).items()})
def test_bad_arguments_that_continuous_adjoints_share(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Arguments of their own.


@bad(
    {
        "norm, typo": (
            lambda: sn.Backsolve(norm="semi"),  # type: ignore[arg-type]
            ValueError,
            r"^norm: expected one of mixed, mixed_per_tensor, seminorm, seminorm_rms or a callable, found 'semi'$",
        ),
        "norm, of the forward pass": (lambda: sn.Backsolve(norm="rms"), ValueError, r"^norm: .* found 'rms'$"),  # type: ignore[arg-type]
        "norm, number": (lambda: sn.Backsolve(norm=2), TypeError, r"^norm: expected a name or a callable, found int$"),  # type: ignore[arg-type]
        "norm, nothing": (lambda: sn.Backsolve(norm=None), TypeError, r"^norm: expected a name .* found NoneType$"),  # type: ignore[arg-type]
        "restart, typo": (
            lambda: sn.Backsolve(restart="anew"),  # type: ignore[arg-type]
            ValueError,
            r"^restart: expected 'carry', 'fresh' or 'every', found 'anew'$",
        ),
        "restart, nothing": (lambda: sn.Backsolve(restart=None), ValueError, r"^restart: expected .* found None$"),  # type: ignore[arg-type]
        "restart, list": (lambda: sn.Backsolve(restart=["carry"]), ValueError, r"^restart: .* found \['carry'\]$"),  # type: ignore[arg-type]
    }
)
def test_bad_arguments_of_backsolve(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [15, 0, -16, 20.0, True, "all"])
@pytest.mark.parametrize("make", [sn.Interpolating, lambda memory: sn.Quadrature(z="dense", memory=memory)])
def test_bad_memory(make: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^memory: expected a whole number of at least 16, found {value!r}$"):
        make(memory=value)


@bad(
    {
        "rule, typo": (
            lambda: sn.Quadrature(rule="simpson"),  # type: ignore[arg-type]
            ValueError,
            r"^rule: expected one of 'lobatto', 'gauss', 'gauss-kronrod', found 'simpson'$",
        ),
        "rule, nothing": (lambda: sn.Quadrature(rule=None), ValueError, r"^rule: expected one of .* found None$"),  # type: ignore[arg-type]
        "z, typo": (lambda: sn.Quadrature(z="tape"), ValueError, r"^z: expected 'dense' or 'solve', found 'tape'$"),  # type: ignore[arg-type]
        "z, bool": (lambda: sn.Quadrature(z=True), ValueError, r"^z: expected 'dense' or 'solve', found True$"),  # type: ignore[arg-type]
        "memory that is not used": (
            lambda: sn.Quadrature(memory=32),
            ValueError,
            r"^memory: does nothing with z='solve', .*; pass z='dense'$",
        ),
        "quad_rtol that is not used": (
            lambda: sn.Quadrature(quad_rtol=1e-3),
            ValueError,
            r"^quad_rtol: does nothing with rule='lobatto'",
        ),
        "quad_atol that is not used": (
            lambda: sn.Quadrature(rule="gauss", quad_atol=1e-3),
            ValueError,
            r"^quad_atol: does nothing with rule='gauss'",
        ),
    }
)
def test_bad_arguments_of_quadrature(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1e-3, ValueError, r"expected a finite number of at least 0, found -0\.001$"),
        (NAN, ValueError, r"expected a finite number of at least 0, found nan$"),
        (INF, ValueError, r"expected a finite number of at least 0, found inf$"),
        ("tight", TypeError, r"expected a number, found str$"),
        (True, TypeError, r"expected a number, found bool$"),
        ([1e-3], TypeError, r"expected a number, found list$"),
        (torch.ones(2), TypeError, r"expected a number, found Tensor$"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["quad_rtol", "quad_atol"])
def test_bad_tolerances_of_the_adaptive_rule(name: str, value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{name}: {message}"):
        sn.Quadrature(rule="gauss-kronrod", **{name: value})


@pytest.mark.parametrize("value", ["yes", 2, [], 1, 0, torch.tensor(True)], ids=str)
def test_bad_batched(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^batched: expected True, False or None, found "):
        sn.Quadrature(batched=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
@pytest.mark.parametrize(("kind", "name"), [(sn.Checkpointed, "n"), (sn.Replay, "every")])
def test_bad_counts(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a whole number of at least 1, found {value!r}$"):
        kind(**{name: value})


@pytest.mark.parametrize("value", [0, 0.0, 1.1, -0.5, NAN, INF, "half", True, None])
def test_bad_coupling(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^coupling: expected a number in \(0, 1\], found {value!r}$"):
        sn.ReversibleRK("dopri5", coupling=value)


@bad(
    {
        "typo": (
            lambda: sn.ReversibleRK("dorpi5"),  # type: ignore[arg-type]
            ValueError,
            r"^base: expected one of euler, .*dopri5, .* found 'dorpi5'$",
        ),
        "not Runge–Kutta": (lambda: sn.ReversibleRK("reversible_heun"), ValueError, r"^base: .* 'reversible_heun'$"),  # type: ignore[arg-type]
        "reversible": (lambda: sn.ReversibleRK(sn.ReversibleHeun()), TypeError, r"^base: .* found ReversibleHeun$"),  # type: ignore[arg-type]
        "class": (lambda: sn.ReversibleRK(sn.Dopri5), TypeError, r"^base: expected .*Runge–Kutta method.* found "),  # type: ignore[arg-type]
        "nothing": (lambda: sn.ReversibleRK(None), TypeError, r"^base: .* found NoneType$"),  # type: ignore[arg-type]
    }
)
def test_bad_base(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [sn.Backsolve, 3, None, sn.Dopri5()], ids=str)
def test_something_else_than_an_adjoint(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^adjoint: expected a name or an object such as sn\.Replay\(\), found "):
        sn.solve(turn, Y0, [0.0, 1.0], adjoint=value)


@pytest.mark.parametrize("name", ["backsolve", "direct", "interpolating", "quadrature", "replay"])
def test_adjoints_by_name(name: Any) -> None:
    y0 = Y0.clone().requires_grad_()
    by_name = sn.solve(turn, y0, [0.0, 1.0], adjoint=name)
    as_object = sn.solve(turn, y0, [0.0, 1.0], adjoint=getattr(sn, name.capitalize())())
    grads = [torch.autograd.grad(sol.ys[-1].sum(), y0)[0] for sol in (by_name, as_object)]
    assert torch.equal(*grads)
    assert by_name.stats.backward == as_object.stats.backward


# Tolerances of the backward pass, which are read when y0 is known.

PAIR = {"q": Y0, "p": (Y0[:2],)}


def pair(t: Tensor, y: Any) -> Any:
    return {"q": y["q"] @ TURN, "p": (-0.1 * y["p"][0],)}


def solve_pair(adjoint: Any) -> tuple[sn.Solution, Tensor]:
    q = Y0.clone().requires_grad_()
    solution = sn.solve(pair, {**PAIR, "q": q}, [0.0, 2.0], adjoint=adjoint, rtol=1e-8, atol=1e-10)
    return solution, q


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("tight", TypeError, r": expected a number or the nesting of y0, found str$"),
        (True, TypeError, r": expected a number or the nesting of y0, found bool$"),
        (-1e-3, ValueError, r": expected a finite number of at least 0, found -0\.001$"),
        (NAN, ValueError, r": expected a finite number of at least 0, found nan$"),
        ((1e-3, 1e-3), TypeError, r": expected a number or the nesting of y0, found tuple$"),
        ({"q": 1e-3}, TypeError, r": expected a number or the nesting of y0, found dict$"),
        ({"q": 1e-3, "p": (-1.0,)}, ValueError, r"\['p'\]\[0\]: expected a finite number of at least 0, found -1\.0$"),
        ({"q": 1e-3, "p": ("x",)}, TypeError, r"\['p'\]\[0\]: expected a number or a real tensor, found str$"),
        (
            {"q": torch.ones(4), "p": (1e-3,)},
            ValueError,
            r"\['q'\]: expected a shape that broadcasts to \(3,\), found \(4,\)$",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["rtol", "atol"])
@continuous
def test_bad_tolerances_of_the_backward_pass(kind: Any, name: str, value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{name}{message}"):
        solve_pair(kind(**{name: value}))


@continuous
@pytest.mark.parametrize(
    "options",
    [{"rtol": 0.0, "atol": 0.0}, {"rtol": 0, "atol": {"q": 0.0, "p": (1e-3,)}}],
    ids=["everywhere", "in one leaf"],
)
def test_tolerances_of_nothing_at_all(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^rtol, atol: expected at least one above zero, found both zero$"):
        solve_pair(kind(**options))


@continuous
def test_a_tolerance_that_the_dtype_cannot_honour(kind: Any) -> None:
    with pytest.warns(sn.ToleranceWarning, match=r"^rtol = 1e-17 is below "):
        solve_pair(kind(rtol=1e-17))


@continuous
@pytest.mark.parametrize("extra", [{}, {"norm": "mixed"}], ids=["seminorm", "mixed"])
def test_tolerances_in_the_structure_of_the_state(kind: Any, extra: dict[str, Any]) -> None:
    """The same number in every place is that number; a looser one in a leaf that carries the error saves steps."""
    if extra and kind is not sn.Backsolve:
        return

    def backward(**options: Any) -> tuple[sn.Stats, Tensor]:
        solution, q = solve_pair(kind(**options, **extra))
        (grad,) = torch.autograd.grad(solution.ys["q"][-1].sum() + solution.ys["p"][0][-1].sum(), q)
        assert solution.stats.backward is not None
        return solution.stats.backward, grad

    plain, grad = backward(rtol=1e-7, atol=1e-9)
    places = {"q": 1e-7, "p": (torch.full((2,), 1e-7),)}, {"p": (1e-9,), "q": torch.full((3,), 1e-9, dtype=D)}
    same, same_grad = backward(rtol=places[0], atol=places[1])
    assert same == plain
    torch.testing.assert_close(same_grad, grad, rtol=1e-12, atol=1e-14)
    loose, loose_grad = backward(rtol={"q": 1e-3, "p": (1e-7,)}, atol={"q": 1e-5, "p": (1e-9,)})
    assert loose.nfe < plain.nfe
    torch.testing.assert_close(loose_grad, grad, rtol=1e-2, atol=1e-2)


# Combinations that make no sense. The documentation shows this table.

#: What: the adjoint, the options of `solve`, and how the reason begins.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gradients of dense output: Backsolve": (
        sn.Backsolve(),
        {"dense": True},
        r"^dense: Backsolve gives gradients of outputs at times, .* pass adjoint=sn\.Replay\(\)",
    ),
    "gradients of dense output: Interpolating": (
        sn.Interpolating(),
        {"dense": True},
        r"^dense: Interpolating gives gradients of outputs at times",
    ),
    "gradients of dense output: Quadrature": (
        sn.Quadrature(z="dense"),
        {"dense": True},
        r"^dense: Quadrature gives gradients of outputs at times",
    ),
    "a solver that cannot be undone": (
        sn.Reversible(),
        {},
        r"^adjoint: Reversible needs a solver whose steps can be undone, found 'dopri5'; pass solver='reversible_heun'",
    ),
    "a solver that cannot be undone, with fixed steps": (
        sn.Reversible(),
        {"solver": "rk4", "controller": FIXED},
        r"^adjoint: Reversible needs a solver whose steps can be undone, found 'rk4'",
    ),
    "a reversible solver: Backsolve": (
        sn.Backsolve(),
        {"solver": "reversible_heun"},
        r"^adjoint: Backsolve cannot take its own steps with solver 'reversible_heun'.*Backsolve\(solver='dopri5'\)$",
    ),
    "a reversible solver: Interpolating": (
        sn.Interpolating(),
        {"solver": sn.ReversibleRK("dopri5")},
        r"^adjoint: Interpolating cannot take its own steps with solver 'reversible dopri5'",
    ),
    "a reversible solver: Quadrature": (
        sn.Quadrature(),
        {"solver": sn.ReversibleRK("bosh3")},
        r"^adjoint: Quadrature cannot take its own steps with solver 'reversible bosh3'",
    ),
    "a reversible solver on the backward pass": (
        sn.Backsolve(solver="reversible_heun"),
        {},
        r"^adjoint: Backsolve cannot take its own steps with solver 'reversible_heun'",
    ),
    "prescribed steps: Backsolve": (
        sn.Backsolve(),
        {"controller": PRESCRIBED},
        r"^adjoint: Backsolve takes steps of its own, for which PrescribedSteps has no sizes; pass Backsolve\(contr",
    ),
    "prescribed steps: Interpolating": (
        sn.Interpolating(),
        {"controller": PRESCRIBED},
        r"^adjoint: Interpolating takes steps of its own",
    ),
    "prescribed steps: Quadrature": (
        sn.Quadrature(),
        {"controller": PRESCRIBED},
        r"^adjoint: Quadrature takes steps of its own",
    ),
    "prescribed steps on the backward pass": (
        sn.Backsolve(controller=PRESCRIBED),
        {},
        r"^adjoint: Backsolve takes steps of its own",
    ),
    "a coarse polynomial: Interpolating": (
        sn.Interpolating(),
        {"solver": "dopri8"},
        r"^solver: Interpolating reads the solution between steps, where the polynomial of 'dopri8' is of order 5 only",
    ),
    "a coarse polynomial: Quadrature": (
        sn.Quadrature(),
        {"solver": "dopri8"},
        r"^solver: Quadrature reads the solution between steps",
    ),
    "a coarse polynomial: Quadrature on the dense solution": (
        sn.Quadrature(z="dense", solver="dopri5"),
        {"solver": "dopri8"},
        r"^solver: Quadrature reads the solution between steps",
    ),
    "a coarse polynomial: Backsolve as published": (
        sn.Backsolve(restart="fresh"),
        {"solver": "dopri8"},
        r"^solver: Backsolve\(restart='fresh'\) reads the solution between steps",
    ),
    "a coarse polynomial on the backward pass": (
        sn.Quadrature(solver="dopri8"),
        {},
        r"^solver: Quadrature reads the solution between steps",
    ),
    "no error estimate on the backward pass": (
        sn.Backsolve(solver="rk4"),
        {},
        r"^controller: Integral needs an error estimate, which solver 'rk4' does not have; use sn\.FixedStep",
    ),
    "tolerances of fixed steps": (
        sn.Backsolve(rtol=1e-3),
        {"solver": "rk4", "controller": FIXED},
        r"^rtol: does nothing on a backward pass with fixed steps",
    ),
    "tolerances of fixed steps on the backward pass": (
        sn.Interpolating(atol=1e-3, controller=FIXED),
        {},
        r"^atol: does nothing on a backward pass with fixed steps",
    ),
}
refused = pytest.mark.parametrize(("adjoint", "options", "reason"), REFUSED.values(), ids=REFUSED.keys())


class Counted:
    """A field that knows how often it was evaluated."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return turn(t, y)


@refused
def test_what_makes_no_sense_is_refused_before_the_solve(adjoint: Any, options: dict[str, Any], reason: str) -> None:
    field = Counted()
    with pytest.raises(ValueError, match=reason):
        sn.solve(field, Y0.clone().requires_grad_(), [0.0, 1.0], adjoint=adjoint, **options)
    assert field.count <= 1  # to see which tensors it uses


@refused
@pytest.mark.parametrize("wanted", [False, True], ids=["nothing to differentiate", "no_grad"])
def test_without_a_gradient_nothing_is_refused(
    adjoint: Any, options: dict[str, Any], reason: str, wanted: bool
) -> None:
    y0 = Y0.clone().requires_grad_(wanted)
    with torch.set_grad_enabled(not wanted):
        ys = sn.solve(turn, y0, [0.0, 1.0], adjoint=adjoint, **options).ys
    assert not ys.requires_grad
    torch.testing.assert_close(ys[-1], torch.linalg.matrix_exp(TURN.T) @ Y0, rtol=1e-3, atol=1e-3)


@refused
def test_a_parameter_is_reason_enough(adjoint: Any, options: dict[str, Any], reason: str) -> None:
    scale = torch.ones((), dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match=reason):
        sn.solve(lambda t, y: scale * turn(t, y), Y0, [0.0, 1.0], adjoint=adjoint, **options)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(lambda y: f(y).sum())(Y0),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([Y0, Y0])),
    "jvp": lambda f: torch.func.jvp(f, (Y0,), (Y0,)),
    "jacrev": lambda f: torch.func.jacrev(f)(Y0),
    "vjp": lambda f: torch.func.vjp(f, Y0),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@of_its_own
def test_transforms_are_for_direct(adjoint: Any, transform: Any) -> None:
    def final(y: Tensor, adjoint: Any = adjoint) -> Tensor:
        options = {"solver": "dopri5", **of_the_solver(adjoint), "controller": FIXED}
        return sn.solve(turn, y, [0.0, 1.0], adjoint=adjoint, **options).ys[-1]

    reason = rf"^adjoint: {type(adjoint).__name__} cannot be used inside a torch\.func transform, .*sn\.Direct\(\)$"
    with pytest.raises(ValueError, match=reason):
        transform(final)
    transform(lambda y: final(y, sn.Direct()))


@pytest.mark.parametrize("where", ["y0", "ts", "args", "closure"])
@of_its_own
def test_forward_mode_is_for_direct(adjoint: Any, where: str) -> None:
    ad = torch.autograd.forward_ad

    def tangent(adjoint: Any) -> Any:
        y0, ts, scale = Y0, torch.tensor([0.0, 1.0], dtype=D), torch.ones((), dtype=D)
        with ad.dual_level():
            if where == "y0":
                y0 = ad.make_dual(y0, torch.ones_like(y0))
            elif where == "ts":
                ts = ad.make_dual(ts, torch.ones_like(ts))
            else:
                scale = ad.make_dual(scale.requires_grad_(), torch.ones_like(scale))
            args = (scale,) if where == "args" else ()
            field = lambda t, y, k=scale: k * turn(t, y)
            ys = sn.solve(field, y0, ts, args=args, adjoint=adjoint, **of_the_solver(adjoint)).ys
            return ad.unpack_dual(ys).tangent

    reason = rf"^adjoint: {type(adjoint).__name__} has no forward-mode derivative; pass adjoint=sn\.Direct\(\)$"
    with pytest.raises(ValueError, match=reason):
        tangent(adjoint)
    assert tangent(sn.Direct()) is not None


# What they are.


@pytest.mark.parametrize(
    ("adjoint", "text"),
    [
        (sn.Backsolve(), "Backsolve()"),
        (sn.Backsolve(norm="mixed", restart="fresh"), "Backsolve(norm='mixed', restart='fresh')"),
        (sn.Interpolating(memory=32, rtol=1e-3), "Interpolating(rtol=0.001, memory=32)"),
        (sn.Quadrature(rule="gauss", z="dense"), "Quadrature(rule='gauss', z='dense')"),
        (sn.Quadrature(solver="dopri5"), "Quadrature(solver=Dopri5())"),
        (sn.Checkpointed(5), "Checkpointed(n=5)"),
        (sn.Reversible(), "Reversible()"),
        (sn.ReversibleRK("dopri5", 0.9), "ReversibleRK(Dopri5(), coupling=0.9)"),
    ],
    ids=str,
)
def test_an_adjoint_says_what_was_chosen(adjoint: Any, text: str) -> None:
    assert repr(adjoint) == text


@pytest.mark.parametrize("adjoint", OF_THEIR_OWN, ids=lambda adjoint: type(adjoint).__name__)
def test_adjoints_are_frozen_and_equal_by_value(adjoint: Any) -> None:
    assert adjoint == pickle.loads(pickle.dumps(adjoint)) == copy.deepcopy(adjoint)
    assert hash(adjoint) == hash(copy.deepcopy(adjoint))
    with pytest.raises((AttributeError, TypeError)):
        adjoint.rtol = 1e-3
