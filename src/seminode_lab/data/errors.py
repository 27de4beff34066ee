"""Errors and warnings of data sets."""

from __future__ import annotations


class DataError(RuntimeError):
    """Data are unavailable or invalid. The message names the file or the address."""


class MissingData(DataError):
    """Data were not found. The message says where they were expected and how to get them."""


class IncompleteDataWarning(UserWarning):
    """Only a part of a data set exists, so results differ from those with the complete data set."""


class CacheWarning(UserWarning):
    """A computed result could not be saved and will be computed again the next time."""
