"""Japanese Vowels: utterances of /ae/ by nine speakers. The data are shipped with the package."""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .base import DataSet, DataStatus
from .errors import DataError
from .series import SeriesSet

FILE = Path(__file__).parent / "shipped" / "japanese_vowels.xz"
SHA256 = "5ef706692f1a6a0195273c5f00e2b7ced8293c50ab7ef35a1eb03e53ec08b93b"
CHANNELS, SERIES = 12, 640


class Vowels(NamedTuple):
    """270 training series, 30 per speaker, and 370 test series."""

    train: SeriesSet
    test: SeriesSet


def japanese_vowels(dtype: torch.dtype = torch.float32) -> Vowels:
    """Series of 12 cepstrum coefficients, 7 to 29 points long; labels 0–8 are the speakers.

    Reference: Kudo, Toyama and Shimbo, Pattern Recognition Letters 20, 1999; UCI Machine Learning Repository, CC BY 4.0
    (the notice is beside the file).

    Arguments:
        dtype: of the series.

    Example:
        >>> train, test = japanese_vowels()
        >>> train.x.shape, int(train.lengths.max()), len(test), test.classes
        (torch.Size([270, 29, 12]), 26, 370, 9)
    """
    packed = FILE.read_bytes()  # it may be a link: some package managers install files as links
    wrong = _difference(packed)
    if wrong is not None:
        raise DataError(f"{FILE}: {wrong}; reinstall seminode")
    numbers = torch.frombuffer(bytearray(lzma.decompress(packed)), dtype=torch.int32)
    if sys.byteorder == "big":
        numbers = numbers.view(torch.uint8).reshape(-1, 4).flip(1).contiguous().view(torch.int32).flatten()
    count = int(numbers[:2].sum())
    lengths, labels, values = numbers[2:].split([count, count, len(numbers) - 2 - 2 * count])
    # Divided in float64, so that each decimal becomes the nearest number of the requested dtype.
    values = (values.double() / 1e6).to(dtype)
    x = values.new_full((count, int(lengths.max()), CHANNELS), float("nan"))
    for series, own in zip(x, values.split((CHANNELS * lengths).tolist()), strict=True):
        own = own.reshape(CHANNELS, -1).T
        series[: len(own)] = own
    first = int(numbers[0])
    return Vowels(_part(x, lengths, labels, slice(first)), _part(x, lengths, labels, slice(first, None)))


def _difference(packed: bytes) -> str | None:
    found = hashlib.sha256(packed).hexdigest()
    return None if found == SHA256 else f"expected sha256 {SHA256}, found {found}"


def _part(x: Tensor, lengths: Tensor, labels: Tensor, rows: slice) -> SeriesSet:
    return SeriesSet(x[rows], lengths[rows].long(), labels[rows].long())


class JapaneseVowels(DataSet):
    name = "japanese_vowels"
    title = "Japanese Vowels, nine speakers"
    unit = "series"
    origin = "UCI Machine Learning Repository, https://doi.org/10.24432/C5NS47; shipped with the package"
    licence = "CC BY 4.0"

    def status(self, root: Path) -> DataStatus:
        if not FILE.is_file():
            return DataStatus("absent", expected=SERIES, notes=("is missing in this installation; reinstall seminode",))
        return DataStatus("complete", FILE, SERIES, SERIES, FILE.stat().st_size)

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        status = self.status(root)
        wrong = _difference(FILE.read_bytes()) if status.place is not None else None
        return status.noting(f"{FILE}: {wrong}; reinstall seminode", state="broken") if wrong else status

    def fetch(self, root: Path, progress: bool = True) -> None:
        pass  # it is part of the package
