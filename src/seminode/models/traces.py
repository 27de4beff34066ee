r"""The divergence of a field along a solution: Δ′ = −tr(∂f/∂z), as a running integral, exact or estimated.

By the instantaneous change of variables (Chen et al., 2018, arXiv:1806.07366), log p(z(t)) grows at the rate
−tr(∂f/∂z). With z(0) = x and z(T) of density q, log p(x) = log q(z(T)) − Δ(T).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import check_count
from .running import Evaluation, Running

NOISES = ("gaussian", "rademacher")


class Trace(Running):
    """The rate −tr(∂f/∂z) of each sample; f must treat samples independently of each other.

    To write one, provide `needs_noise`, `noise` if so, and `rate`, as for any running integral.
    """

    name = "delta"
    noise: str = "gaussian"


class Hutchinson(Trace):
    """tr(∂f/∂z) ≈ vᵀ(∂f/∂z)v, whose mean over v is the trace, at the cost of one VJP.

    The v of a sample stays the same throughout a solve, so that the field remains a function of time and state
    (Grathwohl et al., 2019, arXiv:1810.01367). Gaussian noise has the variance 2‖S‖², where S is the symmetric part of
    ∂f/∂z; that of Rademacher noise, ±1, leaves the diagonal of S out, and is never larger.

    >>> Hutchinson("rademacher")
    Hutchinson('rademacher')
    """

    needs_noise = True

    def __init__(self, noise: str = "gaussian"):
        if noise not in NOISES:
            raise ValueError(f"noise: expected {' or '.join(map(repr, NOISES))}, found {noise!r}")
        self.noise = noise

    def rate(self, at: Evaluation) -> Tensor:
        assert at.noise is not None
        return -(at.vjp * at.noise).flatten(1).sum(1)

    def __repr__(self) -> str:
        return f"Hutchinson({self.noise!r})"


class ExactTrace(Trace):
    """tr(∂f/∂z) = Σᵢ eᵢᵀ(∂f/∂z)eᵢ, one VJP for each of the d dimensions of a sample: for low dimensions.

    Arguments:
        chunk: how many VJPs are computed at once, by `torch.func.vmap`; by default all of them.

    >>> ExactTrace()
    ExactTrace()
    """

    def __init__(self, chunk: int | None = None):
        self.chunk = None if chunk is None else check_count("chunk", chunk)

    def rate(self, at: Evaluation) -> Tensor:
        z = at.z
        _, pull = at._linearised
        d = z[0].numel()
        # Samples are independent: eᵢ in all of them at once gives the i-th row of each sample's own Jacobian.
        basis = torch.eye(d, dtype=z.dtype, device=z.device).view(d, 1, *z.shape[1:])

        def diagonal(e: Tensor) -> Tensor:
            return (pull(e.expand_as(z))[0] * e).flatten(1).sum(1)

        return -torch.func.vmap(diagonal, chunk_size=self.chunk)(basis).sum(0)

    def __repr__(self) -> str:
        return "ExactTrace()" if self.chunk is None else f"ExactTrace(chunk={self.chunk})"


def chosen_trace(trace: str | Trace, noise: str) -> Trace:
    """The trace that is meant by a name, or the object itself."""
    if isinstance(trace, Trace):
        return trace
    if trace == "hutchinson":
        return Hutchinson(noise)
    if trace == "exact":
        return ExactTrace()
    raise ValueError(f"trace: expected 'hutchinson', 'exact' or a Trace, found {trace!r}")
