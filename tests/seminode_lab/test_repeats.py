"""Identical runs that are repeated, and speed ratios that are not told from their noise."""

from __future__ import annotations

import json
from pathlib import Path

import lab_runs
import pytest
import tiny_runs

from seminode import cli
from seminode_lab import engines, measures, repeats, settings, store, tables, worker
from seminode_lab.engines import Engine, RunHandle
from seminode_lab.repeats import Noise, noise_of
from seminode_lab.report import claims, objections
from seminode_lab.report.content import gains, summary
from seminode_lab.report.findings import Conclusion, Finding
from seminode_lab.settings import Settings, rows
from seminode_lab.store import Finished, StoreError
from seminode_lab.worker import Order


class Ended(RunHandle):
    """A run that was made before anybody could ask."""

    def __init__(self, status: int) -> None:
        self._status = status

    def status(self) -> int:
        return self._status

    def stop(self) -> None:
        pass

    def wait(self) -> None:
        pass


class InProcess(Engine):
    """Does the work of the processes here and now."""

    def start(self, order: Order) -> Ended:
        return Ended(worker.work(order))


def read(folder: Path) -> list[Finished]:
    return store.runs(folder, lambda error: pytest.fail(str(error)))


def pendulum(folder: Path) -> Settings:
    """Runs of the pendulum in two modes; those with the mixed norm and with the seminorm take the same time."""
    row = rows("paper")[-1]
    for mode in ("mixed", "seminorm", "best"):
        lab_runs.write(row.changed(mode=mode), folder)
    return row


def summarise(folder: Path, row: Settings, *seconds: float) -> None:
    rows = [{"settings": row.as_json(), "seconds": list(seconds), "evaluations": [98] * len(seconds)}]
    (folder / repeats.FILE).write_text(json.dumps({"runs": rows}))


def test_every_run_is_made_again_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.install(monkeypatch, tiny_runs.tiny())
    monkeypatch.setitem(engines.ENGINES, "local", InProcess)
    command = ["sweep", "--preset", "tiny", "--out", str(tmp_path), "--repeat", "2", "--no-tensorboard", "--only", "m"]
    command += ["--threads", "1"]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert told.index("round 1 of 2") < told.index("round 2 of 2")
    assert told.rstrip().endswith(str(tmp_path / repeats.FILE))
    found = repeats.repeated(tmp_path)
    wanted = {run.name: run for run in settings.all_runs("tiny") if "m" in run.name}
    assert [each.settings for each in found] == [wanted[name] for name in sorted(wanted)]
    for each in found:
        folders = [tmp_path / repeats.ROUNDS / place / each.settings.name for place in "01"]
        runs = [Finished.load(folder) for folder in folders]
        assert each.seconds == tuple(map(measures.seconds, runs))
        assert each.evaluations == tuple(map(measures.true_nfe, runs))
        assert len(set(each.evaluations)) == 1  # identical runs
    table = repeats.table(tmp_path)
    assert [row[0] for row in table.rows] == sorted(wanted)
    # The rounds are no runs of the report.
    assert read(tmp_path) == []


def test_noise_is_the_largest_difference_of_an_experiment(tmp_path: Path) -> None:
    assert noise_of(tmp_path) == Noise()
    assert repeats.table(tmp_path).rows == ()
    summarise(tmp_path, rows("paper")[-1], 10.0, 11.0, 12.0)
    assert noise_of(tmp_path).of("hnn") == pytest.approx(0.2)
    assert noise_of(tmp_path).of("ncde") is None


