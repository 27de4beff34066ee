"""The command: it measures what a factory returns, and says in one line what it cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import seminode as sn
from seminode import cli
from seminode.diagnostics import plots

PROBLEM = """
import dataclasses
import torch

net = torch.nn.Linear(2, 2)
number = 3


def problem():
    return {"field": lambda t, y: net(y), "y0": torch.ones(4, 2), "ts": [0.0, 1.0],
            "loss": lambda ys: ys[-1].square().mean(), "compile": False, "repeats": 1, "progress": False}


@dataclasses.dataclass
class Problem:
    field: object
    y0: torch.Tensor
    ts: list
    loss: object
    args: tuple


def with_args():
    return Problem(lambda t, y, k: -k * y, torch.ones(3), [0.0, 1.0], lambda ys: ys[-1].sum(),
                   (torch.tensor(2.0, requires_grad=True),))


def of_one_kind(*, kind=list):
    return kind()


def partial():
    return {"field": None, "ts": None}


def strange():
    return {**problem(), "tolerance": 1e-3}


def bad():
    return {**problem(), "loss": 3}


def broken():
    return {**problem(), "field": lambda t, y: (_ for _ in ()).throw(ValueError("mine"))}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a module `problems_here` in it."""
    (tmp_path / "problems_here.py").write_text(PROBLEM)
    (tmp_path / "fails_here.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("problems_here", "fails_here"):
        sys.modules.pop(name, None)


ONLY = ("--adjoint", "Replay", "--solver", "dopri5")


@pytest.mark.parametrize("target", ["problems_here:problem", "problems_here.py:problem"])
def test_profile(target: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    files = ("--draw", "work.png", "--json", "profile.json")
    assert cli.main(["profile", target, *ONLY, "--rtol", "1e-3", "--threads", "1", *files]) == 0
    printed = capsys.readouterr()
    assert "sn.solve(..., solver='dopri5', adjoint=sn.Replay())" in printed.out
    assert printed.err == ""
    rows = json.loads(Path("profile.json").read_text())["rows"]
    assert [(row["adjoint"], row["rtol"], row["compile"]) for row in rows] == [("Replay", 1e-3, False)]
    assert Path("work.png").read_bytes().startswith(b"\x89PNG")
    assert torch.get_num_threads() == threads


def test_options_go_before_those_of_the_factory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--no-compile", "--repeats", "2", "--tolerances", "1e-3", "1e-5", "--json", "out.json")
    assert (
        cli.main(
            [
                "profile",
                "problems_here:with_args",
                "--adjoint",
                "Direct",
                "Checkpointed(3)",
                *options,
                "--solver",
                "dopri5",
            ]
        )
        == 0
    )
    found = json.loads(Path("out.json").read_text())
    measured = [row for row in found["rows"] if row["reason"] is None]
    assert {row["adjoint"] for row in measured} == {"Direct", "Checkpointed(3)"}
    assert {row["rtol"] for row in measured} == {1e-3, 1e-4, 1e-5}
    assert all(len(row["forward_seconds"]) == 2 for row in measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problems_here"], "expected module:factory or file.py:factory, found 'problems_here'"),
        (["problems_here:"], "expected module:factory or file.py:factory, found 'problems_here:'"),
        (["nowhere:problem"], "no module named 'nowhere' on the path or in "),
        (["problems_here.sub:problem"], "no module named 'problems_here.sub'"),
        (["..:problem"], "'..' is not the name of a module"),
        (["nowhere.py:problem"], "no file 'nowhere.py'"),
        (
            ["problems_here:nothing"],
            "problems_here has no 'nothing'; expected a function that returns the problem. It has",
        ),
        (["problems_here:number"], "problems_here:number: expected a function, found int"),
        (["problems_here:of_one_kind"], "returned list; expected a mapping or a dataclass with field, y0, ts, loss"),
        (["problems_here:partial"], "problems_here:partial() lacks y0, loss; found field, ts"),
        (["problems_here:strange"], "problems_here:strange() has unknown tolerance; expected some of field, y0, ts"),
        (["problems_here:bad"], "loss: expected a callable loss(ys), found int"),
        (["problems_here:problem", "--adjoint", "Relay"], "--adjoint: unknown name 'Relay'; did you mean 'Replay'?"),
        (["problems_here:problem", "--solver", "dopri"], "--solver: unknown name 'dopri'; did you mean 'dopri5'?"),
        (["problems_here:problem", "--repeats", "0"], "repeats: expected a whole number of at least 1, found 0"),
        (["problems_here:problem", "--threads", "0"], "--threads: expected a whole number of at least 1, found 0"),
        (["problems_here:problem", "--json", "."], "--json: expected a file, found the directory '.'"),
        (["problems_here:problem", "--json", "no/x.json"], "--json: there is no directory 'no'"),
        (["problems_here:problem", "--draw", "x.doc"], "--draw: expected a file ending in .png"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_used(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("seminode profile: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_file_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "shut").mkdir(mode=0o500)
    assert cli.main(["profile", "problems_here:problem", "--json", "shut/x.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_disk_that_fails(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["profile", "problems_here:problem", *ONLY, "--json", "x.json"]) == 2
    assert "seminode profile: --json: no space left" in capsys.readouterr().err


def test_without_matplotlib(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        plots.check_matplotlib()
    assert cli.main(["profile", "problems_here:problem", "--draw", "x.png"]) == 2
    assert "seminode profile: --draw: needs matplotlib, which is not installed" in capsys.readouterr().err


def test_errors_of_the_user_s_own_keep_their_traceback(here: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        cli.main(["profile", "problems_here:broken"])
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        cli.main(["profile", "fails_here:problem"])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            cli.main([option])
        assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"seminode {sn.__version__}\n")
    assert all(f"    {command.name}" in printed for command in cli.all_commands())


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert printed.out == cli.parser().format_help()
    assert printed.err == ""


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--fast"], ["profile", "a:b", "--fast"], ["fly"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert capsys.readouterr().err.count("unrecognized arguments: --fast") == 2


# The laboratory's commands.

LAB = ["data", "estimate", "run", "sweep", "reproduce", "report", "measure", "table", "figure", "bench"]


def test_the_commands_of_the_laboratory_are_found() -> None:
    assert [command.name for command in cli.all_commands()] == ["profile", *LAB]


def test_without_the_laboratory_profile_works(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "PLUG_IN", "no_laboratory_here.commands")
    assert [command.name for command in cli.all_commands()] == ["profile"]
    assert cli.main(["profile", "problems_here:problem", *ONLY]) == 0
    assert "Replay" in capsys.readouterr().out


def test_an_error_in_the_plug_in_keeps_its_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(cli, "PLUG_IN", "fails_here")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        cli.all_commands()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a", "--epochs", "1", "b", "-x"]], ids=" ".join)
def test_a_command_whose_dependency_is_missing(
    arguments: list[str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Command("fly", "needs wings", "fails_here")))
    assert "needs wings" in cli.parser().format_help()
    assert cli.main(["fly", *arguments]) == 2
    needs = "needs nowhere_to_be_found, which is not installed: pip install 'seminode[lab]'"
    assert capsys.readouterr() == ("", f"seminode fly: {needs}\n")


def test_a_broken_module_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("fly", "", "seminode_lab.no_such_module"),))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.parser()


WITHOUT_DEPENDENCIES = """
import sys
others = ("filelock", "jinja2", "matplotlib", "safetensors", "sklearn", "scipy", "tensorboard")
for name in ("numpy", *others):
    sys.modules[name] = None
