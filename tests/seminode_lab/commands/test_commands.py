"""The commands of the laboratory: what is asked for is what runs, and what cannot be is said in one line."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import lab_runs
import pytest
import tiny_runs
from project import ROOT
from tiny_runs import TWO, tiny

import seminode as sn
from seminode import cli
from seminode_lab import attempts, running
from seminode_lab.commands import run as command
from seminode_lab.data.errors import MissingData
from seminode_lab.engines import ENGINES, Engine
from seminode_lab.modes import solve_options
from seminode_lab.settings import PRESETS, Settings, all_runs, rows
from seminode_lab.store import Finished, Run
from seminode_lab.training import Training, TrainingFailed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, and the preset `tiny`."""
    monkeypatch.chdir(tmp_path)
    tiny_runs.install(monkeypatch)
    return tmp_path


def asked(*arguments: str) -> tuple[Settings, bool]:
    return command.settings_of(cli.parser().parse_args(["run", *arguments]))


# What is asked for.


def test_a_run_is_a_row_in_a_mode_with_a_seed() -> None:
    assert asked("ncde", "--preset", "paper") == (rows("paper")[0].changed(mode="seminorm"), False)
    assert asked("ncde", "--preset", "paper", "--rtol", "1e-4")[0].atol == 1e-7
    found, own = asked("cnf", "--preset", "paper", "--row", "mnist-32", "--norm", "best", "--seed", "4")
    assert (found.name, own) == ("cnf-mnist-32-best-4", False)
    assert asked("hnn", "--norm", "published")[0].mode == "published"


def test_every_run_of_a_preset_can_be_asked_for() -> None:
    for preset in PRESETS:
        for each in all_runs(preset):
            given = ["--row", each.row, "--norm", each.mode, "--seed", str(each.seed)]
            assert asked(each.experiment, "--preset", preset, *given) == (each, False)


def test_whatever_else_is_changed_makes_a_run_of_its_own() -> None:
    changes: dict[str, Callable[[Settings], Any]] = {
        "--rtol 2e-3": lambda run: run.rtol == 2e-3 and run.atol == 1e-6,
        "--atol 1e-5": lambda run: run.atol == 1e-5,
        "--epochs 7": lambda run: run.schedule.epochs == 7 and run.schedule.lr == 1.6e-3,
        "--batch 32": lambda run: run.batch == 32,
        "--device meta": lambda run: run.device == "meta",
        "--compile": lambda run: run.compile,
        "--adjoint quadrature": lambda run: run.adjoint == "Quadrature",
    }
    for change, holds in changes.items():
        found, own = asked("ncde", "--preset", "paper", *change.split())
        assert own
        assert holds(found), change
    assert not asked("ncde", "--no-compile")[1]


def test_an_adjoint_has_a_name_of_its_own() -> None:
    names = {text: tiny(adjoint=text).name for text in ("quadrature", "Checkpointed(4)", "Backsolve(norm='mixed')")}
    assert list(names.values()) == [
        f"ncde-japanese_vowels-0.01-mixed-{name}-0" for name in ("quadrature", "checkpointed-4", "backsolve-norm-mixed")
    ]
    assert tiny(adjoint="QUADRATURE") == tiny(adjoint="Quadrature()")
    for each in (tiny(), tiny(adjoint="Direct")):
        assert Settings.of_json(each.as_json()) == each
    assert "adjoint" not in tiny().as_json()  # as in folders of before


