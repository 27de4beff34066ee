"""The laboratory's sub-commands of `seminode`, which finds them here by name."""

from __future__ import annotations

from seminode.cli import Command

_HERE = "seminode_lab.commands"

COMMANDS = (
    Command("data", "list, check and download the data sets", "seminode_lab.data.command"),
    Command("estimate", "measure one update of every row of a preset: hours, memory, evaluations", f"{_HERE}.estimate"),
    Command("run", "train one model of the paper", f"{_HERE}.run"),
    Command("sweep", "train all models of a preset, in several processes", f"{_HERE}.sweep"),
    Command(
        "reproduce",
        "make all runs, tables, figures and the report",
        f"{_HERE}.report",
        "configure_reproduce",
        "run_reproduce",
    ),
    Command(
        "report",
        "make tables, figures and the report from finished runs",
        f"{_HERE}.report",
        "configure_report",
        "run_report",
    ),
    Command("measure", "measure gradients on one batch, with the weights of runs", f"{_HERE}.measure"),
    Command("table", "print tables from finished runs", f"{_HERE}.parts", "configure_table", "run_table"),
    Command("figure", "draw figures from finished runs", f"{_HERE}.parts", "configure_figure", "run_figure"),
    Command("bench", "compare with other libraries (in a clone of the repository)", f"{_HERE}.bench"),
)
