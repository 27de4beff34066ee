"""Training helpers: logs against the statistics of models, files against damage, exported programs against solves."""

from __future__ import annotations

import csv
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import seminode as sn
from seminode.models import ConcatMLP, LatentODE, NeuralODE
from seminode.training import (
    CostLog,
    UnrolledSolve,
    export_solve,
    lightning_callback,
    load_model,
    save_model,
    solve_costs,
)
from seminode.training import lightning as lightning_module


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make(width: int = 4, **options: Any) -> nn.Sequential:
    first, second = (NeuralODE(ConcatMLP(2, (width,)), **options) for _ in range(2))
    return nn.Sequential(first, nn.Linear(2, 2), second)


def run(model: nn.Module) -> None:
    model(torch.randn(3, 2)).square().sum().backward()


def test_costs_are_sums_over_all_models() -> None:
    model = make(adjoint=sn.Backsolve())
    assert solve_costs(model) == dict.fromkeys(
        ("nfe", "accepted", "rejected", "backward_nfe", "backward_accepted", "backward_rejected"), 0
    )
    run(model)
    costs = solve_costs(model)
    parts: list[Any] = [model[0], model[2]]
    assert costs["nfe"] == sum(part.nfe for part in parts) > 0
    assert costs["accepted"] == sum(part.stats[0].accepted for part in parts)
    assert costs["backward_nfe"] == sum(part.backward_nfe for part in parts) > 0
    assert costs["backward_accepted"] == sum(part.stats[0].backward.accepted for part in parts) > 0


def test_models_inside_models_count_once() -> None:
    model = LatentODE(1, 2, 3)
    model.elbo(torch.randn(2, 4, 1)).value.sum().backward()
    assert solve_costs(model)["nfe"] == model.nfe
    assert solve_costs(nn.ModuleList([model]))["nfe"] == model.nfe


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


class Run:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((values, step))


def test_every_sink_is_told(tmp_path: Path) -> None:
    model, writer, wandb_run, rows = make(), Writer(), Run(), []
    row: dict[str, float] = {}
    with CostLog(
        model, str(tmp_path / "log.csv"), writer, wandb_run, lambda step, row: rows.append((step, row))
    ) as log:
        for i in range(2):
            run(model)
            row = log.step(loss=0.5 + i)
    lines = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [line["step"] for line in lines] == ["0", "1"]
    assert {name: float(value) for name, value in lines[1].items() if name != "step"} == row
    assert rows[1] == (1, row)
    assert wandb_run.rows[1] == ({f"solve/{name}": value for name, value in row.items()}, 1)
    assert ("solve/nfe", row["nfe"], 1) in writer.scalars
    assert row["loss"] == 1.5
    assert row["seconds"] > 0
    assert row["nfe"] == solve_costs(model)["nfe"]


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = make()
    run(model)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        CostLog(model, writer).step()
    (file,) = tmp_path.iterdir()
    assert b"solve/backward_nfe" in file.read_bytes()


