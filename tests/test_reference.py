"""The API page keeps its promise: an entry for every public name, each with an example that runs and its arguments."""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from project import ROOT

from seminode.adjoints._continuous.strategy import ContinuousAdjoint
from seminode.controllers import Adaptive

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n((?: {6}.*\n)*))?", re.MULTILINE)
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")
MODULES = (
    *("seminode", "seminode.models", "seminode.paths", "seminode.diagnostics", "seminode.training"),
    "seminode_lab.data",
)
#: Public names without an entry, and why.
NO_ENTRY = {
    "seminode.models.Activation": "a type alias, described where it is an argument",
    "seminode.models.Noise": "a type alias, described where it is an argument",
    "seminode.models.PathKind": "a type alias, described where it is an argument",
    "seminode.models.TraceName": "a type alias, described where it is an argument",
    "seminode_lab.data.CATALOGUE": "a constant; a table in docs/data.md",
}
#: Entries whose examples are shown but not run, and why.
NOT_RUN = {
    "seminode.training.lightning_callback": "Lightning is not always installed; a test of docs/training.md uses it",
    "seminode_lab.data.speech.speech_commands": "the data must be downloaded",
    "seminode_lab.data.mnist.mnist": "the data must be downloaded",
    "seminode_lab.data.cifar10": "the data must be downloaded",
    "seminode_lab.data.pendulum.pendulum": "the simulation takes ten seconds",
}


class Entry(NamedTuple):
    name: str
    thing: Any
    options: str


def named(name: str) -> Any:
    """What a dotted name stands for; modules may have functions of their own name."""
    parent, _, last = name.rpartition(".")
    module = importlib.import_module(parent)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(name)


def members(options: str) -> list[str] | None:
    """The members that the page shows: all of them if nothing is said."""
    if "members: false" in options:
        return []
    listed = re.findall(r"^ +members: \[(.*)\]$", options, re.MULTILINE)
    return listed[0].split(", ") if listed else None


def entries() -> Iterator[Entry]:
    """Those of a module are its members."""
    for name, options in ENTRY.findall(PAGE):
        thing = named(name)
        if isinstance(thing, ModuleType):
            shown = members(options)
            assert shown, name
            yield from (Entry(f"{name}.{member}", getattr(thing, member), "") for member in shown)
        else:
            yield Entry(name, thing, options)


ENTRIES = list(entries())
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def has_example(docstring: str | None, run: bool = True) -> bool:
    """Whether there is an example with a result; one that is skipped does not count if it has to run."""
    examples = doctest.DocTestParser().get_examples(docstring or "")
    return any(example.want for example in examples if not (run and example.options.get(doctest.SKIP)))


def arguments(function: Any) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]


def undescribed(thing: Any) -> list[str]:
    """The arguments without an entry of their own; those of a class may be in the docstrings of its base classes."""
    docstrings = [base.__doc__ for base in thing.__mro__[:-1]] if inspect.isclass(thing) else [thing.__doc__]
    text = "\n".join(filter(None, docstrings))
    joint = re.findall(r"^ {4,}(\w+(?:, \w+)*): ", text, re.MULTILINE)
    described = {name for names in joint for name in names.split(", ")}
    return [name for name in arguments(thing) if name not in described]


def unnamed(thing: type, shown: list[str] | None) -> list[str]:
    """The arguments of shown methods that their docstrings do not name."""
    found: list[str] = []
    public = [name for name in vars(thing) if not name.startswith("_")] if shown is None else shown
    for member in public:
        method = inspect.getattr_static(thing, member)
        function = getattr(method, "__func__", method)  # of a class method
        if inspect.isfunction(function) and function.__doc__:  # others are not on the page
            names = [name for name in arguments(function) if name not in ("self", "cls")]
            found += [f"{member}({name})" for name in names if not re.search(rf"\b{name}\b", function.__doc__)]
    return found


def has_arguments(entry: Entry) -> bool:
    """Whether users pass arguments: not to a base class, to an error, or where the page hides the constructor."""
    thing = entry.thing
    if not inspect.isclass(thing):
        return True
    if issubclass(thing, enum.Enum | BaseException) or "merge_init_into_class: false" in entry.options:
        return False
    return not inspect.isabstract(thing) or issubclass(thing, Adaptive | ContinuousAdjoint)


@every_entry
def test_every_entry_has_an_example_that_runs(entry: Entry) -> None:
    assert has_example(entry.thing.__doc__, run=entry.name not in NOT_RUN)


@every_entry
def test_every_argument_is_described(entry: Entry) -> None:
    if has_arguments(entry):
        assert undescribed(entry.thing) == []
    if inspect.isclass(entry.thing):
        assert unnamed(entry.thing, members(entry.options)) == []


def test_every_public_name_has_an_entry() -> None:
    # Names are compared as what they stand for: the page may name the module of a function in full.
    described = {id(entry.thing) for entry in ENTRIES}
    table = (ROOT / "docs" / "solvers.md").read_text(encoding="utf-8")  # of solvers that are given by a tableau
    missing: list[str] = []
    for module in map(importlib.import_module, MODULES):
        things = {name: getattr(module, name) for name in module.__all__ if f"`sn.{name}`" not in table}
        missing += [
            f"{module.__name__}.{name}"
            for name, thing in things.items()
            if not isinstance(thing, ModuleType) and id(thing) not in described
        ]
    assert sorted(missing) == sorted(NO_ENTRY)


def test_every_paper_of_an_entry_can_be_cited() -> None:
    cited = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")))
    papers = {paper: entry.name for entry in ENTRIES for paper in PAPER.findall(entry.thing.__doc__ or "")}
    assert len(papers) > 30
    assert {paper: name for paper, name in papers.items() if paper not in cited} == {}


def test_names_on_the_page_of_citations_exist() -> None:
    described = {entry.name.rpartition(".")[2] for entry in ENTRIES}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "cite.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(?:norms\.)?(\w+)[(`]", row)}
    assert len(names) > 40
    assert names - described <= {"reversible_heun"}  # the name of a solver


def test_exceptions_are_needed() -> None:
    skipped = [entry.name for entry in ENTRIES if not has_example(entry.thing.__doc__)]
    assert sorted(skipped) == sorted(NOT_RUN)


def test_a_missing_example_is_found() -> None:
    assert has_example(">>> 1 + 1\n2\n")
    assert not has_example("Adds numbers.")
    assert not has_example(">>> x = 1\n")  # shows nothing
    assert not has_example(">>> 1 + 1  # doctest: +SKIP\n2\n")
    assert has_example(">>> 1 + 1  # doctest: +SKIP\n2\n", run=False)


def test_a_missing_description_is_found() -> None:
    def add(x: float, y: float, z: float, *more: float) -> float:
        """x + y + z.

        Arguments:
            x, y: numbers.
        """
        return x + y + z + sum(more)

    class Adder:
        def add(self, x: float, y: float) -> float:
            """The sum of `x` and another number."""
            return x + y

    assert undescribed(add) == ["z"]
    assert unnamed(Adder, None) == ["add(y)"]
