"""All benchmarks, one after the other: `python -m benchmarks`."""

from __future__ import annotations

import runpy
import sys

for name in ("overhead", "detest"):
    print(f"\n# {name}\n", flush=True)
    sys.argv = [f"benchmarks.{name}"]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
