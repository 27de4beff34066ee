r"""Flow matching: train the field of a flow by regression on velocities, without solving an equation.

As in [`CNF`][seminode.models.CNF], data are at t = 0 and noise at t = 1, so that a field trained here is the field of
a `CNF`: for its likelihood, and for samples. Papers on flow matching count time in the other direction.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from .._field.checks import check_count, check_flags, check_number, described
from ..controllers import FixedStep
from ..solve import solve
from .cnf import check_batch

if TYPE_CHECKING:
    from ..solve import SolveOptions


class ProbabilityPath(ABC):
    r"""A path from data to noise, x(t) = α(t) x + σ(t) ε, for flow matching.

    A subclass provides:

    1. `coefficients(t)`: α, σ and their derivatives α′, σ′ at the times t;
    2. `first`: the first time of training, above 0 only if the velocity is unbounded at 0.

    Example:
        >>> import torch
        >>> from seminode.models import ConcatMLP, ProbabilityPath, flow_matching_loss
        >>> class Late(ProbabilityPath):  # leaves the data slowly, α = 1 − t² and σ = t²
        ...     def coefficients(self, t):
        ...         return 1 - t**2, t**2, -2 * t, 2 * t
        >>> Late().at(torch.tensor([0.5]), torch.tensor([[4.0]]), torch.tensor([[8.0]]))
        (tensor([[5.]]), tensor([[4.]]))
        >>> flow_matching_loss(ConcatMLP(2, (16,)), torch.randn(64, 2), path=Late(), batched=True).backward()
    """

    first: float = 0.0

    @abstractmethod
    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """α, σ, α′ and σ′ at times `t` of any shape."""

    def at(self, t: Tensor, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """x(t) and its velocity α′ x + σ′ ε, for times `t` of shape (batch,), data `x` and `noise` ε of one shape."""
        columns = (value.reshape(-1, *[1] * (x.ndim - 1)) for value in self.coefficients(t))
        alpha, sigma, d_alpha, d_sigma = columns
        return alpha * x + sigma * noise, d_alpha * x + d_sigma * noise


@dataclass(frozen=True)
class OptimalTransportPath(ProbabilityPath):
    r"""The conditional optimal-transport path: straight lines, α = 1 − t, σ = σ₀ + (1 − σ₀) t.

    References: Lipman, Chen, Ben-Hamu, Nickel and Le, *Flow Matching for Generative Modeling*, ICLR 2023,
    arXiv:2210.02747; with σ₀ = 0, Liu, Gong and Liu, *Flow Straight and Fast: Learning to Generate and Transfer Data
    with Rectified Flow*, ICLR 2023, arXiv:2209.03003.

    Arguments:
        sigma_min: σ₀, the width of the noise that is left around each data point at t = 0.

    Example:
        >>> import torch
        >>> path = OptimalTransportPath()
        >>> path.at(torch.tensor([0.25]), torch.tensor([[4.0]]), torch.tensor([[8.0]]))
        (tensor([[5.]]), tensor([[4.]]))
    """

    sigma_min: float = 0.0

    def __post_init__(self) -> None:
        if not check_number("sigma_min", self.sigma_min) < 1.0:
            raise ValueError(f"sigma_min: expected a number below 1, found {self.sigma_min:g}")

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        growth = 1.0 - self.sigma_min
        return 1.0 - t, self.sigma_min + growth * t, -torch.ones_like(t), torch.full_like(t, growth)


@dataclass(frozen=True)
class VariancePreservingPath(ProbabilityPath):
    r"""The path of a variance-preserving diffusion, α = exp(−½(β₀ t + ½(β₁ − β₀) t²)), σ² = 1 − α².

    Its velocity grows like 1/√t at t = 0, so training starts at `first`. At t = 1 it still contains the fraction α(1)
    of the data, 0.7 % with the published values.

    References: Song et al., *Score-Based Generative Modeling through Stochastic Differential Equations*, ICLR 2021,
    arXiv:2011.13456; as a path of flow matching: Lipman et al., ICLR 2023, arXiv:2210.02747.

    Arguments:
        beta_min, beta_max: β₀ and β₁; 0.1 and 20 as published.
        first: the first time of training, above 0; 1e-5 as published.

    Example:
        >>> import torch
        >>> alpha, sigma, _, _ = VariancePreservingPath().coefficients(torch.tensor([0.3]))
        >>> round(float(alpha**2 + sigma**2), 6)
        1.0
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    first: float = 1e-5

    def __post_init__(self) -> None:
        beta_min, beta_max = check_number("beta_min", self.beta_min), check_number("beta_max", self.beta_max)
        if not 0.0 < beta_min <= beta_max:
            raise ValueError(f"beta_min, beta_max: expected 0 < beta_min <= beta_max, found {beta_min:g}, {beta_max:g}")
        if not 0.0 < check_number("first", self.first) < 1.0:
            raise ValueError(f"first: expected a number between 0 and 1, found {self.first:g}")

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exponent = self.beta_min * t + 0.5 * (self.beta_max - self.beta_min) * t.square()
        alpha, sigma = (-0.5 * exponent).exp(), (-torch.expm1(-exponent)).sqrt()
        d_alpha = -0.5 * (self.beta_min + (self.beta_max - self.beta_min) * t) * alpha
        return alpha, sigma, d_alpha, -alpha * d_alpha / sigma