def test_bad_logs(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(TypeError, match=r"sinks\[0\]: expected a path"):
        CostLog(model, 3)
    with pytest.raises(TypeError, match="model: expected a module"):
        CostLog(lambda x: x)  # type: ignore[arg-type]
    (tmp_path / "old.csv").write_text("precious")
    with pytest.raises(FileExistsError, match=r"sinks\[0\]: expected the path of a new file"):
        CostLog(model, tmp_path / "old.csv")
    with CostLog(model, tmp_path / "new.csv") as log:
        log.step(loss=1.0)
        with pytest.raises(ValueError, match="values: expected the columns"):
            log.step()
        with pytest.raises(ValueError, match="nfe: expected another name"):
            log.step(nfe=1.0)


class Callback:
    pass


@pytest.mark.parametrize("package", lightning_module.PACKAGES)
def test_the_lightning_callback_logs_batches(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Lightning that has the base class only; the hooks are called as its trainer calls them."""
    for name in lightning_module.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    stub: Any = types.ModuleType(package)
    stub.Callback = Callback
    monkeypatch.setitem(sys.modules, package, stub)
    logged: list[dict[str, float]] = []
    model: Any = make()
    model.log_dict = logged.append
    callback = lightning_callback(tmp_path / "log.csv")
    assert Callback in type(callback).__mro__
    callback.on_train_start(None, model)
    for step in (1, 2):
        run(model)
        callback.on_train_batch_end(types.SimpleNamespace(global_step=step), model, None, None, step - 1)
    callback.on_train_end(None, model)
    assert logged[-1]["solve/nfe"] == solve_costs(model)["nfe"]
    assert [line["step"] for line in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())] == ["1", "2"]


def test_without_lightning_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in lightning_module.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"lightning\]; or call CostLog"):
        lightning_callback()


def test_files_round_trip(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, other, path = make(), make(), tmp_path / "model.safetensors"
    model[0].field = model[2].field  # shared parameters
    other[0].field = other[2].field
    save_model(model, path, {"epoch": "7"})
    assert load_model(other, path) == {"epoch": "7"}
    x = torch.randn(3, 2)
    assert torch.equal(other(x), model(x))
    save_model(model, path)  # overwrites
    assert load_model(other, path) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_bad_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    save_model(make(), path)
    with pytest.raises(ValueError, match="model: expected the architecture that"):
        load_model(make(width=5), path)
    with pytest.raises(ValueError, match=r"model: expected a Sequential, which .* holds, found a Linear"):
        load_model(nn.Linear(2, 2), path)
    with pytest.raises(FileNotFoundError, match="path: expected a file of save_model, found no file"):
        load_model(make(), tmp_path / "none")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="which is damaged"):
        load_model(make(), path)
    safetensors.save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"path: expected a file of save_model, found .* without an entry"):
        load_model(make(), path)
    with pytest.raises(TypeError, match=r"metadata\['epoch'\]: expected text"):
        save_model(make(), path, {"epoch": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="model: expected a module"):
        save_model({}, path)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", ["euler", "rk4", "dopri5"])
def test_an_unrolled_solve_is_a_solve(solver: Any) -> None:
    field, y0 = ConcatMLP(2, (8,)).double(), torch.randn(3, 2, dtype=torch.float64)
    ts = (1.0, 0.5, 0.0)  # backwards in time
    unrolled = UnrolledSolve(field, ts, steps=2, solver=solver)
    solved = sn.solve(field, y0, ts, solver=solver, controller=sn.FixedStep(0.25)).ys
    torch.testing.assert_close(unrolled(y0), solved, rtol=1e-12, atol=1e-13)
    last = UnrolledSolve(field, ts, steps=2, solver=solver, last=True)
    assert torch.equal(last(y0), unrolled(y0)[-1])
    assert f"solver='{solver}'" in repr(last)


def test_exported_programs_run_without_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(UnrolledSolve(ConcatMLP(2, (4,)), (0.0, 1.0), steps=2, last=True), nn.Linear(2, 1))
    torch.export.save(export_solve(model, torch.randn(3, 2)), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (2, 5):
        x = torch.randn(batch, 2)
        torch.testing.assert_close(program(x), model(x))


def exported() -> tuple[nn.Module, Any]:
    model = nn.Sequential(UnrolledSolve(ConcatMLP(2, (4,)), (0.0, 1.0), steps=2, last=True), nn.Linear(2, 1))
    return model, export_solve(model, torch.randn(3, 2))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies trees in a way that it deprecates
def test_exported_programs_consist_of_core_operations() -> None:
    """These are the ones that other runtimes, ONNX among them, have translations for."""
    program = exported()[1].run_decompositions()
    operations = {node.target for node in program.graph.nodes if node.op == "call_function"}
    operations.discard(torch.ops.aten._assert_tensor_metadata.default)  # which the exporter of ONNX leaves out
    tags = {str(each): each.tags for each in operations if hasattr(each, "tags")}  # others compute shapes
    assert len(tags) > 3
    assert [name for name in tags if torch.Tag.core not in tags[name]] == []


def test_programs_in_onnx_compute_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model, program = exported()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own packages
        torch.onnx.export(program, (torch.randn(3, 2),), str(tmp_path / "model.onnx"), dynamo=True)
    evaluator = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    for batch in (2, 5):
        x = torch.randn(batch, 2)
        (y,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x))


def test_bad_exports() -> None:
    field = ConcatMLP(2, (4,))
    with pytest.raises(TypeError, match="module: expected an UnrolledSolve or a module with one, found NeuralODE"):
        export_solve(NeuralODE(field), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="y0: expected a batch of at least 2 samples"):
        export_solve(UnrolledSolve(field, (0.0, 1.0), steps=1), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="solver: expected an explicit Runge–Kutta method, found 'kvaerno3'"):
        UnrolledSolve(field, (0.0, 1.0), steps=1, solver="kvaerno3")
    with pytest.raises(ValueError, match="steps"):
        UnrolledSolve(field, (0.0, 1.0), steps=0)


def test_logs_that_fail_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"sinks\[1\]"):
        CostLog(make(), tmp_path / "log.csv", 3)
    CostLog(make(), tmp_path / "log.csv").close()
    with pytest.raises(ValueError, match="step: expected another name"):
        CostLog(make()).step(step=3.0)


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    path = tmp_path / "model.safetensors"
    with pytest.raises(TypeError, match="model: expected a state dict of tensors only, found dict as '_extra_state'"):
        save_model(Extra(2, 2), path)
    with pytest.raises(FileNotFoundError, match="path: expected a file in an existing folder, found no folder"):
        save_model(make(), tmp_path / "none" / "model.safetensors")
    with pytest.raises(TypeError, match="metadata: expected names that are text, found int"):
        save_model(make(), path, {1: "a"})  # type: ignore[dict-item]
    save_model(make(), path, {"epoch": "7"})
    whole, model = path.read_bytes(), make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for damage in (b'"[\\"epoch\\": \\"7\\"}"', b'"[\\"epoch\\", \\"7\\"]"'):
        path.write_bytes(whole.replace(b'"{\\"epoch\\": \\"7\\"}"', damage))
        with pytest.raises(ValueError, match="path: expected metadata as"):
            load_model(model, path)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_an_unrolled_solve_is_a_solve_in_other_dtypes(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def field(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(t.dtype)
        return ((3.0 * t).cos() * y).to(y.dtype)

    y0, ts = torch.ones(2, 2, dtype=dtype), (10.0, 11.0, 13.0)
    solved = sn.solve(field, y0, ts, solver="rk4", controller=sn.FixedStep(0.125)).ys
    clocks = set(seen)
    # The first interval has the steps of the solve, the second half as many.
    torch.testing.assert_close(UnrolledSolve(field, ts, steps=8)(y0)[:2], solved[:2], rtol=0.0, atol=0.0)
    assert set(seen) == clocks == {torch.float32}


def test_unrolled_solves_check_states_and_fields() -> None:
    y0: Any = torch.ones(3, 2)
    cases: list[tuple[Any, Any, Any, str]] = [
        (lambda t, y: y.sum(), y0, ValueError, r"field\(t, y\): expected shape \(3, 2\) as in y0, found \(\)"),
        (lambda t, y: y.double(), y0, TypeError, r"field\(t, y\): expected dtype torch.float32 as in y0"),
        (lambda t, y: None, y0, TypeError, r"field\(t, y\): expected a tensor, found NoneType"),
        (lambda t, y: t * y, y0.long(), TypeError, "y0: expected a floating-point or complex dtype, found torch.int64"),
        (lambda t, y: y, (y0,), TypeError, "y0: expected a tensor, found tuple"),
    ]
    for field, state, error, message in cases:
        with pytest.raises(error, match=message):
            UnrolledSolve(field, (0.0, 1.0), steps=1)(state)
    net = ConcatMLP(2, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the field answers in bfloat16
        solved = sn.solve(net, y0, (0.0, 1.0), solver="rk4", controller=sn.FixedStep(0.5)).ys
        torch.testing.assert_close(UnrolledSolve(net, (0.0, 1.0), steps=2)(y0), solved)


def test_a_model_in_two_places_counts_once_with_its_latest_call() -> None:
    ode = NeuralODE(ConcatMLP(2, (4,)), solver="euler", controller=sn.FixedStep(0.5))
    for model in (nn.Sequential(ode, ode), nn.Sequential(nn.Sequential(ode), nn.Sequential(ode))):
        model(torch.randn(3, 2))
        assert solve_costs(model)["nfe"] == ode.nfe == 2
