"""The drop-in for torchcde, beside torchcde 0.2.5: the same results, gradients, exceptions and warnings."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torchcde as theirs
from observations import irregular, series
from torch import Tensor, nn

import seminode.compat.torchcde as ours
from seminode import paths

NAN = torch.nan
CUBIC = [
    "natural_cubic_coeffs",
    "natural_cubic_spline_coeffs",
    "hermite_cubic_coefficients_with_backward_differences",
]
COEFFICIENTS = [*CUBIC, "linear_interpolation_coeffs"]
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def control(torchcde: Any, name: str, x: Tensor, t: Tensor | None = None) -> Any:
    coeffs = getattr(torchcde, name)(x, t)
    return (torchcde.CubicSpline if name in CUBIC else torchcde.LinearInterpolation)(coeffs, t)


def gappy() -> Tensor:
    """Series with gaps of all kinds: random, one observation, none, missing starts and ends."""
    x = series(2, 3, 11, 2, gaps=0.4)
    x[0, 0, :, 0] = NAN
    x[0, 1, :, 1] = NAN
    x[0, 1, 4, 1] = 2.0
    x[1, 0, :6, 0] = NAN
    x[1, 1, 5:, 0] = NAN
    x[1, 2, :, 1] = NAN
    x[1, 2, 0, 1] = -1.0
    x[1, 2, :, 0] = NAN
    x[1, 2, -1, 0] = 3.0
    return x


class Field(nn.Module):
    """F(t, z) of shape (batch..., 4, channels)."""

    def __init__(self, channels: int = 2, hidden: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden * channels, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        generator = torch.Generator().manual_seed(channels)
        with torch.no_grad():
            self.linear.weight.copy_(0.4 * torch.randn(hidden * channels, hidden, generator=generator))
            self.linear.bias.copy_(0.4 * torch.randn(hidden * channels, generator=generator))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return (self.linear(z) + 0.1 * t).tanh().unflatten(-1, (z.shape[-1], -1))


class ProductField(Field):
    def prod(self, t: Tensor, z: Tensor, slope: Tensor) -> Tensor:
        return (self.forward(t, z) @ slope.unsqueeze(-1)).squeeze(-1)


class TupleField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Field(2), Field(3)

    def forward(self, t: Tensor, z: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.first(t, z[0]), self.second(t, z[1])


class TupleProductField(TupleField):
    def prod(self, t: Tensor, z: Any, slope: Any) -> Any:
        return tuple((f @ s.unsqueeze(-1)).squeeze(-1) for f, s in zip(self.forward(t, z), slope, strict=True))


def own_control(torchcde: Any) -> Any:
    """A control of the user's own, with a parameter: X(t) = (sin(a·t), t) for a batch of 3."""

    class Wave(torchcde.InterpolationBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.speed = nn.Parameter(torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64))

        @property
        def grid_points(self) -> Tensor:
            return torch.tensor([0.0, 2.0], dtype=torch.float64)

        @property
        def interval(self) -> Tensor:
            return self.grid_points

        def evaluate(self, t: Tensor) -> Tensor:
            return torch.stack(((self.speed * t).sin(), t.expand(3)), -1)

        def derivative(self, t: Tensor) -> Tensor:
            return torch.stack((self.speed * (self.speed * t).cos(), torch.ones_like(self.speed)), -1)

    return Wave()


# Coefficients


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("clock", ["default", "irregular"])
@pytest.mark.parametrize(
    "x",
    [
        series(2, 3, 11, 2),
        gappy(),
        gappy()[1, 0],
        gappy()[..., :2, :],
        gappy()[..., :3, :],
        series(5, 1),
        gappy()[:, None, :, :, :1],
    ],
    ids=["whole", "gaps", "no-batch", "two-knots", "three-knots", "one-channel", "three-batch-axes"],
)
def test_coefficients(name: str, clock: str, x: Tensor) -> None:
    t = None if clock == "default" else irregular(x.shape[-2])
    expected = getattr(theirs, name)(x, t)
    coeffs = getattr(ours, name)(x, t)
    assert coeffs.dtype == expected.dtype
    torch.testing.assert_close(coeffs, expected, **TIGHT)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t_dtype", [torch.float32, torch.float64])
