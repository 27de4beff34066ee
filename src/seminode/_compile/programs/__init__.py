"""What is compiled from the graph of a field: evaluations, whole steps, and their VJPs."""

from .coupled import coupled_step_program, undoing_program
from .pieces import large, saving_programs, step_program, vjp_program
from .steps import (
    Tuned,
    Wanted,
    chosen_of,
    end_of,
    evaluation_program,
    key_of,
    no_sums,
    nodes_of,
    ratio_of,
    replaced,
    tolerances,
    whole_step,
)

__all__ = [
    "Tuned",
    "Wanted",
    "chosen_of",
    "coupled_step_program",
    "evaluation_program",
    "key_of",
    "large",
    "no_sums",
    "nodes_of",
    "vjp_program",
    "end_of",
    "ratio_of",
    "whole_step",
    "replaced",
    "saving_programs",
    "step_program",
    "tolerances",
    "undoing_program",
]
