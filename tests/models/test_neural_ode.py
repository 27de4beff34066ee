"""Neural ODEs: inputs, outputs, costs and STEER."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from seminode.models import NeuralODE, steer
from seminode.models.running import Evaluation, Regulariser, per_sample_mean


class Turn(nn.Module):
    """z′ = ω·(−z₂, z₁): a rotation, whose solution is known in closed form."""

    def __init__(self, omega: float = 1.0):
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(omega, dtype=torch.float64))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.omega * torch.stack([-z[:, 1], z[:, 0]], 1)


class Speed(Regulariser):
    name, weight = "speed", 0.5

    def rate(self, at: Evaluation) -> Tensor:
        return per_sample_mean(at.f.square())


def points(batch: int = 5, channels: int = 2) -> Tensor:
    return torch.randn(batch, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def turned(x: Tensor, angle: float) -> Tensor:
    c, s = torch.tensor(angle).double().cos(), torch.tensor(angle).double().sin()
    return torch.stack([c * x[:, 0] - s * x[:, 1], s * x[:, 0] + c * x[:, 1]], 1)


def test_output_at_the_end_and_at_chosen_times() -> None:
    model, x = NeuralODE(Turn(), t1=2.0, rtol=1e-9, atol=1e-10), points()
    torch.testing.assert_close(model(x), turned(x, 2.0), rtol=1e-7, atol=1e-7)
    ys = model(x, [0.0, 0.5, 3.0])
    assert ys.shape == (3, 5, 2)
    for y, t in zip(ys, (0.0, 0.5, 3.0), strict=True):
        torch.testing.assert_close(y, turned(x, t), rtol=1e-7, atol=1e-7)


def test_augmentation_appends_zeros_along_the_channels() -> None:
    model = NeuralODE(lambda t, z: torch.ones_like(z), augment=3, rtol=1e-6)
    y = model(torch.zeros(4, 2, 5, 6))
    assert y.shape == (4, 5, 5, 6)
    assert model.initial(torch.ones(4, 2, 5, 6))[:, 2:].abs().max() == 0
    torch.testing.assert_close(y, torch.ones_like(y))


def test_lift_and_readout() -> None:
    torch.manual_seed(0)
    lift, readout = nn.Linear(3, 2).double(), nn.Linear(2, 4).double()
    model, x = NeuralODE(Turn(), lift=lift, readout=readout, rtol=1e-9, atol=1e-10), points(channels=3)
    torch.testing.assert_close(model(x), readout(turned(lift(x), 1.0)), rtol=1e-6, atol=1e-7)
    assert model(x, [0.0, 0.3, 1.0]).shape == (3, 5, 4)


def test_a_convolutional_readout_gets_batches_of_images() -> None:
    model = NeuralODE(lambda t, z: -z, readout=nn.Conv2d(2, 1, 1))
    assert model(torch.zeros(3, 2, 4, 4), [0.0, 1.0]).shape == (2, 3, 1, 4, 4)


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct(), sn.Backsolve(), sn.Quadrature()])
def test_gradients_of_every_adjoint(adjoint: Any) -> None:
    x = points().requires_grad_()
    model = NeuralODE(Turn(0.7), adjoint=adjoint, rtol=1e-8, atol=1e-10)
    model(x).pow(3).sum().backward()
    exact = points().requires_grad_()
    omega = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    c, s = omega.cos(), omega.sin()
    torch.stack([c * exact[:, 0] - s * exact[:, 1], s * exact[:, 0] + c * exact[:, 1]], 1).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad, rtol=1e-5, atol=1e-6)
    assert isinstance(model.field, Turn)
    torch.testing.assert_close(model.field.omega.grad, omega.grad, rtol=1e-5, atol=1e-6)


def test_counts() -> None:
    model = NeuralODE(Turn(), rtol=1e-5, atol=1e-5)
    assert (model.nfe, model.backward_nfe, model.stats) == (0, 0, ())
    y = model(points())
    assert model.nfe == model.stats[0].nfe > 0
    assert model.backward_nfe == 0
    y.sum().backward()
    assert model.backward_nfe > 0
    assert copy.deepcopy(model).stats == ()
    assert pickle.loads(pickle.dumps(model)).nfe == 0


def test_costs_are_integrals_outside_error_control() -> None:
    x = points()
    plain = NeuralODE(Turn(2.0), rtol=1e-6, atol=1e-6)
    costly = NeuralODE(Turn(2.0), regularisers=[Speed()], rtol=1e-6, atol=1e-6)
    y, costs = costly(x, costs=True)
    assert torch.equal(y, plain(x))
    assert costly.nfe == plain.nfe
    # |f|² = ω²|z|² is constant along a rotation.
    torch.testing.assert_close(costs["speed"], 4.0 * x.square().mean(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sn.models.penalty(costly.regularisers, costs), 0.5 * costs["speed"].mean())
    assert torch.equal(costly(x), y)
    everything = NeuralODE(Turn(2.0), regularisers=[Speed()], rtol=1e-6, atol=1e-6, norm="mixed")
    everything(x, costs=True)
    fixed = NeuralODE(Turn(2.0), regularisers=[Speed()], solver="rk4", controller=sn.FixedStep(0.1))
    torch.testing.assert_close(fixed(x, costs=True)[1], costs, rtol=1e-3, atol=1e-4)


def test_costs_are_positive_in_both_directions_of_time() -> None:
    model = NeuralODE(Turn(2.0), regularisers=[Speed()], rtol=1e-6, atol=1e-6)
    _, forward = model(points(), ts=[0.0, 1.0], costs=True)
    _, backward = model(points(), ts=[1.0, 0.0], costs=True)
    torch.testing.assert_close(backward, forward, rtol=1e-4, atol=1e-6)


def test_norms_and_tolerances_for_the_state_also_work_with_costs() -> None:
    options: dict[str, Any] = {"norm": lambda z: z.abs().max(), "atol": torch.tensor([1e-3, 1e-6]).double()}
    model = NeuralODE(Turn(2.0), regularisers=[Speed()], **options)
    model(points())
    nfe = model.nfe
    model(points(), costs=True)
    assert model.nfe == nfe


def test_steer_samples_end_times_only_in_training() -> None:
    torch.manual_seed(0)
    model, x = NeuralODE(lambda t, z: torch.ones_like(z), steer=0.4, rtol=1e-6), torch.zeros(1, 1, dtype=torch.float64)
    ends = torch.cat([model(x).flatten() for _ in range(200)])
    assert bool((ends > 0.6).all())
    assert bool((ends < 1.4).all())
    assert float(ends.mean()) == pytest.approx(1.0, abs=4 * 0.4 / 3**0.5 / 200**0.5)
    assert float(ends.std()) == pytest.approx(0.4 / 3**0.5, rel=0.2)
    assert float(model.eval()(x)) == pytest.approx(1.0)


def test_steer_keeps_times_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    ts = torch.tensor([3.0, 2.0, 1.5, 0.0], dtype=torch.float64)
    for _ in range(100):
        moved = steer(ts, 0.24, generator)
        assert moved[0] == 3.0
        assert bool((moved.diff() < 0).all())
        assert float((moved - ts).abs().max()) <= 0.24
    assert torch.equal(steer(ts, 0.0), ts)
    with pytest.raises(ValueError, match=r"width: expected below 0\.25, .* found 0\.25"):
        steer(ts, 0.25)
    assert steer(torch.arange(3), 0.2).dtype == torch.float64
    with pytest.raises(ValueError, match="ts: expected shape"):
        steer([1.0], 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NeuralODE(Turn(), t1=0.0), "t1: expected a number above 0, found 0"),
        (lambda: NeuralODE(Turn(), t1=-1.0), "t1: expected a finite number of at least 0, found -1"),
        (lambda: NeuralODE(Turn(), augment=-1), "augment: expected a whole number of at least 0, found -1"),
        (lambda: NeuralODE(Turn(), augment=1, lift=nn.Linear(2, 2)), "augment, lift: expected at most one of them"),
        (lambda: NeuralODE(Turn(), steer=1.0), "steer: expected below t1 = 1, found 1"),
        (lambda: NeuralODE(None), r"field: expected a callable field\(t, z\), found NoneType"),  # type: ignore[arg-type]
        (lambda: NeuralODE(Turn(), regularisers=Speed()), "regularisers: expected a sequence"),  # type: ignore[arg-type]
        (lambda: NeuralODE(Turn(), regularisers=[Speed]), r"regularisers\[0\]: .* found the class Speed"),  # type: ignore[list-item]
        (lambda: NeuralODE(lambda t, z: z, readout=nn.Linear(4, 2))(torch.zeros(4)), "x: expected a batch"),
        (lambda: NeuralODE(Turn(), regularisers=[Speed(), Speed()]), "regularisers: expected distinct names"),
        (lambda: NeuralODE(Turn(), tol=1e-3), "NeuralODE: unknown option 'tol'; known: adjoint, atol"),  # type: ignore[call-arg]
        (
            lambda: NeuralODE(Turn(), lift=nn.Linear(3, 2))(torch.zeros(4, 5)),
            r"x: expected data of shape \(..., 3\), found \(4, 5\)",
        ),
        (lambda: NeuralODE(Turn(), augment=1)(torch.zeros(4)), r"x: expected shape \(batch, channels, ...\)"),
        (lambda: NeuralODE(Turn())(points(channels=3)), "expected shape"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_repr_shows_the_arguments() -> None:
    text = repr(NeuralODE(Turn(), augment=2, solver="tsit5", rtol=1e-3))
    assert "augment=2, t1=1, solver='tsit5', rtol=0.001" in text
