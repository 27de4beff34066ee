"""Solves that cannot go on: what is raised, what it carries, and what is left when it is not raised."""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn

NAN, INF = math.nan, math.inf
ADJOINTS = [sn.Direct(), sn.Replay(), sn.Replay(every=3)]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
replays = pytest.mark.parametrize("adjoint", ADJOINTS[1:], ids=str)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


Y0 = vector(1.0, 0.5, 0.2)


def assert_stopped(error: sn.SolveError, near: float, tol: float = 1e-3) -> None:
    """The attributes that every error of a forward pass carries."""
    assert error.t == pytest.approx(near, abs=tol)
    assert isinstance(error.t, float)
    assert not error.backward
    assert isinstance(error.stats, sn.Stats)
    assert error.stats.nfe > 0
    assert f"{error.t:g}" in str(error)


# A step that underflows.


BLOW_UPS = {
    "y²": (lambda t, y: y * y, 1.0),
    "exp y": (lambda t, y: torch.exp(y), math.exp(-1.0)),
    "pole in t": (lambda t, y: y / (t - 0.5) ** 2, 0.5),
}
WAYS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"dtype": torch.float32},
    "PID": {"controller": sn.PID()},
    "PID, tight": {"controller": sn.PID(), "rtol": 1e-9, "atol": 1e-9},
    "bosh3": {"solver": "bosh3"},
    "dopri8": {"solver": "dopri8"},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [("y²", way) for way in WAYS] + [("exp y", "float64"), ("exp y", "float32"), ("pole in t", "float64")],
)
def test_blow_up(name, way):
    (field, pole), way = BLOW_UPS[name], WAYS[way]
    dtype, options = way.get("dtype", torch.float64), {k: v for k, v in way.items() if k != "dtype"}
    sol = sn.solve(field, Y0.to(dtype), [0.0, 3.0], throw=False, record=True, **options)
    with pytest.raises((sn.StepSizeUnderflow, sn.NonFiniteState)) as caught:
        sn.solve(field, Y0.to(dtype), [0.0, 3.0], **options)
    error = caught.value
    assert isinstance(error, sn.SolveError)
    assert_stopped(error, pole, 2e-2)
    assert error.dt is not None
    assert 0.0 < error.dt < 1e-6
    assert sol.record is not None
    assert [plan for plan in sol.record.accepted if plan.t1 == plan.t0] == []  # every step moved the clock


def test_blow_up_backwards_in_time():
    with pytest.raises((sn.StepSizeUnderflow, sn.NonFiniteState)) as caught:
        sn.solve(lambda t, y: -y * y, Y0, [0.0, -3.0])
    assert_stopped(caught.value, -1.0)
    assert caught.value.dt is not None
    assert -1e-6 < caught.value.dt < 0.0


def rough(t: Tensor, y: Any) -> Any:
    """The first leaf is smooth, the second jumps so high at t = 0.5 that no step across it is short enough."""
    return {"smooth": -y["smooth"], "inner": (torch.where(t > 0.5, 1e9, 0.0) + 0 * y["inner"][0],)}


TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
ROUGH_Y0 = {"smooth": Y0, "inner": (vector(0.0, 0.0),)}


@every_adjoint
def test_a_jump_that_was_not_announced(adjoint):
    with pytest.raises(sn.StepSizeUnderflow, match=r"at t = 0\.5 a step of .* misses the tolerance .*jumps=") as caught:
        sn.solve(rough, ROUGH_Y0, [0.0, 1.0], adjoint=adjoint, **TIGHT)
    error = caught.value
    assert_stopped(error, 0.5, 1e-12)
    assert error.leaf == "y0['inner'][0]"
    assert "leaf y0['inner'][0] is worst" in str(error)
    assert error.dt is not None
    assert 0.0 < error.dt < 1e-13
    assert error.stats.rejected > 0


@every_adjoint
def test_the_same_jump_announced(adjoint):
    sol = sn.solve(rough, ROUGH_Y0, [0.0, 1.0], adjoint=adjoint, jumps=[0.5], **TIGHT)
    torch.testing.assert_close(sol.ys["inner"][0][-1], vector(5e8, 5e8), rtol=1e-12, atol=0.0)


