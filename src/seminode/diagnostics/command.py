"""The command `seminode profile module:factory`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import torch

from .plots import check_matplotlib
from .profile import profile

REQUIRED = ("field", "y0", "ts", "loss")
KNOWN = tuple(inspect.signature(profile).parameters)

DESCRIPTION = """\
Measure all adjoints with a few solvers, eager and compiled, on your own problem, and recommend one.

The target is module:factory or path/to/file.py:factory. factory() takes no arguments and returns a mapping or a
dataclass with field, y0, ts and loss. It may contain further arguments of seminode.profile: args, rtol, atol, jumps,
norm, params, controller, adjoints, solvers, ... Options of the command override them."""


class Refused(Exception):
    """Invalid input. The message is one line."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="module:factory", help="the function that returns the problem")
    parser.add_argument("--rtol", type=float, help="relative tolerance")
    parser.add_argument("--atol", type=float, help="absolute tolerance")
    names: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "NAME"}
    parser.add_argument("--adjoint", dest="adjoints", help="only these, such as Direct or 'Checkpointed(4)'", **names)
    parser.add_argument("--solver", dest="solvers", help="only these, such as dopri5 tsit5", **names)
    parser.add_argument("--no-compile", action="store_true", help="do not measure compiled contenders")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed runs of each contender (default: 3)")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds for the reference and for each row (default: 30)"
    )
    parser.add_argument("--reference", type=float, metavar="RTOL", help="rtol of the reference (default: 1e-10)")
    parser.add_argument("--tolerances", type=float, nargs="+", metavar="RTOL", help="additional values of rtol")
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads of PyTorch")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="plot errors against work (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure the problem, print the table and write the files."""
    threads = torch.get_num_threads()
    try:
        _check_files(options)
        if options.threads is not None:
            torch.set_num_threads(_threads(options.threads))
        given = _arguments(options)
        with_defaults = {name: given.pop(name) for name in REQUIRED}
        try:
            found = profile(*with_defaults.values(), **given)
        except (ValueError, TypeError) as error:
            # Messages about arguments begin with the name. Other errors are the user's own and keep their traceback.
            if re.match(rf"({'|'.join(KNOWN)})\b[^:\n]*: ", str(error)):
                raise Refused(_renamed(str(error))) from error
            raise
        _write(found, options)
    except Refused as reason:
        print(f"seminode profile: {reason}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)
    return 0


def _renamed(message: str) -> str:
    """The message with the names of the command's options."""
    message = re.sub(r"^(adjoint|solver)s\[\d+\]", r"--\1", message)
    return " ".join(message.split())


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `profile`, from the factory and from the options."""
    given = _problem(options.target)
    for name in ("rtol", "atol", "adjoints", "solvers", "repeats", "time_limit", "reference", "tolerances"):
        value = getattr(options, name)
        if value is not None:
            given[name] = value
    if options.no_compile:
        given["compile"] = False
    return given


def _problem(target: str) -> dict[str, Any]:
    """The result of the factory."""
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        refuse(f"expected module:factory or file.py:factory, found {target!r}")
    module = _from_file(place) if place.endswith(".py") else _imported(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            refuse(f"{place} has no {name!r}; expected a function that returns the problem{_candidates(module)}")
        found = getattr(found, part)
    if not callable(found):
        refuse(f"{target}: expected a function, found {type(found).__name__}")
    return _checked(target, found())


def _candidates(module: ModuleType) -> str:
    functions = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    return f". It has {', '.join(sorted(functions)[:8])}" if functions else ""


def _checked(target: str, problem: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(problem) and not isinstance(problem, type):
        # Not asdict(): it would copy every tensor.
        problem = {each.name: getattr(problem, each.name) for each in dataclasses.fields(problem)}
    if not isinstance(problem, Mapping):
        kind = type(problem).__name__
        refuse(f"{target}() returned {kind}; expected a mapping or a dataclass with {', '.join(REQUIRED)}")
    given = dict(cast("Mapping[str, Any]", problem))
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        refuse(f"{target}() lacks {', '.join(missing)}; found {', '.join(map(str, given)) or 'nothing'}")
    unknown = [str(name) for name in given if name not in KNOWN]
    if unknown:
        refuse(f"{target}() has unknown {', '.join(unknown)}; expected some of {', '.join(KNOWN)}")
    return given


def _imported(name: str) -> ModuleType:
    """Import a module that is installed or in the current directory."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If another module is missing, the traceback shows which one.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        refuse(f"no module named {name!r} on the path or in {os.getcwd()}; expected module:factory or file.py:factory")
    except (TypeError, ValueError):
        refuse(f"{name!r} is not the name of a module; expected module:factory or file.py:factory")


def _from_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        refuse(f"no file {place!r}; expected module:factory or file.py:factory")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def _threads(count: int) -> int:
    if count < 1:
        refuse(f"--threads: expected a whole number of at least 1, found {count}")
    return count


def _check_files(options: argparse.Namespace) -> None:
    """Check before measuring that the results can be written."""
    for name, path in (("--draw", options.draw), ("--json", options.json)):
        if path is None:
            continue
        if path.is_dir():
            refuse(f"{name}: expected a file, found the directory {str(path)!r}")
        if not path.parent.is_dir():
            refuse(f"{name}: there is no directory {str(path.parent)!r}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            refuse(f"{name}: {str(path)!r} cannot be written")
    if options.draw is not None:
        try:
            check_matplotlib()
        except ImportError as error:
            refuse(f"--{error}")
        if options.draw.suffix.lower() not in (".png", ".pdf", ".svg", ".jpg", ".jpeg"):
            refuse(f"--draw: expected a file ending in .png, .pdf, .svg or .jpg, found {str(options.draw)!r}")


def _write(found: Any, options: argparse.Namespace) -> None:
    for name, path, write in (("--draw", options.draw, found.draw), ("--json", options.json, found.to_json)):
        if path is not None:
            try:
                write(path)
            except (OSError, ValueError) as error:
                raise Refused(f"{name}: {error}") from error


def refuse(message: str) -> NoReturn:
    raise Refused(message)