from seminode import cli
help = cli.parser().format_help()
assert all(f"    {name}" in help for name in LAB), help
assert cli.main(["profile", "problems_here:problem", "--adjoint", "Replay", "--solver", "dopri5"]) == 0
of_folders = [[name, "."] for name in ("report", "measure", "table", "figure")]
for arguments in (["estimate"], ["run", "ncde"], ["sweep"], ["reproduce"], *of_folders):
    assert cli.main(arguments) == 2, arguments
for name in others:
    del sys.modules[name]
assert cli.main(["run", "ncde"]) == 2
"""


def test_without_the_dependencies_of_the_laboratory(here: Path) -> None:
    source = str(Path(str(cli.__file__)).parents[1])
    code = f"LAB = {LAB}\n{WITHOUT_DEPENDENCIES}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source})
    assert done.returncode == 0, done.stderr
    assert "Replay" in done.stdout
    needs = "needs numpy, which is not installed: pip install 'seminode[lab]'"
    assert done.stderr.splitlines() == [f"seminode {name}: {needs}" for name in (*LAB[1:-1], "run")]


def test_in_a_process_of_its_own(here: Path) -> None:
    command = [sys.executable, "-m", "seminode", "profile", "problems_here:problem", *ONLY, "--threads", "1"]
    source = str(Path(str(cli.__file__)).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Replay" in done.stdout
