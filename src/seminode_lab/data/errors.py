"""What can be wrong with data, and what a data set may warn of."""

from __future__ import annotations


class DataError(RuntimeError):
    """Data that cannot be had or is not what it should be; the message names the file or the address."""


class MissingData(DataError):
    """Data that are not there; the message says where they were looked for, and how to get them."""


class IncompleteDataWarning(UserWarning):
    """A data set of which only a part is there: numbers found on it are not those of the whole."""


class CacheWarning(UserWarning):
    """Something that was computed could not be kept, and will be computed again the next time."""
