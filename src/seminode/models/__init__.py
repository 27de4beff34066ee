"""Models whose forward pass solves a differential equation, and the techniques around them."""

from __future__ import annotations

from .base import SolvingModule
from .cnf import CNF, ConcatConv2d, ConcatLinear, ConcatMLP, ConvField, HollowMLP
from .derivatives import total_derivatives
from .ends import steer
from .hamiltonian import HamiltonianNet
from .hypersolver import HyperSolver
from .images import bits_per_dim
from .multiscale import MultiscaleCNF
from .neural_cde import MatrixField, NeuralCDE
from .neural_ode import NeuralODE
from .ot_flow import OTFlow
from .regularisers import JacobianNorm, KineticEnergy, TotalDerivative, rnode
from .running import Regulariser, Running, penalty
from .spectral import SpectralTrajectory, train_spectral
from .symplectic import SymplecticODENet
from .traces import ExactTrace, HollowTrace, Hutchinson, Trace

__all__ = [
    "CNF",
    "ConcatConv2d",
    "ConcatLinear",
    "ConcatMLP",
    "ConvField",
    "ExactTrace",
    "HamiltonianNet",
    "HollowMLP",
    "HollowTrace",
    "Hutchinson",
    "HyperSolver",
    "JacobianNorm",
    "KineticEnergy",
    "MatrixField",
    "MultiscaleCNF",
    "NeuralCDE",
    "NeuralODE",
    "OTFlow",
    "Regulariser",
    "Running",
    "SolvingModule",
    "SpectralTrajectory",
    "SymplecticODENet",
    "TotalDerivative",
    "Trace",
    "bits_per_dim",
    "penalty",
    "rnode",
    "steer",
    "total_derivatives",
    "train_spectral",
]
