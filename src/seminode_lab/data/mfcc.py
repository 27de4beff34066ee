"""Mel-frequency cepstrum coefficients of sound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class MFCC:
    """Sound (…, samples) ↦ (…, frames, coefficients), in the dtype of the sound.

    The transform consists of centred frames of `window` samples, `hop` samples apart, with reflected ends; a periodic
    Hann window; the power spectrum |STFT|²; triangular filters of height one, equally spaced on the HTK mel scale
    2595 log₁₀(1 + f/700) between 0 and half the rate; log(energy + offset); and the first coefficients of the
    orthonormal DCT-II.

    The defaults are those of Kidger, Chen and Lyons (2021). With them two filters are so narrow that they contain no
    frequency. Their energies are always 0. They are kept, as in the published features.

    Arguments:
        rate: samples per second.
        window: samples per frame; also the length of the Fourier transform.
        hop: samples between the starts of two frames.
        mels: number of filters.
        coefficients: number of DCT coefficients that are kept.
        offset: added to the energies, so that the logarithm of silence is finite.

    Example:
        >>> MFCC()(torch.zeros(3, 16000)).shape
        torch.Size([3, 161, 20])
    """

    rate: int = 16_000
    window: int = 200
    hop: int = 100
    mels: int = 64
    coefficients: int = 20
    offset: float = 1e-6

    def __call__(self, sound: Tensor) -> Tensor:
        if not sound.is_floating_point():
            raise TypeError(f"sound: expected floating-point numbers, found {sound.dtype}; divide int16 by 2**15")
        if sound.ndim < 1 or sound.shape[-1] <= self.window // 2:
            shape = tuple(sound.shape)
            raise ValueError(f"sound: expected more than {self.window // 2} samples, which frames need, found {shape}")
        hann = torch.hann_window(self.window, periodic=True, dtype=sound.dtype, device=sound.device)
        spectrum = torch.stft(
            sound.reshape(-1, sound.shape[-1]),
            n_fft=self.window,
            hop_length=self.hop,
            window=hann,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )
        power = (spectrum.real.square() + spectrum.imag.square()).transpose(-1, -2)
        energy = power @ filters(self.rate, self.window, self.mels).to(power)
        found = (energy + self.offset).log() @ cosines(self.mels, self.coefficients).to(power)
        return found.reshape(*sound.shape[:-1], *found.shape[1:])


def mel(frequency: float) -> float:
    """The HTK mel scale.

    >>> round(mel(1000.0), 2)
    999.99
    """
    return 2595.0 * math.log10(1.0 + frequency / 700.0)


@lru_cache(maxsize=8)
def filters(rate: int, window: int, mels: int) -> Tensor:
    """The triangular filters as a matrix (frequencies, mels), in float64."""
    frequencies = torch.linspace(0.0, rate / 2, window // 2 + 1, dtype=torch.float64)
    points = torch.linspace(0.0, mel(rate / 2), mels + 2, dtype=torch.float64)
    points = 700.0 * (10.0 ** (points / 2595.0) - 1.0)
    low, middle, high = points[:-2], points[1:-1], points[2:]
    rising = (frequencies[:, None] - low) / (middle - low)
    falling = (high - frequencies[:, None]) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0.0)


@lru_cache(maxsize=8)
def cosines(mels: int, coefficients: int) -> Tensor:
    """The orthonormal DCT-II as a matrix (mels, coefficients), in float64."""
    n = torch.arange(mels, dtype=torch.float64)[:, None]
    k = torch.arange(coefficients, dtype=torch.float64)
    matrix = (math.pi / mels * (n + 0.5) * k).cos() * math.sqrt(2.0 / mels)
    matrix[:, 0] /= math.sqrt(2.0)
    return matrix