def test_a_single_tensor_has_no_leaf_that_is_worst():
    with pytest.raises(sn.StepSizeUnderflow) as caught:
        sn.solve(lambda t, y: torch.where(t > 0.5, 1e9, 0.0) + 0 * y, 0 * Y0, [0.0, 1.0], **TIGHT)
    assert caught.value.leaf is None
    assert "is worst" not in str(caught.value)


# The smallest step that is wanted.


def stiff(t: Tensor, y: Tensor) -> Tensor:
    return -1000.0 * (y - torch.cos(t))


def test_dt_min_raises():
    with pytest.raises(sn.StepSizeUnderflow) as caught:
        sn.solve(stiff, Y0, [0.0, 1.0], controller=sn.Integral(dt_min=0.01, dt0=0.1))
    assert_stopped(caught.value, 0.0)
    assert caught.value.dt is not None
    assert caught.value.dt >= 0.01 * (1 - 1e-9)


@pytest.mark.parametrize("kind", [sn.Integral, sn.PID])
@pytest.mark.parametrize("dt0", [None, 0.1])
def test_dt_min_accepts(kind, dt0):
    controller = kind(dt_min=0.002, at_dt_min="accept", dt0=dt0)
    sol = sn.solve(stiff, Y0, [0.0, 0.1], controller=controller, record=True, rtol=1e-9, atol=1e-9)
    assert sol.record is not None
    short = [plan.dt for plan in sol.record.accepted if not plan.landing and plan.dt < 0.002 * (1 - 1e-9)]
    assert short == []
    assert max(sol.record.ratios) > 1.0  # some of them missed the tolerance
    torch.testing.assert_close(sol.ys[-1], torch.full_like(Y0, math.cos(0.1)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("at_dt_min", ["raise", "accept"])
def test_a_dt_min_that_is_never_reached_changes_nothing(at_dt_min):
    plain = sn.solve(lambda t, y: -y, Y0, [0.0, 1.0])
    guarded = sn.solve(lambda t, y: -y, Y0, [0.0, 1.0], controller=sn.Integral(dt_min=1e-7, at_dt_min=at_dt_min))
    assert torch.equal(plain.ys, guarded.ys)


# Too many steps.


@every_adjoint
@pytest.mark.parametrize(("outputs", "jumps"), [(2, None), (50, None), (2, [0.1, 0.2, 0.3])])
def test_max_steps_count_over_the_whole_solve(outputs, jumps, adjoint):
    ts = torch.linspace(0.0, 10.0, outputs, dtype=torch.float64)
    with pytest.raises(sn.MaxStepsReached, match=r"^20 steps were tried .* rtol and atol, or max_steps") as caught:
        sn.solve(lambda t, y: torch.cos(20 * t) * y, Y0, ts, max_steps=20, jumps=jumps, adjoint=adjoint)
    error = caught.value
    assert error.stats.accepted + error.stats.rejected == 20
    assert 0.0 < error.t < 10.0
    assert error.dt is not None
    assert error.dt > 0.0


def test_max_steps_are_enough_when_they_are_just_enough():
    def field(t, y):
        return torch.cos(20 * t) * y

    sol = sn.solve(field, Y0, [0.0, 3.0])
    needed = sol.stats.accepted + sol.stats.rejected
    assert torch.equal(sn.solve(field, Y0, [0.0, 3.0], max_steps=needed).ys, sol.ys)
    with pytest.raises(sn.MaxStepsReached):
        sn.solve(field, Y0, [0.0, 3.0], max_steps=needed - 1)


def test_max_steps_hold_for_fixed_steps_too():
    with pytest.raises(sn.MaxStepsReached) as caught:
        sn.solve(lambda t, y: -y, Y0, [0.0, 1.0], solver="rk4", controller=sn.FixedStep(0.125), max_steps=7)
    assert caught.value.t == 0.875
    assert caught.value.dt == 0.125


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_too_large_to_square_are_no_reason_to_divide_by_zero(dtype):
    """The first step is guessed from ‖f‖ / ‖y‖, and the norms of huge numbers overflow."""
    huge = math.sqrt(torch.finfo(dtype).max) * 1e-3
    y0 = torch.tensor([huge, 0.0], dtype=dtype)
    sol = sn.solve(lambda t, y: torch.stack([-y[1], y[0]]), y0, [0.0, 1.0])
    expected = torch.tensor([math.cos(1.0), math.sin(1.0)], dtype=dtype)
    torch.testing.assert_close(sol.ys[-1] / huge, expected, rtol=1e-3, atol=1e-3)


# NaN and infinity.


@every_adjoint
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", [{}, {"solver": "rk4", "controller": sn.FixedStep(0.1)}], ids=["adaptive", "fixed"])
def test_y0_is_not_finite(options, bad, adjoint):
    y0 = {"q": Y0, "p": [Y0, vector(1.0, bad)]}
    with pytest.raises(sn.NonFiniteState, match=r"^y0 holds a NaN or an infinity \(leaf y0\['p'\]\[1\]") as caught:
        sn.solve(lambda t, y: y, y0, [2.0, 3.0], adjoint=adjoint, **options)
    assert caught.value.leaf == "y0['p'][1]"
    assert caught.value.t == 2.0
    assert caught.value.dt is None
    assert caught.value.stats.accepted == 0


@every_adjoint
@pytest.mark.parametrize("options", [{}, {"solver": "rk4", "controller": sn.FixedStep(0.1)}], ids=["adaptive", "fixed"])
def test_the_field_is_not_finite_at_the_start(options, adjoint):
    def field(t, y):
        return {"q": y["q"], "p": torch.log(-y["p"])}

    with pytest.raises(sn.NonFiniteState, match=r"^field\(t0, y0\) holds a NaN .*leaf y0\['p'\]") as caught:
        sn.solve(field, {"q": Y0, "p": Y0}, [2.0, 3.0], adjoint=adjoint, **options)
    assert caught.value.leaf == "y0['p']"
    assert_stopped(caught.value, 2.0)
    assert caught.value.stats.nfe == 1


def undefined(t: Tensor, y: Any) -> Any:
    """√(0.6 − t) is a NaN after t = 0.6."""
    return {"q": -y["q"], "p": torch.sqrt(0.6 - t) * y["p"]}


@every_adjoint
def test_the_field_is_not_defined_any_more(adjoint):
    with pytest.raises(sn.NonFiniteState, match=r"just after t = 0\.6 .* NaN or infinite.*leaf y0\['p'\]") as caught:
        sn.solve(undefined, {"q": Y0, "p": Y0}, [0.0, 1.0], adjoint=adjoint)
    assert caught.value.leaf == "y0['p']"
    assert_stopped(caught.value, 0.6)
    assert caught.value.dt is not None


@every_adjoint
@pytest.mark.parametrize("solver", ["euler", "rk4", "dopri5"])
def test_fixed_steps_into_a_nan(solver, adjoint):
    with pytest.raises(sn.NonFiniteState, match=r"became NaN or infinite at t = 0\.75 .*smaller steps") as caught:
        sn.solve(
            lambda t, y: {"q": -y["q"], "p": torch.where(t > 0.6, INF, 1.0) * y["p"]},
            {"q": Y0, "p": Y0},
            [0.0, 1.0],
            solver=solver,
            controller=sn.FixedStep(0.25 if solver != "euler" else 0.125),
            adjoint=adjoint,
        )
    error = caught.value
    assert error.leaf == "y0['p']"
    assert_stopped(error, 0.75)
    assert error.dt == (0.25 if solver != "euler" else 0.125)


def test_fixed_steps_that_grow_beyond_the_dtype():
    with pytest.raises(sn.NonFiniteState) as caught:
        sn.solve(lambda t, y: y**3, 10 * Y0.float(), [0.0, 5.0], solver="euler", controller=sn.FixedStep(0.1))
    assert caught.value.leaf == "y0"
    assert 0.0 < caught.value.t < 5.0


@every_adjoint
@pytest.mark.parametrize("throw", [True, False])
def test_a_nan_in_a_leaf_that_the_norm_does_not_read(throw, adjoint):
    def solve(**options):
        y0 = {"q": Y0, "p": Y0}
        return sn.solve(undefined, y0, [0.0, 1.0], norm=lambda e: sn.norms.rms(e["q"]), adjoint=adjoint, **options)

    if throw:
        with pytest.raises(sn.NonFiniteState, match=r"leaf y0\['p'\]") as caught:
            solve()
        error = caught.value
    else:
        sol = solve(throw=False)
        assert sol.status is sn.Status.NON_FINITE_STATE
        torch.testing.assert_close(sol.ys["q"][-1], Y0 * math.exp(-1.0), rtol=1e-5, atol=1e-5)
        error = sol.error
        assert error is not None
    assert error.leaf == "y0['p']"
    assert error.stats.accepted > 0


# throw=False: what there is.

TS = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)


def wild(t: Tensor, y: Tensor) -> Tensor:
    """y' = y², whose solution y0/(1 − y0 t) has its pole at 1/y0."""
    return y * y


FAILURES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "underflow": (wild, {"rtol": 1e-9, "atol": 1e-9}, (sn.StepSizeUnderflow, sn.NonFiniteState)),
    "max steps": (wild, {"max_steps": 25, "rtol": 1e-9, "atol": 1e-9}, sn.MaxStepsReached),
    "NaN": (lambda t, y: wild(t, y) + 0 * torch.sqrt(0.8 - t), {"rtol": 1e-9, "atol": 1e-9}, sn.NonFiniteState),
    "dt_min": (
        wild,
        {"rtol": 1e-9, "atol": 1e-9, "controller": sn.PID(dt_min=1e-3)},
        sn.StepSizeUnderflow,
    ),
    "fixed steps": (
        lambda t, y: wild(t, y) + torch.where(t > 0.9, NAN, 0.0),
        {"solver": "rk4", "controller": sn.FixedStep(0.0078125)},
        sn.NonFiniteState,
    ),
}
every_failure = pytest.mark.parametrize(("field", "options", "kind"), FAILURES.values(), ids=FAILURES.keys())
STATUS = {
    sn.StepSizeUnderflow: sn.Status.STEP_SIZE_UNDERFLOW,
    sn.MaxStepsReached: sn.Status.MAX_STEPS_REACHED,
    sn.NonFiniteState: sn.Status.NON_FINITE_STATE,
}


