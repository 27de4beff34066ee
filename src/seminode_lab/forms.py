"""Declared forms of what is read from files: types, ranges, and the entries that must be there.

A form describes a value, and `check` compares a value with it. The error names the place within the value, what is
expected there and what was found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: No number of the lab is larger, apart from losses. Sums and squares of such numbers are finite.
LARGEST = 2**62


class Unlike(ValueError):
    """A value does not have its declared form."""


def _found(value: Any) -> str:
    """A value, or its type if it has parts."""
    if isinstance(value, list | dict | np.ndarray):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Form(ABC):
    """What a value must be like."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """The form in words."""

    @abstractmethod
    def check(self, value: Any, where: str = "") -> None:
        """Raise an error if a value does not have this form.

        Arguments:
            where: the place of the value, for the message.

        Raises:
            Unlike: if the value does not have this form.
        """

    def refuse(self, value: Any, where: str) -> Unlike:
        place = f"{where}: " if where else ""
        return Unlike(f"{place}expected {self.expected}, found {_found(value)}")


@dataclass(frozen=True)
class Number(Form):
    """A number within bounds, which are included.

    >>> Number(0, 1).check(0.5)
    >>> Number(1, integer=True).check(float("nan"), "epochs")
    Traceback (most recent call last):
    ...
    seminode_lab.forms.Unlike: epochs: expected a whole number of at least 1, found nan
    """

    low: float = -LARGEST
    high: float = LARGEST
    integer: bool = False
    finite: bool = True  # otherwise NaN and infinite numbers, and finite ones of any size, are admitted

    @property
    def expected(self) -> str:
        kind = "a whole number" if self.integer else "a finite number" if self.finite else "a number"
        if self.high < LARGEST:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return kind if self.low <= -LARGEST else f"{kind} of at least {self.low:g}"

    def check(self, value: Any, where: str = "") -> None:
        kinds = int if self.integer else int | float
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.refuse(value, where)
        if not self.finite and isinstance(value, float):
            return
        if not self.low <= value <= self.high:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Text(Form):
    """Text; one of the options, if there are any."""

    options: Sequence[str] = ()

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.options)}" if self.options else "text"

    def check(self, value: Any, where: str = "") -> None:
        if not isinstance(value, str) or (self.options and value not in self.options):
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Flag(Form):
    """True or false."""

    @property
    def expected(self) -> str:
        return "true or false"

    def check(self, value: Any, where: str = "") -> None:
        if not isinstance(value, bool):
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Nothing(Form):
    """JSON's null."""

    @property
    def expected(self) -> str:
        return "null"

    def check(self, value: Any, where: str = "") -> None:
        if value is not None:
            raise self.refuse(value, where)


class Either(Form):
    """Any of several forms.

    >>> Either(Nothing(), Number(0)).check(None)
    """

    def __init__(self, *forms: Form) -> None:
        self.forms = forms

    @property
    def expected(self) -> str:
        return " or ".join(each.expected for each in self.forms)

    def check(self, value: Any, where: str = "") -> None:
        wrong = []
        for each in self.forms:
            try:
                return each.check(value, where)
            except Unlike as error:
                wrong.append(error)
        parts = [error for error in wrong if not str(error).startswith(f"{where}: ")]
        raise parts[0] if parts else self.refuse(value, where)  # of a record, say which entry is wrong


@dataclass(frozen=True)
class ListOf(Form):
    """A list of values of one form, of some length or of at least one."""

    entry: Form
    length: int | None = None
    least: int = 0

    @property
    def expected(self) -> str:
        if self.length is not None:
            return f"a list of {self.length}"
        return f"a list of at least {self.least}" if self.least else "a list"

    def check(self, value: Any, where: str = "") -> None:
        if not isinstance(value, list | tuple) or self.length not in (None, len(value)):
            raise self.refuse(value, where)
        if len(value) < self.least:
            place = f"{where}: " if where else ""
            raise Unlike(f"{place}expected {self.expected}, found {len(value)}")
        for i, each in enumerate(value):
            self.entry.check(each, f"{where}[{i}]")


@dataclass(frozen=True)
class Pair(Form):
    """A name with a value, whose form may depend on the name."""

    forms: Mapping[str, Form]
    other: Form

    @property
    def expected(self) -> str:
        return "a name with a value"

    def check(self, value: Any, where: str = "") -> None:
        if not isinstance(value, list | tuple) or len(value) != 2 or not isinstance(value[0], str):
            raise self.refuse(value, where)
        self.forms.get(value[0], self.other).check(value[1], f"{where}.{value[0]}")


@dataclass(frozen=True)
class Record(Form):
    """Named values.

    Attributes:
        required: the entries that must be there.
        optional: the entries that may be there.
        other: the form of all other entries; `None` if there must not be any.
    """

    required: Mapping[str, Form] = field(default_factory=dict)
    optional: Mapping[str, Form] = field(default_factory=dict)
    other: Form | None = None

    @property
    def expected(self) -> str:
        return "a dict"

    def check(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise self.refuse(value, where)
        forms = {**self.required, **self.optional}
        inside = f"{where}." if where else ""
        for name, form in self.required.items():
            if name not in value:
                raise Unlike(f"{inside}{name}: expected {form.expected}, found none")
        for name, each in value.items():
            form = forms.get(name, self.other)
            if form is None:
                raise Unlike(f"{inside}{name[:60]}: expected no such entry")
            form.check(each, f"{inside}{name}")


@dataclass(frozen=True)
class Anything(Form):
    """Any value: it is not read."""

    @property
    def expected(self) -> str:
        return "anything"

    def check(self, value: Any, where: str = "") -> None:
        return None


@dataclass(frozen=True)
class Array(Form):
    """An array of finite real numbers with some number of dimensions.

    Attributes:
        columns: the size of the last dimension, if it is fixed.
    """

    dimensions: int
    columns: int | None = None

    @property
    def expected(self) -> str:
        shape = f"{self.dimensions} dimension{'s' * (self.dimensions > 1)}"
        columns = "" if self.columns is None else f" and {self.columns} columns"
        return f"finite numbers in {shape}{columns}"

    def check(self, value: Any, where: str = "") -> None:
        place = f"{where}: " if where else ""
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise Unlike(f"{place}expected {self.expected}, found {getattr(value, 'dtype', type(value))}")
        if value.ndim != self.dimensions or self.columns not in (None, value.shape[-1]):
            raise Unlike(f"{place}expected {self.expected}, found the shape {value.shape}")
        if not bool((np.abs(value.astype(np.float64)) <= LARGEST).all()):
            raise Unlike(f"{place}expected {self.expected}, found others")
