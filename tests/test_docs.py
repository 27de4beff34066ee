"""The pages tell the truth: their Python runs, prints what they say, and their tables are those of the code.

A ```text block that follows a ```python block is its output; `...` in it stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import itertools
import json
import re
import unicodedata
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from project import ROOT, SOURCE
from test_architecture import LAYERS

import seminode as sn
from seminode._field.checks import DEFAULT_TOLERANCES
from seminode.solvers import BY_NAME
from seminode_lab.data import CATALOGUE

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$", re.DOTALL | re.MULTILINE)  # fenced, or indented
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
every_document = pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class Block(NamedTuple):
    line: int
    code: str
    output: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start("code")), m["code"], m["output"]) for m in PYTHON.finditer(text)]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without the table's own."""
    lines = iter((DOCS / page).read_text(encoding="utf-8").splitlines())
    lines = itertools.dropwhile(lambda line: line != heading, lines)
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    assert len(rows) > 2, f"{page}: no table below {heading!r}"
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows[2:]]


@every_page
def test_code_runs_and_prints_what_the_page_says(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        # Blank lines in front, so that a traceback names the line of the page.
        program = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        said, found = block.output, printed.getvalue()
        if said is not None and not doctest.OutputChecker().check_output(said, found, LENIENT):
            pytest.fail(f"{page.name}, line {block.line}: the page says\n{said}\nand the code\n{found}")


def test_the_block_with_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is marked "py", not "python", since Lightning is not always installed."""
    pytest.importorskip("lightning")
    page = DOCS / "training.md"
    (code,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__", "folder": tmp_path}
    exec("import torch\nfrom seminode.models import ConcatMLP, NeuralODE", namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning recommends more workers
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
    assert len((tmp_path / "lightning.csv").read_text().splitlines()) == 1 + 4


def test_every_block_of_python_is_run() -> None:
    """Blocks marked "py" are run by tests of their own, except those of data that must be downloaded."""
    marked = {page.name for page in PAGES if re.search(r"^```py$", page.read_text(encoding="utf-8"), re.MULTILINE)}
    assert marked == {"data.md", "distributed.md", "training.md"}


def prose(page: Path) -> str:
    """The text of a page or of a notebook, without code."""
    if page.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in cells(page) if cell["cell_type"] == "markdown")
    else:
        text = page.read_text(encoding="utf-8")
    return CODE.sub("", text)


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs gives to headings, written ones, and those of the objects of the API page."""
    text = prose(page)
    headings = [_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    objects = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    written = re.findall(r'id="([^"]+)"|\{ #(\S+) \}', text)
    return {*headings, *objects, *(first or second for first, second in written)}


@every_document
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        place = (page.parent / target) if target else page
        assert place.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(place.resolve()), f"{page.name} links to {target}#{anchor}"


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|benchmarks|examples|src|docs|results)/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@every_page
def test_programs_that_a_page_calls_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"python ((?:examples|docs)/[\w/]+\.py)", text):
        assert (ROOT / name).exists(), f"{page.name} calls {name}"
    for name in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), f"{page.name} calls {name}"


