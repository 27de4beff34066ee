"""Reversible methods: a step can be undone exactly, so that no state of the forward pass has to be kept.

Undoing a step is exact algebra; in floating-point arithmetic it repeats the rounding of the step. The methods in this
module work for any equation. They carry a second copy z of the state in their memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._stepping.combination import MovingStep, StepSize, length, scaled_sum, sparse
from .base import Evaluate, Solver, StepResult
from .explicit import ExplicitName, ExplicitRungeKutta, check_base, runge_kutta_step

#: What a step adds to one part of the state (a copy of it, or a half), as a function of the other.
Increment = Callable[[Evaluate, Tensor], Tensor]
#: Evaluates an increment at such a part and applies its VJP to a cotangent: the value, and the gradient for the part.
IncrementVJP = Callable[[Increment, Tensor, Tensor], tuple[Tensor, Tensor]]
#: The state and what the solver carries in addition, or their cotangents.
State = tuple[Tensor, ...]


class PairMemory(NamedTuple):
    """The second copy of the state and, if it is known, the first slope of the next step, which is evaluated there."""

    z: Tensor
    slope: Tensor | None = None


class ReversibleSolver(Solver):
    """A method whose steps can be undone.

    A step is a sequence of *shears*: a function of one part of the state alone is added to the other part. The part
    that the function reads is the same before and after, so that one evaluation serves to undo the shear and to compute
    its VJP.
    """

    error_needs_end_slope = False
    error_weights = None

    @abstractmethod
    def invert(self, evaluate: Evaluate, dt: float, end: State) -> State:
        """What a step starts from, from what it leads to."""

    @abstractmethod
    def step_vjp(self, vjp: IncrementVJP, dt: float, end: State, adj: State) -> tuple[State, State]:
        """What a step starts from and its cotangents, from what it leads to and its cotangents."""

    @property
    def damping(self) -> float:
        """ln(1/λ): the factor, at least, by which rounding errors grow when one step is undone."""
        return 0.0


class CoupledSolver(ReversibleSolver):
    """A reversible method for any equation: two coupled copies of the state advance in turn."""

    weights: Sequence[float] = ()  # the solution is not a sum of slopes alone
    #: Whether the last slope of a step is the first one of the next.
    last_slope_is_next: bool = False

    def start(self, y0: Tensor) -> PairMemory:
        return PairMemory(y0)

    def with_slope(self, memory: PairMemory, slope: Tensor) -> PairMemory:
        return memory._replace(slope=slope)

    def anchor(self, y: Tensor, memory: PairMemory) -> Tensor:
        return memory.z

    def carried(self, memory: PairMemory) -> tuple[Tensor, ...]:
        return (memory.z,)

    def recall(self, carried: Sequence[Tensor]) -> PairMemory:
        return PairMemory(*carried)


class ReversibleHeun(CoupledSolver):
    """The reversible Heun method, order 2, one evaluation per step.

        z₁ = 2y₀ − z₀ + dt·f(t₀, z₀),    y₁ = y₀ + ½dt·(f(t₀, z₀) + f(t₁, z₁))

    Its error is estimated by the embedded Euler step. It is stable on the imaginary axis only: use it for problems
    that neither grow nor contract.

    Reference: Kidger, Foster, Li and Lyons, *Efficient and Accurate Gradients for Neural SDEs*, NeurIPS 2021,
    arXiv:2105.13493.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> turn = lambda t, y: torch.stack([y[1], -y[0]])
        >>> y0 = torch.tensor([1.0, 0.0])
        >>> sol = sn.solve(turn, y0, [0.0, 1.0], solver="reversible_heun", adjoint=sn.Reversible(), rtol=1e-3)
        >>> round(sol.ys[-1, 0].item(), 2)  # cos 1
        0.54
    """

    order = 2
    stages = 2
    error_order = 2
    last_slope_is_next = True
    interpolant = ((1.0, -0.5), (0.0, 0.5))
    interpolant_order = 2

    @property
    def evaluations(self) -> int:
        return 1  # the second slope is the first one of the next step

    @property
    def name(self) -> str:
        return "reversible_heun"

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: PairMemory) -> StepResult:
        z = memory.z
        k1 = evaluate(0.0, z, stage=0) if memory.slope is None else memory.slope
        z1 = 2.0 * y0 - z + scaled_sum(dt, ((0, 1.0),), [k1])
        k2 = evaluate(1.0, z1, stage=1)
        y1 = y0 + scaled_sum(dt, ((0, 0.5), (1, 0.5)), [k1, k2])
        return StepResult(y1, [k1, k2], PairMemory(z1, k2))

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, ((0, -0.5), (1, 0.5)), slopes)

    def invert(self, evaluate: Evaluate, dt: float, end: State) -> State:
        y1, z1 = end
        k2 = evaluate(1.0, z1, stage=0)
        z = (2.0 * y1 - z1).add(k2, alpha=-dt)
        k1 = evaluate(0.0, z, stage=1)
        return y1 - scaled_sum(dt, ((0, 0.5), (1, 0.5)), [k1, k2]), z

    def step_vjp(self, vjp: IncrementVJP, dt: float, end: State, adj: State) -> tuple[State, State]:
        # u = y₀ + ½dt·f(t₀, z₀),  z₁ = 2u − z₀,  y₁ = u + ½dt·f(t₁, z₁), from the last to the first
        (y1, z1), (adj_y, adj_z) = end, adj
        last, grad = vjp(lambda evaluate, z: 0.5 * dt * evaluate(1.0, z, stage=0), z1, adj_y)
        u, adj_z = y1 - last, adj_z + grad
        z, adj_u = 2.0 * u - z1, adj_y + 2.0 * adj_z
        first, grad = vjp(lambda evaluate, z: 0.5 * dt * evaluate(0.0, z, stage=0), z, adj_u)
        return (u - first, z), (adj_u, grad - adj_z)

    def __repr__(self) -> str:
        return "ReversibleHeun()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class ReversibleRK(CoupledSolver):
    """A reversible variant of any explicit Runge–Kutta method, of the same order, at the cost of two of its steps.

        y₁ = λy₀ + (1 − λ)z₀ + Ψ(t₀, z₀, dt),    z₁ = z₀ − Ψ(t₁, y₁, −dt)

    Ψ is the increment of the method; the embedded method estimates the error of a step. The gap y − z between the
    copies is about the error of the solution so far, which is some thirty times that of the plain method for λ near
    one. Where the solution contracts like e^−Dt, the gap grows unless dt·D < ln(1/λ).

    Arguments:
        base: the method, by name or as an object.
        coupling: λ. Undoing N steps amplifies rounding errors by at least λ^−N; smaller values couple the copies more
            closely and make the method more stable.

    Reference: McCallum and Foster, *Efficient, Accurate and Stable Gradients for Neural ODEs*, 2024, arXiv:2410.11648.

    Example:
        >>> import seminode as sn
        >>> sn.ReversibleRK("tsit5", coupling=0.99)
        ReversibleRK(Tsit5(), coupling=0.99)
    """

    def __init__(self, base: ExplicitName | ExplicitRungeKutta = "dopri5", coupling: float = 0.999):
        self.base = base = check_base(base)
        self.coupling = _check_coupling(coupling)
        tableau = base.tableau
        self._later, self._weights = base.later_stages, sparse(tableau.b)
        self._error_weights = sparse(tableau.e or ())
        self.order, self.error_order = base.order, base.error_order
        # Slopes: the stages of Ψ(t₀, z₀, dt), f(t₁, y₁) in place of its end slope, and what the coupling adds.
        self.stages = base.stages + 2
        self.interpolant = (*tableau.interpolant, (1.0, *[0.0] * (len(tableau.interpolant[0]) - 1)))
        self.interpolant_order = base.interpolant_order

    @property
    def evaluations(self) -> int:
        return 2 * self.base.stages

    @property
    def name(self) -> str:
        return f"reversible {self.base.name}"

    @property
    def damping(self) -> float:
        return -math.log(self.coupling)

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: PairMemory) -> StepResult:
        z = memory.z
        k1 = evaluate(0.0, z, stage=0) if memory.slope is None else memory.slope
        _, slopes = runge_kutta_step(self._later, self._weights, evaluate, dt, z, k1)
        drift = (1.0 - self.coupling) * (z - y0)
        y1 = y0 + drift + scaled_sum(dt, self._weights, slopes)
        end, mirrored = self._mirrored_slopes(evaluate, dt, y1, stage=len(slopes))
        z1 = z - scaled_sum(_reversed(dt), self._weights, mirrored)
        return StepResult(y1, [*slopes, end, drift / length(dt)], PairMemory(z1))

    def _mirrored_slopes(self, evaluate: Evaluate, dt: StepSize, y1: Tensor, stage: int) -> tuple[Tensor, list[Tensor]]:
        """f(t₁, y₁) and the stages of Ψ(t₁, y₁, −dt); the first of these evaluations is number `stage`."""
        end = evaluate(1.0, y1, stage=stage)

        def mirrored(c: float, y: Tensor, *, stage: int) -> Tensor:
            return evaluate(1.0 - c, y, stage=stage)

        return end, runge_kutta_step(self._later, self._weights, mirrored, _reversed(dt), y1, end, stage + 1)[1]

    def _slopes(self, evaluate: Evaluate, dt: StepSize, z: Tensor, stage: int) -> list[Tensor]:
        """The stages of Ψ(t₀, z, dt); the first of these evaluations is number `stage`."""
        k1 = evaluate(0.0, z, stage=stage)
        return runge_kutta_step(self._later, self._weights, evaluate, dt, z, k1, stage + 1)[1]

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, self._error_weights, slopes)

    def invert(self, evaluate: Evaluate, dt: float, end: State) -> State:
        y1, z1 = end
        _, mirrored = self._mirrored_slopes(evaluate, dt, y1, stage=0)
        z = z1 + scaled_sum(-dt, self._weights, mirrored)
        slopes = self._slopes(evaluate, dt, z, stage=len(mirrored))
        lam = self.coupling
        return (y1 - (1.0 - lam) * z - scaled_sum(dt, self._weights, slopes)) / lam, z

    def step_vjp(self, vjp: IncrementVJP, dt: float, end: State, adj: State) -> tuple[State, State]:
        (y1, z1), (adj_y, adj_z) = end, adj
        lam = self.coupling

        def mirrored(evaluate: Evaluate, y: Tensor) -> Tensor:
            return scaled_sum(dt, self._weights, self._mirrored_slopes(evaluate, dt, y, stage=0)[1])

        def increment(evaluate: Evaluate, z: Tensor) -> Tensor:
            return scaled_sum(dt, self._weights, self._slopes(evaluate, dt, z, stage=0))

        back, grad = vjp(mirrored, y1, adj_z)
        z, adj_y = z1 - back, adj_y + grad
        psi, grad = vjp(increment, z, adj_y)
        y = (y1 - (1.0 - lam) * z - psi) / lam
        return (y, z), (lam * adj_y, adj_z + (1.0 - lam) * adj_y + grad)

    def __repr__(self) -> str:
        return f"ReversibleRK({self.base!r}, coupling={self.coupling:g})"

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and (self.base, self.coupling) == (other.base, other.coupling)

    def __hash__(self) -> int:
        return hash((self.base, self.coupling))


def _check_coupling(coupling: Any) -> float:
    if isinstance(coupling, bool) or not isinstance(coupling, float | int) or not 0.0 < coupling <= 1.0:
        raise ValueError(f"coupling: expected a number in (0, 1], found {coupling!r}")
    return float(coupling)


def _reversed(dt: StepSize) -> StepSize:
    return MovingStep(-dt.value, -dt.shift) if isinstance(dt, MovingStep) else -dt