def test_an_adjoint_takes_the_place_of_the_modes_own() -> None:
    assert solve_options("ncde", "mixed", "Backsolve") == solve_options("ncde", "mixed")
    assert solve_options("ncde", "best", "Backsolve") == {"adjoint": sn.Backsolve()}
    assert solve_options("cnf", "mixed", "Quadrature") == {"norm": "mixed", "adjoint": sn.Quadrature()}
    reversible = solve_options("hnn", "best", "Reversible")
    assert (reversible["adjoint"], reversible["solver"]) == (sn.Reversible(), sn.ReversibleRK("dopri5"))
    assert isinstance(running.task_of(tiny(adjoint="direct")).model.options["adjoint"], sn.Direct)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cde"], "experiment: expected one of ncde, cnf, hnn, found 'cde'; did you mean 'ncde'?"),
        (["cnf", "--preset", "tiny"], "experiment: the preset 'tiny' has no 'cnf'"),
        (["ncde", "--preset", "papr"], "--preset: expected one of quick, "),
        (
            ["ncde", "--preset", "tiny", "--row", "mnist"],
            "--row: expected a part of one of ncde-japanese_vowels-0.01, ",
        ),
        (
            ["ncde", "--norm", "mixd"],
            "--norm: expected one of mixed, seminorm, published, best, per_tensor, found 'mixd'; did you",
        ),
        (["ncde", "--norm", "published"], "--norm: 'published' differs from 'seminorm' for 'hnn' only"),
        (["ncde", "--rtol", "0"], "--rtol: expected a number between 0 and 1, found 0"),
        (["ncde", "--atol", "nan"], "--atol: expected a number between 0 and 1, found nan"),
        (["ncde", "--epochs", "0"], "--epochs: expected a whole number of at least 1, found 0"),
        (["ncde", "--batch", "-1"], "--batch: expected a whole number of at least 1, found -1"),
        (["ncde", "--seed", "-1"], "--seed: expected a whole number of at least 0, found -1"),
        (["ncde", "--threads", "0"], "--threads: expected a whole number of at least 1, found 0"),
        (["ncde", "--adjoint", "relay"], "--adjoint: unknown name 'relay'; did you mean 'Replay'?"),
        (["ncde", "--device", "abacus"], "--device: expected one that PyTorch can use here, found 'abacus'"),
        (["ncde", "--data-dir", __file__], "--data-dir: expected a folder, found the file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_run(arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"seminode run: {message}")
    assert told.err.count("\n") == 1
    assert (told.out, list(here.iterdir())) == ("", [])


# What comes of it.

RUN = ["run", "ncde", "--preset", "tiny", "--no-tensorboard", "--no-progress"]
START = f"{tiny(mode='seminorm').name}: "


def test_a_run_is_made_once_and_then_printed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([*RUN, "--threads", "1"]) == 0
    first = capsys.readouterr()
    folder = Path("out", "tiny", tiny(mode="seminorm").name)
    test = Finished.load(folder).result
    assert test is not None
    assert f"    folder    {folder}\n" in first.out
    assert f"    test      loss {test['test']['loss']:.5g}, " in first.out
    assert first.err.startswith(START)
    monkeypatch.setattr(running, "task_of", None)
    assert cli.main(RUN) == 0
    assert capsys.readouterr() == (first.out, "")


def test_without_a_bar_there_are_plain_lines_even_on_a_terminal(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(RUN) == 0
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.err.splitlines()] == [
        tiny(mode="seminorm").name,
        "epoch 1, evaluated",
        "epoch 1 of 1",
    ]
    assert told.err.splitlines()[0].endswith(
        "1 epoch in batches of 4, rtol 0.01, atol 0.01, Backsolve(restart='fresh') on cpu"
    )
    assert "\r" not in told.err


def test_a_run_of_its_own_is_put_apart(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []
    monkeypatch.setattr(attempts, "attempt", lambda settings, out, *_: places.append(out) or {})
    monkeypatch.setattr(attempts, "summary", lambda *_: "")
    for more in ([], ["--seed", "3"], ["--adjoint", "replay"], ["--adjoint", "replay", "--out", "there"]):
        assert cli.main([*RUN, *more]) == 0
    assert places == [Path("out/tiny"), Path("out/tiny"), Path("out/own"), Path("there")]


def test_an_interrupted_run_goes_on_only_if_told_to(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.install(monkeypatch, tiny(schedule=TWO))
    epoch = Training.epoch

    def interrupted(self: Training) -> None:
        if self.next_epoch == 1:
            raise KeyboardInterrupt
        epoch(self)

    monkeypatch.setattr(Training, "epoch", interrupted)
    assert cli.main(RUN) == 130
    told = "seminode run: interrupted; the same command with --resume continues from the last checkpoint\n"
    assert capsys.readouterr().err.splitlines(keepends=True)[-1] == told
    monkeypatch.undo()
    monkeypatch.chdir(here)
    tiny_runs.install(monkeypatch, tiny(schedule=TWO))
    before = {path: path.read_bytes() for path in here.rglob("*.*") if path.is_file()}
    assert cli.main(RUN) == 2
    assert "holds an unfinished run. Add --resume to continue it, or use another folder." in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.rglob("*.*") if path.is_file()} == before
    assert cli.main([*RUN, "--resume"]) == 0
    assert "    epochs    2, " in capsys.readouterr().out


def test_a_folder_of_another_run_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab_runs.write(tiny(mode="seminorm"), Path("out/own"))
    assert cli.main([*RUN, "--epochs", "5", "--batch", "3", "--out", "out/own"]) == 2
    assert "holds another run: batch, schedule differ. Use another folder.\n" in capsys.readouterr().err


def test_a_run_that_another_process_is_at_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(mode="seminorm")
    with Run(Path("out/tiny", settings.name), {"settings": settings.as_json()}):
        assert cli.main([*RUN, "--resume"]) == 1
    assert capsys.readouterr().err.endswith(": another process works on this run\n")


@pytest.mark.parametrize(
    "error",
    [
        TrainingFailed("the loss is nan"),
        MissingData("cifar10: expected a file, found none"),
        sn.StepSizeUnderflow("the step is too small", t=0.5),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_is_said_in_one_line(
    error: Exception, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(running, "task_of", fail)
    assert cli.main(RUN) == 1
    start, message = capsys.readouterr().err.splitlines(keepends=True)
    assert start.startswith(START)
    assert message == f"seminode run: {error}\n"


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.main(RUN) == 1
    told = capsys.readouterr().err
    assert "cannot be written: No space left on device; the old file is kept" in told
    assert told.count("\n") == 1
    assert cli.main(RUN) == 0


def test_errors_nobody_thought_of_keep_their_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "task_of", lambda *_: [].pop())
    with pytest.raises(IndexError):
        cli.main(RUN)


# Tables, figures, report.


@dataclass(frozen=True)
class Words:
    words: str

    def text(self) -> str:
        return self.words


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for tables, measurements and report; what they are called with."""
    told: list[Any] = []
    modules = {name: ModuleType(name) for name in ("tables", "measuring", "report")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"seminode_lab.{name}", module)

    def all_tables(found: Any, noise: Any) -> list[Words]:
        told.append(("tables", [run.path.name for run in found]))
        return [Words("one"), Words("two")]

    def write(folder: Path) -> Any:
        told.append(("report", folder))
        warnings.warn("something is left out", UserWarning, stacklevel=2)
        return type("Written", (), {"html": folder / "report.html", "markdown": folder / "report.md"})

    vars(modules["tables"])["all_tables"] = all_tables

    def measure_all(preset: str, out: Path, root: Path, progress: Callable[[str], None]) -> None:
        told.append(("measured", preset, out, root))
        progress("measuring")

    vars(modules["measuring"])["measure_all"] = measure_all
    vars(modules["report"]).update(write=write, in_short=lambda found, folder: [f"{len(found)} runs in short"])
    return told


class MadeUp(Engine):
    """Makes up a result for every run but those in the mode best, which fail."""

    def start(self, order: Any) -> Any:
        best = order.settings.mode == "best"
        if not best:
            lab_runs.write(order.settings, order.out)
        return type("Ended", (), {"status": lambda self: int(best)})()


def test_reproduce_sweeps_measures_and_reports(
    here: Path, calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "local", MadeUp)
    reproduce = ["reproduce", "--preset", "tiny", "--out", "there", "--data-dir", "data", "--experiment", "ncde"]
    assert cli.main([*reproduce, "--only", "mixed", "seminorm"]) == 0
    names = [tiny(mode=mode, rtol=rtol).name for rtol in (1e-3, 1e-2) for mode in ("mixed", "seminorm")]
    out = Path("there")
    assert calls == [("measured", "tiny", out, Path("data")), ("tables", sorted(names)), ("report", out)]
    assert capsys.readouterr().out.endswith(
        "measuring\none\n\ntwo\n\n4 runs in short\nthere/report.md\nthere/report.html\n"
    )
    # What fails does not keep the rest from being reported, and is not forgotten.
    assert cli.main(reproduce) == 1
    told = capsys.readouterr()
    assert told.out.endswith("there/report.html\n")
    assert tiny(mode="best").name in told.err
    assert calls[3:] == calls[:3]


def test_report_leaves_out_what_cannot_be_read(
    here: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        lab_runs.write(tiny(seed=seed), here, complete=seed != 1)
    (here / tiny(seed=2).name / "config.json").write_text("{")
    assert cli.main(["report", str(here)]) == 0
    assert calls == [("tables", [tiny().name]), ("report", here)]
    assert capsys.readouterr().err == "note: something is left out\n"


def test_a_report_of_real_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab_runs.write_all(here, seeds=(0,))
    lab_runs.write(lab_runs.rows()[0].changed(seed=7), here, complete=False)
    assert cli.main(["report", str(here)]) == 0
    told = capsys.readouterr()
    assert "Speech Commands" in told.out
    assert "-mixed-7 is left out" in told.err
    assert "complete runs and" in told.out.splitlines()[-7]  # a summary of five lines, then two paths
    paths = [Path(line) for line in told.out.splitlines()[-2:]]
    assert [path.suffix for path in paths] == [".md", ".html"]
    assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.usefixtures("calls")
def test_what_cannot_be_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == "seminode report: DIR: expected a folder of run folders, found 'nowhere'\n"
    assert cli.main(["report", "."]) == 1
    assert capsys.readouterr().err == "seminode report: .: expected run folders, found none that is complete\n"


def test_the_makefile_reproduces_the_quick_preset() -> None:
    makefile = ROOT / "Makefile"
    lines = [line for line in makefile.read_text().splitlines() if "seminode reproduce" in line]
    assert len(lines) == 1
    options = cli.parser().parse_args(lines[0].split("seminode ", 1)[1].split())
    assert (options.preset, str(options.out), options.jobs) == ("quick", "out/quick", 2)
