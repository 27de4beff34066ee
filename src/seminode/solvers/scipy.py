"""SciPy's solvers. They choose their steps themselves; `_stepping.scipy_steps` hands these to the loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from .._stepping.combination import StepSize
from .base import Evaluate, Solver, StepResult

SciPyMethod = Literal["RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA"]

#: Orders of the solution and degrees of the polynomial inside a step; the largest ones where they vary.
ORDERS: dict[str, tuple[int, int]] = {
    "RK23": (3, 3),
    "RK45": (5, 4),
    "DOP853": (8, 7),
    "Radau": (5, 3),
    "BDF": (5, 5),
    "LSODA": (12, 12),
}


class Steps(Protocol):
    """The steps that SciPy takes: the memory of this solver."""

    def result(self) -> StepResult:
        """The step that was taken last."""
        ...

    def sample(self) -> tuple[float, Tensor, Tensor]:
        """One evaluation of that step: its node, its state and its slope."""
        ...


class SciPy(Solver):
    """One of SciPy's solvers, as `scipy.integrate.solve_ivp` runs it.

    SciPy controls the error itself with the `rtol` and `atol` of `solve`; a controller or a norm cannot be passed. The
    state goes through NumPy on the CPU in double precision. Steps, evaluations and outputs are counted
    and saved as with other solvers. An evaluation is counted also where SciPy does not, in finite differences for a
    Jacobian.

    There is no derivative through SciPy's steps: `Direct`, `Replay`, `Checkpointed` and `Reversible` are refused if a
    gradient is needed. Continuous adjoints work with a solver of their own,
    `adjoint=sn.Backsolve(solver="dopri5", controller=sn.Integral())`.

    Arguments:
        method: `"RK23"`, `"RK45"`, `"DOP853"`, `"Radau"`, `"BDF"` or `"LSODA"`.
        first_step: length of the first step; by default SciPy selects it.
        max_step: the largest step.
        min_step: the smallest step, for `"LSODA"` only.

    Needs SciPy: `pip install seminode[scipy]`.

    Reference: Virtanen et al., *SciPy 1.0: fundamental algorithms for scientific computing in Python*, Nature Methods
    17, 2020.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64)
        >>> sol = sn.solve(lambda t, y: -1e4 * (y - torch.cos(t)), y0, [0.0, 1.0], solver=sn.SciPy("Radau"))
        >>> bool((sol.ys[-1] - torch.cos(torch.tensor(1.0))).abs() < 1e-4)
        True
    """

    error_order = None  # SciPy has its own estimate
    error_needs_end_slope = False
    weights: Sequence[float] = ()
    error_weights = None
    general = False
    steady = False
    external = True

    def __init__(
        self,
        method: SciPyMethod = "LSODA",
        *,
        first_step: float | None = None,
        max_step: float = math.inf,
        min_step: float = 0.0,
    ):
        if method not in get_args(SciPyMethod):
            raise ValueError(f"method: expected one of {', '.join(get_args(SciPyMethod))}, found {method!r}")
        self.first_step = None if first_step is None else _check_step("first_step", first_step)
        self.max_step, self.min_step = _check_step("max_step", max_step), min_step
        if min_step != 0.0:
            if _check_step("min_step", min_step) > max_step:
                raise ValueError(f"min_step: expected at most max_step = {max_step}, found {min_step}")
            if method != "LSODA":
                raise ValueError(f"min_step: only LSODA has a smallest step, found method {method!r}")
        self.method = method
        self.order, self.stages = ORDERS[method]
        self.interpolant, self.interpolant_order = polynomial_rule(self.stages, self.stages).matrix, self.stages

    @property
    def name(self) -> str:
        return "scipy"

    @property
    def options(self) -> dict[str, Any]:
        """What SciPy's solver is made with."""
        options: dict[str, Any] = {"first_step": self.first_step, "max_step": self.max_step}
        return {**options, "min_step": self.min_step} if self.method == "LSODA" else options

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Steps) -> StepResult:
        return memory.result()

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("SciPy controls the error itself")

    def with_slope(self, memory: Steps, slope: Tensor) -> Steps:
        return memory

    def across_jump(self, memory: Steps) -> Steps:
        return memory

    def sampled(self, dt: float, y0: Tensor, memory: Steps, result: StepResult) -> tuple[float, Tensor, Tensor]:
        return memory.sample()

    def __repr__(self) -> str:
        defaults = {"first_step": None, "max_step": math.inf, "min_step": 0.0}
        options = [f", {name}={getattr(self, name)!r}" for name, x in defaults.items() if getattr(self, name) != x]
        return f"SciPy({self.method!r}{''.join(options)})"

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def _check_step(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0.0:
        raise ValueError(f"{name}: expected a number above 0, found {value!r}")
    return float(value)


class PolynomialRule(NamedTuple):
    """How the polynomial of a step is found: nodes at which it is sampled, and the matrix over the samples."""

    nodes: tuple[float, ...]
    matrix: tuple[tuple[float, ...], ...]


@functools.cache
def polynomial_rule(degree: int, columns: int) -> PolynomialRule:
    """The rule for a degree, by Chebyshev's points; the matrix has at least as many columns."""
    nodes = (*(0.5 - 0.5 * math.cos(math.pi * i / degree) for i in range(1, degree)), 1.0)
    return PolynomialRule(nodes, tuple((*row, *[0.0] * (columns - degree)) for row in through_start(nodes)))


def through_start(nodes: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """The Lagrange polynomials of some nodes and 0, without that of 0: one row per node, one column per power of x.

    >>> through_start([0.5, 1.0])
    ((4.0, -4.0), (-1.0, 2.0))
    """
    rows: list[tuple[float, ...]] = []
    for i, node in enumerate(nodes):
        row = [1.0 / node]  # x / node
        for other in (*nodes[:i], *nodes[i + 1 :]):
            shifted = [0.0, *row]
            row = [(a - other * b) / (node - other) for a, b in zip(shifted, [*row, 0.0], strict=True)]
        rows.append(tuple(row))
    return tuple(rows)
