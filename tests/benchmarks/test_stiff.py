"""The stiff problems are the published ones, and the table has what it says."""

from __future__ import annotations

import pytest

from benchmarks import stiff
from benchmarks.stiff_problems import problems


@pytest.mark.parametrize("name", ["HIRES", "OREGO", "POLLU"])
def test_published_values(name: str) -> None:
    problem = problems()[name]
    y = stiff.scipy_solve(problem, "Radau", 1e-9, 1e-9 * problem.scale)[0]
    assert problem.published
    for index, value in problem.published.items():
        assert y[index] == pytest.approx(value, rel=1e-6)


def test_table() -> None:
    problem = problems()["POLLU"]
    found = stiff.measure(problem, [1e-4], peers=False)
    assert [x.solver for x in found[1e-4]] == ["seminode kvaerno5", "seminode radauIIA5"]
    assert all(x.error <= 10.0 for x in found[1e-4])
    assert "20 unknowns" in stiff.table(problem, found)
