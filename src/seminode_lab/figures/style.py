"""The common style of all figures, and files that are identical whenever they are drawn again."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..data.files import writing

INK, BLUE, ORANGE, GREY = "#22303c", "#17607c", "#e4572e", "#9aa5ad"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "seminode",  # otherwise the identifiers in an SVG are random
}
#: The colours of modes: the two of the paper, and ours. In figures without `seminorm`, `published` has its colour.
COLOURS = {"mixed": "tab:red", "seminorm": "tab:blue", "published": "tab:purple", "best": "tab:green"}
LABELS = {
    "mixed": "mixed norm",
    "seminorm": "seminorm",
    "published": "seminorm, published slice",
    "best": "seminode's best",
}
DPI = 150

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A figure that has not been written yet."""

    name: str
    title: str
    caption: str
    figure: Any  # a matplotlib figure
    animate: Callable[[Path], None] | None = None  # writes a GIF


@dataclass(frozen=True)
class Drawn:
    """The files of a figure."""

    name: str
    title: str
    caption: str
    png: Path
    svg: Path | None = None
    gif: Path | None = None


def styled(build: Callable[P, T]) -> Callable[P, T]:
    """Apply the common style, whatever the user's matplotlib settings are."""

    @functools.wraps(build)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            return build(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Any:
    """A figure with a size in inches, without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@styled
def save(picture: Picture, out: Path) -> Drawn:
    """Write a figure as PNG and SVG, and an animation also as GIF."""
    png, svg, gif = (out / f"{picture.name}.{suffix}" for suffix in ("png", "svg", "gif"))
    save_png(picture.figure, png)
    with writing(svg) as scratch:
        picture.figure.savefig(scratch, format="svg", metadata={"Date": None})
    if picture.animate is not None:
        with writing(gif) as scratch:
            picture.animate(scratch)
    moving = gif if picture.animate is not None else None
    return Drawn(picture.name, picture.title, picture.caption, png, svg, moving)


def save_png(figure: Any, path: Path, dpi: int = DPI, colours: int = 192, dither: bool = False) -> None:
    """Write a PNG with a palette, which takes a third of the size without a visible difference."""
    from PIL import Image  # comes with matplotlib

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=dpi)
    image = Image.open(pixels).convert("RGB")
    how = Image.Dither.FLOYDSTEINBERG if dither else Image.Dither.NONE
    with writing(path) as scratch:
        image.quantize(colours, palette=image.quantize(colours), dither=how).save(scratch, "PNG", optimize=True)
