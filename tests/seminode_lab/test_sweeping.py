"""Sweeps: every run is made once, whatever dies, fails, is interrupted or is made by somebody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import lab_runs
import pytest
import tiny_runs
from project import TESTS
from tiny_runs import ONE, tiny

from seminode import cli
from seminode_lab import engines, settings, sweeping, worker
from seminode_lab.attempts import BUSY, DIED, DONE, FAILED, STOPPED, UNUSABLE
from seminode_lab.engines import Engine, Local, LocalRun, RunHandle, launch
from seminode_lab.store import CHECKPOINT, Finished, Run
from seminode_lab.sweeping import SweepRunner, chosen, failures
from seminode_lab.watching import last_lines
from seminode_lab.worker import Order

LONG = replace(ONE, epochs=40)
#: A step so large that nothing finite is left.
BAD = replace(ONE, epochs=3, lr=1e30)


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Ended(RunHandle):
    """A run that has ended with a status."""

    def __init__(self, status: int) -> None:
        self._status = status

    def status(self) -> int:
        return self._status

    def stop(self) -> None: ...

    def wait(self) -> None: ...


class Script(Engine):
    """Ends runs with statuses from a list; those that are done have a folder then."""

    def __init__(self, **statuses: Sequence[int]) -> None:
        self._statuses = {name: list(each) for name, each in statuses.items()}
        self.started: list[str] = []

    def start(self, order: Order) -> Ended:
        mode = order.settings.mode
        self.started.append(mode)
        status = self._statuses[mode].pop(0)
        if status == DONE:
            lab_runs.write(order.settings, order.out)
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("a") as log:
            log.write(f"the {len(self.started)}. start\nended with {status}\n")
        return Ended(status)


def orders(out: Path, *modes: str) -> list[Order]:
    return [Order(tiny(mode=mode), out) for mode in modes]


def named(*modes: str) -> list[str]:
    return [tiny(mode=mode).name for mode in modes]


def test_what_dies_is_tried_again_and_what_fails_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Script(mixed=[-9, DIED, DONE], seminorm=[FAILED], best=[-9, 1000, DIED])
    found = SweepRunner(orders(tmp_path, "mixed", "seminorm", "best"), engine, jobs=2).go()
    assert found.made == named("mixed")
    assert found.failed == {
        named("seminorm")[0]: "ended with 1",
        named("best")[0]: "ended by an error, 3 times",
    }
    assert str(found) == "3 runs: 1 made, 0 complete before, 2 failed"
    told = capsys.readouterr().out
    assert f"died: {named('mixed')[0]}, killed by SIGKILL; it is retried" in told
    assert f"started: {named('mixed')[0]}, attempt 2" in told
    lines = failures(found, tmp_path, count=1)
    assert lines[:2] == [f"{named('seminorm')[0]}: ended with 1", "    | ended with 1"]


def test_the_longest_are_started_first_and_not_more_than_there_are_places(tmp_path: Path) -> None:
    engine = Script(mixed=[UNUSABLE], seminorm=[FAILED], best=[FAILED])
    sweep = SweepRunner(orders(tmp_path, "mixed", "seminorm", "best"), engine, jobs=2)
    sweep._start()
    assert engine.started == ["mixed", "seminorm"]
    sweep._start()
    assert len(engine.started) == 2
    sweep.go()
    assert engine.started == ["mixed", "seminorm", "best"]


def test_a_run_that_another_process_is_at_is_looked_at_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Script(mixed=[BUSY, BUSY, DONE], best=[DONE])
    jobs = orders(tmp_path, "mixed", "best")
    sweep = SweepRunner(jobs, engine, jobs=1)
    for job in sweep._waiting:
        job.pause = 0.01
    found = sweep.go()
    assert sorted(found.made) == sorted(named("mixed", "best"))
    assert engine.started.count("mixed") == 3
    told = capsys.readouterr().out
    assert told.count("another process works on it") == told.count(f"started: {named('mixed')[0]}") == 1


def test_what_another_sweep_has_made_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    engine = Script(mixed=[BUSY])
    sweep = SweepRunner(orders(tmp_path, "mixed"), engine, jobs=1)
    sweep._start()
    sweep._waiting[:], sweep._running[:] = [sweep._running[0][0]], []
    lab_runs.write(tiny(), tmp_path)
    assert sweep.go().there == named("mixed")
    assert engine.started == ["mixed"]


def test_a_worker_leaves_a_run_alone_that_another_process_is_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(tmp_path / tiny().name, {"settings": tiny().as_json()}):
        assert worker.work(Order(tiny(), tmp_path, tensorboard=False)) == BUSY
    assert "another process works on this run" in capsys.readouterr().err


def test_a_worker_says_what_nobody_thought_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "attempt", lambda *_, **__: [].pop())
    assert worker.work(Order(tiny(), tmp_path)) == DIED
    assert "IndexError: pop from empty list" in capsys.readouterr().err


def test_orders_survive_being_written(tmp_path: Path) -> None:
    for order in (Order(tiny(adjoint="Quadrature"), tmp_path), Order(tiny(), tmp_path, tmp_path / "data", 3, False)):
        assert Order.read(order.written()) == order
        assert "\n" not in order.written()


class InProcess(Engine):
    """Does the work of the processes here and now."""

    def start(self, order: Order) -> Ended:
        return Ended(worker.work(order))


class Murder(Local):
    """Kills one of the runs once, as soon as there is something to go on from."""

    killed: int | None = None

    def start(self, order: Order) -> LocalRun:
        run = super().start(order)
        if order.settings.mode == "best" and Murder.killed is None:
            Murder.killed = run.process.pid
            threading.Thread(target=self._kill, args=(run, order), daemon=True).start()
        return run

    def _kill(self, run: LocalRun, order: Order) -> None:
        wait_for((order.out / order.settings.name / CHECKPOINT).exists)
        os.kill(run.process.pid, signal.SIGKILL)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_sweep_survives_a_kill_and_a_run_that_always_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tiny(mode="best", schedule=replace(ONE, epochs=4)), tiny(schedule=BAD), tiny(mode="seminorm")]
    monkeypatch.setattr(sweeping, "all_runs", lambda preset: runs)
    monkeypatch.setitem(engines.ENGINES, "local", Murder)
    monkeypatch.setattr(Murder, "killed", None)
    command = ["sweep", "--preset", "tiny", "--out", str(tmp_path), "--jobs", "2", "--no-tensorboard"]
    assert cli.main(command) == 1
    told = capsys.readouterr()
    assert f"died: {runs[0].name}, killed by SIGKILL; it is retried" in told.out
    assert "3 runs: 2 made, 0 complete before, 1 failed" in told.out
    assert told.err.startswith(f"{runs[1].name}: ")
    for run in (runs[0], runs[2]):
        assert Finished.load(tmp_path / run.name).result is not None
    log = (tmp_path / "logs" / f"{runs[0].name}.log").read_text()
    assert "resuming after epoch" in log
    assert log.count("epoch 1 of 4:") == 1
    # Once more: what is there is left alone, and what failed fails again.
    monkeypatch.setitem(engines.ENGINES, "local", InProcess)
    assert cli.main(command) == 1
    assert "3 runs: 0 made, 2 complete before, 1 failed" in capsys.readouterr().out


def test_a_sweep_of_what_is_there_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_runs.install(monkeypatch)
    for run in settings.all_runs("tiny"):
        lab_runs.write(run, tmp_path)
    monkeypatch.setattr(Local, "start", None)
    assert cli.main(["sweep", "--preset", "tiny", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "complete: 6 runs\n6 runs: 0 made, 6 complete before, 0 failed\n"


SWEEP = """
    import signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have it ignored
    sys.path[:0] = [{tests!r}, {source!r}]
    from dataclasses import replace
    from seminode import cli
    from seminode_lab import settings
    from tiny_runs import ONE, tiny
    settings.PRESETS["tiny"] = ((tiny(schedule=replace(ONE, epochs={epochs})),), dict.fromkeys(settings.EXPERIMENTS, 1))
    sys.exit(cli.main(["sweep", "--preset", "tiny", "--out", {out!r}, "--jobs", "2", "--only", "mixed", "best"]))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_an_interrupt_stops_the_children_and_leaves_all_resumable(tmp_path: Path) -> None:
    tests, source = TESTS, Path(str(cli.__file__)).parents[1]
    code = SWEEP.format(tests=str(tests), source=str(source), out=str(tmp_path), epochs=LONG.epochs)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = [tiny(mode=mode, schedule=LONG) for mode in ("mixed", "best")]
    wait_for(lambda: all((tmp_path / run.name / CHECKPOINT).exists() for run in runs))
    sweep.send_signal(signal.SIGINT)
    _, told = sweep.communicate(timeout=60)
    assert (sweep.returncode, told) == (
        130,
        "seminode sweep: interrupted; all runs are kept; the same command resumes them\n",
    )
    for run in runs:
        with Run(tmp_path / run.name, {"settings": run.as_json()}) as folder:  # nobody is at it any more
            checkpoint = folder.checkpoint()
            assert checkpoint is not None
            assert not folder.done


