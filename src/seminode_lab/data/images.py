"""Labelled sets of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from .errors import DataError


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    Arguments:
        x: the images as bytes, (number, channels, height, width).
        labels: their classes, (number,).
        levels: pixels are below it.

    Example:
        >>> import torch
        >>> images = ImageSet(torch.zeros(10, 1, 28, 28, dtype=torch.uint8), torch.arange(10))
        >>> len(images), images.shape, images.levels
        (10, (1, 28, 28), 256)
    """

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
    """Training and test images.

    Attributes:
        train, test: the two parts.

    Example:
        >>> import torch
        >>> part = ImageSet(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3))
        >>> train, test = Images(part, part)
        >>> len(train), test.labels
        (3, tensor([0, 1, 2]))
    """

    train: ImageSet
    test: ImageSet


def reduced_images(images: Images, factor: int) -> Images:
    """Images of lower resolution: the rounded mean of every square of factor × factor pixels.

    Arguments:
        images: both parts.
        factor: a divisor of their sides.

    Example:
        >>> import torch
        >>> square = torch.tensor([[[[0, 2, 9, 9], [4, 6, 9, 9]]]], dtype=torch.uint8)
        >>> part = ImageSet(square, torch.zeros(1))
        >>> reduced_images(Images(part, part), 2).train.x.tolist()
        [[[[3, 9]]]]
    """
    train, test = (replace(part, x=_means(part.x, factor)) for part in images)
    return Images(train, test)


def _means(x: Tensor, factor: int) -> Tensor:
    if any(side % factor for side in x.shape[2:]):
        raise DataError(f"factor: expected a divisor of the sides {tuple(x.shape[2:])}, found {factor}")
    return functional.avg_pool2d(x.float(), factor).round().to(x.dtype)
