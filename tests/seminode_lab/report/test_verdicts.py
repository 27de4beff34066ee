"""Verdicts that intervals must not overstate: wide ones decide nothing, and two points make no trend."""

from __future__ import annotations

import json
from pathlib import Path

import lab_runs
import pytest

from seminode_lab import loss_scale, measures, store
from seminode_lab.intervals import Interval
from seminode_lab.repeats import Noise
from seminode_lab.report import claims
from seminode_lab.report.content import summary
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


@pytest.mark.parametrize(("seminorm", "conclusion"), [(122, Conclusion.UNDECIDED), (157, Conclusion.FAILS)])
def test_a_saving_that_depends_on_the_scale_of_the_loss_does_not_count_against_the_paper(
    tmp_path: Path, seminorm: int, conclusion: Conclusion
) -> None:
    """A flow in the regime, without a saving; its weights save 23 % or 1 % if the loss is in nats per image."""
    row = lab_runs.rows()[3]
    for mode in ("mixed", "seminorm"):
        path = lab_runs.write(row.changed(mode=mode), tmp_path) / store.RESULT
        changed = json.loads(path.read_text())
        changed["totals"]["backward_nfe"] = 10_000_000
        path.write_text(json.dumps(changed))
    gathered = measures.gather(store.runs(tmp_path, lambda error: pytest.fail(str(error))))

    def finding() -> Finding:
        return next(each for each in claims.claims(gathered, folder=tmp_path) if each.name == "cnf-saving")

    assert finding().conclusion is Conclusion.FAILS  # the scale was not varied
    counts = [{"factor": 1.0, "mixed": 122, "seminorm": 122}, {"factor": 136.0, "mixed": 158, "seminorm": seminorm}]
    (tmp_path / loss_scale.file_of(row)).write_text(json.dumps({"dims": 196, "counts": counts}))
    assert finding().conclusion is conclusion
    told = "with 136 times the loss in bits per dimension, one batch saves 22.8\N{NO-BREAK SPACE}%"
    assert (told in finding().items[0]) == (conclusion is Conclusion.UNDECIDED)


def test_a_damaged_scale_is_named_with_the_remedy(tmp_path: Path) -> None:
    row = lab_runs.rows()[3]
    (tmp_path / loss_scale.file_of(row)).write_text('{"dims": 196}')
    with pytest.raises(store.StoreError, match=r"damaged .* delete it"):
        loss_scale.measured(tmp_path, row)


@pytest.mark.parametrize(("preset", "own"), [("cpu", False), ("long", True)])
def test_core_hours_say_whether_initial_weights_are_included(tmp_path: Path, preset: str, own: bool) -> None:
    """Those of the preset `long` are trained by runs that have their own place in the report."""
    for row in rows(preset)[:2]:
        for mode in ("mixed", "best"):
            lab_runs.write(row.changed(mode=mode), tmp_path)
    runs = store.runs(tmp_path, lambda error: pytest.fail(str(error)))
    first = summary(measures.gather(runs), runs, Noise())[0]
    assert first.endswith("core-hours." if own else "core-hours, without the common training of initial weights.")
