"""Estimates: they count what a run will do, and measure one update of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import install, tiny

from seminode.cli import main
from seminode_lab import running
from seminode_lab.commands import estimate as command
from seminode_lab.estimating import Estimate, estimate, passes, table
from seminode_lab.schedule import Schedule


def test_the_counts_are_those_of_the_run(tmp_path: Path) -> None:
    """Updates and evaluations per update, against a run whose weights stay as they are."""
    settings = tiny(schedule=Schedule(epochs=3, lr=0.0, every=2), sizes=(4, 3, 3))
    found = estimate(settings)
    result = running.run(settings, tmp_path)
    assert found.updates == 3
    assert found.updates * found.forward == result["totals"]["forward_nfe"]
    assert found.updates * found.backward == result["totals"]["backward_nfe"]
    assert found.seconds > 0.0
    assert found.memory is None or found.memory > 1e7


def test_passes_with_and_without_selection() -> None:
    counts = {"train": 10, "validation": 3, "test": 2}
    settings = tiny(schedule=Schedule(epochs=21, lr=1.0, every=10))
    assert passes(settings, counts) == 3 * 13 + 15
    assert passes(settings.changed(schedule=Schedule(21, 1.0, every=1, selects=False)), counts) == 21 * 3 + 5


def test_hours_add_up_over_seeds() -> None:
    each = Estimate(tiny(), 600.0, 2.0, 100, 200, 1000, 500, 2_500_000_000, None)
    assert each.hours == pytest.approx((600.0 + 3000.0) / 3600.0)
    lines = table([each, each], {"ncde": 5}).text().splitlines()
    assert lines[4].split() == [
        "ncde-japanese_vowels-0.01-mixed",
        "2",
        "100",
        "200",
        "1,000",
        "500",
        "2.50",
        "1",
        "5",
        "5",
    ]
    assert lines[6].split() == ["sum", "10"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch)
    monkeypatch.setattr(command, "alone", lambda settings, root, threads: estimate(settings, root))
    assert main(["estimate", "--preset", "tiny", "--only", "0.01-best", "--seeds", "3"]) == 0
    told = capsys.readouterr()
    assert "ncde-japanese_vowels-0.01-best" in told.out
    assert "measuring 1 of 1" in told.err
    assert main(["estimate", "--preset", "tiny", "--only", "nothing"]) == 2
    assert "--only: expected a part of a run's name" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--experiment", "hnn", "--only", "best"]) == 0
    assert "hnn-pendulum-best" in capsys.readouterr().out
