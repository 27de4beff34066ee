"""The comparison of batched solves with torchode runs, and both solve the same problem."""

from __future__ import annotations

import pytest
import torch

from benchmarks import batched


def test_contenders_agree() -> None:
    pytest.importorskip("torchode")
    y0 = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ts = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    theirs = batched.torchode_solver(2.0, 1e-8).solve(batched.torchode_problem(y0, ts)).ys.transpose(0, 1)
    ours = batched.sn.solve(batched.van_der_pol, y0, ts, args=(2.0,), rtol=1e-8, atol=1e-8, batched=True).ys
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_report_names_ratios() -> None:
    pytest.importorskip("torchode")
    assert "speed-up" in batched.loop(1, 3, 3, compiled=False)
    assert "ratio to torchode" in batched.oscillators(1, 4, 0.05, compiled=False)
    assert "state of    2 entries" in batched.drop(1, (2,))


def test_the_loop_has_a_target() -> None:
    steps = {"torchode": {"micros": 30.0, "steps": 9}, "seminode": {"micros": 15.0, "steps": 8}}
    slower = {**steps, "seminode": {"micros": 20.0, "steps": 8}}
    eager, compiled = batched.loop_text({"eager": steps, "compiled": slower}).splitlines()
    assert eager.endswith("speed-up 2.00 (target 2: met)")
    assert compiled.endswith("speed-up 1.50 (target 2: missed)")
