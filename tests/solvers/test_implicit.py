"""Implicit Runge–Kutta methods: order, stiff problems, Newton iterations, linear solvers, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seminode as sn
from seminode._field.linearisation import Linearisation
from seminode.solvers._linear import StageSystem, jacobian_of
from seminode.solvers.implicit import IMPLICIT, ImplicitRungeKutta

#: Krylov vectors, stages, and the graph of one evaluation, which products with the Jacobian need.
LIVE_VECTORS = 100
ADAPTIVE = ["trbdf2", "kvaerno3", "kvaerno5", "radauIIA5"]


def nonlinear(t: Tensor, y: Tensor) -> Tensor:
    """y = (sin t, 1/(1 + t)): the closed form is exact, and no component is linear."""
    return torch.stack([torch.cos(t) - y[0] ** 2 + torch.sin(t) ** 2, -(y[1] ** 2)])


def exact(t: float) -> Tensor:
    return torch.tensor([math.sin(t), 1.0 / (1.0 + t)], dtype=torch.float64)


def robertson(t: Tensor, y: Tensor) -> Tensor:
    first, second, third = 0.04 * y[0], 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
    return torch.stack([second - first, first - second - third, third])


ROBERTSON = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("name", list(IMPLICIT))
def test_measured_order(name: str) -> None:
    solver = IMPLICIT[name]()
    steps = (16, 32) if solver.order < 5 else (8, 16)
    errors = []
    for n in steps:
        with torch.no_grad():
            sol = sn.solve(nonlinear, exact(0.0), [0.0, 1.0], solver=solver, controller=sn.FixedStep(1.0 / n))
        errors.append(float((sol.ys[-1] - exact(1.0)).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(solver.order, abs=0.2)


@pytest.mark.parametrize("name", list(IMPLICIT))
def test_measured_order_between_steps(name: str) -> None:
    solver = IMPLICIT[name]()
    errors = []
    for n in (8, 16, 32):
        ts = [0.0, 0.6 / n, 1.0 / n]
        with torch.no_grad():
            sol = sn.solve(nonlinear, exact(0.0), ts, solver=solver, controller=sn.FixedStep(1.0 / n))
        errors.append(float((sol.ys[1] - exact(0.6 / n)).norm()))
    assert math.log2(errors[1] / errors[2]) > solver.interpolant_order + 0.7


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_steps_meet_the_tolerance(name: str) -> None:
    rtol = 1e-5
    with torch.no_grad():
        sol = sn.solve(nonlinear, exact(0.0), [0.0, 0.7, 2.0], solver=name, rtol=rtol, atol=rtol)  # type: ignore[arg-type]
    for t, y in zip((0.7, 2.0), sol.ys[1:], strict=True):
        assert float((y - exact(t)).norm()) < 20 * rtol
    assert sol.stats.rejected <= 2


@pytest.mark.parametrize("name", ["kvaerno5", "radauIIA5"])
def test_robertson_reuses_jacobians_and_factorisations(name: str) -> None:
    with torch.no_grad():
        sol = sn.solve(robertson, ROBERTSON, [0.0, 1e8], solver=name, rtol=1e-6, atol=1e-12, save="last")  # type: ignore[arg-type]
    # SciPy's Radau at rtol = 1e-12, atol = 1e-18.
    end = torch.tensor([2.08241751e-05, 8.32984143e-11, 9.99979176e-01], dtype=torch.float64)
    assert float(((sol.ys[-1] - end) / end).abs().max()) < 1e-5
    stats = sol.stats
    assert stats.factorisations <= (stats.accepted + stats.rejected) / 3
    assert stats.jacobians < (stats.accepted + stats.rejected) / 2
    assert stats.newton_iterations > stats.accepted
    assert "newton_iterations=" in str(stats)


def test_backwards_in_time_and_complex_states() -> None:
    def rotation(t: Tensor, y: Tensor) -> Tensor:  # not holomorphic: |y|² is constant along it
        return 1j * y * (y * y.conj())

    y0 = torch.tensor([1.0 + 0.5j, -0.3j], dtype=torch.complex128)
    with torch.no_grad():
        end = sn.solve(rotation, y0, [0.0, -2.0], solver="kvaerno5", rtol=1e-8, atol=1e-10).ys[-1]
    torch.testing.assert_close(end, y0 * torch.exp(-2j * y0.abs() ** 2), rtol=1e-6, atol=1e-8)


def test_a_nested_state() -> None:
    y0 = {"a": torch.ones(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}

    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": -1e4 * (y["a"] - torch.cos(t)), "b": y["a"].sum().reshape(1)}

    with torch.no_grad():
        sol = sn.solve(field, y0, [0.0, 1.0], solver="kvaerno5")
    assert sol.stats.accepted < 100
    assert float(sol.ys["b"][-1]) == pytest.approx(2.0 * math.sin(1.0), abs=1e-3)


def batch_field(t: Tensor, y: Tensor) -> Tensor:
    rates = torch.logspace(1, 4, y.shape[0], dtype=y.dtype)[:, None]
    return torch.cat([-rates * (y[:, :1] - y[:, 1:] ** 2), -y[:, 1:]], 1)


def coupled_field(t: Tensor, y: Tensor) -> Tensor:
    return batch_field(t, y) + 0.1 * (y.mean(0) - y)


@pytest.mark.parametrize("linear_solver", ["auto", "dense", "batched", "gmres"])
@pytest.mark.parametrize("name", ["kvaerno3", "radauIIA5"])
def test_linear_solvers_agree(linear_solver: Any, name: str) -> None:
    y0 = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    solver = IMPLICIT[name](linear_solver=linear_solver)
    with torch.no_grad():
        sol = sn.solve(batch_field, y0, [0.0, 0.5], solver=solver, rtol=1e-6, atol=1e-8)
        reference = sn.solve(batch_field, y0, [0.0, 0.5], solver="kvaerno5", rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sol.ys[-1], reference.ys[-1], rtol=1e-4, atol=1e-6)
    assert (sol.stats.products > 0) == (linear_solver == "gmres")


def test_coupled_samples_are_noticed() -> None:
    y0 = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        auto = sn.solve(coupled_field, y0, [0.0, 0.5], solver=sn.Kvaerno5())
        dense = sn.solve(coupled_field, y0, [0.0, 0.5], solver=sn.Kvaerno5(linear_solver="dense"))
    torch.testing.assert_close(auto.ys, dense.ys, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="'batched' needs a state of shape"):
        sn.solve(coupled_field, y0, [0.0, 0.5], solver=sn.Kvaerno5(linear_solver="batched"))


def test_samples_that_are_coupled_later_only() -> None:
    """Separability is not assumed: every Jacobian is checked."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return coupled_field(t, y) if t > 0.25 else batch_field(t, y)

    y0 = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sols = [
            sn.solve(field, y0, [0.0, 0.5], solver=sn.Kvaerno5(linear_solver=choice), jumps=[0.25]).ys
            for choice in ("auto", "dense")
        ]
    torch.testing.assert_close(*sols, rtol=1e-6, atol=1e-8)


