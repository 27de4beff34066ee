"""The commit of a run is that of our own sources, whatever repository is around them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ROOT

from seminode_lab import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *names, "-C", str(folder), *arguments]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path, package: str, project: str = 'name = "seminode"\n') -> Path:
    """A repository with the package in it; the folder of the package."""
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f"[project]\n{project}")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Begin")
    return folder / package


def test_the_commit_of_our_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = repository(tmp_path / "own", "src/seminode_lab")
    other = repository(tmp_path / "other", "src/seminode_lab", 'name = "another"\n')
    expected = git(package, "rev-parse", "--short=12", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))  # as in a hook of another repository
    assert provenance.commit(package) == expected
    (tmp_path / "own" / "pyproject.toml").write_text('[project]\nname = "seminode"\n\n')
    assert provenance.commit(package) == f"{expected}-dirty"
    assert provenance.commit(other) is None


@pytest.mark.parametrize("package", ["lib/python3.11/site-packages/seminode_lab", "vendored/src/seminode_lab"])
def test_a_repository_around_an_installed_package_is_not_asked(package: str, tmp_path: Path) -> None:
    assert provenance.commit(repository(tmp_path, package)) is None


def test_programs_in_the_configuration_of_a_repository_are_not_run(tmp_path: Path) -> None:
    package = repository(tmp_path / "own", "src/seminode_lab")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    git(package, "config", "core.fsmonitor", str(program))
    (tmp_path / "own" / "pyproject.toml").touch()
    git(package, "status")
    assert (tmp_path / "was-run").exists()  # git alone does run it
    (tmp_path / "was-run").unlink()
    assert provenance.commit(package) is not None
    assert not (tmp_path / "was-run").exists()


def test_the_commit_of_this_package() -> None:
    if (ROOT / ".git").exists():
        assert provenance.commit() is not None
