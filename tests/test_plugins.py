"""The extensions that docs/contributing.md shows as diffs: each applies, and passes its own test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from project import ROOT

PAGE = ROOT / "docs" / "contributing.md"
BLOCK = re.compile(r"^```diff\n(?P<diff>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^--- /dev/null\n\+\+\+ b/(?P<name>\S+)\n@@ -0,0 \+1,(?P<count>\d+) @@\n", re.MULTILINE)


class Plugin(NamedTuple):
    """A section of the page with the files that its diff adds."""

    section: str
    files: dict[str, str]

    @property
    def name(self) -> str:
        return next(name for name in self.files if not name.startswith("test_"))


def added(diff: str) -> dict[str, str]:
    """The files that a diff adds, by name. A diff that does anything else, or has wrong line counts, is an error."""
    pieces = FILE.split(diff)
    if pieces[0] or len(pieces) == 1:
        raise ValueError(f"the diff does not begin with a new file: {diff[:80]!r}")
    files = {}
    for name, count, body in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        lines = body.splitlines(keepends=True)
        if len(lines) != int(count) or not all(line.startswith("+") for line in lines):
            raise ValueError(f"{name}: expected {count} added lines, found {len(lines)} lines")
        files[name] = "".join(line[1:] for line in lines)
    return files


def plugins() -> list[Plugin]:
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        section = re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)[-1]
        found.append(Plugin(section, added(match["diff"])))
    return found


PLUGINS = plugins()
every_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)


def run_tests(files: dict[str, str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Write the files into a folder, and run pytest there."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(folder)]
    return subprocess.run([*command, *options, str(folder)], cwd=folder, capture_output=True, text=True, check=False)


def test_every_kind_of_extension_is_shown() -> None:
    kinds = ["A solver", "A discrete adjoint", "A continuous adjoint", "A controller", "A norm"]
    assert [plugin.section for plugin in PLUGINS] == kinds


@every_plugin
def test_a_plugin_is_one_file_and_its_test(plugin: Plugin) -> None:
    assert set(plugin.files) == {plugin.name, f"test_{plugin.name}"}


def test_plugins_pass_their_own_tests(tmp_path: Path) -> None:
    """All in one process, which takes seconds to import PyTorch; nothing is skipped."""
    files = {name: text for plugin in PLUGINS for name, text in plugin.files.items()}
    assert len(files) == 2 * len(PLUGINS)  # no two have the same name
    run = run_tests(files, tmp_path, "-rA")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d+ passed in ", run.stdout, re.MULTILINE), run.stdout
    passed = set(re.findall(r"^PASSED test_(\w+\.py)::", run.stdout, re.MULTILINE))
    assert passed == {plugin.name for plugin in PLUGINS}


#: A mistake in each plug-in, which its test must find.
MISTAKES = {
    "ssprk3.py": ("1 / 3 * y0 + 2 / 3 *", "1 / 4 * y0 + 3 / 4 *"),
    "from_start.py": ("sweep.advance(0, j, start)", "sweep.advance(0, j - 1, start)"),
    "gauss_backsolve.py": ("math.sqrt(3) / 6, 0.5", "math.sqrt(3) / 5, 0.5"),
    "smooth_pi.py": ("math.atan((rho - 1.0) / self.kappa)", "(rho - 1.0) / self.kappa"),
    "weighted_rms.py": ("/ total", "/ len(weights)"),
}


@pytest.mark.slow
@every_plugin
def test_a_mistake_in_a_plugin_fails_its_test(plugin: Plugin, tmp_path: Path) -> None:
    right, wrong = MISTAKES[plugin.name]
    text = plugin.files[plugin.name]
    assert text.count(right) == 1
    run = run_tests({**plugin.files, plugin.name: text.replace(right, wrong)}, tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert " failed" in run.stdout


@pytest.mark.parametrize(
    "diff",
    [
        "",
        "+++ b/new.py\n@@ -0,0 +1,1 @@\n+x = 1\n",
        "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n",
        "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n-y = 2\n",
        "--- a/old.py\n+++ b/old.py\n@@ -1,1 +1,1 @@\n-x = 1\n+x = 2\n",
    ],
)
def test_what_is_not_a_diff_of_new_files_is_refused(diff: str) -> None:
    with pytest.raises(ValueError, match=r"does not begin with a new file|expected \d added lines"):
        added(diff)
