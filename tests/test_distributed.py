"""Several processes: the same steps and gradients as one process with the whole batch.

All cases of tests/rank_programs.py run in one group of two processes, since starting processes takes longest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from project import ROOT
from rank_programs import ADJOINTS, COMPILED, MODELS, OF_MODELS, Results, spawn

import seminode as sn

EAGER = [f"{wrapper}, {name}, eager" for name in ADJOINTS for wrapper in ("DDP", "FSDP2")]
SHORT = [f"{wrapper}, {name}, compiled" for name in COMPILED for wrapper in ("DDP", "FSDP2")]
NORMS = ["None", "rms", "max", "mixed", "mixed_per_tensor", "auto", "Without", "auto, compiled"]
UNEVEN = ["rms, uneven", "auto, uneven", "max, uneven"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return spawn("everything", 2, tmp_path_factory.mktemp("ranks"))


def good(results: list[Results], name: str) -> list[Any]:
    found = [each[name] for each in results]
    for rank, result in enumerate(found):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    return found


def check_training(results: list[Results], name: str) -> None:
    for found in good(results, name):
        # Cotangents of `fresh` have the scale of the loss, which is a mean over another number of samples.
        assert found["error"] < (1e-9 if "fresh" in name else 1e-13)
        assert found["stats"][0] == found["stats"][1]
        assert found["backward"][0] == found["backward"][1]
        assert found["kinds"] == {"DTensor" if name.startswith("FSDP2") else "Tensor"}


@pytest.mark.parametrize("name", [*EAGER, *SHORT])
def test_gradient_is_that_of_one_process(results: list[Results], name: str) -> None:
    check_training(results, name)


@pytest.mark.parametrize("adjoint", OF_MODELS)
@pytest.mark.parametrize("model", MODELS)
def test_models_of_the_library(results: list[Results], model: str, adjoint: str) -> None:
    for found in good(results, f"{model}, {adjoint}"):
        assert found["error"] < 1e-12
        assert found["steps"][0] == found["steps"][1]


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("where", ["communicating", "communicating, last rank only"])
def test_field_that_communicates(results: list[Results], where: str, adjoint: str) -> None:
    for found in good(results, f"{where}, {adjoint}"):
        assert max(found.values()) < 1e-12


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("where", ["field sharded", "field and model sharded"])
def test_sharded_field_works_or_is_refused(results: list[Results], where: str, adjoint: str) -> None:
    name = f"{where}, {adjoint}"
    if adjoint == "Direct":
        assert max(good(results, name)) < 1e-13
    else:
        assert all(re.match("ValueError: field: calls FSDPNetwork.*Shard the module whose", x[name]) for x in results)


@pytest.mark.parametrize("norm", [*NORMS, *UNEVEN])
def test_steps_are_those_of_one_process(results: list[Results], norm: str) -> None:
    for found in good(results, f"steps, {norm}"):
        assert found["stats"][0] == found["stats"][1]
        assert found["error"] < 1e-9


def test_fixed_steps_go_backward_alike(results: list[Results]) -> None:
    good(results, "fixed steps")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sharded without norm", "ValueError: field: calls FSDPNetwork.*norm=sn.norms.distributed"),
        ("bad start", r"NonFiniteState: y0 holds a NaN or an infinity \((on another rank|leaf y0)"),
        ("fixed steps, NaN", r"NonFiniteState: the state became NaN or infinite at t = 0\.[56]"),
        ("NaN gradient, Replay", "NonFiniteState: on the backward pass: the gradient with respect to the state"),
        ("NaN gradient, fixed Replay", "NonFiniteState: on the backward pass: the gradient with respect to the state"),
        ("NaN gradient, Backsolve", "NonFiniteState: on the backward pass: just after t = 1 the field"),
        ("NaN gradient, fixed Backsolve", "NonFiniteState: on the backward pass: the state became NaN"),
        ("different event", r"ValueError: norm: .*must make the same solve, .*: on this rank event = \["),
        ("different ts", r"ValueError: norm: .*must make the same solve, .*: on this rank ts = \(0.0, [12].0\)$"),
        (
            "different y0",
            r"ValueError: norm: .*must make the same solve, .*: on this rank y0 = \(torch.float32, [12]\)$",
        ),
        (
            "different norm",
            r"ValueError: norm: .*must make the same solve, .*: on this rank norm = distributed\((max)?\)$",
        ),
        ("different solver", r"ValueError: norm: .*must make the same solve, .*: on this rank solver = (Dopri|Tsit)5"),
        ("blow up", "(StepSizeUnderflow|NonFiniteState): "),
        ("too many steps", "MaxStepsReached: .*looks stiff.*eigenvalue of about -1e"),
        ("mean event, local", "ValueError: event.0..fn: .*expected the same value on all ranks"),
        ("mean event, gradient", "ValueError: event: the time of event.0. depends on the states of all ranks"),
        ("check, different", "RuntimeError: SEMINODE_CHECK_RANKS: the ranks did not do the same in a solve"),
        ("compiled events, auto", "ValueError: norm: 'auto' leaves out leaves that the field does not read"),
        ("refused, batched", "ValueError: norm: distributed.. makes ranks take common steps"),
        ("refused, implicit", "ValueError: norm: distributed.. does not work with the implicit solver"),
        ("refused, implicit backward", "ValueError: norm: distributed.. does not work with the implicit solver"),
        ("refused, mixed", "ValueError: norm: .*mixed.* pass norm='seminorm'"),
        ("refused, gauss-kronrod", "ValueError: rule: 'gauss-kronrod'"),
        ("refused, auto with fixed steps", "ValueError: norm: does nothing with FixedStep"),
    ],
)
def test_errors_are_raised_on_all_ranks(results: list[Results], name: str, message: str) -> None:
    for found in results:
        assert isinstance(found[name], str)
        assert re.match(message, found[name], re.MULTILINE), found[name]


def test_solution_ends_on_all_ranks_where_one_has_failed(results: list[Results]) -> None:
    steps = good(results, "fixed steps, NaN, no exception")
    assert len(set(steps)) == 1
    assert 4 <= steps[0] <= 6


@pytest.mark.parametrize("memory", ["3kB", "12kB"])
def test_ranks_keep_activations_of_the_same_steps(results: list[Results], memory: str) -> None:
    found = good(results, f"uneven memory, {memory}")
    assert len({x["kept"] for x in found}) == 1
    assert max(x["error"] for x in found) < 1e-12


def test_no_copy_of_a_process_takes_part_in_reductions(results: list[Results]) -> None:
    for messages in good(results, "background"):
        assert any("a norm of one process" in x for x in messages)


def test_check_leaves_other_groups_alone(results: list[Results]) -> None:
    assert len(set(good(results, "check, groups"))) == len(results)


def test_event_of_all_ranks(results: list[Results]) -> None:
    assert max(good(results, "mean event")) < 1e-6
    assert max(good(results, "clock event")) < 1e-12


@pytest.mark.parametrize("norm", ["rms", "max"])
def test_compiled_events_of_all_ranks(results: list[Results], norm: str) -> None:
    for found in good(results, f"compiled events, {norm}"):
        assert found["mean"] < 1e-6
        assert found["clock"] < 1e-12


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_ranks_agree_within_their_group_only(results: list[Results], engine: str) -> None:
    for found in good(results, f"groups, {engine}"):
        assert found["error"] < 1e-13
        assert found["different"] == len(results)  # their samples need different numbers of steps


def test_check_passes_where_ranks_agree(results: list[Results]) -> None:
    a, b = good(results, "check, same")
    assert a == b


def test_sharded_training_resumes(results: list[Results]) -> None:
    assert max(good(results, "resumed")) == 0.0


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    results = spawn("everything", 4, tmp_path)
    for name in [*EAGER, *SHORT]:
        check_training(results, name)
    for adjoint in ADJOINTS:
        assert all(max(x.values()) < 1e-12 for x in good(results, f"communicating, {adjoint}"))
    for norm in NORMS:
        assert all(x["stats"][0] == x["stats"][1] for x in good(results, f"steps, {norm}"))


@pytest.mark.slow
def test_compiled_steps(tmp_path: Path) -> None:
    results = spawn("compiled", 2, tmp_path)
    for name in results[0]:
        if not name.startswith("steps"):
            check_training(results, name)
    assert all(x["stats"][0] == x["stats"][1] for x in good(results, "steps, max, compiled"))


@pytest.mark.slow
def test_collectives_out_of_step_are_noticed(tmp_path: Path) -> None:
    results = spawn("collectives_out_of_step", 2, tmp_path, SEMINODE_CHECK_RANKS="3")
    found = [x["out of step"] for x in results if "SEMINODE_CHECK_RANKS" in str(x["out of step"])]
    assert found
    assert "pass norm=sn.norms.distributed()" in found[0]


def test_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group"):
        sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], norm=sn.norms.distributed())


@pytest.mark.parametrize("norm", ["seminorm", "euclid"])
def test_refuses_unknown_names(norm: str) -> None:
    with pytest.raises(ValueError, match="norm: expected one of rms, max, mixed, mixed_per_tensor or auto"):
        sn.norms.distributed(norm)


def test_refuses_functions_that_it_cannot_reduce() -> None:
    with pytest.raises(TypeError, match="all_reduce itself"):
        sn.norms.distributed(lambda y: y.abs().sum())
    with pytest.raises(TypeError, match="found a distributed one"):
        sn.norms.distributed(sn.norms.distributed())
    with pytest.raises(TypeError, match=r"group: expected a torch.distributed.ProcessGroup"):
        sn.norms.distributed(group="gloo")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass norms.distributed.. to solve"):
        sn.Backsolve(norm=sn.norms.distributed())
    with pytest.raises(TypeError, match="depends on a field"):
        sn.norms.distributed("auto")(torch.ones(2))


@pytest.mark.parametrize("value", ["yes", "-1", "nan"])
def test_refuses_bad_settings_of_the_check(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SEMINODE_CHECK_RANKS", value)
    with pytest.raises(ValueError, match="SEMINODE_CHECK_RANKS: expected 0, 1 or a number of seconds"):
        sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0])


def test_check_does_nothing_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMINODE_CHECK_RANKS", "1")
    assert sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0]).stats.nfe > 0


@pytest.mark.slow
def test_recipes_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    recipes = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(recipes) >= 3
    for i, recipe in enumerate(recipes):
        path = tmp_path / f"recipe{i}.py"
        path.write_text(recipe)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "gradient error" not in done.stdout or float(done.stdout.split()[-1]) < 1e-10
