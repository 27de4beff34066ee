"""One look for all figures, and files that come out the same, byte for byte, whenever they are drawn again."""

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
    "svg.hashsalt": "seminode",  # else the names of an SVG's parts are drawn by chance
}
#: The paper's two, and ours. A picture without the seminorm as it is meant shows the published one in its blue.
COLOURS = {"mixed": "tab:red", "seminorm": "tab:blue", "published": "tab:purple", "best": "tab:green"}
LABELS = {
    "mixed": "default norm",
    "seminorm": "seminorm",
    "published": "seminorm, published slice",
    "best": "seminode's best",
}
DPI = 150

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A figure that is not written yet."""

    name: str
    title: str
    caption: str
    figure: Any  # of matplotlib
    animate: Callable[[Path], None] | None = None  # writes a GIF


@dataclass(frozen=True)
class Drawn:
    """A figure in its files."""

    name: str
    title: str
    caption: str
    png: Path
    svg: Path | None = None
    gif: Path | None = None


def styled(build: Callable[P, T]) -> Callable[P, T]:
    """In the look of the house, whatever a user's own matplotlib is set to."""

    @functools.wraps(build)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            return build(*args, **kwargs)

    return inside


def new_figure(width: float, height: float) -> Any:
    """Of a size in inches; no window and no global state belong to it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@styled
def save(picture: Picture, out: Path) -> Drawn:
    """As PNG and SVG, and as GIF where it moves."""
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
    """With a palette: a third of the size, and the eye sees no difference."""
    from PIL import Image  # comes with matplotlib

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=dpi)
    image = Image.open(pixels).convert("RGB")
    how = Image.Dither.FLOYDSTEINBERG if dither else Image.Dither.NONE
    with writing(path) as scratch:
        image.quantize(colours, palette=image.quantize(colours), dither=how).save(scratch, "PNG", optimize=True)