@dataclass(frozen=True)
class TrigonometricPath(ProbabilityPath):
    r"""The variance-preserving path with a bounded velocity, α = cos(½πt), σ = sin(½πt).

    Reference: Albergo and Vanden-Eijnden, *Building Normalizing Flows with Stochastic Interpolants*, ICLR 2023,
    arXiv:2209.15571.

    Example:
        >>> import torch
        >>> x, velocity = TrigonometricPath().at(torch.tensor([1.0]), torch.ones(1, 1), torch.zeros(1, 1))
        >>> round(float(velocity), 4)  # −½π
        -1.5708
    """

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rate = 0.5 * math.pi
        cosine, sine = (rate * t).cos(), (rate * t).sin()
        return cosine, sine, -rate * sine, rate * cosine


#: Names of the paths from data to noise.
ProbabilityPathName = Literal["ot", "vp", "trigonometric"]

PATHS: dict[ProbabilityPathName, Callable[[], ProbabilityPath]] = {
    "ot": OptimalTransportPath,
    "vp": VariancePreservingPath,
    "trigonometric": TrigonometricPath,
}

#: Names of the couplings of data and noise.
Coupling = Literal["independent", "ot"]


def minibatch_coupling(x: Tensor, noise: Tensor) -> Tensor:
    r"""The rows of `noise` in the order that minimises Σᵢ ‖xᵢ − noiseᵢ‖²: the optimal transport within a batch.

    Paths between coupled points cross less, so that the field is easier to learn and to solve. The permutation takes
    O(n³) time at worst for n samples. Needs SciPy: `pip install seminode[scipy]`.

    References: Pooladian et al., *Multisample Flow Matching*, ICML 2023, arXiv:2304.14772; Tong et al., *Improving and
    Generalizing Flow-Based Generative Models with Minibatch Optimal Transport*, TMLR 2024, arXiv:2302.00482.

    Arguments:
        x, noise: tensors of one shape (batch, ...).

    Example:
        >>> import torch
        >>> minibatch_coupling(torch.tensor([[0.0], [5.0], [9.0]]), torch.tensor([[8.0], [1.0], [4.0]])).flatten()
        tensor([1., 4., 8.])
    """
    _check_pair(x, noise)
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise ImportError("coupling: 'ot' needs SciPy: pip install seminode[scipy]") from error
    points, others = x.detach().flatten(1).double(), noise.detach().flatten(1).double()
    for name, values in (("x", points), ("noise", others)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name}: expected finite values with an optimal coupling, found NaN or infinite values")
    # Up to terms that all permutations have, Σ ‖xᵢ − noiseᵢ‖² is −2 Σ xᵢ·noiseᵢ. So it is with centred points, whose
    # products are not rounded to the size of a common offset.
    cost = -(points - points.mean(0)) @ (others - others.mean(0)).T
    _, order = optimize.linear_sum_assignment(cost.cpu().numpy())
    return noise[torch.as_tensor(order, device=noise.device)]


