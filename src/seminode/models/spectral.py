"""Spectral training: learn a field together with Legendre series of its solutions, without solving an ODE."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._field.checks import check_count
from .._field.pytree import real_dtype
from .._untyped import eigh, lstsq, numbers, tensordot


def legendre(x: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """P₀ … P_N and their derivatives at x, stacked along a new last axis, by the recurrences

        (n + 1) Pₙ₊₁ = (2n + 1) x Pₙ − n Pₙ₋₁,    P′ₙ₊₁ = P′ₙ₋₁ + (2n + 1) Pₙ.

    >>> values, slopes = legendre(torch.tensor([-1.0, 1.0]), 3)
    >>> values
    tensor([[ 1., -1.,  1., -1.],
            [ 1.,  1.,  1.,  1.]])
    >>> slopes[1]
    tensor([0., 1., 3., 6.])
    """
    values, slopes = [torch.ones_like(x), x], [torch.zeros_like(x), torch.ones_like(x)]
    for n in range(1, degree):
        values.append(((2 * n + 1) * x * values[n] - n * values[n - 1]) / (n + 1))
        slopes.append(slopes[n - 1] + (2 * n + 1) * values[n])
    return torch.stack(values[: degree + 1], -1), torch.stack(slopes[: degree + 1], -1)


def gauss_legendre(n: int) -> tuple[Tensor, Tensor]:
    """The n Gauss–Legendre nodes and weights on [−1, 1] in float64, exact up to degree 2n − 1.

    The nodes are the eigenvalues of the tridiagonal matrix of the three-term recurrence. The weights are twice the
    squares of the first entries of its eigenvectors. Golub and Welsch, *Calculation of Gauss quadrature rules* (1969).

    >>> nodes, weights = gauss_legendre(4)
    >>> round(float((weights * nodes**6).sum()), 12) == round(2 / 7, 12)
    True
    """
    k = torch.arange(1, check_count("n", n), dtype=torch.float64)
    off_diagonal = k / (4.0 * k * k - 1.0).sqrt()
    nodes, vectors = eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return nodes, 2.0 * vectors[0].square()


class SpectralTrajectory(nn.Module):
    """A batch of trajectories as truncated Legendre series with a fixed initial value,

        z(t) = y₀ + Σ_{i=1}^{N} cᵢ (Pᵢ(x) − Pᵢ(−1)),    x = 2(t − t₀)/(t₁ − t₀) − 1.

    The coefficients c are parameters, which [`train_spectral`][seminode.models.spectral.train_spectral] trains together
    with a field.

    Reference: Quaglino, Gallieri, Masci and Koutník, *SNODE: spectral discretization of neural ODEs for system
    identification*, ICLR 2020, arXiv:1906.07038.

    Arguments:
        y0: z(t₀), a tensor of any shape; it is not trained.
        ts: times; the first is t₀ and the last is t₁.
        degree: N.

    Example:
        >>> ts = torch.linspace(0.0, 2.0, 30)
        >>> z = SpectralTrajectory(torch.ones(1), ts, degree=8)
        >>> z.interpolate(ts, torch.exp(-ts).unsqueeze(1))
        >>> bool((z.derivative(ts) + z(ts)).abs().max() < 1e-4)
        True
    """

    y0: Tensor

    def __init__(self, y0: Tensor, ts: Tensor | Sequence[float], degree: int):
        super().__init__()
        _check_start(y0)
        times = [float(t) for t in ts]
        if len(times) < 2 or times[0] == times[-1] or not all(map(math.isfinite, times)):
            raise ValueError(f"ts: expected finite times whose first and last differ, found {times}")
        self.t0, self.t1 = times[0], times[-1]
        self.degree = check_count("degree", degree)
        self.register_buffer("y0", y0.detach().clone())
        self.coefficients = nn.Parameter(y0.new_zeros(degree, *y0.shape))

    def forward(self, t: Tensor) -> Tensor:
        """z(t), of shape (*t.shape, *y0.shape)."""
        return self.evaluate(self.basis(t))[0]

    def derivative(self, t: Tensor) -> Tensor:
        """z′(t), of shape (*t.shape, *y0.shape)."""
        return self.evaluate(self.basis(t))[1]

    def basis(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Pᵢ(x) − Pᵢ(−1) = Pᵢ(x) − (−1)ⁱ and its derivative with respect to t, for i = 1, …, N."""
        t = torch.as_tensor(t, device=self.y0.device)
        wide = t.to(torch.float32 if t.device.type == "mps" else torch.float64)
        scale = 2.0 / (self.t1 - self.t0)
        values, slopes = legendre(scale * (wide - self.t0) - 1.0, self.degree)
        signs = values.new_tensor([(-1.0) ** i for i in range(1, self.degree + 1)])
        dtype = self.coefficients.dtype
        return (values[..., 1:] - signs).to(dtype), (scale * slopes[..., 1:]).to(dtype)

    def evaluate(self, basis: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """z and z′ at the times of a `basis`."""
        values, slopes = (tensordot(part, self.coefficients, 1) for part in basis)
        return self.y0 + values, slopes

    def nodes(self, n: int) -> Tensor:
        """The n Gauss–Legendre nodes of [t₀, t₁]."""
        x, _ = gauss_legendre(n)
        t = self.t0 + 0.5 * (x + 1.0) * (self.t1 - self.t0)
        return t.to(device=self.y0.device, dtype=real_dtype(self.y0))

    @torch.no_grad()
    def interpolate(self, ts: Tensor, values: Tensor, smoothing: float = 0.0) -> None:
        """Initialise c with the least-squares fit to values of shape (len(ts), *y0.shape) at the times ts.

        `smoothing` > 0 adds the penalty smoothing·Σ i⁴|cᵢ|²/N⁴ to the mean square. Use it if there are fewer values
        than coefficients, or if the values are noisy.
        """
        if values.shape != (len(ts), *self.y0.shape):
            expected = (len(ts), *self.y0.shape)
            raise ValueError(f"values: expected shape {expected}, found {tuple(values.shape)}")
        basis = self.basis(ts)[0]
        target = (values - self.y0).flatten(1)
        if smoothing > 0.0:
            powers = torch.arange(1, self.degree + 1, device=basis.device).to(basis.dtype)
            ridge = torch.diag(math.sqrt(smoothing * len(ts)) * (powers / self.degree) ** 2)
            basis, target = torch.cat([basis, ridge]), torch.cat([target, target.new_zeros(self.degree, len(target.T))])
        self.coefficients.copy_(lstsq(basis, target)[0].reshape(self.coefficients.shape))

    def extra_repr(self) -> str:
        return f"shape={tuple(self.y0.shape)}, t0={self.t0:g}, t1={self.t1:g}, degree={self.degree}"


def _check_start(y0: Any) -> None:
    if not isinstance(y0, Tensor) or not (y0.is_floating_point() or y0.is_complex()):
        kind = y0.dtype if isinstance(y0, Tensor) else type(y0).__name__
        raise TypeError(f"y0: expected a tensor of a floating-point or complex dtype, found {kind}")


def residual(field: Callable[..., Any], trajectory: SpectralTrajectory, t: Tensor, vectorise: bool = True) -> Tensor:
    """z′(t) − f(t, z(t)) at the times t, shape (len(t), *y0.shape).

    With `vectorise`, `torch.vmap` evaluates the field at all times at once. Use `vectorise=False` for a field that
    `torch.vmap` does not support; the field is then called once per time.

    Arguments:
        field: f(t, z).
        trajectory: z, which knows its derivative.
        t: times of shape (n,).
        vectorise: whether to evaluate the field at all times at once.

    Reference: Quaglino, Gallieri, Masci and Koutník, *SNODE: spectral discretization of neural ODEs for system
    identification*, ICLR 2020, arXiv:1906.07038.

    Example:
        >>> ts = torch.linspace(0.0, 1.0, 20)
        >>> z = SpectralTrajectory(torch.ones(1), ts, degree=6)
        >>> z.interpolate(ts, torch.exp(-ts).unsqueeze(1))
        >>> bool((residual(lambda t, z: -z, z, ts).abs() < 1e-3).all())  # z solves z′ = −z
        True
        >>> bool((residual(lambda t, z: -2 * z, z, ts).abs() > 0.3).all())
        True
    """
    return _residual(field, t, *trajectory.evaluate(trajectory.basis(t)), vectorise)


def _residual(field: Callable[..., Any], t: Tensor, z: Tensor, slope: Tensor, vectorise: bool) -> Tensor:
    t = t.to(device=z.device, dtype=real_dtype(z))
    if vectorise:
        return slope - torch.func.vmap(field)(t, z)
    return slope - torch.stack([field(time, state) for time, state in zip(t, z, strict=True)])


class SpectralLoss(NamedTuple):
    """The losses of one round of `train_spectral`: γ·L(z) + mean |z′ − f|², L(z), and mean |z′ − f|²."""

    total: float
    loss: float
    residual: float


def train_spectral(
    field: nn.Module,
    trajectory: SpectralTrajectory,
    loss: Callable[[SpectralTrajectory], Tensor],
    *,
    gamma: float = 1.0,
    steps: int = 1000,
    nodes: int | None = None,
    lr_field: float = 1e-2,
    lr_coefficients: float = 1e-2,
    rounds: tuple[int, int] = (1, 1),
    vectorise: bool = True,
) -> list[SpectralLoss]:
    """Train a field without ODE solves: minimise over the coefficients c and the parameters θ, in turn,

        γ·L(z) + mean |z′(t_q) − f(t_q, z(t_q); θ)|²,    t_q the Gauss–Legendre nodes,

    where the mean is over nodes, trajectories and channels.

    All nodes are evaluated at once, so the work is parallel in time. The optimiser is Adam with a cosine schedule of
    the learning rates. A small loss L(z) does not imply a good field: check θ with a solve.

    Quaglino, Gallieri, Masci and Koutník, *SNODE: spectral discretization of neural ODEs for system identification*
    (ICLR 2020, arXiv:1906.07038).

    Arguments:
        field: f(t, z), a module; its parameters that require gradients are trained.
        trajectory: its coefficients are trained; initialise them with `trajectory.interpolate` if there are data.
        loss: L as a function of the trajectory, such as `lambda z: (z(ts) - data).square().mean()`.
        gamma: γ. With a larger γ, z stays closer to the data and further from a solution of the field.
        steps: number of rounds.
        nodes: number of times t_q; by default twice the degree of the trajectory.
        lr_field, lr_coefficients: initial learning rates of θ and c.
        rounds: number of optimiser steps in c and in θ in each round.
        vectorise: see [`residual`][seminode.models.spectral.residual].

    Returns:
        The losses of every round, evaluated before its last optimiser step.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> ts = torch.linspace(0.0, 1.0, 20)
        >>> data = torch.exp(-2.0 * ts).reshape(-1, 1, 1)
        >>> class Decay(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rate = nn.Parameter(torch.tensor(0.0))
        ...
        ...     def forward(self, t, z):
        ...         return -self.rate * z
        >>> field, z = Decay(), SpectralTrajectory(data[0], ts, degree=6)
        >>> z.interpolate(ts, data)
        >>> history = train_spectral(
        ...     field, z, lambda z: (z(ts) - data).square().mean(), gamma=10.0, steps=200, lr_field=0.1
        ... )
        >>> abs(field.rate.item() - 2.0) < 0.01
        True
    """
    _check(field, trajectory, gamma, rounds)
    times = trajectory.nodes(check_count("nodes", 2 * trajectory.degree if nodes is None else nodes))
    basis = trajectory.basis(times)
    optimisers = (
        torch.optim.Adam(trajectory.parameters(), lr=lr_coefficients),
        torch.optim.Adam([p for p in field.parameters() if p.requires_grad], lr=lr_field),
    )
    initial_lrs = (lr_coefficients, lr_field)
    history: list[Tensor] = []
    losses: tuple[Tensor, ...] = ()
    with torch.enable_grad():
        for step in range(check_count("steps", steps)):
            decay = 0.5 * (1.0 + math.cos(math.pi * step / steps))
            for optimiser, initial_lr, count in zip(optimisers, initial_lrs, rounds, strict=True):
                optimiser.param_groups[0]["lr"] = initial_lr * decay
                tensors: list[nn.Parameter] = optimiser.param_groups[0]["params"]
                for _ in range(count):
                    difference = _residual(field, times, *trajectory.evaluate(basis), vectorise)
                    mean_residual = difference.abs().square().mean()
                    data_loss = loss(trajectory)
                    total = gamma * data_loss + mean_residual
                    # Gradients of this optimiser's tensors only: the others are held fixed.
                    for p, grad in zip(tensors, torch.autograd.grad(total, tensors, allow_unused=True), strict=True):
                        p.grad = grad
                    optimiser.step()  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type
                    optimiser.zero_grad()
                    losses = tuple(x.detach() for x in (total, data_loss, mean_residual))
            history.append(torch.stack(losses))
    return [SpectralLoss(*numbers(row)) for row in torch.stack(history).cpu()]


def _check(field: Any, trajectory: Any, gamma: float, rounds: Sequence[int]) -> None:
    if not isinstance(field, nn.Module) or not any(p.requires_grad for p in field.parameters()):
        raise TypeError("field: expected a module with parameters to train")
    if not isinstance(trajectory, SpectralTrajectory):
        raise TypeError(f"trajectory: expected a SpectralTrajectory, found {type(trajectory).__name__}")
    if not 0.0 < gamma < math.inf:
        raise ValueError(f"gamma: expected a positive number, found {gamma!r}")
    if len(rounds) != 2:
        raise ValueError(f"rounds: expected two counts, the numbers of steps in c and in θ, found {rounds!r}")
    for count in rounds:
        check_count("rounds", count)
