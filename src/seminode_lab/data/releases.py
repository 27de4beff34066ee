"""The releases of Speech Commands, and the clips in a folder with their layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .base import count_text
from .errors import DataError
from .files import explained
from .reading import content

#: The words in the order of their labels.
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = ("validation_list.txt", "testing_list.txt")
LIST_SIZE = 16 << 20  # bytes at most; those of the releases have less than 1 MB


@dataclass(frozen=True)
class Release:
    """The numbers of clips of the ten words in a release.

    Attributes:
        clips: clips of each word, in the order of `WORDS`.
        kept: clips with exactly 16,000 samples.
        listed: clips for validation and for testing.
    """

    name: str
    clips: tuple[int, ...]
    kept: int
    listed: tuple[int, int]

    @property
    def address(self) -> str:
        return f"http://download.tensorflow.org/data/speech_commands_{self.name}.tar.gz"

    @property
    def total(self) -> int:
        return sum(self.clips)


V2 = Release("v0.02", (4044, 3941, 3723, 3917, 3801, 3778, 3845, 3745, 3872, 3880), 34_975, (3703, 4074))
V1 = Release("v0.01", (2377, 2375, 2375, 2359, 2353, 2367, 2367, 2357, 2380, 2372), 21_312, (2577, 2567))


@dataclass(frozen=True)
class Clip:
    """A wav file: its word, path, size and time of modification."""

    word: str
    path: Path
    size: int
    changed: int

    @property
    def name(self) -> str:
        """The name in the lists of the release."""
        return f"{self.word}/{self.path.name}"

    @property
    def label(self) -> int:
        return WORDS.index(self.word)


def clips_in(folder: Path) -> list[Clip]:
    """All wav files of the ten words, sorted by word and name, so that their order is the same on all systems."""
    found = []
    for word in WORDS:
        if not (folder / word).is_dir():
            continue
        try:
            # Some systems add hidden files when they copy a folder.
            entries = [entry for entry in os.scandir(folder / word) if re.fullmatch(r"[^.].*\.wav", entry.name)]
        except OSError as error:
            raise explained(error, folder / word) from error
        for entry in sorted(entries, key=lambda entry: entry.name):
            about = entry.stat(follow_symlinks=False)
            found.append(Clip(word, Path(entry.path), about.st_size, about.st_mtime_ns))
    return found


def listed_in(folder: Path) -> tuple[set[str], set[str]]:
    """The names of the clips for validation and for testing, of the ten words."""
    validation, testing = (_names(folder / name) for name in LISTS)
    return validation, testing


def _names(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    try:
        lines = content(path, LIST_SIZE).decode().split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a list of names word/clip.wav, found something else ({error})") from error
    return {line for line in lines if line.partition("/")[0] in WORDS}


def release_in(folder: Path) -> Release:
    """The release of a folder, according to its lists; v0.02 if they match none."""
    validation, testing = listed_in(folder)
    return V1 if (len(validation), len(testing)) == V1.listed else V2


def missing_text(clips: Mapping[str, int], release: Release) -> str:
    """The words with missing clips and their counts, in words."""
    pairs = ((word, clips.get(word, 0), count) for word, count in zip(WORDS, release.clips, strict=True))
    return ", ".join(f"{word} {count_text(found, count)}" for word, found, count in pairs if found != count)