def test_dtypes_of_coefficients(name: str, x_dtype: torch.dtype, t_dtype: torch.dtype) -> None:
    x, t = gappy()[0].to(x_dtype), irregular(11).to(t_dtype)
    expected, coeffs = (getattr(m, name)(x, t) for m in (theirs, ours))
    assert coeffs.dtype == expected.dtype
    torch.testing.assert_close(coeffs, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("gaps", [False, True])
def test_gradients_of_coefficients(name: str, gaps: bool) -> None:
    x = gappy()[1] if gaps else series(2, 11, 2)
    grads = []
    for torchcde in (theirs, ours):
        x, t = x.detach().requires_grad_(), irregular(11).requires_grad_()
        coeffs = getattr(torchcde, name)(x, t)
        weights = torch.linspace(-1, 1, coeffs.numel(), dtype=torch.float64).reshape(coeffs.shape)
        grads.append(torch.autograd.grad((weights * coeffs).sum(), (x, t), allow_unused=True, materialize_grads=True))
    for expected, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-8)


def test_values_without_gaps_are_handed_through() -> None:
    x = series(3, 5, 2)
    assert ours.linear_interpolation_coeffs(x) is x
    assert ours.misc.forward_fill(x) is x


@pytest.mark.parametrize("channel", [0, 1])
@pytest.mark.parametrize("gaps", [0.0, 0.5])
@pytest.mark.parametrize("clock", ["default", "irregular"])
def test_rectilinear(channel: int, gaps: float, clock: str) -> None:
    x = series(2, 3, 8, 3, gaps=gaps)
    x[..., 0, :] = 0.5
    x[..., channel] = irregular(8)
    t = None if clock == "default" else irregular(15)
    expected, coeffs = (m.linear_interpolation_coeffs(x, t, rectilinear=channel) for m in (theirs, ours))
    torch.testing.assert_close(coeffs, expected, **TIGHT)


def test_rectilinear_warns_of_a_missing_start() -> None:
    x = paths.append_time(series(4, 6, 2, gaps=0.0))
    x[0, :3, 1] = NAN
    x[1, :, 2] = NAN
    results = []
    for torchcde in (theirs, ours):
        with pytest.warns(UserWarning, match="causal"):
            results.append(torchcde.linear_interpolation_coeffs(x, rectilinear=0))
    torch.testing.assert_close(*results, **TIGHT)


class Signatory:
    """The two names of signatory that torchcde uses; signatory itself cannot be built any more."""

    logsignature_channels = staticmethod(paths.logsignature_channels)

    class Logsignature:
        def __init__(self, depth: int) -> None:
            self.depth = depth

        def __call__(self, x: Tensor) -> Tensor:
            return paths.logsignature(x, self.depth)


@pytest.mark.parametrize("window_length", [1.0, 2.5, 4.0, 100.0])
@pytest.mark.parametrize("clock", ["default", "irregular"])
@pytest.mark.parametrize("gaps", [False, True])
def test_windows(window_length: float, clock: str, gaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.log_ode, "signatory", Signatory)
    x = gappy() if gaps else series(2, 3, 11, 2)
    t = None if clock == "default" else irregular(11)
    for depth in (1, 2, 3):
        expected, knots = (m.logsig_windows(x, depth, window_length, t) for m in (theirs, ours))
        torch.testing.assert_close(knots, expected, **TIGHT)
        old, old_times = theirs.logsignature_windows(x, depth, window_length, t)
        knots, times = ours.logsignature_windows(x, depth, window_length, t)
        torch.testing.assert_close(knots, old, **TIGHT)
        torch.testing.assert_close(times, old_times, **TIGHT)


