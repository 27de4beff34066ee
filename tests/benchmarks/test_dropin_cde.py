"""The CDE programs of the comparison of drop-ins give the same with torchcde and with its drop-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchcde

import seminode.compat.torchcde as dropin
from benchmarks.dropin_cde import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree(name: str) -> None:
    """In float64 and with tight tolerances, in the first training step, without the error of the adjoint method."""
    sizes: dict[str, Any] = {"count": 8, "length": 8, "batch": 8, "epochs": 1, "dtype": torch.float64}
    runs = [PROGRAMS[name](module, adjoint=False, rtol=1e-7, atol=1e-9, **sizes) for module in (torchcde, dropin)]
    theirs, ours = runs
    assert len(theirs.losses) == 1
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-4, atol=1e-5)
    # Adam takes steps of one length, also for gradients of rounding errors, which may differ in sign.
    torch.testing.assert_close(ours.predictions, theirs.predictions, rtol=0.0, atol=0.02)
    assert ours.evaluations <= theirs.evaluations
