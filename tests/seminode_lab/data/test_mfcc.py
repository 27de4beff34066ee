"""The coefficients are those of other implementations, and of their definition."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import scipy.fft
import torch

from seminode_lab.data import MFCC
from seminode_lab.data.mfcc import filters


def sounds() -> torch.Tensor:
    """Noise, a chirp that fades, almost silence, silence, and a single click."""
    t = torch.arange(16_000, dtype=torch.float64) / 16_000
    noise = 0.1 * torch.randn(16_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chirp = torch.exp(-4 * t) * torch.sin(2 * math.pi * (200 + 3000 * t) * t)
    click = torch.zeros_like(t)
    click[5000] = 1.0
    return torch.stack([noise, chirp, 1e-5 * noise, 0 * t, click])


def by_definition(sound: np.ndarray) -> np.ndarray:
    """Frame by frame and frequency by frequency."""
    padded = np.pad(sound, 100, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    fourier = np.exp(-2j * np.pi * np.outer(np.arange(101), np.arange(200)) / 200)
    power = np.array([np.abs(fourier @ (window * padded[s : s + 200])) ** 2 for s in range(0, 16_001, 100)])
    top = 2595 * np.log10(1 + 8000 / 700)
    edges = [700 * (10 ** (top * m / 65 / 2595) - 1) for m in range(66)]
    bank = np.zeros((101, 64))
    for m in range(64):
        low, middle, high = edges[m : m + 3]
        for k in range(101):
            f = 80.0 * k
            if low < f <= middle:
                bank[k, m] = (f - low) / (middle - low)
            elif middle < f < high:
                bank[k, m] = (high - f) / (high - middle)
    logs = np.log(power @ bank + 1e-6)
    k, n = np.arange(20)[:, None], np.arange(64)
    scale = np.where(k == 0, math.sqrt(1 / 64), math.sqrt(2 / 64))
    return logs @ (scale * np.cos(np.pi / 64 * (n + 0.5) * k)).T


def test_the_definition() -> None:
    x = sounds()
    expected = torch.from_numpy(np.stack([by_definition(each) for each in x.numpy()]))
    torch.testing.assert_close(MFCC()(x), expected, atol=1e-9, rtol=0.0)
    single = MFCC()(x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, expected.float(), atol=1e-3, rtol=0.0)


def test_librosa() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about empty filters and old modules
        librosa = pytest.importorskip("librosa", reason="librosa is not installed")
        for sound in sounds():
            mel = librosa.feature.melspectrogram(
                y=sound.numpy(),
                sr=16_000,
                n_fft=200,
                hop_length=100,
                win_length=200,
                window="hann",
                center=True,
                pad_mode="reflect",
                power=2.0,
                n_mels=64,
                fmin=0.0,
                fmax=8000.0,
                htk=True,
                norm=None,
                dtype=np.float64,
            )
            expected = np.asarray(scipy.fft.dct(np.log(mel + 1e-6), type=2, norm="ortho", axis=0))[:20].T
            found, expected = MFCC()(sound), torch.from_numpy(expected)
            torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-8, rtol=0.0)
            # Its last frame has six digits only; ours is compared with the definition above.
            torch.testing.assert_close(found[-1], expected[-1], atol=1e-3, rtol=0.0)


def test_two_filters_are_empty() -> None:
    assert (filters(16_000, 200, 64).sum(0) == 0).nonzero().flatten().tolist() == [0, 3]


def test_silence_and_batches() -> None:
    assert MFCC()(sounds()[3])[:, 0].tolist() == pytest.approx([8 * math.log(1e-6)] * 161)
    x = sounds().float()
    assert torch.equal(MFCC()(x.reshape(5, 1, -1)), torch.stack([MFCC()(each[None]) for each in x]))


def test_what_is_no_sound_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sound: expected floating-point numbers, found torch\.int16"):
        MFCC()(torch.zeros(16_000, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"sound: expected more than 100 samples.*\(3, 100\)"):
        MFCC()(torch.zeros(3, 100))
