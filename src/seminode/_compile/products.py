"""Matrix products that compiled programs compute themselves, if the library that torch calls is slow."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

#: How Inductor's programs call that library.
_CALL = "aoti_torch_cpu_mm_out("


@functools.cache
def library_is_slow() -> bool:
    """Whether products go to MKL on a processor with AVX-512 not made by Intel: up to three times as slow."""
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def computed_here(a: Tensor) -> bool:
    """Whether programs compute products with the matrix a themselves."""
    return a.dtype == torch.float32 and a.device.type == "cpu" and library_is_slow()


def with_products(code: str, entry: str) -> str:
    """The source of a program that computes products itself; `entry` is how its function begins that calls them."""
    before, found, after = code.partition(entry)
    if not found or _CALL not in after or not library_is_slow():
        return code
    return f"{before}\n{_source()}{entry}{after.replace(_CALL, 'product_out(')}"


@functools.cache
def _source() -> str:
    return Path(__file__).with_name("product.cpp").read_text(encoding="utf-8")
