r"""Continuous normalising flows, and networks f(t, z) for them whose layers take the time as an additional input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._field.checks import check_count
from .base import SolvingModule, check_end, check_hidden
from .running import Noise, Regulariser, along, check_names, integrals_of, noise_for, start
from .step_costs import step_regularisers
from .traces import Trace, TraceName, make_trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions

#: Names of the activations of `ConcatMLP`.
Activation = Literal["tanh", "softplus"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "softplus": functional.softplus}


class CNF(SolvingModule):
    r"""A continuous normalising flow: z′ = f(t, z) maps data at t = 0 to a base density q at t = T.

        Δ′ = −tr(∂f/∂z),  Δ(0) = 0,      log p(x) = log q(z(T)) − Δ(T)

    Samples are solved for in the other direction, from T to 0. Δ is a plain integral and left out of error control,
    unless `norm="mixed"` is given.

    References: Chen et al., *Neural Ordinary Differential Equations* (NeurIPS 2018, arXiv:1806.07366); Grathwohl et
    al., *FFJORD* (ICLR 2019, arXiv:1810.01367).

    Arguments:
        field: f(t, z), a module or callable, for z of shape (batch, ...). It must treat samples independently of each
            other, so it must not contain batch normalisation.
        trace: `"hutchinson"`, an unbiased estimate from one draw of noise per solve; `"exact"`, one VJP per dimension;
            `"hollow"`, exact with one VJP, for a `HollowMLP`; or a [`Trace`][seminode.models.traces.Trace].
        noise: distribution of the noise of the estimate: `"gaussian"` (the default) or `"rademacher"`.
        regularisers: running costs to integrate with the state; `log_prob(x, costs=True)` returns them.
        t1: the end T of the time interval, above 0.
        base: the density q, an object with `log_prob` and `sample` over whole samples, such as
            `torch.distributions.Independent(...)`; by default a standard normal.
        options: options of [`solve`][seminode.solve]; see [`SolvingModule`][seminode.models.SolvingModule].

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> flow = CNF(ConcatMLP(2, (16, 16)), trace="exact")
        >>> loss = -flow.log_prob(torch.randn(8, 2)).mean()
        >>> loss.backward()
        >>> flow.sample(100).shape
        torch.Size([100, 2])
    """

    def __init__(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        *,
        trace: TraceName | Trace = "hutchinson",
        noise: Noise | None = None,
        regularisers: Sequence[Regulariser] = (),
        t1: float = 1.0,
        base: Any = None,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        if not callable(field):
            raise TypeError(f"field: expected a callable field(t, z), found {type(field).__name__}")
        self.field = field
        self.trace = make_trace(trace, noise)
        self.trace.check(field)
        self.regularisers = check_names(regularisers, Trace.name)
        self.t1 = check_end(t1)
        self.base = base

    def forward(self, x: Tensor, costs: bool = False) -> Any:
        """`log_prob(x)`, for wrappers that call the module, such as `DistributedDataParallel`."""
        return self.log_prob(x, costs=True) if costs else self.log_prob(x)

    @overload
    def log_prob(self, x: Tensor, costs: Literal[False] = False) -> Tensor: ...

    @overload
    def log_prob(self, x: Tensor, costs: Literal[True]) -> tuple[Tensor, dict[str, Tensor]]: ...

    def log_prob(self, x: Tensor, costs: bool = False) -> Any:
        """log p(x), shape (batch,); with `costs` also the integral of each regulariser by name, shape (batch,)."""
        if not costs:
            z, delta = self.transform(x)
            return self.base_log_prob(z) - delta
        z, delta, integrated = self.transform_with_costs(x)
        return self.base_log_prob(z) - delta, integrated

    def transform(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(z(T), Δ(T)) for z(0) = x and Δ(0) = `delta`, by default 0."""
        z, delta, _ = self._integrate(x, delta, (0.0, self.t1), ())
        return z, delta

    def transform_with_costs(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Like `transform`, and also the integrals of the regularisers by name."""
        return self._integrate(x, delta, (0.0, self.t1), self.regularisers)

    def inverse(self, z: Tensor) -> Tensor:
        """The x that `transform` maps to z. This direction computes no divergence and is cheaper."""
        check_batch("z", z)
        return self.solve(self.field, z, (self.t1, 0.0), save="last").ys[-1]

    @overload
    def sample(self, shape: int | Sequence[int], with_log_prob: Literal[False] = False) -> Tensor: ...

    @overload
    def sample(self, shape: int | Sequence[int], with_log_prob: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def sample(self, shape: int | Sequence[int], with_log_prob: bool = False) -> Any:
        """Draw samples from the flow, without gradients; for those call `inverse` on samples of the base density.

        Arguments:
            shape: (n, ...), or only n if `base` or the attribute `dim` of the field gives the shape of one sample.
            with_log_prob: also return log p of the samples, from the same solve.
        """
        z = self._draw(shape)
        if not with_log_prob:
            return self.inverse(z)
        x, delta, _ = self._integrate(z, None, (self.t1, 0.0), ())
        return x, self.base_log_prob(z) + delta  # solved from T to 0, Δ ends at −Δ(T)

    def base_log_prob(self, z: Tensor) -> Tensor:
        """log q(z), shape (batch,)."""
        if self.base is None:
            return standard_normal_log_prob(z)
        log_prob = self.base.log_prob(z)
        if log_prob.shape != z.shape[:1]:
            raise ValueError(
                f"base: expected one log-probability per sample, shape {tuple(z.shape[:1])}, found "
                f"{tuple(log_prob.shape)}; see torch.distributions.Independent"
            )
        return log_prob

    def _integrate(
        self, x: Tensor, delta: Tensor | None, ts: tuple[float, float], regularisers: Sequence[Regulariser]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Solve for z, Δ and the costs, in either direction of time."""
        check_batch("x", x)
        if delta is not None and delta.shape != x.shape[:1]:
            raise ValueError(f"delta: expected shape {tuple(x.shape[:1])}, found {tuple(delta.shape)}")
        step_costs = step_regularisers(regularisers)
        rates = tuple(each for each in regularisers if each not in step_costs)
        running = (self.trace, *rates)
        state = start(x, running) if delta is None else start(x, running, delta=delta)
        ys, of_steps = self.watched(
            partial(along, self.field, running),
            state,
            ts,
            step_costs,
            args=noise_for(running, x, self.trace.noise),
            integrals=integrals_of(running),
            save="last",
        )
        z, end, *costs = (leaf[-1] for leaf in ys)
        named = {cost.name: value for cost, value in zip(rates, costs, strict=True)}
        return z, end, {**named, **of_steps}

    def _draw(self, shape: int | Sequence[int]) -> Tensor:
        if self.base is not None:
            if not isinstance(shape, int):
                raise TypeError(f"shape: expected a number of samples, since base has a shape, found {shape!r}")
            return self.base.sample((check_count("shape", shape),))
        dim = getattr(self.field, "dim", None)
        if isinstance(shape, int):
            if dim is None:
                raise ValueError(f"shape: expected (n, ...), the shape of all samples, found {shape!r}")
            shape = (check_count("shape", shape), dim)
        like = next(self.parameters(), torch.empty(()))
        return torch.randn(tuple(shape), dtype=like.dtype, device=like.device)

    def extra_repr(self) -> str:
        text = f"trace={self.trace!r}, t1={self.t1}"
        if self.regularisers:
            text += f", regularisers={self.regularisers!r}"
        return ", ".join(filter(None, (text, super().extra_repr())))


def check_batch(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, found {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name}: expected shape (batch, ...), found {tuple(x.shape)}")


def per_sample(t: Tensor, z: Tensor) -> Tensor:
    """Times of shape (batch,) with axes of length 1 for the other axes of z."""
    if t.shape != z.shape[:1]:
        raise ValueError(f"t: expected a scalar or shape {tuple(z.shape[:1])}, found {tuple(t.shape)}")
    return t.reshape(-1, *[1] * (z.ndim - 1))


def standard_normal_log_prob(z: Tensor) -> Tensor:
    """log N(z; 0, I) of each sample, shape (batch,)."""
    z = z.flatten(1)
    return -0.5 * (z.square().sum(1) + z.shape[1] * math.log(2.0 * math.pi))


class ConcatLinear(nn.Module):
    """A linear layer with the time as its first input: W (t, z) + b. The time is a scalar, or of shape (batch,).

    Reference: Grathwohl et al., *FFJORD*, ICLR 2019, arXiv:1810.01367.

    Arguments:
        inputs, outputs: sizes of the last axis, without the time.
        mask: of shape (outputs, inputs); zero where an output must not depend on an input. All outputs depend on the
            time.

    >>> ConcatLinear(2, 3)(torch.tensor(0.5), torch.zeros(4, 2)).shape
    torch.Size([4, 3])
    """

    mask: Tensor | None

    def __init__(self, inputs: int, outputs: int, mask: Tensor | None = None):
        super().__init__()
        self.inputs = inputs
        self.linear = nn.Linear(1 + inputs, outputs)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        if z.shape[-1] != self.inputs:
            raise ValueError(f"z: expected shape (batch, {self.inputs}), found {tuple(z.shape)}")
        weight = self.linear.weight
        z_weight = weight[:, 1:] if self.mask is None else weight[:, 1:] * self.mask
        if t.ndim > 0:
            return functional.linear(z, z_weight, self.linear.bias) + per_sample(t, z) * weight[:, 0]
        # The time is the same for the whole batch, so its column is added to the bias.
        return functional.linear(z, z_weight, self.linear.bias + t * weight[:, 0])


class ConcatConv2d(nn.Module):
    """A 3×3 convolution with stride 1 and padding 1 whose first input channel is the time, constant over the image.

    The time is a scalar, or of shape (batch,). Reference: Grathwohl et al., *FFJORD*, ICLR 2019, arXiv:1810.01367.

    Arguments:
        inputs, outputs: numbers of channels, without the time.

    >>> ConcatConv2d(1, 3)(torch.tensor(0.5), torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 3, 8, 8])
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.inputs = inputs
        self.conv = nn.Conv2d(1 + inputs, outputs, 3, padding=1)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        if z.ndim != 4 or z.shape[1] != self.inputs:
            raise ValueError(f"z: expected shape (batch, {self.inputs}, height, width), found {tuple(z.shape)}")
        weight = self.conv.weight
        # The time channel is the same for the whole batch, so it is convolved once and not concatenated to z. The
        # padding makes the result vary near the border.
        time_term = functional.conv2d(z.new_ones(1, 1, *z.shape[2:]), weight[:, :1], padding=1)
        time = t if t.ndim == 0 else per_sample(t, z)
        return functional.conv2d(z, weight[:, 1:], self.conv.bias, padding=1) + time * time_term


class ConcatMLP(nn.Module):
    """A multilayer perceptron with the time as an input of every layer: a field f(t, z) for z of shape (batch, dim).

    Reference: Grathwohl et al., *FFJORD*, ICLR 2019, arXiv:1810.01367.

    Arguments:
        dim: dimension of z.
        widths: widths of the hidden layers.
        activation: `"tanh"` or `"softplus"`.
        zero_init: whether the weights of the last layer start at zero, as in `ConvField`.

    >>> ConcatMLP(2, (16, 16))(torch.tensor(0.5), torch.zeros(4, 2)).shape
    torch.Size([4, 2])
    """

    def __init__(self, dim: int, widths: Sequence[int], *, activation: Activation = "tanh", zero_init: bool = False):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected {' or '.join(map(repr, ACTIVATIONS))}, found {activation!r}")
        self.dim = check_count("dim", dim)
        self.activation: Activation = activation
        sizes = (dim, *check_hidden("widths", widths), dim)
        layers = [ConcatLinear(n, m) for n, m in pairwise(sizes)]
        if zero_init:
            nn.init.zeros_(layers[-1].linear.weight)
        self.layers = nn.ModuleList(layers)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = ACTIVATIONS[self.activation](layer(t, z))
        return last(t, z)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class HollowMLP(nn.Module):
    """A field fᵢ = τ(zᵢ, hᵢ) for z of shape (batch, dim), where hᵢ depends on all coordinates but zᵢ.

    For `trace="hollow"`. Two masked networks compute h: in one, hᵢ depends on the coordinates before zᵢ, in the other
    on those after it. Chen and Duvenaud (2019, arXiv:1912.03579); the masks are those of Germain et al. (2015,
    arXiv:1502.03509).

    Arguments:
        dim: dimension of z.
        widths: widths of the hidden layers of both masked networks; τ has one hidden layer of the last of these widths.
        features: size of hᵢ from each network.

    >>> HollowMLP(3, (16, 16))(torch.tensor(0.5), torch.zeros(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, dim: int, widths: Sequence[int], features: int = 8):
        super().__init__()
        self.dim, self.features = check_count("dim", dim), check_count("features", features)
        if not check_hidden("widths", widths):
            raise ValueError("widths: expected at least one hidden layer, found none")
        # A unit of degree k depends on the first k coordinates; hᵢ depends on units of degree below i only.
        degrees = [torch.arange(dim) + 1, *(torch.arange(n) % max(1, dim - 1) + 1 for n in widths)]
        last = (torch.arange(dim) + 1).repeat_interleave(features)
        masks = [(b[:, None] >= a).float() for a, b in pairwise(degrees)]
        masks.append((last[:, None] > degrees[-1]).float())
        self.before, self.after = (
            nn.ModuleList(ConcatLinear(m.shape[1], m.shape[0], m.clone()) for m in masks) for _ in range(2)
        )
        width = widths[-1]
        self.hidden, self.last = ConcatLinear(1 + 2 * features, width), ConcatLinear(width, 1)

    def conditioner(self, t: Tensor, z: Tensor) -> Tensor:
        """h, of shape (batch, dim, 2·features)."""
        before, after = self._masked(self.before, t, z), self._masked(self.after, t, z.flip(-1)).flip(-2)
        return torch.cat([before, after], -1)

    def transformer(self, t: Tensor, z: Tensor, h: Tensor) -> Tensor:
        """τ(zᵢ, hᵢ), of shape (batch, dim)."""
        return self.last(t, torch.tanh(self.hidden(t, torch.cat([z.unsqueeze(-1), h], -1)))).squeeze(-1)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.transformer(t, z, self.conditioner(t, z))

    def _masked(self, layers: nn.ModuleList, t: Tensor, z: Tensor) -> Tensor:
        first, *rest = layers
        h = first(t, z)
        for layer in rest:
            h = layer(t, torch.tanh(h))
        return h.unflatten(-1, (self.dim, self.features))


class ConvField(nn.Module):
    """The field of image flows, for z of shape (batch, channels, h, w): `ConcatConv2d` layers with softplus in between.

    With the weights of the last convolution at zero (its bias keeps its initial value) a flow starts as a constant
    shift, as in Finlay et al. (2020, arXiv:2002.02798).

    Arguments:
        channels: channels of z.
        hidden: channels of the hidden layers.
        layers: number of hidden layers; there are `layers` + 1 convolutions.
        zero_init: whether the weights of the last convolution start at zero.

    >>> sum(p.numel() for p in ConvField(1, 32).parameters())
    19978
    """

    def __init__(self, channels: int, hidden: int, layers: int = 3, *, zero_init: bool = True):
        super().__init__()
        self.channels = check_count("channels", channels)
        sizes = (channels, *(check_count("layers", layers) * [check_count("hidden", hidden)]), channels)
        convolutions = [ConcatConv2d(n, m) for n, m in pairwise(sizes)]
        if zero_init:
            nn.init.zeros_(convolutions[-1].conv.weight)
        self.layers = nn.ModuleList(convolutions)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            z = functional.softplus(layer(t, z))
        return last(t, z)
