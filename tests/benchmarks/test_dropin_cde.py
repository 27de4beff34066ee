"""The CDE programs of the comparison of drop-ins give the same with torchcde and with its drop-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchcde

import seminode.compat.torchcde as dropin
from benchmarks.dropin_cde import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::seminode.DriftWarning")
def test_programs_agree(name: str) -> None:
    """In float64 and with tight tolerances, over two training steps."""
    sizes: dict[str, Any] = {"count": 8, "length": 8, "batch": 4, "epochs": 1, "dtype": torch.float64}
    runs = [PROGRAMS[name](module, rtol=1e-6, atol=1e-8, **sizes) for module in (torchcde, dropin)]
    theirs, ours = runs
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.predictions, theirs.predictions, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-2, atol=1e-3)
    assert len(theirs.losses) == 2
    assert ours.evaluations < 1.1 * theirs.evaluations
