"""The files around the package agree with each other: versions, workflows, issue forms."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from project import ROOT

import seminode as sn

RELEASE = runpy.run_path(str(ROOT / ".ci" / "release_check.py"))
WHEEL = runpy.run_path(str(ROOT / ".ci" / "wheel_test.py"))
LINKS = runpy.run_path(str(ROOT / ".ci" / "site_links.py"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

#: The inputs that the steps of our workflows may use, from the `action.yml` of each version.
ACTION_INPUTS = {
    "actions/checkout@v4": {"fetch-depth", "ref"},
    "actions/setup-python@v5": {"python-version", "cache", "cache-dependency-path"},
    "actions/upload-artifact@v4": {"name", "path", "if-no-files-found", "retention-days"},
    "actions/download-artifact@v4": {"name", "path"},
    "actions/upload-pages-artifact@v3": {"name", "path", "retention-days"},
    "actions/deploy-pages@v4": {"artifact_name", "timeout"},
    "pypa/gh-action-pypi-publish@release/v1": {"packages-dir", "repository-url", "attestations"},
}

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_workflows_and_forms() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"test", "docs", "publish"}
    assert {path.stem for path in FORMS} == {"bug", "feature"}


@every_workflow
def test_workflows_have_what_github_requires(path: Path) -> None:
    workflow = load(path)
    assert workflow["name"]
    assert workflow[True]  # "on" is a truth value in YAML 1.1
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more asks for it
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        needed = job.get("needs", [])
        assert {needed} if isinstance(needed, str) else set(needed) <= set(workflow["jobs"]), name
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))


@every_workflow
def test_workflows_run_targets_of_the_makefile_only(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for step in steps(load(path)):
        if "run" in step:
            found = re.fullmatch(r'make ([a-z-]+)( [A-Z]+=("[^"]*"|\S+|\$\{\{[^}]*\}\}))*', step["run"].strip())
            assert found, step["run"]
            assert found[1] in targets


@every_workflow
def test_actions_get_inputs_that_they_have(path: Path) -> None:
    """GitHub only warns about an input that an action does not have, and goes on without it."""
    for step in steps(load(path)):
        if "uses" in step:
            assert set(step.get("with", ())) <= ACTION_INPUTS[step["uses"]], step
        assert set(step) <= {"uses", "with", "run", "id", "name", "env", "if"}


def test_the_job_that_publishes_pages_takes_what_the_build_leaves() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "docs.yml")["jobs"]
    assert jobs["build"]["steps"][-1]["with"]["path"] == "site"  # where `make docs` writes
    assert jobs["publish"]["permissions"] == {"pages": "write", "id-token": "write"}
    (deploy,) = jobs["publish"]["steps"]
    assert jobs["publish"]["environment"]["url"] == f"${{{{ steps.{deploy['id']}.outputs.page_url }}}}"
    uploads, downloads = (
        [step["with"] for step in steps(load(ROOT / ".github" / "workflows" / "publish.yml")) if name in str(step)]
        for name in ("upload-artifact", "download-artifact")
    )
    assert [each["name"] for each in uploads] == [each["name"] for each in downloads] == ["dist"]


def test_the_citation_has_what_its_format_requires() -> None:
    """Required keys, persons, entities and types of the Citation File Format 1.2.0."""
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in {"software", "dataset"}
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for reference in citation["references"]:
        assert {"authors", "title", "type"} <= set(reference)
        assert reference["type"] in {"article", "book", "conference-paper", "software"}
        assert isinstance(reference["year"], int)
        assert {each["type"] for each in reference["identifiers"]} <= {"doi", "url", "swh", "other"}
    for person in (*citation["authors"], *(each for r in citation["references"] for each in r["authors"])):
        assert "name" in person or {"family-names", "given-names"} <= set(person)
        assert set(person) <= {"name", "family-names", "given-names"}


def test_the_page_of_citations_has_the_entry_of_the_citation_file() -> None:
    page, citation = (ROOT / "docs" / "cite.md").read_text(encoding="utf-8"), load(ROOT / "CITATION.cff")
    assert f"version = {{{citation['version']}}}" in page
    (paper,) = citation["references"]
    assert f"volume    = {{{paper['volume']}}}" in page
    assert f"pages     = {{{paper['start']}--{paper['end']}}}" in page
    assert f"year      = {{{paper['year']}}}" in page


def test_versions_that_are_tested_are_those_that_are_supported() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    jobs = load(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    matrix = jobs["wheel"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={matrix["python"][0]},<' in project
    (newest,) = matrix["torch"]
    assert f"torch=={newest}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (oldest,) = matrix["include"]
    assert f'"torch>={oldest["torch"].removesuffix(".0")},<' in project


def minor(version: str) -> tuple[int, int]:
    first, second = map(int, version.split(".")[:2])
    return first, second


def test_versions_that_are_admitted_are_those_with_stored_results() -> None:
    """What comes after the newest is not admitted before it is tested; the oldest is that of `make test-oldest`."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text(encoding="utf-8"))
    for name, pattern in (("python", r'requires-python = ">=(.*?),<(.*?)"'), ("torch", r'"torch>=(.*?),<(.*?)"')):
        tested = sorted({minor(row[name]) for row in rows})
        bounds = re.search(pattern, project)
        assert bounds is not None
        assert minor(bounds[1]) == tested[0]
        assert minor(bounds[2]) == (tested[-1][0], tested[-1][1] + 1)
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert [minor(each) for each in pythons] == sorted({minor(row["python"]) for row in rows})
    pins = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    for package in ("torch", "numpy", "scipy", "tqdm"):
        pinned = re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)
        assert pinned is not None
        assert re.search(rf'"{package}>={minor(pinned[1])[0]}\.{minor(pinned[1])[1]}[",.]', project)


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "publish.yml")["jobs"]
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert [step.get("uses", "").partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms(path: Path) -> None:
    form = load(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    identifiers = [field["id"] for field in fields]
    assert len(set(identifiers)) == len(identifiers) > 0
    assert all(field["attributes"]["label"] for field in fields)
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}


def test_the_version_is_the_same_everywhere() -> None:
    assert RELEASE["versions"]() == dict.fromkeys(RELEASE["PLACES"], sn.__version__)
    assert WHEEL["version_of"](ROOT) == sn.__version__


def test_a_release_with_another_version_or_open_changes_is_refused(tmp_path: Path) -> None:
    for name in RELEASE["PLACES"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(
        re.sub(r"^## Unreleased\n.*?(?=^## )", "## Unreleased\n\n", changes.read_text(), flags=re.S | re.M)
    )
    problems = RELEASE["problems"]
    assert problems(f"v{sn.__version__}", tmp_path) == []
    assert any("expected a tag such as" in line for line in problems(sn.__version__, tmp_path))
    (tmp_path / "CITATION.cff").write_text("version: 9.9.9\n")
    assert problems(f"v{sn.__version__}", tmp_path) == [f"CITATION.cff: 9.9.9, expected {sn.__version__}"]
    changes.write_text(changes.read_text().replace("## Unreleased\n", "## Unreleased\n\n- Something.\n"))
    assert "CHANGELOG.md: move the changes under Unreleased" in problems(f"v{sn.__version__}", tmp_path)[-1]


def test_the_program_of_the_readme_is_found() -> None:
    program = WHEEL["ten_lines"](ROOT)
    assert "import seminode as sn" in program
    assert "sol.stats" in program


def test_broken_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="#top">a</a><a href="sub/page.html#here">b</a><a href="https://example.org/x">c</a>'
        '<a href="#gone">d</a><a href="missing.html">e</a><a href="sub/page.html#away">f</a>'
    )
    (tmp_path / "sub" / "page.html").write_text('<h2 id="here"></h2><img src="../picture.png?v=1">')
    (tmp_path / "picture.png").touch()
    count, lost = LINKS["broken"](tmp_path)
    assert count == 6
    assert lost == ["index.html: #gone", "index.html: missing.html", "index.html: sub/page.html#away"]
    assert LINKS["main"]([str(tmp_path)]) == 1
    assert LINKS["main"]([str(tmp_path / "sub")]) == 2


def test_pages_that_search_does_not_find_are_named(tmp_path: Path) -> None:
    for name in ("index.html", "page.html", "404.html"):
        (tmp_path / name).touch()
    assert LINKS["unsearchable"](tmp_path) == ["index.html", "page.html"]  # no index at all
    (tmp_path / "search").mkdir()
    index = {"docs": [{"location": "index.html"}, {"location": "index.html#top"}, {"location": "page.html#a"}]}
    (tmp_path / "search" / "search_index.js").write_text(f"var __index = {json.dumps(index)}")
    assert LINKS["unsearchable"](tmp_path) == []
    assert LINKS["main"]([str(tmp_path)]) == 0
    (tmp_path / "other.html").touch()
    assert LINKS["unsearchable"](tmp_path) == ["other.html"]
    assert LINKS["main"]([str(tmp_path)]) == 1
