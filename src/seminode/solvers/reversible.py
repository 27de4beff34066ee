"""Reversible methods: a step can be undone exactly, so that nothing of the way needs to be kept.

They carry a pair (y, z) of coupled copies of the state. Undoing a step is exact algebra; in floating-point arithmetic
it repeats the rounding of the step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._stepping.combination import MovingStep, StepSize, length, scaled_sum, sparse
from .base import Slope, Solver
from .explicit import EXPLICIT, ExplicitRungeKutta, runge_kutta_step

#: What a step adds to one copy of the state as a function of the other.
Increment = Callable[[Slope, Tensor], Tensor]
#: Evaluates an increment at a state and pulls a cotangent back through it: its value, and the gradient for the state.
Pull = Callable[[Increment, Tensor, Tensor], tuple[Tensor, Tensor]]


class ReversibleSolver(Solver):
    """A method whose steps can be undone.

    A step is a sequence of *shears*: something that depends on one copy alone is added to the other. The copy it
    depends on is there before and after, so that one evaluation serves to undo the shear and to pull back through it.
    """

    paired = True
    weights: Sequence[float] = ()  # the solution is no sum of slopes alone
    error_weights = None

    @abstractmethod
    def invert(self, slope: Slope, dt: float, end: Tensor) -> Tensor:
        """The pair before a step, from the one after it."""

    @abstractmethod
    def pull_back(self, pull: Pull, dt: float, end: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        """The pair before a step and its cotangent, from those after it."""

    @property
    def damping(self) -> float:
        """ln(1/λ): by how much, at least, rounding errors grow in going back one step."""
        return 0.0


class ReversibleHeun(ReversibleSolver):
    """The reversible Heun method, order 2, one evaluation a step.

        z₁ = 2y₀ − z₀ + dt·f(t₀, z₀),    y₁ = y₀ + ½dt·(f(t₀, z₀) + f(t₁, z₁))

    Its error is estimated by the embedded Euler step. Stable on the imaginary axis only: for problems that neither
    grow nor contract. Kidger, Foster, Li and Lyons, *Efficient and accurate gradients for neural SDEs* (2021).
    """

    order = 2
    stages = 1
    error_order = 2
    error_needs_end_slope = True
    ends_on_stage = True
    interpolant = ((1.0, -0.5), (0.0, 0.5))
    interpolant_order = 2

    @property
    def name(self) -> str:
        return "reversible_heun"

    def step(self, slope: Slope, dt: StepSize, y0: Tensor, k1: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, z = y0.unbind(0)
        z1 = 2.0 * y - z + scaled_sum(dt, ((0, 1.0),), [k1])
        k2 = slope(1.0, z1)
        y1 = y + scaled_sum(dt, ((0, 0.5), (1, 0.5)), [k1, k2])
        return torch.stack([y1, z1]), [k1, k2]

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, ((0, -0.5), (1, 0.5)), slopes)

    def invert(self, slope: Slope, dt: float, end: Tensor) -> Tensor:
        y1, z1 = end.unbind(0)
        k2 = slope(1.0, z1)
        z = torch.add(2.0 * y1 - z1, k2, alpha=-dt)
        k1 = slope(0.0, z)
        return torch.stack([y1 - scaled_sum(dt, ((0, 0.5), (1, 0.5)), [k1, k2]), z])

    def pull_back(self, pull: Pull, dt: float, end: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        # u = y₀ + ½dt·f(t₀, z₀),  z₁ = 2u − z₀,  y₁ = u + ½dt·f(t₁, z₁), from the last to the first
        (y1, z1), (adj_y, adj_z) = end.unbind(0), adj.unbind(0)
        last, grad = pull(lambda slope, z: 0.5 * dt * slope(1.0, z), z1, adj_y)
        u, adj_z = y1 - last, adj_z + grad
        z, adj_u = 2.0 * u - z1, adj_y + 2.0 * adj_z
        first, grad = pull(lambda slope, z: 0.5 * dt * slope(0.0, z), z, adj_u)
        return torch.stack([u - first, z]), torch.stack([adj_u, grad - adj_z])

    def __repr__(self) -> str:
        return "ReversibleHeun()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class ReversibleRK(ReversibleSolver):
    """Any explicit Runge–Kutta method, made reversible; of the same order, at two of its steps a step.

        y₁ = λy₀ + (1 − λ)z₀ + Ψ(t₀, z₀, dt),    z₁ = z₀ − Ψ(t₁, y₁, −dt)

    Ψ is the increment of the method; the error of a step is estimated by its embedded method. The gap y − z between the
    copies is about the error of the solution so far, some thirty times that of the plain method for λ near one. Where
    the solution contracts like e^−Dt the gap grows unless dt·D < ln(1/λ).

    Arguments:
        base: the method, by name or as an object.
        coupling: λ. Going back amplifies rounding errors by at least λ^−N over N steps; smaller values couple the
            copies more closely and make the method more stable.

    McCallum and Foster, *Efficient, accurate and stable gradients for neural ODEs* (2024).
    """

    def __init__(self, base: str | ExplicitRungeKutta = "dopri5", coupling: float = 0.999):
        if isinstance(base, str):
            if base not in EXPLICIT:
                raise ValueError(f"base: expected one of {', '.join(EXPLICIT)}, found {base!r}")
            base = EXPLICIT[base]()
        if not isinstance(base, ExplicitRungeKutta):
            raise TypeError(f"base: expected the name of an explicit Runge–Kutta method, found {type(base).__name__}")
        if isinstance(coupling, bool) or not isinstance(coupling, float | int) or not 0.0 < coupling <= 1.0:
            raise ValueError(f"coupling: expected a number in (0, 1], found {coupling!r}")
        self.base = base
        self.coupling = float(coupling)
        tableau = base.tableau
        self._later, self._weights = base._later, base._weights
        self._error_weights = sparse(tableau.e or ())
        self.order, self.error_order = base.order, base.error_order
        # Slopes: the stages of Ψ(t₀, z₀, dt), f(t₁, y₁) in place of its end slope, and what the coupling adds.
        self.stages = base.stages + 2
        self.error_needs_end_slope = False
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

    def step(self, slope: Slope, dt: StepSize, y0: Tensor, k1: Tensor) -> tuple[Tensor, list[Tensor]]:
        y, z = y0.unbind(0)
        _, stages = runge_kutta_step(self._later, self._weights, slope, dt, z, k1)
        drift = (1.0 - self.coupling) * (z - y)
        y1 = y + drift + scaled_sum(dt, self._weights, stages)
        end, back = self._back(slope, dt, y1)
        z1 = z - scaled_sum(_reversed(dt), self._weights, back)
        return torch.stack([y1, z1]), [*stages, end, drift / length(dt)]

    def _back(self, slope: Slope, dt: StepSize, y1: Tensor) -> tuple[Tensor, list[Tensor]]:
        """f(t₁, y₁) and the stages of Ψ(t₁, y₁, −dt)."""
        end = slope(1.0, y1)

        def mirrored(c: float, y: Tensor) -> Tensor:
            return slope(1.0 - c, y)

        return end, runge_kutta_step(self._later, self._weights, mirrored, _reversed(dt), y1, end)[1]

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, self._error_weights, slopes)

    def invert(self, slope: Slope, dt: float, end: Tensor) -> Tensor:
        y1, z1 = end.unbind(0)
        _, back = self._back(slope, dt, y1)
        z = z1 + scaled_sum(-dt, self._weights, back)
        _, stages = runge_kutta_step(self._later, self._weights, slope, dt, z, slope(0.0, z))
        lam = self.coupling
        y = (y1 - (1.0 - lam) * z - scaled_sum(dt, self._weights, stages)) / lam
        return torch.stack([y, z])

    def pull_back(self, pull: Pull, dt: float, end: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        (y1, z1), (adj_y, adj_z) = end.unbind(0), adj.unbind(0)
        lam = self.coupling
        back, grad = pull(lambda slope, y: scaled_sum(dt, self._weights, self._back(slope, dt, y)[1]), y1, adj_z)
        z, adj_y = z1 - back, adj_y + grad

        def forth(slope: Slope, z: Tensor) -> Tensor:
            _, stages = runge_kutta_step(self._later, self._weights, slope, dt, z, slope(0.0, z))
            return scaled_sum(dt, self._weights, stages)

        psi, grad = pull(forth, z, adj_y)
        y = (y1 - (1.0 - lam) * z - psi) / lam
        return torch.stack([y, z]), torch.stack([lam * adj_y, adj_z + (1.0 - lam) * adj_y + grad])

    def __repr__(self) -> str:
        return f"ReversibleRK({self.base!r}, coupling={self.coupling:g})"

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and (self.base, self.coupling) == (other.base, other.coupling)

    def __hash__(self) -> int:
        return hash((self.base, self.coupling))


def _reversed(dt: StepSize) -> StepSize:
    return MovingStep(-dt.value, -dt.shift) if isinstance(dt, MovingStep) else -dt
