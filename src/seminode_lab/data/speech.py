"""Speech Commands: ten words, spoken by thousands of people, as series of cepstrum coefficients."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .archives import SUMS, unpack, wrong_sums
from .base import DataSet, DataStatus, found_in, located, warn_incomplete
from .cache import cached
from .download import Resource, download
from .errors import DataError
from .folders import data_dir, features_dir
from .mfcc import MFCC
from .releases import LISTS, V2, WORDS, Clip, clips_in, listed_in, missing_text, release_in
from .series import SeriesSet
from .waves import read_wav

ARCHIVE = Resource(
    (
        V2.address,
        "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    ),
    "speech_commands_v0.02.tar.gz",
    "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
    2_428_923_189,
)
TARGET = "speech_commands_v0.02"
PLACES = (TARGET, f"SpeechCommands/{TARGET}", "speech_commands", "speech_commands_v0.01", ".")
SAMPLES = 16_000
BATCH = 128  # clips that are transformed together
SPLITS = ("published", "official")

Split = Literal["published", "official"]


class Speech(NamedTuple):
    """Series for training, validation and testing.

    Attributes:
        train, validation, test: the three parts.

    Example:
        >>> part = SeriesSet(torch.zeros(2, 161, 20), torch.full((2,), 161), torch.tensor([0, 9]))
        >>> train, validation, test = Speech(part, part, part)
        >>> train.channels, test.labels
        (20, tensor([0, 9]))
    """

    train: SeriesSet
    validation: SeriesSet
    test: SeriesSet


def speech_commands(
    root: str | os.PathLike[str] | None = None,
    split: Split = "published",
    normalise: bool = True,
    progress: bool = False,
) -> Speech:
    """Series (161 frames, 20 coefficients) of one-second clips of ten words.

    Labels 0–9 are yes, no, up, down, left, right, on, off, stop, go. Only clips of exactly 16,000 samples are kept:
    34,975 of release v0.02. Features are [`MFCC`][seminode_lab.data.MFCC]; each of the 20 channels is normalised with
    the mean and standard deviation of the training series. The first call computes the features and saves them below
    `root`. They are computed again if the name, size or modification time of a clip changes.

    Reference: Warden, *Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition*, arXiv:1804.03209, 2018.

    Arguments:
        root: the folder with data; by default that of `SEMINODE_DATA`, or the user's cache. Release v0.02 or v0.01, in
            the official layout, in `speech_commands_v0.02`, `speech_commands` or `root` itself.
        split: `"published"` is that of Kidger, Chen and Lyons (2021): 70, 15 and 15 %, stratified by label, which is
            24,482, 5,246 and 5,247 clips of v0.02. A speaker may be in all three parts. `"official"` is that of the
            lists of the release, which keep all clips of a speaker in one part.
        normalise: whether to normalise the channels.
        progress: whether to show a bar while features are computed.

    Example:
        After `seminode data fetch speech_commands`:

        >>> train, validation, test = speech_commands(progress=True)  # doctest: +SKIP
        >>> train.x.shape, len(validation), len(test)  # doctest: +SKIP
        (torch.Size([24482, 161, 20]), 5246, 5247)
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(map(repr, SPLITS))}, found {split!r}")
    folder = located("speech_commands", root, PLACES, WORDS)
    clips = clips_in(folder)
    x, labels, rows = _features(folder, clips, data_dir(root), progress)
    _warn_if_incomplete(folder, clips, len(x))
    if split == "published":
        parts = published_split(labels)
    else:
        parts = official_split([clips[row].name for row in rows.tolist()], folder)
    train, validation, test = (_series(x, labels, part) for part in parts)
    del x  # as large as all of them
    if normalise:
        mean, std = train.statistics()
        train, validation, test = (part.normalised(mean, std) for part in (train, validation, test))
    return Speech(train, validation, test)


def _series(x: Tensor, labels: Tensor, rows: Tensor) -> SeriesSet:
    return SeriesSet(x[rows], torch.full((len(rows),), x.shape[1]), labels[rows])