def test_ratios_within_the_noise_are_not_shown_as_speed_ups(tmp_path: Path) -> None:
    row = pendulum(tmp_path)
    runs = read(tmp_path)
    own = {run.settings["mode"]: measures.seconds(run) for run in runs}
    best = f"{own['mixed'] / own['best']:.2f}"
    assert tables.savings(runs).rows[0][-1] == best == "3.50"

    summarise(tmp_path, row, 1.0, 1.1)
    noise = noise_of(tmp_path)
    faster = next(line for line in tables.hnn(runs, noise).rows if line[0] == "speed-up over mixed")
    assert faster[-2:] == ("≈ 1", best)
    assert any("differ by up to 10 %" in note for note in tables.hnn(runs, noise).notes)
    assert not any("≈ 1" in note for note in tables.savings(runs, noise).notes)
    gathered = measures.gather(runs)
    assert gains(gathered, noise).rows[0][3:5] == ("≈ 1", best)
    assert any(f"training is {best}" in line for line in summary(gathered, runs, noise))

    summarise(tmp_path, row, 1.0, 4.0)
    noise = noise_of(tmp_path)
    assert tables.savings(runs, noise).rows[0][-1] == "≈ 1"
    assert any("within the noise" in note for note in tables.savings(runs, noise).notes)
    assert not any("speed-up" in line for line in summary(gathered, runs, noise))


@pytest.mark.parametrize(("seconds", "conclusion"), [((1.0, 1.01), Conclusion.HOLDS), ((1.0, 2.5), Conclusion.FAILS)])
def test_a_claim_about_time_is_not_held_up_by_noise(
    tmp_path: Path, seconds: tuple[float, ...], conclusion: Conclusion
) -> None:
    """The seminorm takes half the time, which says nothing if identical runs differ by more."""
    row = pendulum(tmp_path)
    path = tmp_path / row.changed(mode="seminorm").name / store.RESULT
    found = json.loads(path.read_text())
    found["seconds"]["training_processor"] /= 2.0
    path.write_text(json.dumps(found))
    summarise(tmp_path, row, *seconds)

    def finding() -> Finding:
        every = claims.claims(measures.gather(read(tmp_path)), noise_of(tmp_path))
        return next(each for each in every if each.name == "time")

    assert finding().conclusion is conclusion
    assert ("within the noise" in finding().items[0]) == (conclusion is Conclusion.FAILS)
    assert "not measured" not in finding().found
    (tmp_path / repeats.FILE).unlink()
    assert "not measured" in finding().found


def test_the_objection_is_answered_by_repeated_runs_only(tmp_path: Path) -> None:
    row = pendulum(tmp_path)

    def timing() -> Finding:
        gathered = measures.gather(read(tmp_path))
        return next(each for each in objections.objections(gathered, tmp_path, []) if each.name == "objection-timing")

    assert timing().conclusion is Conclusion.ANSWERED_PARTLY
    assert timing().items == ("Symplectic ODE-Net: not measured",)
    summarise(tmp_path, row, 1.0, 1.1)
    assert timing().conclusion is Conclusion.ANSWERED
    assert timing().items == ("Symplectic ODE-Net: by up to 10.0\N{NO-BREAK SPACE}%",)


@pytest.mark.parametrize("text", ["{", "{}", '{"runs": [{}]}', '{"runs": 3}'])
def test_a_damaged_summary_is_named_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / repeats.FILE).write_text(text)
    with pytest.raises(StoreError, match=repeats.FILE):
        repeats.repeated(tmp_path)


def test_a_single_repeat_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarise(tmp_path, rows("paper")[-1], 1.0)
    with pytest.raises(StoreError, match="at least two positive numbers of seconds"):
        noise_of(tmp_path)
    assert cli.main(["sweep", "--preset", "quick", "--out", str(tmp_path), "--repeat", "1"]) == 2
    assert "--repeat: expected a whole number of at least 2, found 1" in capsys.readouterr().err


def test_rounds_with_different_settings_are_refused(tmp_path: Path) -> None:
    row = rows("paper")[-1]
    for place, run in (("0", row), ("1", row.changed(batch=128))):
        lab_runs.write(run, tmp_path / repeats.ROUNDS / place)
    with pytest.raises(StoreError, match="different settings; delete this folder"):
        repeats.collect(tmp_path)
