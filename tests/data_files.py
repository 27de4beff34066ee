"""Small data files for tests: sound, idx arrays and malicious pickles."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np


def wav(path: Path, samples: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2) -> Path:
    """Write a wav file and return its path."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes() if width == 2 else samples.astype("u1").tobytes())
    return path


def idx(array: np.ndarray) -> bytes:
    """The content of an idx file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


class Malicious:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, call: Any, *args: Any):
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call
