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
    """To rounding, with fixed steps: adaptive ones differ where ReLUs switch, since steps and kinks do not coincide."""
    sizes: dict[str, Any] = {"count": 8, "length": 8, "batch": 4, "epochs": 1, "dtype": torch.float64}
    fixed: dict[str, Any] = {"adjoint": False, "method": "rk4", "options": {"step_size": 0.25}}
    theirs, ours = (PROGRAMS[name](module, **fixed, **sizes) for module in (torchcde, dropin))
    assert len(theirs.losses) == 2
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.predictions, theirs.predictions, rtol=1e-8, atol=1e-8)
    assert ours.evaluations <= theirs.evaluations


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::seminode.DriftWarning")
def test_programs_as_they_are(name: str) -> None:
    sizes: dict[str, Any] = {"count": 4, "length": 6, "batch": 4, "epochs": 1}
    theirs, ours = (PROGRAMS[name](module, **sizes) for module in (torchcde, dropin))
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=1e-3)
    assert ours.gradient.isfinite().all()
