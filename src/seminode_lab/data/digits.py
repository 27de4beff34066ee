"""Digits of 8×8 pixels, which are part of scikit-learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from .base import DataSet, DataStatus
from .errors import DataError
from .images import Images, ImageSet

IMAGES = 1797
LEVELS = 17  # pixels are integers from 0 to 16


def digits() -> Images:
    """1,437 training images (1, 8, 8) and 360 test images, as bytes from 0 to 16.

    The split is stratified by label: scikit-learn's `train_test_split` with `train_size=0.8` and `random_state=0`.

    Reference: Alpaydin and Kaynak, *Optical recognition of handwritten digits*, UCI Machine Learning Repository, 1998.

    Example:
        >>> train, test = digits()
        >>> train.x.shape, len(test), train.levels
        (torch.Size([1437, 1, 8, 8]), 360, 17)
    """
    datasets, selection = _sklearn()
    found = datasets.load_digits()
    x = torch.from_numpy(found.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(found.target).long()
    if len(x) != IMAGES or int(x.max()) >= LEVELS:
        raise DataError(f"digits: expected {IMAGES:,} images of {LEVELS} levels, found {len(x):,} up to {int(x.max())}")
    rows = selection.train_test_split(range(IMAGES), train_size=0.8, random_state=0, stratify=found.target)
    train, test = (ImageSet(x[chosen], labels[chosen], LEVELS) for chosen in map(torch.tensor, rows))
    return Images(train, test)


def _sklearn() -> tuple[Any, Any]:
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'seminode[lab]'") from error
    return datasets, model_selection


class Digits(DataSet):
    name = "digits"
    title = "digits of 8×8 pixels"
    unit = "images"
    origin = "UCI Machine Learning Repository, inside scikit-learn"
    licence = "CC BY 4.0; in scikit-learn, BSD"

    def status(self, root: Path) -> DataStatus:
        spec = importlib.util.find_spec("sklearn")
        file = None
        if spec is not None and spec.origin is not None:
            file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file is None or not file.is_file():
            return DataStatus("absent", expected=IMAGES, notes=("needs scikit-learn: pip install 'seminode[lab]'",))
        return DataStatus("complete", file, IMAGES, IMAGES, file.stat().st_size)

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        status = self.status(root)
        if status.place is None:
            return status
        try:
            digits()
        except Exception as error:
            return status.noting(f"{type(error).__name__}: {error}", state="broken")
        return status

    def fetch(self, root: Path, progress: bool = True) -> None:
        if self.status(root).place is None:
            raise DataError("digits: need scikit-learn, which is not installed: pip install 'seminode[lab]'")
