"""The race times every contender at every tolerance, and goes on without those that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import lanes, report
from benchmarks import race as racing
from benchmarks.contenders import contenders, named
from benchmarks.curves import points
from benchmarks.processes import Worker, WorkerFailed, worker_command
from benchmarks.references import reference
from benchmarks.settings import Contender
from benchmarks.suite import numbers
from benchmarks.verdict import verdicts
from benchmarks.worker import Session

# A worker that says what it is told to: its gradient is a constant vector.
FAKE = """
import json, sys, time
import numpy as np
say = lambda **what: print(json.dumps(what), flush=True)
kind, seconds, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if kind == "dies":
    sys.exit("no such library")
say(ready=True, first=1.0, warm=seconds)
for line in sys.stdin:
    command, factor, path = (line.strip() + "  ").split(" ")[:3]
    if kind == "hangs":
        time.sleep(60)
    if kind == "fails":
        say(failed="ValueError: it cannot")
    if kind == "large" and command == "warm" and factor == "0.1":
        sys.exit("killed")
    if kind == "strict" and command == "warm" and factor == "0.1":
        say(refused="Underflow: the step is too small")
    elif command == "warm":
        say(first=1.0, warm=seconds)
    elif command == "go":
        taken = seconds / float(factor) ** 0.5
        say(seconds=taken, forward=0.25 * taken, backward=0.75 * taken, loss=1.0)
    elif command == "gradient":
        np.save(path, np.ones(size) * (1.0 + float(factor)))
        needed = [{"evaluations": 10, "vjps": 5}]
        say(saved=path, counts={"forward_nfe": 10}, needed=needed, versions={"fake": "1.0"}, peak_mb=10.0)
    elif command == "field":
        say(costs=[{"evaluation": 0.002, "vjp": 0.004}])
    else:
        say(stopped=True)
        break
