"""CIFAR-10: small colour images of ten classes, in the official batches for Python."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .archives import unpack
from .base import DataSet, DataStatus, broken, found_in, located, warn_incomplete
from .download import Resource, download
from .errors import DataError, MissingData
from .files import digest
from .images import Images, ImageSet
from .pickles import read_pickle

ARCHIVE = Resource(
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    "cifar-10-python.tar.gz",
    "md5:c58f30108f718f92721af3b95e74349a",
    170_498_071,
)
TARGET = "cifar-10-batches-py"
PLACES = (TARGET, f"cifar10/{TARGET}", f"cifar-10/{TARGET}", ".")
#: The files and their published md5 sums.
BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
TRAIN, TEST = tuple(BATCHES)[:5], tuple(BATCHES)[5:]
IMAGES = 10_000  # in a batch
TOTAL = IMAGES * len(BATCHES)
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
#: SHA-256 of the pixels followed by the labels of each batch, one byte each. It does not depend on the pickle format.
CONTENTS = {
    "data_batch_1": "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
    "data_batch_2": "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
    "data_batch_3": "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
    "data_batch_4": "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
    "data_batch_5": "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
    "test_batch": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
}


def cifar10(root: str | os.PathLike[str] | None = None) -> Images:
    """50,000 training images (3, 32, 32) and 10,000 test images, as bytes, in the order of the batches.

    The batches are pickles; they are read without running code from them. `NAMES` in this module has the names of the
    labels.

    Reference: Krizhevsky, *Learning multiple layers of features from tiny images*, 2009.

    Arguments:
        root: the folder with data; by default that of `SEMINODE_DATA`, or the user's cache.

    Example:
        After `seminode data fetch cifar10`:

        >>> train, test = cifar10()  # doctest: +SKIP
        >>> train.x.shape, [NAMES[label] for label in train.labels[:3]]  # doctest: +SKIP
        (torch.Size([50000, 3, 32, 32]), ['frog', 'truck', 'truck'])
    """
    folder = located("cifar10", root, PLACES, tuple(BATCHES))
    # Checksums come first: a file that has the published one needs no further checks.
    original = {name for name in BATCHES if (folder / name).is_file() and digest(folder / name, "md5") == BATCHES[name]}
    batches = {name: read_batch(folder / name) for name in BATCHES if (folder / name).is_file()}
    train, test = _joined(folder, batches, TRAIN), _joined(folder, batches, TEST)
    other = [name for name, batch in batches.items() if name not in original and _content(*batch) != CONTENTS[name]]
    if other or len(train) + len(test) != TOTAL:
        missing = ", ".join(name for name in BATCHES if name not in batches)
        notes = [f"{missing} missing"] * bool(missing) + [f"not the published images: {', '.join(other)}"] * bool(other)
        why = f" ({'; '.join(notes)})" if notes else ""
        warn_incomplete("cifar10", folder, f"{len(train) + len(test):,} of {TOTAL:,} images{why}")
    return Images(train, test)


def _joined(folder: Path, batches: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str]) -> ImageSet:
    there = [batches[name] for name in names if name in batches]
    if not there:
        raise MissingData(f"cifar10: expected {', '.join(names)} in {str(folder)!r}, found none")
    return ImageSet(torch.cat([x for x, _ in there]), torch.cat([y for _, y in there]))


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images (number, 3, 32, 32) and labels of one batch."""
    batch = read_pickle(path)
    if not isinstance(batch, dict):
        raise DataError(f"{path}: expected a dict with data and labels, found {type(batch).__name__}")
    x, labels = _entry(path, batch, "data"), _entry(path, batch, "labels")
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != 3072:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise DataError(f"{path}: data: expected the shape (images, 3072), found {shape}")
    if not (isinstance(labels, list) and all(type(label) is int and 0 <= label <= 9 for label in labels)):
        raise DataError(f"{path}: labels: expected a list of numbers from 0 to 9")
    if len(labels) != len(x):
        raise DataError(f"{path}: labels: expected one for each of {len(x):,} images, found {len(labels):,}")
    return x.reshape(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _entry(path: Path, batch: dict[Any, Any], name: str) -> Any:
    for key in (name.encode(), name):
        if key in batch:
            return batch[key]
    raise DataError(f"{path}: expected an entry {name!r}, found {', '.join(map(ascii, batch))[:200] or 'nothing'}")


def _content(x: Tensor, labels: Tensor) -> str:
    total = hashlib.sha256(x.numpy().tobytes())
    total.update(bytes(labels.tolist()))
    return total.hexdigest()


class CIFAR10(DataSet):
    name = "cifar10"
    title = "CIFAR-10, small colour images"
    unit = "images"
    origin = ARCHIVE.addresses[0]
    licence = "none stated; cite Krizhevsky 2009"
    download_size = ARCHIVE.size

    def status(self, root: Path) -> DataStatus:
        folder = found_in(root, PLACES, tuple(BATCHES))
        if folder is None:
            return DataStatus("absent", expected=TOTAL)
        there = [folder / name for name in BATCHES if (folder / name).is_file()]
        size = sum(path.stat().st_size for path in there)
        status = DataStatus("complete", folder, IMAGES * len(there), TOTAL, size)
        missing = [name for name in BATCHES if not (folder / name).is_file()]
        return status.noting(f"missing: {', '.join(missing)}", state="incomplete") if missing else status

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        status = self.status(root)
        folder = status.place
        if folder is None:
            return status
        other = []
        for name, md5 in BATCHES.items():
            path = folder / name
            if not path.is_file() or digest(path, "md5") == md5:
                continue
            try:
                if _content(*read_batch(path)) == CONTENTS[name]:
                    other.append(name)
                else:
                    status = status.noting(f"{path}: neither the published md5 {md5} nor its images", state="broken")
            except DataError as error:
                status = broken(error, status)
        note = f"not the original files but with the same images and labels: {', '.join(other)}"
        return status.noting(note) if other else status

    def fetch(self, root: Path, progress: bool = True) -> None:
        if self.status(root).state == "complete":
            return
        brought = not (root / ARCHIVE.name).exists()
        archive = download(ARCHIVE, root, progress)
        unpack(archive, root / TARGET, TARGET, progress)
        if brought:
            archive.unlink()
