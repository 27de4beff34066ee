"""The command `seminode`. A sub-command is an entry of `COMMANDS`, here or in the plug-in module."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

#: Offers a tuple `COMMANDS` of further commands. It is loaded by name: `seminode` does not import the laboratory.
PLUG_IN = "seminode_lab.commands"


class Command(NamedTuple):
    """A sub-command.

    Attributes:
        name: as typed after `seminode`.
        help: one line for the list of commands.
        module: the module that implements it.
        configure: the name of its function that adds arguments to a parser.
        run: the name of its function that does the work and returns the exit status.
    """

    name: str
    help: str
    module: str
    configure: str = "configure"
    run: str = "run"


COMMANDS = (
    Command("profile", "measure adjoints and solvers on your problem, recommend one", "seminode.diagnostics.command"),
)


def all_commands() -> tuple[Command, ...]:
    """The commands of this package and, if it is there, of the laboratory."""
    try:
        return (*COMMANDS, *importlib.import_module(PLUG_IN).COMMANDS)
    except ModuleNotFoundError as error:
        if error.name not in (PLUG_IN, PLUG_IN.partition(".")[0]):
            raise
        return COMMANDS


def missing_dependency(error: ImportError) -> str | None:
    """One line on a missing optional dependency and how to install it; `None` for any other failed import.

    >>> missing_dependency(ModuleNotFoundError("No module named 'scipy'", name="scipy"))
    "needs scipy, which is not installed: pip install 'seminode[lab]'"
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    if package in ("seminode", PLUG_IN.partition(".")[0]):
        return None
    return f"needs {package}, which is not installed: pip install 'seminode[lab]'"


def parser() -> argparse.ArgumentParser:
    """The parser with all sub-commands."""
    description = "Solve, differentiate and train neural differential equations in PyTorch."
    top = argparse.ArgumentParser(prog="seminode", description=description)
    top.add_argument("--version", action="version", version=f"seminode {_version()}")
    subparsers = top.add_subparsers(title="commands", dest="command", metavar="command")
    for command in all_commands():
        _add(subparsers, command)
    return top


def _add(subparsers: Any, command: Command) -> None:
    """Add a sub-command. If a dependency is missing, the command is listed and reports that when it is run."""
    try:
        module = importlib.import_module(command.module)
    except ImportError as error:
        reason = missing_dependency(error)
        if reason is None:
            raise
        stand_in = subparsers.add_parser(command.name, help=command.help, add_help=False)
        stand_in.add_argument("arguments", nargs="*")
        stand_in.set_defaults(run=_unavailable(command.name, reason), unavailable=True)
        return
    own = subparsers.add_parser(command.name, help=command.help)
    getattr(module, command.configure)(own)
    own.set_defaults(run=getattr(module, command.run))


def _unavailable(name: str, reason: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        print(f"seminode {name}: {reason}", file=sys.stderr)
        return 2

    return run


def _version() -> str:
    return getattr(sys.modules["seminode"], "__version__", "unknown")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; without one, print the help.

    Returns:
        The exit status: 0, 1 if the work failed, 2 if the arguments are invalid or a dependency is missing.

    >>> main(["profile", "nowhere"])
    2
    """
    top = parser()
    options, unknown = top.parse_known_args(argv)
    if unknown and not getattr(options, "unavailable", False):
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        top.print_help()
        return 0
    return options.run(options)
