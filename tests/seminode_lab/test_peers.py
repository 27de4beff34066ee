"""Runs with torchdiffeq: the same gradients as with seminode, all evaluations and steps counted, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ONE, tiny

import seminode as sn
from seminode.cli import main
from seminode_lab import running, store, tables
from seminode_lab.measures import gather
from seminode_lab.peers import concatenated
from seminode_lab.settings import Settings, rows
from seminode_lab.sweeping import chosen

pytest.importorskip("torchdiffeq")

FLOW: dict[str, Any] = {"data": "digits", "sizes": (8, 8, 8), "batch": 8, "schedule": ONE}


def small(experiment: str, **changes: Any) -> Settings:
    given: dict[str, dict[str, Any]] = {
        "ncde": {},
        "cnf": {**FLOW, "experiment": "cnf", "model": (("hidden", 4), ("scales", 1), ("blocks", 1))},
        "hnn": {"experiment": "hnn", "data": "pendulum", "model": (), "sizes": (8, 8, 8), "batch": 8},
    }
    return tiny(**{"rtol": 1e-4, "atol": 1e-7, **given[experiment], **changes})


def gradient(settings: Settings) -> tuple[torch.Tensor, Any]:
    task = running.task_of(settings)
    torch.manual_seed(1)
    outcome = task.outcome(("train", torch.arange(min(settings.batch, task.samples("train")))), False)
    outcome.loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in task.model.parameters()]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    return flat, outcome.stats


@pytest.mark.parametrize("mode", ["mixed", "seminorm", "per_tensor"])
@pytest.mark.parametrize("experiment", ["ncde", "cnf", "hnn"])
def test_gradients_are_those_of_seminode(experiment: str, mode: str) -> None:
    exact, _ = gradient(small(experiment, mode="best", rtol=1e-5, atol=1e-8))
    found, _ = gradient(small(experiment, mode=mode, library="torchdiffeq"))
    assert float((found - exact).norm() / exact.norm()) < 3e-3


@pytest.mark.parametrize("mode", ["mixed", "seminorm", "per_tensor"])
def test_evaluations_are_those_of_the_same_norm_in_seminode(mode: str) -> None:
    """For the pendulum, whose solves have no jumps; a start has two evaluations and a step has six."""
    (_, ours), (_, theirs) = (gradient(small("hnn", mode=mode, library=library)) for library in (None, "torchdiffeq"))
    (own,), (other,) = ours, theirs
    assert other.nfe == own.nfe
    assert (other.accepted, other.rejected) == (own.accepted, own.rejected)
    assert other.backward.nfe == own.backward.nfe == 7 * 2 + 6 * (other.backward.accepted + other.backward.rejected)


def test_statistics_are_those_of_the_last_batch() -> None:
    task = running.task_of(small("hnn", mode="mixed", library="torchdiffeq"))
    for _ in range(2):
        outcome = task.outcome(("test", torch.arange(4)), False)
        assert len(outcome.stats) == 1
        assert outcome.stats[0].backward is None
        outcome.loss.backward()
        assert outcome.stats[0].backward is not None


def test_the_concatenated_norm() -> None:
    state = [torch.zeros(()), torch.ones(2), torch.ones(3), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.0])]
    assert float(concatenated(1)(state)) == pytest.approx(1.5)  # the two parameters together; alone the first has 2.1
    assert float(sn.norms.rms(state[3])) == pytest.approx(4.5**0.5)
    two = [*state[:3], torch.ones(1), torch.ones(1), *state[3:]]  # a state of two leaves and its adjoint
    assert float(concatenated(2)(two)) == pytest.approx(1.5)


def test_runs_have_names_and_modes_of_their_own() -> None:
    found = chosen("quick", ["hnn"], library="torchdiffeq")
    assert sorted(run.name for run in found) == [
        f"hnn-pendulum-{mode}-torchdiffeq-0" for mode in ("mixed", "per_tensor", "seminorm")
    ]
    assert Settings.of_json(found[0].as_json()) == found[0]
    assert "library" not in rows("quick")[0].as_json()


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hnn", "--library", "torchode"]) == 2
    assert "--library: expected one of torchdiffeq, found 'torchode'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="mode: expected one of mixed, seminorm, per_tensor for torchdiffeq"):
        running.task_of(small("hnn", mode="best", library="torchdiffeq"))


def test_they_are_beside_ours_in_a_table_and_nowhere_else(tmp_path: Path) -> None:
    for library, mode in ((None, "mixed"), (None, "best"), ("torchdiffeq", "mixed"), ("torchdiffeq", "per_tensor")):
        running.run(tiny(mode=mode, library=library), tmp_path)
    runs = store.runs(tmp_path, lambda error: pytest.fail(str(error)))
    gathered = gather(runs)
    assert [list(problem.modes) for problem in gathered.problems] == [["best", "mixed"]]
    table = tables.libraries(runs)
    assert [row[0] for row in table.rows] == [
        "Neural CDE: Japanese Vowels, rtol 0.01, atol 0.01",
        "mixed, seminode",
        "mixed, torchdiffeq",
        "per_tensor, torchdiffeq",
        "best, seminode",
    ]
    assert all(all(cell for cell in row) for row in table.rows)
    assert tables.all_tables(runs)[-1].name == "libraries"
