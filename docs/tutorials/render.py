"""A hook of mkdocs that renders the tutorials, from the outputs stored in them. Nothing is executed."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Notebook(File):
    """A file that is a page, although its name does not end in .md."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    if not page.file.src_uri.endswith(".ipynb"):
        return None
    assert page.file.abs_src_path is not None
    return markdown(Path(page.file.abs_src_path))


def markdown(path: Path) -> str:
    """The page of a notebook: text, code and outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    alt = cell["metadata"].get("alt", "")
    return [f"```python\n{source}\n```", *(_output(output, alt) for output in cell["outputs"])]


def _output(output: dict[str, Any], alt: str) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text'])}```"
    data = output["data"]
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f'<p><img alt="{escape(alt)}" src="data:image/png;base64,{image}"></p>'
    return f"```text\n{''.join(data['text/plain'])}\n```"
