"""Comparisons of classifiers: every result is kept as soon as it is known, and the page shows those that are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from project import ROOT

from benchmarks.classification import Result, read, report, run

RESULTS = [
    Result("neural", 0, 0.90, 2.0),
    Result("linear", 0, 0.80, 0.5),
    Result("neural", 1, 0.94, 4.0),
    Result("linear", 1, 0.86, 0.5),
]


def test_the_table_has_means_ranges_and_relative_times() -> None:
    _, neural, linear = (line.split() for line in report(RESULTS).splitlines())
    assert neural == ["neural", "92.0%", "90.0%-94.0%", "3", "1.00"]
    assert linear == ["linear", "83.0%", "80.0%-86.0%", "0.5", "0.17"]


def test_results_are_stored_before_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Iterator[Result]:
        yield from RESULTS[:3]
        raise KeyboardInterrupt

    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run(interrupted(), path, epochs=3)
    assert read(path) == RESULTS[:3]
    run(iter(RESULTS), path, epochs=3)
    assert read(path) == RESULTS
    assert capsys.readouterr().out == report(RESULTS) + "\n"


@pytest.mark.parametrize("name", ["vowels", "speech"])
def test_the_page_shows_the_stored_results(name: str) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = report(read(ROOT / "benchmarks" / "results" / f"{name}.json"))
    assert "\n".join("    " + line for line in table.splitlines()) in page
