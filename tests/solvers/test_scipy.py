"""SciPy's solvers in the loop: the same numbers as solve_ivp, counts, jumps, gradients, refusals."""

from __future__ import annotations

import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import seminode as sn
from seminode.solvers.scipy import SciPyMethod

every_method = pytest.mark.parametrize("method", get_args(SciPyMethod))
TIMES = torch.linspace(0.0, 3.0, 23, dtype=torch.float64)


def swing(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -torch.sin(y[0]) + 0.1 * torch.cos(t)])


def swing_numpy(t: float, y: Any) -> Any:
    return np.array([y[1], -np.sin(y[0]) + 0.1 * np.cos(t)])


Y0 = torch.tensor([1.0, 0.3], dtype=torch.float64)


@every_method
@pytest.mark.parametrize("rtol", [1e-4, 1e-9])
def test_same_numbers_as_solve_ivp(method: SciPyMethod, rtol: float) -> None:
    expected = solve_ivp(swing_numpy, (0.0, 3.0), Y0.numpy(), method, t_eval=TIMES.numpy(), rtol=rtol, atol=rtol)
    sol = sn.solve(swing, Y0, TIMES, solver=sn.SciPy(method), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(sol.ys.numpy(), expected.y.T, rtol=0.0, atol=1e-10)
    steps = solve_ivp(swing_numpy, (0.0, 3.0), Y0.numpy(), method, rtol=rtol, atol=rtol)
    assert sol.stats.accepted == len(steps.t) - 1
    again = sn.solve(swing, Y0, [0.0, 3.0], solver=sn.SciPy(method), rtol=rtol, atol=rtol, save="steps")
    np.testing.assert_allclose(again.ts.numpy(), steps.t, rtol=0.0, atol=1e-9)


@every_method
def test_evaluations_are_those_that_are_made(method: SciPyMethod) -> None:
    calls = 0

    def counted(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return swing(t, y)

    with torch.no_grad():
        sol = sn.solve(counted, Y0, TIMES, solver=sn.SciPy(method), record=True)
    assert sol.stats.nfe == calls
    assert sol.record is not None
    assert len(sol.record.evaluations) == calls
    assert max(sol.record.evaluations) <= 3.0
    assert sol.stats.rejected == 0


def test_explicit_methods_evaluate_as_often_as_in_scipy() -> None:
    for method in ("RK23", "RK45", "DOP853", "LSODA"):
        expected = solve_ivp(swing_numpy, (0.0, 3.0), Y0.numpy(), method, rtol=1e-6, atol=1e-8)
        sol = sn.solve(swing, Y0, [0.0, 3.0], solver=sn.SciPy(method))
        if method == "DOP853":  # its polynomial costs three evaluations per step, which solve_ivp makes on demand
            assert sol.stats.nfe == expected.nfev + 3 * sol.stats.accepted
        else:
            assert sol.stats.nfe == expected.nfev


def test_dense_output_backward_in_time() -> None:
    sol = sn.solve(swing, Y0, [3.0, 0.0], solver=sn.SciPy("DOP853"), rtol=1e-8, atol=1e-8, dense=True)
    expected = solve_ivp(swing_numpy, (3.0, 0.0), Y0.numpy(), "DOP853", rtol=1e-8, atol=1e-8, dense_output=True)
    assert sol.dense is not None
    np.testing.assert_allclose(sol.dense(TIMES).numpy(), expected.sol(TIMES.numpy()).T, atol=1e-10)


def test_nested_states_and_other_dtypes() -> None:
    nested = {"q": torch.ones(2, 3), "p": torch.zeros(2, 3)}
    sol = sn.solve(lambda t, y: {"q": y["p"], "p": -y["q"]}, nested, [0.0, 1.0], solver="scipy")
    assert sol.ys["q"].dtype == torch.float32
    torch.testing.assert_close(sol.ys["q"][-1], torch.cos(torch.ones(2, 3)), rtol=1e-3, atol=1e-3)
    y0 = torch.ones(2, dtype=torch.complex128)
    sol = sn.solve(lambda t, y: 1j * y, y0, [0.0, 1.0], solver=sn.SciPy("RK45"))
    torch.testing.assert_close(sol.ys[-1], torch.exp(1j * y0), rtol=1e-5, atol=0.0)
    with pytest.raises(ValueError, match="LSODA takes no complex states"):
        sn.solve(lambda t, y: 1j * y, y0, [0.0, 1.0], solver="scipy")


def test_tolerances_may_differ_between_entries() -> None:
    ys = {"a": torch.ones(1, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)}
    field = lambda t, y: {"a": -y["a"], "b": -50.0 * y["b"]}
    loose = sn.solve(
        field, ys, [0.0, 1.0], solver=sn.SciPy("RK45"), rtol={"a": 1e-8, "b": 1e-2}, atol={"a": 0, "b": 1.0}
    )
    tight = sn.solve(field, ys, [0.0, 1.0], solver=sn.SciPy("RK45"), rtol=1e-8, atol=0.0)
    assert loose.stats.accepted < tight.stats.accepted


def test_jumps_start_a_new_solver_on_the_right_side() -> None:
    seen = []

    def jumping(t: Tensor, y: Tensor) -> Tensor:
        seen.append(float(t))
        return torch.where(t < 0.5, 1.0, -2.0).to(y) * y

    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(jumping, y0, [0.0, 0.25, 1.0], solver=sn.SciPy("RK45"), jumps=[0.5], rtol=1e-9, atol=1e-12)
    expected = torch.exp(torch.tensor([[0.0], [0.25], [-0.5]], dtype=torch.float64))
    torch.testing.assert_close(sol.ys, expected, rtol=1e-7, atol=0.0)
    assert sol.stats.jumps == 1
    assert 0.5 not in seen


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Checkpointed(4)], ids=repr)
def test_discrete_adjoints_are_refused(adjoint: Any) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    options: Any = {"solver": "scipy", "adjoint": adjoint}
    for y0, scale in ((Y0.clone().requires_grad_(), 1.0), (Y0, weight)):
        with pytest.raises(
            ValueError, match=r"no derivative through the steps of SciPy's.*adjoint=sn.Backsolve\(solver="
        ):
            sn.solve(lambda t, y, s=scale: s * swing(t, y), y0, [0.0, 1.0], **options)
    with torch.no_grad():
        assert sn.solve(lambda t, y: weight * swing(t, y), Y0, [0.0, 1.0], **options).stats.nfe > 0
    assert not sn.solve(swing, Y0, [0.0, 1.0], **options).ys.requires_grad