@pytest.mark.skipif(os.name != "posix", reason="sessions are those of POSIX")
def test_a_worker_leaves_when_the_sweep_is_gone(tmp_path: Path) -> None:
    order = Order(tiny(schedule=LONG), tmp_path, tensorboard=False)
    process = launch(order)
    try:
        wait_for((tmp_path / order.settings.name / CHECKPOINT).exists)
        assert process.stdin is not None
        process.stdin.close()  # as the system does for a sweep that is killed
        assert process.wait(30) == STOPPED
    finally:
        process.kill()
        process.wait()


def test_runs_are_chosen_by_experiment_pattern_and_seed() -> None:
    assert len(chosen("paper")) == len(settings.all_runs("paper"))
    assert chosen("paper")[0].rtol == 1e-5
    assert chosen("paper")[0].mode == "mixed"
    assert {run.experiment for run in chosen("paper", ["hnn", "cnf"])} == {"hnn", "cnf"}
    assert {run.seed for run in chosen("paper", seeds=7)} == set(range(7))
    assert {run.name for run in chosen("paper", only=["hnn-*-best-[01]", "hnn-pendulum-mixed-4"])} == {
        *("hnn-pendulum-best-0", "hnn-pendulum-best-1", "hnn-pendulum-mixed-4")
    }
    assert len(chosen("paper", only=["cifar10", "cifar10-64-best"])) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "papr"], "--preset: expected one of quick, "),
        (["--experiment", "cde"], "--experiment: expected one of ncde, cnf, hnn, found 'cde'; did you mean 'ncde'?"),
        (["--only", "no-such"], "--only: expected a part of a run's name, such as"),
        (["--seeds", "0"], "--seeds: expected a whole number of at least 1, found 0"),
        (["--jobs", "0"], "--jobs: expected a whole number of at least 1, found 0"),
        (["--threads", "-1"], "--threads: expected a whole number of at least 1, found -1"),
        (["--retries", "-1"], "--retries: expected a whole number of at least 0, found -1"),
        (["--engine", "slurm"], "--engine: expected one of local, ray, found 'slurm'"),
        (["--device", "abacus"], "--device: expected one that PyTorch can use here, found 'abacus'"),
        (["--out", __file__], "--out: expected a folder, found the file"),
        (["--data-dir", __file__], "--data-dir: expected a folder, found the file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_swept(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *options]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"seminode sweep: {message}")
    assert told.err.count("\n") == 1
    assert (told.out, list(tmp_path.iterdir())) == ("", [])


def test_an_experiment_that_the_preset_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.install(monkeypatch)
    with pytest.raises(ValueError, match="experiment: the preset 'tiny' has no 'cnf' or 'hnn'"):
        chosen("tiny", ["cnf", "hnn"])


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"x" * 10_000 + b"\nfirst\n\n  bar 1\rbar 2\n\xff\n")
    assert last_lines(log, 3) == ["bar 1", "bar 2", "�"]


def test_without_ray_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", "--preset", "quick", "--engine", "ray"]) == 2
    assert capsys.readouterr().err == ("seminode sweep: --engine: Ray is not installed: pip install 'seminode[ray]'\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_runs_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    tiny_runs.install(monkeypatch, tiny(), tiny(rtol=1e-3, schedule=BAD))
    command = ["sweep", "--preset", "tiny", "--engine", "ray", "--out", str(tmp_path), "--only", "mixed"]
    assert cli.main(command) == 1
    assert "2 runs: 1 made, 0 complete before, 1 failed" in capsys.readouterr().out
    assert Finished.load(tmp_path / tiny().name).result is not None