def flow_matching_loss(
    field: Callable[..., Tensor],
    x: Tensor,
    noise: Tensor | None = None,
    *,
    path: ProbabilityPathName | ProbabilityPath = "ot",
    coupling: Coupling = "independent",
    t: Tensor | None = None,
    args: tuple[Any, ...] = (),
    batched: bool = False,
) -> Tensor:
    r"""The loss of conditional flow matching, without a solve:

        mean |f(t, x(t)) − x′(t)|²,    x(t) = α(t) x + σ(t) ε,    t ~ U(0, 1),  ε ~ N(0, I).

    Its minimiser is the field whose flow carries the distribution of the data at t = 0 to that of the noise at t = 1;
    [`CNF`][seminode.models.CNF] computes likelihoods of such a field, and
    [`flow_sample`][seminode.models.flow_sample] draws samples.

    References: Lipman et al., ICLR 2023, arXiv:2210.02747; Liu et al., ICLR 2023, arXiv:2209.03003; Albergo and
    Vanden-Eijnden, ICLR 2023, arXiv:2209.15571; Tong et al., TMLR 2024, arXiv:2302.00482.

    Arguments:
        field: f(t, x, *args), any callable that treats samples independently of each other.
        x: data, shape (batch, ...).
        noise: ε, of the shape of x; by default a sample from a standard normal. Other samples are allowed: then the
            flow connects the two distributions.
        path: `"ot"`, `"vp"`, `"trigonometric"`, or a [`ProbabilityPath`][seminode.models.ProbabilityPath].
        coupling: `"independent"`, or `"ot"`: the noise is reordered within the batch by
            [`minibatch_coupling`][seminode.models.minibatch_coupling].
        t: times of shape (batch,); by default uniform, one stratum per sample, which has a lower variance than
            independent times.
        args: further arguments of the field, such as labels: tensors with one row per sample.
        batched: whether the field accepts times of shape (batch,), as in `solve(..., batched=True)`. The fields of
            this library do, and it is faster. Otherwise the field is called with a scalar t and a batch of one, through
            `torch.func.vmap`.

    Returns:
        The mean over samples and dimensions, a scalar.

    Example:
        >>> import torch
        >>> from seminode.models import CNF, ConcatMLP, flow_matching_loss
        >>> _ = torch.manual_seed(0)
        >>> field = ConcatMLP(2, (16, 16))
        >>> flow_matching_loss(field, torch.randn(64, 2), batched=True).backward()
        >>> CNF(field, trace="exact").log_prob(torch.randn(8, 2)).shape
        torch.Size([8])
    """
    check_batch("x", x)
    check_flags(batched=batched)
    if noise is None:
        noise = torch.randn_like(x)
    _check_pair(x, noise)
    if coupling not in ("independent", "ot"):
        raise ValueError(f"coupling: expected 'independent' or 'ot', found {coupling!r}")
    if coupling == "ot":
        noise = minibatch_coupling(x, noise)
    way = _path(path)
    times = _times(t, x, way.first)
    place, velocity = way.at(times, x, noise)
    return (_values(field, times, place, args, batched) - velocity).square().mean()


def _path(path: Any) -> ProbabilityPath:
    if isinstance(path, ProbabilityPath):
        return path
    if isinstance(path, str) and path in PATHS:
        return PATHS[path]()
    raise ValueError(f"path: expected one of {', '.join(PATHS)} or a ProbabilityPath, found {described(path)}")


def _check_pair(x: Tensor, noise: Any) -> None:
    check_batch("x", x)
    check_batch("noise", noise)
    if noise.shape != x.shape:
        raise ValueError(f"noise: expected the shape of x, {tuple(x.shape)}, found {tuple(noise.shape)}")


def _times(t: Any, x: Tensor, first: float) -> Tensor:
    """Times of shape (batch,): checked, or one uniform draw from each of `batch` equal intervals, in random order."""
    if t is None:
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot count the samples of a large batch
        place = torch.randperm(len(x), device=x.device) + torch.rand(len(x), device=x.device, dtype=wide)
        return (first + (1.0 - first) * place / max(1, len(x))).to(x.dtype)
    if not isinstance(t, Tensor) or t.shape != x.shape[:1]:
        raise ValueError(f"t: expected one time per sample, shape {tuple(x.shape[:1])}, found {described(t)}")
    outside = ~((t >= first) & (t <= 1.0))  # also NaN
    if bool(outside.any()):
        raise ValueError(f"t: expected times between {first:g} and 1, found {float(t[outside][0]):g}")
    return t.to(x)


