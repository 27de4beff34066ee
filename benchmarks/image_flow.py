"""A flow on images at three scales, with the shapes of MNIST: one block per scale, each with its own solve.

The paper's flow has four equal blocks per scale. One block per scale has the same shapes at a quarter of the cost. The
images are smooth random fields, so no data set is needed. Between scales every 2×2 square of pixels becomes four
channels, so all states have 784 values.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .problems import normal
from .tasks import Solve, Task

TS = torch.tensor([0.0, 1.0], dtype=torch.float64)
#: Factors on all weights, and additionally on the weights of the time channel. With PyTorch's initial weights three
#: steps per block would be enough, which is not so after training.
GAIN, TIME_GAIN = 2.0, 8.0


def convolution(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    """A 3×3 convolution with PyTorch's initialisation times `GAIN`, and an additional input channel for the time."""
    layer = cast(nn.Conv2d, nn.utils.skip_init(nn.Conv2d, 1 + inputs, outputs, 3, padding=1, dtype=torch.float64))
    bound = GAIN / math.sqrt(9 * (1 + inputs))
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    with torch.no_grad():
        layer.weight[:, 0] *= TIME_GAIN
    return layer


class ImageField(nn.Module):
    """(z, Δ)′ = (f(t, z), −vᵀ(∂f/∂z)v): convolutions with a time channel, softplus in between, and Hutchinson's trace.

    One evaluation and one VJP by `torch.func`, so that the field can be differentiated again, eagerly or compiled. The
    noise v is constant. The time channel is convolved once for the whole batch.
    """

    noise: Tensor

    def __init__(self, noise: Tensor, hidden: int, generator: torch.Generator):
        super().__init__()
        sizes = (noise.shape[1], hidden, hidden, hidden, noise.shape[1])
        self.layers = nn.ModuleList(convolution(n, m, generator) for n, m in pairwise(sizes))
        self.register_buffer("noise", noise)

    def velocity(self, t: Tensor, z: Tensor) -> Tensor:
        ones = z.new_ones(1, 1, *z.shape[2:])
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Conv2d)
            time_term = functional.conv2d(ones, layer.weight[:, :1], padding=1)
            z = functional.softplus(z) if i else z
            z = functional.conv2d(z, layer.weight[:, 1:], layer.bias, padding=1) + t * time_term
        return z

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        f, vjp_fn = torch.func.vjp(lambda z: self.velocity(t, z), state[0])  # type: ignore[misc]
        return f, -(vjp_fn(self.noise)[0] * self.noise).flatten(1).sum(1)


def images(batch: int, side: int, generator: torch.Generator) -> Tensor:
    """Logits of smooth images, (batch, 1, side, side). As in MNIST, most values are near the ends of the grey scale."""
    rough = normal((batch, 1, side + 8, side + 8), generator)
    smooth = functional.avg_pool2d(functional.avg_pool2d(rough, 5, 1), 5, 1)
    return 3.0 * smooth / smooth.std()


def flow_task(batch: int = 32, hidden: int = 32, side: int = 28, dtype: torch.dtype = torch.float32) -> Task:
    """Negative log-likelihood per dimension of a batch of images, with the tolerances of the paper."""
    generator = torch.Generator().manual_seed(0)
    x = images(batch, side, generator)
    shapes = [(batch, 4**scale, side // 2**scale, side // 2**scale) for scale in range(3)]
    fields = [ImageField(normal(shape, generator), hidden, generator) for shape in shapes]
    modules = nn.ModuleList(fields).to(dtype)
    z0, delta0 = x.to(dtype), x.new_zeros(batch).to(dtype)

    def through(y0: tuple[Tensor, Tensor], solve: Solve) -> Tensor:
        z, delta = y0
        for scale, field in enumerate(fields):
            z = functional.pixel_unshuffle(z, 2) if scale else z
            zs, deltas = solve(field, (z, delta), TS)
            z, delta = zs[-1], deltas[-1]
        log_base = -0.5 * (z.square() + math.log(2.0 * math.pi)).flatten(1).sum(1)
        return (delta - log_base).mean() / (side * side)

    return Task(
        modules=modules,
        start=lambda: (z0, delta0),
        through=through,
        rtol=1e-5,
        atol=1e-5,
        data={"z0": z0, **{f"noise{scale}": field.noise for scale, field in enumerate(fields)}},
    )
