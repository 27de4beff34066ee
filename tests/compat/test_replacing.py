"""Drop-ins in the place of the libraries: `installed`, and `python -m seminode.compat`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchcde
import torchdiffeq

from seminode.compat import __main__ as command
from seminode.compat import installed
from seminode.compat import torchdiffeq as ours
from seminode.compat.torchdiffeq import _ledger

SCRIPT = """
import sys
import torch
import helper
from torchdiffeq import odeint_adjoint as odeint
from torchdiffeq._impl.odeint import SOLVERS

assert __name__ == "__main__"
assert "euler" in SOLVERS
ys = odeint(helper.Field(), torch.ones(2), torch.tensor([0.0, 1.0]), rtol=1e-3, atol=1e-4)
ys.sum().backward()
print(odeint.__module__.split(".")[0], sys.argv[1:])
"""
HELPER = """
import torch

class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.ones(()))

    def forward(self, t, y):
        return -self.rate * y
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    before = ours.current()
    yield str(tmp_path / "script.py")
    sys.modules.pop("helper", None)
    _ledger.ledger = None
    ours.use(adjoint=before.adjoint, compile=before.compile)


def test_imports_give_the_drop_in_inside_only() -> None:
    with installed("torchdiffeq"):
        assert importlib.import_module("torchdiffeq") is ours
        inner = importlib.import_module("torchdiffeq._impl.odeint")
        assert inner.SOLVERS is ours.SOLVERS
    assert importlib.import_module("torchdiffeq") is torchdiffeq
    with pytest.raises(ValueError, match=r"expected some of .*torchdiffeq.*, found 'torchode'"), installed("torchode"):
        pass


def test_a_script_runs_unchanged_and_its_cost_is_printed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, path = sys.argv, sys.path
    command.main([script, "--epochs", "3"])
    shown = capsys.readouterr()
    assert shown.out == "seminode ['--epochs', '3']\n"
    lines = shown.err.splitlines()
    assert lines[0] == "seminode.compat"
    assert lines[1].startswith("forward: 1 solve, ")
    assert lines[2].startswith("backward: 1 solve, ")
    assert ", 0 evaluations" not in lines[2]
    assert (sys.argv, sys.path) == (argv, path)


def test_the_switch_of_the_command(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--adjoint", "direct", script])
    assert "backward: 1 solve, 0 evaluations" in capsys.readouterr().err
    for arguments, message in ((["--adjoint", "rewind", script], "adjoint: expected"), ([f"{script}.txt"], "script:")):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("adjoint", [True, False])
def test_torchcde_over_the_drop_in(adjoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.cumsum(0.3 * torch.randn(3, 12, 2, dtype=torch.float64), 1)
    path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 8).double()

        def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(z)).view(3, 4, 2)

    field, z0 = Field(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for library in (torchdiffeq, ours):
        monkeypatch.setattr("torchcde.solver.torchdiffeq", library)
        options = {"jump_t": path.grid_points}
        z: Any = torchcde.cdeint(path, field, z0, path.interval, adjoint=adjoint, rtol=1e-6, atol=1e-8, options=options)
        results.append([z.detach(), *torch.autograd.grad(z[:, -1].square().sum(), [z0, *field.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