def _values(field: Callable[..., Tensor], t: Tensor, x: Tensor, args: Any, batched: bool) -> Tensor:
    """f(tᵢ, xᵢ, *argsᵢ) of every sample."""
    if not isinstance(args, tuple):
        raise TypeError(f"args: expected a tuple, found {described(args)}")
    rows = cast("tuple[Any, ...]", args)
    for i, arg in enumerate(rows):
        if not isinstance(arg, Tensor) or arg.ndim == 0 or len(arg) != len(x):
            raise ValueError(f"args[{i}]: expected a tensor with {len(x)} rows, one per sample, found {described(arg)}")
    if batched:
        values = field(t, x, *rows)
    else:

        def one(t: Tensor, *inputs: Tensor) -> Tensor:
            return field(t, *(value.unsqueeze(0) for value in inputs)).squeeze(0)

        values = torch.func.vmap(one, randomness="different")(t, x, *rows)
    if values.shape != x.shape:
        raise ValueError(f"field: expected values of the shape of x, {tuple(x.shape)}, found {tuple(values.shape)}")
    return values


#: Names of the presets of `sampling_preset`.
SamplingPreset = Literal["draft", "fast", "accurate"]

#: Solver and number of steps of each preset; the last one is adaptive.
SAMPLING: dict[SamplingPreset, tuple[str, int | None]] = {
    "draft": ("euler", 20),
    "fast": ("midpoint", 20),
    "accurate": ("dopri5", None),
}


def sampling_preset(name: SamplingPreset, steps: int | None = None) -> SolveOptions:
    """Options of `solve` for samples of a flow-matching field, which is nearly straight and so needs few steps.

    | preset | solver | evaluations of the field |
    |---|---|---|
    | `"draft"` | `euler`, 20 steps | 20 |
    | `"fast"` | `midpoint`, 20 steps | 40 |
    | `"accurate"` | `dopri5` at rtol = atol = 1e-5 | as many as needed; use it for likelihoods |

    Arguments:
        name: of the preset.
        steps: another number of steps; not for `"accurate"`.

    Example:
        >>> from seminode.models import sampling_preset
        >>> sampling_preset("fast", steps=10)["controller"].dt
        0.1
    """
    if name not in SAMPLING:
        raise ValueError(f"name: expected one of {', '.join(SAMPLING)}, found {name!r}")
    solver, count = SAMPLING[name]
    if count is None:
        if steps is not None:
            raise ValueError("steps: expected None with 'accurate', which chooses its steps; pass 'draft' or 'fast'")
        return {"solver": "dopri5", "rtol": 1e-5, "atol": 1e-5}
    dt = 1.0 / check_count("steps", count if steps is None else steps)
    return cast("SolveOptions", {"solver": solver, "controller": FixedStep(dt)})


@torch.no_grad()
def flow_sample(
    field: Callable[..., Tensor],
    noise: Tensor,
    *,
    preset: SamplingPreset = "fast",
    steps: int | None = None,
    args: tuple[Any, ...] = (),
) -> Tensor:
    """Samples of a flow: solve x′ = f(t, x, *args) from the noise at t = 1 to the data at t = 0, without gradients.

    Arguments:
        field: f(t, x, *args), as in [`flow_matching_loss`][seminode.models.flow_matching_loss]; here with a scalar t,
            which all samples share.
        noise: x(1), shape (batch, ...).
        preset, steps: see [`sampling_preset`][seminode.models.sampling_preset].
        args: further arguments of the field, such as labels.

    Example:
        >>> import torch
        >>> from seminode.models import flow_sample
        >>> flow_sample(lambda t, x: 2.0 * x, torch.ones(1, 2), preset="accurate")  # e⁻²
        tensor([[0.1353, 0.1353]])
    """
    check_batch("noise", noise)
    return solve(field, noise, (1.0, 0.0), args=args, save="last", **sampling_preset(preset, steps)).ys[-1]
