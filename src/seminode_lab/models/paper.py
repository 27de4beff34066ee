"""The models of Kidger, Chen and Lyons, *"Hey, that's not an ODE": Faster ODE Adjoints via Seminorms* (ICML 2021).

Architectures, solver, tolerances and the continuous adjoint with its seminorm are as published, without the errors of
the published code. Options override the defaults: `speech_commands_cde(adjoint=sn.Backsolve(norm="mixed"))` is the
baseline of the paper.
"""

from __future__ import annotations

from typing import Any

from seminode.adjoints import Backsolve
from seminode.models.multiscale import MultiscaleCNF
from seminode.models.neural_cde import MatrixField, NeuralCDE
from seminode.models.symplectic import SymplecticODENet


def speech_commands_cde(**options: Any) -> NeuralCDE:
    """The neural CDE on Speech Commands: x (batch, 161, 20) ↦ (batch, 10); 88,940 parameters, 86,050 in the field.

    Piecewise linear control with time as channel 0, 90 hidden channels, a field of four hidden layers of 40.
    The tolerances are the loosest of the three published pairs.

    Arguments:
        options: of [`NeuralCDE`][seminode.models.NeuralCDE]; they override the published ones.

    >>> sum(p.numel() for p in speech_commands_cde().parameters())
    88940
    """
    options = {"rtol": 1e-3, "atol": 1e-6, "adjoint": Backsolve(), **options}
    field = MatrixField(90, 21, width=40, layers=4)
    return NeuralCDE(channels=20, hidden=90, outputs=10, field=field, path="linear", **options)


def pendulum_symoden(**options: Any) -> SymplecticODENet:
    """The Symplectic ODE-Net on the double pendulum: x0 (batch, 8), ts ↦ (times, batch, 8); 509,108 parameters.

    Arguments:
        options: of [`SymplecticODENet`][seminode.models.SymplecticODENet]; they override the published ones.

    >>> sum(p.numel() for p in pendulum_symoden().parameters())
    509108
    """
    options = {"rtol": 1e-4, "atol": 1e-4, "adjoint": Backsolve(), **options}
    return SymplecticODENet(**options)


def mnist_flow(hidden: int = 32, **options: Any) -> MultiscaleCNF:
    """The flow on MNIST: bytes (batch, 1, 28, 28) ↦ log p (batch,), with 12 blocks at three scales.

    Arguments:
        hidden: number of channels of the hidden layers; 32 and 64 as published.
        options: of [`MultiscaleCNF`][seminode.models.MultiscaleCNF]; they override the published ones.

    >>> sum(p.numel() for p in mnist_flow(32).parameters())
    281928
    """
    return _flow((1, 28, 28), hidden, 1e-5, options)


def cifar10_flow(hidden: int = 64, **options: Any) -> MultiscaleCNF:
    """The flow on CIFAR-10: bytes (batch, 3, 32, 32) ↦ log p (batch,), with 12 blocks at three scales.

    Arguments:
        hidden: number of channels of the hidden layers; 64 as published.
        options: of [`MultiscaleCNF`][seminode.models.MultiscaleCNF]; they override the published ones.

    >>> sum(p.numel() for p in cifar10_flow(64).parameters())
    1200600
    """
    return _flow((3, 32, 32), hidden, 0.05, options)


def _flow(shape: tuple[int, int, int], hidden: int, alpha: float, options: dict[str, Any]) -> MultiscaleCNF:
    # As published, the norm includes the log-probability.
    options = {"rtol": 1e-5, "atol": 1e-5, "norm": "mixed", "adjoint": Backsolve(), "alpha": alpha, **options}
    return MultiscaleCNF(shape, hidden, scales=3, blocks=4, **options)
