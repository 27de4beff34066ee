"""What the loop expects of a solver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from .._error_norm import ErrorNorm
from .._stepping.combination import StepSize

if TYPE_CHECKING:
    from ._linear import Jacobian, LinearSolver

#: What a solver carries from one step to the next; only the solver looks inside.
Memory = Any


class Evaluate(Protocol):
    """Evaluates the field inside a step: at node c of the step and state y, as evaluation number `stage`."""

    def __call__(self, c: float, y: Tensor, /, *, stage: int) -> Tensor: ...


class IterationCounter(Protocol):
    """What implicit solvers count."""

    jacobians: int
    factorisations: int
    newton_iterations: int
    products: int


class ImplicitEvaluate(Protocol):
    """What an implicit solver evaluates the field with.

    Evaluations that only search for a stage have no number. `norm` measures errors by the tolerance of the solve;
    without one, equations are solved to `eps`, the rounding error of the field. `orders` is how often a step may be
    differentiated.
    """

    norm: ErrorNorm | None
    orders: int
    counter: IterationCounter
    eps: float

    def __call__(self, c: float, y: Tensor, /, *, stage: int | None) -> Tensor: ...

    def jacobian(
        self, c: float, y: Tensor, linear_solver: LinearSolver, function: Callable[..., Tensor] | None
    ) -> Jacobian:
        """The Jacobian of the field, from the user's function if there is one."""
        ...

    def count_product(self) -> None:
        """A product with the Jacobian was computed."""
        ...


class StepResult(NamedTuple):
    """The result of one step of a solver.

    Attributes:
        y1: the state at the end.
        slopes: what `error` and the interpolant read.
        memory: for the next step.
        failure: the reason, if the solver could not compute the step (an iteration did not converge, say). The step is
            rejected as if its error were infinite, and a controller with fixed steps raises
            [`StepFailure`][seminode.StepFailure].
        interpolant: the matrix of the step's polynomial where it is not that of the solver; it has as many columns.
        error: the estimate of the local error, if it is not what `Solver.error` makes of the slopes.

    Example:
        One step of a solver by hand; `evaluate` returns the field at node c of the step:

        >>> import torch, seminode as sn
        >>> result = sn.Heun().step(lambda c, y, stage: -y, 0.1, torch.tensor([1.0]), None)
        >>> result.y1, result.slopes  # 1 − 0.1 + 0.1²/2
        (tensor([0.9050]), [tensor([-1.]), tensor([-0.9000])])
    """

    y1: Tensor
    slopes: list[Tensor]
    memory: Memory = None
    failure: str | None = None
    interpolant: Sequence[Sequence[float]] | None = None
    error: Tensor | None = None