@pytest.mark.parametrize("kind", [sn.Backsolve, sn.Interpolating, sn.Quadrature])
def test_continuous_adjoints_with_a_solver_of_their_own(kind: Any) -> None:
    def gradient(**options: Any) -> Tensor:
        y0, weight = Y0.clone().requires_grad_(), torch.full((2,), 0.7, dtype=torch.float64, requires_grad=True)
        sol = sn.solve(lambda t, y: weight * swing(t, y), y0, [0.0, 1.0, 2.0], rtol=1e-8, atol=1e-8, **options)
        return torch.cat(torch.autograd.grad(sol.ys.square().sum(), (y0, weight)))

    expected = gradient(adjoint=sn.Direct(), solver="dopri8")
    found = gradient(adjoint=kind(solver="dopri5", controller=sn.Integral()), solver=sn.SciPy("RK45"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"for which solver 'scipy' was not made; pass .*solver='dopri5'"):
        gradient(adjoint=kind(), solver=sn.SciPy("RK45"))


def test_a_window_of_forward_steps_is_refused() -> None:
    adjoint = sn.Interpolating(solver="dopri5", controller=sn.Integral(), memory=16)
    with pytest.raises(ValueError, match="memory: Interpolating takes steps of the forward solve again"):
        sn.solve(swing, Y0.clone().requires_grad_(), [0.0, 1.0], solver=sn.SciPy("RK45"), adjoint=adjoint)


@pytest.mark.parametrize("method", ["RK45", "LSODA", "Radau"])
def test_failures_are_errors(method: SciPyMethod) -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises((sn.StepFailure, sn.NonFiniteState)):
        sn.solve(lambda t, y: y**2, y0, [0.0, 2.0], solver=sn.SciPy(method))
    sol = sn.solve(lambda t, y: y**2, y0, [0.0, 0.5, 2.0], solver=sn.SciPy(method), throw=False)
    assert sol.status != sn.Status.SUCCESS
    assert float(sol.ys[1]) == pytest.approx(2.0, rel=1e-4)
    with pytest.raises(sn.MaxStepsReached):
        sn.solve(swing, Y0, [0.0, 1000.0], solver=sn.SciPy(method), max_steps=20)


def test_nan_does_not_hang() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    for method in get_args(SciPyMethod):
        with pytest.raises((sn.StepFailure, sn.NonFiniteState, ValueError)):
            sn.solve(lambda t, y: torch.where(t > 0.5, torch.nan, 1.0) * y, y0, [0.0, 1.0], solver=sn.SciPy(method))


def test_without_scipy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    with pytest.raises(
        ImportError, match=r"sn.SciPy needs SciPy, which is not installed; pip install seminode\[scipy\]"
    ):
        sn.solve(swing, Y0, [0.0, 1.0], solver="scipy")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sn.SciPy("rk45"), "method: expected one of RK23, RK45, DOP853, Radau, BDF, LSODA, found 'rk45'"),  # type: ignore[arg-type]
        (lambda: sn.SciPy(first_step=0.0), "first_step: expected a number above 0, found 0.0"),
        (lambda: sn.SciPy(max_step=-1.0), "max_step: expected a number above 0"),
        (lambda: sn.SciPy("RK45", min_step=0.1), "min_step: only LSODA has a smallest step, found method 'RK45'"),
        (lambda: sn.SciPy(min_step=-1.0), "min_step: expected a number above 0, found -1.0"),
        (
            lambda: sn.solve(swing, Y0, [0.0, 1.0], solver="scipy", controller=sn.FixedStep(0.1)),
            "controller: solver 'scipy' controls its error itself",
        ),
        (
            lambda: sn.solve(swing, Y0, [0.0, 1.0], solver="scipy", norm="max"),
            "norm: solver 'scipy' controls its error",
        ),
    ],
)
def test_invalid_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_options_reach_scipy() -> None:
    sol = sn.solve(swing, Y0, [0.0, 1.0], solver=sn.SciPy("RK45", first_step=0.01, max_step=0.05), save="steps")
    steps = sol.ts.diff()
    assert float(steps[0]) == pytest.approx(0.01)
    assert float(steps.max()) <= 0.05 + 1e-12
    assert repr(sn.SciPy("RK45", max_step=0.05)) == "SciPy('RK45', max_step=0.05)"
    assert sn.SciPy() == sn.SciPy("LSODA") != sn.SciPy("BDF")


def test_a_long_interval_is_one_piece() -> None:
    """SciPy's solver would start again at the end of every piece."""
    expected = solve_ivp(swing_numpy, (0.0, 30.0), Y0.numpy(), "RK45", rtol=1e-6, atol=1e-8)
    sol = sn.solve(swing, Y0, [0.0, 30.0], solver=sn.SciPy("RK45"), rtol=1e-6, atol=1e-8)
    assert sol.stats.accepted == len(expected.t) - 1
