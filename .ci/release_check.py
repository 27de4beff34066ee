"""Check that a tag is the version that the files of this repository say: `python .ci/release_check.py v0.2.0`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Where the version is written, and how.
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "src/seminode/__init__.py": r'^__version__ = "(.+)"$',
    "CHANGELOG.md": r"^## (\d\S*)",  # the newest section; "Unreleased" does not count
}


def versions(root: Path = ROOT) -> dict[str, str | None]:
    """The version in each place, `None` where there is none."""
    found = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else None
    return found


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """One line for each place that disagrees with the tag, and one if changes are left under "Unreleased"."""
    expected = tag.removeprefix("v")
    lines = [f"{name}: {found}, expected {expected}" for name, found in versions(root).items() if found != expected]
    if not tag.startswith("v"):
        lines.append(f"expected a tag such as v0.2.0, found {tag!r}")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changes, re.DOTALL | re.MULTILINE)
    if unreleased and unreleased[1].strip():
        lines.append(f"CHANGELOG.md: move the changes under Unreleased into the section {expected}")
    return lines


if __name__ == "__main__":
    found = problems(sys.argv[1] if len(sys.argv) == 2 else "")
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
