"""Where results come from: versions, machine, and the commit of the sources."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import seminode as sn

#: Git runs programs that a repository's configuration names: these settings turn them off.
HARMLESS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
SECONDS = 30.0


def circumstances() -> dict[str, Any]:
    """The versions and the machine with which a run is made."""
    return {
        "seminode": sn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def commit(package: Path = Path(__file__).parent) -> str | None:
    """The commit of the sources, marked if they were changed; `None` if they are not in their own repository."""
    root = _repository(package)
    if root is None:
        return None
    # Variables such as GIT_DIR name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", *HARMLESS, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _repository(package: Path) -> Path | None:
    """The root of our repository, if the package is in it and not installed somewhere in another one."""
    package = package.resolve()
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return None
    try:
        project = (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return root if re.search(r'^name = "seminode"$', project, re.MULTILINE) else None
