"""Models whose forward pass solves a differential equation, and the techniques around them."""

from __future__ import annotations

from .base import SolvingModule
from .neural_cde import MatrixField, NeuralCDE
from .neural_ode import NeuralODE
from .running import Regulariser, Running, penalty
from .steer import steer

__all__ = ["MatrixField", "NeuralCDE", "NeuralODE", "Regulariser", "Running", "SolvingModule", "penalty", "steer"]