def test_a_given_jacobian_is_used() -> None:
    calls = []

    def jacobian(t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        calls.append(float(t))
        return -rate * torch.eye(2, dtype=y.dtype)

    def field(t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        return -rate * (y - torch.sin(t))

    y0, args = torch.zeros(2, dtype=torch.float64), (torch.tensor(1e3, dtype=torch.float64),)
    with torch.no_grad():
        sol = sn.solve(field, y0, [0.0, 1.0], args=args, solver=sn.Kvaerno5(jacobian=jacobian))
        other = sn.solve(field, y0, [0.0, 1.0], args=args, solver=sn.Kvaerno5())
    assert len(calls) == sol.stats.jacobians > 0
    torch.testing.assert_close(sol.ys, other.ys, rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match=r"jacobian: expected a tensor of shape \(2, 2\)"):
        sn.solve(field, y0, [0.0, 1.0], args=args, solver=sn.Kvaerno5(jacobian=lambda t, y, r: torch.ones(3)))


@pytest.mark.parametrize("controller", [None, sn.FixedStep(0.1)], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one row", "all rows"])
def test_a_given_jacobian_that_is_too_large_is_noticed(controller: Any, rows: int) -> None:
    """Updates are then so short that they look like convergence, and the state would not move."""
    matrix = torch.tensor([[-50.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    wrong = matrix.clone()
    wrong[:rows] *= 1e12

    def field(t: Tensor, y: Tensor) -> Tensor:
        return matrix @ y + torch.cos(t)

    y0 = torch.tensor([0.0, 1.0], dtype=torch.float64)
    expected = sn.solve(field, y0, [0.0, 1.0], solver="kvaerno5", controller=controller)
    given = sn.solve(field, y0, [0.0, 1.0], solver=sn.Kvaerno5(jacobian=lambda t, y: matrix), controller=controller)
    torch.testing.assert_close(given.ys, expected.ys, rtol=1e-5, atol=1e-6)
    with pytest.raises((sn.NewtonDivergence, sn.MaxStepsReached), match=r"jacobian=|attempted|stiff"):
        sn.solve(
            field,
            y0,
            [0.0, 1.0],
            solver=sn.Kvaerno5(jacobian=lambda t, y: wrong),
            controller=controller,
            max_steps=100,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("controller", [None, sn.FixedStep(0.01)], ids=["adaptive", "fixed"])
def test_half_precision(dtype: torch.dtype, controller: Any) -> None:
    """The field answers with three digits: Newton's method cannot go on to the rounding errors of float32."""
    y0 = torch.ones(2, dtype=dtype, requires_grad=True)
    sol = sn.solve(lambda t, y: -50 * y, y0, [0.0, 0.05], solver="kvaerno5", controller=controller)
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    expected = torch.full((2,), math.exp(-2.5))
    torch.testing.assert_close(sol.ys[-1].detach().float(), expected, rtol=3e-2, atol=0.0)
    torch.testing.assert_close(grad.float(), expected, rtol=3e-2, atol=0.0)


def test_a_derivative_that_gmres_cannot_compute_is_refused() -> None:
    """A cyclic shift, on which GMRES makes no progress before it has as many vectors as there are unknowns."""
    n = 100
    linearisation = Linearisation.of(lambda y: y - torch.roll(y, 1), torch.zeros(n, dtype=torch.float64))
    jacobian = jacobian_of(linearisation, "gmres", lambda: None)
    system = StageSystem([jacobian], [[1.0]], 1.0, 1e-14)
    with pytest.raises(RuntimeError, match="linear_solver: GMRES does not solve"):
        system.solve(torch.eye(n, dtype=torch.float64)[:1], transposed=True)
    easy = StageSystem([jacobian], [[1.0]], 0.1, 1e-14)
    x = easy.solve(torch.eye(n, dtype=torch.float64)[:1], transposed=False)[0]
    torch.testing.assert_close(x - 0.1 * (x - torch.roll(x, 1)), torch.eye(n, dtype=torch.float64)[0])


def test_a_singular_newton_matrix() -> None:
    def growth(t: Tensor, y: Tensor) -> Tensor:  # I − dt·J = 0 for dt = 1
        return y

    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises(sn.NewtonDivergence, match="singular") as info:
        sn.solve(growth, y0, [0.0, 3.0], solver="implicit_euler", controller=sn.FixedStep(1.0))
    assert isinstance(info.value, sn.StepFailure)
    sol = sn.solve(growth, y0, [0.0, 3.0], solver="implicit_euler", controller=sn.FixedStep(1.0), throw=False)
    assert sol.status is sn.Status.NEWTON_DIVERGENCE


def test_a_step_without_a_solution() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:  # Y = 1 + dt·(1 + Y²) has no real solution for dt = 1
        return 1.0 + y**2

    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises(sn.NewtonDivergence, match="does not converge"):
        sn.solve(field, y0, [0.0, 2.0], solver="implicit_euler", controller=sn.FixedStep(1.0))
    # With adaptive steps they shrink until there is one: the solution itself blows up at π/4.
    with pytest.raises(sn.SolveError):
        sn.solve(field, y0, [0.0, 2.0], solver="kvaerno3", max_steps=500)


def test_a_field_that_is_nan_beside_the_solution() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return -torch.sqrt(y) * 50.0 * y

    with torch.no_grad():
        sol = sn.solve(field, torch.ones(1, dtype=torch.float64), [0.0, 1.0], solver="kvaerno5")
    assert float(sol.ys[-1]) == pytest.approx(1.0 / 26.0**2, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"linear_solver": "sparse"}, ValueError, "linear_solver: expected one of 'auto', 'dense', 'batched', 'gmres'"),
        ({"jacobian": 3}, TypeError, "jacobian: expected a callable"),
        ({"newton_tolerance": 2.0}, ValueError, "newton_tolerance: expected between 0 and 1"),
        ({"newton_tolerance": "small"}, TypeError, "newton_tolerance: expected a number"),
        ({"jacobian": abs, "linear_solver": "gmres"}, ValueError, "'gmres' uses no Jacobian"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sn.Kvaerno5(**options)


@pytest.mark.parametrize(
    ("jacobian", "error", "message"),
    [
        (lambda t, y: torch.eye(3), ValueError, "jacobian: expected a tensor of shape"),
        (lambda t, y: torch.eye(2, dtype=torch.complex128), TypeError, "jacobian: expected a real matrix"),
        (lambda y: torch.eye(2), TypeError, r"jacobian: is called with \(t, y\)"),
    ],
)
def test_bad_jacobians(jacobian: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sn.solve(nonlinear, exact(0.0), [0.0, 1.0], solver=sn.Kvaerno5(jacobian=jacobian))


def test_methods_without_an_estimate_need_fixed_steps() -> None:
    with pytest.raises(ValueError, match="'gl4' has no error estimate"):
        sn.solve(nonlinear, exact(0.0), [0.0, 1.0], solver="gl4")


def test_transforms_are_refused() -> None:
    def end(y0: Tensor) -> Tensor:
        options: Any = {"solver": "trapezoid", "controller": sn.FixedStep(0.5), "adjoint": sn.Direct()}
        return sn.solve(nonlinear, y0, [0.0, 1.0], **options).ys[-1]

    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.jacrev(end)(exact(0.0))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(exact(0.0), torch.ones(2, dtype=torch.float64))
        with pytest.raises(ValueError, match="forward-mode"):
            end(dual)


def test_compile_runs_eagerly() -> None:
    with torch.no_grad(), pytest.warns(sn.CompileWarning, match="not an explicit"):
        sol = sn.solve(nonlinear, exact(0.0), [0.0, 1.0], solver="kvaerno5", compile=True)
    torch.testing.assert_close(sol.ys[-1], exact(1.0), rtol=1e-5, atol=1e-6)


def test_equality_and_representation() -> None:
    assert sn.Kvaerno5() == sn.Kvaerno5() != sn.Kvaerno5(linear_solver="dense")
    assert hash(sn.Kvaerno5()) == hash(sn.Kvaerno5())
    assert repr(sn.RadauIIA5(linear_solver="gmres")) == "RadauIIA5(linear_solver='gmres')"
    assert all(isinstance(kind(), ImplicitRungeKutta) and kind().name == name for name, kind in IMPLICIT.items())


class LiveMemory(TorchDispatchMode):
    """The bytes of all storages that operations have created and that are still alive, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x)
        return result

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._alive and not self._alive[storage.data_ptr()][0].expired():
            return
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def test_live_memory_is_counted() -> None:
    with LiveMemory() as memory:
        kept = torch.zeros(1000)
        for _ in range(10):
            kept = kept + 1.0
        _ = kept[:10]
    assert memory.peak == 2 * 4000


@pytest.mark.slow
@pytest.mark.parametrize("n", [512, 2048])
def test_newton_krylov_keeps_a_few_vectors(n: int) -> None:
    """A Brusselator with 4,096 unknowns: the dense Jacobian alone would take 134 MB."""
    x = torch.linspace(0.0, 1.0, n, dtype=torch.float64)
    y0 = torch.stack([1.0 + torch.sin(2 * math.pi * x), torch.full_like(x, 3.0)])

    def field(t: Tensor, y: Tensor) -> Tensor:
        u, v = y
        lap = torch.nn.functional.pad(y[None], (1, 1), mode="replicate")[0].diff(n=2) * (0.02 * (n - 1) ** 2)
        return torch.stack([1.0 + u**2 * v - 4.0 * u, 3.0 * u - u**2 * v]) + lap

    with torch.no_grad(), LiveMemory() as memory:
        sol = sn.solve(field, y0, [0.0, 0.1], solver=sn.Kvaerno3(linear_solver="gmres"), rtol=1e-4, atol=1e-6)
    assert sol.stats.products > 0
    assert sol.status is sn.Status.SUCCESS
    vectors = memory.peak / (y0.numel() * y0.element_size())
    assert 40 < vectors < LIVE_VECTORS
