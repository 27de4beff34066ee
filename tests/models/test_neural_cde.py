"""Neural CDEs: irregular times, missing values, different lengths, and the jumps of the control."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from seminode import paths
from seminode.models import MatrixField, NeuralCDE

PATHS = ("linear", "rectilinear", "natural_cubic", "hermite_cubic")
every_path = pytest.mark.parametrize("path", PATHS)


def series(batch: int = 4, knots: int = 9, channels: int = 2, seed: int = 0) -> Tensor:
    return 0.5 * torch.randn(batch, knots, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(
    path: str = "linear", channels: int = 2, time: bool = True, intensity: bool = False, **options: Any
) -> NeuralCDE:
    """A neural CDE whose field is smooth in z, so that tight tolerances are cheap."""
    torch.manual_seed(1)
    control = time + channels * (1 + intensity)
    field = nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5 * control), nn.Tanh(), nn.Unflatten(-1, (5, control))
    )
    options = {"path": path, "time": time, "intensity": intensity, **options}
    return NeuralCDE(channels, 5, 3, field=field, **options).double()


FIXED = {"solver": "rk4", "controller": sn.FixedStep(0.5)}


@every_path
def test_output_solves_the_controlled_equation(path: str) -> None:
    """Compared with a direct solve of z′ = F(z) dX/dt."""
    net, x = model(path, rtol=1e-8, atol=1e-9), series()
    control = net.control(x)

    def field(t: Tensor, z: Tensor) -> Tensor:
        return torch.einsum("bhc,bc->bh", net.field(z), control.derivative(t))

    z0 = net.initial(control.evaluate(control.times[0]))
    z = sn.solve(field, z0, control.interval, jumps=control.jumps, rtol=1e-10, atol=1e-11).ys[-1]
    assert net.readout is not None
    torch.testing.assert_close(net(x), net.readout(z), rtol=1e-6, atol=1e-7)


def test_time_is_the_first_channel_and_intensity_the_last() -> None:
    x = series(channels=2)
    x[0, 3:5, 1] = torch.nan
    control = model(intensity=True).control(x)
    assert control.channels == 5
    values = control.evaluate(control.times).movedim(0, 1)
    assert values[2, :, 0].tolist() == list(range(9))
    torch.testing.assert_close(values[1, :, 1:3], x[1])
    assert values[0, :, 4].tolist() == [1, 2, 3, 3, 3, 4, 5, 6, 7]
    assert model(time=False).control(x).channels == 2


@every_path
@pytest.mark.parametrize("gaps", [False, True])
def test_a_series_gives_the_same_output_alone_and_in_a_batch(path: str, gaps: bool) -> None:
    x, lengths = series(), torch.tensor([9, 4, 7, 2])
    if gaps:
        x[0, 2:4, 0] = x[2, 5, 1] = torch.nan
    for i, n in enumerate(lengths.tolist()):
        x[i, n:] = torch.nan if i % 2 else 1e9  # entries after the end must not matter
    fixed = model(path, **FIXED)
    together = fixed(x, lengths=lengths)
    rtol = 1e-4
    adaptive = model(path, rtol=rtol, atol=rtol)
    shared = adaptive(x, lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = x[i : i + 1, :n]
        torch.testing.assert_close(together[i], fixed(alone)[0], rtol=0.0, atol=1e-12)
        torch.testing.assert_close(shared[i], adaptive(alone)[0], rtol=0.0, atol=10 * rtol)


@every_path
def test_different_lengths_and_times_per_series(path: str) -> None:
    x, lengths = series(), torch.tensor([9, 4, 7, 2])
    times = torch.rand(4, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64).add(0.2).cumsum(1)
    net = model(path, **FIXED)
    together = net(x, times, lengths)
    loose = model(path, rtol=1e-4, atol=1e-4)
    shared = loose(x, times, lengths)
    for i, n in enumerate(lengths.tolist()):
        alone, alone_times = x[i : i + 1, :n], times[i : i + 1, :n]
        torch.testing.assert_close(together[i], net(alone, alone_times)[0], rtol=0.0, atol=1e-12)
        # With 1-D times the time of the solve is that of the observations, not the index of the knot.
        exact = model(path, rtol=1e-9, atol=1e-10)(alone, alone_times[0])[0]
        torch.testing.assert_close(shared[i], exact, rtol=0.0, atol=1e-3)


def test_padding_gets_no_gradient() -> None:
    x = series().requires_grad_()
    net = model(**FIXED)
    net(x, lengths=torch.tensor([9, 4, 7, 2])).square().sum().backward()
    assert x.grad is not None
    for i, n in enumerate([9, 4, 7, 2]):
        assert bool((x.grad[i, n:] == 0).all())
        assert bool((x.grad[i, :n] != 0).all())


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Backsolve(), sn.Quadrature()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("path", ["linear", "hermite_cubic"])
def test_gradients_of_data_and_parameters(path: str, adjoint: Any) -> None:
    grads = []
    for each in (sn.Direct(), adjoint):
        net, x = model(path, rtol=1e-8, atol=1e-9, adjoint=each), series(batch=2, knots=5).requires_grad_()
        net(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in net.parameters())])
    for exact, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-6)


def test_times_may_be_differentiated() -> None:
    """Without a time channel the gradient is zero; with one it agrees with difference quotients."""
    x, times = series(batch=2, knots=4), torch.tensor([0.0, 0.7, 1.5, 3.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(model(time=False, rtol=1e-8)(x, times).sum(), [times])
    assert float(grad.abs().max()) < 1e-6
    net = model(rtol=1e-9, atol=1e-10)
    (grad,) = torch.autograd.grad(net(x, times).sum(), [times])
    h = torch.zeros(4, dtype=torch.float64)
    h[2] = 1e-4
    with torch.no_grad():
        difference = (net(x, times + h).sum() - net(x, times - h).sum()) / 2e-4
    torch.testing.assert_close(grad[2], difference, rtol=1e-5, atol=1e-7)


def test_a_users_jumps_are_added_to_those_of_the_path() -> None:
    net = model(rtol=1e-3, atol=1e-3, jumps=[0.5, 2.5])
    net(series())
    assert net.stats[0].jumps == 7 + 2
    net.options["jumps"] = None
    net(series())
    assert net.stats[0].jumps == 7


def test_rectilinear_paths_use_the_times_of_the_observations() -> None:
    net, x = model("rectilinear", **FIXED), series()
    assert net(x, ts="knots").shape == (9, 4, 3)
    torch.testing.assert_close(net(x, ts=range(9))[-1], net(x))


def test_outputs_at_chosen_times() -> None:
    net, x = model(rtol=1e-7, atol=1e-8), series()
    ys = net(x, ts="knots")
    assert ys.shape == (9, 4, 3)
    torch.testing.assert_close(ys[-1], net(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net(x, ts=[0.0, 4.0])[1], ys[4], rtol=1e-5, atol=1e-6)
    frozen = net(x, lengths=torch.tensor([9, 4, 7, 2]), ts="knots")
    for later in frozen[4:, 1]:
        assert torch.equal(later, frozen[3, 1]) or torch.allclose(later, frozen[3, 1], atol=1e-9)


def test_causality_of_rectilinear_paths() -> None:
    """The output at an observation does not depend on later observations; with splines it does."""
    x, changed = series(), series()
    changed[:, 5:] += 1.0
    for path, same in (("rectilinear", True), ("natural_cubic", False)):
        net = model(path, **FIXED)
        close = torch.allclose(net(x, ts="knots")[4], net(changed, ts="knots")[4], atol=1e-10)
        assert close is same, path


@pytest.mark.filterwarnings("ignore::seminode.DriftWarning")  # the test only counts jumps
@pytest.mark.parametrize("published", [False, True])
def test_jumps_of_a_piecewise_linear_path(published: bool) -> None:
    """161 knots, 159 of them inside the interval.

    The published backward solve steps past its end and so crosses the first knot, too. A forward solve never steps past
    its end, because the path is not defined after the last knot.
    """
    x = series(batch=2, knots=161, channels=2)
    net = model(rtol=1e-3, atol=1e-3, adjoint=sn.Backsolve(restart="fresh" if published else "carry"))
    if published:
        net.options["jumps"] = torch.arange(161)
    net(x).sum().backward()
    (stats,) = net.stats
    assert stats.backward is not None
    assert (stats.jumps, stats.backward.jumps) == (159, 160 if published else 159)


def test_smooth_paths_have_no_jumps() -> None:
    net = model("hermite_cubic", rtol=1e-3, atol=1e-3)
    net(series())
    assert net.stats[0].jumps == 0


def test_a_path_as_input() -> None:
    net, x = model(**FIXED), series()
    assert torch.equal(net(net.control(x)), net(x))
    with pytest.raises(ValueError, match="times, lengths: expected None with a path"):
        net(net.control(x), lengths=torch.tensor([9, 4, 7, 2]))


def test_log_ode_windows() -> None:
    """The control is a path of log-signatures of windows."""
    x = paths.append_time(series(knots=33))
    control = paths.logsignature_windows(x, depth=2, window_length=8.0)
    if isinstance(control, Tensor):
        control = paths.linear(control)
    net = model(time=False, channels=control.channels, **FIXED)
    assert net(control).shape == (4, 3)


LENGTHS = torch.tensor([9, 4, 7, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model()(series(channels=3)), r"x: expected observations of shape \(..., 2\), found"),
        (lambda: model()(series()[0]), r"x: expected shape \(batch, times, channels\)"),
        (lambda: model()(series(), torch.tensor([0.0, 2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])), "times: expected"),
        (lambda: model()(series().fill_(torch.nan)), r"x\[0, :, 1\]: expected at least one observation"),
        (lambda: model()(series(), lengths=torch.tensor([9, 4, 7, 10])), "lengths"),
        (lambda: model()(series(), series()[:, :, 0].abs().cumsum(1), ts=[0.0, 1.0]), "ts: expected None or 'knots'"),
        (lambda: model()(series(), ts=[5.0, 8.0]), "ts: expected increasing times that start at the first knot, 0"),
        (lambda: model()(series(), ts=[8.0, 0.0]), "ts: expected increasing times"),
        (lambda: model()(series(), ts="steps"), "ts: expected times or 'knots', found 'steps'"),
        (lambda: model()(paths.append_time(series())[0]), "x: expected"),
        (lambda: model()(paths.linear(paths.append_time(series())[0])), "x: expected a path of a batch of series"),
        (
            lambda: NeuralCDE(2, 5, field=nn.Linear(5, 15)).double()(series()),
            r"field: expected a matrix .* 5, 3",
        ),
        (lambda: NeuralCDE(2, 5, time=2), "time: expected True or False"),  # type: ignore[arg-type]
        (lambda: model()(paths.linear(series())), "x: expected a path with 3 channels, found 2"),
        (lambda: model("spline"), "path: expected one of linear, rectilinear"),
        (lambda: model("rectilinear", time=False), "path: 'rectilinear' needs the time channel"),
        (lambda: NeuralCDE(0, 5), "channels: expected a whole number of at least 1, found 0"),
        (lambda: MatrixField(3, 2, layers=0), "layers: expected a whole number of at least 1, found 0"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_matrix_field_is_row_major() -> None:
    """The hidden index is the slower one."""
    net = MatrixField(4, 3, width=6, layers=2).double()
    z = torch.randn(5, 4, dtype=torch.float64)
    *inner, last, _, _ = net
    h = z
    for layer in inner:
        h = layer(h)
    flat = last(h).tanh()
    for i, j in itertools.product(range(4), range(3)):
        assert torch.equal(net(z)[:, i, j], flat[:, 3 * i + j])
