"""Hamiltonian neural networks: fields derived from a learned energy, which every solution conserves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._field.checks import check_count, check_flags
from ..adjoints import BY_NAME, Replay
from ..adjoints._discrete.sweep import DiscreteAdjoint
from ..controllers import Controller
from ..solvers import Leapfrog
from .base import SolvingModule, check_channels, check_hidden
from .products import vjp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers of the given widths with activations between them, initialised by PyTorch's defaults."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class HamiltonianField(nn.Module):
    """q′ = ∂H/∂p, p′ = −∂H/∂q for states (q, p), where H = T(p) + V(q) or one network of (q, p)."""

    def __init__(self, dim: int, hidden: Sequence[int], separable: bool, activation: Callable[[], nn.Module]):
        super().__init__()
        self.dim = dim
        self.separable = separable
        if separable:
            self.kinetic = mlp((dim, *hidden, 1), activation)
            self.potential = mlp((dim, *hidden, 1), activation)
        else:
            self.hamiltonian = mlp((2 * dim, *hidden, 1), activation)

    def energy(self, x: Tensor) -> Tensor:
        if self.separable:
            q, p = x.chunk(2, -1)
            return (self.kinetic(p) + self.potential(q)).squeeze(-1)
        return self.hamiltonian(x).squeeze(-1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        H, vjp_fn = vjp(self.energy, x)  # samples are independent: one VJP gives the gradients of all
        dq, dp = vjp_fn(torch.ones_like(H))[0].chunk(2, -1)
        return torch.cat((dp, -dq), -1)


class HamiltonianNet(SolvingModule):
    """Hamiltonian neural network: Hamilton's equations of a learned energy.

        q′ = ∂H/∂p,   p′ = −∂H/∂q,   H(q, p) = T(p) + V(q)   or   H(q, p)

    The solution conserves H up to the error of the solver, so a learned system neither gains nor loses energy over long
    times. Greydanus, Dzamba and Yosinski, *Hamiltonian Neural Networks* (NeurIPS 2019, arXiv:1906.01563), fit the field
    to known derivatives; `HamiltonianNet` can also be trained through a solve.

    With fixed steps, the default solver is [`Leapfrog`][seminode.Leapfrog] if H is separable and the adjoint is a
    discrete one: then the energy error stays bounded over any number of steps. With adaptive steps, which are the
    default, it is `dopri5`.

    Arguments:
        dim: number of coordinates q, which is also the number of momenta p.
        hidden: widths of the hidden layers of each network; the default is that of the paper.
        separable: whether H = T(p) + V(q) with one network each, as in most mechanical systems, or H is one network of
            (q, p).
        activation: a function that returns the activation module. The activation must be twice differentiable, so not
            ReLU.
        options: options of [`solve`][seminode.solve].

    `model(x0, ts)` maps states (q, p) of shape (batch, 2·dim) to the states at all times, (times, batch, 2·dim).
    `model.field(t, x)` is the vector field. `model.energy(x)` is H, of shape (batch,), determined up to a constant.

    Example:
        >>> import torch
        >>> from seminode.models.hamiltonian import HamiltonianNet
        >>> model = HamiltonianNet(1, hidden=(16,), rtol=1e-9, atol=1e-9).double()
        >>> x0 = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
        >>> xs = model(x0, [0.0, 1.0, 2.0])
        >>> xs.shape
        torch.Size([3, 2, 2])
        >>> bool((model.energy(xs) - model.energy(x0)).abs().max() < 1e-7)
        True
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (200, 200),
        separable: bool = True,
        activation: Callable[[], nn.Module] = nn.Tanh,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        self.dim = check_count("dim", dim)
        check_flags(separable=separable)
        self.field = HamiltonianField(dim, check_hidden("hidden", hidden), separable, activation)

    @property
    def separable(self) -> bool:
        return self.field.separable

    def forward(self, x0: Tensor, ts: Tensor | Sequence[float]) -> Tensor:
        """The states (q, p) at the times `ts`, starting at `x0` of shape (batch, 2·dof): (times, batch, 2·dof)."""
        self._check("x0", x0)
        if self._wants_leapfrog():
            return self.solve(self.field, x0, ts, solver=Leapfrog(separable=True)).ys
        return self.solve(self.field, x0, ts).ys

    def _wants_leapfrog(self) -> bool:
        """Whether leapfrog is possible, and the options do not say otherwise."""
        options = self.options
        controller, adjoint = options.get("controller"), options.get("adjoint", Replay())
        kind = BY_NAME.get(adjoint) if isinstance(adjoint, str) else type(adjoint)
        fixed = isinstance(controller, Controller) and not controller.adaptive
        discrete = kind is not None and issubclass(kind, DiscreteAdjoint)
        return self.separable and fixed and discrete and not {"solver", "compile"} & set(options)

    def energy(self, x: Tensor) -> Tensor:
        """H(q, p), of shape x.shape[:-1]."""
        self._check("x", x)
        return self.field.energy(x)

    def _check(self, name: str, x: Any) -> None:
        check_channels(name, x, (2 * self.dim,), "states (q, p)")

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"dim={self.dim}, separable={self.separable}", super().extra_repr())))