@every_adjoint
@every_failure
def test_a_partial_solution(field, options, kind, adjoint):
    sol = sn.solve(field, vector(1.0, 0.5), TS, throw=False, record=True, adjoint=adjoint, **options)
    with pytest.raises(kind) as caught:
        sn.solve(field, vector(1.0, 0.5), TS, adjoint=adjoint, **options)
    error = sol.error
    assert type(error) is type(caught.value)
    assert isinstance(error, sn.SolveError)
    assert str(error) == str(caught.value)
    assert sol.status is STATUS[type(error)]
    assert sol.status.value in repr(sol)
    assert error.stats == sol.stats
    assert sol.stats.accepted > 0
    assert sol.record is not None
    reached = int(TS.le(sol.record.accepted[-1].t1).sum())
    assert 2 <= len(sol.ts) == reached < len(TS)
    assert torch.equal(sol.ts, TS[: len(sol.ts)])
    exact = vector(1.0, 0.5) / (1 - vector(1.0, 0.5) * sol.ts[:, None])
    torch.testing.assert_close(sol.ys, exact, rtol=1e-5, atol=0.0)


@every_adjoint
@every_failure
def test_gradients_of_a_partial_solution(field, options, kind, adjoint):
    y0 = vector(1.0, 0.5).requires_grad_()
    ts = TS.clone().requires_grad_()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: scale * field(t, y), y0, ts, throw=False, adjoint=adjoint, **options)
    assert isinstance(sol.error, kind)
    last = sol.ys[-1]
    grad_y0, grad_ts, grad_scale = torch.autograd.grad(last.sum(), [y0, ts, scale])
    y, t = last.detach(), float(sol.ts[-1].detach())
    # y = y0/(1 − s·y0·t): ∂y/∂y0 = (y/y0)², ∂y/∂t = s·y², ∂y/∂s = t·y².
    torch.testing.assert_close(grad_y0, (y / y0.detach()) ** 2, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(grad_scale, t * y.square().sum(), rtol=1e-4, atol=0.0)
    expected = torch.zeros_like(TS)
    expected[len(sol.ts) - 1] = y.square().sum()
    expected[0] = -y.square().sum()  # an autonomous field: moving the start is moving the end the other way
    torch.testing.assert_close(grad_ts, expected, rtol=1e-3, atol=1e-9)


@every_adjoint
@pytest.mark.parametrize("y0", [vector(1.0, NAN), vector(1.0, -1.0)], ids=["y0", "field"])
def test_nothing_but_the_start(y0, adjoint):
    y0 = y0.clone().requires_grad_()
    sol = sn.solve(lambda t, y: torch.sqrt(y), y0, TS, throw=False, adjoint=adjoint)
    assert sol.status is sn.Status.NON_FINITE_STATE
    assert sol.ts.tolist() == [0.0]
    assert torch.equal(sol.ys.detach(), y0.detach()[None]) or torch.isnan(y0).any()
    sol.ys[0, 0].backward()
    assert y0.grad is not None
    assert y0.grad.tolist() == [1.0, 0.0]


@every_adjoint
def test_the_last_state_was_not_reached(adjoint):
    y0 = Y0.clone().requires_grad_()
    sol = sn.solve(wild, y0, TS, throw=False, save="last", adjoint=adjoint)
    assert sol.error is not None
    assert sol.ts.shape == (0,)
    assert sol.ys.shape == (0, 3)
    if sol.ys.requires_grad:
        sol.ys.sum().backward()
        assert y0.grad is None or not y0.grad.any()


@every_adjoint
def test_every_step_until_it_failed(adjoint):
    y0 = vector(1.0, 0.5).requires_grad_()
    sol = sn.solve(wild, y0, TS, throw=False, save="steps", dense=True, adjoint=adjoint, max_steps=12)
    assert sol.status is sn.Status.MAX_STEPS_REACHED
    assert sol.error is not None
    assert len(sol.ts) == sol.stats.accepted + 1
    assert float(sol.ts[-1]) == sol.error.t
    assert sol.dense is not None
    assert sol.dense.t1 == sol.error.t
    torch.testing.assert_close(sol.dense(sol.ts), sol.ys, rtol=1e-10, atol=1e-12)
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    torch.testing.assert_close(grad, (sol.ys[-1] / y0).detach() ** 2, rtol=1e-4, atol=0.0)


def test_success_has_no_error():
    sol = sn.solve(lambda t, y: -y, Y0, TS, throw=False)
    assert sol.status is sn.Status.SUCCESS
    assert sol.error is None
    assert "success" in repr(sol)


# The backward pass.


def root(t: Tensor, y: Any) -> Any:
    """√|q| has no derivative at 0, where q stays."""
    return {"q": torch.sqrt(y["q"].abs()), "p": -y["p"]}


def start() -> dict[str, Tensor]:
    return {"p": Y0.clone().requires_grad_(), "q": torch.zeros(2, dtype=torch.float64, requires_grad=True)}


@replays
def test_a_gradient_that_is_not_finite(adjoint):
    y0 = start()
    sol = sn.solve(lambda t, y: {"p": -y["p"], "q": root(t, y)["q"]}, y0, [0.0, 1.0], adjoint=adjoint)
    with pytest.raises(
        sn.NonFiniteState, match=r"^on the backward pass: .*NaN or infinite.*leaf y0\['q'\].*sqrt"
    ) as caught:
        sol.ys["q"].sum().backward()
    error = caught.value
    assert error.backward
    assert error.leaf == "y0['q']"
    assert 0.0 <= error.t < 1.0
    assert error.dt is not None
    assert error.dt > 0.0
    assert error.stats.nfe > 0
    assert error.stats.accepted >= 1


@replays
def test_a_gradient_that_is_not_finite_is_returned_on_request(adjoint):
    y0 = start()
    sol = sn.solve(lambda t, y: {"p": -y["p"], "q": root(t, y)["q"]}, y0, [0.0, 1.0], adjoint=adjoint, throw=False)
    (sol.ys["p"].sum() + sol.ys["q"].sum()).backward()
    assert y0["q"].grad is not None
    assert y0["q"].grad.isnan().all()
    assert y0["p"].grad is not None
    torch.testing.assert_close(y0["p"].grad, torch.full_like(Y0, 1 + math.exp(-1.0)), rtol=1e-4, atol=0.0)


@replays
@pytest.mark.parametrize("where", ["closure", "args"])
def test_a_gradient_of_a_parameter_that_is_not_finite(where, adjoint):
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    if where == "args":
        sol = sn.solve(lambda t, y, w: -y * w.sqrt(), Y0, [0.0, 1.0], args=(weight,), adjoint=adjoint)
    else:
        sol = sn.solve(lambda t, y: -y * weight.sqrt(), Y0, [0.0, 1.0], adjoint=adjoint)
    with pytest.raises(sn.NonFiniteState, match=r"^on the backward pass: ") as caught:
        sol.ys.sum().backward()
    assert caught.value.backward


@replays
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("save", ["ts", "last", "steps"])
def test_a_cotangent_that_is_not_finite(save, bad, adjoint):
    y0 = Y0.clone().requires_grad_()
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 0.3, 0.6, 1.0], save=save, adjoint=adjoint)
    i = len(sol.ts) - 1 if save == "last" else 2
    grad = torch.ones_like(sol.ys)
    grad[i, 1] = bad
    message = rf"^on the backward pass: the gradient of the loss with respect to output {i} holds a NaN or an infinity"
    with pytest.raises(sn.NonFiniteState, match=message) as caught:
        sol.ys.backward(grad, retain_graph=True)
    assert caught.value.backward
    assert caught.value.t == float(sol.ts[i])
    assert y0.grad is None
    sol.ys[-1].sum().backward()  # the solve itself is none the worse for it
    assert y0.grad is not None
    torch.testing.assert_close(y0.grad, torch.full_like(Y0, math.exp(-1.0)), rtol=1e-4, atol=0.0)


