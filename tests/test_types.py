"""What a type checker makes of the public interface: the types it infers, and the mistakes it finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import inferred_types
import pytest
from project import SOURCE

PREAMBLE = """\
import torch
from torch import Tensor

import seminode as sn
from seminode.models import CNF, NeuralCDE, NeuralODE
from seminode.models.hypersolver import HyperSolver


def field(t: Tensor, y: Tensor) -> Tensor:
    return -y


x = torch.ones(2, 3)
"""
MISTAKES = [
    'sn.solve(field, x, [0.0, 1.0], solver="dorpi5")',
    'sn.solve(field, x, [0.0, 1.0], adjoint="adjoint")',
    'sn.solve(field, x, [0.0, 1.0], norm="seminorm")',
    'sn.solve(field, x, [0.0, 1.0], save="all")',
    "sn.solve(field, x, [0.0, 1.0], tol=1e-3)",
    'sn.solve(field, x, [0.0, 1.0]).ys["q"]',
    'sn.Backsolve(norm="rms")',
    'sn.Backsolve(restart="anew")',
    'sn.Backsolve(solver="dorpi5")',
    'sn.Quadrature(rule="simpson")',
    'sn.Quadrature(z="tape")',
    'sn.PID(at_dt_min="stop")',
    'sn.PID.preset("PI43")',
    'sn.PID.preset("PI42", safty=0.8)',
    'sn.ReversibleRK("reversible_heun")',
    'sn.profile(field, x, [0.0, 1.0], torch.sum, norm="seminorm")',
    'sn.paths.linear(x).derivative(0.5, side="up")',
    'sn.paths.logsignature(x, 2, basis="lyndon")',
    'NeuralODE(field, solver="dorpi5")',
    "NeuralODE(field, tol=1e-3)",
    'NeuralCDE(3, 4, path="cubic")',
    'CNF(field, trace="hutch")',
    'CNF(field, noise="normal")',
    'HyperSolver("simpson", dim=3)',
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The errors that pyright reports: by file, then by line."""
    pyright = Path(sys.executable).with_name("pyright")
    command = str(pyright) if pyright.exists() else shutil.which("pyright")
    if command is None:
        pytest.skip("pyright is not installed")
    folder = tmp_path_factory.mktemp("types")
    shutil.copy(str(inferred_types.__file__), folder)
    (folder / "mistakes.py").write_text("\n".join([PREAMBLE, *MISTAKES, ""]), encoding="utf-8")
    config = {"extraPaths": [str(SOURCE.parent)], "typeCheckingMode": "strict", "pythonVersion": "3.10"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    arguments = [command, "--outputjson", "--pythonpath", sys.executable]
    answer = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(answer.stdout)
    except ValueError:
        pytest.skip(f"pyright does not run here: {(answer.stderr or answer.stdout).strip()[-200:]}")
    found: dict[str, dict[int, str]] = {"inferred_types.py": {}, "mistakes.py": {}}
    for each in report["generalDiagnostics"]:
        found[Path(each["file"]).name][each["range"]["start"]["line"]] = each["message"]
    return found


def test_inferred_types(errors: dict[str, dict[int, str]]) -> None:
    assert errors["inferred_types.py"] == {}


def test_every_mistake_is_found(errors: dict[str, dict[int, str]]) -> None:
    first = len(PREAMBLE.split("\n"))
    found = set(errors["mistakes.py"])
    assert [mistake for line, mistake in enumerate(MISTAKES, first) if line not in found] == []
    assert min(found) == first  # nothing is wrong with the lines before


def test_inferred_types_at_run_time() -> None:
    inferred_types.structures_of_the_state()
    inferred_types.functions_of_the_output()
    inferred_types.options_by_name()
    inferred_types.models_and_paths()
