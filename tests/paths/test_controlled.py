"""The field of a controlled differential equation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observations import series
from torch import Tensor, nn

import seminode as sn
from seminode import paths

PATH = paths.linear(series(4, 5, 3))
Z0 = series(4, 2, seed=3)


class Matrix(nn.Module):
    """F(z) = tanh(w·z), one column per control channel."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(series(channels, 1, seed=4).flatten())

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return (z.unsqueeze(-1) * self.weight).tanh()


class Product(Matrix):
    def prod(self, t: Tensor, z: Tensor, slope: Tensor) -> Tensor:
        return (self(t, z) * slope.unsqueeze(-2)).sum(-1)


def series_of_ones(t: Tensor, z: Any) -> Any:
    return tuple(torch.ones(*x.shape, 3, dtype=x.dtype) for x in z)


@pytest.mark.parametrize("kind", [Matrix, Product])
def test_is_the_field_written_out(kind: type[Matrix]) -> None:
    field = paths.ControlledField(kind(), PATH)
    t = torch.tensor(1.3, dtype=torch.float64)
    expected = torch.einsum("bhc,bc->bh", Matrix()(t, Z0), PATH.derivative(t))
    torch.testing.assert_close(field(t, Z0), expected)
    field.check(t, Z0)
    assert len(list(field.parameters())) == 1


def test_a_tuple_of_states_with_a_tuple_of_slopes() -> None:
    """With a matrix of ones the state follows the sum of the channels."""

    class Both:
        def derivative(self, t: Tensor) -> tuple[Tensor, Tensor]:
            return PATH.derivative(t), 2.0 * PATH.derivative(t)

    z0 = Z0, Z0[:, :1]
    field = paths.ControlledField(series_of_ones, Both())
    field.check(torch.zeros((), dtype=torch.float64), z0)
    sol = sn.solve(field, z0, PATH.interval, jumps=PATH.jumps)
    moved = (PATH.evaluate(PATH.interval[1]) - PATH.evaluate(PATH.interval[0])).sum(-1, keepdim=True)
    torch.testing.assert_close(sol.ys[0][-1] - Z0, moved.expand(-1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sol.ys[1][-1] - Z0[:, :1], 2.0 * moved, rtol=1e-5, atol=1e-6)


def wrong(answer: Any) -> paths.ControlledField:
    return paths.ControlledField(lambda t, z: answer, PATH)


@pytest.mark.parametrize(
    ("field", "z0", "message"),
    [
        (wrong(torch.zeros(4, 2)), Z0, r"field\(...\): expected shape \(4, 2, 3\) .* found \(4, 2\)"),
        (wrong(torch.zeros(4, 3, 3)), Z0, r"found \(4, 3, 3\)"),
        (wrong((torch.zeros(4, 2, 3),)), Z0, "field: expected a tensor, as z0 is one, found tuple"),
        (wrong(torch.zeros(4, 2, 3)), Z0[:3], r"control.derivative\(t\): expected the batch axes of z0, \(3,\)"),
        (wrong(torch.zeros(4, 2, 3)), (Z0,), "control.derivative: expected a tuple or list"),
        (wrong(torch.zeros(4, 2, 3)), 1.0, "z0: expected a tensor, or a tuple or list of tensors, found float"),
    ],
)
def test_mistakes(field: paths.ControlledField, z0: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        field.check(torch.zeros(()), z0)


def test_needs_a_control() -> None:
    with pytest.raises(ValueError, match="control: expected a path, or an object with a method derivative"):
        paths.ControlledField(Matrix(), Z0)
