"""What is compiled out of the graph of a field: evaluations, whole steps, and their pull-backs."""

from .pieces import large, pull_program, saving_programs, step_program
from .steps import (
    Tuned,
    Wanted,
    chosen_of,
    evaluation_program,
    key_of,
    no_sums,
    nodes_of,
    ratio_of,
    replaced,
    tolerances,
)

__all__ = [
    "Tuned",
    "Wanted",
    "chosen_of",
    "evaluation_program",
    "key_of",
    "large",
    "no_sums",
    "nodes_of",
    "pull_program",
    "ratio_of",
    "replaced",
    "saving_programs",
    "step_program",
    "tolerances",
]
