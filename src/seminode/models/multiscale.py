r"""Multiscale flows on images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from .._field.checks import check_count
from .base import SolvingModule, check_end
from .cnf import CNF, ConvField, standard_normal_log_prob
from .images import (
    LEVELS,
    bits_per_dim,
    check_alpha,
    check_levels,
    check_pixels,
    dequantise,
    inverse_logit,
    logit,
    quantise,
    squeeze,
    unsqueeze,
)
from .running import Noise, Regulariser
from .traces import Trace, TraceName

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


class MultiscaleCNF(SolvingModule):
    r"""A density of images by a sequence of flows: dequantise → logit → blocks → squeeze → blocks → … → N(0, I).

    Each block is a [`CNF`][seminode.models.cnf.CNF] with its own solve and its own
    [`ConvField`][seminode.models.cnf.ConvField]. Between scales every 2×2 square of pixels becomes four channels.
    Nothing is factored out, so the state of every block is the whole image. With D values in an image,

        Δ(0) = −Σ log|dy/dx| of the logit,   Δ′ = −tr(∂f/∂z),   log p(x) = log N(z; 0, I) − Δ,

    where Δ is accumulated over all blocks. This is the flow of Kidger, Chen and Lyons (2021, arXiv:2009.09457), based
    on Grathwohl et al. (2019, arXiv:1810.01367) and Finlay et al. (2020, arXiv:2002.02798).

    Arguments:
        shape: (channels, height, width) of an image; the sides must be divisible by 2^(scales − 1).
        hidden: channels of the hidden layers of every field.
        scales, blocks: number of scales, and number of blocks at each scale.
        layers: number of hidden layers of every field.
        alpha: α of the logit, between 0 and ½.
        levels: number of values of a pixel; pixels are integers in 0, …, levels − 1.
        deterministic_eval: in eval mode, dequantise with u = ½ instead of noise. The result is then the same for every
            call, but no longer a bound on the likelihood.
        zero_init: whether the weights of the last convolution of every field start at zero.
        trace, noise, regularisers, t1: arguments of every block; see `CNF`. Noise is drawn once per block and forward
            pass.
        options: options of [`solve`][seminode.solve], shared by all blocks.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> flow = MultiscaleCNF((1, 4, 4), hidden=4, scales=2, blocks=1)
        >>> flow.bits_per_dim(torch.randint(256, (3, 1, 4, 4))).shape
        torch.Size([3])
        >>> flow.sample(2, as_bytes=True).dtype
        torch.uint8
    """

    def __init__(
        self,
        shape: Sequence[int] = (1, 28, 28),
        hidden: int = 32,
        scales: int = 3,
        blocks: int = 4,
        *,
        layers: int = 3,
        alpha: float = 1e-5,
        levels: int = LEVELS,
        deterministic_eval: bool = False,
        zero_init: bool = True,
        trace: TraceName | Trace = "hutchinson",
        noise: Noise | None = None,
        regularisers: Sequence[Regulariser] = (),
        t1: float = 1.0,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        channels, height, width = self.shape = check_shape(shape, check_count("scales", scales))
        check_alpha(alpha)
        self.alpha = alpha
        self.levels = check_levels(levels)
        self.deterministic_eval = deterministic_eval
        self.dims = channels * height * width
        self.scales = nn.ModuleList()
        for scale in range(scales):
            size = channels * 4**scale
            flows = [
                CNF(
                    ConvField(size, hidden, layers, zero_init=zero_init),
                    trace=trace,
                    noise=noise,
                    regularisers=regularisers,
                    t1=t1,
                )
                for _ in range(check_count("blocks", blocks))
            ]
            self.scales.append(nn.ModuleList(flows))

    @property
    def t1(self) -> float:
        return self._blocks()[0].t1

    @t1.setter
    def t1(self, t1: float) -> None:
        for flow in self._blocks():
            flow.t1 = check_end(t1)

    @property
    def regularisers(self) -> tuple[Regulariser, ...]:
        return self._blocks()[0].regularisers

    def forward(self, pixels: Tensor, costs: bool = False) -> Any:
        """`log_prob(pixels)`, for wrappers that call the module, such as `DistributedDataParallel`."""
        return self.log_prob(pixels, costs=True) if costs else self.log_prob(pixels)

    @overload
    def log_prob(self, pixels: Tensor, costs: Literal[False] = False) -> Tensor: ...

    @overload
    def log_prob(self, pixels: Tensor, costs: Literal[True]) -> tuple[Tensor, dict[str, Tensor]]: ...

    def log_prob(self, pixels: Tensor, costs: bool = False) -> Any:
        """The log-density of the dequantised pixels on [0, 1)ᴰ, shape (batch,).

        Arguments:
            pixels: integers in 0, …, levels − 1, shape (batch, channels, height, width).
            costs: also return the integrals of the regularisers by name, summed over the blocks.
        """
        z, delta, integrated = self._transform(self.dequantise(pixels), costs)
        log_prob = standard_normal_log_prob(z) - delta
        return (log_prob, integrated) if costs else log_prob

    def bits_per_dim(self, pixels: Tensor) -> Tensor:
        """Bits per dimension of each image, shape (batch,), for bytes `pixels`. The usual loss is their mean."""
        return bits_per_dim(self.log_prob(pixels), self.dims, self.levels)

    def dequantise(self, pixels: Tensor) -> Tensor:
        """(pixel + u)/levels, where u is noise, or ½ in eval mode with `deterministic_eval`."""
        check_pixels(pixels, self.shape, self.levels)
        deterministic = self.deterministic_eval and not self.training
        dtype = next(self.parameters()).dtype
        return dequantise(pixels, levels=self.levels, deterministic=deterministic, dtype=dtype)

    def transform(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(z, Δ) of images x in [0, 1); z has shape (batch, D)."""
        z, delta, _ = self._transform(x, False)
        return z, delta

    def inverse(self, z: Tensor) -> Tensor:
        """The x that `transform` maps to z, shape (batch, channels, height, width)."""
        if z.ndim != 2 or z.shape[1] != self.dims:
            raise ValueError(f"z: expected shape (batch, {self.dims}), found {tuple(z.shape)}")
        self._share_options()
        channels, height, width = self.shape
        halved = 2 ** (len(self.scales) - 1)
        y = z.view(-1, channels * halved**2, height // halved, width // halved)
        for i in reversed(range(len(self.scales))):
            for flow in reversed(self._blocks_at(i)):
                y = flow.inverse(y)
            if i:
                y = unsqueeze(y)
        return inverse_logit(y, self.alpha)

    @torch.no_grad()
    def sample(self, n: int, as_bytes: bool = False) -> Tensor:
        """n images with values in [0, 1), or `as_bytes` in 0, …, levels − 1; shape (n, channels, height, width).

        The range of the flow exceeds [0, 1) by about α at each end; values outside are clamped.
        """
        like = next(self.parameters())
        x = self.inverse(torch.randn(check_count("n", n), self.dims, dtype=like.dtype, device=like.device))
        return quantise(x, self.levels) if as_bytes else x.clamp(0.0, 1.0 - torch.finfo(x.dtype).eps / 2)

    def _transform(self, x: Tensor, costs: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"x: expected shape (batch, {', '.join(map(str, self.shape))}), found {tuple(x.shape)}")
        self._share_options()
        z, log_det = logit(x, self.alpha)
        delta = -log_det
        totals: dict[str, Tensor] = {}
        for i in range(len(self.scales)):
            if i:
                z = squeeze(z)
            for flow in self._blocks_at(i):
                if not costs:
                    z, delta = flow.transform(z, delta)
                    continue
                z, delta, integrated = flow.transform_with_costs(z, delta)
                totals = {name: totals.get(name, 0.0) + cost for name, cost in integrated.items()}
        return z.flatten(1), delta, totals

    def _share_options(self) -> None:
        for flow in self._blocks():
            flow.options = self.options

    def _blocks_at(self, scale: int) -> list[CNF]:
        return list(self.scales[scale])  # type: ignore[arg-type]

    def _blocks(self) -> list[CNF]:
        return [flow for scale in range(len(self.scales)) for flow in self._blocks_at(scale)]

    def extra_repr(self) -> str:
        text = f"shape={self.shape}, alpha={self.alpha}, levels={self.levels}, "
        text += f"deterministic_eval={self.deterministic_eval}"
        return ", ".join(filter(None, (text, super().extra_repr())))


def check_shape(shape: Sequence[int], scales: int) -> tuple[int, int, int]:
    side = 2 ** (scales - 1)
    if len(shape) != 3 or min(shape) < 1 or any(n % side for n in shape[1:]):
        raise ValueError(
            f"shape: expected (channels, height, width) with sides divisible by {side} for {scales} scales, "
            f"found {tuple(shape)}"
        )
    channels, height, width = (int(n) for n in shape)
    return channels, height, width
