"""Typical programs under torchdiffeq and under the drop-in: the same results from as many evaluations."""

from __future__ import annotations

import pytest

from benchmarks import dropin
from benchmarks.dropin import contenders, difference, report, run
from benchmarks.dropin_programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_same_results(name: str) -> None:
    each = contenders(name)
    theirs, found = (run(PROGRAMS[name], each[who], 1)[1] for who in ("torchdiffeq", "drop-in"))
    assert difference(found.values, theirs.values) < 1e-5
    if name != "bouncing ball":  # steps that end on events are taken again
        assert found.evaluations <= theirs.evaluations


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(dropin.SWITCHES) == set(PROGRAMS)
    measured = dropin.Measured(2.0, 10, 0.0)
    text = report(
        {"spiral": {"torchdiffeq": measured, "drop-in": measured._replace(seconds=1.0), "switched": measured}}
    )
    assert "2.00" in text
    assert "drop-in median 2.00, least 2.00, switched median 1.00" in text
