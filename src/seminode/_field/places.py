"""Places where a field may keep values between its evaluations, and their contents at a given moment.

`torch.func.functional_call` lends a module other parameters; a program may rebind an attribute or a variable, or switch
to evaluation mode, between a solve and its backward pass; and a field may cache a tensor that it has computed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import CellType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

#: Stands for an entry that is not there.
ABSENT: Any = object()


class Place(Protocol):
    """Somewhere values are kept by keys."""

    def read(self) -> Mapping[Any, Any]: ...

    def write(self, key: Any, value: Any) -> None:
        """Put a value back; `ABSENT` removes it."""
        ...


class DictPlace:
    """A dict: one of the user's, or the attributes, parameters or buffers of an object."""

    def __init__(self, entries: dict[Any, Any]):
        self.entries = entries

    def read(self) -> Mapping[Any, Any]:
        return self.entries

    def write(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self.entries.pop(key, None)
        else:
            self.entries[key] = value


class ListPlace:
    """A list or a deque, by position."""

    def __init__(self, entries: list[Any] | deque[Any]):
        self._entries = entries

    def read(self) -> Mapping[int, Any]:
        return dict(enumerate(self._entries))

    def write(self, key: int, value: Any) -> None:
        if value is ABSENT:
            while len(self._entries) > key:
                self._entries.pop()
        elif key < len(self._entries):
            self._entries[key] = value
        else:
            self._entries.append(value)


class CellPlace:
    """A variable that a function closes over."""

    def __init__(self, cell: CellType):
        self._cell = cell

    def read(self) -> Mapping[int, Any]:
        try:
            return {0: self._cell.cell_contents}
        except ValueError:  # it has no value yet
            return {}

    def write(self, key: int, value: Any) -> None:
        if value is ABSENT:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


class NamesPlace:
    """Some of the globals of a function."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]):
        self._namespace, self._names = namespace, tuple(names)

    def read(self) -> Mapping[str, Any]:
        return {name: self._namespace[name] for name in self._names if name in self._namespace}

    def write(self, key: str, value: Any) -> None:
        DictPlace(self._namespace).write(key, value)


class AttributesPlace:
    """Attributes that are not in a dict of their own: slots, or those of a class."""

    def __init__(self, owner: Any, names: Iterable[str]):
        self._owner, self._names = owner, tuple(names)

    def read(self) -> Mapping[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def write(self, key: str, value: Any) -> None:
        if value is ABSENT:
            delattr(self._owner, key)
        else:
            setattr(self._owner, key, value)


class CachePlace:
    """The results that `functools.lru_cache` keeps of a function: they cannot be looked at, but be forgotten."""

    def __init__(self, function: Any):
        self._function = function
        self._cleared = False

    def read(self) -> Mapping[str, Any]:
        # Once it has been emptied, the count starts over, and says nothing.
        return {CACHE: object() if self._cleared else self._function.cache_info().misses}

    def write(self, key: str, value: Any) -> None:
        self._function.cache_clear()
        self._cleared = True


#: The one key of a `CachePlace`.
CACHE = "cached results"


class Change(NamedTuple):
    """An entry that is not what it was."""

    place: Place
    key: Any
    then: Any
    now: Any


class Contents:
    """The contents of some dicts and other places at a given moment."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], places: Sequence[Place]):
        self._dicts = [(entries, entries.copy()) for entries in dicts]
        self._values = [*chain.from_iterable(map(dict.values, dicts))]
        self._places = [(place, dict(place.read())) for place in places]
        self._counted: set[tuple[int, Any]] = set()  # entries that count evaluations

    @property
    def unchanged(self) -> bool:
        """Whether nothing is different now. Every solve asks that several times."""
        count, present = 0, []
        for entries, _ in self._dicts:
            count += len(entries)
            present.append(entries.values())
        if count != len(self._values) or not all(map(operator.is_, chain.from_iterable(present), self._values)):
            return False
        return all(_equal(place.read(), then) for place, then in self._places)

    @cached_property
    def _dict_places(self) -> list[tuple[Place, dict[Any, Any]]]:
        return [(DictPlace(entries), then) for entries, then in self._dicts]

    def changes(self) -> list[Change]:
        """The changes since then, in places where a tensor or a training flag has changed."""
        if self.unchanged:
            return []
        found: list[Change] = []
        for place, then in (*self._dict_places, *self._places):
            now = place.read()
            if _equal(now, then):
                continue
            keys = [key for key in {**then, **now} if then.get(key, ABSENT) is not now.get(key, ABSENT)]
            changes = [Change(place, key, then.get(key, ABSENT), now.get(key, ABSENT)) for key in keys]
            if any(map(_matters, changes)):
                found += [each for each in changes if (id(place), each.key) not in self._counted and not _counts(each)]
        return found

    def leave_counters(self, evaluations: int) -> None:
        """Whole numbers that have grown by the number of evaluations since then are counters: they go on counting."""
        for change in self.changes():
            then, now = change.then, change.now
            if isinstance(then, int) and isinstance(now, int) and change.key != CACHE and now - then == evaluations:
                self._counted.add((id(change.place), change.key))


def _equal(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))


def _counts(change: Change) -> bool:
    """Whether an entry may be a counter of evaluations: a tensor of one number without a gradient, then and now."""
    both = change.then, change.now
    return all(isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad for x in both)


def _matters(change: Change) -> bool:
    if change.key in ("training", CACHE):
        return True
    return (isinstance(change.then, Tensor) or isinstance(change.now, Tensor)) and not _counts(change)
