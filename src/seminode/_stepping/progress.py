"""A progress bar over the time of a solve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .observers import Observer
from .step import Step


class Progress(Observer):
    """A bar on a terminal that fills with the time solved; silent elsewhere."""

    def __init__(self, times: Sequence[float]):
        from tqdm import tqdm  # not needed, and not paid for, without a bar

        self._rejected = 0
        self._bar: Any = tqdm(
            total=abs(times[-1] - times[0]),
            disable=not sys.stderr.isatty(),
            bar_format="{desc}: {percentage:3.0f}%|{bar}| t {n:.4g}/{total:.4g} [{elapsed}<{remaining}{postfix}]",
            desc="solve",
        )

    def accepted(self, step: Step, ratio: float) -> None:
        length: Any = abs(step.plan.dt)
        length = float(length.mean()) if isinstance(length, Tensor) else length
        self._bar.update(length)
        self._bar.set_postfix(dt=f"{length:.2g}", rejected=self._rejected, refresh=False)

    def rejected(self, step: Step, ratio: float) -> None:
        self._rejected += 1

    def close(self) -> None:
        self._bar.close()
