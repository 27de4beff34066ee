"""The drop-in for torchdiffeq: the same evaluations and results as the original, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn

import seminode as sn
import seminode.compat.torchdiffeq as ours

DOUBLE = torch.float64


class Net(nn.Module):
    """A network of the state and the time that notes when it is evaluated."""

    def __init__(self, seed: int, size: int = 3, stretch: float = 1.0, dtype: torch.dtype = DOUBLE):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5
        )
        self.first, self.bias, self.last = draw(12, size), draw(12), draw(size, 12)
        self.stretch = stretch
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        return self.stretch * torch.tanh(y @ self.first.T + self.bias * torch.cos(2 * t)) @ self.last.T


class Predation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.tensor([1.5, 1.0, 3.0, 1.0], dtype=DOUBLE))
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        a, b, c, d = self.rates
        return torch.stack([y[..., 0] * (a - b * y[..., 1]), -y[..., 1] * (c - d * y[..., 0])], -1)


class Oscillator(nn.Module):
    """A van der Pol oscillator with a driving force."""

    def __init__(self, mu: float):
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu, dtype=DOUBLE))
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        x, v = y[..., 0], y[..., 1]
        return torch.stack([v, self.mu * (1 - x**2) * v - x + 0.3 * torch.sin(1.7 * t)], -1)


class Pair(nn.Module):
    """A tuple: a state, and the running cost of it."""

    def __init__(self, seed: int):
        super().__init__()
        self.net = Net(seed)

    @property
    def times(self) -> list[float]:
        return self.net.times

    def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        f = self.net(t, y[0])
        return f, f.square().sum(-1)


class Problem(NamedTuple):
    field: Callable[[], Any]
    y0: Any
    t: Tensor
    rtol: float = 1e-5
    atol: float = 1e-7


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


PROBLEMS: dict[str, Problem] = {
    **{f"net{s}": Problem(lambda s=s: Net(s), drawn(s, 4, 3), times(0.0, 1.0, 1.3, 2.0)) for s in range(6)},
    **{f"back{s}": Problem(lambda s=s: Net(s), drawn(s, 2, 3), times(2.0, 0.7, 0.0), 1e-6, 1e-8) for s in range(3)},
    **{f"wild{s}": Problem(lambda s=s: Net(s, stretch=3.0), drawn(s, 5, 3), times(0.0, 1.5), 1e-4) for s in range(3)},
    "wide": Problem(lambda: Net(7, size=20), drawn(7, 3, 20), times(0.0, 0.5, 1.0)),
    "predation": Problem(Predation, torch.tensor([1.0, 1.0], dtype=DOUBLE), times(0.0, 1.0, 2.0, 3.0)),
    "predations": Problem(Predation, 1.0 + drawn(3, 4, 2).square(), times(0.0, 2.0), 1e-4, 1e-6),
    "mild": Problem(lambda: Oscillator(1.0), torch.tensor([2.0, 0.0], dtype=DOUBLE), times(0.0, 1.0, 4.0)),
    "faster": Problem(lambda: Oscillator(3.0), torch.tensor([2.0, 0.0], dtype=DOUBLE), times(0.0, 0.8), 1e-4),
    **{
        f"pair{s}": Problem(lambda s=s: Pair(s), (drawn(s, 4, 3), torch.zeros(4, dtype=DOUBLE)), times(0.0, 1.0, 2.0))
        for s in range(3)
    },
}

ADAPTIVE = ["dopri5", "bosh3", "dopri8", "adaptive_heun", "fehlberg2"]
ON_GRID = ["euler", "midpoint", "heun2", "heun3", "rk4"]


def start(problem: Problem) -> Any:
    if isinstance(problem.y0, tuple):
        return tuple(x.clone().requires_grad_() for x in problem.y0)
    return problem.y0.clone().requires_grad_()


def leaves(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, tuple) else [y]


class Run(NamedTuple):
    forward: list[float]
    backward: list[float]
    ys: list[Tensor]
    grads: list[Tensor]


def run(library: Any, problem: Problem, adjoint: bool, **options: Any) -> Run:
    """Solve and differentiate; the times of all evaluations."""
    field, y0 = problem.field(), start(problem)
    solve = library.odeint_adjoint if adjoint else library.odeint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)
        ys = leaves(solve(field, y0, problem.t, **options))
        forward = list(field.times)
        field.times.clear()
        loss = torch.stack([(y * (1.0 + i)).square().mean() for i, y in enumerate(ys)]).sum()
        grads = torch.autograd.grad(loss, [*leaves(y0), *field.parameters()])
    return Run(forward, list(field.times), ys, list(grads))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    x, y = (torch.cat([each.detach().reshape(-1) for each in many]) for many in (a, b))
    return float((x - y).norm() / y.norm())


def tolerances(problem: Problem) -> dict[str, float]:
    return {"rtol": problem.rtol, "atol": problem.atol}


def test_there_are_twenty_problems() -> None:
    assert len(PROBLEMS) == 20


def looser(problem: Problem, method: str) -> Problem:
    """Tolerances that a method of low order meets in a few dozen steps."""
    rtol = {"bosh3": 1e-4, "adaptive_heun": 1e-2, "fehlberg2": 1e-3}.get(method, problem.rtol)
    return problem._replace(rtol=rtol, atol=max(problem.atol, 1e-2 * rtol))


def check_costs(name: str, method: str) -> None:
    """The same evaluations as the original, forward and backward. Of dopri8, no end slope of rejected steps."""
    problem = looser(PROBLEMS[name], method)
    options: dict[str, Any] = {"method": method, **tolerances(problem), "options": {"first_step": 1e-2}}
    theirs, found = (run(library, problem, False, **options) for library in (original, ours))
    assert len(found.forward) <= len(theirs.forward)
    assert method == "dopri8" or len(found.forward) == len(theirs.forward)
    assert distance(found.ys, theirs.ys) < 1e-7
    # torchdiffeq differentiates the selection of the first step too, so it is given here.
    assert distance(found.grads, theirs.grads) < 1e-6
    del options["options"]
    for norm in (None, "seminorm"):
        settings = {**options, "adjoint_options": {} if norm is None else {"norm": norm}}
        theirs, found = (run(library, problem, True, **settings) for library in (original, ours))
        assert len(found.forward) <= len(theirs.forward)
        assert len(found.backward) <= len(theirs.backward)
        assert method == "dopri8" or len(found.backward) == len(theirs.backward)
        assert distance(found.grads, theirs.grads) < 1e-6 if method != "dopri8" else 10 * problem.rtol


SOME = ("net0", "back1", "predation", "pair0")


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("name", SOME)
def test_adaptive_solves_cost_what_they_cost_in_torchdiffeq(name: str, method: str) -> None:
    check_costs(name, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in SOME])
def test_adaptive_solves_cost_what_they_cost_on_all_problems(name: str, method: str) -> None:
    check_costs(name, method)


def check_times(method: str, dtype: torch.dtype, perturb: bool, t: Tensor, options: dict[str, Any]) -> None:
    """Evaluations at the same times as in the original, to the last bit."""
    problem = Problem(lambda: Net(1, dtype=dtype), drawn(1, 4, 3).to(dtype), t.to(dtype))
    settings = {"method": method, "options": {**options, "perturb": perturb}}
    for adjoint in (False, True):
        theirs, found = (run(library, problem, adjoint, **settings) for library in (original, ours))
        if "interp" in options:  # torchdiffeq evaluates the slope at every output, though outputs are on the grid
            assert len(found.forward) < len(theirs.forward)
            assert set(found.forward) <= set(theirs.forward)
        else:
            assert found.forward == theirs.forward
            assert found.backward == theirs.backward
        assert distance(found.ys, theirs.ys) < 50 * torch.finfo(dtype).eps
        assert distance(found.grads, theirs.grads) < 1e4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("perturb", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ON_GRID)
def test_grids_are_evaluated_at_the_same_times_to_the_last_bit(method: str, dtype: torch.dtype, perturb: bool) -> None:
    check_times(method, dtype, perturb, times(2.0, 0.7, 0.1, 0.0), {})
    check_times(method, dtype, perturb, times(0.1, 0.4, 1.3), {"step_size": 0.07})
    check_times(method, dtype, perturb, torch.linspace(0, 1, 4), {"interp": "cubic"})
    # Whose intervals are 0.3 but for rounding, so that the last step of some is as short as the rounding error.
    check_times(method, dtype, perturb, torch.linspace(0, 3, 11), {"step_size": 0.1})


def test_grids_of_the_users_own() -> None:
    def constructor(func: Any, y0: Any, t: Tensor) -> Tensor:
        return torch.cat([t[:1] + (t[-1] - t[:1]) * x for x in (0.0, 0.1, 0.35, 0.8)] + [t[-1:]])

    for t in (times(0.0, 2.0), times(2.0, 0.3)):
        problem = Problem(lambda: Net(2), drawn(2, 4, 3), t)
        settings = {"method": "rk4", "options": {"grid_constructor": constructor}}
        for adjoint in (False, True):
            theirs, found = (run(library, problem, adjoint, **settings) for library in (original, ours))
            assert found.forward == theirs.forward
            assert found.backward == theirs.backward
            assert distance(found.grads, theirs.grads) < 1e-12


@pytest.mark.parametrize("interp", ["linear", "cubic"])
def test_outputs_between_grid_points(interp: str) -> None:
    problem = Problem(lambda: Net(3), drawn(3, 4, 3), times(0.0, 0.33, 0.4, 0.95, 1.0))
    settings = {"method": "midpoint", "options": {"step_size": 0.2, "interp": interp}}
    theirs, found = (run(library, problem, False, **settings) for library in (original, ours))
    assert len(found.forward) <= len(theirs.forward)
    assert distance(found.ys, theirs.ys) < 1e-14
    assert distance(found.grads, theirs.grads) < 1e-13


@pytest.mark.parametrize("method", ["explicit_adams", "implicit_adams", "fixed_adams"])
@pytest.mark.parametrize("options", [{}, {"max_order": 5}, {"interp": "cubic"}, {"max_order": 3}])
@pytest.mark.filterwarnings("ignore:max_order is below 4")
def test_adams_methods(method: str, options: dict[str, Any]) -> None:
    problem = PROBLEMS["net1"]._replace(t=times(0.0, 0.5, 1.0))
    settings = {"method": method, "options": {**options, "step_size": 0.05}}
    for adjoint in (False, True):
        theirs, found = (run(library, problem, adjoint, **settings) for library in (original, ours))
        assert len(found.forward) <= len(theirs.forward)
        assert len(found.backward) <= len(theirs.backward)
        assert distance(found.ys, theirs.ys) < 1e-10
        assert distance(found.grads, theirs.grads) < 1e-9


def test_adams_methods_keep_their_order_on_uneven_grids() -> None:
    """torchdiffeq takes the weights of equal steps."""
    exact = torch.exp(torch.tensor(-1.0, dtype=DOUBLE))
    errors = []
    for library in (original, ours):
        grid = torch.linspace(0, 1, 41, dtype=DOUBLE) ** 1.5
        y = library.odeint(
            lambda t, y: -y, torch.ones((), dtype=DOUBLE), grid, method="explicit_adams", options={"max_order": 6}
        )
        errors.append(float((y[-1] - exact).abs()))
    assert errors[1] < 1e-8
    assert errors[0] > 1e-5


@pytest.mark.parametrize("solver", ["LSODA", "RK45", "Radau"])
@pytest.mark.filterwarnings("ignore:The following arguments have no effect")  # of the original
def test_solvers_of_scipy(solver: str) -> None:
    problem = PROBLEMS["predation"]
    for t in (problem.t, problem.t.flip(0)):
        found = []
        for library in (original, ours):
            field = Predation()
            y = library.odeint(
                field, problem.y0.clone().requires_grad_(), t, method="scipy_solver", options={"solver": solver}
            )
            assert not y.requires_grad
            ys = library.odeint_adjoint(field, problem.y0, t, method="scipy_solver", options={"solver": solver})
            found.append([y, *torch.autograd.grad(ys.sum(), list(field.parameters()))])
        assert distance(found[1], found[0]) < 1e-5


def test_tsit5_is_that_of_tsitouras() -> None:
    problem = PROBLEMS["net2"]
    found = run(ours, problem, True, method="tsit5", rtol=1e-8, atol=1e-9)
    expected = run(original, problem, True, rtol=1e-10, atol=1e-11)
    assert distance(found.ys, expected.ys) < 1e-7
    assert distance(found.grads, expected.grads) < 1e-6
    assert len(found.forward) % 6 == 2  # the first slope and the first step cost one each


def test_gradients_for_times() -> None:
    for settings in (
        {"rtol": 1e-8, "atol": 1e-10},
        {"method": "euler"},
        {"method": "rk4", "options": {"step_size": 0.3}},
    ):
        grads = []
        for library in (original, ours):
            t = times(0.0, 0.5, 1.2).requires_grad_()
            ys = library.odeint(Net(4), drawn(4, 2, 3), t, **settings)
            grads.append(torch.autograd.grad(ys.square().sum(), t)[0])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-6 if "rtol" in settings else 1e-12, atol=0.0)


def test_jumps_are_found_where_torchdiffeq_loses_them() -> None:
    """A step that ends exactly on a jump leaves all later ones unnoticed in torchdiffeq."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 1.0, 1.0, torch.where(t < 2.0, -3.0, 5.0)) * torch.ones_like(y)

    jumps = times(1.0, 2.0)
    options = {"jump_t": jumps, "first_step": 1.0}
    y = ours.odeint(field, torch.zeros(1, dtype=DOUBLE), times(0.0, 3.0), options=options)
    assert abs(float(y[-1]) - 3.0) < 1e-12


def test_states_of_any_dtype() -> None:
    t = torch.tensor([0.0, 0.5, 1.0])
    y = ours.odeint(lambda t, y: 1j * y, torch.ones(2, dtype=torch.complex64), t, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[:, 0], torch.exp(1j * t), rtol=1e-4, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        half = ours.odeint(lambda t, y: -y, torch.ones(2, dtype=dtype), t, rtol=1e-2, atol=1e-3)
        assert half.dtype == dtype
        torch.testing.assert_close(half[:, 0].float(), torch.exp(-t), rtol=1e-2, atol=1e-2)


def test_a_dense_solution() -> None:
    field, y0 = Net(5), drawn(5, 3)
    theirs, found = (
        library.odeint_dense(field, y0, torch.tensor(0.0), torch.tensor(2.0)) for library in (original, ours)
    )
    for t in (0.0, 0.3, 1.999):
        torch.testing.assert_close(found(torch.tensor(t)), theirs(torch.tensor(t)), rtol=1e-10, atol=1e-12)
    pair = ours.odeint_dense(Pair(1), PROBLEMS["pair1"].y0, 0.0, 1.0, method="rk4", options={"step_size": 0.1})
    assert [x.shape for x in pair(0.25)] == [(4, 3), (4,)]
