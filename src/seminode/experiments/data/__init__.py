"""Data sets, each from an official source or shipped with the package."""

from __future__ import annotations

from .series import SeriesSet
from .vowels import japanese_vowels

__all__ = ["SeriesSet", "japanese_vowels"]
