"""Quadrature: the parameter integral by a quadrature rule on accepted steps, apart from the solver's stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._field.checks import check_number
from .._stepping.problem import Problem
from .._stepping.schedule import Plan
from .._stepping.step import Step
from ._continuous.parameter_integral import ErrorSample, ParameterIntegral
from ._continuous.quadrature_rules import GAUSS, KRONROD, LOBATTO, RADAU, Rule
from ._continuous.solve import IntegralContext
from ._continuous.strategy import refuse_coarse_polynomials
from ._continuous.system import Integrand
from ._sums import Sums
from .interpolating import DenseAdjoint

RuleName = Literal["lobatto", "gauss", "gauss-kronrod"]
StateSource = Literal["solve", "dense"]
RULES = ("lobatto", "gauss", "gauss-kronrod")
#: The error of the integral is estimated on the first steps and then on some: nodes cannot be batched there.
ALL, EVERY = 16, 8
#: How often the adaptive rule may halve an interval, and how often without success.
DEPTH, PATIENCE = 12, 3


@dataclass(frozen=True, repr=False)
class Quadrature(DenseAdjoint):
    """Solve for a_z without the parameters; then compute ∂L/∂θ = ∫ a_zᵀ ∂f/∂θ dt by quadrature, step by step.

    A plain integral needs no Runge–Kutta method. The integrand is evaluated on the polynomials of accepted steps only,
    at fewer places than a step has stages: no gradient for parameters is computed in rejected steps.

    Arguments:
        rule: `"lobatto"` (default; 4 nodes for a method of order 5, two of which are the ends of the step, where the
            field has been evaluated already), `"gauss"` (3 nodes), or `"gauss-kronrod"` (7 nodes, halving intervals
            until its own tolerance is met).
        z: `"solve"` (default) solves z backwards with a_z, in constant memory: exactly the steps of `Backsolve()`, with
            two more evaluations per step and about half the gradients of parameters. `"dense"` takes z from the
            forward solution, as `Interpolating` does, for problems that cannot be solved backwards; with
            `rule="gauss"` this is the GaussAdjoint of SciMLSensitivity.
        quad_rtol, quad_atol: tolerances of `"gauss-kronrod"`, relative to the integral so far, in the root mean square
            over its entries; by default those of the solve.
        batched: evaluate the nodes of a step in one call, vectorised by `torch.func.vmap`; by default where the field
            allows it.

    Reference: Ma et al., *A Comparison of Automatic Differentiation and Continuous Sensitivity Analysis for Derivatives
    of Differential Equation Solutions*, IEEE HPEC 2021, arXiv:1812.01892; Kidger, Chen and Lyons (ICML 2021) name the
    method as future work.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> k = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        >>> y0 = torch.ones(1, dtype=torch.float64)
        >>> sol = sn.solve(lambda t, y: -k * y, y0, [0.0, 1.0], adjoint=sn.Quadrature(z="dense"))
        >>> sol.ys[-1].sum().backward()
        >>> round(k.grad.item(), 4)  # −e⁻¹
        -0.3679
    """

    rule: RuleName = "lobatto"
    z: StateSource = "solve"
    quad_rtol: float | None = None
    quad_atol: float | None = None
    batched: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(map(repr, RULES))}, found {self.rule!r}")
        if self.z not in ("dense", "solve"):
            raise ValueError(f"z: expected 'dense' or 'solve', found {self.z!r}")
        if self.memory is not None and self.z == "solve":
            raise ValueError(
                "memory: does nothing with z='solve', which keeps nothing of the forward solution; pass z='dense'"
            )
        for name in ("quad_rtol", "quad_atol"):
            if getattr(self, name) is not None:
                if self.rule != "gauss-kronrod":
                    raise ValueError(f"{name}: does nothing with rule={self.rule!r}, which is not adaptive")
                check_number(name, getattr(self, name))
        batched: Any = self.batched
        if batched is not None and not isinstance(batched, bool):
            raise TypeError(f"batched: expected True, False or None, found {batched!r}")

    @property
    def reads_forward(self) -> bool:
        return self.z == "dense"

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        refuse_coarse_polynomials(self.name, self.backward_method(problem)[0])
        if problem.ranks.several and self.rule == "gauss-kronrod":
            raise ValueError(
                "rule: 'gauss-kronrod' halves intervals by the gradients of parameters, of which with "
                "norms.distributed() each rank has only its own part; pass rule='lobatto' or 'gauss'"
            )

    def integral(self, context: IntegralContext) -> QuadratureIntegral:
        if self.rule == "gauss-kronrod":
            rtol = context.rtol if self.quad_rtol is None else self.quad_rtol
            rtol = max(rtol, 4.0 * context.eps)  # below that there are only rounding errors
            return AdaptiveNodes(context, rtol, context.atol if self.quad_atol is None else self.quad_atol)
        small = context.solver.order <= 3
        if self.rule == "gauss":
            rule = GAUSS[2 if small else 3]
            return FixedNodes(context, rule, rule, self.batched)
        return FixedNodes(context, LOBATTO[3 if small else 4], RADAU[2 if small else 3], self.batched)


class QuadratureIntegral(ParameterIntegral):
    """What quadratures share: the integrand at times inside an accepted step."""

    def __init__(self, context: IntegralContext):
        self._system, self._evaluate = context.system, context.evaluate
        targets = context.system.targets
        self._targets = targets
        self.total = Sums(len(targets))
        self._sample = ErrorSample(targets)
        self._idle = not targets

    @property
    def error(self) -> float | None:
        return None if self._idle else self._sample.relative_to(self.total.values)

    def begin(self, plan: Plan) -> None:
        pass

    def wanted(self, stage: int | None) -> tuple[bool, bool]:
        return False, False

    def stage(self, stage: int | None, grads: Sequence[Tensor | None], kept: Integrand | None) -> None:
        pass

    def _points(self, step: Step, xs: Sequence[float]) -> list[tuple[float, Tensor, Tensor]]:
        """t, z and a_z at relative positions x of a step."""
        times = [step.plan.stage_time(x) for x in xs]
        values = step.at(times)
        return [(t, *self._system.unpack(w, t)) for t, w in zip(times, values, strict=True)]

    def _at(self, t: float, z: Tensor, a: Tensor) -> list[Tensor | None]:
        return self._system.params_vjp(self._evaluate.one(t, z, a))


class FixedNodes(QuadratureIntegral):
    """A rule of fixed nodes; the ends of a step, where it has any there, reuse the evaluations of the solver.

    A step whose end slope is not the first one of the next step (it lands on an output time, say) gets the `short`
    rule, which has no node at the end: three gradients per step in either case.
    """

    def __init__(self, context: IntegralContext, rule: Rule, short: Rule, batched: bool | None):
        super().__init__(context)
        self._rule, self._short = rule, short
        self._stages = context.solver.stages
        self._programs = context.programs
        self._batched = batched
        self._breaks = False
        self._kept: dict[bool, Integrand | None] = {False: None, True: None}  # at the start, at the end
        self._start: Sequence[Tensor | None] | None = None
        self._count = 0

    @property
    def _compiled(self) -> bool:
        return self._programs is not None and self._programs.usable

    def begin(self, plan: Plan) -> None:
        self._breaks = plan.breaks

    def wanted(self, stage: int | None) -> tuple[bool, bool]:
        if self._idle or stage is None or self._compiled:
            return False, False
        if stage == 0:
            return False, self._rule.left
        return False, stage == self._stages and self._rule.right and not self._breaks

    def stage(self, stage: int | None, grads: Sequence[Tensor | None], kept: Integrand | None) -> None:
        if kept is not None:
            self._kept[stage != 0] = kept
            if stage == 0:
                self._start = None

    def rejected(self, step: Step, ratio: float) -> None:
        self._kept[True] = None

    def accepted(self, step: Step, ratio: float) -> None:
        if self._idle:
            return
        if self._compiled:
            return self._integrate(step)
        if self._rule.right and not self._breaks:
            step.end_slope()  # which the next step needs too
        end = self._kept[True]
        rule = self._short if self._rule.right and end is None else self._rule
        dt = step.plan.dt
        complete = self._count < ALL or self._count % EVERY == 0
        self._count += 1
        if rule.left:
            self._add(rule, 0, self._start or self._vjp_at(False), dt, complete)
        self._start = None
        inner = list(rule.inner)
        points = self._points(step, [rule.nodes[i] for i in inner])
        if complete or self._batched is False or not self._batch(rule, inner, points, dt):
            for i, point in zip(inner, points, strict=True):
                self._add(rule, i, self._at(*point), dt, complete)
        if rule.right:
            self._start = self._vjp_at(True)
            self._add(rule, len(rule.nodes) - 1, self._start, dt, complete)
        self._kept = {False: None, True: None}
        self._sample.accept(dt, complete, rule.sharpening)

    def _integrate(self, step: Step) -> None:
        """The same by one program, which evaluates the field at the ends as well, unless that was done before."""
        assert self._programs is not None
        if self._rule.right and not self._breaks:
            step.end_slope()
        rule, dt = self._short if self._rule.right and self._breaks else self._rule, step.plan.dt
        known = self._start if rule.left else None
        if known is not None:
            self._add(rule, 0, known, dt, True)
        folded, times = self._programs.integral(step, rule, known is not None)
        self._evaluate.count(times)
        self.total.add(folded.total)
        self._sample.add_sampled(folded.difference, folded.total)
        self._start = folded.last if rule.right else None
        self._sample.accept(dt, True, rule.sharpening)

    def _vjp_at(self, end: bool) -> list[Tensor | None]:
        kept, self._kept[end] = self._kept[end], None
        assert kept is not None
        return self._system.params_vjp(kept)

    def _add(self, rule: Rule, i: int, grads: Sequence[Tensor | None], dt: float, complete: bool) -> None:
        self.total.add(grads, -dt * rule.weights[i])
        if complete:
            self._sample.add(grads, -dt * (rule.weights[i] - rule.lower[i]), -dt * rule.weights[i])

    def _batch(self, rule: Rule, inner: list[int], points: Sequence[tuple[float, Tensor, Tensor]], dt: float) -> bool:
        """All inner nodes in one call; false if the field does not allow that."""
        times, zs, adjoints = zip(*points, strict=True)
        try:
            f = self._evaluate.many(times, zs)
        except Exception:
            # In a loop it will either work, or raise an error about the user's own tensors.
            if self._batched:
                raise
            self._batched = False
            return False
        weights = [-dt * rule.weights[i] for i in inner]
        a = torch.stack([w * x for w, x in zip(weights, adjoints, strict=True)])
        self.total.add(self._system.params_vjp(Integrand(f, a), len(inner)))
        return True


class AdaptiveNodes(QuadratureIntegral):
    """Kronrod's rule on intervals that are halved until it agrees with the Gauss rule inside it."""

    def __init__(self, context: IntegralContext, rtol: float, atol: float):
        super().__init__(context)
        self._rtol, self._atol = rtol, atol

    def accepted(self, step: Step, ratio: float) -> None:
        if not self._idle:
            self._halves(step, 0.0, 1.0, ())

    def _halves(self, step: Step, low: float, high: float, above: tuple[float, ...]) -> None:
        """Integrate over a part of a step; `above` are the errors per length of the larger parts that contain it."""
        dt = step.plan.dt * (high - low)
        trial, error = Sums(len(self.total.values)), ErrorSample(self._targets)
        nodes = [low + x * (high - low) for x in KRONROD.nodes]
        for point, w, lower in zip(self._points(step, nodes), KRONROD.weights, KRONROD.lower, strict=True):
            grads = self._at(*point)
            trial.add(grads, -dt * w)
            error.add(grads, -dt * (w - lower))
        size, *totals = error.sizes(self.total.values, trial.values)
        density = size / (high - low)
        if density > self._allowed(totals) and self._promising((*above, density)):
            middle = 0.5 * (low + high)
            del trial
            self._halves(step, low, middle, (*above, density))
            self._halves(step, middle, high, (*above, density))
            return
        self.total.absorb(trial)
        self._sample.take_over(error, dt)

    @staticmethod
    def _promising(densities: tuple[float, ...]) -> bool:
        """Whether halving helps: an error that does not fall is noise, or the integrand has no derivative there."""
        return len(densities) < DEPTH and (len(densities) <= PATIENCE or densities[-1] < 0.5 * densities[-1 - PATIENCE])

    def _allowed(self, totals: Sequence[float]) -> float:
        """The root mean square that the error of a whole step may have, from those of the sum and of this part."""
        return self._atol + self._rtol * max((x for x in totals if math.isfinite(x)), default=0.0)