def _features(folder: Path, clips: Sequence[Clip], root: Path, progress: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the clips that are kept, their labels, and their indices among all clips."""
    transform = MFCC()
    source = hashlib.sha256(repr((1, transform, SAMPLES)).encode())
    for clip in clips:
        source.update(os.fsencode(f"{clip.name}\0{clip.size}\0{clip.changed}\n"))
    # One file per folder, so that new features replace obsolete ones.
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    path = features_dir(root) / f"speech_commands_mfcc_{name}.safetensors"
    found = cached(path, source.hexdigest(), lambda: _computed(clips, transform, progress))
    return found["x"], found["labels"], found["rows"]


def _computed(clips: Sequence[Clip], transform: MFCC, progress: bool) -> dict[str, Tensor]:
    # Allocated at once: concatenating a list of parts would take twice the memory.
    shape = transform(torch.zeros(SAMPLES)).shape
    x, rows, batch = torch.empty(len(clips), *shape), [], []
    for row, clip in enumerate(tqdm(clips, desc="features", unit=" clips", disable=None if progress else True)):
        sound = read_wav(clip.path, SAMPLES)
        if sound is not None:
            rows.append(row)
            batch.append(sound)
        if batch and (len(batch) == BATCH or row == len(clips) - 1):
            # In float32, the logarithms of weak frequencies next to strong ones have only three or four correct digits.
            x[len(rows) - len(batch) : len(rows)] = transform(torch.stack(batch).double() / 2**15)
            batch = []
    if not rows:
        raise DataError(f"speech_commands: expected clips of {SAMPLES:,} samples, found none in {len(clips):,}")
    labels = torch.tensor([clips[row].label for row in rows])
    return {"x": x[: len(rows)], "labels": labels, "rows": torch.tensor(rows)}


def _warn_if_incomplete(folder: Path, clips: Sequence[Clip], kept: int) -> None:
    release = release_in(folder)
    missing = missing_text(Counter(clip.word for clip in clips), release)
    if missing or kept != release.kept:
        words = f" ({missing})" if missing else ""
        warn_incomplete(
            "speech_commands",
            folder,
            f"{len(clips):,} of {release.total:,} clips of {release.name}{words}, {kept:,} of {release.kept:,} clips "
            f"with exactly {SAMPLES:,} samples",
        )


def published_split(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for training, validation and testing: 70, 15 and 15 %, stratified, as scikit-learn draws them."""
    divide = _train_test_split()
    y = labels.numpy()
    try:
        train, others = divide(range(len(y)), train_size=0.7, random_state=0, stratify=y)
        validation, test = divide(others, train_size=0.5, random_state=1, stratify=y[others])
    except ValueError as error:
        counts = dict(zip(WORDS, labels.bincount(minlength=len(WORDS)).tolist(), strict=True))
        raise DataError(f"speech_commands: too few clips of a word to be split ({error}): found {counts}") from error
    return torch.tensor(train), torch.tensor(validation), torch.tensor(test)


def _train_test_split() -> Any:
    try:
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError("the published split needs scikit-learn: pip install 'seminode[lab]'") from error
    return train_test_split


def official_split(names: Sequence[str], folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for training, validation and testing according to the lists of the release."""
    for name in LISTS:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: does not exist, but split='official' needs it")
    validation, testing = listed_in(folder)
    parts = [0 if name not in validation | testing else 1 + (name in testing) for name in names]
    which = torch.tensor(parts)
    train, chosen, test = ((which == part).nonzero()[:, 0] for part in range(3))
    if not (len(train) and len(chosen) and len(test)):
        sizes = f"{len(train)}, {len(chosen)} and {len(test)}"
        raise DataError(f"{folder}: expected clips for training, validation and testing, found {sizes}")
    return train, chosen, test


class SpeechCommands(DataSet):
    name = "speech_commands"
    title = "Speech Commands, ten words"
    unit = "clips"
    origin = ARCHIVE.addresses[0]
    licence = "CC BY 4.0"
    download_size = ARCHIVE.size

    def status(self, root: Path) -> DataStatus:
        folder = found_in(root, PLACES, WORDS)
        if folder is None:
            return DataStatus("absent", expected=V2.total)
        clips, release = clips_in(folder), release_in(folder)
        status = DataStatus("complete", folder, len(clips), release.total, sum(clip.size for clip in clips))
        told = tuple(map(len, listed_in(folder))) == release.listed
        note = f"release {release.name}" if told else f"taken for {release.name}; its lists match no known release"
        status = replace(status.noting(note), origin=release.address)
        if release is not V2:
            status = status.noting(f"the published numbers are from {V2.name}, which has {V2.total:,}")
        missing = missing_text(Counter(clip.word for clip in clips), release)
        if missing:
            status = status.noting(f"missing: {missing}", state="incomplete")
        lists = [name for name in LISTS if not (folder / name).is_file()]
        return status.noting(f"missing: {', '.join(lists)}", state="incomplete") if lists else status

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        status = self.status(root)
        folder = status.place
        if folder is None:
            return status
        release = release_in(folder)
        wrong, kept = wrong_sums(folder, progress), 0
        if wrong is None:
            # Only archives that seminode has unpacked have checksums; none are published for single clips.
            status, wrong = (
                status.noting(f"no {SUMS} to compare clips with; only their format and number were checked"),
                [],
            )
        clips = tqdm(clips_in(folder), desc="clips", leave=False, disable=None if progress else True)
        for clip in clips:
            try:
                kept += read_wav(clip.path, SAMPLES) is not None
            except DataError as error:
                wrong.append(str(error))
        status = status.noting(f"{kept:,} of {release.kept:,} clips have exactly {SAMPLES:,} samples")
        if wrong:
            more = f", and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
            return status.noting("; ".join(wrong[:5]) + more, state="broken")
        if status.state == "complete" and kept != release.kept:
            return status.noting("all clips exist, but they are not those of the release", state="broken")
        return status

    def fetch(self, root: Path, progress: bool = True) -> None:
        status = self.status(root)
        if status.state == "complete" and release_in(status.place or root) is V2:
            return
        if (root / TARGET).exists():
            raise DataError(f"{root / TARGET}: is incomplete and is not overwritten; move it away to fetch it again")
        brought = not (root / ARCHIVE.name).exists()
        archive = download(ARCHIVE, root, progress)
        unpack(archive, root / TARGET, progress=progress)
        if brought:
            archive.unlink()
