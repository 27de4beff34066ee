"""OT-Flow: a normalising flow along the gradient of a potential, with an exact and cheap trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .._field.checks import check_count
from ..controllers import FixedStep
from .base import SolvingModule
from .cnf import standard_normal_log_prob

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


class Derivatives(NamedTuple):
    """Derivatives of a potential at (x, t): ∇ₓΦ of shape (batch, dim), ∂Φ/∂t and tr ∇ₓ²Φ of shape (batch,)."""

    grad_x: Tensor
    grad_t: Tensor
    trace: Tensor


class Potential(nn.Module):
    """Φ(s) = wᵀN(s) + ½ sᵀAᵀA s + bᵀs with s = (x, t) and the residual network

        u₀ = σ(K₀s + b₀),    uᵢ = uᵢ₋₁ + h σ(Kᵢuᵢ₋₁ + bᵢ),    N = u_{L−1},

    where h = 1/(L − 1) and σ(a) = log(eᵃ + e⁻ᵃ), so that σ′ = tanh and σ″ = 1 − tanh². The constant term of Φ is left
    out, because no derivative depends on it.

    Arguments:
        dim: d, the size of x.
        width: m, the size of every uᵢ.
        layers: L, at least 2.
        rank: the number of rows of A.
    """

    def __init__(self, dim: int, width: int = 32, layers: int = 2, rank: int = 10):
        super().__init__()
        for name, value, least in (("dim", dim, 1), ("width", width, 1), ("layers", layers, 2), ("rank", rank, 1)):
            check_count(name, value, least)
        self.dim, self.h = dim, 1.0 / (layers - 1)
        self.opening = nn.Linear(dim + 1, width)
        self.residual: Iterable[nn.Linear] = nn.ModuleList(  # type: ignore[assignment]
            nn.Linear(width, width) for _ in range(layers - 1)
        )
        self.w = nn.Parameter(torch.ones(width))
        self.A = nn.Parameter(nn.init.xavier_uniform_(torch.empty(rank, dim + 1)))
        self.b = nn.Parameter(torch.zeros(dim + 1))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        """Φ, shape (batch,)."""
        s = self._concat(t, x)
        u = _sigma(self.opening(s))
        for layer in self.residual:
            u = u + self.h * _sigma(layer(u))
        return u @ self.w + 0.5 * (s @ self.A.T).square().sum(1) + s @ self.b

    def derivatives(self, t: Tensor, x: Tensor) -> Derivatives:
        """The gradient by the chain rule, and the trace in O(m²d) per layer (O(md) in the first layer).

        From the last layer to the first, z_L = w, zᵢ = zᵢ₊₁ + h Kᵢᵀ(σ′ᵢ ⊙ zᵢ₊₁), and ∇Φ = K₀ᵀ(σ′₀ ⊙ z₁) + AᵀA s + b.
        From the first layer to the last, Jᵢ = ∂uᵢ/∂x. Because σ acts elementwise, layer i contributes
        Σⱼ (σ″ᵢ ⊙ zᵢ₊₁)ⱼ ‖(Kᵢ Jᵢ₋₁)ⱼ‖² to the trace, multiplied by h in all layers but the first.
        """
        s, d = self._concat(t, x), self.dim
        weights = [layer.weight for layer in self.residual]
        a = self.opening(s)
        u, slope = _sigma(a), torch.tanh(a)
        # σ′ᵢ, and (Kᵢ Jᵢ₋₁)ᵀ of shape (d, batch, m), so that it is one large matrix product
        slopes, KJ = [slope], [self.opening.weight[:, :d].T.unsqueeze(1)]
        jacobian = slope * KJ[0]
        for i, layer in enumerate(self.residual):
            a = layer(u)
            slopes.append(torch.tanh(a))
            KJ.append(jacobian @ weights[i].T)
            if i + 1 < len(weights):
                u = u + self.h * _sigma(a)
                jacobian = jacobian + self.h * slopes[-1] * KJ[-1]
        z = self.w.expand(len(x), -1)
        trace = self.A[:, :d].square().sum().expand(len(x))
        for i in range(len(weights), 0, -1):
            trace = trace + self.h * _layer_trace(slopes[i], z, KJ[i])
            z = z + self.h * (slopes[i] * z) @ weights[i - 1]
        trace = trace + _layer_trace(slopes[0], z, KJ[0])
        grad = (slopes[0] * z) @ self.opening.weight + (s @ self.A.T) @ self.A + self.b
        return Derivatives(grad[:, :d], grad[:, d], trace)

    def _concat(self, t: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x, t.to(x.dtype).expand(len(x), 1)], 1)


def _sigma(a: Tensor) -> Tensor:
    return torch.logaddexp(a, -a)


def _layer_trace(slope: Tensor, z: Tensor, KJ: Tensor) -> Tensor:
    """Σⱼ (σ″ ⊙ z)ⱼ ‖(K J)ⱼ‖²."""
    return ((1.0 - slope.square()) * z * KJ.square().sum(0)).sum(1)


class OTFlow(SolvingModule):
    """A continuous normalising flow along the gradient of a potential, regularised by optimal transport.

        x′ = v(t, x) = −∇ₓΦ(x, t)/α_L,    t from 0 (data) to 1 (standard normal)

    Three integrals are solved for together with x, all from one evaluation of Φ: Δ = −∫ tr ∂v/∂x, with an exact trace,
    so that log p(x) = log N(x(1); 0, I) − Δ; the transport cost ∫ ½‖v‖²; and ∫ |−∂Φ/∂t + ½α_L‖v‖²|, the violation of
    the Hamilton–Jacobi–Bellman equation of optimal transport. The objective is

        α_L E[transport] + α_C E[−log p(x)] + α_R E[hjb].

    The trajectories are nearly straight, so a few steps are enough. The default is eight steps of RK4 with the gradient
    of the discrete steps (discretise, then optimise). For an accurate density of a trained flow, pass
    `solver="dopri5"`.

    Arguments:
        dim: d, the size of a sample.
        width, layers: m and L of the network in the potential; L is at least 2.
        rank: rank of the quadratic part; by default min(10, d + 1).
        alpha: the weights (α_L, α_C, α_R).
        steps: number of RK4 steps; ignored if a solver or controller is given.
        options: options of [`solve`][seminode.solve].

    Onken, Wu Fung, Li and Ruthotto, *OT-Flow: fast and accurate continuous normalizing flows via optimal transport*
    (AAAI 2021, arXiv:2006.00104).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> flow = OTFlow(2, width=16)
        >>> x = torch.randn(64, 2) * 0.3 + 1.0
        >>> optimiser = torch.optim.Adam(flow.parameters(), lr=0.05)
        >>> before = flow.log_prob(x).mean().item()
        >>> for _ in range(10):
        ...     optimiser.zero_grad()
        ...     flow.loss(x).backward()
        ...     optimiser.step()
        >>> flow.log_prob(x).mean().item() > before + 0.5
        True
        >>> flow.sample(3).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        dim: int,
        width: int = 32,
        layers: int = 2,
        rank: int | None = None,
        alpha: Sequence[float] = (1.0, 100.0, 5.0),
        steps: int = 8,
        **options: Unpack[SolveOptions],
    ):
        check_count("steps", steps)
        if not {"solver", "controller"} & set(options):
            options |= {"solver": "rk4", "controller": FixedStep(1.0 / steps)}
        super().__init__(**options)
        self.alpha = _weights(alpha)
        self.dim = check_count("dim", dim)
        self.potential = Potential(dim, width, layers, min(10, dim + 1) if rank is None else rank)

    def velocity(self, t: Tensor, x: Tensor) -> Tensor:
        """v(t, x), shape (batch, dim)."""
        return -self.potential.derivatives(t, x).grad_x / self.alpha[0]

    def rates(self, t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The time derivatives of (x, Δ, transport, hjb)."""
        grad_x, grad_t, trace = self.potential.derivatives(t, state[0])
        v = -grad_x / self.alpha[0]
        energy = 0.5 * v.square().sum(1)
        return v, trace / self.alpha[0], energy, (self.alpha[0] * energy - grad_t).abs()

    def _integrate(self, x: Tensor, ts: tuple[float, float]) -> tuple[Tensor, ...]:
        """Solve for x and the three integrals, in either direction of time."""
        state = (self._check("x", x), *(x.new_zeros(len(x)) for _ in range(3)))
        ys = self.solve(self.rates, state, ts, integrals=(False, True, True, True), save="last").ys
        return tuple(leaf[-1] for leaf in ys)

    def _check(self, name: str, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"{name}: expected shape (batch, {self.dim}), found {tuple(x.shape)}")
        return x

    def transform(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x(1), Δ(1)) for x(0) = x; Δ(1) = −log|det ∂x(1)/∂x(0)|."""
        z, delta, _, _ = self._integrate(x, (0.0, 1.0))
        return z, delta

    def inverse(self, z: Tensor) -> Tensor:
        """The x that `transform` maps to z, up to the error of the solver. This computes no trace."""
        return self.solve(self.velocity, self._check("z", z), (1.0, 0.0), save="last").ys[-1]

    def costs(self, x: Tensor) -> dict[str, Tensor]:
        """The terms of the objective for each sample of `x`: `transport`, `nll` and `hjb`, each of shape (batch,)."""
        z, delta, transport, hjb = self._integrate(x, (0.0, 1.0))
        return {"transport": transport, "nll": delta - standard_normal_log_prob(z), "hjb": hjb}

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x), shape (batch,)."""
        return -self.costs(x)["nll"]

    def loss(self, x: Tensor) -> Tensor:
        """α_L E[transport] + α_C E[nll] + α_R E[hjb] over the batch `x`."""
        terms = [weight * cost.mean() for weight, cost in zip(self.alpha, self.costs(x).values(), strict=True)]
        return torch.stack(terms).sum()

    def forward(self, x: Tensor) -> Tensor:
        """`log_prob(x)`, for wrappers that call the module, such as `DistributedDataParallel`."""
        return self.log_prob(x)

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        """n samples of shape (n, dim), without gradients; for those call `inverse` on standard normal samples."""
        like = self.potential.b
        return self.inverse(torch.randn(check_count("n", n), self.dim, dtype=like.dtype, device=like.device))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, alpha={self.alpha}, {super().extra_repr()}"


def _weights(alpha: Sequence[float]) -> tuple[float, float, float]:
    values = tuple(float(a) for a in alpha)
    if len(values) != 3 or not values[0] > 0.0 or not all(0.0 <= a < math.inf for a in values):
        raise ValueError(f"alpha: expected three weights (α_L > 0, α_C >= 0, α_R >= 0), found {alpha!r}")
    return values  # type: ignore[return-value]