class Solver(ABC):
    """A one-step method.

    To write one, provide:

    1. `order`: the order of convergence of the solution; `stages`: how many slopes `step` returns;
    2. `error_order`: the power of dt in the estimated local error, or `None` without an estimate;
    3. `error_needs_end_slope`: whether the estimate reads f(t1, y1) (first-same-as-last methods);
    4. `step(evaluate, dt, y0, memory)`: a `StepResult`. `evaluate(c, y, stage=i)` evaluates the field at node c of the
       step; number the evaluations 0, 1, 2, … in their order. Where `memory` holds the first slope, do not evaluate it
       again;
    5. `error(dt, slopes)`: the error estimate; `slopes` are those of `step`, followed by f(t1, y1) if it is needed;
       `weights` and `error_weights`: the same as numbers, y1 = y0 + dt·Σ bᵢkᵢ and error = dt·Σ eᵢkᵢ, the latter with
       one more entry for f(t1, y1), or `None`. Plain integrals along a solution are summed with them;
    6. `interpolant`: the matrix of the continuous extension over the slopes of `step` and, where it reads that,
       f(t1, y1); `interpolant_order`: its order.

    By default the memory of a solver is the first slope of the next step, or `None` if it is not known yet. A solver
    that carries more overrides the methods below `error`.

    All methods are pure: tensors in, tensors out, and no input is changed.

    Example:
        Euler's method, without an error estimate, and a straight line between the ends of a step:

        >>> import torch, seminode as sn
        >>> from seminode.extending import Solver, StepResult, length
        >>> class Euler(Solver):
        ...     order, stages, error_order, error_needs_end_slope = 1, 1, None, False
        ...     weights, error_weights, interpolant, interpolant_order = (1.0,), None, ((1.0,),), 1
        ...
        ...     def step(self, evaluate, dt, y0, memory):
        ...         k = evaluate(0.0, y0, stage=0) if memory is None else memory
        ...         return StepResult(y0 + length(dt) * k, [k])
        ...
        ...     def error(self, dt, slopes):
        ...         raise NotImplementedError
        >>> y0 = torch.ones(1, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 0.5, 1.0], solver=Euler(), controller=sn.FixedStep(0.5))
        >>> sol.ys[-1].backward()
        >>> sol.ys[-1].item(), y0.grad.item()  # 0.5², with any adjoint but Reversible
        (0.25, 0.25)
    """

    order: int
    stages: int
    error_order: int | None
    error_needs_end_slope: bool
    weights: Sequence[float]
    error_weights: Sequence[float] | None
    interpolant: Sequence[Sequence[float]]
    interpolant_order: int
    #: Whether it solves any equation, or only the one it was made for.
    general: bool = True
    #: Whether a step depends on slopes of the one before it, which discrete adjoints other than `Direct` do not keep.
    carries_slopes: bool = False
    #: Whether every step makes `evaluations` evaluations, or some make more or fewer.
    steady: bool = True
    #: Whether another library takes its steps: it chooses them itself, and they cannot be taken again.
    external: bool = False
    #: Whether `step` and `error` take a tensor of step sizes, one per sample, and the memory is the first slope.
    batches: bool = False
    #: Whether its steps solve equations: `step` is then given an `ImplicitEvaluate`, and a step that is taken again
    #: arrives at the same state within the tolerance, not to rounding.
    implicit: bool = False

    @property
    def evaluations(self) -> int:
        """How many evaluations of the field a step makes, including its first slope but not its end slope."""
        return self.stages

    @property
    def name(self) -> str:
        """Its name in `solve(solver=...)` and in messages."""
        return type(self).__name__.lower()

    @abstractmethod
    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Memory) -> StepResult:
        """One step of length `dt` from `y0`.

        Arguments:
            evaluate: `evaluate(c, y, stage=i)`, the field at node c of the step.
            dt: the signed length; `length(dt)` of `seminode.extending` is a number or a tensor to calculate with.
            y0: the state, one flat tensor; a single tensor keeps its shape.
            memory: what the step before has left, or `start`.
        """

    @abstractmethod
    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        """The estimate of the local error from the `slopes` of a step of length `dt`."""

    def start(self, y0: Tensor) -> Memory:
        """The memory before the first step, from the initial state `y0`."""
        return None

    def with_slope(self, memory: Memory, slope: Tensor) -> Memory:
        """The memory with the first slope of the next step filled in."""
        return slope

    def retry(self, memory: Memory, result: StepResult) -> Memory:
        """The memory for another, shorter step from the same state: what the attempt `result` has learned is kept."""
        return memory if result.failure is not None else self.with_slope(memory, result.slopes[0])

    def anchor(self, y: Tensor, memory: Memory) -> Tensor:
        """Where the first slope of the next step is evaluated: by default in the state `y`, whatever the memory."""
        return y

    def across_jump(self, memory: Memory) -> Memory:
        """The memory for a step that starts on a jump of the field: slopes of the steps before say nothing about it."""
        return self.recall(self.carried(memory))

    def sampled(self, dt: float, y0: Tensor, memory: Memory, result: StepResult) -> tuple[float, Tensor, Tensor]:
        """One evaluation of a step: its node, its state and its slope. Some adjoints recognise the field by them.

        `dt`, `y0`, `memory` and `result` are what `step` was given and has returned.
        """
        return 0.0, self.anchor(y0, memory), result.slopes[0]

    def carried(self, memory: Memory) -> tuple[Tensor, ...]:
        """The tensors of the memory on which later steps depend, other than through y: a second copy of the state, say.

        The first slope is not one of them, since it can be evaluated again. Discrete adjoints keep these tensors and
        differentiate with respect to them. There are equally many before every step.
        """
        return ()

    def recall(self, carried: Sequence[Tensor]) -> Memory:
        """The memory back from its carried tensors; the first slope is not known."""
        return None
