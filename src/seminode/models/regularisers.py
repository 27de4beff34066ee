"""Running costs that make a learned differential equation cheaper to solve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from .._field.checks import check_count, check_number
from .derivatives import total_derivatives
from .running import Evaluation, Regulariser, per_sample_mean

#: Names of the published experiments of `TotalDerivative.preset`.
TotalDerivativePreset = Literal["mnist-classification", "latent-ode", "mnist-flow", "tabular-flow"]


@dataclass(frozen=True)
class KineticEnergy(Regulariser):
    r"""The kinetic energy of RNODE, ½∫ mean(f(t, z)²) dt.

    Among all paths between two points, a straight line at constant speed minimises it. The mean is over all axes of z
    but the first.

    Reference: Finlay, Jacobsen, Nurbekyan and Oberman, *How to Train Your Neural ODE: the World of Jacobian and
    Kinetic Regularization*, ICML 2020, arXiv:2002.02798.

    Arguments:
        weight: λ; 0.01 as published.

    Example:
        >>> import torch
        >>> from seminode.models.running import Evaluation
        >>> z = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
        >>> KineticEnergy().rate(Evaluation(lambda t, z: 2 * z, torch.tensor(0.0), z))
        tensor([10.,  4.])
    """

    weight: float = 0.01
    name = "kinetic"

    def __post_init__(self) -> None:
        check_number("weight", self.weight)

    def rate(self, at: Evaluation) -> Tensor:
        return 0.5 * per_sample_mean(at.f.square())


@dataclass(frozen=True)
class JacobianNorm(Regulariser):
    r"""The Jacobian norm of RNODE, ∫ mean((vᵀ∂f/∂z)²) dt, with one sample v of the noise per solve.

    Its expectation is ∫ ‖∂f/∂z‖²_F / dim(z) dt. With a small Jacobian, neighbouring solutions have similar velocities.
    Hutchinson's estimate of the trace uses the same VJP, which is computed only once for both.

    Reference: as for [`KineticEnergy`][seminode.models.regularisers.KineticEnergy].

    Arguments:
        weight: λ; 0.01 as published.

    Example:
        >>> import torch
        >>> from seminode.models.running import Evaluation
        >>> z = torch.zeros(1, 2)
        >>> JacobianNorm().rate(Evaluation(lambda t, z: 2 * z, torch.tensor(0.0), z, noise=torch.ones(1, 2)))
        tensor([4.])
    """

    weight: float = 0.01
    name = "jacobian"
    needs_noise = True

    def __post_init__(self) -> None:
        check_number("weight", self.weight)

    def rate(self, at: Evaluation) -> Tensor:
        return per_sample_mean(at.vjp.square())


def rnode(kinetic: float = 0.01, jacobian: float = 0.01) -> tuple[KineticEnergy, JacobianNorm]:
    """Both costs of RNODE with the given weights, λ_K·½∫ mean(f²) dt + λ_J·∫ mean((vᵀ∂f/∂z)²) dt.

    Reference: Finlay et al., *How to Train Your Neural ODE*, ICML 2020, arXiv:2002.02798.

    Arguments:
        kinetic: λ_K, the weight of [`KineticEnergy`][seminode.models.KineticEnergy].
        jacobian: λ_J, the weight of [`JacobianNorm`][seminode.models.JacobianNorm].

    >>> rnode(jacobian=0.05)
    (KineticEnergy(weight=0.01), JacobianNorm(weight=0.05))
    """
    return KineticEnergy(kinetic), JacobianNorm(jacobian)


@dataclass(frozen=True)
class TotalDerivative(Regulariser):
    r"""The cost of TayNODE, ∫ mean((dᴷz/dtᴷ)²) dt, with total derivatives along the solution.

    A solver of order p takes long steps where the derivative of order p + 1 is small. The mean is over all axes of z
    but the first. K = 1 gives twice the kinetic energy.

    Reference: Kelly, Bettencourt, Johnson and Duvenaud, *Learning Differential Equations that are Easy to Solve*,
    NeurIPS 2020, arXiv:2007.04504.

    Arguments:
        order: K, at least 1. The field should be differentiable K times: the cost does not detect the kinks of a ReLU.
        weight: λ. [`preset`][seminode.models.regularisers.TotalDerivative.preset] returns published values of K and λ.

    Example:
        >>> import torch
        >>> from seminode.models.running import Evaluation
        >>> z = torch.tensor([[1.0, 3.0]])
        >>> TotalDerivative(2, 1e-2).rate(Evaluation(lambda t, z: t * z, torch.tensor(0.0), z))  # z″ = (1 + t²)z
        tensor([5.])
        >>> TotalDerivative.preset("latent-ode")
        TotalDerivative(order=3, weight=0.01)
    """

    order: int
    weight: float
    name: str = field(init=False, repr=False)

    #: (order, weight) of the published experiments, by name.
    PRESETS: ClassVar[dict[TotalDerivativePreset, tuple[int, float]]] = {
        "mnist-classification": (3, 6e-5),
        "latent-ode": (3, 1e-2),
        "mnist-flow": (2, 3e-4),
        "tabular-flow": (2, 1e-2),
    }

    def __post_init__(self) -> None:
        check_count("order", self.order)
        check_number("weight", self.weight)
        object.__setattr__(self, "name", f"derivative{self.order}")

    @classmethod
    def preset(cls, name: TotalDerivativePreset) -> TotalDerivative:
        """The order and weight of a published experiment, by its name in `PRESETS`."""
        if name not in cls.PRESETS:
            raise ValueError(f"name: expected one of {', '.join(cls.PRESETS)}, found {name!r}")
        return cls(*cls.PRESETS[name])

    def rate(self, at: Evaluation) -> Tensor:
        if self.order == 1:
            return per_sample_mean(at.f.square())
        first, *_, last = total_derivatives(at.velocity, at.t, at.z, self.order)
        at.__dict__.setdefault("f", first)  # cached, so that other rates do not evaluate f again
        return per_sample_mean(last.square())