@replays
def test_a_cotangent_of_the_dense_solution_that_is_not_finite(adjoint):
    y0 = Y0.clone().requires_grad_()
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], dense=True, adjoint=adjoint)
    assert sol.dense is not None
    with pytest.raises(sn.NonFiniteState, match=r"^on the backward pass: the gradient of the loss"):
        (sol.dense(0.5) * NAN).sum().backward()


# What an error is.


@pytest.mark.parametrize("kind", [sn.SolveError, sn.StepSizeUnderflow, sn.MaxStepsReached, sn.NonFiniteState])
@pytest.mark.parametrize("backward", [False, True])
def test_an_error_survives_the_way_from_another_process(kind, backward):
    error = kind("it stopped", t=0.5, dt=0.1, stats=sn.Stats(nfe=7), leaf="y0['q']", backward=backward)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.t, copy.dt, copy.stats, copy.leaf, copy.backward) == (0.5, 0.1, error.stats, "y0['q']", backward)


def test_what_an_error_is():
    error = sn.NonFiniteState("it stopped", t=0.5)
    assert str(error) == "it stopped"
    assert (error.dt, error.stats, error.leaf, error.backward) == (None, None, None, False)
    assert str(sn.NonFiniteState("it stopped", t=0.5, backward=True)) == "on the backward pass: it stopped"
    assert isinstance(error, RuntimeError)
    assert issubclass(sn.ToleranceWarning, UserWarning)
    assert issubclass(sn.StatefulFieldWarning, UserWarning)


