"""Log-NCDEs: brackets against Jacobians, the order of the log-ODE method, and agreement with the neural CDE."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seminode import paths
from seminode.models import LogNCDE, MatrixField, NeuralCDE
from seminode.models.log_ncde import bracket_sum

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def smooth(hidden: int, channels: int) -> nn.Module:
    return MatrixField(hidden, channels, width=8, layers=1, activation=nn.SiLU).double()


def test_brackets_are_those_of_jacobians() -> None:
    field, z = smooth(4, 3), torch.randn(2, 4, dtype=torch.float64)
    areas = torch.randn(2, 3, dtype=torch.float64)
    matrix, total = bracket_sum(field, z, areas)
    torch.testing.assert_close(matrix, field(z))
    for i in range(2):
        jacobian = torch.func.jacrev(lambda z: field(z[None])[0])(z[i])  # (hidden, channels, hidden)
        f = matrix[i]
        expected = torch.zeros(4, dtype=torch.float64)
        for place, (a, b) in enumerate([(0, 1), (0, 2), (1, 2)]):
            expected = expected + areas[i, place] * (jacobian[:, b] @ f[:, a] - jacobian[:, a] @ f[:, b])
        torch.testing.assert_close(total[i], expected)


def test_gradients_of_the_bracket_sum() -> None:
    field, z = smooth(3, 3), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    areas = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, areas: bracket_sum(field, z, areas)[1], (z, areas))


class Linear(nn.Module):
    """F(z) with the columns A_a z."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.matrices = matrices

    def forward(self, z: Tensor) -> Tensor:
        return torch.einsum("aij,bj->bia", self.matrices, z)


def test_a_closed_path_moves_the_state_along_the_bracket() -> None:
    """Around a square of area s², z becomes exp(s²(A₁A₀ − A₀A₁)) z by the log-ODE of depth 2."""
    matrices = torch.randn(2, 3, 3, dtype=torch.float64)
    side = 0.1
    square = side * torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    model = LogNCDE(2, 3, window_length=4.0, field=Linear(matrices), time=False, **TIGHT).double()
    z0 = model.initial(square[:, 0])
    bracket = matrices[1] @ matrices[0] - matrices[0] @ matrices[1]
    torch.testing.assert_close(model(square), z0 @ torch.linalg.matrix_exp(side**2 * bracket).T, rtol=1e-8, atol=1e-10)
    exact = z0
    for step in square[0].diff(dim=0):
        exact = exact @ torch.linalg.matrix_exp(torch.einsum("a,aij->ij", step, matrices)).T
    # What is left are brackets of three and more fields.
    assert float((model(square) - exact).norm()) < 20 * side**3 * float(z0.norm())


def series(rows: int = 33) -> Tensor:
    t = torch.linspace(0.0, 1.0, rows, dtype=torch.float64)
    return torch.stack((torch.sin(5 * t), torch.cos(7 * t)), -1).expand(2, -1, -1).contiguous()


@pytest.mark.parametrize(("depth", "order"), [(1, 1.0), (2, 2.0)])
def test_the_order_of_the_log_ode_method(depth: int, order: float) -> None:
    """The error of windows of length h is O(h^depth) against the equation that all points drive."""
    x = series(65)
    field = smooth(3, 3)
    reference = NeuralCDE(2, 3, field=field, path="linear", **TIGHT).double()
    exact = reference(x).detach()
    errors = []
    for window in (16.0, 8.0):
        model = LogNCDE(2, 3, window_length=window, depth=depth, field=field, **TIGHT).double()
        model.initial = reference.initial
        errors.append(float((model(x).detach() - exact).norm()))
    observed = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert observed[-1] > order - 0.3


def test_windows_of_one_interval_are_a_neural_cde() -> None:
    x, lengths = series(7), torch.tensor([7, 4])
    reference = NeuralCDE(2, 3, 2, field=smooth(3, 5), path="linear", intensity=True, **TIGHT).double()
    for depth in (1, 2):
        model = LogNCDE(
            2, 3, 2, window_length=1.0, depth=depth, field=reference.field, intensity=True, **TIGHT
        ).double()
        model.initial, model.readout = reference.initial, reference.readout
        torch.testing.assert_close(model(x, lengths=lengths), reference(x, lengths=lengths), rtol=1e-7, atol=1e-9)


def test_series_are_as_if_alone_and_outputs_end_on_windows() -> None:
    x, lengths = series(12), torch.tensor([12, 6])
    x[0, 3, 1] = torch.nan
    model = LogNCDE(2, 3, 2, window_length=4.0, **TIGHT).double()
    both = model(x, lengths=lengths)
    torch.testing.assert_close(both[1:], model(x[1:, :6]), rtol=1e-5, atol=1e-7)
    outputs = model(x, lengths=lengths, ts="windows")
    assert outputs.shape == (4, 2, 2)
    torch.testing.assert_close(outputs[-1], both, rtol=1e-7, atol=1e-9)
    control = model.control(x, lengths=lengths)
    assert control.channels == paths.logsignature_channels(3, 2)
    torch.testing.assert_close(model(control), both)


X = torch.zeros(2, 5, 2)
BAD: list[tuple[Any, str]] = [
    (lambda: LogNCDE(2, 3, window_length=0.0), "window_length: expected a number above 0"),
    (lambda: LogNCDE(2, 3, window_length=2.0, depth=3), "depth: expected 1 or 2, found 3"),
    (lambda: LogNCDE(2, 3, window_length=2.0, depth=0), "depth"),
    (lambda: LogNCDE(2, 3, window_length=2.0)(X, ts="knots"), "ts: expected None or 'windows'"),  # type: ignore[arg-type]
    (lambda: LogNCDE(2, 3, window_length=2.0)(X[0]), r"x: expected shape \(batch, times, channels\)"),
    (lambda: LogNCDE(2, 3, window_length=2.0)(paths.linear(X)), "x: expected a path with 6 channels, found 2"),
    (
        lambda: LogNCDE(2, 3, window_length=2.0)(paths.linear(torch.zeros(2, 5, 6)), torch.arange(5.0)),
        "times, lengths: expected None with a path",
    ),
    (
        lambda: LogNCDE(2, 3, window_length=2.0, depth=1, field=MatrixField(3, 2))(X),
        r"field: expected a matrix of shape \(2, 3, 3\)",
    ),
    (
        lambda: LogNCDE(2, 3, window_length=2.0, field=MatrixField(3, 2))(X),
        r"field: expected a matrix of shape \(2, 3, 3\)",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:16] for _, message in BAD])
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import vowels

    vowels.main(["--epochs", "1", "--seeds", "1", "--models", "linear"])
    assert "seconds per epoch" in capsys.readouterr().out
    for name in ("neural", "log"):
        model = vowels.MODELS[name]()
        assert model(torch.zeros(2, 9, 12)).shape == (2, 9)


def test_the_path_of_a_single_series() -> None:
    model = LogNCDE(2, 4, window_length=2.0)
    control = model.control(torch.randn(3, 9, 2))
    with pytest.raises(ValueError, match="x: expected a path of a batch of series, found one of a single series"):
        model(control[0])
