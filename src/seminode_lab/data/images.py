"""Labelled sets of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .errors import DataError


@dataclass(frozen=True)
class ImageSet:
    """Images (number, channels, height, width) as bytes below `levels`, and their labels (number,)."""

    x: Tensor
    labels: Tensor
    levels: int = 256

    def __post_init__(self) -> None:
        if len(self.x) != len(self.labels):
            raise DataError(f"labels: expected one for each of {len(self.x):,} images, found {len(self.labels):,}")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image."""
        channels, height, width = self.x.shape[1:]
        return channels, height, width


class Images(NamedTuple):
    """Training and test images."""

    train: ImageSet
    test: ImageSet
