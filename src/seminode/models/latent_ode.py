"""Latent ODEs: variational autoencoders of irregular time series whose latent state follows a neural ODE."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._field.checks import check_count, check_flags, check_number
from ..paths.knots import Knots, check_knots
from .base import SolvingModule, check_channels
from .ode_rnn import ODERNN

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions
    from ..solvers import SolverName


class ELBO(NamedTuple):
    """The evidence lower bound of every series and its terms, each of shape (batch,).

    Reference: Rubanova, Chen and Duvenaud, *Latent ODEs for Irregularly-Sampled Time Series*, NeurIPS 2019,
    arXiv:1907.03907.

    Attributes:
        value: log-likelihood − weight·KL; maximise its mean.
        log_likelihood: E[log p(x | z₀)] over the posterior, estimated from the drawn samples.
        kl: KL(q(z₀ | x) ‖ N(0, I)).

    Example:
        >>> from seminode.models import LatentODE
        >>> _ = torch.manual_seed(0)
        >>> model = LatentODE(channels=1, latent=2, hidden=4, rtol=1e-3, atol=1e-3)
        >>> bound = model.elbo(torch.zeros(3, 5, 1), torch.linspace(0.0, 1.0, 5), kl_weight=0.5)
        >>> (-bound.value.mean()).backward()  # the loss
        >>> torch.equal(bound.value, bound.log_likelihood - 0.5 * bound.kl), bound.kl.shape
        (True, torch.Size([3]))
    """

    value: Tensor
    log_likelihood: Tensor
    kl: Tensor


class LatentField(nn.Module):
    """An autonomous field f(z): an MLP with tanh that ignores the time.

    Reference: as for [`LatentODE`][seminode.models.LatentODE].

    Arguments:
        latent: number of channels of z.
        width, layers: width and number of the hidden layers.

    Example:
        >>> import torch
        >>> LatentField(4)(torch.tensor(0.0), torch.zeros(5, 4)).shape
        torch.Size([5, 4])
    """

    def __init__(self, latent: int, width: int = 100, layers: int = 1):
        super().__init__()
        sizes = [check_count("latent", latent), *[check_count("width", width)] * check_count("layers", layers)]
        inner = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*inner, nn.Linear(sizes[-1], latent))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.net(z)


class LatentODE(SolvingModule):
    r"""A variational autoencoder of irregular series with a neural ODE as its decoder,

        q(z₀ | x) = N(μ, σ²)  from an ODE-RNN that runs backwards through the observations,
        z(t₀) = z₀,    z′ = f(t, z),    x(t) ~ N(d(z(t)), s²).

    With `poisson`, the times of the observations are data, too: channel c is observed at the events of a Poisson
    process with the intensity λ_c(t) = softplus(W z(t) + b)_c, whose log-likelihood is Σᵢ log λ_c(tᵢ) − ∫ λ_c dt.

    Series may have missing values (NaN), lengths and times of their own. With shared times of shape (knots,), the
    decoder is one solve for the batch; with times per series it is a batched solve, with steps per series.

    Reference: Rubanova, Chen and Duvenaud, *Latent ODEs for Irregularly-Sampled Time Series*, NeurIPS 2019,
    arXiv:1907.03907.

    Arguments:
        channels: number of channels of the observations.
        latent: number of channels of z.
        hidden: number of channels of the encoder's hidden state.
        field: f(t, z); by default a [`LatentField`][seminode.models.LatentField]. With times per series, t has shape
            (batch,).
        decoder: d, a module from z of shape (n, latent) to (n, channels); by default linear.
        encoder: a module that is called with one argument, the checked observations as a `Knots` object, whose `values`
            have shape (times, batch, channels), and returns μ and the raw σ, (batch, 2·latent); by default an
            [`ODERNN`][seminode.models.ODERNN] with `backward=True` and `packed=True`.
        noise_std: s; 0.01 as published.
        poisson: whether to model the times of the observations.
        encoder_steps, encoder_solver: fixed steps of the default encoder between two observations of a series.
        options: options of [`solve`][seminode.solve] for the decoder: `solver`, `rtol`, `atol`, `adjoint`, …

    Shapes: x (batch, times, channels) ↦ (times, batch, channels), or with `samples` (samples, times, batch, channels).

    Example:
        >>> import torch
        >>> from seminode.models import LatentODE
        >>> model = LatentODE(channels=1, latent=4, hidden=8, rtol=1e-3, atol=1e-3)
        >>> times = torch.linspace(0.0, 5.0, 20)
        >>> x = torch.sin(times).expand(6, 20).unsqueeze(-1).clone()
        >>> x[:, 5:12] = float("nan")  # a gap
        >>> (-model.elbo(x, times, kl_weight=0.5).value.mean()).backward()
        >>> model(x, times, samples=3).shape
        torch.Size([3, 20, 6, 1])
    """

    def __init__(
        self,
        channels: int,
        latent: int,
        hidden: int,
        *,
        field: Callable[[Tensor, Tensor], Tensor] | None = None,
        decoder: nn.Module | None = None,
        encoder: nn.Module | None = None,
        noise_std: float = 0.01,
        poisson: bool = False,
        encoder_steps: int = 1,
        encoder_solver: SolverName = "euler",
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        check_flags(poisson=poisson)
        self.channels = check_count("channels", channels)
        self.latent = check_count("latent", latent)
        if check_number("noise_std", noise_std) == 0.0:
            raise ValueError("noise_std: expected a number above 0, found 0")
        self.noise_std = float(noise_std)
        if encoder is None:
            encoder = ODERNN(
                channels, hidden, 2 * latent, backward=True, packed=True, steps=encoder_steps, solver=encoder_solver
            )
        self.encoder = encoder
        self.field = LatentField(latent) if field is None else field
        self.decoder = nn.Linear(latent, channels) if decoder is None else decoder
        self.intensity = nn.Linear(latent, channels) if poisson else None

    def forward(
        self,
        x: Tensor,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Tensor | Sequence[float] | None = None,
        *,
        samples: int | None = None,
    ) -> Tensor:
        """The decoded series at the observation times or at `ts`: of the posterior mean, or of posterior samples.

        Arguments:
            x, times, lengths: as in [`ODERNN.forward`][seminode.models.ODERNN.forward]; NaN where not observed.
            ts: times of the outputs, increasing, not before the first time: (T,), or (batch, T) if `times` differ per
                series. Later times than those of the observations extrapolate.
            samples: number of samples of z₀ from the posterior; by default its mean is decoded.
        """
        knots = self._knots(x, times, lengths)
        mean, std = self._posterior(knots)
        z0 = mean
        if samples is not None:
            z0 = mean + std * torch.randn(check_count("samples", samples), *mean.shape).to(mean)
        zs, _ = self._solved(z0, knots.times if ts is None else self._later(knots, ts), knots.times)
        return self._decoded(zs)

    def posterior(self, x: Tensor, times: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """μ and σ of q(z₀ | x), each of shape (batch, latent). z₀ is the state at the first time of a series.

        `x`, `times` and `lengths` are as in `forward`.
        """
        return self._posterior(self._knots(x, times, lengths))

    def elbo(
        self,
        x: Tensor,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        *,
        target: Tensor | None = None,
        kl_weight: float = 1.0,
        samples: int = 1,
    ) -> ELBO:
        """The evidence lower bound of every series, from samples of z₀ by the reparametrisation trick.

        Arguments:
            x, times, lengths: as in `forward`; what the encoder sees.
            target: what the decoder has to explain, of the shape of x, NaN where unknown; by default x itself. With
                held-out values in it, the model learns to fill gaps.
            kl_weight: the weight of the KL term; see [`kl_annealing`][seminode.models.kl_annealing].
            samples: number of samples of z₀ per series.
        """
        knots = self._knots(x, times, lengths)
        aims = knots if target is None else self._knots(target, times, lengths, "target")
        if aims.values.shape != knots.values.shape:
            raise ValueError(f"target: expected the shape of x, {tuple(x.shape)}, found {tuple(aims.values.shape)}")
        mean, std = self._posterior(knots)
        z0 = mean + std * torch.randn(check_count("samples", samples), *mean.shape).to(mean)
        zs, intensity_integral = self._solved(z0, knots.times, knots.times, counting=True)
        residual = torch.where(aims.observed, self._decoded(zs) - aims.values.nan_to_num(), 0.0) / self.noise_std
        constant = math.log(self.noise_std) + 0.5 * math.log(2.0 * math.pi)
        # A product of a number and flags would have the default dtype.
        density = torch.where(aims.observed, -0.5 * residual.square() - constant, 0.0)
        if self.intensity is not None:
            density = density + torch.where(aims.observed, _log_softplus(self.intensity(zs)), 0.0)
        log_likelihood = density.sum((1, 3)).mean(0)
        if intensity_integral is not None:
            log_likelihood = log_likelihood - _at_end(intensity_integral, knots.lengths).sum(-1).mean(0)
        kl = 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).sum(-1)
        return ELBO(log_likelihood - check_number("kl_weight", kl_weight) * kl, log_likelihood, kl)

    def intensities(self, zs: Tensor) -> Tensor:
        """λ at latent states `zs` of shape (..., latent), with `poisson`."""
        if self.intensity is None:
            raise RuntimeError("intensities: expected a model with poisson=True, found one with poisson=False")
        return functional.softplus(self.intensity(zs))

    def _knots(self, x: Tensor, times: Tensor | None, lengths: Tensor | None, name: str = "x") -> Knots:
        check_channels(name, x, (self.channels,), "observations")
        if x.ndim != 3:
            raise ValueError(f"{name}: expected shape (batch, times, channels), found {tuple(x.shape)}")
        return check_knots(x, times, lengths)

    def _posterior(self, knots: Knots) -> tuple[Tensor, Tensor]:
        raw = self.encoder(knots)
        if raw.shape != (knots.values.shape[1], 2 * self.latent):
            expected = (knots.values.shape[1], 2 * self.latent)
            raise ValueError(f"encoder: expected an output of shape {expected}, found {tuple(raw.shape)}")
        mean, width = raw.chunk(2, -1)
        return mean, functional.softplus(width) + 1e-4

    def _later(self, knots: Knots, ts: Any) -> Tensor:
        """Times of outputs, checked against the first time, at which z₀ is given."""
        times = knots.times
        later = torch.as_tensor(ts, dtype=times.dtype, device=times.device)
        if later.ndim != times.ndim or later.shape[:-1] != times.shape[:-1] or later.shape[-1] == 0:
            shape = "(T,)" if times.ndim == 1 else f"({len(times)}, T)"
            raise ValueError(f"ts: expected shape {shape}, as times has {times.ndim} axes, found {tuple(later.shape)}")
        if bool((later[..., :1] < times[..., :1]).any()) or bool((later.diff() < 0).any()):
            raise ValueError("ts: expected increasing times, not before the first time of a series")
        return later

    def _solved(self, z0: Tensor, ts: Tensor, times: Tensor, *, counting: bool = False) -> tuple[Tensor, Tensor | None]:
        """z of shape ((samples,) T, batch, latent) and, for Poisson processes, ∫λ of the same shape but channels."""
        lead = z0.shape[:-2]
        first = times[..., :1]
        before = bool((ts[..., :1] > first).any())
        grid = torch.cat((first, ts), -1) if before else ts
        if grid.ndim > 1 and lead:
            grid = grid.repeat(lead[0], 1)
        z = z0.flatten(0, -2)
        options: dict[str, Any] = {"batched": True} if grid.ndim > 1 else {}
        own = self.encoder.stats if isinstance(self.encoder, SolvingModule) else ()
        if counting and self.intensity is not None:
            field = partial(_with_intensity, self.field, self.intensity)
            state = (z, z.new_zeros(len(z), self.channels))
            leaves = list(self.solve(field, state, grid, integrals=(False, True), **options).ys)
        else:
            leaves = [self.solve(self.field, z, grid, **options).ys]
        self._stats = (*own, *self._stats)
        arranged = [leaf[1:] if before else leaf for leaf in leaves]
        if lead:
            arranged = [torch.unflatten(leaf, 1, z0.shape[:-1]).movedim(1, 0) for leaf in arranged]
        return arranged[0], arranged[1] if len(arranged) > 1 else None

    def _decoded(self, zs: Tensor) -> Tensor:
        return self.decoder(zs.flatten(0, -2)).unflatten(0, zs.shape[:-1])

    def extra_repr(self) -> str:
        text = f"channels={self.channels}, latent={self.latent}, noise_std={self.noise_std:g}"
        text += ", poisson=True" if self.intensity is not None else ""
        return ", ".join([text, *filter(None, [super().extra_repr()])])


def _with_intensity(
    field: Callable[[Tensor, Tensor], Tensor], intensity: nn.Module, t: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The field of the state (z, ∫λ dt)."""
    return field(t, state[0]), functional.softplus(intensity(state[0]))


