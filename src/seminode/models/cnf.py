r"""Continuous normalising flows, and fields for them that see the time as one more input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._field.checks import check_count
from .base import SolvingModule, check_end, check_hidden
from .running import Regulariser, along, check_names, integrals_of, noise_for, start
from .traces import Trace, chosen_trace

ACTIVATIONS = {"tanh": torch.tanh, "softplus": functional.softplus}


class CNF(SolvingModule):
    r"""A continuous normalising flow: z′ = f(t, z) carries data at t = 0 to a base density q at t = T.

        Δ′ = −tr(∂f/∂z),  Δ(0) = 0,      log p(x) = log q(z(T)) − Δ(T)

    Chen et al. (2018, arXiv:1806.07366), Grathwohl et al. (2019, arXiv:1810.01367). Samples are solved for in the
    other direction, from T to 0. Δ is only an integral and does not steer the solver, unless `norm="mixed"` is given.

    Arguments:
        field: f(t, z), a module or callable, for z of shape (batch, ...). It must treat samples independently of each
            other: batch normalisation has no place in it.
        trace: `"hutchinson"`, an unbiased estimate from one draw of noise a solve; `"exact"`, at one VJP a dimension;
            `"hollow"`, exact at one VJP, for a `HollowMLP`; or a [`Trace`][seminode.models.traces.Trace].
        noise: of the estimate: `"gaussian"` (the default) or `"rademacher"`.
        regularisers: running costs to be integrated along, and returned by `log_prob(x, costs=True)`.
        t1: the end T of the time interval, above 0.
        base: the density q, with `log_prob` and `sample`, over whole samples, as
            `torch.distributions.Independent(...)`; by default a standard normal.
        options: of [`solve`][seminode.solve]; see [`SolvingModule`][seminode.models.SolvingModule].

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
        trace: str | Trace = "hutchinson",
        noise: str | None = None,
        regularisers: Sequence[Regulariser] = (),
        t1: float = 1.0,
        base: Any = None,
        **options: Any,
    ):
        super().__init__(**options)
        if not callable(field):
            raise TypeError(f"field: expected a callable field(t, z), found {type(field).__name__}")
        self.field = field
        self.trace = chosen_trace(trace, noise)
        self.trace.check(field)
        self.regularisers = check_names(regularisers, Trace.name)
        self.t1 = check_end(t1)
        self.base = base

    def forward(self, x: Tensor, costs: bool = False) -> Any:
        """`log_prob(x)`, for the wrappers that call a module."""
        return self.log_prob(x, costs=True) if costs else self.log_prob(x)

    @overload
    def log_prob(self, x: Tensor, costs: Literal[False] = False) -> Tensor: ...

    @overload
    def log_prob(self, x: Tensor, costs: Literal[True]) -> tuple[Tensor, dict[str, Tensor]]: ...

    def log_prob(self, x: Tensor, costs: bool = False) -> Any:
        """log p(x), shape (batch,); with `costs` also what the regularisers have integrated, each (batch,)."""
        if not costs:
            z, delta = self.transform(x)
            return self.base_log_prob(z) - delta
        z, delta, integrated = self.transform_with_costs(x)
        return self.base_log_prob(z) - delta, integrated

    def transform(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(z(T), Δ(T)) for z(0) = x and Δ(0) = delta, by default 0."""
        z, delta, _ = self._carry(x, delta, (0.0, self.t1), ())
        return z, delta

    def transform_with_costs(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The same, and what each regulariser has integrated, by name."""
        return self._carry(x, delta, (0.0, self.t1), self.regularisers)

    def inverse(self, z: Tensor) -> Tensor:
        """The x that `transform` takes to z. No divergence is needed, so this is the cheaper direction."""
        check_batch("z", z)
        return self.solve(self.field, z, (self.t1, 0.0), save="last").ys[-1]

    @overload
    def sample(self, shape: int | Sequence[int], with_log_prob: Literal[False] = False) -> Tensor: ...

    @overload
    def sample(self, shape: int | Sequence[int], with_log_prob: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def sample(self, shape: int | Sequence[int], with_log_prob: bool = False) -> Any:
        """Draw from the flow; for gradients through samples call `inverse` on draws from the base.

        Arguments:
            shape: (n, ...), or n alone where `base` or the field's `dim` says what one sample looks like.
            with_log_prob: also return log p of the samples, from the same solve.
        """
        z = self._draw(shape)
        if not with_log_prob:
            return self.inverse(z)
        x, delta, _ = self._carry(z, None, (self.t1, 0.0), ())
        return x, self.base_log_prob(z) + delta  # Δ taken backwards from 0 is −Δ(T)

    def base_log_prob(self, z: Tensor) -> Tensor:
        """log q(z), shape (batch,)."""
        if self.base is None:
            return standard_normal_log_prob(z)
        log_prob = self.base.log_prob(z)
        if log_prob.shape != z.shape[:1]:
            raise ValueError(
                f"base: expected one log-probability a sample, shape {tuple(z.shape[:1])}, found "
                f"{tuple(log_prob.shape)}; see torch.distributions.Independent"
            )
        return log_prob

    def _carry(
        self, x: Tensor, delta: Tensor | None, ts: tuple[float, float], regularisers: Sequence[Regulariser]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Solve for z together with Δ and the costs, in either direction."""
        check_batch("x", x)
        if delta is not None and delta.shape != x.shape[:1]:
            raise ValueError(f"delta: expected shape {tuple(x.shape[:1])}, found {tuple(delta.shape)}")
        running = (self.trace, *regularisers)
        state = start(x, running) if delta is None else start(x, running, delta=delta)
        solution = self.solve(
            partial(along, self.field, running),
            state,
            ts,
            args=noise_for(running, x, self.trace.noise),
            integrals=integrals_of(running),
            save="last",
        )
        z, end, *costs = (leaf[-1] for leaf in solution.ys)
        return z, end, {cost.name: value for cost, value in zip(regularisers, costs, strict=True)}

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
        own = f"trace={self.trace!r}, t1={self.t1}"
        if self.regularisers:
            own += f", regularisers={self.regularisers!r}"
        return ", ".join(filter(None, (own, super().extra_repr())))


def check_batch(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, found {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name}: expected shape (batch, ...), found {tuple(x.shape)}")


def standard_normal_log_prob(z: Tensor) -> Tensor:
    """log N(z; 0, I) of each sample, shape (batch,)."""
    z = z.flatten(1)
    return -0.5 * (z.square().sum(1) + z.shape[1] * math.log(2.0 * math.pi))


class ConcatLinear(nn.Module):
    """A linear layer whose first input is the time: W (t, z) + b.

    Arguments:
        inputs, outputs: sizes of the last axis, time not counted.
        mask: zero, of shape (outputs, inputs), where an output is not to see an input; all of them see the time.

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
        seen = weight[:, 1:] if self.mask is None else weight[:, 1:] * self.mask
        # The time is the same for the whole batch, so that its column is a part of the bias.
        return functional.linear(z, seen, self.linear.bias + t * weight[:, 0])


class ConcatConv2d(nn.Module):
    """A 3×3 convolution, stride 1, padding 1, whose first input channel is the time, constant over the image.

    Arguments:
        inputs, outputs: numbers of channels, time not counted.

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
        # The channel of the time is the same for the whole batch: it is convolved once, and nothing is copied. Near the
        # border it is not constant, because of the padding.
        clock = functional.conv2d(z.new_ones(1, 1, *z.shape[2:]), weight[:, :1], padding=1)
        return functional.conv2d(z, weight[:, 1:], self.conv.bias, padding=1) + t * clock


class ConcatMLP(nn.Module):
    """A multilayer perceptron whose every layer sees the time; a field f(t, z) on (batch, dim).

    Arguments:
        dim: of z.
        widths: of the hidden layers.
        activation: `"tanh"` or `"softplus"`.
        zero_init: start with the last layer's weights at zero, as `ConvField` does.

    >>> ConcatMLP(2, (16, 16))(torch.tensor(0.5), torch.zeros(4, 2)).shape
    torch.Size([4, 2])
    """

    def __init__(self, dim: int, widths: Sequence[int], *, activation: str = "tanh", zero_init: bool = False):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected {' or '.join(map(repr, ACTIVATIONS))}, found {activation!r}")
        self.dim = check_count("dim", dim)
        self.activation = activation
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
    """A field fᵢ = τ(zᵢ, hᵢ) on (batch, dim) whose hᵢ sees all coordinates but zᵢ, for `trace="hollow"`.

    Two masked networks make h: in one hᵢ sees the coordinates before zᵢ, in the other those after it. Chen and Duvenaud
    (2019, arXiv:1912.03579); the masks are those of Germain et al. (2015, arXiv:1502.03509).

    Arguments:
        dim: of z.
        widths: of the hidden layers of both masked networks; τ has one hidden layer, as wide as the last of these.
        features: size of hᵢ from either network.

    >>> HollowMLP(3, (16, 16))(torch.tensor(0.5), torch.zeros(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, dim: int, widths: Sequence[int], features: int = 8):
        super().__init__()
        self.dim, self.features = check_count("dim", dim), check_count("features", features)
        if not check_hidden("widths", widths):
            raise ValueError("widths: expected at least one hidden layer, found none")
        # A unit of degree k sees the first k coordinates; the i-th h may see units of degree below i alone.
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
        """h, shape (batch, dim, 2·features)."""
        before, after = self._masked(self.before, t, z), self._masked(self.after, t, z.flip(-1)).flip(-2)
        return torch.cat([before, after], -1)

    def transformer(self, t: Tensor, z: Tensor, h: Tensor) -> Tensor:
        """τ(zᵢ, hᵢ), shape (batch, dim)."""
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
    """The field of image flows: concat convolutions with softplus between them, f(t, z) on (batch, channels, h, w).

    With zero weights in the last convolution (its bias is left as it is) a flow starts as a constant shift, as in
    Finlay et al. (2020, arXiv:2002.02798).

    Arguments:
        channels: of z.
        hidden: channels of the hidden layers.
        layers: number of hidden layers; there is one convolution more.
        zero_init: whether the last convolution's weights start at zero.

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
