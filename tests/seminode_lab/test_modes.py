"""The columns of truth are what they say."""

from __future__ import annotations

import pytest

import seminode as sn
from seminode_lab.modes import MODES, oversized_seminorm, solve_options


def test_every_mode_of_every_experiment() -> None:
    for experiment in ("ncde", "cnf", "hnn"):
        for mode in MODES:
            if mode == "published" and experiment != "hnn":
                with pytest.raises(ValueError, match="'published' differs from 'seminorm' for 'hnn' only"):
                    solve_options(experiment, mode)
                continue
            assert isinstance(solve_options(experiment, mode)["adjoint"], sn.Backsolve | sn.Replay)
    assert solve_options("cnf", "mixed")["norm"] == "mixed"
    assert "norm" not in solve_options("cnf", "best")
    assert solve_options("hnn", "published")["adjoint"].norm is oversized_seminorm


def test_unknown_modes() -> None:
    with pytest.raises(
        ValueError, match="mode: expected one of mixed, seminorm, published, best, per_tensor, found 'fast'"
    ):
        solve_options("ncde", "fast")