def _log_softplus(x: Tensor) -> Tensor:
    """log log(1 + eˣ), also where eˣ underflows; for small eˣ it is x − ½eˣ + O(e²ˣ)."""
    low = x < -15.0
    return torch.where(low, x - 0.5 * x.clamp(max=0.0).exp(), functional.softplus(x.clamp(min=-15.0)).log())


def _at_end(integral: Tensor, lengths: Tensor | None) -> Tensor:
    """The values of shape (samples, T, batch, channels) at the last time of every series."""
    if lengths is None:
        return integral[:, -1]
    rows = (lengths - 1).reshape(1, 1, -1, 1).expand(len(integral), 1, -1, integral.shape[-1])
    return integral.gather(1, rows).squeeze(1)


def kl_annealing(step: int, *, wait: int = 10, rate: float = 0.99) -> float:
    """The weight of the KL term at a training step: 0 for `wait` steps, then 1 − rateⁿ after n more, towards 1.

    A small weight at first lets the decoder learn before the posterior is pulled towards the prior.

    Reference: Rubanova, Chen and Duvenaud, NeurIPS 2019, arXiv:1907.03907, with the values of its experiments.

    Arguments:
        step: number of the training step, from 0.
        wait: number of steps with weight 0.
        rate: between 0 and 1; a smaller rate reaches 1 earlier.

    Example:
        >>> [round(kl_annealing(step), 3) for step in (0, 10, 11, 100, 1000)]
        [0.0, 0.0, 0.01, 0.595, 1.0]
    """
    check_count("step", step, least=0)
    check_count("wait", wait, least=0)
    if not check_number("rate", rate) < 1.0:
        raise ValueError(f"rate: expected a number below 1, found {rate:g}")
    return 0.0 if step < wait else 1.0 - rate ** (step - wait)
