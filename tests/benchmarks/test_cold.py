"""The parts of a first compiled call are measured and add up."""

from __future__ import annotations

import pytest
import torch
from compiled import replace_back_end

from benchmarks import cold


def test_parts_of_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    replace_back_end(monkeypatch)
    monkeypatch.setattr(cold, "ITERATIONS", 1)
    found = cold.measure("direct", 4)
    assert found["programs"] == 3
    assert found["C++ compiler"] == 0.0  # the stand-in needs none
    assert 0.0 < found["tracing"] < 60.0
    assert found["compiled"] > 0.0


def test_a_loop_in_the_background_says_when_it_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    replace_back_end(monkeypatch)
    solves: list[object] = []
    iterate = cold.iteration(cold.SMALL, "direct", 4)

    def pretended(*problem: object) -> object:
        """The fifteenth iteration in the background is compiled."""

        def run(compile: object) -> object:
            solves.append(compile)
            return iterate(compile is True or solves.count("background") >= 15)

        return run

    monkeypatch.setattr(cold, "iteration", pretended)
    found = cold.train("direct", 4, cold.SMALL, 100)
    assert found["switched"] == 15
    assert solves.count("background") == 35
    assert found["stall"] > found["compiled"] > 0.0
    text = cold.background_report(found)
    assert "| 15, after" in text
    assert "none" in cold.background_report(found | {"switched": -1})


def test_the_report_adds_up() -> None:
    parts = {"imports of the compiler": 1.0, "tracing": 2.0, "Inductor": 3.0, "C++ compiler": 4.0}
    empty = parts | {"eager": 0.01, "compiled": 0.005, "programs": 3, "clock": 6.5}
    text = cold.report(empty, empty | {"C++ compiler": 0.0})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert ["sum", "10.0", "6.0"] in rows
    assert ["by the clock", "6.5", "6.5"] in rows
    assert ["in eager iterations", "1000", "600"] in rows
    assert "10.0 ms eagerly and 5.0 ms compiled; 3 programs." in text
