"""What the pictures of the examples have in common."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

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
}


def need(*libraries: str) -> None:
    """Stop before the work begins if what draws its result is not there."""
    for library in libraries:
        try:
            __import__(library)
        except ImportError:
            sys.exit(f'This example needs {library}: pip install "seminode[lab]"')
    import matplotlib

    matplotlib.use("Agg")


def save(figure: Any, path: Path, dpi: int = 150, colours: int = 192, dither: bool = False) -> None:
    """As a PNG with a palette: a third of the size, and the eye sees no difference."""
    from PIL import Image  # comes with matplotlib

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=dpi)
    image = Image.open(pixels).convert("RGB")
    how = Image.Dither.FLOYDSTEINBERG if dither else Image.Dither.NONE
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(colours, palette=image.quantize(colours), dither=how).save(path, optimize=True)
