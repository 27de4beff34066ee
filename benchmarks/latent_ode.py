"""The toy problem of latent ODEs, trained through seminode and through torchdiffeq: test error and seconds.

    python -m benchmarks.latent_ode [--epochs 30] [--series 1000] [--observed 0.3] [--json results.json]

1,000 series x(t) = a·sin(ωt + φ) with random frequency and phase are observed at 100 irregular times, which all series
share; each series sees a random 30 % of them, with noise (Rubanova, Chen and Duvenaud, NeurIPS 2019). A fifth of the
series is for testing. The error is the mean square difference between the decoded posterior mean and the noisy series,
at all 100 times.

Both models have the same modules, the same initial parameters, batches, optimiser and tolerances. The contender is
written as in the publication: the encoder visits all 100 times backwards, with one Euler step of torchdiffeq between
two of them, and updates the series that are observed there; dopri5 solves the decoder, and autograd goes through its
steps. In seminode, the encoder of a series visits only its own observations, with one step of the exponential Euler
method between two of them.

The two trainings take turns, one epoch at a time, on one thread. Seconds are those of the processor, without the test
error, so that other programs on the machine affect both alike and as little as possible.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import seminode as sn
from seminode.models import ODERNN, GRUODECell, LatentField, LatentODE, kl_annealing

from .adjoints import aligned

LATENT, HIDDEN, WIDTH, NOISE = 10, 20, 50, 0.1
RTOL, ATOL = 1e-3, 1e-4
BATCH, LEARNING_RATE = 50, 0.01


class Toy(NamedTuple):
    """Times (T,), noisy series (N, T, 1), and what a model sees of them, NaN elsewhere."""

    times: Tensor
    series: Tensor
    seen: Tensor

    def split(self) -> tuple[Toy, Toy]:
        cut = len(self.series) * 4 // 5
        train = Toy(self.times, self.series[:cut], self.seen[:cut])
        return train, Toy(self.times, self.series[cut:], self.seen[cut:])


def toy(series: int, points: int = 100, observed: float = 0.3, seed: int = 0) -> Toy:
    generator = torch.Generator().manual_seed(seed)
    times = torch.cat((torch.zeros(1), 5.0 * torch.rand(points - 1, generator=generator))).sort().values
    frequency = 0.5 + 0.5 * torch.rand(series, 1, generator=generator)
    phase = 2.0 * math.pi * torch.rand(series, 1, generator=generator)
    clean = torch.sin(2.0 * math.pi * frequency * times / 2.0 + phase)
    noisy = (clean + 0.05 * torch.randn(series, points, generator=generator)).unsqueeze(-1)
    chosen = torch.rand(series, points, 1, generator=generator) < observed
    return Toy(times, noisy, torch.where(chosen, noisy, torch.nan))


def build() -> LatentODE:
    encoder = ODERNN(
        1, HIDDEN, 2 * LATENT, field=GRUODECell(HIDDEN), backward=True, packed=True, steps=1, exponential=True
    )
    options: dict[str, Any] = {"rtol": RTOL, "atol": ATOL, "adjoint": sn.Direct()}
    return LatentODE(1, LATENT, HIDDEN, field=LatentField(LATENT, WIDTH), encoder=encoder, noise_std=NOISE, **options)


class Contender(nn.Module):
    """The modules of a `LatentODE`, solved by torchdiffeq."""

    def __init__(self, model: LatentODE):
        super().__init__()
        encoder = model.encoder
        assert isinstance(encoder, ODERNN)
        self.encoder_field, self.cell, self.to_posterior = encoder.field, encoder.cell, encoder.readout
        self.field, self.decoder = model.field, model.decoder

    def posterior(self, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        from torchdiffeq import odeint

        observed = ~x.isnan()
        inputs = torch.cat((x.nan_to_num(), observed.to(x.dtype)), -1)
        h = x.new_zeros(len(x), HIDDEN)
        for k in range(len(times) - 1, -1, -1):
            if k < len(times) - 1:
                ends: Any = odeint(self.encoder_field, h, times[[k + 1, k]], method="euler")
                h = ends[-1]
            h = torch.where(observed[:, k], self.cell(inputs[:, k], h), h)
        mean, width = self.to_posterior(h).chunk(2, -1)  # type: ignore[misc]
        return mean, functional.softplus(width) + 1e-4

    def decoded(self, z0: Tensor, times: Tensor) -> Tensor:
        from torchdiffeq import odeint

        zs: Any = odeint(self.field, z0, times, rtol=RTOL, atol=ATOL, method="dopri5")
        return self.decoder(zs)

    def loss(self, x: Tensor, times: Tensor, kl_weight: float) -> Tensor:
        mean, std = self.posterior(x, times)
        residual = self.decoded(mean + std * torch.randn_like(mean), times).transpose(0, 1) - x.nan_to_num()
        constant = math.log(NOISE) + 0.5 * math.log(2.0 * math.pi)
        density = torch.where(x.isnan(), 0.0, -0.5 * (residual / NOISE).square() - constant)
        kl = 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).sum(-1)
        return (kl_weight * kl - density.sum((1, 2))).mean()

    def predict(self, x: Tensor, times: Tensor) -> Tensor:
        return self.decoded(self.posterior(x, times)[0], times)


class Ours(nn.Module):
    def __init__(self, model: LatentODE):
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, times: Tensor, kl_weight: float) -> Tensor:
        return -self.model.elbo(x, times, kl_weight=kl_weight).value.mean()

    def predict(self, x: Tensor, times: Tensor) -> Tensor:
        return self.model(x, times)


@dataclass(frozen=True)
class Result:
    """Test error after training, and seconds of the whole training and of its first epoch."""

    library: str
    error: float
    seconds: float
    first_epoch: float


class Training:
    """One of the two trainings, with random numbers of its own, so that it may be interrupted by the other."""

    def __init__(self, library: str, model: Ours | Contender, data: Toy, epochs: int, seed: int):
        self.library, self.model, self.data = library, model, data
        self.optimiser = torch.optim.Adamax(model.parameters(), lr=LEARNING_RATE, foreach=True)
        steps = epochs * math.ceil(len(data.series) / BATCH)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, steps)
        self.random = torch.Generator().manual_seed(seed).get_state()
        self.step = 0
        self.seconds: list[float] = []

    def epoch(self) -> None:
        torch.set_rng_state(self.random)
        began = time.process_time()
        for rows in torch.randperm(len(self.data.series)).split(BATCH):
            loss = self.model.loss(self.data.seen[rows], self.data.times, kl_annealing(self.step))
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
            self.optimiser.step()
            self.schedule.step()
            self.step += 1
        self.seconds.append(time.process_time() - began)
        self.random = torch.get_rng_state()

    def result(self, test: Toy) -> Result:
        return Result(self.library, error(self.model, test), sum(self.seconds), self.seconds[0])


@torch.no_grad()
def error(model: Ours | Contender, test: Toy) -> float:
    return float((model.predict(test.seen, test.times).transpose(0, 1) - test.series).square().mean())


def study(epochs: int, series: int, observed: float, seed: int) -> list[Result]:
    data, test = toy(series, observed=observed, seed=seed).split()
    trainings = []
    for library in ("seminode", "torchdiffeq"):
        torch.manual_seed(seed)
        model = build()
        wrapped = Ours(model) if library == "seminode" else Contender(model)
        trainings.append(Training(library, wrapped, data, epochs, seed))
    for epoch in range(epochs):
        for each in trainings:
            each.epoch()
            spent = f"{each.seconds[-1]:.2f} s, test error {error(each.model, test):.4f}"
            print(f"{each.library}: epoch {epoch + 1}, {spent}", flush=True)
    return [each.result(test) for each in trainings]


def report(results: Sequence[Result]) -> str:
    rows = [("library", "test MSE", "seconds", "first epoch")]
    rows += [(r.library, f"{r.error:.4f}", f"{r.seconds:.1f}", f"{r.first_epoch:.1f}") for r in results]
    ours, theirs = results
    ratios = f"test MSE × {ours.error / theirs.error:.2f}, seconds × {ours.seconds / theirs.seconds:.2f}"
    return "\n".join([*aligned(rows), f"seminode/torchdiffeq: {ratios}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--series", type=int, default=1_000)
    parser.add_argument("--observed", type=float, default=0.3, help="fraction of the times at which a series is seen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = study(options.epochs, options.series, options.observed, options.seed)
    print(report(results))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
