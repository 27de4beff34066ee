"""Data sets: downloaded from official sources, shipped with the package, or simulated."""

from __future__ import annotations

from .catalogue import CATALOGUE
from .cifar import cifar10
from .digits import digits
from .errors import CacheWarning, DataError, IncompleteDataWarning, MissingData
from .folders import data_dir
from .images import Images, ImageSet, reduced_images
from .mfcc import MFCC
from .mnist import mnist
from .pendulum import pendulum
from .series import SeriesSet
from .speech import Speech, speech_commands
from .vowels import japanese_vowels

__all__ = [
    "speech_commands",
    "mnist",
    "cifar10",
    "pendulum",
    "digits",
    "japanese_vowels",
    "Speech",
    "SeriesSet",
    "Images",
    "ImageSet",
    "reduced_images",
    "MFCC",
    "CATALOGUE",
    "data_dir",
    "DataError",
    "MissingData",
    "IncompleteDataWarning",
    "CacheWarning",
]
