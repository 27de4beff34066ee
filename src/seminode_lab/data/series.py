"""A labelled set of time series of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SeriesSet:
    """Labelled series of different lengths.

    Arguments:
        x: the series, (number, longest, channels), padded with NaN.
        lengths: how many points each has, (number,).
        labels: their classes, (number,), from 0.

    Example:
        >>> from seminode_lab.data import japanese_vowels
        >>> train, test = japanese_vowels()
        >>> len(train), train.channels, train.classes
        (270, 12, 9)
        >>> test = test.normalised(*train.statistics())
        >>> test.x.shape, test.x[0, : test.lengths[0]].isnan().any()
        (torch.Size([370, 29, 12]), tensor(False))
    """

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
        """The series, normalised with a `mean` and a `std` per channel, usually those of the training set."""
        return replace(self, x=(self.x - mean).div_(std + 1e-5))
