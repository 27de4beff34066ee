"""The report: compares run folders with the paper, as an HTML page and as Markdown.

Every number in it comes from the run folders or from the tables of the paper.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import side_by_side
from ..ablation_table import ablation
from ..grid import plain
from ..measures import Gathered, damaged, gather
from ..repeats import noise_of
from ..running import STARTS
from ..store import Finished, StoreError, placing, runs, undamaged
from .content import content, summary
from .pictures import Shown, shown

if TYPE_CHECKING:
    from ..figures import Drawn

HTML, MARKDOWN, FIGURES = "report.html", "report.md", "figures"


class LeftOut(UserWarning):
    """A run folder is not in the report."""


class Written(NamedTuple):
    """The files of a report."""

    html: Path
    markdown: Path


def write(folder: Path, out: Path | None = None) -> Written:
    """Write `report.html`, `report.md` and `figures/` about the run folders in `folder`.

    The page contains its figures; the Markdown refers to the files.

    Arguments:
        folder: the folder of run folders.
        out: where to write; by default `folder`.

    Raises:
        StoreError: if there is no complete run.

    Warns:
        LeftOut: for every run folder that is damaged or not complete.
    """
    folder = Path(folder)
    out = folder if out is None else Path(out)
    gathered = _read(folder)
    usable = [run for problem in gathered.problems for run in problem.runs]
    pictures, trouble = _figures(usable, folder, out / FIGURES)
    measured = {"ablation": ablation(folder), "beside": side_by_side.table(folder)}
    return _render(content(gathered, usable, pictures, trouble, folder) | measured, out)


def in_short(found: Sequence[Finished], folder: Path) -> list[str]:
    """The result of the runs in a folder in at most five lines."""
    gathered = gather(found)
    runs = [run for problem in gathered.problems for run in problem.runs]
    return summary(gathered, runs, noise_of(folder))[:5]


def _read(folder: Path) -> Gathered:
    wrong: dict[str, str] = {}

    def skip(error: StoreError) -> None:
        path = Path(str(error).partition(": ")[0])
        wrong[str(path.parent.relative_to(folder))] = damaged(error)

    found = gather(runs(folder, skip))
    if (folder / STARTS).is_dir():
        undamaged(folder / STARTS, skip)  # they are in a figure
    left_out = {**wrong, **found.left_out}
    if not found.problems:
        said = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        raise StoreError(f"{folder}: expected folders of complete runs, found {said or 'none'}")
    for name, why in left_out.items():
        warnings.warn(f"{folder / name} is left out: {why}", LeftOut, stacklevel=3)
    return Gathered(found.problems, left_out, found.peers)


def draw(found: Sequence[Finished], folder: Path, out: Path) -> Sequence[Drawn]:
    """Draw all figures, which needs matplotlib."""
    from ..figures import draw_all

    return draw_all(found, folder, out)


def _figures(found: Sequence[Finished], folder: Path, out: Path) -> tuple[list[Shown], str]:
    """The figures of the page, and the error that prevented drawing them, if any."""
    try:
        return [shown(each, out.parent) for each in draw(found, folder, out)], ""
    except (ImportError, StoreError) as error:
        warnings.warn(f"no figures: {error}", LeftOut, stacklevel=3)
        return [], f"The figures could not be drawn: {error}"


def _render(page: dict[str, Any], out: Path) -> Written:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = resources.files(__package__ or __name__)
    written = Written(out / HTML, out / MARKDOWN)
    for path, markup in ((written.html, True), (written.markdown, False)):
        environment = Environment(autoescape=markup, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string((here / f"{path.name}.jinja").read_text(encoding="utf-8"))
        style = Markup((here / "style.css").read_text(encoding="utf-8"))
        text = re.sub(r"\n{3,}", "\n\n", template.render(page, style=style, safe=Markup, plain=plain))
        with placing(path) as temporary:
            temporary.write_text(text.rstrip() + "\n", encoding="utf-8")
    return written
