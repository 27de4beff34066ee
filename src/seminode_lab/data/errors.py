"""Errors and warnings of data sets."""

from __future__ import annotations


class DataError(RuntimeError):
    """Data are unavailable or invalid. The message names the file or the address.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from seminode_lab.data import DataError, mnist
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        ...         _ = (Path(folder) / name).write_bytes(b"damaged")
        ...     try:
        ...         mnist(folder)
        ...     except DataError as error:
        ...         print(error)
        /...train-images-idx3-ubyte: ...
    """


class MissingData(DataError):
    """Data were not found. The message says where they were expected and how to get them.

    Example:
        >>> from seminode_lab.data import MissingData, mnist
        >>> try:
        ...     train, test = mnist("no/such/folder")
        ... except MissingData as error:
        ...     print(error)
        mnist: expected ... below 'no/such/folder', found none; ... or run: seminode data fetch mnist
    """


class IncompleteDataWarning(UserWarning):
    """Only a part of a data set exists, so results differ from those with the complete data set.

    Example:
        >>> import struct, tempfile, warnings
        >>> from pathlib import Path
        >>> from seminode_lab.data import IncompleteDataWarning, mnist
        >>> images = struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 28, 28) + bytes(2 * 28 * 28)
        >>> labels = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + bytes(2)
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", IncompleteDataWarning)  # "error" refuses such data
        ...     for part in ("train", "t10k"):
        ...         _ = (Path(folder) / f"{part}-images-idx3-ubyte").write_bytes(images)
        ...         _ = (Path(folder) / f"{part}-labels-idx1-ubyte").write_bytes(labels)
        ...     train, test = mnist(folder)
        >>> len(train), "2 of 60,000 images" in str(caught[0].message)
        (2, True)
    """


class CacheWarning(UserWarning):
    """A computed result could not be saved and will be computed again the next time.

    Example:
        What the loaders do where they cannot write, here below a file instead of a folder:

        >>> import tempfile, torch, warnings
        >>> from pathlib import Path
        >>> from seminode_lab.data.cache import cached
        >>> with tempfile.NamedTemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", CacheWarning)  # "ignore" on a machine that cannot save
        ...     features = cached(Path(file.name) / "x.safetensors", "key", lambda: {"x": torch.ones(2)})
        >>> features["x"], caught[0].category.__name__
        (tensor([1., 1.]), 'CacheWarning')
    """
