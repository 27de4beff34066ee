"""Symplectic ODE-Net: a controlled mechanical system with learned mass matrix, potential and input matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._field.checks import check_count
from .._untyped import solve_ex
from .base import SolvingModule, check_channels, check_hidden
from .hamiltonian import mlp
from .products import vjp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


def solve_symmetric(A: Tensor, b: Tensor) -> Tensor:
    """A⁻¹b for symmetric A of shape (…, n, n) and b of shape (…, n, 1)."""
    if A.shape[-1] != 2:
        return solve_ex(A, b)[0]  # unlike `solve`, it does not synchronise with the device
    a, o, _, c = A.flatten(-2).unbind(-1)
    adjugate = torch.unflatten(torch.stack((c, -o, -o, a), -1), -1, (2, 2))
    return adjugate @ b / (a * c - o * o)[..., None, None]


def triangle(n: int) -> Tensor:
    """The 0/1 matrix (n(n+1)/2, n²) from the entries of L to L: diagonal entries first, then those below it by rows."""
    positions = [(i, i) for i in range(n)] + [(i, j) for i in range(n) for j in range(i)]
    return torch.eye(n * n)[[i * n + j for i, j in positions]]


class SymplecticField(nn.Module):
    """Hamilton's equations with torques for states (cos q, sin q, q′, u); see `SymplecticODENet`.

    Arguments:
        inverse_mass: module from (cos q, sin q), of shape (…, 2n), to the n(n+1)/2 entries of L: those of the diagonal
            first, then those below it row by row.
        potential: module from (cos q, sin q) to V, of shape (…, 1).
        input_matrix: module from (cos q, sin q) to g, of shape (…, n·inputs), row by row.
        dof: n, the number of angles.
        inputs: number of torques u.
        floor: ε of M⁻¹ = LLᵀ + ε I.
    """

    places: Tensor
    identity: Tensor

    def __init__(
        self,
        inverse_mass: nn.Module,
        potential: nn.Module,
        input_matrix: nn.Module,
        dof: int = 2,
        inputs: int = 2,
        floor: float = 0.1,
    ):
        super().__init__()
        self.dof, self.inputs, self.floor = dof, inputs, floor
        # This is the order of the parameters in a flat adjoint state, on which the norm `mixed_per_tensor` depends.
        self.inverse_mass = inverse_mass
        self.potential = potential
        self.input_matrix = input_matrix
        self.register_buffer("places", triangle(dof), persistent=False)
        self.register_buffer("identity", torch.eye(dof), persistent=False)

    def factor(self, entries: Tensor) -> Tensor:
        """L, of shape (…, n, n), from the outputs of the network `inverse_mass`."""
        return torch.unflatten(entries @ self.places, -1, (self.dof, self.dof))

    def squared(self, L: Tensor) -> Tensor:
        """LLᵀ + ε I."""
        return torch.add(L @ L.mT, self.identity, alpha=self.floor)

    def inverse_mass_matrix(self, angles: Tensor) -> Tensor:
        """M⁻¹ = LLᵀ + ε I as a function of angles (cos q, sin q)."""
        return self.squared(self.factor(self.inverse_mass(angles)))

    def actuation(self, angles: Tensor) -> Tensor:
        """g, of shape (…, n, inputs)."""
        return torch.unflatten(self.input_matrix(angles), -1, (self.dof, self.inputs))

    def turning(self, x: Tensor) -> Tensor:
        """∂(cos q, sin q)/∂q = (−sin q, cos q), of shape (…, 2, n)."""
        n = self.dof
        return torch.unflatten(torch.cat((-x[..., n : 2 * n], x[..., :n]), -1), -1, (2, n))

    def force(self, x: Tensor) -> Tensor:
        """∂V/∂q, of shape (…, n): the torques that balance the potential."""
        V, vjp_fn = vjp(self.potential, x[..., : 2 * self.dof])
        grad = torch.unflatten(vjp_fn(torch.ones_like(V))[0], -1, (2, self.dof))
        return (self.turning(x) * grad).sum(-2)

    def energy(self, x: Tensor) -> Tensor:
        """H = ½ q′ᵀM q′ + V, of shape (…)."""
        angles, w = x[..., : 2 * self.dof], x[..., 2 * self.dof : 3 * self.dof]
        p = solve_symmetric(self.inverse_mass_matrix(angles), w.unsqueeze(-1)).squeeze(-1)
        return 0.5 * (p * w).sum(-1) + self.potential(angles).squeeze(-1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        n = self.dof
        angles, w, u = torch.split(x, [2 * n, n, self.inputs], -1)
        turning = self.turning(x)
        dangles = (turning * w.unsqueeze(-2)).flatten(-2)

        def entries_and_potential(angles: Tensor) -> tuple[Tensor, Tensor]:
            return self.inverse_mass(angles), self.potential(angles)

        (entries, V), vjp_fn = vjp(entries_and_potential, angles)
        L = self.factor(entries)
        p = solve_symmetric(self.squared(L), w.unsqueeze(-1))

        # With v = Lᵀp and p held fixed, H = ½|v|² + ½ε|p|² + V has ∂H/∂L = p vᵀ. The VJP from L to the angles is linear
        # in its cotangent, and its own VJP maps the velocity of the angles to dL/dt: a JVP as two VJPs, whose
        # derivatives `torch.compile` supports.
        v = L.mT @ p
        ones = torch.ones_like(V)

        def vjp_to_angles(cotangent: Tensor) -> Tensor:
            return vjp_fn((cotangent, ones))[0]

        dH, jvp_fn = vjp(vjp_to_angles, (p * v.mT).flatten(-2) @ self.places.mT)
        dL = self.factor(jvp_fn(dangles)[0])

        dV = (turning * torch.unflatten(dH, -1, (2, n))).sum(-2)
        dp = self.actuation(angles) @ u.unsqueeze(-1) - dV.unsqueeze(-1)
        # q″ = M⁻¹p′ + (dM⁻¹/dt) p with dM⁻¹/dt = dL Lᵀ + L dLᵀ
        dw = L @ (L.mT @ dp + dL.mT @ p) + self.floor * dp + dL @ v
        return torch.cat((dangles, dw.squeeze(-1), torch.zeros_like(u)), -1)


class SymplecticODENet(SolvingModule):
    r"""Symplectic ODE-Net: Hamilton's equations for angles q with torques u, with learned M, V and g.

        M⁻¹ = LLᵀ + ε I,   H(q, p) = ½ pᵀM⁻¹(q) p + V(q)
        q′  = ∂H/∂p,       p′ = −∂H/∂q + g(q) u,      u′ = 0

    L, V and g are networks of (cos q, sin q), so they are continuous where an angle passes π. The state consists of the
    observed variables (cos q, sin q, q′, u), and p = M q′. Without torques H is conserved.

    Zhong, Dey and Chakraborty, *Symplectic ODE-Net: Learning Hamiltonian Dynamics with Control* (ICLR 2020,
    arXiv:1909.12077). The default widths and activation are those of the double pendulum in Kidger, Chen and Lyons
    (ICML 2021), who solve with rtol = atol = 1e-4.

    Arguments:
        dof: n, the number of angles.
        inputs: number of torques; by default the number of angles.
        mass_hidden, potential_hidden, input_hidden: widths of the hidden layers of the networks for L, V and g.
        floor: ε, a lower bound on the eigenvalues of M⁻¹.
        activation: a function that returns the activation module. The activation must be twice differentiable, so not
            ReLU.
        options: options of [`solve`][seminode.solve].

    `model(x0, ts)` maps states (cos q, sin q, q′, u) of shape (batch, 3n + inputs) to the states at all times,
    (times, batch, 3n + inputs). `model.field(t, x)` is the vector field; `model.inverse_mass`, `model.potential` and
    `model.input_matrix` are the networks. The motion determines M, V and g up to a common factor, and V up to a
    constant.

    Example:
        >>> import torch
        >>> from seminode.models.symplectic import SymplecticODENet
        >>> sum(parameter.numel() for parameter in SymplecticODENet().parameters())
        509108
        >>> model = SymplecticODENet(1, mass_hidden=(8,), potential_hidden=(8,), input_hidden=(8,))
        >>> x0 = torch.tensor([[1.0, 0.0, 0.5, 0.0]])  # cos q, sin q, q', u
        >>> model(x0, [0.0, 0.1, 0.2]).shape
        torch.Size([3, 1, 4])
        >>> model.control(x0).shape
        torch.Size([1, 1])
    """

    def __init__(
        self,
        dof: int = 2,
        inputs: int | None = None,
        mass_hidden: Sequence[int] = (400, 400, 400),
        potential_hidden: Sequence[int] = (300, 300),
        input_hidden: Sequence[int] = (300, 300),
        floor: float = 0.1,
        activation: Callable[[], nn.Module] = nn.Softplus,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        self.dof = check_count("dof", dof)
        self.inputs = dof if inputs is None else check_count("inputs", inputs)
        if not floor > 0.0:
            raise ValueError(f"floor: expected a positive number, found {floor}")
        outputs = {
            "mass_hidden": (mass_hidden, dof * (dof + 1) // 2),
            "potential_hidden": (potential_hidden, 1),
            "input_hidden": (input_hidden, dof * self.inputs),
        }
        networks = [
            mlp((2 * dof, *check_hidden(name, hidden), size), activation) for name, (hidden, size) in outputs.items()
        ]
        self.field = SymplecticField(*networks, dof=dof, inputs=self.inputs, floor=floor)

    @property
    def inverse_mass(self) -> nn.Module:
        return self.field.inverse_mass

    @property
    def potential(self) -> nn.Module:
        return self.field.potential

    @property
    def input_matrix(self) -> nn.Module:
        return self.field.input_matrix

    def forward(self, x0: Tensor, ts: Tensor | Sequence[float]) -> Tensor:
        """The observations at the times `ts`, starting at `x0` of shape (batch, channels): (times, batch, channels)."""
        check_channels("x0", x0, (3 * self.dof + self.inputs,), "states (cos q, sin q, q', u)")
        return self.solve(self.field, x0, ts).ys

    def energy(self, x: Tensor) -> Tensor:
        """The learned energy H = ½ q′ᵀM q′ + V, of shape x.shape[:-1], at (cos q, sin q, q′), with or without u."""
        self._check_observations(x)
        return self.field.energy(x)

    def control(self, x: Tensor, potential_gain: float = 2.0, damping: float = 1.0) -> Tensor:
        """Torques that invert the potential and damp the motion: u = gᵀ(g gᵀ)⁻¹(κ ∂V/∂q − d q′), of shape (…, inputs).

        With κ = 2 the closed loop moves in the potential −V, whose minima are the maxima of V. The damping d brings it
        to rest there.

        Arguments:
            x: observations (cos q, sin q, q′), with or without u.
            potential_gain: κ.
            damping: d.
        """
        self._check_observations(x)
        if self.inputs < self.dof:
            raise ValueError(f"control: expected at least as many inputs as angles, found {self.inputs} for {self.dof}")
        n = self.dof
        target = potential_gain * self.field.force(x) - damping * x[..., 2 * n : 3 * n]
        g = self.field.actuation(x[..., : 2 * n])
        return (g.mT @ solve_symmetric(g @ g.mT, target.unsqueeze(-1))).squeeze(-1)

    def _check_observations(self, x: Any) -> None:
        channels = (3 * self.dof, 3 * self.dof + self.inputs)
        check_channels("x", x, channels, "observations (cos q, sin q, q'), with or without u,")

    def extra_repr(self) -> str:
        text = f"dof={self.dof}, inputs={self.inputs}, floor={self.field.floor}"
        return ", ".join(filter(None, (text, super().extra_repr())))