# Controls


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("clock", ["default", "irregular"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_controls(name: str, clock: str, shape: tuple[int, ...]) -> None:
    """Evaluations at numbers, knots and times of any shape, also beyond the ends, with gradients."""
    x = gappy()
    t = None if clock == "default" else irregular(11)
    results = []
    for torchcde in (theirs, ours):
        X = control(torchcde, name, x.clone().requires_grad_(), t)
        at = torch.linspace(-1.0, 12.0, max(1, torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        at.requires_grad_()
        values, slopes = X.evaluate(at), X.derivative(at)
        assert values.shape == (2, 3, *shape, 2)
        grads = torch.autograd.grad(values.sum() + slopes.sin().sum(), at, retain_graph=True)
        knots = torch.stack([X.evaluate(k) + X.derivative(k) for k in X.grid_points])
        results.append((X.grid_points, X.interval, values, slopes, knots, X.evaluate(0.7), X.derivative(3), *grads))
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)


def test_state_dicts_are_exchangeable() -> None:
    for name in ("natural_cubic_coeffs", "linear_interpolation_coeffs"):
        first = control(theirs, name, series(3, 6, 2))
        second = control(ours, name, series(3, 6, 2, seed=9), torch.arange(6.0, dtype=torch.float64) + 1)
        before = second.derivative(2.4)
        second.load_state_dict(first.state_dict())
        torch.testing.assert_close(second.derivative(2.4), first.derivative(2.4))
        assert not torch.equal(second.derivative(2.4), before)
        first.load_state_dict(second.state_dict())


def test_controls_move_and_copy() -> None:
    X = control(ours, "natural_cubic_coeffs", series(3, 6, 2))
    value = X.evaluate(2.4)
    narrow = copy.deepcopy(X).float()
    assert narrow.evaluate(2.4).dtype == torch.float32
    torch.testing.assert_close(narrow.evaluate(2.4), value.float())
    assert torch.equal(pickle.loads(pickle.dumps(X)).evaluate(2.4), value)
    file = io.BytesIO()
    torch.save(X, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).evaluate(2.4), value)
    assert torch.equal(X.evaluate(2.4), value)


def test_a_control_follows_its_coefficients() -> None:
    """The spline of a parameter sees the changes that an optimiser makes, as the views of torchcde do."""
    for torchcde in (theirs, ours):
        coeffs = nn.Parameter(torchcde.natural_cubic_coeffs(series(3, 6, 2)))
        X = torchcde.CubicSpline(coeffs)
        with torch.no_grad():  # a first evaluation without a graph must not lose that of later ones
            before = X.derivative(1.5)
            coeffs.mul_(2.0)
        assert torch.equal(X.derivative(1.5), 2.0 * before)
        (grad,) = torch.autograd.grad(X.derivative(1.5).sum(), coeffs)
        assert float(grad.abs().max()) > 0.0


def test_abstract_members() -> None:
    for torchcde in (theirs, ours):
        with pytest.raises(TypeError, match="abstract"):
            torchcde.InterpolationBase()
        assert issubclass(torchcde.CubicSpline, torchcde.InterpolationBase)
        assert issubclass(torchcde.interpolation_cubic.NaturalCubicSpline, torchcde.CubicSpline)


# Tools


def test_tools() -> None:
    generator = torch.Generator().manual_seed(1)
    b, diagonal = torch.randn(2, 3, 5, generator=generator), 4.0 + torch.rand(5, generator=generator)
    upper, lower = torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)
    torch.testing.assert_close(*(m.misc.tridiagonal_solve(b, upper, diagonal, lower) for m in (theirs, ours)))
    x = gappy()
    for axis in (-2, -1, 0, 2):
        filled = [m.misc.forward_fill(x, fill_index=axis) for m in (theirs, ours)]
        torch.testing.assert_close(*filled, equal_nan=True)
    for count in (1, 3):
        stacked = [m.misc.cheap_stack([x] * count, dim=1) for m in (theirs, ours)]
        torch.testing.assert_close(*stacked, equal_nan=True)
    for t in (None, irregular(11)):
        assert torch.equal(*(m.misc.validate_input_path(x, t) for m in (theirs, ours)))


def test_has_every_name() -> None:
    for name in dir(theirs):
        if not name.startswith("_"):
            assert hasattr(ours, name), name
    for module in ("interpolation_base", "interpolation_cubic", "interpolation_linear", "log_ode", "misc", "solver"):
        public = {
            name
            for name, x in vars(getattr(theirs, module)).items()
            if getattr(x, "__module__", "") == f"torchcde.{module}"
        }
        missing = {name for name in public if not name.startswith("_")} - set(dir(getattr(ours, module)))
        assert not missing - {"DummyModule", "signatory"}
    assert ours.__version__ == theirs.__version__


def test_tuple_controls() -> None:
    x = series(3, 6, 2)
    results = []
    for torchcde in (theirs, ours):
        first, second = (control(torchcde, name, x) for name in ("natural_cubic_coeffs", "linear_interpolation_coeffs"))
        both = torchcde.TupleControl(first, second)
        results.append((*both.evaluate(1.3), *both.derivative(torch.tensor(1.3)), both.interval, both.grid_points))
        other = control(torchcde, "natural_cubic_coeffs", x, torch.tensor([0.0, 1.5, 2, 3, 4, 5], dtype=torch.float64))
        different = torchcde.TupleControl(first, other)
        with pytest.raises(RuntimeError, match="different"):
            _ = different.grid_points
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_controls_with_different_numbers_of_knots() -> None:
    """torchcde fails here with the error of a comparison of unequal shapes."""
    t = torch.tensor([0.0, 2.0, 5.0], dtype=torch.float64)
    first = control(ours, "natural_cubic_coeffs", series(3, 6, 2))
    second = control(ours, "natural_cubic_coeffs", series(3, 3, 2), t)
    both = ours.TupleControl(first, second)
    with pytest.raises(RuntimeError, match="grid_points: the controls have different ones"):
        _ = both.grid_points
    assert both.derivative(1.0)[1].shape == (3, 2)
