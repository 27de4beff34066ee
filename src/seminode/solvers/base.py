"""What the loop expects of a solver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from .._stepping.combination import StepSize

Slope = Callable[[float, Tensor], Tensor]


class Solver(ABC):
    """A one-step method.

    To write one, provide:

    1. `order`: the order of convergence of the solution; `stages`: how many slopes `step` returns;
    2. `error_order`: the power of dt in the local error that is estimated, or `None` without an estimate;
    3. `error_needs_end_slope`: whether the estimate reads f(t1, y1) (the first-same-as-last trick);
    4. `step(slope, dt, y0, k1)`: the new state and the slopes; `slope(c, y)` evaluates the field at node c of the step;
    5. `error(dt, slopes)`: the estimate; `slopes` are those of `step`, then f(t1, y1) if it is needed;
       `weights` and `error_weights`: the same as numbers, y1 = y0 + dt·Σ bᵢkᵢ and error = dt·Σ eᵢkᵢ, the latter with
       one more for f(t1, y1), or `None`: a plain integral along a solution is summed up with them;
    6. `interpolant`: the matrix of the continuous extension over the slopes of `step` and, where it
       reads that, f(t1, y1); `interpolant_order`: its order.

    A *paired* method carries two copies of the state, stacked: `step` takes and returns the pair. The first is the
    solution, the second (its *anchor*) is where the first slope of the next step is evaluated.

    All of them are pure: tensors in, tensors out, and none of the inputs is changed.
    """

    order: int
    stages: int
    error_order: int | None
    error_needs_end_slope: bool
    weights: Sequence[float]
    error_weights: Sequence[float] | None
    interpolant: Sequence[Sequence[float]]
    interpolant_order: int
    paired: bool = False
    #: Whether it solves any equation, or only one that it was made for.
    general: bool = True
    #: Whether the last slope of `step` is f(t1, anchor) already.
    ends_on_stage: bool = False

    @property
    def evaluations(self) -> int:
        """How many evaluations of the field a step makes, its first slope included and its end slope not."""
        return self.stages

    @property
    def name(self) -> str:
        """What it is called in `solve(solver=...)` and in messages."""
        return type(self).__name__.lower()

    @abstractmethod
    def step(self, slope: Slope, dt: StepSize, y0: Tensor, k1: Tensor) -> tuple[Tensor, list[Tensor]]: ...

    @abstractmethod
    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor: ...
