"""Typical programs under torchdiffeq and under the drop-in: the same results from as many evaluations."""

from __future__ import annotations

import pytest

from benchmarks import dropin
from benchmarks.dropin import PROGRAMS, contenders, difference, report, run
from benchmarks.dropin_cde import PROGRAMS as CDE_PROGRAMS
from benchmarks.dropin_programs import PROGRAMS as ODE_PROGRAMS


def test_there_are_ten_programs() -> None:
    assert len(PROGRAMS) == 10
    assert set(dropin.SWITCHES) == set(PROGRAMS)


@pytest.mark.parametrize("name", ODE_PROGRAMS)
def test_programs_have_the_same_results(name: str) -> None:
    each = contenders(name)
    theirs, found = (run(PROGRAMS[name], each[who], 1)[1] for who in ("original", "drop-in"))
    assert difference(found.values, theirs.values) < 1e-5
    if name != "bouncing ball":  # steps that end on events are taken again
        assert found.evaluations <= theirs.evaluations


#: How far losses and parameters of a switched program may be from the original after one iteration. RMSprop turns
#: small differences of gradients near zero into whole steps, and torchdiffeq loses jumps of the irregular series.
DISTANCES = {"ODE-Net": 2e-3, "CDE classification, regular": 1e-2, "CDE classification, irregular": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_switched_programs_agree(name: str) -> None:
    each = contenders(name)
    theirs, found = (run(PROGRAMS[name], each[who], 1)[1] for who in ("original", "switched"))
    assert difference(found.values, theirs.values) < DISTANCES.get(name, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CDE_PROGRAMS)
def test_drop_ins_of_cde_programs_agree(name: str) -> None:
    each = contenders(name)
    theirs, found = (run(PROGRAMS[name], each[who], 1)[1] for who in ("original", "drop-in"))
    assert difference(found.values, theirs.values) < DISTANCES[name]
    assert found.evaluations <= theirs.evaluations


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(dropin.SWITCHES, "learned physics", {})
    monkeypatch.setitem(dropin.SWITCHES, "CDE classification, irregular", {})
    monkeypatch.setattr(dropin, "CDE_SIZES", {"count": 2, "length": 4, "batch": 2})
    dropin.main(["--quick", "--programs", "learned physics", "CDE classification, irregular"])
    shown = capsys.readouterr().out
    assert "CDE classification, irregular" in shown
    assert "Speed-up: drop-in median" in shown


def test_the_report() -> None:
    measured = dropin.Measured(3.0, 2.0, 10, 0.0)
    text = report({"spiral": {"original": measured, "drop-in": measured._replace(seconds=1.0), "switched": measured}})
    assert "2.00" in text
    assert "–" in text  # a compiled field does not count
    assert "drop-in median 2.00, least 2.00, switched median 1.00" in text
