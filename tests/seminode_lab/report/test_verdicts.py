"""Verdicts that intervals must not overstate: wide ones decide nothing, and two points make no trend."""

from __future__ import annotations

import json
from pathlib import Path

import lab_runs
import pytest

from seminode_lab import measures, store
from seminode_lab.intervals import Interval
from seminode_lab.report import claims
from seminode_lab.report.findings import Conclusion, Finding
from seminode_lab.settings import rows


def found(folder: Path) -> dict[str, Finding]:
    runs = store.runs(folder, lambda error: pytest.fail(str(error)))
    return {finding.name: finding for finding in claims.claims(measures.gather(runs))}


@pytest.mark.parametrize(
    ("change", "conclusion"),
    [
        (Interval(0.1, 0.4, 5), Conclusion.HOLDS),
        (Interval(0.0, 5.0, 2), Conclusion.UNDECIDED),  # contains zero, but also a loss of five points
        (Interval(-3.0, 1.0, 5), Conclusion.FAILS),
        (Interval(5.0, 3.0, 5), Conclusion.HOLDS),  # better
    ],
)
def test_models_are_alike_if_a_loss_is_excluded(change: Interval, conclusion: Conclusion) -> None:
    assert claims._alike(change, higher=True, margin=1.0) is conclusion
    turned = Interval(-change.mean, change.half, change.n)
    assert claims._alike(turned, higher=False, margin=1.0) is conclusion


def test_two_ratios_make_no_trend(tmp_path: Path) -> None:
    for row in (rows("paper")[0], rows("paper")[-1]):
        for mode in ("mixed", "seminorm"):
            lab_runs.write(row.changed(mode=mode), tmp_path)
    finding = found(tmp_path)["ratio"]
    assert finding.conclusion is Conclusion.UNDECIDED
    assert "2 different ratios, too few for a trend" in finding.found


@pytest.mark.parametrize(
    ("ratios", "conclusion"),
    [
        ((1.4, 2.0, 1.7), Conclusion.UNDECIDED),
        ((1.2, 0.8, 1.0), Conclusion.FAILS),
        ((2.0, 2.1, 2.05), Conclusion.HOLDS),
    ],
)
def test_a_wide_interval_of_times_decides_nothing(
    tmp_path: Path, ratios: tuple[float, ...], conclusion: Conclusion
) -> None:
    """Seconds with the mixed norm divided by those with the seminorm; the first are wide enough to contain 1 and 2."""
    row = rows("paper")[0]
    spread = 2.0 if conclusion is Conclusion.UNDECIDED else 1.0
    middle = sum(ratios) / 3
    for seed, ratio in enumerate(ratios):
        for mode, seconds in (("mixed", middle + spread * (ratio - middle)), ("seminorm", 1.0)):
            path = lab_runs.write(row.changed(mode=mode, seed=seed), tmp_path)
            result = json.loads((path / store.RESULT).read_text())
            result["seconds"]["training_processor"] = 100 * seconds
            nfe = 2849 * measures.updates(store.Finished.load(path))
            result["totals"]["backward_nfe"] = nfe
            (path / store.RESULT).write_text(json.dumps(result))
    assert found(tmp_path)["time"].conclusion is conclusion
