"""Models whose forward pass solves a differential equation, and the techniques around them."""

from __future__ import annotations

from . import paper
from .base import SolvingModule
from .cnf import CNF, ConcatMLP, ConvField
from .hamiltonian import HamiltonianNet
from .hypersolver import HyperSolver
from .multiscale import MultiscaleCNF
from .neural_cde import MatrixField, NeuralCDE
from .neural_ode import NeuralODE
from .ot_flow import OTFlow
from .regularisers import JacobianNorm, KineticEnergy, TotalDerivative, rnode
from .running import Regulariser, Running, penalty
from .spectral import SpectralTrajectory, train_spectral
from .steer import steer
from .symplectic import SymplecticODENet
from .traces import ExactTrace, Hutchinson, Trace

__all__ = [
    "CNF",
    "ConcatMLP",
    "ConvField",
    "ExactTrace",
    "HamiltonianNet",
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
    "paper",
    "penalty",
    "rnode",
    "steer",
    "train_spectral",
]
