"""Progress bars on a terminal."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(show: bool, description: str, **options: Any) -> Any:
    """A tqdm bar that disappears when it is closed. Without a terminal, or if not `show`, it prints nothing."""
    from tqdm import tqdm  # imported late: only needed here

    return tqdm(desc=description, disable=not (show and sys.stderr.isatty()), leave=False, **options)
