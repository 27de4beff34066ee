"""Extensions of griffe for our docstrings: their examples, and entries that describe several arguments at once."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# An entry such as "rtol, atol: tolerances", with the lines that continue it.
JOINT = re.compile(r"^(?P<indent> {4,})(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)$", re.MULTILINE)
ARGUMENTS = re.compile(r"^Arguments:\n(?:(?: {4}.*)?\n?)*", re.MULTILINE)


class Sections(Extension):
    """Renders "Example:" as code instead of as a quotation, and gives every argument its own entry."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = ARGUMENTS.sub(lambda section: JOINT.sub(_separate, section[0]), text)


def _separate(entry: re.Match[str]) -> str:
    """Without this, the page would have no types for these arguments, and call them required."""
    first, *others = entry["names"].split(", ")
    text = entry["text"]
    shared = f"see `{first}`." if "\n" in text else text
    lines = [f"{entry['indent']}{first}: {text}", *(f"{entry['indent']}{name}: {shared}" for name in others)]
    return "\n".join(lines)
