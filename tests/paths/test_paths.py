"""Controls: they go through the observations, tell where they bend, and cope with gaps, times and lengths."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchcde
from observations import irregular, series
from torch import Tensor

import seminode as sn
from seminode import paths
from seminode.adjoints import Restart
from seminode.paths.base import Side

SCHEMES: dict[str, Callable[..., paths.Path]] = {
    "linear": paths.linear,
    "natural cubic": paths.natural_cubic,
    "Hermite cubic": paths.hermite_cubic,
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
gaps_or_not = pytest.mark.parametrize("gaps", [0.0, 0.5], ids=["whole", "gaps"])


X = series(4, 5, 3)


def theirs(name: str, x: Tensor, times: Tensor | None) -> Any:
    """(coefficients as ours are arranged, interpolation) by torchcde."""
    if name == "linear":
        values = torchcde.linear_interpolation_coeffs(x, times)
        control = torchcde.LinearInterpolation(values, times)
        powers: tuple[Any, ...] = values[..., :-1, :], control._derivs
    else:
        natural = name == "natural cubic"
        make = (
            torchcde.natural_cubic_coeffs if natural else torchcde.hermite_cubic_coefficients_with_backward_differences
        )
        spline = make(x, times)
        control = torchcde.CubicSpline(spline, times)
        a, b, two_c, three_d = spline.chunk(4, -1)
        powers = a, b, two_c / 2, three_d / 3
    return torch.stack(powers).movedim(-2, 0), control


@gaps_or_not
@pytest.mark.parametrize("clock", ["default", "irregular"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_torchcde(name: str, clock: str, gaps: float, dtype: torch.dtype) -> None:
    x = series(2, 3, 12, 4, gaps=gaps, dtype=dtype)
    times = None if clock == "default" else irregular(12).to(dtype)
    path = SCHEMES[name](x, times)
    coefficients, control = theirs(name, x, times)
    narrow = dtype == torch.float32
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if narrow else {"rtol": 1e-9, "atol": 1e-9}
    for_slopes: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4} if narrow else tolerance
    if not narrow:
        torch.testing.assert_close(torch.stack(path.powers, 1), coefficients, **tolerance)
    t0, t1 = path.interval
    for t in torch.cat((torch.linspace(t0, t1, 41, dtype=dtype), path.times)):
        torch.testing.assert_close(path.evaluate(t), control.evaluate(t), **tolerance)
        torch.testing.assert_close(path.derivative(t), control.derivative(t), **for_slopes)


@gaps_or_not
def test_rectilinear_agrees_with_torchcde(gaps: float) -> None:
    x = series(2, 3, 9, 4, gaps=gaps)
    x[..., 0, :] = 0.5
    x[..., 1] = irregular(9)
    path = paths.rectilinear(x, time_channel=1)
    knots = torchcde.linear_interpolation_coeffs(x, rectilinear=1)
    torch.testing.assert_close(path.evaluate(path.times).movedim(0, -2), knots)
    control = torchcde.LinearInterpolation(knots)
    for t in torch.linspace(0, 16, 33, dtype=torch.float64):
        torch.testing.assert_close(path.evaluate(t), control.evaluate(t))
        torch.testing.assert_close(path.derivative(t), control.derivative(t))
    assert len(path.times) == 17
    assert len(path.jumps) == 15


def test_rectilinear_on_given_times() -> None:
    """It arrives at observation i at times[i], and until then knows nothing of it."""
    x = paths.append_time(series(5, 8, 3), irregular(8))
    times = irregular(8)
    path = paths.rectilinear(x, times)
    torch.testing.assert_close(path.evaluate(times).movedim(0, -2), x)
    changed = x.clone()
    changed[:, 5:, 1:] += 1.0
    other = paths.rectilinear(changed, times)
    before = torch.linspace(float(times[0]), float(times[4]), 50, dtype=torch.float64)
    assert torch.equal(path.evaluate(before), other.evaluate(before))


def test_rectilinear_says_where_it_is_not_causal() -> None:
    x = paths.append_time(torch.tensor([[torch.nan], [2.0], [torch.nan]]))
    with pytest.warns(UserWarning, match="not causal"):
        path = paths.rectilinear(x)
    assert path.evaluate(path.times)[:, 1].tolist() == [2.0] * 5
    with pytest.raises(ValueError, match=r"x\[\.\.\., 1\]: expected times without gaps"):
        paths.rectilinear(torch.tensor([[1.0, 0.0], [1.0, torch.nan], [1.0, 2.0]]), time_channel=1)


@every_scheme
@gaps_or_not
def test_goes_through_the_observations(scheme: Callable[..., paths.Path], gaps: float) -> None:
    x, times = series(4, 15, 3, gaps=gaps), irregular(15)
    at_knots = scheme(x, times).evaluate(times).movedim(0, -2)
    torch.testing.assert_close(at_knots[~x.isnan()], x[~x.isnan()])
    assert bool(at_knots.isfinite().all())


def test_smoothness() -> None:
    x, times = series(4, 15, 3, gaps=0.3), irregular(15)
    inner = times[1:-1]
    for scheme in (paths.natural_cubic, paths.hermite_cubic):
        path = scheme(x, times)
        torch.testing.assert_close(path.derivative(inner), path.derivative(inner, side="right"))
        assert path.smooth
        assert path.jumps.tolist() == []
    line = paths.linear(x, times)
    assert not torch.allclose(line.derivative(inner), line.derivative(inner, side="right"))
    assert torch.equal(line.jumps, inner)
    _, _, c, d = paths.natural_cubic(series(4, 15, 3), times).powers
    width = times.diff().reshape(-1, 1, 1)
    torch.testing.assert_close(2.0 * c[1:], (2.0 * c + 6.0 * d * width)[:-1])  # X″ is continuous
    torch.testing.assert_close(c[0], torch.zeros_like(c[0]))
    torch.testing.assert_close((2.0 * c + 6.0 * d * width)[-1], torch.zeros_like(c[0]))


def test_hermite_is_causal_but_for_its_own_piece() -> None:
    x = series(1, 10, 2)
    changed = x.clone()
    changed[:, 6:] += 1.0
    early = torch.linspace(0, 5, 51, dtype=torch.float64)
    assert torch.equal(paths.hermite_cubic(x).evaluate(early), paths.hermite_cubic(changed).evaluate(early))
    assert not torch.equal(paths.natural_cubic(x).evaluate(early), paths.natural_cubic(changed).evaluate(early))


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
def test_before_the_first_and_after_the_last_observation(own: bool) -> None:
    """All paths hold the value at the knots; between them only linear ones do, and Hermite ones but for one piece."""
    nan = torch.nan
    x = torch.tensor([[nan, nan, 1.0, 3.0, 2.0, nan, nan, nan]], dtype=torch.float64).unsqueeze(-1)
    times = torch.arange(8.0, dtype=torch.float64)
    before, after = torch.linspace(0, 2, 41, dtype=torch.float64), torch.linspace(4, 7, 61, dtype=torch.float64)
    inner = after[after > 5]
    for scheme in SCHEMES.values():
        path = scheme(x, times.unsqueeze(0) if own else times)
        torch.testing.assert_close(path.evaluate(times).flatten()[:3], torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(path.evaluate(times).flatten()[4:], torch.full((4,), 2.0, dtype=torch.float64))
        held = [bool((path.evaluate(t) == value).all()) for t, value in ((before, 1.0), (after, 2.0), (inner, 2.0))]
        expected = {paths.linear: [True] * 3, paths.hermite_cubic: [True, False, True]}
        assert held == expected.get(scheme, [False] * 3)
    hermite = paths.hermite_cubic(x, times)
    torch.testing.assert_close(hermite.derivative(4.0, side="right"), torch.tensor([[-1.0]], dtype=torch.float64))
    torch.testing.assert_close(hermite.evaluate(4.5), torch.tensor([[1.875]], dtype=torch.float64))
    with pytest.warns(UserWarning, match="not causal"):
        rectilinear = paths.rectilinear(paths.append_time(x, times), times.unsqueeze(0) if own else times)
    assert bool((rectilinear.evaluate(before)[..., 1] == 1.0).all())
    assert bool((rectilinear.evaluate(after)[..., 1] == 2.0).all())


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
@pytest.mark.parametrize("knots_in", [torch.float32, torch.float64])
@pytest.mark.parametrize("t_in", [torch.float32, torch.float64])
def test_either_side_of_a_knot(t_in: torch.dtype, knots_in: torch.dtype, own: bool) -> None:
    """The neighbouring floats of a knot, in the dtype of t, are on either side of it, also where it has no name."""
    knots = torch.tensor([0.0, 0.1, 0.2, 0.3, 1 / 3, 0.7, 1.1, 100.1, 1000.3], dtype=torch.float64).to(knots_in)
    slopes = torch.arange(1.0, len(knots), dtype=torch.float64)
    x = torch.cat((torch.zeros(1), (slopes * knots.diff()).cumsum(0))).unsqueeze(-1)
    x = x.expand(3, -1, 1)
    path = paths.linear(x, knots.expand(3, -1) if own else knots)
    for i, knot in enumerate(path.jumps.tolist(), 1):
        at = torch.tensor(knot, dtype=t_in)
        below, above = (torch.nextafter(at, torch.tensor(end, dtype=t_in)) for end in (-math.inf, math.inf))
        places: list[tuple[Tensor, Side, int]] = [
            (below, "left", i),
            (below, "right", i),
            (at, "left", i),
            (at, "right", i + 1),
            (above, "left", i + 1),
            (above, "right", i + 1),
        ]
        for t, side, expected in places:
            found = path.derivative(t, side=side)
            assert found.round().flatten().tolist() == [expected] * 3, (knot, t, side)
    at_start = path.derivative(torch.tensor(0.0, dtype=t_in))
    assert at_start.round().flatten().tolist() == [1] * 3


def test_beyond_the_ends() -> None:
    x = torch.tensor([[0.0], [1.0], [4.0]])
    shared = paths.linear(x)
    assert shared.evaluate(torch.tensor([-1.0, 3.0])).tolist() == [[-1.0], [7.0]]
    own = paths.linear(x.unsqueeze(0), torch.tensor([[0.0, 1.0, 2.0]]))
    assert own.evaluate(torch.tensor([-1.0, 3.0])).tolist() == [[[0.0]], [[4.0]]]
    assert own.derivative(torch.tensor([-1.0, 0.0, 2.0, 3.0])).tolist() == [[[0.0]], [[1.0]], [[3.0]], [[0.0]]]


@every_scheme
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_shapes(scheme: Callable[..., paths.Path], own: bool, batch: tuple[int, ...]) -> None:
    x = series(*batch, 7, 5)
    path = scheme(x, irregular(*batch, 7) if own else irregular(7))
    t0, t1 = path.interval
    ts = torch.linspace(t0, t1, 9, dtype=torch.float64)
    for function in (path.evaluate, path.derivative):
        many = function(ts)
        assert many.shape == (9, *batch, 5)
        for i in (0, 4, 8):
            one = function(ts[i])
            assert one.shape == (*batch, 5)
            torch.testing.assert_close(one, many[i])
            torch.testing.assert_close(function(float(ts[i])), many[i])
        if batch:
            each = ts.reshape(-1, *(1 for _ in batch)).repeat(1, *batch)
            torch.testing.assert_close(function(each), many)
            shuffled = each.clone()
            shuffled.select(1, 0).copy_(each.select(1, 0).flip(0))
            torch.testing.assert_close(function(shuffled)[0].select(0, 0), many[-1].select(0, 0))
    assert path.channels == 5
    assert path.batch_shape == batch
    if batch:
        with pytest.raises(ValueError, match=r"t: expected a number or shape"):
            path.evaluate(torch.zeros(9, 17))


@every_scheme
@pytest.mark.parametrize("gaps", [0.0, 0.3], ids=["whole", "gaps"])
def test_times_of_their_own(scheme: Callable[..., paths.Path], gaps: float) -> None:
    """Each series is as if it were alone, and stands still before and after."""
    x, times = series(4, 9, 3, gaps=gaps), irregular(4, 9) + torch.arange(4).unsqueeze(-1)
    together = scheme(x, times)
    t0, t1 = together.interval
    ts = torch.linspace(t0, t1, 101, dtype=torch.float64)
    for i in range(4):
        alone = scheme(x[i], times[i])
        t0, t1 = alone.interval
        during = ts[(ts >= t0) & (ts <= t1)]
        torch.testing.assert_close(together.evaluate(during)[:, i], alone.evaluate(during))
        torch.testing.assert_close(together.derivative(during)[:, i], alone.derivative(during))
        assert bool((together.derivative(ts[(ts < t0) | (ts > t1)])[:, i] == 0).all())
        last = together.evaluate(together.interval[1])[i]
        torch.testing.assert_close(last, alone.evaluate(t1))
    if scheme is paths.linear:
        assert len(together.jumps) == 4 * 9 - 2
    else:
        assert len(together.jumps) == 2 * 4 - 2  # where a series begins and where it ends


@every_scheme
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 7.0, -1e30])
def test_lengths(scheme: Callable[..., paths.Path], own: bool, junk: float) -> None:
    x, lengths = series(5, 9, 3, gaps=0.3), torch.tensor([9, 6, 2, 1, 8])
    x[:, 0] = 0.5
    times = irregular(5, 9) if own else irregular(9)
    padding = torch.arange(9) >= lengths.unsqueeze(-1)
    x = x.masked_fill(padding.unsqueeze(-1), junk)
    together = scheme(x, times.masked_fill(padding, junk) if own else times, lengths=lengths)
    t0, t1 = together.interval
    ts = torch.linspace(t0, t1, 101, dtype=torch.float64)
    index_clock = together.on_index_clock()
    assert all(bool(c.isfinite().all()) for c in index_clock.powers)
    for i, n in enumerate(lengths.tolist()):
        if n == 1:
            assert bool((together.derivative(ts)[:, i] == 0).all())
            continue
        alone = scheme(x[i, :n], times[i, :n] if own else times[:n])
        t0, t1 = alone.interval
        during, later = ts[(ts >= t0) & (ts <= t1)], ts[ts > t1]
        torch.testing.assert_close(together.evaluate(during)[:, i], alone.evaluate(during))
        torch.testing.assert_close(together.derivative(during)[:, i], alone.derivative(during))
        assert bool((together.derivative(later)[:, i] == 0).all())
        torch.testing.assert_close(together.evaluate(ts[-1])[i], alone.evaluate(t1))
        torch.testing.assert_close(index_clock.evaluate(8.0)[i], alone.evaluate(t1))
        if n < 9:
            assert bool((index_clock.derivative(float(n) - 0.5)[i] == 0).all())


def test_a_spline_jumps_where_a_series_ends() -> None:
    path = paths.hermite_cubic(series(4, 9, 2), lengths=[9, 4, 4, 7])
    assert path.jumps.tolist() == [3.0, 6.0]
    assert path.on_index_clock().jumps.tolist() == [3.0, 6.0]
    assert paths.linear(series(4, 9, 2), lengths=[9, 4, 4, 7]).jumps.tolist() == list(range(1, 8))


@every_scheme
def test_index_clock(scheme: Callable[..., paths.Path]) -> None:
    """X(t(s)) with t linear on each piece, knots shared by all series."""
    times = irregular(4, 9)
    path = scheme(series(4, 9, 3, gaps=0.3), times)
    by_index = path.on_index_clock()
    assert by_index.times.tolist() == list(range(9))
    assert by_index.jumps.tolist() == list(range(1, 8))
    assert not by_index.smooth
    i, share = 5, 0.3
    width = times[:, i + 1] - times[:, i]
    t = (times[:, i] + share * width).unsqueeze(0)
    torch.testing.assert_close(by_index.evaluate(i + share), path.evaluate(t)[0])
    torch.testing.assert_close(by_index.derivative(i + share), path.derivative(t)[0] * width.unsqueeze(-1))
    regular = scheme(series(4, 9, 3), 0.1 * torch.arange(9, dtype=torch.float64) + 7.0).on_index_clock()
    assert regular.smooth == (scheme is not paths.linear)


def test_bends() -> None:
    assert paths.natural_cubic(series(4, 9, 2)).bends.tolist() == list(range(1, 8))
    assert len(paths.linear(series(4, 9, 2), irregular(4, 9)).bends) == 4 * 9 - 2


class Controlled(torch.nn.Module):
    """z′ = tanh(W z + b) dX/dt."""

    def __init__(self, path: paths.Path, hidden: int = 6):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = hidden, path.channels, hidden
        self.weight = torch.nn.Parameter(0.3 * torch.randn(shape, generator=generator, dtype=torch.float64))
        self.path = path

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        matrix = torch.einsum("icj,...j->...ic", self.weight.to(z.dtype), z).tanh()
        return (matrix @ self.path.derivative(t).unsqueeze(-1)).squeeze(-1)


def solved(path: paths.Path, z0: Tensor, **options: Any) -> Tensor:
    options = {"rtol": 1e-8, "atol": 1e-9, "save": "last", **options}
    controller = sn.Integral(step_to=path.bends.tolist())
    return sn.solve(Controlled(path), z0, path.interval, jumps=path.jumps, controller=controller, **options).ys[-1]


@every_scheme
def test_a_cde_does_not_notice_the_index_clock(scheme: Callable[..., paths.Path]) -> None:
    """Series with times and lengths of their own in one solve, against each by itself in its own time."""
    x, times, lengths = 0.3 * series(3, 7, 2), irregular(3, 7), [7, 4, 6]
    z0 = torch.ones(3, 6, dtype=torch.float64)
    together = solved(scheme(x, times, lengths=lengths).on_index_clock(), z0)
    alone = [solved(scheme(x[i, :n], times[i, :n]), z0[i]) for i, n in enumerate(lengths)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-7, atol=1e-7)
    in_real_time = solved(scheme(x, times, lengths=lengths), z0)
    torch.testing.assert_close(together, in_real_time, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("all_knots", "restart", "backward"), [(False, "carry", 159), (True, "fresh", 160)])
def test_161_knots_are_159_jumps_each_way(dtype: torch.dtype, all_knots: bool, restart: Restart, backward: int) -> None:
    """With every knot a jump and fresh restarts, as published, the last one is crossed in the backward pass."""
    path = paths.linear(0.1 * series(8, 161, 4, dtype=dtype))
    z0 = torch.ones(8, 6, dtype=dtype)
    sol = sn.solve(
        Controlled(path),
        z0,
        path.interval,
        jumps=path.times if all_knots else path.jumps,
        adjoint=sn.Backsolve(restart=restart),
        rtol=1e-3,
        atol=1e-6,
    )
    sol.ys[-1].sum().backward()
    assert len(path.jumps) == 159
    assert sol.stats.jumps == 159
    assert sol.stats.backward is not None
    assert sol.stats.backward.jumps == backward


@pytest.mark.parametrize("scheme", [paths.natural_cubic, paths.hermite_cubic])
def test_stepping_to_the_bends_of_a_spline_pays(scheme: Callable[..., paths.Path]) -> None:
    path = scheme(0.5 * series(4, 12, 3))
    z0 = torch.ones(4, 6, dtype=torch.float64)
    field, bends = Controlled(path), path.bends.tolist()
    with torch.no_grad():
        exact = solved(path, z0, rtol=1e-11, atol=1e-11)
        plain = sn.solve(field, z0, path.interval, rtol=1e-6, atol=1e-7)
        there = sn.solve(field, z0, path.interval, rtol=1e-6, atol=1e-7, controller=sn.Integral(step_to=bends))
    assert there.stats.nfe < plain.stats.nfe
    assert float((there.ys[-1] - exact).abs().max()) < 0.2 * float((plain.ys[-1] - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_linear_path_with_jumps_is_integrated_exactly(dtype: torch.dtype) -> None:
    """z′ = dX/dt has the solution X, at knots that have no exact name in float32."""
    times = 0.1 * torch.arange(21, dtype=torch.float64)
    path = paths.linear(series(3, 21, 2, dtype=dtype), times)
    sol = sn.solve(lambda t, z: path.derivative(t), path.evaluate(0.0), times, jumps=path.jumps, solver="dopri5")
    assert sol.stats.rejected == 0
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(sol.ys, path.evaluate(times), rtol=tolerance, atol=tolerance)


@every_scheme
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
def test_gradients(scheme: Callable[..., paths.Path], own: bool) -> None:
    """With respect to observations, knots and the time of the question; gaps have no gradient, and do no harm."""
    x, times = series(2, 6, 2, gaps=0.3), irregular(2, 6) if own else irregular(6)
    missing = x.isnan()
    ts = torch.tensor([2.9, 1.3], dtype=torch.float64)
    lengths = torch.tensor([6, 4])
    x[:, 0] = 0.2

    def both(x: Tensor, times: Tensor, ts: Tensor) -> tuple[Tensor, Tensor]:
        path = scheme(torch.where(missing, torch.nan, x), times, lengths=lengths)
        return path.evaluate(ts), path.derivative(ts)

    missing[:, 0] = False
    inputs = x.nan_to_num(9.0).requires_grad_(), times.requires_grad_(), ts.requires_grad_()
    assert torch.autograd.gradcheck(both, inputs)
    grads = torch.autograd.grad([y.sum() for y in both(*inputs)], inputs[0])[0]
    assert bool((grads[missing] == 0).all())
    assert bool((grads[1, 4:] == 0).all())


@every_scheme
@pytest.mark.parametrize(
    ("adjoint", "tolerance"), [(sn.Replay(), 1e-10), (sn.Backsolve(), 1e-6)], ids=["replay", "backsolve"]
)
def test_observations_get_their_gradient_through_a_solve(
    scheme: Callable[..., paths.Path], adjoint: Any, tolerance: float
) -> None:
    z0 = torch.ones(3, 6, dtype=torch.float64)
    grads = []
    for how in (sn.Direct(), adjoint):
        x = (0.2 * series(3, 5, 2, gaps=0.2)).requires_grad_()
        solved(scheme(x), z0, adjoint=how).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


def test_nothing_in_an_evaluation_waits_for_the_device() -> None:
    """A value that is brought to the host would break the graph."""
    x, t = series(3, 6, 2), torch.tensor(1.3, dtype=torch.float64)
    for question in (paths.linear(x).derivative, paths.hermite_cubic(x, irregular(3, 6)).evaluate):
        compiled = torch.compile(question, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(t), question(t))


def test_elsewhere() -> None:
    path = paths.natural_cubic(series(3, 6, 2), irregular(3, 6), lengths=[6, 4, 5])
    narrow = path.to(torch.float32)
    assert narrow.derivative(1.0).dtype == torch.float32
    assert narrow.times.dtype == torch.float64
    torch.testing.assert_close(narrow.evaluate(1.3), path.evaluate(1.3).float())
    assert torch.equal(narrow.jumps, path.jumps)
    assert path.to("cpu").evaluate(1.0).dtype == torch.float64
    expected = "Path(natural cubic, 6 knots per series on [0.4, 4.9], batch_shape=(3,), channels=2, "
    t0, t1 = path.interval
    assert repr(path) == expected.replace("[0.4, 4.9]", f"[{t0:g}, {t1:g}]") + "torch.float64)"
    with pytest.raises(TypeError, match=r"dtype: expected a floating-point dtype, found torch\.int64"):
        path.to(torch.int64)


def test_copies_and_transforms() -> None:
    x, t = series(3, 6, 2), torch.tensor(2.3, dtype=torch.float64)
    path = paths.hermite_cubic(x, irregular(6))
    assert torch.equal(pickle.loads(pickle.dumps(path)).evaluate(t), path.evaluate(t))
    speed = torch.func.jvp(path.evaluate, (t,), (torch.ones_like(t),))[1]
    torch.testing.assert_close(speed, path.derivative(t))
    jacobian = torch.func.jacrev(lambda x: paths.linear(x).evaluate(t))(x)
    weights = jacobian[0, 0, 0, :, 0]
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.0, 0.7, 0.3, 0.0, 0.0], dtype=torch.float64))


def build(name: str, own: bool, ragged: bool) -> paths.Path:
    """A path of 5 series with gaps, with its own times and lengths if asked for."""
    x = paths.append_time(series(5, 9, 2, gaps=0.3))
    x[:, 0] = 0.5
    if name == "rectilinear":
        x[..., 0] = torch.arange(9)
    times = irregular(5, 9) if own else irregular(9)
    lengths = torch.tensor([9, 6, 2, 1, 8]) if ragged else None
    return (paths.rectilinear if name == "rectilinear" else SCHEMES[name])(x, times, lengths=lengths)


def same_path(a: paths.Path, b: paths.Path) -> None:
    """Equal everywhere up to rounding, also beyond the ends."""
    ts = torch.linspace(-2.0, 8.0, 101, dtype=torch.float64)
    torch.testing.assert_close(a.evaluate(ts), b.evaluate(ts), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(a.derivative(ts), b.derivative(ts), rtol=1e-14, atol=1e-14)
    assert torch.equal(a.jumps, b.jumps)
    assert (a.interval, a.smooth, repr(a)) == (b.interval, b.smooth, repr(b))


all_kinds = pytest.mark.parametrize("name", [*SCHEMES, "rectilinear"])
own_or_shared = pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
ragged_or_not = pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])


@all_kinds
@own_or_shared
@ragged_or_not
def test_indexing(name: str, own: bool, ragged: bool) -> None:
    path = build(name, own, ragged)
    ts = torch.linspace(-2.0, 8.0, 101, dtype=torch.float64)
    values, slopes = path.evaluate(ts), path.derivative(ts)
    assert len(path) == len(list(path)) == 5
    mask = torch.tensor([True, False, True, True, False])
    for index in (0, 3, -1, torch.tensor(2), slice(1, 4), slice(None, None, 2), [4, 0, 0], torch.tensor([3, 1]), mask):
        part = path[index]
        torch.testing.assert_close(part.evaluate(ts), values[:, index], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part.derivative(ts), slopes[:, index], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part.evaluate(2.6), path.evaluate(2.6)[index], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part.derivative(2.6), path.derivative(2.6)[index], rtol=1e-14, atol=1e-14)
        assert part.batch_shape == values[0, index].shape[:-1]
        assert (part.smooth, part.kind, part.shared) == (path.smooth, path.kind, path.shared)
        clock = path.on_index_clock().evaluate(3.3)[index]
        torch.testing.assert_close(part.on_index_clock().evaluate(3.3), clock, rtol=1e-14, atol=1e-14)
        narrow = path.to(torch.float32).evaluate(ts)[:, index]
        torch.testing.assert_close(part.to(torch.float32).evaluate(ts), narrow)


def test_indexing_takes_the_first_batch_axis() -> None:
    x = series(2, 3, 6, 4).requires_grad_()
    path = paths.hermite_cubic(x, irregular(2, 3, 6))
    assert len(path) == 2
    assert path[1].batch_shape == (3,)
    assert torch.equal(path[1][2].evaluate(2.0), path.evaluate(2.0)[1, 2])
    path[1].evaluate(2.0).sum().backward()
    assert x.grad is not None
    assert bool((x.grad[0] == 0).all())
    assert bool(x.grad[1].any())
    single = path[1][2]
    assert bool(single)
    with pytest.raises(
        TypeError, match=r"len\(\): expected a path with a batch axis, found the path of a single series"
    ):
        len(single)
    with pytest.raises(TypeError, match="index: expected a path with a batch axis"):
        single[0]


@all_kinds
@own_or_shared
@ragged_or_not
def test_saved_and_loaded(name: str, own: bool, ragged: bool, tmp_path: Any) -> None:
    """torch.load with weights_only=True, which is its default."""
    path = build(name, own, ragged)
    for original in (path, path[1:3], path[1], path[3], path.on_index_clock()):
        torch.save(original.state_dict(), tmp_path / "path.pt")
        same_path(paths.Path.from_state_dict(torch.load(tmp_path / "path.pt", weights_only=True)), original)


@all_kinds
def test_coefficients(name: str) -> None:
    path = build(name, own=False, ragged=False)
    pieces, degree = len(path.times) - 1, 3 if path.smooth else 1
    assert path.coefficients.shape == (5, pieces, degree + 1, 3)
    same_path(paths.Path.from_coefficients(path.coefficients, path.times, smooth=path.smooth, kind=path.kind), path)
    if path.smooth:  # a spline that is not said to be smooth has a jump at every knot
        assert torch.equal(paths.Path.from_coefficients(path.coefficients, path.times).jumps, path.bends)
    single = paths.Path.from_coefficients(path.coefficients[2], path.times)
    assert torch.equal(single.evaluate(1.5), path.evaluate(1.5)[2])
    assert paths.Path.from_coefficients(path.coefficients).times.tolist() == list(range(pieces + 1))


def test_coefficients_have_gradients() -> None:
    x = series(3, 6, 2).requires_grad_()
    path = paths.natural_cubic(x)
    again = paths.Path.from_coefficients(path.coefficients, path.times, smooth=True)
    expected = torch.autograd.grad(path.evaluate(2.3).sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(again.evaluate(2.3).sum(), x)[0], expected)
    assert not path.state_dict()["coefficients"].requires_grad


@own_or_shared
def test_batches_of_a_data_loader(own: bool) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    path, labels = build("Hermite cubic", own, ragged=True), torch.arange(5)
    seen = []
    for index in DataLoader(range(len(path)), batch_size=2, shuffle=True):  # type: ignore[arg-type]
        batch = path[index]
        assert torch.equal(batch.evaluate(3.0), path.evaluate(3.0)[index])
        seen += labels[index].tolist()
    assert sorted(seen) == labels.tolist()
    assert path.lengths is not None
    tensors = TensorDataset(path.coefficients, path.times.expand(5, -1), path.lengths, labels)
    for coefficients, times, lengths, label in DataLoader(tensors, batch_size=2):
        batch = paths.Path.from_coefficients(coefficients, times, lengths=lengths, smooth=path.smooth)
        during = batch.times[0, :2]
        torch.testing.assert_close(batch.evaluate(during)[:, 0], path.evaluate(during)[:, label[0]], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "index: expected numbers from -4 to 3, found 4"),
        ([0, -5], IndexError, "index: expected numbers from -4 to 3, found -5"),
        (slice(2, 2), ValueError, "index: expected at least one series, found none"),
        (torch.zeros(4, dtype=torch.bool), ValueError, "index: expected at least one series, found none"),
        (torch.ones(3, dtype=torch.bool), TypeError, r"index: expected integers or a mask of shape \(4,\), found"),
        (1.0, TypeError, r"index: expected integers or a mask of shape \(4,\), found torch.float"),
        ((0, 1), TypeError, "index: expected an integer, a slice, or a sequence of integers, found tuple"),
        (torch.zeros(2, 2).long(), TypeError, r"index: expected an integer, a slice, .* found \(2, 2\)"),
        (None, TypeError, "index: expected a tensor or a sequence of numbers, found NoneType"),
    ],
)
def test_mistaken_indices(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paths.linear(X)[index]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"coefficients": [1.0]}, TypeError, "coefficients: expected a tensor, found list"),
        ({"coefficients": torch.ones(4, 4, 2, 3).long()}, TypeError, "coefficients: expected a floating-point dtype"),
        ({"coefficients": torch.ones(4, 3)}, ValueError, r"coefficients: expected shape \(batch.*found \(4, 3\)"),
        ({"coefficients": torch.ones(4, 4, 1, 3)}, ValueError, r"a degree of at least 1, found \(4, 4, 1, 3\)"),
        ({"coefficients": torch.full((4, 4, 2, 3), torch.nan)}, ValueError, "expected finite values, found NaN or inf"),
        ({"times": torch.arange(4.0)}, ValueError, r"times: expected shape \(5,\) or \(4, 5\), .*found \(4,\)"),
        ({"times": [0.0, 1.0, 1.0, 2.0, 3.0]}, ValueError, "strictly increasing times"),
        ({"lengths": [1, 2]}, ValueError, r"lengths: expected shape \(4,\), one number per series"),
        ({"lengths": [5, 5, 5, 4]}, ValueError, "coefficients: expected constant pieces after the last knot"),
        ({"smooth": 1}, TypeError, "smooth: expected True or False, found 1"),
    ],
)
def test_mistaken_coefficients(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"coefficients": paths.linear(X).coefficients, "times": None, **changes}
    with pytest.raises(error, match=message):
        paths.Path.from_coefficients(**options)


def test_mistaken_state() -> None:
    state = paths.linear(X).state_dict()
    with pytest.raises(ValueError, match=r"state: expected a dict with the keys coefficients, kind, .* found list"):
        paths.Path.from_state_dict([state])  # type: ignore[arg-type]
    del state["times"]
    with pytest.raises(
        ValueError, match=r"state: expected a dict .* found coefficients, lengths, smooth, shared, kind"
    ):
        paths.Path.from_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = series(3, 161, 2, gaps=0.2).to(dtype)
    path = paths.linear(x)
    assert path.times.dtype == torch.float32  # bfloat16 cannot count to 161
    assert path.derivative(torch.tensor(158.5)).dtype == dtype
    torch.testing.assert_close(
        path.evaluate(159.5).double(), paths.linear(x.double()).evaluate(159.5), atol=0.05, rtol=0
    )


def test_whole_numbers_are_times_too() -> None:
    path = paths.linear(series(3, 4, 2), torch.tensor([0, 1, 5, 6]))
    assert torch.equal(path.evaluate(torch.tensor(5)), path.evaluate(5.0))
    assert path.interval == (0.0, 6.0)


def test_time_and_intensity() -> None:
    x = series(4, 9, 3, gaps=0.4)
    times = irregular(9)
    seen = paths.append_intensity(x)
    assert torch.equal(seen[..., 3:].diff(dim=-2), (~x.isnan())[:, 1:].double())
    assert torch.equal(seen[:, -1, 3:], (~x.isnan()).sum(1).double())
    both = paths.append_time(seen, times)
    assert both.shape == (4, 9, 7)
    assert torch.equal(both[..., 0], times.expand(4, 9))
    torch.testing.assert_close(paths.linear(both, times).derivative(2.0)[:, 0], torch.ones(4, dtype=torch.float64))
    ragged = paths.append_time(x, irregular(4, 9), lengths=[9, 3, 1, 5])[..., 0]
    assert ragged[1, 2:].unique().tolist() == [float(irregular(4, 9)[1, 2])]
    assert torch.equal(paths.append_time(x, lengths=[9, 3, 1, 5])[1, :, 0], torch.tensor([0.0, 1, 2, 2, 2, 2, 2, 2, 2]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0, 2.0],), TypeError, "x: expected a tensor, found list"),
        ((torch.ones(4, 5, 3, dtype=torch.int64),), TypeError, "x: expected a floating-point dtype, found torch.int64"),
        ((torch.ones(5),), ValueError, r"x: expected shape \(batch..., K, channels\), found \(5,\)"),
        ((X[:, :1],), ValueError, "x: expected at least 2 knots along axis −2, found 1"),
        ((X[:0],), ValueError, "x: expected at least one series and one channel"),
        ((X / 0.0,), ValueError, "x: expected finite values, or NaN where nothing was observed"),
        ((X, [0.0, 1.0, 3.0, 2.0, 4.0]), ValueError, r"strictly increasing times, found times\[3\] = 2.0 after 3.0"),
        ((X, [0.0, 1.0, 1.0, 2.0, 4.0]), ValueError, r"strictly increasing times, found times\[2\] = 1.0 after 1.0"),
        ((X, [0.0, 1.0, math.nan, 2.0, 4.0]), ValueError, r"times\[2\]: expected a finite time, found nan"),
        ((X, [0.0, 1.0, 2.0, 3.0, math.inf]), ValueError, r"times\[4\]: expected a finite time, found inf"),
        ((X, "abc"), TypeError, "times: expected a tensor or a sequence of numbers, found str"),
        ((X, [[0.0, 1.0], [2.0]]), TypeError, "times: expected a tensor or a sequence of numbers, found list"),
        ((X, torch.arange(4.0)), ValueError, r"times: expected shape \(5,\) or \(4, 5\), one time per knot"),
        ((X, torch.arange(20.0).reshape(5, 4)), ValueError, r"times: expected shape \(5,\) or \(4, 5\)"),
        ((X, torch.ones(5, dtype=torch.bool)), TypeError, "times: expected real numbers, found torch.bool"),
        ((X.float(), 1.7e9 + torch.arange(5.0, dtype=torch.float64)), ValueError, "subtract the first time"),
        ((X, -torch.arange(20.0).reshape(4, 5)), ValueError, r"found times\[0, 1\] = -1.0 after -?0.0"),
        (
            (X.where(torch.arange(3) != 1, torch.nan),),
            ValueError,
            r"x\[0, :, 1\].*found only NaN in series 0, channel 1",
        ),
        ((X[0].where(torch.arange(3) != 2, torch.nan),), ValueError, r"x\[:, 2\].*found only NaN in channel 2;"),
    ],
)
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), paths.rectilinear])
def test_mistakes(scheme: Callable[..., paths.Path], arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scheme(*arguments)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([1.0, 2.0, 3.0, 4.0], TypeError, "lengths: expected integers, found torch.float"),
        ("abcd", TypeError, "lengths: expected a tensor or a sequence of numbers, found str"),
        ([5, 5], ValueError, r"lengths: expected shape \(4,\), one number per series, found \(2,\)"),
        ([5, 6, 1, 1], ValueError, "lengths: expected numbers from 1 to 5, the number of knots, found 6"),
        ([5, 0, 1, 1], ValueError, "lengths: expected numbers from 1 to 5, the number of knots, found 0"),
    ],
)
def test_mistaken_lengths(lengths: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paths.linear(X, lengths=lengths)


def test_other_mistakes() -> None:
    path = paths.linear(X)
    with pytest.raises(ValueError, match="side: expected 'left' or 'right', found 'up'"):
        path.derivative(1.0, side="up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"t: expected real times, found torch\.bool"):
        path.evaluate(torch.tensor(True))
    with pytest.raises(ValueError, match="time_channel: expected the index of one of 3 channels, found 3"):
        paths.rectilinear(X, time_channel=3)
    with pytest.raises(ValueError, match=r"powers: expected coefficients of shape \(4, batch..., channels\)"):
        paths.Path(torch.arange(5.0), torch.zeros(2, 5, 4, 3).unbind())
    all_missing_later = X.clone()
    all_missing_later[2, :3, 0] = torch.nan
    with pytest.raises(ValueError, match=r"x\[2, :, 0\]"):
        paths.linear(all_missing_later, lengths=[5, 5, 3, 5])
