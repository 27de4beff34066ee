"""Models whose forward pass solves a differential equation: neural ODEs, neural CDEs, flows and Hamiltonian systems.

Also regularisers, hypersolvers and spectral training, which make their solves cheaper.
"""

from __future__ import annotations

import importlib

from .base import SolvingModule
from .cnf import CNF, Activation, ConcatConv2d, ConcatLinear, ConcatMLP, ConvField, HollowMLP
from .derivatives import total_derivatives
from .ends import steer
from .flow_matching import (
    OptimalTransportPath,
    ProbabilityPath,
    TrigonometricPath,
    VariancePreservingPath,
    flow_matching_loss,
    flow_sample,
    minibatch_coupling,
    sampling_preset,
)
from .hamiltonian import HamiltonianNet
from .hypersolver import HyperSolver
from .images import bits_per_dim
from .latent_ode import ELBO, LatentField, LatentODE, kl_annealing
from .linear_cde import LinearCDE
from .log_ncde import LogNCDE
from .multiscale import MultiscaleCNF
from .neural_cde import MatrixField, NeuralCDE, PathKind
from .neural_ode import NeuralODE
from .ode_rnn import ODERNN, GRUODECell
from .ot_flow import OTFlow
from .regularisers import JacobianNorm, KineticEnergy, TotalDerivative, rnode
from .running import Noise, Regulariser, Running, penalty
from .spectral import SpectralTrajectory, train_spectral
from .step_costs import SolverError, StepRegulariser, Stiffness
from .symplectic import SymplecticODENet
from .traces import ExactTrace, HollowTrace, Hutchinson, Trace, TraceName

__all__ = [
    "CNF",
    "ELBO",
    "Activation",
    "ConcatConv2d",
    "ConcatLinear",
    "ConcatMLP",
    "ConvField",
    "ExactTrace",
    "GRUODECell",
    "HamiltonianNet",
    "HollowMLP",
    "HollowTrace",
    "Hutchinson",
    "HyperSolver",
    "JacobianNorm",
    "KineticEnergy",
    "LatentField",
    "LatentODE",
    "LinearCDE",
    "LogNCDE",
    "MatrixField",
    "MultiscaleCNF",
    "NeuralCDE",
    "NeuralODE",
    "Noise",
    "ODERNN",
    "OTFlow",
    "OptimalTransportPath",
    "PathKind",
    "ProbabilityPath",
    "Regulariser",
    "Running",
    "SolverError",
    "SolvingModule",
    "SpectralTrajectory",
    "StepRegulariser",
    "Stiffness",
    "SymplecticODENet",
    "TotalDerivative",
    "Trace",
    "TraceName",
    "TrigonometricPath",
    "VariancePreservingPath",
    "bits_per_dim",
    "flow_matching_loss",
    "flow_sample",
    "kl_annealing",
    "minibatch_coupling",
    "penalty",
    "rnode",
    "sampling_preset",
    "steer",
    "total_derivatives",
    "train_spectral",
]


def __getattr__(name: str) -> object:
    if name in ("paper", "pendulum"):  # which have moved to the laboratory
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