def test_every_picture_has_a_command_that_draws_it() -> None:
    """The page that shows it names a program, which is an example with a file of this name, or a benchmark."""
    pictures = {path.stem for path in (DOCS / "images").glob("*.png")}
    drawn: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = set(re.findall(r"!\[[^\]]+\]\(\S*images/(\w+)\.png\)", text))
        assert shown <= pictures, page.name
        examples = {name for name in re.findall(r"`(?:python )?examples/(\w+)\.py`", text) if name in shown}
        for name in examples:
            assert f"out/demo/{name}.png" in (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        benchmarks = re.findall(r"python -m benchmarks\.?(\w*)", text)
        drawn |= examples | {name for name in shown if name in benchmarks or f"images/{name}.png`" in text}
        drawn |= {name for name in shown if name == page.stem and "make bench" in text}
    assert drawn == pictures


def test_a_broken_anchor_is_found() -> None:
    known = anchors(DOCS / "start.md")
    assert {"jumps", "coming-from-torchdiffeq", "when-a-solve-fails"} <= known
    assert "jump" not in known


def test_every_page_is_in_the_navigation() -> None:
    (navigation,) = re.findall(
        r"^nav:\n(.*?)^\S", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    listed = re.findall(r"(\S+\.(?:md|ipynb))$", navigation, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(DOCS).as_posix()) for page in (*PAGES[1:], *NOTEBOOKS)}


@every_notebook
def test_notebooks_are_stored_with_their_outputs(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in code)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    pictures = [cell for cell in code if any("image/png" in each.get("data", ()) for each in cell["outputs"])]
    assert pictures
    assert all(cell["metadata"].get("alt") for cell in pictures), (
        "a picture needs a description, in the cell's metadata"
    )
    assert all(
        len("".join(each["data"]["image/png"])) < 150_000 for each in outputs if "image/png" in each.get("data", ())
    )
    assert "## Where to go next" in prose(path)


@pytest.mark.slow
def test_a_notebook_runs() -> None:
    """One of them, as plain code. `make notebooks` runs all of them, in a kernel."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()), pyplot.rc_context({"backend": "Agg"}):
        for cell in cells(DOCS / "tutorials" / "events.ipynb"):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), "events.ipynb", "exec", dont_inherit=True), namespace)
    pyplot.close("all")


def test_pages_with_code_are_found() -> None:
    assert {page.name for page in PAGES if blocks(page)} >= {"README.md", "start.md", "solvers.md", "gradients.md"}


def test_solver_table_is_that_of_the_code() -> None:
    expected = []
    for name, kind in BY_NAME.items():
        if kind.external:  # whose numbers are those of its methods
            continue
        solver = kind()
        embedded = "–" if solver.error_order is None else str(solver.error_order - 1)
        numbers = [str(solver.order), embedded, str(solver.evaluations), str(solver.interpolant_order)]
        expected.append([name, f"sn.{kind.__name__}", *numbers])
    assert table("solvers.md", "## Solvers") == expected


def test_preset_table_is_that_of_the_code() -> None:
    rows = {name: tuple(map(_number, cells)) for name, *cells in table("solvers.md", "### PID")}
    assert rows == {name: pytest.approx(values) for name, values in sn.PID.PRESETS.items()}
    assert sn.PID() == sn.PID.preset("PI34")


def test_tolerance_table_is_that_of_the_code() -> None:
    rows = {row[0]: (float(row[1]), float(row[2])) for row in table("solvers.md", "## Tolerances")}
    assert rows == {str(dtype).removeprefix("torch."): values for dtype, values in DEFAULT_TOLERANCES.items()}


def test_data_table_is_that_of_the_code() -> None:
    rows = table("data.md", "## The data sets")
    assert [row[0] for row in rows] == list(CATALOGUE)
    expected = [each.status(ROOT / "nowhere").expected for each in CATALOGUE.values()]
    assert [int(row[2].split()[0].replace(",", "")) for row in rows] == expected


def design() -> str:
    return (DOCS / "design.md").read_text(encoding="utf-8")


def test_layers_of_the_design_are_those_that_are_tested() -> None:
    (block,) = re.findall(r"^```text\n(.*?)^```$", design(), re.DOTALL | re.MULTILINE)
    lines = block.replace(",\n  ", ", ").splitlines()  # a layer may continue on an indented line
    assert [set(line.split(", ")) for line in lines] == LAYERS


def test_every_module_is_in_the_table_of_the_design() -> None:
    rows = [row[0] for row in table("design.md", "## The tree")]
    assert len(rows) == len(set(rows))
    for module in rows:
        place = SOURCE.joinpath(*module.split("."))
        assert place.is_dir() or place.with_suffix(".py").exists(), module
    assert set().union(*LAYERS) <= set(rows)


def test_files_that_the_design_names_exist() -> None:
    names = re.findall(r"`([\w/]+\.py)`", design())
    assert len(set(names)) > 20
    for name in names:
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def _slug(heading: str) -> str:
    """As Python-Markdown makes it from the text of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip().lower())


def _number(cell: str) -> float:
    return float(Fraction(cell.replace("−", "-")))
