"""Run a selection of the tests with other versions of Python and torch, each in an environment of its own.

    python .ci/versions.py 3.10:oldest 3.12:2.13.0 3.11:2.14.1 [--whole] [--processes auto] [--record]

`3.12:2.13.0` is Python 3.12 with torch 2.13.0 and the newest release of everything else that fits; `oldest` takes the
versions of constraints-oldest.txt. The environments are `.venv-3.12-2.13.0` and so on; they are kept, and used again.
Prints a table of the numbers of tests that passed. `--record` writes it to benchmarks/results/versions.json too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDEST = ROOT / "constraints-oldest.txt"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PACKAGES = [
    "tqdm",
    "numpy",
    "scipy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "torchcde",
    "torchdiffeq",
    "setuptools",
]
#: Parts of the library that depend on the versions most: autograd, structures of states, dispatch, real compilation.
SHORT = (
    *("tests/test_solve.py", "tests/test_norms.py", "tests/test_controllers.py", "tests/test_grids.py"),
    *("tests/_field", "tests/_stepping/test_loop.py", "tests/_stepping/test_lanes.py", "tests/test_threads.py"),
    *(
        "tests/adjoints/test_gradients.py",
        "tests/adjoints/test_events.py",
        "tests/paths",
        "tests/models/test_models.py",
    ),
    *("tests/_compile/test_engine.py", "tests/_compile/test_inductor.py", "tests/_compile/test_chain.py"),
)
#: Every part of the library.
WHOLE = (
    *SHORT,
    *("tests/_stepping", "tests/solvers", "tests/test_events.py", "tests/test_properties.py"),
    *("tests/adjoints/test_fields.py", "tests/adjoints/test_implicit.py"),
    *("tests/models/test_neural_ode.py", "tests/models/test_cnf.py"),
)


def interpreter(version: str) -> str:
    """A program that is Python of this version: on the path, or one of pyenv's."""
    programs = [shutil.which(f"python{version}"), sys.executable]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for program in filter(None, programs):
        # A program of pyenv may be on the path and say that it is not selected.
        found = subprocess.run([program, "-c", code], capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() == version:
            return program
    raise SystemExit(f"versions: Python {version} is not installed; it is looked for on the path and in {pyenv}")


def oldest_torch() -> str:
    found = re.search(r"^torch==(\S+)$", OLDEST.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, OLDEST
    return found[1]


def environment(python: str, torch: str, oldest: bool) -> Path:
    """The interpreter of an environment with these versions; what is installed already is left as it is."""
    folder = ROOT / f".venv-{python}-{torch}"
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    if not programs.is_dir():
        subprocess.run([interpreter(python), "-m", "venv", str(folder)], check=True)
    program = programs / "python"
    install = [str(program), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    constraints = ["-c", str(OLDEST)] if oldest else []
    subprocess.run([*install, *constraints, f"torch=={torch}", *PACKAGES], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    return program


def circumstances(program: Path) -> dict[str, str]:
    """The versions in an environment."""
    names = ("torch", "numpy", "scipy", "tqdm")
    code = f"import json, platform; from importlib.metadata import version as v; names = {names!r}; "
    code += "print(json.dumps({'python': platform.python_version(), **{n: v(n) for n in names}}))"
    return json.loads(subprocess.run([program, "-c", code], check=True, capture_output=True, text=True).stdout)


def run_tests(program: Path, tests: Sequence[str], processes: str) -> dict[str, Any]:
    """How many tests passed, failed and were skipped."""
    report = program.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # Without the time limit of a test: several environments may run on a busy machine.
    command = [str(program), "-m", "pytest", "-q", "-n", processes, "--timeout=0", f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, env=environment)
    if not report.exists():
        raise SystemExit(f"versions: no tests were run by {program}")
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "tests": list(tests),
    }


def record(row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same versions."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []

    def numbers(each: dict[str, Any]) -> list[list[str]]:
        return [[f"{int(x):04}" for x in re.findall(r"\d+", each[key])[:3]] for key in ("python", "torch")]

    rows = sorted([*(each for each in rows if numbers(each) != numbers(row)), row], key=numbers)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="+", help="such as 3.12:2.13.0, or 3.10:oldest")
    parser.add_argument("--whole", action="store_true", help="tests of every part of the library; three times as many")
    parser.add_argument("--processes", default="auto", help="of pytest, by default one per core")
    parser.add_argument("--record", action="store_true", help=f"write the numbers to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    rows = []
    for name in options.versions:
        python, _, torch = name.partition(":")
        oldest = torch == "oldest"
        program = environment(python, oldest_torch() if oldest else torch, oldest)
        found = {**circumstances(program), **run_tests(program, WHOLE if options.whole else SHORT, options.processes)}
        rows.append(found)
        if options.record:
            record(found)
    for row in rows:
        versions = ", ".join(f"{key} {row[key]}" for key in ("python", "torch", "numpy", "scipy"))
        print(f"{versions}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped")
    raise SystemExit(any(row["failed"] or not row["passed"] for row in rows))


if __name__ == "__main__":
    main()
