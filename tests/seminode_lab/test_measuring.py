"""Work and precision on one batch: what is counted, what is compared, and what is not done twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seminode as sn
from seminode.diagnostics.contenders import Contender
from seminode.diagnostics.results import Reference
from seminode.solvers import Dopri5
from seminode_lab import measuring
from seminode_lab.measuring import ADJOINTS, OneBatch, PrecisionPlan, SingleDraws, measure, measure_all, plan_of
from seminode_lab.running import task_of
from seminode_lab.settings import Settings, rows

NCDE = rows("quick")[0].changed(model=(("hidden", 4), ("width", 4)))
CNF = next(row for row in rows("quick") if row.experiment == "cnf").changed(
    model=(("hidden", 2), ("scales", 1), ("blocks", 2))
)
FRESH, REPLAY = "Backsolve, mixed norm, fresh", "Replay"
BRIEF = PrecisionPlan(((1e-3, 1e-6),), (FRESH, REPLAY), batch=2, repeats=0, memory=False, grid=4)


def test_gradients_of_the_flow_are_compared_with_the_same_noise_in_float64(tmp_path: Path) -> None:
    plan = replace(BRIEF, tolerances=((1e-3, 1e-3), (1e-5, 1e-5)), repeats=2, memory=True)
    found = json.loads(measure(CNF, tmp_path, plan=plan).read_text())
    assert [(row["name"], row["rtol"]) for row in found["rows"]] == [
        *((FRESH, 1e-3), (REPLAY, 1e-3)),
        *((FRESH, 1e-5), (REPLAY, 1e-5)),
    ]
    for row in found["rows"]:
        assert row["reason"] is None
        assert row["params_error"] == pytest.approx(row["error"])  # all parameters are of fields
        assert row["error"] < 10 * row["rtol"]  # with other noise it would be about one
        assert len(row["backward_seconds"]) == 2
        assert row["memory"] > 0
        assert row["forward"]["nfe"] >= 2 * 8  # two blocks, two evaluations and a step each
    assert found["reference"]["dtype"] == "float64"
    assert found["reference"]["good_to"] < 1e-6
    assert found["problem"]["field_parameters"] == found["problem"]["parameters"]
    assert found["circumstances"]["torch"] == torch.__version__


def test_parameters_outside_the_field_of_a_neural_cde_count_among_all_gradients(tmp_path: Path) -> None:
    found = json.loads(measure(NCDE, tmp_path, plan=BRIEF).read_text())
    assert found["problem"]["parameters"] > found["problem"]["field_parameters"]
    fresh, replay = found["rows"]
    assert fresh["params_error"] != fresh["error"]
    assert replay["error"] < 0.1
    assert fresh["backward"]["vjp_params"] > 0
    assert fresh["memory"] is None
    assert len(replay["backward_seconds"]) == 1
    assert "bosh3, 4 steps between knots" in found["reference"]["note"]


def test_what_was_measured_is_not_measured_again_unless_something_else_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PrecisionPlan] = []

    def compared(batch: OneBatch, plan: PrecisionPlan) -> Any:
        asked.append(plan)
        return Reference("float64", 1e-9, 1e-9), []

    monkeypatch.setattr(measuring, "compared", compared)
    first = measure(NCDE, tmp_path, plan=BRIEF)
    assert first == tmp_path / "precision-ncde.json"
    assert measure(NCDE, tmp_path, plan=BRIEF) == first
    assert len(asked) == 1
    measure(NCDE, tmp_path, plan=replace(BRIEF, batch=3))
    measure(NCDE.changed(seed=1), tmp_path, plan=replace(BRIEF, batch=3))
    assert [plan.batch for plan in asked] == [2, 3, 3]


def test_the_model_is_left_as_it_was_and_its_noise_is_the_same_every_time() -> None:
    batch = OneBatch(task_of(CNF.changed(sizes=(2, 1, 1), batch=2)), "cnf")
    before = [x.clone() for x in batch.targets]
    state = torch.get_rng_state()
    (_, first), (_, second) = (measuring.compared(batch, replace(BRIEF, tolerances=((1e-3, 1e-3),))) for _ in range(2))
    assert [row["error"] for row in first] == [row["error"] for row in second]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    for x, y in zip(batch.targets, before, strict=True):
        assert torch.equal(x, y)
        assert x.grad is None


def test_statistics_of_all_blocks_are_added_up() -> None:
    batch = OneBatch(task_of(CNF.changed(sizes=(2, 1, 1), batch=2)), "cnf")
    answer = batch.solve(Contender(sn.Replay(), Dopri5(), rtol=1e-3, atol=1e-3), 1000)
    assert answer.stats.backward is None
    answer.ys.backward()
    model = batch.task.model
    assert len(model.stats) == 2
    assert answer.stats.nfe == model.nfe
    assert answer.stats.backward is not None
    assert answer.stats.backward.nfe == model.backward_nfe > 0


def test_the_published_procedure_lets_the_log_probability_steer_and_ours_does_not() -> None:
    batch = OneBatch(task_of(CNF.changed(sizes=(2, 1, 1), batch=2)), "cnf")
    for name, norm in ((FRESH, "mixed"), ("Backsolve, seminorm, carry", None), (REPLAY, None)):
        batch.solve(Contender(ADJOINTS[name], Dopri5(), rtol=1e-3, atol=1e-3), 1000)
        assert batch.task.model.options.get("norm") == norm
        assert batch.task.model.options["adjoint"] is ADJOINTS[name]


def test_noise_in_float64_is_that_of_float32() -> None:
    torch.manual_seed(3)
    single = torch.randn_like(torch.zeros(5)), torch.rand_like(torch.zeros(5))
    torch.manual_seed(3)
    with SingleDraws():
        double = torch.randn_like(torch.zeros(5).double()), torch.rand_like(torch.zeros(5).double())
    for a, b in zip(single, double, strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b)


def test_plans_say_what_they_reduce() -> None:
    for row in rows("quick"):
        plan = plan_of(row)
        assert plan.batch < row.batch
        assert f"a batch of {plan.batch} instead of {row.batch}" in plan.reduced
        assert (row.rtol, row.atol) in plan.tolerances
        assert ("Backsolve, published slice, fresh" in plan.adjoints) == (row.experiment == "hnn")
    hnn = plan_of(rows("quick")[-1])
    assert hnn.fitted == 100
    assert "100 iterations of regression instead of 800" in hnn.reduced
    assert "Interpolating, Checkpointed(10) left out; one pass of each; memory not measured" in hnn.reduced
    assert plan_of(rows("paper")[-1]).adjoints == tuple(ADJOINTS)
    assert plan_of(rows("paper")[-1]).reduced == "a batch of 64 instead of 256"
    assert plan_of(rows("cpu")[-1]).reduced == ""


def test_plans_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match=r"adjoints: expected names from .*, found 'Backwards'"):
        replace(BRIEF, adjoints=("Backwards",))
    with pytest.raises(ValueError, match="tolerances, adjoints: expected at least one of each"):
        replace(BRIEF, tolerances=())


def test_the_first_row_of_each_experiment_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    told: list[str] = []
    monkeypatch.setattr(measuring, "measure", lambda settings, out, root=None: asked.append(settings))
    measure_all("quick", tmp_path, progress=told.append)
    quick = rows("quick")
    assert asked == [next(row for row in quick if row.experiment == name) for name in ("ncde", "cnf", "hnn")]
    assert [line.rpartition(" ")[2] for line in told] == [row.row for row in asked]
    with pytest.raises(ValueError, match="preset: expected one of"):
        measure_all("quik", tmp_path)
