"""What the pictures of the examples have in common: the look of the laboratory's figures."""

from __future__ import annotations

import sys

from seminode_lab.figures.style import BLUE, GREY, INK, ORANGE, STYLE
from seminode_lab.figures.style import save_png as save

__all__ = ["BLUE", "GREY", "INK", "ORANGE", "STYLE", "need", "save"]


def need(*libraries: str) -> None:
    """Stop before the work begins if what draws its result is not there."""
    for library in libraries:
        try:
            __import__(library)
        except ImportError:
            sys.exit(f'This example needs {library}: pip install "seminode[lab]"')
    import matplotlib

    matplotlib.use("Agg")