# Interrupts.


class Bars:
    """Stands in for tqdm: which bars were opened, and which closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open: list[Any] = []
        self.count = 0
        bars = self

        class Bar:
            def __init__(self, *args: Any, **kwargs: Any):
                bars.open.append(self)
                bars.count += 1

            def update(self, n: float) -> None: ...

            def set_postfix(self, **values: Any) -> None: ...

            def close(self) -> None:
                bars.open.remove(self)

        monkeypatch.setattr("tqdm.tqdm", Bar)


class Net(nn.Module):
    """Dropout and batch normalisation, so that there is something to leave behind; stops where it is told to."""

    def __init__(self, stop: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()
        self.norm = nn.BatchNorm1d(3).double()
        self.calls = 0
        self.stop = stop

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        k = torch.tanh(self.norm(self.linear(nn.functional.dropout(y, 0.2))))
        if self.calls == self.stop:
            raise KeyboardInterrupt
        return k


BATCH = torch.linspace(-1.0, 2.0, 15, dtype=torch.float64).reshape(5, 3).cos()


def train(net: Net, adjoint: Any, **options: Any) -> list[Tensor]:
    """A solve and its gradients."""
    y0 = BATCH.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.StatefulFieldWarning)
        sol = sn.solve(net, y0, [0.0, 0.4, 1.0], adjoint=adjoint, **options)
    return [sol.ys.detach(), *torch.autograd.grad(sol.ys.square().sum(), [y0, *net.parameters()])]


def assert_no_trace() -> None:
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.rand(3).shape == (3,)


@every_adjoint
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 12, 30])
def test_an_interrupt_leaves_nothing_behind(stop, adjoint, monkeypatch):
    bars = Bars(monkeypatch)
    net, once = Net(stop), Net()
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        train(net, adjoint, progress=True)
    assert bars.open == []
    assert_no_trace()
    # The field was evaluated, so its buffers have moved: once, however many evaluations there were.
    torch.manual_seed(1)
    once(torch.zeros(()), BATCH)
    for name, buffer in once.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer, rtol=1e-12, atol=1e-12, msg=name)
    # The next solve is like one with a fresh network in the same state.
    fresh = Net()
    fresh.load_state_dict(net.state_dict())
    net.stop = None
    torch.manual_seed(2)
    after = train(net, adjoint, progress=True)
    torch.manual_seed(2)
    expected = train(fresh, adjoint)
    assert bars.open == []
    assert bars.count >= 1
    for one, other in zip(after, expected, strict=True):
        assert torch.equal(one, other)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name


@replays
@pytest.mark.parametrize("late", [1, 2, 9])
def test_an_interrupt_of_the_backward_pass(late, adjoint):
    net = Net()
    y0 = BATCH.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.StatefulFieldWarning)
        sol = sn.solve(net, y0, [0.0, 0.4, 1.0], adjoint=adjoint)
    expected = torch.autograd.grad(sol.ys.sum(), [y0, *net.parameters()], retain_graph=True)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    torch.rand(5)  # now the generator is not where an evaluation leaves it
    random = torch.get_rng_state()
    net.stop = net.calls + late
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(sol.ys.sum(), [y0, *net.parameters()], retain_graph=True)
    assert torch.equal(torch.get_rng_state(), random)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert_no_trace()
    again = torch.autograd.grad(sol.ys.sum(), [y0, *net.parameters()])
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


@every_adjoint
@pytest.mark.parametrize(
    ("field", "error"),
    [
        (lambda t, y: y * NAN, sn.NonFiniteState),
        (lambda t, y: y * y, sn.SolveError),
        (lambda t, y: None, TypeError),
        (lambda t, y: y if t < 0.5 else None, TypeError),
    ],
    ids=["NaN at the start", "blow-up", "bad field", "field bad later"],
)
def test_a_progress_bar_is_closed_whatever_happens(field, error, adjoint, monkeypatch):
    bars = Bars(monkeypatch)
    with pytest.raises(error):
        sn.solve(field, Y0, [0.0, 3.0], adjoint=adjoint, progress=True)
    assert bars.open == []
