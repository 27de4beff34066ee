"""Structured linear controlled differential equations, solved exactly by a parallel scan over matrix products."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .. import paths
from .._field.checks import check_count, check_flags, check_number
from .neural_cde import with_channels
from .neural_ode import read_out
from .small_matrices import exponential, multiply, product_of, scan_products


class LinearCDE(nn.Module):
    r"""A linear controlled differential equation with a block-diagonal structure (SLiCE),

        z(t₀) = ζ(X(t₀)),    dz = Σ_a (A_a z + b_a) dX_a,    A_a = diag(A_{a,1}, A_{a,2}, …),    y = ℓ(z(t₁)),

    driven by the piecewise linear path X through the observations. On each piece the equation has constant
    coefficients, so z is multiplied by a matrix exponential. The products of these matrices are computed by a parallel
    scan, in a number of rounds that grows with the logarithm of the number of observations: there is no solver, no
    step size and no tolerance. The nonlinearity is in the readout; further `layers` are driven by the outputs of the
    layer before them.

    Observation times may be irregular, values may be missing (NaN), and each series may have its own times and length.

    Reference: Walker, Yang, Cirone, Salvi and Lyons, *Structured Linear CDEs: Maximally Expressive and
    Parallel-in-Time Sequence Models*, NeurIPS 2025, arXiv:2505.17761.

    Arguments:
        channels: number of channels of the observations.
        hidden: number of channels of z; a multiple of `block`.
        outputs: number of outputs of the readout ℓ, which has one hidden layer; `None` returns z itself.
        block: size of the blocks. 1 is a diagonal, whose flow is commutative: it cannot see the order of observations
            of different channels. `hidden` is a dense matrix.
        layers: number of equations; each one but the first is driven by a nonlinear function of the states before it.
        affine: whether there is a term b_a.
        time, intensity: as in [`NeuralCDE`][seminode.models.NeuralCDE].
        init_scale: size of the initial matrices. The exponent of a step of size 1 in each channel has entries with the
            standard deviation init_scale/√block. With 1, the state of a long series grows until it overflows.

    Shapes: x (batch, times, channels) ↦ (batch, outputs), or with `ts="knots"` (times, batch, outputs).

    Example:
        >>> import torch
        >>> from seminode.models import LinearCDE
        >>> model = LinearCDE(channels=3, hidden=16, outputs=2, block=4)
        >>> x = torch.randn(4, 10, 3)
        >>> x[0, 2:5, 1] = float("nan")
        >>> model(x, lengths=torch.tensor([10, 7, 10, 4])).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        outputs: int | None = None,
        *,
        block: int = 4,
        layers: int = 1,
        affine: bool = True,
        time: bool = True,
        intensity: bool = False,
        init_scale: float = 0.3,
    ):
        super().__init__()
        check_flags(affine=affine, time=time, intensity=intensity)
        self.channels = check_count("channels", channels)
        self.hidden = check_count("hidden", hidden)
        if hidden % check_count("block", block):
            raise ValueError(f"block: expected a divisor of hidden = {hidden}, found {block}")
        self.block = block
        self.affine = affine
        self.time = time
        self.intensity = intensity
        control = time + channels * (1 + intensity)
        sizes = [control, *[time + hidden] * (check_count("layers", layers) - 1)]
        self.flows = nn.ModuleList(LinearFlow(size, hidden, block, affine, init_scale) for size in sizes)
        self.mixing = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in sizes[1:])
        self.readout = None
        if outputs is not None:
            last = nn.Linear(hidden, check_count("outputs", outputs))
            self.readout = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), last)

    def forward(
        self,
        x: Tensor,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Literal["knots"] | None = None,
    ) -> Tensor:
        """The output at the end of every series, or with `ts="knots"` after every observation.

        Arguments:
            x, times, lengths: as in [`NeuralCDE.forward`][seminode.models.NeuralCDE.forward]; gaps are filled along
                straight lines.
            ts: `"knots"` returns the outputs at the times of all observations. After the end of a series its output is
                constant.
        """
        if ts not in (None, "knots"):
            raise ValueError(f"ts: expected None or 'knots', found {ts!r}")
        data = with_channels(x, times, lengths, channels=self.channels, time=self.time, intensity=self.intensity)
        path = paths.linear(data, times, lengths=lengths).on_index_clock()
        values = path.evaluate(path.times)  # (knots, batch, channels)
        zs = values
        for i, flow in enumerate(self.flows):
            if i > 0:
                mixed = self.mixing[i - 1](zs)
                zs = torch.cat((values[..., :1], mixed), -1) if self.time else mixed
            zs = flow(zs, only_last=ts is None and i == len(self.flows) - 1)
        y = read_out(self.readout, zs)
        return y[-1] if ts is None else y

    def extra_repr(self) -> str:
        text = f"channels={self.channels}, hidden={self.hidden}, block={self.block}, layers={len(self.flows)}"
        return f"{text}, affine={self.affine}, time={self.time}, intensity={self.intensity}"


class LinearFlow(nn.Module):
    """The solution of dz = Σ_a (A_a z + b_a) dX_a at the knots of a piecewise linear path X.

    The affine term is a constant entry 1 that is appended to every block.

    Arguments:
        channels: number of channels of X.
        hidden, block, affine, init_scale: as in [`LinearCDE`][seminode.models.LinearCDE].
    """

    def __init__(self, channels: int, hidden: int, block: int, affine: bool = True, init_scale: float = 0.3):
        super().__init__()
        self.channels, self.hidden, self.block, self.affine = channels, hidden, block, affine
        blocks = hidden // block
        self.initial = nn.Linear(channels, hidden)
        spread = check_number("init_scale", init_scale) / (channels * block) ** 0.5
        self.matrices = nn.Parameter(spread * torch.randn(channels, blocks, block, block))
        self.offsets = nn.Parameter(torch.zeros(channels, blocks, block)) if affine else None

    def generators(self) -> Tensor:
        """A_a as (m, m, channels, blocks), with b_a in the last column if there is one."""
        matrices = self.matrices.movedim((2, 3), (0, 1))
        if self.offsets is None:
            return matrices
        wide = torch.cat((matrices, self.offsets.movedim(2, 0).unsqueeze(1)), 1)
        return torch.cat((wide, torch.zeros_like(wide[:1])))

    def forward(self, values: Tensor, only_last: bool = False) -> Tensor:
        """z at the knots, (knots, batch, hidden), or only at the last one, (1, batch, hidden)."""
        z0 = self.initial(values[0]).to(values.dtype)
        z0 = torch.unflatten(z0, -1, (-1, self.block)).movedim(-1, 0).unsqueeze(1)  # (m, 1, batch, blocks)
        if self.affine:
            z0 = torch.cat((z0, torch.ones_like(z0[:1])))
        flows = exponential(torch.matmul(values.diff(dim=0), self.generators().unsqueeze(2)).to(values.dtype))
        if only_last:
            zs = multiply(product_of(flows), z0).unsqueeze(2)
        else:
            zs = torch.cat((z0.unsqueeze(2), multiply(scan_products(flows), z0.unsqueeze(2))), 2)
        return zs[: self.block, 0].permute(1, 2, 3, 0).flatten(-2)
