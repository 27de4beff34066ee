r"""The divergence of a field along a solution: Δ′ = −tr(∂f/∂z), as a running integral, exact or estimated.

By the instantaneous change of variables (Chen et al., 2018, arXiv:1806.07366), log p(z(t)) grows at the rate
−tr(∂f/∂z). With z(0) = x and z(T) of density q, log p(x) = log q(z(T)) − Δ(T).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._field.checks import check_count
from .running import Evaluation, Running

NOISES = ("gaussian", "rademacher")


class Trace(Running):
    """The rate −tr(∂f/∂z) of each sample; f must treat samples independently of each other.

    To write one, provide `needs_noise`, `noise` if so, and `rate`, as for any running integral. Where it asks for more
    than a callable, `check` refuses the fields that it cannot do.
    """

    name = "delta"
    noise: str = "gaussian"

    def check(self, field: Any) -> None:
        """Raise if this trace is none for such a field."""


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
        self.noise = check_noise(noise)

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
        z, d = at.z, at.z[0].numel()
        at.f, pull = at.linearised
        # Samples are independent: eᵢ in all of them at once gives the i-th row of each sample's own Jacobian.
        basis = torch.eye(d, dtype=z.dtype, device=z.device).view(d, 1, *z.shape[1:])

        def diagonal(e: Tensor) -> Tensor:
            return (pull(e.expand_as(z))[0] * e).flatten(1).sum(1)

        return -torch.func.vmap(diagonal, chunk_size=self.chunk)(basis).sum(0)

    def __repr__(self) -> str:
        return "ExactTrace()" if self.chunk is None else f"ExactTrace(chunk={self.chunk})"


class HollowTrace(Trace):
    """tr(∂f/∂z), exact, for fields fᵢ = τᵢ(zᵢ, hᵢ) whose hᵢ depends on all coordinates but zᵢ: one VJP in all.

    With h held fixed, fᵢ depends on zᵢ alone, so that the Jacobian is its diagonal, and pulling back ones reads it off
    (Chen and Duvenaud, 2019, arXiv:1912.03579). The field must have `conditioner(t, z)`, which is h, and
    `transformer(t, z, h)`, which is f, as [`HollowMLP`][seminode.models.cnf.HollowMLP] does.

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
        h = field.conditioner(at.t, at.z)  # a constant to the VJP below, though not to an adjoint
        f, pull = torch.func.vjp(lambda z: field.transformer(at.t, z, h), at.z)  # type: ignore[misc]
        if at.noise is None:
            at.f = f
        return -pull(torch.ones_like(f))[0].flatten(1).sum(1)

    def __repr__(self) -> str:
        return "HollowTrace()"


BY_NAME: dict[str, type[Trace]] = {"hutchinson": Hutchinson, "exact": ExactTrace, "hollow": HollowTrace}


def check_noise(noise: str) -> str:
    if noise not in NOISES:
        raise ValueError(f"noise: expected {' or '.join(map(repr, NOISES))}, found {noise!r}")
    return noise


def chosen_trace(trace: str | Trace, noise: str | None) -> Trace:
    """The trace that is meant by a name, or the object itself, which has a noise of its own."""
    if isinstance(trace, Trace):
        if noise is not None:
            raise ValueError(f"noise: expected None beside a Trace, which has its own, found {noise!r}")
        return trace
    if trace not in BY_NAME:
        raise ValueError(f"trace: expected {', '.join(map(repr, BY_NAME))} or a Trace, found {trace!r}")
    chosen = BY_NAME[trace]()
    if noise is not None:
        chosen.noise = check_noise(noise)  # which regularisers read, too
    return chosen
