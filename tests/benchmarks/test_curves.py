"""Speed-ups are read off two work–precision curves at equal error, and never beyond their ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bars import BARS, bars_of
from benchmarks.curves import Envelope, overlap, points, quartiles, ratio_at, ratios, spread_at
from benchmarks.suite import ENTRIES
from benchmarks.verdict import limit_verdict, verdict_table, verdicts


def setting(
    name: str,
    pairs: Sequence[tuple[float, float]],
    factors: Sequence[float] = (10.0, 1.0, 0.1),
    spread: float = 0.0,
    **extra: Any,
) -> dict[str, Any]:
    """A row of results from pairs of error and time; its rounds are the time and two larger ones."""
    library, _, label = name.partition(": ")
    entries = []
    for factor, (error, seconds) in zip(factors, pairs, strict=True):
        rounds = [{"seconds": seconds * (1.0 + i * spread)} for i in range(3)]
        entries.append({"factor": factor, "error": error, "minimum": seconds, "median": seconds, "rounds": rounds})
    about = {"name": name, "library": library, "setting": label, "compiled": "compiled" in name, "first": 1.0}
    row = {**about, "curve": entries, **extra}
    return row | next({**each} for each in entries if each["factor"] == 1.0)


def power_law(scale: float, errors: Sequence[float], order: float = 5.0) -> list[tuple[float, float]]:
    """Time ∝ error^(−1/order), a straight line in a log-log diagram."""
    return [(error, scale * error ** (-1.0 / order)) for error in errors]


def result(rows: Sequence[dict[str, Any]], problem: str = "small") -> dict[str, Any]:
    about = {"problem": problem, "title": problem, "rtol": 1e-3, "atol": 1e-6, "parameters": 8}
    return {**about, "reference": {"how": "float64", "good_to": 1e-9}, "rows": list(rows)}


def test_interpolation_of_power_laws_is_exact() -> None:
    peer = Envelope([setting("diffrax: a", power_law(3.0, (2e-2, 3e-3, 4e-4)))])
    ours = Envelope([setting("seminode: a", power_law(1.5, (5e-3, 1e-3, 1e-4)))])
    for error in (4e-4, 1e-3, 2.7e-3, 5e-3):
        assert ratio_at(peer, ours, error) == pytest.approx(2.0)
    assert ratios(peer, ours) == pytest.approx((2.0, 2.0))
    assert overlap(peer, ours) == (4e-4, 5e-3)


def test_nothing_is_extrapolated() -> None:
    ours = Envelope([setting("seminode: a", power_law(1.0, (1e-2, 1e-3, 1e-4)))])
    assert ours.at(0.99e-4) is None
    loosest = ours.at(0.5)
    assert loosest is not None
    # Less accuracy than was measured is not faster than what was measured.
    assert (loosest.error, loosest.seconds) == (1e-2, pytest.approx(1e-2**-0.2))
    accurate = Envelope([setting("diffrax: a", power_law(1.0, (1e-5, 1e-6, 1e-7)))])
    assert overlap(accurate, ours) is None
    assert ratios(accurate, ours) is None
    assert ratio_at(accurate, ours, 1e-6) is None


def test_a_library_is_as_fast_as_its_fastest_setting() -> None:
    steep = setting("seminode: steep", power_law(1.0, (1e-1, 1e-2, 1e-3), order=2.0))
    flat = setting("seminode: flat", power_law(3.0, (1e-1, 1e-2, 1e-3), order=8.0))
    both = Envelope([steep, flat])
    at = {error: both.at(error) for error in (0.09, 1.1e-3)}
    assert [each.setting for each in at.values() if each] == ["steep", "flat"]
    assert all(each is not None and each.error == error for error, each in at.items())


def test_a_point_that_is_more_accurate_and_faster_wins() -> None:
    # Rounding spoils the tightest tolerance: its error is larger than that of the one before.
    odd = Envelope([setting("seminode: odd", [(1e-3, 1.0), (1e-5, 2.0), (2e-5, 4.0)])])
    best, between = odd.at(1e-5), odd.at(2e-5)
    assert best is not None
    assert between is not None
    assert best.seconds == 2.0
    assert between.seconds == pytest.approx(2.0 ** (1.0 - math.log(2.0) / math.log(100.0)))  # not 4


def test_the_spread_comes_from_the_quartiles_of_the_rounds() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    peer = Envelope([setting("diffrax: a", power_law(2.0, (1e-2, 1e-3, 1e-4)), spread=0.2)])
    ours = Envelope([setting("seminode: a", power_law(1.0, (1e-2, 1e-3, 1e-4)), spread=0.4)])
    # The quartiles of (1, 1.2, 1.4) and of (1, 1.4, 1.8), times 2 and 1.
    assert spread_at(peer, ours, 1e-3) == pytest.approx((2 * 1.1 / 1.6, 2 * 1.3 / 1.2))


def test_useless_points_are_left_out() -> None:
    row = setting("seminode: a", [(1e-2, 1.0), (float("nan"), 2.0), (0.0, 3.0)])
    row["curve"].append({"factor": 0.01, "failed": "no"})
    assert [each.factor for each in points(row)] == [10.0]
    assert points({"name": "x", "failed": "no"}) == []
    assert Envelope([]).nominal is None


def test_verdicts_compare_at_the_error_of_the_peers_nominal_tolerance() -> None:
    rows = [
        setting("diffrax: a", power_law(3.0, (1e-2, 2e-3, 1e-4)), options={"adjoint": "DirectAdjoint", "solver": "X"}),
        setting("seminode: Direct, compiled", power_law(1.5, (1e-2, 1e-3, 1e-4)), limit=4.0),
        setting("seminode: Direct", power_law(6.0, (1e-2, 1e-3, 1e-4))),
    ]
    found = {each.against: each for each in verdicts(result(rows))}
    best, eager = found["diffrax's best"], found["diffrax's best, seminode eager"]
    assert best.peer is not None
    assert best.ours is not None
    assert best.peer.error == best.ours.error == 2e-3
    assert best.ratio == pytest.approx(2.0)
    assert (best.bar, best.says) == (1.15, "met")
    assert best.span == pytest.approx((2.0, 2.0))
    assert eager.ratio == pytest.approx(0.5)
    assert "2.00 to 2.00" in verdict_table(result(rows))
    limit = limit_verdict(result(rows))
    assert limit is not None
    assert limit.times == pytest.approx(1.5 * 1e-3**-0.2 / 4.0)
    assert (limit.bar, limit.says) == (1.7, "met")
    assert "target at most 1.25" in report.limit_line(result(rows, "flow"))


def test_rounding_is_no_excuse_with_curves() -> None:
    rows = [
        setting("diffrax: a", [(1e-2, 1.0), (1e-3, 2.0), (1e-4, 4.0)]),
        setting("seminode: a", [(1e-1, 0.1), (5e-2, 0.2), (1.04e-3, 0.3)]),
    ]
    (best,) = [each for each in verdicts(result(rows)) if each.against == "diffrax's best"]
    assert best.ours is None
    assert best.says == "missed: no setting as accurate"


def test_errors_of_the_size_of_rounding_are_equal() -> None:
    rows = [
        setting("diffrax: a", [(1e-4, 1.0), (3e-7, 2.0), (1e-7, 4.0)]),
        setting("seminode: a", [(1e-4, 0.5), (4e-7, 0.8), (5e-7, 2.0)]),
    ]
    (best,) = [each for each in verdicts(result(rows)) if each.against == "diffrax's best"]
    assert best.ratio == pytest.approx(2.0 / 0.8)


def test_backsolve_is_compared_with_the_same_solver() -> None:
    errors = (1e-2, 1e-3, 1e-4)
    theirs = [
        setting(f"diffrax: {name}", power_law(scale, errors), options={"adjoint": "BacksolveAdjoint", "solver": name})
        for name, scale in (("Dopri5", 2.0), ("Tsit5", 1.1))
    ]
    ours = [
        setting("seminode: Backsolve", power_law(1.0, errors), options={"adjoint": "Backsolve"}),
        setting(
            "seminode: tsit5", power_law(1.0, errors), options={"adjoint": "Backsolve", "solve": {"solver": "tsit5"}}
        ),
        setting("seminode: Direct", power_law(0.1, errors), options={"adjoint": "Direct"}),
    ]
    found = {each.against: each for each in verdicts(result([*theirs, *ours], "flow"))}
    dopri5 = found["diffrax's BacksolveAdjoint with Dopri5, Backsolve"]
    tsit5 = found["diffrax's BacksolveAdjoint with Tsit5, Backsolve"]
    assert (dopri5.ratio, dopri5.bar, dopri5.says) == (pytest.approx(2.0), 1.2, "met")
    assert (tsit5.ratio, tsit5.says) == (pytest.approx(1.1), "missed")


def test_checkpointing_is_compared_at_equal_numbers() -> None:
    errors = (1e-2, 1e-3, 1e-4)
    rows = [
        setting(f"{library}: {n}", power_law(scale * n, errors), options={"checkpoints": n})
        for library, scale in (("diffrax", 3.0), ("seminode", 1.5))
        for n in (2, 4)
    ]
    rows.append(setting("seminode: Reversible", power_law(1.0, errors), options={"adjoint": "Reversible"}))
    found = {each.against: each.ratio for each in verdicts(result(rows, "reversible"))}
    assert found["diffrax with 2 checkpoints, Checkpointed"] == pytest.approx(2.0)
    assert found["diffrax with 4 checkpoints, Checkpointed"] == pytest.approx(2.0)
    assert found["diffrax with 4 checkpoints, Reversible"] == pytest.approx(12.0)


def test_every_problem_has_targets() -> None:
    assert all(bars_of(name) for name in ENTRIES)
    assert bars_of("sampling-large-euler") == BARS["sampling-large"]
    assert bars_of("sampling-euler") == BARS["sampling"]
    assert bars_of("unknown") == {}


def test_every_problem_has_its_nominal_tolerance_and_at_least_two_more() -> None:
    for entry in ENTRIES.values():
        assert 1.0 in entry.factors
        assert 3 <= len(entry.factors) <= 5


def test_curves_are_shown_with_all_tolerances() -> None:
    costs = [{"evaluation": 0.5, "vjp": 1.5}]
    rows = [setting("seminode: a, compiled", [(1e-2, 1.0), (1e-3, 2.0), (1e-4, 8.0)], costs=costs, limit=1.0)]
    rows.append(setting("torchdiffeq: a", [(1e-2, 4.0), (1e-3, 6.0), (1e-4, 8.0)]))
    lines = report.curve_table(result(rows)).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][1:4] == ["tolerance × 10", "tolerance × 1", "tolerance × 0.1"]
    assert cells[2] == ["seminode: a, compiled", "1 s, 1.0e-02", "2 s, 1.0e-03", "8 s, 1.0e-04", "1", "2.00"]
    assert cells[3][-2:] == ["3", "–"]  # in the same units; what torchdiffeq needs is not known
    assert report.section(result(rows)).count("Times the limit: 2.00") == 1
    assert Envelope(rows[:1]).nominal == points(rows[0])[1]


def test_a_gradient_that_is_no_better_than_zeros_is_not_compared() -> None:
    wrong = setting("diffrax: fast", [(1.9, 0.1), (1.3, 0.2), (1.0, 0.3)])
    right = setting("diffrax: right", power_law(1.0, (1e-2, 1e-3, 1e-4)))
    assert Envelope([wrong]).nominal is None
    assert Envelope([wrong, right]).nominal == points(right)[1]
