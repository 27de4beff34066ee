"""Which data the runs of a folder were made with: releases and numbers of samples, as they are on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .data import CATALOGUE
from .data.folders import data_dir
from .measures import DATA
from .running import Root
from .settings import Settings
from .store import StoreError, read_json, undamaged, write_json

FILE = "data.json"
#: Data sets that are made from others.
MADE_FROM = {"mnist14": "mnist"}


def describe(name: str, root: Root = None) -> dict[str, Any] | None:
    """The items of a data set that are at hand and in all, its origin, and notes; `None` if it is absent."""
    source = CATALOGUE[MADE_FROM.get(name, name)]
    status = source.status(data_dir(root))
    if status.state == "absent":
        return None
    return {
        "items": status.items,
        "expected": status.expected,
        "unit": source.unit,
        "origin": status.origin or source.origin,
        "notes": list(status.notes),
    }


def measure(out: Path, root: Root = None) -> Path:
    """Describe the data sets of all runs in a folder, and write the file. What is in the file already stays."""
    path = out / FILE
    found = read_json(path) if path.exists() else {}
    names = {Settings.of_json(run.settings).data for run in undamaged(out)}  # the report names damaged runs
    found |= {name: describe(name, root) for name in sorted(names - found.keys())}
    write_json(path, {name: about for name, about in sorted(found.items()) if about is not None})
    return path


def sentences(folder: Path) -> list[str]:
    """The data sets in words; nothing if they were not described."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [_sentence(name, about) for name, about in read_json(path).items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
        ) from error


def _sentence(name: str, about: Mapping[str, Any]) -> str:
    """One data set in words.

    >>> about = {"items": 7889, "expected": 23682, "unit": "clips", "origin": "web", "notes": ["release v0.01"]}
    >>> _sentence("speech_commands", about)
    'Speech Commands (web): 7,889 of 23,682 clips were at hand; release v0.01.'
    """
    found, expected = about["items"], about["expected"]
    count = f"{found:,} {about['unit']}"
    if found != expected:
        count = f"{found:,} of {expected:,} {about['unit']} were at hand"
    notes = "".join(f"; {note}" for note in about["notes"])
    return f"{DATA.get(name, name)} ({about['origin']}): {count}{notes}."
