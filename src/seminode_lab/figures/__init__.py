"""The figures of the paper and further ones, drawn from run folders. They show only what runs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seminode.diagnostics.plots import check_matplotlib

from ..store import Finished
from . import control, costs, curves, histograms, knife, locations, origins, overshoot, precision, ratio, regime, scale
from .selection import complete
from .style import Drawn, Picture, save

__all__ = ["Drawn", "Picture", "draw_all", "pictures"]


def pictures(runs: Sequence[Finished], folder: Path) -> list[Picture]:
    """All figures of complete runs and of measurements in a folder: those of the paper in its order, then others."""
    whole = complete(runs)
    subjects = (curves, control, histograms, locations, ratio, costs)
    found = [picture for subject in subjects for picture in subject.pictures(whole)]
    measured = (knife, regime, scale, origins, overshoot, precision)
    found += [picture for subject in measured for picture in subject.pictures(folder)]
    return sorted(found, key=lambda picture: picture.animate is not None)  # animations come last


def draw_all(runs: Sequence[Finished], folder: Path, out: Path) -> list[Drawn]:
    """Draw all figures for which there are data, as PNG and SVG, into `out`.

    Arguments:
        runs: run folders, as `store.runs` reads them. Incomplete runs are left out.
        folder: the folder with the files `precision-<experiment>.json` of `measuring.measure`.
        out: a folder, which is created if it does not exist. Files with the same names are replaced.
    """
    check_matplotlib()
    return [save(picture, out) for picture in pictures(runs, folder)]
