"""Regularisers that are read off the steps of a solve: the solver's error estimate and its estimate of stiffness."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._field.checks import check_flags, check_number, check_solver, check_state
from .._stepping.combination import combine, sparse
from .._stepping.observers import Observer
from .._untyped import vector_norm
from ..adjoints import Direct
from ..solvers import Solver
from ..solvers.explicit import ExplicitRungeKutta
from .running import Evaluation, Regulariser

if TYPE_CHECKING:
    from .._stepping.step import Step


class StepRegulariser(Regulariser):
    r"""A cost Σⱼ c(step j) over the accepted steps of a solve, one value per sample.

    It needs no evaluation of the field but those of the solve itself. Its gradient is that of the steps with their
    sizes held fixed, and needs `adjoint=sn.Direct()`, eagerly: other adjoints do not keep the graph of a step.

    A subclass provides:

    1. `name` and `weight`, as every regulariser, and `local`: whether to use one random step of each solve, times the
       number of steps, instead of the sum;
    2. `check(solver)`: raises an error if the steps of a solver do not have what it reads;
    3. `of_step(step, state)`: c, of shape (batch,); `state` takes the part of z from a flat tensor.

    Example:
        The squared ways of the steps, which short steps make small:

        >>> import torch, seminode as sn
        >>> from seminode.models import NeuralODE, StepRegulariser
        >>> class Ways(StepRegulariser):
        ...     name, weight, local = "ways", 1.0, False
        ...
        ...     def check(self, solver):
        ...         pass  # any solver will do
        ...
        ...     def of_step(self, step, state):
        ...         return state(step.y1 - step.y0).square().sum(1)
        >>> options = {"adjoint": sn.Direct(), "solver": "euler", "controller": sn.FixedStep(0.5)}
        >>> model = NeuralODE(lambda t, z: -z, regularisers=[Ways()], **options)
        >>> model(torch.ones(2, 1), costs=True)[1]["ways"]  # 0.5² + 0.25²
        tensor([0.3125, 0.3125])
    """

    local: bool

    @abstractmethod
    def check(self, solver: Solver) -> None:
        """Raise an error if the steps of `solver` do not have what the cost reads."""

    @abstractmethod
    def of_step(self, step: Step, state: Callable[[Tensor], Tensor]) -> Tensor:
        """The cost of one step, of shape (batch,).

        Arguments:
            step: an accepted step, with `y0`, `y1`, `slopes`, `end_slope()`, and its times in `plan`.
            state: takes the part of z, of shape (batch, ...), from a tensor of the step.
        """

    def rate(self, at: Evaluation) -> Tensor:
        raise TypeError(f"{type(self).__name__}: is read off the steps of a solve and has no rate; pass it to a model")


@dataclass(frozen=True)
class SolverError(StepRegulariser):
    r"""The error estimates of the steps, Σⱼ |hⱼ|·rms(eⱼ), where eⱼ is the estimate of the local error of step j.

    It rewards solutions along which the solver can take long steps, measured by the solver's own estimate.

    References: Pal, Ma, Shah and Rackauckas, *Opening the Blackbox: Accelerating Neural Differential Equations by
    Regularizing Internal Solver Heuristics*, ICML 2021, arXiv:2105.03918; `local`: Pal, Edelman and Rackauckas,
    *Locally Regularized Neural Differential Equations: Some Black Boxes Were Meant to Remain Closed!*, ICML 2023,
    arXiv:2303.02262.

    Arguments:
        weight: λ. Estimates are small: values of 10 to 10,000 are usual.
        local: whether to use one random step per solve, times the number of steps.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.models import ConcatMLP, NeuralODE, SolverError, penalty
        >>> model = NeuralODE(ConcatMLP(2, (8,)), regularisers=[SolverError(100.0)], adjoint=sn.Direct())
        >>> y, costs = model(torch.randn(5, 2), costs=True)
        >>> (y.square().mean() + penalty(model.regularisers, costs)).backward()
        >>> costs["solver_error"].shape
        torch.Size([5])
    """

    weight: float
    local: bool = False
    name = "solver_error"

    def __post_init__(self) -> None:
        check_number("weight", self.weight)
        check_flags(local=self.local)

    def check(self, solver: Solver) -> None:
        if solver.error_order is None or not isinstance(solver, ExplicitRungeKutta):
            raise ValueError(
                f"regularisers: SolverError reads the error estimate of an explicit Runge–Kutta method, found solver "
                f"{solver.name!r}; pass solver='dopri5', 'tsit5' or 'bosh3', also with fixed steps"
            )

    def of_step(self, step: Step, state: Callable[[Tensor], Tensor]) -> Tensor:
        solver = step.solver
        slopes = [*step.slopes, step.end_slope()] if solver.error_needs_end_slope else step.slopes
        return abs(step.plan.dt) * _rms(state(solver.error(step.plan.dt, slopes)))


@dataclass(frozen=True)
class Stiffness(StepRegulariser):
    r"""The estimates of stiffness of the steps, Σⱼ ‖f(t₁, y₁) − f(t₁, Y)‖ / ‖y₁ − Y‖, where Y is a stage at the end t₁.

    The quotient estimates the largest eigenvalue of the Jacobian in modulus, as in codes that detect stiffness (Hairer
    and Wanner, *Solving Ordinary Differential Equations II*, IV.2). Where y₁ and Y agree up to rounding, it is 0.

    References: as for [`SolverError`][seminode.models.SolverError].

    Arguments:
        weight: λ; 0.1 and less is usual.
        local: whether to use one random step per solve, times the number of steps.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.models import NeuralODE, Stiffness
        >>> options = {"adjoint": sn.Direct(), "controller": sn.FixedStep(0.5), "solver": "rk4"}
        >>> model = NeuralODE(lambda t, z: -3.0 * z, regularisers=[Stiffness(0.1)], **options)
        >>> model(torch.ones(2, 1, requires_grad=True), costs=True)[1]["stiffness"].detach()  # two steps of 3 each
        tensor([6., 6.])
    """

    weight: float
    local: bool = False
    name = "stiffness"

    def __post_init__(self) -> None:
        check_number("weight", self.weight)
        check_flags(local=self.local)

    def check(self, solver: Solver) -> None:
        if not isinstance(solver, ExplicitRungeKutta) or _last_stage(solver) is None:
            raise ValueError(
                f"regularisers: Stiffness compares the end of a step with a stage at the same time, which solver "
                f"{solver.name!r} does not have; pass solver='dopri5', 'tsit5' or 'rk4'"
            )

    def of_step(self, step: Step, state: Callable[[Tensor], Tensor]) -> Tensor:
        solver = step.solver
        assert isinstance(solver, ExplicitRungeKutta)
        stage = _last_stage(solver)
        assert stage is not None
        place = combine(step.y0, step.plan.dt, sparse(solver.tableau.a[stage]), step.slopes)
        distance = _norm(state(step.y1 - place))
        difference = _norm(state(step.end_slope() - step.slopes[stage]))
        end = state(step.y1).detach()
        clear = distance.detach() > 4.0 * torch.finfo(end.dtype).eps * _norm(end)
        return torch.where(clear, difference / torch.where(clear, distance, 1.0), 0.0)


def _last_stage(solver: ExplicitRungeKutta) -> int | None:
    """The last stage at the end of a step that is not the end itself."""
    tableau = solver.tableau
    stages = [i for i in range(1, tableau.stages) if tableau.c[i] == 1.0 and tuple(tableau.a[i]) != tuple(tableau.b)]
    return stages[-1] if stages else None


def _norm(x: Tensor) -> Tensor:
    """Of every sample; its gradient at 0 is 0."""
    return vector_norm(x.flatten(1), dim=1)


def _rms(x: Tensor) -> Tensor:
    return _norm(x) / max(1, x[0].numel()) ** 0.5


class StepCosts(Observer):
    """Adds up the costs of the accepted steps of one solve."""

    def __init__(self, costs: Sequence[StepRegulariser], y0: Any):
        self._costs = tuple(costs)
        self._layout = check_state(y0)
        self._single = isinstance(y0, Tensor)
        z0 = y0 if self._single else y0[0]
        self.totals = {cost.name: z0.new_zeros(z0.shape[0]) for cost in costs}
        self._steps = 0
        # A generator of its own: the draws must not change what a field with random numbers sees.
        self._random = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if self._local else 0)

    @property
    def _local(self) -> bool:
        return any(cost.local for cost in self._costs)

    def _state(self, flat: Tensor) -> Tensor:
        return flat if self._single else self._layout.unpack(flat)[0]

    def accepted(self, step: Step, ratio: float) -> None:
        self._steps += 1
        # Each of the steps so far is the chosen one with the same probability.
        chosen = not self._local or float(torch.rand((), generator=self._random)) * self._steps < 1.0
        for cost in self._costs:
            if not cost.local:
                self.totals[cost.name] = self.totals[cost.name] + cost.of_step(step, self._state)
            elif chosen:
                self.totals[cost.name] = cost.of_step(step, self._state)

    def result(self) -> dict[str, Tensor]:
        """The cost of every sample by name."""
        return {cost.name: self.totals[cost.name] * (self._steps if cost.local else 1) for cost in self._costs}


def step_regularisers(running: Sequence[Any]) -> tuple[StepRegulariser, ...]:
    """Those of the regularisers that are read off the steps."""
    return tuple(each for each in running if isinstance(each, StepRegulariser))


def watch_steps(costs: Sequence[StepRegulariser], y0: Any, options: Any) -> StepCosts:
    """An observer for a solve with these options; raises an error if they do not allow the costs."""
    solver, adjoint = check_solver(options.get("solver", "dopri5")), options.get("adjoint")
    for cost in costs:
        cost.check(solver)
    name = type(costs[0]).__name__
    for option in ("compile", "batched"):
        if options.get(option):
            raise ValueError(f"{option}: expected False with the regulariser {name}, which reads the steps of a solve")
    if torch.is_grad_enabled() and not (
        adjoint == "direct" or (isinstance(adjoint, Direct) and adjoint.memory is None)
    ):
        raise ValueError(
            f"adjoint: expected Direct() with the regulariser {name}, since other adjoints do not keep the graph of a "
            f"step, found {adjoint!r}; pass adjoint=sn.Direct(), or compute the costs under torch.no_grad()"
        )
    return StepCosts(costs, y0)
