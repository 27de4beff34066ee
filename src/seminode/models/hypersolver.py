"""Hypersolvers: Runge–Kutta methods with a learned correction of the local error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._field.checks import check_count
from .._stepping.combination import StepSize, combine, length
from .._untyped import norm, numbers
from ..controllers import Integral
from ..solve import solve
from ..solvers import ExplicitRungeKutta, Solver
from ..solvers.base import Evaluate, Memory, StepResult
from ..solvers.explicit import ExplicitName, check_base

Correction = Callable[..., Tensor]


class CorrectionNet(nn.Module):
    """g_ω(ε, z, k₁, …, k_s) for states of shape (batch, dim): an MLP whose inputs are ε, z and the slopes of the step.

    `fit` standardises its inputs and scales its outputs to the data. Reference: as for
    [`HyperSolver`][seminode.models.HyperSolver].

    Arguments:
        dim: size of the state.
        stages: s, the number of stages of the base method; 2 for Heun's method.
        width, layers: width and number of the hidden layers.

    Example:
        >>> from seminode.models import HyperSolver
        >>> net = CorrectionNet(dim=2, stages=1, width=16)
        >>> hyper = HyperSolver("euler", net)  # as HyperSolver("euler", dim=2, width=16)
        >>> z = torch.zeros(5, 2)
        >>> net(torch.tensor(0.1), z, torch.ones(5, 2)).shape
        torch.Size([5, 2])
    """

    shift: Tensor
    spread: Tensor
    size: Tensor

    def __init__(self, dim: int, stages: int, width: int = 32, layers: int = 2):
        super().__init__()
        for name, value in (("dim", dim), ("stages", stages), ("width", width), ("layers", layers)):
            check_count(name, value)
        inputs = dim * (1 + stages) + 1
        sizes = [inputs, *[width] * layers]
        hidden: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            hidden += [nn.Linear(a, b), nn.SiLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(width, dim))
        self.register_buffer("shift", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(inputs))
        self.register_buffer("size", torch.ones(dim))

    @staticmethod
    def inputs(eps: Tensor, z: Tensor, *slopes: Tensor) -> Tensor:
        return torch.cat([z, *slopes, eps.expand(z.shape[0], 1)], -1)

    def forward(self, eps: Tensor, z: Tensor, *slopes: Tensor) -> Tensor:
        return self.size * self.net((self.inputs(eps, z, *slopes) - self.shift) / self.spread)

    def scale_to(self, pairs: Sequence[Pairs]) -> None:
        """Set the scales of inputs and outputs from the training data."""
        inputs = torch.cat([self.inputs(p.eps, p.z, *p.slopes) for p in pairs])
        targets = torch.cat([p.residual for p in pairs])
        spread = inputs.std(0)
        self.shift.copy_(inputs.mean(0))
        # Constant inputs, such as the step size of a uniform grid, are only centred.
        self.spread.copy_(torch.where(spread > 1e-6 * (1.0 + self.shift.abs()), spread, torch.ones_like(spread)))
        self.size.copy_(targets.square().mean(0).sqrt().clamp_min(1e-12))


class HyperSolver(nn.Module, Solver):
    """A fixed-step method of order p with a learned correction,

        z_{k+1} = z_k + ε ψ(t_k, z_k) + ε^{p+1} g_ω(ε, z_k, k₁, …, k_s).

    ψ is the increment of a Runge–Kutta method and k₁ … k_s are its slopes, k₁ = f(t_k, z_k). The slopes are inputs of
    the correction because the step computes them anyway and because they depend on the time, which is not an input.
    [`fit`][seminode.models.hypersolver.fit] fits the correction to the local error of the base method, for one field
    and the region that its solutions visit. The correction is not valid for other fields or regions. Where
    |g_ω − g| ≤ δ, the local error falls from O(ε^{p+1}) to O(δ ε^{p+1}).

    A hypersolver is used like any solver: `sn.solve(..., solver=hyper, controller=sn.FixedStep(eps))`. Outputs between
    steps use the interpolant of the base method, changed so that it ends at the corrected z_{k+1}.

    Within a solve ω is a constant. `Direct`, `Replay` and `Checkpointed` compute the gradients of the corrected steps
    with respect to y0, ts, args and the parameters of the field, but none with respect to ω. The correction is not
    fitted to the adjoint equation, so a continuous adjoint needs another backward solver, such as
    `sn.Backsolve(solver="dopri5", controller=sn.Integral())`; without one, `solve` raises an error.

    Arguments:
        base: an explicit Runge–Kutta method, by name or as an object.
        correction: g_ω, a module called as `correction(eps, z, *slopes)` with a 0-d tensor eps and with z and the
            slopes of shape (batch, ...); it returns a tensor of the shape of z. It must be deterministic and is put
            into eval mode. `None` creates a [`CorrectionNet`][seminode.models.hypersolver.CorrectionNet].
        dim: size of the state; required if `correction` is `None`, otherwise not allowed.
        width, layers: width and number of the hidden layers of the `CorrectionNet`.

    Poli, Massaroli, Yamashita, Asama and Park, *Hypersolvers: toward fast continuous-depth models* (NeurIPS 2020,
    arXiv:2007.09601).

    Example:
        >>> import seminode as sn
        >>> _ = torch.manual_seed(0)
        >>> def field(t, z):
        ...     return torch.stack([z[:, 1], -torch.sin(z[:, 0])], -1)
        >>> hyper = HyperSolver("heun", dim=2)
        >>> history = fit(hyper, field, torch.rand(64, 2), torch.linspace(0, 2, 11), steps=150)
        >>> z0 = torch.rand(16, 2)
        >>> exact = sn.solve(field, z0, [0.0, 2.0], rtol=1e-6).ys[-1]
        >>> errors = [
        ...     (sn.solve(field, z0, [0.0, 2.0], solver=s, controller=sn.FixedStep(0.2)).ys[-1] - exact).norm()
        ...     for s in (sn.Heun(), hyper)
        ... ]
        >>> bool(errors[0] > 5 * errors[1])
        True
    """

    general = False
    error_order = None
    error_weights = None
    error_needs_end_slope = False

    def __init__(
        self,
        base: ExplicitName | ExplicitRungeKutta = "heun",
        correction: nn.Module | None = None,
        *,
        dim: int | None = None,
        width: int = 32,
        layers: int = 2,
    ):
        super().__init__()
        self.base = check_base(base)
        if correction is None:
            if dim is None:
                raise ValueError("correction: expected a module, or dim= to create one, found neither")
            correction = CorrectionNet(dim, self.base.stages, width, layers)
        else:
            _check_correction(correction)
            if dim is not None:
                raise ValueError("dim: expected None with a correction, since dim= creates one")
        self.correction = correction.eval()
        self.order, self.stages = self.base.order, self.base.stages
        self.weights = self.base.weights
        self.interpolant, self.interpolant_order = self.base.interpolant, self.base.interpolant_order
        # The correction is added to the last slope with a nonzero weight, if possible not to the first one, which the
        # interpolant reads as f(t0, y0).
        self._corrected_stage = max(range(self.stages), key=lambda i: (self.weights[i] != 0.0, i))

    @property
    def name(self) -> str:
        return f"hypersolved {self.base.name}"

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Memory) -> StepResult:
        if y0.ndim < 2:
            raise ValueError(
                f"solver: {self.name!r} expects a state that is one tensor of shape (batch, ...), found shape "
                f"{tuple(y0.shape)}; a state of several leaves is flattened to one axis"
            )
        y1, stages, *_ = self.base.step(evaluate, dt, y0, memory)
        eps = length(dt)
        g = self._correct(torch.as_tensor(eps, dtype=y0.real.dtype, device=y0.device), y0, stages)
        # Adding εᵖg/bᵢ to slope i makes the interpolant of the step end at the corrected state.
        i = self._corrected_stage
        corrected = stages[i] + (eps**self.order / self.weights[i]) * g
        y1 = combine(y1, dt, ((0, 1.0),), [eps**self.order * g])
        return StepResult(y1, [*stages[:i], corrected, *stages[i + 1 :]])

    def _correct(self, eps: Tensor, z: Tensor, slopes: Sequence[Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            constants = {name: x.detach() for name, x in self.correction.named_parameters()}
            g = torch.func.functional_call(self.correction, constants, (eps, z, *slopes))
        else:
            g = self.correction(eps, z, *slopes)
        if not isinstance(g, Tensor) or g.shape != z.shape:
            returned = f"shape {tuple(g.shape)}" if isinstance(g, Tensor) else type(g).__name__
            raise ValueError(f"correction: expected a tensor of shape {tuple(z.shape)}, as the state, found {returned}")
        return g

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("a hypersolver has no error estimate")

    def train(self, mode: bool = True) -> HyperSolver:
        """Like `nn.Module.train`, but the correction stays in eval mode: it must be the same function in every step."""
        super().train(mode)
        self.correction.eval()
        return self

    def extra_repr(self) -> str:
        return f"base={self.base!r}"


def _check_correction(correction: Any) -> None:
    if not isinstance(correction, nn.Module):
        raise TypeError(f"correction: expected a module, found {type(correction).__name__}")


class Pairs(NamedTuple):
    """Training data of g_ω for steps of one length ε: its inputs, and the targets [z(t + ε) − z − εψ]/ε^{p+1}."""

    eps: Tensor
    z: Tensor
    slopes: tuple[Tensor, ...]
    residual: Tensor


@torch.no_grad()
def local_errors(
    hyper: HyperSolver,
    field: Callable[..., Any],
    y0: Tensor,
    ts: Tensor | Sequence[float],
    *,
    args: tuple[Any, ...] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> list[Pairs]:
    """The scaled local errors of the base method along accurate solutions, one entry for each step length in ts."""
    _check_batch(y0)
    times = [float(t) for t in ts]
    if len(times) < 2:
        raise ValueError(f"ts: expected at least two times, the ends of a step, found {times}")
    for a, b in itertools.pairwise(times):
        if a == b:
            raise ValueError(f"ts: expected times that differ, found {a:g} twice")
    tight = 1e-10 if y0.dtype == torch.float64 else 1e-6
    rtol, atol = tight if rtol is None else rtol, tight if atol is None else atol
    # Steps end on the grid, because interpolation would add its error to each residual.
    zs = solve(field, y0, times, args=args, rtol=rtol, atol=atol, controller=Integral(step_to=times[1:-1])).ys
    groups: dict[float, list[tuple[Tensor, ...]]] = {}
    for t0, t1, z0, z1 in zip(times, times[1:], zs, zs[1:], strict=False):
        dt = t1 - t0

        def evaluate(c: float, z: Tensor, *, stage: int, t0: float = t0, dt: float = dt) -> Tensor:
            return field(torch.tensor(t0 + c * dt, dtype=y0.dtype, device=y0.device), z, *args)

        end, slopes, *_ = hyper.base.step(evaluate, dt, z0, None)
        # The intervals of a uniform grid differ by rounding.
        key = float(f"{dt:.5g}")
        groups.setdefault(key, []).append((z0, (z1 - end) / dt ** (hyper.order + 1), *slopes))
    pairs: list[Pairs] = []
    for eps, rows in groups.items():
        z, residual, *slopes = (torch.cat(column) for column in zip(*rows, strict=True))
        pairs.append(Pairs(y0.new_tensor(eps), z, tuple(slopes), residual))
    return pairs


def _check_batch(y0: Any) -> None:
    if not isinstance(y0, Tensor) or y0.ndim < 2:
        raise ValueError("y0: expected one tensor of shape (batch, ...)")


def _check_hyper(hyper: Any) -> None:
    if not isinstance(hyper, HyperSolver):
        raise TypeError(f"hyper: expected a HyperSolver, found {type(hyper).__name__}")


def fit(
    hyper: HyperSolver,
    field: Callable[..., Any],
    y0: Tensor,
    ts: Tensor | Sequence[float],
    *,
    args: tuple[Any, ...] = (),
    steps: int = 1000,
    lr: float = 1e-2,
    batch: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> list[float]:
    """Fit the correction of a hypersolver to the local errors of its base method, for a given field:

        min_ω mean_k ‖[z(t_{k+1}) − z(t_k) − ε ψ(t_k, z(t_k))]/ε^{p+1} − g_ω‖.

    Trajectories and residuals are computed once; the training does not evaluate the field. The optimiser is Adam with
    a cosine schedule of the learning rate.

    Arguments:
        hyper: the hypersolver. Its correction is trained and afterwards in eval mode.
        field: `field(t, z, *args)`; its parameters do not change.
        y0: initial values of the trajectories, shape (batch, ...). They should cover the region in which solutions
            start.
        ts: times at which the training steps start and end. A non-uniform grid gives steps of several lengths.
        args: further arguments of the field.
        steps: number of steps of the optimiser.
        lr: initial learning rate.
        batch: number of samples in a minibatch; `None` uses all samples.
        rtol, atol: tolerances of the accurate trajectories; by default 1e-10 in float64, otherwise 1e-6.

    Returns:
        The loss at every step of the optimiser.

    Reference: Poli et al., *Hypersolvers: toward fast continuous-depth models*, NeurIPS 2020, arXiv:2007.09601.

    Example:
        >>> from seminode.models import HyperSolver
        >>> _ = torch.manual_seed(0)
        >>> hyper = HyperSolver("euler", dim=1, width=8)
        >>> history = fit(hyper, lambda t, z: -z, torch.rand(16, 1), torch.linspace(0.0, 1.0, 6), steps=100)
        >>> len(history), history[-1] < 0.05 * history[0]
        (100, True)
    """
    _check_hyper(hyper)
    check_count("steps", steps)
    pairs = local_errors(hyper, field, y0, ts, args=args, rtol=rtol, atol=atol)
    correction = hyper.correction
    if isinstance(correction, CorrectionNet):
        correction.scale_to(pairs)
    optimiser = torch.optim.Adam(correction.parameters(), lr=lr)
    history: list[Tensor] = []
    correction.train()
    with torch.enable_grad():
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = 0.5 * lr * (1.0 + math.cos(math.pi * step / steps))
            loss = _mean_residual(correction, [_minibatch(p, batch) for p in pairs])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type
            history.append(loss.detach())
    correction.eval()
    return numbers(torch.stack(history))


def _mean_residual(correction: Correction, pairs: Sequence[Pairs]) -> Tensor:
    norms = [norm((p.residual - correction(p.eps, p.z, *p.slopes)).flatten(1), dim=1) for p in pairs]
    return torch.cat(norms).mean()


def _minibatch(pairs: Pairs, batch: int | None) -> Pairs:
    if batch is None or batch >= len(pairs.z):
        return pairs
    index = torch.randint(len(pairs.z), (check_count("batch", batch),), device=pairs.z.device)
    return Pairs(pairs.eps, pairs.z[index], tuple(k[index] for k in pairs.slopes), pairs.residual[index])
