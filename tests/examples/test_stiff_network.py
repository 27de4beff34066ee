"""The example of a stiff neural ODE: a short training, and the cost of an explicit solver."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PATH = Path(__file__).parents[2] / "examples" / "stiff_network.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("stiff_network", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stiff_network"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_short_training_reduces_the_loss(example: Any) -> None:
    torch.manual_seed(0)
    data = example.Data.make()
    losses = example.train(example.NeuralField(data.slope), data, iterations=12)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_an_explicit_solver_needs_a_hundred_times_the_evaluations(example: Any) -> None:
    data = example.Data.make()

    def scaled(t: Tensor, z: Tensor) -> Tensor:
        return example.robertson(t, z * data.scale) / data.scale

    implicit, explicit = (example.forward_cost(scaled, data, name, 40.0) for name in ("kvaerno5", "dopri5"))
    assert explicit[0] >= 100 * implicit[0]
    torch.testing.assert_close(implicit[1], explicit[1], rtol=2e-2, atol=2e-2)
