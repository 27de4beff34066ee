"""Figures of the report: embedded in the page, or as files that the Markdown refers to."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from ..store import StoreError

if TYPE_CHECKING:
    from ..figures import Drawn

TYPES = {".png": "image/png", ".svg": "image/svg+xml", ".gif": "image/gif"}
#: Bytes. For a larger SVG, the PNG is embedded instead.
LARGEST_SVG = 400_000
#: Figures with a larger ratio of width to height scroll on narrow screens; otherwise they would be too small there.
WIDE = 1.5

#: The figures of the paper by the first part of their names, and their sections on the page.
EXPECTED = {
    "f1a": "accuracy of the neural CDE",
    "f1b": "evaluations of the neural CDE",
    "f2": "frames of the swing-up",
    "f3": "state of the pendulum",
    "f4": "where the field is evaluated",
    "f5": "where steps are rejected",
    "f6": "saving against the parameter–state ratio",
}
PLACES = {
    "f1": "ncde",
    "f2": "hnn",
    "f3": "hnn",
    "f4": "hnn",
    "knife": "hnn",
    "swing": "hnn",
    "f5": "steps",
    "f6": "ratio",
    "origins": "ratio",
    "costs": "adds",
    "precision": "adds",
    "overshoot": "cnf",
    "flow-": "cnf",
    "locations": "steps",
}


@dataclass(frozen=True)
class Shown:
    """A figure, its section on the page, its embedded image and the link to its file.

    Attributes:
        still: the image that replaces an animation for readers who have turned motion off.
    """

    name: str
    title: str
    caption: str
    place: str
    inline: str
    still: str
    link: str
    width: int
    height: int

    @property
    def wide(self) -> bool:
        return not self.still and self.width > WIDE * self.height


def _uri(path: Path) -> str:
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the header of a PNG file."""
    head = path.read_bytes()[:24]
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n":
        raise StoreError(f"{path}: expected a PNG image, found something else")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def shown(drawn: Drawn, beside: Path) -> Shown:
    """A figure for a page in the folder `beside`: an animation as GIF, others as SVG unless that is large."""
    width, height = png_size(drawn.png)
    still = drawn.svg if drawn.svg is not None and drawn.svg.stat().st_size <= LARGEST_SVG else drawn.png
    best = drawn.gif or still
    place = next((to for name, to in PLACES.items() if drawn.name.startswith(name)), "others")
    link = Path(relpath(drawn.gif or drawn.png, beside)).as_posix()
    return Shown(
        drawn.name, drawn.title, drawn.caption, place, _uri(best), _uri(still) if drawn.gif else "", link, width, height
    )


def missing(pictures: list[Shown]) -> list[str]:
    """Figures of the paper that are missing."""
    return [
        f"{name.upper()[:2]}{name[2:]} ({what})"
        for name, what in EXPECTED.items()
        if not any(picture.name.startswith(name) for picture in pictures)
    ]
