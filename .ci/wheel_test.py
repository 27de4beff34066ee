"""Build the distribution from a clean clone, install it in new environments outside the clone, and try it there.

    python .ci/wheel_test.py --python python3.10 python3.13 --torch 2.13.0 --dist dist

Each interpreter gets an environment with nothing but `pip install seminode`; the extra `lab` is added afterwards. No
constraints apply except the version of torch: this is what a user installs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Calls of commands of the laboratory. Without its extra they must say what to install.
NEEDS_EXTRA = {
    "run": ("ncde",),
    "sweep": (),
    "reproduce": (),
    "report": (".",),
    "table": (".",),
    "figure": (".",),
}


def call(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Run a command away from the repository and return what it printed. Exits if the status is another one."""
    # The environment of the caller must not lend its packages.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != status:
        shown = " ".join(map(str, command))
        sys.exit(f"{shown}\nexit status {done.returncode}, expected {status}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"wheel-test: {message}")


def environment(folder: Path, python: str) -> Path:
    """A new virtual environment; returns its folder of programs."""
    call(python, "-m", "venv", folder, cwd=folder.parent)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    require(programs.is_dir(), f"{python} -m venv made no {programs}")
    return programs


def install(programs: Path, *arguments: str | Path) -> None:
    # Without --no-compile, pip compiles all of torch, which takes longer than everything else.
    quiet = ("-qq", "--no-compile", "--disable-pip-version-check")
    call(programs / "python", "-m", "pip", "install", *quiet, *arguments, cwd=programs.parent)


def clone(folder: Path) -> Path:
    """A clone of the current commit; changes that are not committed are not part of it."""
    commit = call("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    if call("git", "status", "--porcelain", cwd=ROOT).strip():
        print(f"note: there are uncommitted changes; the build is that of {commit[:12]}", flush=True)
    target = folder / "clone"
    call("git", "clone", "--quiet", "--no-checkout", ROOT, target, cwd=folder)
    call("git", "checkout", "--quiet", "--detach", commit, cwd=target)
    return target


def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from the sdist."""
    programs = environment(folder / "build", sys.executable)
    install(programs, "build")
    call(programs / "python", "-m", "build", "--outdir", folder / "dist", source, cwd=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def check_contents(source: Path, wheel: Path, sdist: Path) -> None:
    """The wheel holds exactly the tracked files of `src`; the sdist holds these, the tests and the pages."""
    tracked = call("git", "ls-files", cwd=source).splitlines()
    packages = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    require(packed == packages, f"{wheel.name} and src differ in {sorted(packed ^ packages)[:10]}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tracked if name.startswith(("src/", "tests/", "docs/", "examples/"))}
    missing = sorted(wanted - names)
    require(not missing, f"{sdist.name} lacks {missing[:10]}")


def ten_lines(source: Path) -> str:
    """The first program of the README."""
    found = re.search(r"^```python\n(.*?)^```$", (source / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    require(found is not None, "README.md has no Python block")
    assert found is not None
    return found[1]


def version_of(source: Path) -> str:
    found = re.search(r'^version = "(.+)"$', (source / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    require(found is not None, "pyproject.toml has no version")
    assert found is not None
    return found[1]


def check_import(programs: Path, empty: Path, version: str) -> None:
    code = "import seminode; print(seminode.__version__); print(seminode.__file__)"
    printed = call(programs / "python", "-c", code, cwd=empty).splitlines()
    require(printed[0] == version, f"the import printed {printed}, expected version {version} and the file")
    # What follows is a warning of torch's own, if NumPy is missing.
    inside = Path(printed[1]).resolve().is_relative_to(programs.parent.resolve())
    require(inside, f"the import took {printed[1]}, expected a file in {programs.parent}")


def smoke(programs: Path, empty: Path, source: Path, *, lab: bool) -> None:
    """Import, the program of the README, and the command."""
    version, command = version_of(source), programs / "seminode"
    check_import(programs, empty, version)
    printed = call(programs / "python", "-c", ten_lines(source), cwd=empty)
    require("backward: nfe=" in printed, f"the program of the README printed {printed!r}")
    printed = call(command, "--version", cwd=empty)
    require(printed.startswith(f"seminode {version}\n"), f"seminode --version printed {printed!r}")
    listed = call(command, "--help", cwd=empty)
    require(all(f"    {name}" in listed for name in ("profile", *NEEDS_EXTRA)), f"seminode --help printed {listed}")
    call(command, "profile", "--help", cwd=empty)
    for name, arguments in NEEDS_EXTRA.items():
        call(command, name, "--help", cwd=empty)
        if not lab:
            printed = call(command, name, *arguments, cwd=empty, status=2)
            require("pip install 'seminode[lab]'" in printed, f"seminode {name} without the extra printed {printed!r}")
    if lab:
        call(command, "data", "status", cwd=empty)
    call(programs / "python", "-m", "pip", "check", cwd=empty)


def try_out(python: str, torch: str, source: Path, files: tuple[Path, Path], folder: Path) -> None:
    """Install the wheel with and without the extra, then the sdist."""
    wheel, sdist = files
    home, empty = folder / "environment", folder / "empty"
    empty.mkdir(exist_ok=True)
    programs = environment(home, python)
    pin = f"torch=={torch}"
    install(programs, wheel, pin)
    smoke(programs, empty, source, lab=False)
    print("  wheel: passed", flush=True)
    install(programs, f"{wheel}[lab]", pin)
    smoke(programs, empty, source, lab=True)
    print("  wheel[lab]: passed", flush=True)
    install(programs, "--force-reinstall", "--no-deps", sdist)
    check_import(programs, empty, version_of(source))
    print("  sdist: passed", flush=True)
    shutil.rmtree(home)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to install for")
    parser.add_argument("--torch", default="2.13.0", help="the version of torch to install")
    parser.add_argument("--dist", type=Path, help="copy the tested wheel and sdist to this folder")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="seminode-wheel-") as name:
        folder = Path(name)
        source = clone(folder)
        files = build(source, folder)
        check_contents(source, *files)
        print(*(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB" for file in files), sep="\n", flush=True)
        for python in options.python:
            label = call(python, "--version", cwd=folder).strip()
            print(f"{label}, torch {options.torch}", flush=True)
            try_out(python, options.torch, source, files, folder)
        if options.dist is not None:
            options.dist.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy2(file, options.dist)


if __name__ == "__main__":
    main()
