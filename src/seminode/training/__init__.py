"""Helpers for training loops: logs of the cost of solves, files of trained models, and their export."""

from __future__ import annotations

from .costs import CostLog, solve_costs
from .exporting import UnrolledSolve, export_solve
from .files import load_model, save_model
from .lightning import lightning_callback

__all__ = [
    "CostLog",
    "UnrolledSolve",
    "export_solve",
    "lightning_callback",
    "load_model",
    "save_model",
    "solve_costs",
]
