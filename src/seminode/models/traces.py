r"""The running integral Δ′ = −tr(∂f/∂z) of the divergence of a field, with an exact or an estimated trace.

By the instantaneous change of variables (Chen et al., 2018, arXiv:1806.07366), d log p(z(t))/dt = −tr(∂f/∂z). If
z(0) = x and z(T) has density q, then log p(x) = log q(z(T)) − Δ(T).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .._field.checks import check_count
from .running import Evaluation, Noise, Running

#: Names of the traces.
TraceName = Literal["hutchinson", "exact", "hollow"]


class Trace(Running):
    """A running integral with the rate −tr(∂f/∂z) per sample; f must treat samples independently of each other.

    Reference: Chen, Rubanova, Bettencourt and Duvenaud, *Neural Ordinary Differential Equations*, NeurIPS 2018,
    arXiv:1806.07366.

    A subclass provides:

    1. `needs_noise` and `rate`, as every running integral;
    2. `noise`: the distribution of the noise, if it needs noise;
    3. `check(field)`: raises an error if the trace does not support the field. By default every callable is supported.

    Example:
        A field whose trace is known, f = −z in d dimensions with tr(∂f/∂z) = −d:

        >>> import torch
        >>> from seminode.models import CNF, Trace
        >>> class Known(Trace):
        ...     def rate(self, at):
        ...         return torch.full_like(at.z[:, 0], at.z.shape[1])
        >>> flow = CNF(lambda t, z: -z, trace=Known(), rtol=1e-5)
        >>> flow.log_prob(torch.zeros(1, 2))  # of N(0, e²) at 0: −log 2π − 2
        tensor([-3.8379])
    """

    name = "delta"
    noise: Noise = "gaussian"

    def check(self, field: Any) -> None:
        """Raise an error if this trace does not support the field."""


class Hutchinson(Trace):
    """Hutchinson's estimate tr(∂f/∂z) ≈ vᵀ(∂f/∂z)v, unbiased, at the cost of one VJP.

    v is constant during a solve, so that the field remains a function of time and state (Grathwohl et al., 2019,
    arXiv:1810.01367). With Gaussian noise the variance is 2‖S‖²_F, where S is the symmetric part of ∂f/∂z. With
    Rademacher noise (±1) the diagonal of S does not contribute, so the variance is never larger.

    Arguments:
        noise: `"gaussian"` or `"rademacher"`.

    >>> Hutchinson("rademacher")
    Hutchinson('rademacher')
    """

    needs_noise = True

    def __init__(self, noise: Noise = "gaussian"):
        self.noise = check_noise(noise)

    def rate(self, at: Evaluation) -> Tensor:
        assert at.noise is not None
        return -(at.vjp * at.noise).flatten(1).sum(1)

    def __repr__(self) -> str:
        return f"Hutchinson({self.noise!r})"


class ExactTrace(Trace):
    """tr(∂f/∂z) = Σᵢ eᵢᵀ(∂f/∂z)eᵢ with one VJP for each of the d dimensions of a sample; for small d.

    Reference: as for [`Trace`][seminode.models.Trace].

    Arguments:
        chunk: number of VJPs that `torch.func.vmap` computes at once; by default all of them.

    >>> ExactTrace()
    ExactTrace()
    """

    def __init__(self, chunk: int | None = None):
        self.chunk = None if chunk is None else check_count("chunk", chunk)

    def rate(self, at: Evaluation) -> Tensor:
        z, d = at.z, at.z[0].numel()
        at.f, vjp_fn = at.linearised
        # Samples are independent: one VJP with eᵢ in all samples gives the i-th row of the Jacobian of each.
        basis = torch.eye(d, dtype=z.dtype, device=z.device).view(d, 1, *z.shape[1:])

        def diagonal(e: Tensor) -> Tensor:
            return (vjp_fn(e.expand_as(z))[0] * e).flatten(1).sum(1)

        return -torch.func.vmap(diagonal, chunk_size=self.chunk)(basis).sum(0)

    def __repr__(self) -> str:
        return "ExactTrace()" if self.chunk is None else f"ExactTrace(chunk={self.chunk})"


class HollowTrace(Trace):
    """The exact tr(∂f/∂z) with one VJP, for fields fᵢ = τᵢ(zᵢ, hᵢ) where hᵢ depends on all coordinates but zᵢ.

    With h held fixed, fᵢ depends on zᵢ only, so the Jacobian is diagonal and the VJP with a vector of ones is its
    diagonal (Chen and Duvenaud, 2019, arXiv:1912.03579). The field must have the methods `conditioner(t, z)`, which
    returns h, and `transformer(t, z, h)`, which returns f, as [`HollowMLP`][seminode.models.cnf.HollowMLP] does.

    >>> HollowTrace()
    HollowTrace()
    """

    def check(self, field: Any) -> None:
        if not (hasattr(field, "conditioner") and hasattr(field, "transformer")):
            raise TypeError(
                "trace: 'hollow' expects a field with conditioner and transformer, such as HollowMLP, "
                f"found {type(field).__name__}"
            )

    def rate(self, at: Evaluation) -> Tensor:
        field: Any = at.velocity
        h = field.conditioner(at.t, at.z)  # constant for the VJP below, but not for the adjoint of the solve
        f, vjp_fn = torch.func.vjp(lambda z: field.transformer(at.t, z, h), at.z)  # type: ignore[misc]
        if at.noise is None:
            at.f = f
        return -vjp_fn(torch.ones_like(f))[0].flatten(1).sum(1)

    def __repr__(self) -> str:
        return "HollowTrace()"


BY_NAME: dict[TraceName, type[Trace]] = {"hutchinson": Hutchinson, "exact": ExactTrace, "hollow": HollowTrace}


def check_noise(noise: Noise) -> Noise:
    if noise not in get_args(Noise):
        raise ValueError(f"noise: expected {' or '.join(map(repr, get_args(Noise)))}, found {noise!r}")
    return noise


def make_trace(trace: TraceName | Trace, noise: Noise | None) -> Trace:
    """The trace of a name with the given noise, or the `Trace` itself, which already has a noise."""
    if isinstance(trace, Trace):
        if noise is not None:
            raise ValueError(f"noise: expected None with a Trace, which has its own, found {noise!r}")
        return trace
    if trace not in BY_NAME:
        raise ValueError(f"trace: expected {', '.join(map(repr, BY_NAME))} or a Trace, found {trace!r}")
    made = BY_NAME[trace]()
    if noise is not None:
        made.noise = check_noise(noise)  # also used by regularisers, if the trace itself needs no noise
    return made
