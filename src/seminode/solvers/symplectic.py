"""Symplectic methods for separable Hamiltonian systems: leapfrog, and compositions of it.

For q′ = v(t, p), p′ = F(t, q) a step alternates *kicks*, p ← p + b·dt·F(q), with *drifts*, q ← q + a·dt·v(p). Each of
them preserves the symplectic form, so the energy error stays bounded over very long times, and each can be undone.

Hairer, Lubich and Wanner, *Geometric Numerical Integration* (2006), I.1.4 and II.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._stepping.combination import StepSize, combine
from .._untyped import numbers, solve_linear
from .base import Evaluate, StepResult
from .reversible import IncrementVJP, ReversibleSolver, State


class Symplectic(ReversibleSolver):
    """A composition of kicks and drifts, given by their parts of the step. It begins and ends with a kick.

    The field returns both halves of the slope at once, (v(t, p), F(t, q)), but a kick needs F and a drift v only. So a
    kick and a drift cost one evaluation each. The last kick shares its evaluation with the first of the next step.
    """

    kicks: ClassVar[tuple[float, ...]]
    drifts: ClassVar[tuple[float, ...]]
    error_order = None
    general = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.stages = 2 * len(cls.drifts)
        cls.interpolant = continuous_extension(cls.kicks, cls.drifts)
        cls.interpolant_order = 2 if len(cls.drifts) == 1 else 3
        cls.weights = [sum(row) for row in cls.interpolant[:-1]]

    def __init__(self, dim: int = -1, separable: bool | None = None):
        if separable not in (None, True):
            raise ValueError(f"separable: expected None (to be detected) or True (declared), found {separable!r}")
        self.dim, self.separable = _check_dim(dim), separable

    @property
    def reaches_outside(self) -> bool:
        """Whether the field is evaluated at times outside of the step."""
        times = [*itertools.accumulate(self.kicks), *itertools.accumulate(self.drifts)]
        return not all(-1e-9 < t < 1.0 + 1e-9 for t in times)

    def halves(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """q and p."""
        n = y.shape[self.dim] // 2
        return y.narrow(self.dim, 0, n), y.narrow(self.dim, n, n)

    def _join(self, q: Tensor, p: Tensor) -> Tensor:
        return torch.cat((q, p), self.dim)

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Tensor | None) -> StepResult:
        q, p = self.halves(y0)
        latest = evaluate(0.0, y0, stage=0) if memory is None else memory
        force = self.halves(latest)[1]
        slopes: list[Tensor] = []
        for i, (kick, drift, p_time, q_time) in enumerate(self._substeps()):
            p = combine(p, dt, ((0, kick),), [force])
            v, _ = self.halves(evaluate(p_time, self._join(q, p), stage=2 * i + 1))
            slopes.append(self._join(v, force))
            q = combine(q, dt, ((0, drift),), [v])
            latest = evaluate(q_time, self._join(q, p), stage=2 * i + 2)
            force = self.halves(latest)[1]
            slopes.append(self._join(v, force))
        p = combine(p, dt, ((0, self.kicks[-1]),), [force])
        return StepResult(self._join(q, p), slopes, latest)

    def _substeps(self) -> list[tuple[float, float, float, float]]:
        """Kicks and drifts, with how far p has come before and q after the drift."""
        p_times, q_times = itertools.accumulate(self.kicks), [*itertools.accumulate(self.drifts[:-1]), 1.0]
        return list(zip(self.kicks[:-1], self.drifts, p_times, q_times, strict=False))

    def invert(self, evaluate: Evaluate, dt: float, end: State) -> State:
        q, p = self.halves(end[0])
        p = p - (self.kicks[-1] * dt) * self.halves(evaluate(1.0, end[0], stage=0))[1]
        for i, (kick, drift, p_time, q_time) in enumerate(reversed(self._undone())):
            v, _ = self.halves(evaluate(p_time, self._join(q, p), stage=2 * i + 1))
            q = q - (drift * dt) * v
            _, force = self.halves(evaluate(q_time, self._join(q, p), stage=2 * i + 2))
            p = p - (kick * dt) * force
        return (self._join(q, p),)

    def _undone(self) -> list[tuple[float, float, float, float]]:
        """Kicks and drifts, with how far p has come before the drift and q before it, too."""
        starts = [0.0, *itertools.accumulate(self.drifts[:-1])]
        return [(*part[:3], start) for part, start in zip(self._substeps(), starts, strict=True)]

    def step_vjp(self, vjp: IncrementVJP, dt: float, end: State, adj: State) -> tuple[State, State]:
        (q, p), (adj_q, adj_p) = self.halves(end[0]), self.halves(adj[0])

        def kicked(c: float, kick: float) -> tuple[Tensor, Tensor]:
            def increment(evaluate: Evaluate, q: Tensor) -> Tensor:
                return (kick * dt) * self.halves(evaluate(c, self._join(q, p), stage=0))[1]

            change, grad = vjp(increment, q, adj_p)
            return p - change, adj_q + grad

        p, adj_q = kicked(1.0, self.kicks[-1])
        for kick, drift, p_time, q_time in reversed(self._undone()):

            def increment(evaluate: Evaluate, p: Tensor, q: Tensor = q, c: float = p_time, a: float = drift) -> Tensor:
                return (a * dt) * self.halves(evaluate(c, self._join(q, p), stage=0))[0]

            change, grad = vjp(increment, p, adj_q)
            q, adj_p = q - change, adj_p + grad
            p, adj_q = kicked(q_time, kick)
        return (self._join(q, p),), (self._join(adj_q, adj_p),)

    def sampled(self, dt: float, y0: Tensor, memory: Tensor | None, result: StepResult) -> tuple[float, Tensor, Tensor]:
        (q1, p1), force = self.halves(result.y1), self.halves(result.memory)[1]
        return 1.0, self._join(q1, p1 - (self.kicks[-1] * dt) * force), result.memory

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError(f"{self.name} has no error estimate")

    def __repr__(self) -> str:
        options = [] if self.dim == -1 else [f"dim={self.dim}"]
        options += [] if self.separable is None else ["separable=True"]
        return f"{type(self).__name__}({', '.join(options)})"

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and (self.dim, self.separable) == (other.dim, other.separable)

    def __hash__(self) -> int:
        return hash((type(self), self.dim, self.separable))


def _check_dim(dim: Any) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected a whole number, found {type(dim).__name__}")
    return dim


def continuous_extension(kicks: Sequence[float], drifts: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """The matrix of the step's polynomial over the slopes of `Symplectic.step` and the slope at the end.

    Let cᵢ and dⱼ be the times that p and q have reached. The weights βⱼ of the F's for p satisfy
    Σ βⱼdⱼᵐ = xᵐ⁺¹/(m + 1). The weights bᵢ of the v's for q satisfy Σ bᵢ = x, Σ bᵢcᵢ = x²/2 and, with three drifts,
    Σ bᵢcᵢ² = x³/3 and Σ bᵢâᵢⱼdⱼ = x³/6, where âᵢⱼ are the kicks. (The same condition on the βⱼ follows from m = 2,
    since substeps are leapfrog steps.) There are as many conditions as weights, so that those of the step itself result
    at x = 1. Each slope (v, F) belongs to one bᵢ and one βⱼ, and one combination of the slopes serves both halves.
    """
    p_times, q_times = list(itertools.accumulate(kicks)), [0.0, *itertools.accumulate(drifts)]
    chain = itertools.accumulate(b * d for b, d in zip(kicks, q_times, strict=True))
    size = len(kicks)
    c, d = torch.tensor(p_times, dtype=torch.float64), torch.tensor(q_times, dtype=torch.float64)
    moments = torch.diag(1.0 / torch.arange(1.0, size + 1, dtype=torch.float64))
    force = solve_linear(torch.stack([d**m for m in range(size)]), moments)
    conditions = torch.stack([c**m for m in range(size)])
    if size == 4:
        conditions[3] = torch.tensor(list(chain), dtype=torch.float64)
        moments[3] = torch.tensor([0.0, 0.0, 1.0 / 6.0, 0.0], dtype=torch.float64)
    v = solve_linear(conditions, moments)
    rows = [force[0]]
    for i in range(len(drifts)):
        rows.append(v[i] - rows[-1])
        rows.append(force[i + 1] - rows[-1])
    return tuple(tuple(numbers(row)) for row in rows)


class Leapfrog(Symplectic):
    """Leapfrog (velocity Verlet, Störmer–Verlet), order 2, for separable Hamiltonian systems. Fixed steps only.

        p½ = p₀ + ½dt·F(t₀, q₀),    q₁ = q₀ + dt·v(t½, p½),    p₁ = p½ + ½dt·F(t₁, q₁)

    for q′ = v(t, p) = ∂H/∂p and p′ = F(t, q) = −∂H/∂q. The energy error stays bounded over very many steps, and a
    step with −dt undoes a step with dt. Two evaluations per step.

    Arguments:
        dim: the dimension along which a state that is one tensor holds first q and then p. A state of two leaves is
            (q, p) without that.
        separable: whether the field is known to be separable. By default every solve checks it by a few evaluations
            with other values of q or p, which `Stats.checks` counts.

    Hairer, Lubich and Wanner, *Geometric numerical integration illustrated by the Störmer–Verlet method* (2003).

    Example:
        >>> import torch, seminode as sn
        >>> def pendulum(t, y):
        ...     q, p = y
        ...     return p, -torch.sin(q)
        >>> y0 = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
        >>> sol = sn.solve(pendulum, y0, [0.0, 100.0], solver=sn.Leapfrog(), controller=sn.FixedStep(0.1))
        >>> q, p = sol.ys
        >>> energy = p**2 / 2 - torch.cos(q)
        >>> bool((energy[-1] - energy[0]).abs() < 1e-3)
        True
    """

    order = 2
    kicks = (0.5, 0.5)
    drifts = (1.0,)

    @property
    def name(self) -> str:
        return "leapfrog"


#: Yoshida's weights of the three leapfrog steps in one of order 4.
_OUTER = 1.0 / (2.0 - 2.0 ** (1.0 / 3.0))
_INNER = 1.0 - 2.0 * _OUTER


class Yoshida4(Symplectic):
    """Yoshida's composition of three leapfrog steps, order 4, for separable Hamiltonian systems. Fixed steps only.

    The steps have the lengths w·dt, (1 − 2w)·dt and w·dt with w = 1/(2 − 2^⅓) ≈ 1.35: the middle one goes back. Six
    evaluations per step. If the field depends on t, it is evaluated up to 0.36·dt outside of a step, also before ts[0]
    and after ts[-1]; `jumps` are refused.

    Arguments:
        dim, separable: see [`Leapfrog`][seminode.Leapfrog].

    Yoshida, *Construction of higher order symplectic integrators*, Physics Letters A 150 (1990).

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.tensor([1.0, 0.0], dtype=torch.float64)  # position and momentum
        >>> field = lambda t, y: torch.stack([y[1], -y[0]])
        >>> sol = sn.solve(field, y0, [0.0, 1.0], solver="yoshida4", controller=sn.FixedStep(0.05))
        >>> round(sol.ys[-1, 0].item(), 5)  # cos 1
        0.5403
    """

    order = 4
    kicks = (0.5 * _OUTER, 0.5 * (_OUTER + _INNER), 0.5 * (_OUTER + _INNER), 0.5 * _OUTER)
    drifts = (_OUTER, _INNER, _OUTER)

    @property
    def name(self) -> str:
        return "yoshida4"
