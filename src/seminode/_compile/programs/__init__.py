"""What is compiled from the graph of a field: evaluations, whole steps, and their VJPs."""

from .coupled import coupled_step_program, undoing_program
from .pieces import compiled_saving_evaluation, large, saving_programs, step_program, vjp_program
from .saving import SavingEvaluation
from .start import StartClock, Started, StartProgram, first_length, start_program
from .steps import (
    Tuned,
    Wanted,
    chosen_of,
    dense,
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
    "SavingEvaluation",
    "StartClock",
    "StartProgram",
    "Started",
    "Tuned",
    "Wanted",
    "chosen_of",
    "compiled_saving_evaluation",
    "dense",
    "coupled_step_program",
    "evaluation_program",
    "first_length",
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
    "start_program",
    "step_program",
    "tolerances",
    "undoing_program",
]
