"""Figures of the paper and our own, out of run folders: nothing is computed here that a run has not measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seminode.diagnostics.plots import check_matplotlib

from ..store import Finished
from . import control, costs, curves, histograms, precision, ratio
from .selection import complete
from .style import Drawn, Picture, save

__all__ = ["Drawn", "Picture", "draw_all", "pictures"]


def pictures(runs: Sequence[Finished], folder: Path) -> list[Picture]:
    """All that complete runs, and the measurements in a folder, have to show; in the paper's order, then our own."""
    whole = complete(runs)
    subjects = (curves, control, histograms, ratio, costs)
    found = [picture for subject in subjects for picture in subject.pictures(whole)]
    found += precision.pictures(folder)
    return sorted(found, key=lambda picture: picture.animate is not None)  # what moves is the last


def draw_all(runs: Sequence[Finished], folder: Path, out: Path) -> list[Drawn]:
    """Draw everything for which there is something, as PNG and SVG, into `out`.

    Arguments:
        runs: run folders, as `store.runs` reads them; those that are not complete are left out.
        folder: where the files `precision-<experiment>.json` of `measuring.measure` are.
        out: made if it is not there. What it holds under the same names is replaced.
    """
    check_matplotlib()
    return [save(picture, out) for picture in pictures(runs, folder)]
