"""Plotting style and helpers that the examples share with the figures of seminode_lab."""

from __future__ import annotations

import sys

from seminode_lab.figures.style import BLUE, GREY, INK, ORANGE, STYLE
from seminode_lab.figures.style import save_png as save

__all__ = ["BLUE", "GREY", "INK", "ORANGE", "STYLE", "need", "save"]


def need(*libraries: str) -> None:
    """Exit before the computation starts if a plotting library is missing."""
    for library in libraries:
        try:
            __import__(library)
        except ImportError:
            sys.exit(f'This example needs {library}: pip install "seminode[lab]"')
    import matplotlib

    matplotlib.use("Agg")
