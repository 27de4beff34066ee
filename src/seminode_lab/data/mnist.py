"""MNIST: handwritten digits, in the four original files."""

from __future__ import annotations

import os
from pathlib import Path

from .base import DataSet, DataStatus, broken, found_in, located, warn_incomplete
from .download import Resource, download
from .errors import DataError, MissingData
from .files import mismatch
from .idx import read_idx
from .images import Images, ImageSet

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FILES = {
    "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
RESOURCES = tuple(
    Resource(tuple(mirror + name for mirror in MIRRORS), name, f"md5:{md5}", size)
    for name, (md5, size) in FILES.items()
)
PARTS = {"train": 60_000, "t10k": 10_000}
TOTAL = sum(PARTS.values())
TARGET = "mnist"
PLACES = (TARGET, "MNIST/raw", "MNIST", ".")
MARKS = (*FILES, *(name.removesuffix(".gz") for name in FILES))


def mnist(root: str | os.PathLike[str] | None = None) -> Images:
    """60,000 training images (1, 28, 28) and 10,000 test images, as bytes, in the order of the files.

    Reference: LeCun, Bottou, Bengio and Haffner, Proceedings of the IEEE 86, 1998.

    Arguments:
        root: the folder with data; by default that of `SEMINODE_DATA`, or the user's cache.

    Example:
        After `seminode data fetch mnist`:

        >>> train, test = mnist()  # doctest: +SKIP
        >>> train.x.shape, train.labels[:3]  # doctest: +SKIP
        (torch.Size([60000, 1, 28, 28]), tensor([5, 0, 4]))
    """
    folder = located("mnist", root, PLACES, MARKS)
    train, test = (_part(folder, part, expected) for part, expected in PARTS.items())
    return Images(train, test)


def _part(folder: Path, part: str, expected: int) -> ImageSet:
    images, labels = _file(folder, f"{part}-images-idx3-ubyte"), _file(folder, f"{part}-labels-idx1-ubyte")
    # No checksums are published for files that are not compressed.
    other = [path.name for path in (images, labels) if path.name in FILES and _wrong(path)]
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or x.shape[1:] != (28, 28):
        raise DataError(f"{images}: expected the shape (images, 28, 28), found {tuple(x.shape)}")
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(f"{labels}: expected the shape ({len(x)},), found {tuple(y.shape)}")
    if len(y) and int(y.max()) > 9:
        raise DataError(f"{labels}: expected labels from 0 to 9, found {int(y.max())}")
    if other or len(x) != expected:
        why = f" (not the published files: {', '.join(other)})" if other else ""
        warn_incomplete("mnist", images, f"{len(x):,} of {expected:,} images{why}")
    return ImageSet(x[:, None], y.long())


def _wrong(path: Path, progress: bool = False) -> str | None:
    return mismatch(path, f"md5:{FILES[path.name][0]}", progress)


def _file(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise MissingData(f"mnist: expected {name}.gz or {name} in {str(folder)!r}, found neither")


class MNIST(DataSet):
    name = "mnist"
    title = "MNIST, handwritten digits"
    unit = "images"
    origin = MIRRORS[0]
    licence = "none included; cite LeCun et al. 1998"
    download_size = sum(resource.size for resource in RESOURCES)

    def status(self, root: Path) -> DataStatus:
        folder = found_in(root, PLACES, MARKS)
        if folder is None:
            return DataStatus("absent", expected=TOTAL)
        size, missing, items = 0, [], 0
        for part, expected in PARTS.items():
            for kind in ("images-idx3", "labels-idx1"):
                try:
                    size += _file(folder, f"{part}-{kind}-ubyte").stat().st_size
                    items += expected * (kind == "images-idx3")
                except MissingData:
                    missing.append(f"{part}-{kind}-ubyte.gz")
        notes = (f"missing: {', '.join(missing)}",) if missing else ()
        return DataStatus("incomplete" if missing else "complete", folder, items, TOTAL, size, notes)

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        status = self.status(root)
        folder = status.place
        if folder is None:
            return status
        for name in FILES:
            path = folder / name
            plain = path.with_suffix("")
            try:
                if path.is_file():
                    wrong = _wrong(path, progress)
                    status = status.noting(f"{path}: {wrong}", state="broken") if wrong else status
                elif plain.is_file():
                    read_idx(plain)
                    status = status.noting(f"{plain.name} is not compressed, and no checksum is known for it")
            except DataError as error:
                status = broken(error, status)
        return status

    def fetch(self, root: Path, progress: bool = True) -> None:
        if self.status(root).state != "complete":
            for resource in RESOURCES:
                download(resource, root / TARGET, progress)