"""


def fake(tmp_path: Path, kind: str, size: int = 3, limit: float = 60.0, memory: float = 8.0) -> Worker:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return Worker([sys.executable, str(script), kind, "0.1", str(size)], tmp_path / f"{kind}.log", limit, memory)


def test_a_worker_answers_line_by_line(tmp_path: Path) -> None:
    worker = fake(tmp_path, "good")
    assert worker.answer()["warm"] == 0.1
    assert worker.ask("go 1.0")["backward"] == pytest.approx(0.075)
    saved = worker.ask(f"gradient 0.0 {tmp_path / 'g.npy'}")["saved"]
    np.testing.assert_array_equal(np.load(saved), np.ones(3))
    assert worker.ask("stop")["stopped"]
    worker.end()
    assert worker.process.returncode is not None


@pytest.mark.parametrize(
    ("kind", "limits", "why"),
    [
        ("fails", {}, "ValueError: it cannot"),
        ("hangs", {"limit": 2.0}, "no answer within 2 s"),
        ("good", {"memory": 0.001}, "more than 0.001 GB"),
    ],
)
def test_a_worker_that_cannot_is_ended_with_the_reason(
    tmp_path: Path, kind: str, limits: dict[str, float], why: str
) -> None:
    worker = fake(tmp_path, kind, limit=limits.get("limit", 60.0), memory=limits.get("memory", 8.0))

    def first_round() -> None:
        worker.answer()
        worker.ask("go 1.0")

    with pytest.raises(WorkerFailed, match=why):
        first_round()
    assert worker.process.returncode is not None


def test_the_last_words_of_a_worker_are_kept(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="exit 1: no such library"):
        fake(tmp_path, "dies").answer()


def test_rounds_fit_the_budget_and_are_spread_evenly() -> None:
    assert lanes.planned_rounds(0.01, most=40, budget=10.0) == 40
    assert lanes.planned_rounds(1.0, most=40, budget=10.0) == 10
    assert lanes.planned_rounds(4.0, most=40, budget=10.0) == 3
    assert lanes.planned_rounds(10.0, most=40, budget=10.0) == 2
    assert lanes.planned_rounds(20.0, most=40, budget=10.0) == 1
    assert lanes.planned_rounds(100.0, most=40, budget=10.0) == 1
    assert lanes.planned_rounds(0.01, most=1, budget=10.0) == 1


def test_heats_hold_all_and_no_more_than_fit() -> None:
    everyone = [lanes.Lane(each) for each in contenders("cde")]
    found = lanes.heats(everyone, 5)
    assert max(map(len, found)) <= 5
    assert {id(lane) for heat in found for lane in heat} == {id(lane) for lane in everyone}
    assert all(len({lane.contender.library for lane in heat}) > 1 for heat in found)
    for planned in (1, 3, 10):
        taken = [round_ for round_ in range(10) if lanes.takes_part(round_, planned, 10)]
        assert len(taken) == planned
        assert max(np.diff(taken), default=0) <= -(-10 // planned)


def fake_race(tmp_path: Path, kinds: tuple[str, ...], factors: tuple[float, ...]) -> dict[str, Any]:
    """The rows of a race of fakes, by their kinds."""
    who = [Contender("fake", kind) for kind in kinds]
    size = len(reference("small", *numbers("small", quick=True), quick=True, folder=tmp_path).gradient)

    def start(contender: Contender, data: Path) -> Worker:
        assert (data / "arrays.npz").exists()
        return fake(tmp_path, contender.setting, size=size)

    quiet: dict[str, Any] = {"folder": tmp_path, "say": lambda line: None}
    found = racing.race("small", who, start, quick=True, rounds=4, factors=factors, **quiet)
    return json.loads(json.dumps(found))


def test_a_race_goes_on_without_those_who_fail(tmp_path: Path) -> None:
    found = fake_race(tmp_path, ("good", "dies", "fails"), (1.0,))
    rows = {row["setting"]: row for row in found["rows"]}
    assert len(rows["good"]["rounds"]) == 4
    assert rows["good"]["minimum"] == rows["good"]["median"] == 0.1
    assert rows["good"]["error"] > 0.0
    assert rows["dies"]["failed"].endswith("no such library")
    assert rows["fails"]["failed"] == "ValueError: it cannot"
    table = report.race_table(found)
    assert table.splitlines()[2].split("|")[1].strip() == "fake: good"
    assert "no such library" in table


def test_a_row_holds_the_whole_curve(tmp_path: Path) -> None:
    found = fake_race(tmp_path, ("good",), (0.25, 1.0, 4.0))
    (row,) = found["rows"]
    assert [each["factor"] for each in row["curve"]] == [4.0, 1.0, 0.25]
    assert [each["minimum"] for each in row["curve"]] == pytest.approx([0.05, 0.1, 0.2])
    assert all(len(each["rounds"]) == 4 and each["counts"] == {"forward_nfe": 10} for each in row["curve"])
    assert row["error"] == row["curve"][1]["error"]
    assert len({each["error"] for each in row["curve"]}) == 3
    # 10 evaluations of 2 ms and 5 VJPs of 4 ms; a unit of F is one of both.
    assert row["limit"] == pytest.approx(0.04)
    assert row["f_units"] == pytest.approx(0.1 / 0.006)
    assert row["peak_mb"] == 10.0
    assert "50 ms" in report.curve_table(found)


@pytest.mark.parametrize(("kind", "reason"), [("strict", "Underflow"), ("large", "killed")])
def test_a_tolerance_that_fails_takes_only_itself_out_of_the_race(tmp_path: Path, kind: str, reason: str) -> None:
    (row,) = fake_race(tmp_path, (kind,), (10.0, 1.0, 0.1))["rows"]
    assert "failed" not in row
    assert [len(each.get("rounds", ())) for each in row["curve"]] == [4, 4, 0]
    assert reason in row["curve"][-1]["failed"]
    assert len(points(row)) == 2


def test_factors_need_the_nominal_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["10", "0.1"], ["1", "0"]):
        with pytest.raises(SystemExit):
            racing.parse(["--factors", *bad])
        assert "with 1 among them" in capsys.readouterr().err
    assert racing.parse(["--factors", "1", "0.1"]).factors == [1.0, 0.1]


class StubRunner:
    """A runner that fails at tight tolerances, without any numerics."""

    def __init__(self) -> None:
        self.runs: list[float] = []

    def run(self, factor: float) -> dict[str, float]:
        self.runs.append(factor)
        if factor < 0.1:
            raise ValueError("the step is too small")
        return {"seconds": 0.04}

    def gradient(self, factor: float) -> np.ndarray:
        return np.full(2, factor)

    def counts(self, factor: float) -> dict[str, int]:
        return {"forward_nfe": 7}

    def needed(self, factor: float) -> list[dict[str, int]]:
        return []

    def versions(self) -> dict[str, str]:
        return {"stub": "1"}

    def field_costs(self) -> list[dict[str, float]]:
        return []


def test_a_session_runs_at_the_factor_it_is_told(tmp_path: Path) -> None:
    runner = StubRunner()
    session = Session(runner)
    assert session.answer("warm 10.0")["warm"] == 0.04
    assert session.answer("go 10.0") == {"seconds": 0.04}
    assert runner.runs == 3 * [10.0] + 3 * [10.0]  # two untimed passes of 0.04 s before the timed one
    assert session.answer("go 0.01")["refused"] == "ValueError: the step is too small"
    saved = session.answer(f"gradient 10.0 {tmp_path / 'a b.npy'}")
    np.testing.assert_array_equal(np.load(saved["saved"]), [10.0, 10.0])
    assert saved["peak_mb"] > 1.0
    assert session.answer("field") == {"costs": []}
    assert session.answer("stop") == {"stopped": True}


@pytest.mark.slow
def test_real_workers_race(tmp_path: Path) -> None:
    who = [named("small", name) for name in ("seminode: Replay", "torchdiffeq: direct")]

    def start(contender: Contender, data: Path) -> Worker:
        command = worker_command("small", contender.name, data, threads=1, quick=True)
        return Worker(command, tmp_path / "log", environment={"PYTHONPATH": ":".join(sys.path)})

    quiet: dict[str, Any] = {"folder": tmp_path, "say": lambda line: None}
    found = racing.race("small", who, start, quick=True, rounds=2, factors=(10.0, 1.0), **quiet)
    for row in found["rows"]:
        assert "failed" not in row, row["failed"]
        assert row["error"] < 1e-3
        assert row["minimum"] > 0.0
        assert row["peak_mb"] > 10.0
        assert "torch" in row["versions"]
    assert next(each for each in verdicts(found) if each.against == "torchdiffeq's best").peer
