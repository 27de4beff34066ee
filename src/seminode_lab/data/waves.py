"""Sound: 16-bit mono wav files."""

from __future__ import annotations

import wave
from pathlib import Path

import torch
from torch import Tensor

from .errors import DataError
from .files import explained

RATE = 16_000


def read_wav(path: Path, samples: int | None = None, rate: int = RATE) -> Tensor | None:
    """The int16 samples of a mono wav file; `None` if `samples` is given and the file has another length.

    Of a file of another length, only the header is read.
    """
    try:
        # If wave opens an invalid file by name, it does not close it.
        with path.open("rb") as file, wave.open(file) as sound:
            _check(path, "channel", 1, sound.getnchannels())
            _check(path, "bits per sample", 16, 8 * sound.getsampwidth())
            _check(path, "samples per second", rate, sound.getframerate())
            count = sound.getnframes()
            if samples is not None and count != samples:
                return None
            content = sound.readframes(count)
    except (wave.Error, EOFError) as error:
        raise DataError(f"{path}: not a wav file that can be read ({error or 'it ends too early'})") from error
    except OSError as error:
        raise explained(error, path) from error
    if len(content) != 2 * count:
        raise DataError(f"{path}: truncated: expected {count:,} samples from its header, found {len(content) // 2:,}")
    if not count:
        return torch.empty(0, dtype=torch.int16)
    # wave has converted the little-endian numbers of the file to the byte order of the machine.
    return torch.frombuffer(bytearray(content), dtype=torch.int16)


def _check(path: Path, what: str, expected: int, found: int) -> None:
    if found != expected:
        raise DataError(f"{path}: expected {expected:,} {what}, found {found:,}")
