"""Two typical programs that use torchcde: classification of regular and of irregular series by neural CDEs.

    python -m benchmarks.dropin_cde [--count 64] [--length 50] [--epochs 2]

Each is a function of the module torchcde, or of its drop-in `seminode.compat.torchcde`, and returns what can be
compared between them. The gradient error is that of the first training step, relative to torchcde in float64 with tight
tolerances and without the adjoint method.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Outcome(NamedTuple):
    """What a program has computed.

    Attributes:
        losses: of every training step.
        predictions: of the trained model, for all series.
        gradient: of the last training step, all parameters in one vector.
        evaluations: of the field, forward and backward.
    """

    losses: Tensor
    predictions: Tensor
    gradient: Tensor
    evaluations: int

    @property
    def values(self) -> list[Tensor]:
        """What is compared between libraries."""
        return [self.losses, self.predictions, self.gradient]


class Field(nn.Module):
    """The matrix F(z) of a neural CDE, with a counter of its evaluations."""

    def __init__(self, channels: int, hidden: int, width: int):
        super().__init__()
        self.shape = hidden, channels
        self.first = nn.Linear(hidden, width)
        self.last = nn.Linear(width, hidden * channels)
        self.evaluations = 0

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        self.evaluations += 1
        return self.last(self.first(z).relu()).tanh().unflatten(-1, self.shape)


class Classifier(nn.Module):
    """A neural CDE from the coefficients of a control to one logit per series."""

    def __init__(self, torchcde: Any, interpolation: str, channels: int, hidden: int, width: int, **options: Any):
        super().__init__()
        self.torchcde, self.interpolation, self.options = torchcde, interpolation, options
        self.initial = nn.Linear(channels, hidden)
        self.field = Field(channels, hidden, width)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, coeffs: Tensor) -> Tensor:
        X = getattr(self.torchcde, self.interpolation)(coeffs)
        z0 = self.initial(X.evaluate(X.interval[0]))
        options = dict(self.options)
        if self.interpolation == "LinearInterpolation":
            options.setdefault("options", {"jump_t": X.grid_points})
        if not options.get("adjoint", True):
            options.pop("adjoint_options", None)
        z = self.torchcde.cdeint(X=X, func=self.field, z0=z0, t=X.interval, **options)
        return self.readout(z[:, -1]).squeeze(-1)


def spirals(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy spirals (series, knots, 2) that turn to the left or to the right, their times and their labels."""
    labels = torch.arange(count) % 2
    start = 6.28 * torch.rand(count, 1, generator=generator)
    t = torch.linspace(0.0, 3.0, length)
    angle = start + (2.0 * labels.unsqueeze(-1) - 1.0) * t
    radius = torch.exp(-0.3 * t)
    x = torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
    return x + 0.02 * torch.randn(x.shape, generator=generator), t, labels.float()


def trained(model: Classifier, coeffs: Tensor, labels: Tensor, batch: int, epochs: int) -> Outcome:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(coeffs, labels), batch_size=batch)
    losses: list[Tensor] = []
    for _ in range(epochs):
        for batch_coeffs, batch_labels in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch_coeffs), batch_labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        predictions = model(coeffs).sigmoid()
    return Outcome(torch.stack(losses), predictions, gradient, model.field.evaluations)


def regular(
    torchcde: Any,
    epochs: int = 2,
    *,
    count: int = 64,
    length: int = 50,
    batch: int = 32,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Outcome:
    """Complete series at equal times: cubic Hermite splines, and the adjoint method with the default options."""
    generator = torch.Generator().manual_seed(0)
    x, t, labels = spirals(count, length, generator)
    x = torch.cat((t.expand(count, -1).unsqueeze(-1), x), -1)
    coeffs = torchcde.hermite_cubic_coefficients_with_backward_differences(x.to(dtype))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Classifier(torchcde, "CubicSpline", 3, 8, 32, **options).to(dtype)
    return trained(model, coeffs, labels.to(dtype), batch, epochs)


def irregular(
    torchcde: Any,
    epochs: int = 2,
    *,
    count: int = 64,
    length: int = 50,
    batch: int = 32,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Outcome:
    """Series of different lengths with missing values and the channels of time and of observation counts.

    Straight lines between the observations, steps that end on the knots, and the seminorm on the backward pass.
    """
    generator = torch.Generator().manual_seed(2)
    x, t, labels = spirals(count, length, generator)
    x[torch.rand(x.shape, generator=generator) < 0.3] = torch.nan
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    index = torch.arange(length)
    ended = index >= lengths.unsqueeze(-1)
    x[ended] = torch.nan
    observed = (~x.isnan()).float().cumsum(-2)
    clock = t[torch.minimum(index, lengths.unsqueeze(-1) - 1)]  # the last time is repeated after the end of a series
    data = torch.cat((clock.unsqueeze(-1), x, observed), -1)
    coeffs = torchcde.linear_interpolation_coeffs(torchcde.misc.forward_fill(data.to(dtype)))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        options = {"rtol": 1e-3, "atol": 1e-5, "adjoint_options": {"norm": "seminorm"}, **options}
        model = Classifier(torchcde, "LinearInterpolation", 5, 8, 32, **options).to(dtype)
    return trained(model, coeffs, labels.to(dtype), batch, epochs)


#: The programs by the names that tables show.
PROGRAMS: dict[str, Callable[..., Outcome]] = {
    "CDE classification, regular": regular,
    "CDE classification, irregular": irregular,
}


def gradient_error(program: Callable[..., Outcome], module: Any, reference: Outcome, **sizes: int) -> float:
    """The error of the gradient of the first training step, relative to its norm."""
    first = program(module, batch=sizes["count"], epochs=1, **sizes).gradient.double()
    return float((first - reference.gradient).norm() / reference.gradient.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64, help="number of series")
    parser.add_argument("--length", type=int, default=50, help="number of observations of a series")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    sizes = {"count": arguments.count, "length": arguments.length}

    import torchcde

    import seminode.compat.torchcde as dropin

    torch.set_num_threads(1)
    print(f"{'program':32}{'library':12}{'seconds':>9}{'evaluations':>13}{'final loss':>12}{'gradient error':>16}")
    for name, program in PROGRAMS.items():
        tight = {"adjoint": False, "rtol": 1e-9, "atol": 1e-11, "dtype": torch.float64}
        reference = program(torchcde, batch=arguments.count, epochs=1, **sizes, **tight)
        for library, module in (("torchcde", torchcde), ("drop-in", dropin)):
            error = gradient_error(program, module, reference, **sizes)
            start = time.perf_counter()
            outcome = program(module, epochs=arguments.epochs, **sizes)
            seconds = time.perf_counter() - start
            row = f"{seconds:9.2f}{outcome.evaluations:13d}{float(outcome.losses[-1]):12.4f}{error:16.1e}"
            print(f"{name:32}{library:12}{row}")


if __name__ == "__main__":
    main()
