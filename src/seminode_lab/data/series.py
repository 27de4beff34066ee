"""A labelled set of time series of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SeriesSet:
    """Series (number, longest, channels), padded with NaN, and their lengths and labels, both (number,)."""

    x: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.x)

    @property
    def channels(self) -> int:
        return self.x.shape[-1]

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every channel over all series, without padding."""
        values = self.x[torch.arange(self.x.shape[1]) < self.lengths[:, None]]
        return values.mean(0), values.std(0)

    def normalised(self, mean: Tensor, std: Tensor) -> SeriesSet:
        """The series, normalised with the given statistics, usually those of the training set."""
        return replace(self, x=(self.x - mean).div_(std + 1e-5))
