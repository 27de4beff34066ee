"""Fill the gaps of irregular periodic series with a latent ODE, and draw samples of its posterior.

Every series has its own amplitude, frequency and phase, and is observed at a few random times of one half of the
interval and of the last quarter. The encoder runs backwards through the observations; samples of the posterior are
decoded at all times, also inside the gap and after the last observation. It takes about a minute on one core.

The noise of the model is larger than that of the data: it also has to cover the error of the encoder. With a smaller
one, the samples of the posterior would differ less than they should. At the end, the program prints how often the true
series lies between the samples.

    python examples/latent_ode.py [--image out/demo/latent_ode.png] [--iterations 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drawing import BLUE, GREY, ORANGE, STYLE, need, save
from torch import Tensor, nn

import seminode as sn
from seminode.models import ODERNN, GRUODECell, LatentField, LatentODE, kl_annealing

END, POINTS, NOISE = 4.0, 60, 0.05
LATENT, HIDDEN, WIDTH = 8, 40, 64
BATCH, LEARNING_RATE = 64, 0.01


class Series(NamedTuple):
    """Shared times (T,), the series without noise, the noisy ones, and what is observed of them, NaN elsewhere."""

    times: Tensor
    clean: Tensor
    noisy: Tensor
    seen: Tensor


def draw_series(n: int, times: Tensor, share: float = 0.5) -> Series:
    amplitude, frequency, phase = (
        0.6 + 0.8 * torch.rand(n, 1),
        0.25 + 0.25 * torch.rand(n, 1),
        2 * math.pi * torch.rand(n, 1),
    )
    clean = (amplitude * torch.sin(2 * math.pi * frequency * times + phase)).unsqueeze(-1)
    noisy = clean + NOISE * torch.randn_like(clean)
    outside_gap = (times < 0.4 * END) | (times > 0.7 * END)
    chosen = (torch.rand(n, len(times)) < share) & outside_gap & (times < 0.85 * END)
    return Series(times, clean, noisy, torch.where(chosen.unsqueeze(-1), noisy, torch.nan))


def make_model() -> LatentODE:
    """Fixed steps: the series are smooth, and all of the same length."""
    encoder = ODERNN(
        1, HIDDEN, 2 * LATENT, field=GRUODECell(HIDDEN), backward=True, packed=True, steps=1, exponential=True
    )
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.25), "adjoint": sn.Direct()}
    field = LatentField(LATENT, WIDTH)
    return LatentODE(1, LATENT, HIDDEN, field=field, encoder=encoder, noise_std=4 * NOISE, **options)


def train(model: LatentODE, times: Tensor, iterations: int) -> list[float]:
    """Maximise the bound for the whole noisy series, from what is seen of it."""
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=iterations)
    test = draw_series(200, times)
    print("iteration    bound      KL   error in the gap   seconds")
    bounds, begin = [], time.perf_counter()
    for i in range(1, iterations + 1):
        data = draw_series(BATCH, times, share=float(torch.empty(()).uniform_(0.25, 0.6)))
        bound = model.elbo(data.seen, times, target=data.noisy, kl_weight=kl_annealing(i, wait=0, rate=0.999))
        loss = -bound.value.mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        schedule.step()
        bounds.append(-loss.item())
        if i % max(1, iterations // 10) == 0:
            seconds = time.perf_counter() - begin
            cells = f"{i:>9} {bounds[-1]:>8.1f} {float(bound.kl.detach().mean()):>7.1f} {gap_error(model, test):>18.4f}"
            print(f"{cells} {seconds:>9.1f}", flush=True)
    return bounds


@torch.no_grad()
def gap_error(model: LatentODE, data: Series) -> float:
    """The root mean square error of the decoded posterior mean where no series was observed."""
    unseen = data.seen.isnan().all(0).squeeze(-1)
    difference = model(data.seen, data.times).transpose(0, 1) - data.clean
    return float(difference[:, unseen].square().mean().sqrt())


@torch.no_grad()
def coverage(model: LatentODE, data: Series) -> float:
    """How often the true series is between the 5 % and the 95 % quantile of 100 samples, where none was observed."""
    unseen = data.seen.isnan().all(0).squeeze(-1)
    samples = model(data.seen, data.times, samples=100).transpose(1, 2)[:, :, unseen]
    low, high = samples.quantile(0.05, 0), samples.quantile(0.95, 0)
    clean = data.clean[:, unseen]
    return float(((low < clean) & (clean < high)).float().mean())


@torch.no_grad()
def draw(model: LatentODE, times: Tensor, path: Path) -> None:
    import matplotlib.pyplot as plt

    data = draw_series(4, times, share=0.4)
    fine = torch.linspace(float(times[0]), 1.25 * END, 250)
    samples = model(data.seen, times, ts=fine, samples=30)[..., 0]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(10.0, 4.8), sharex=True, layout="constrained")
        for i, each in enumerate(axes.flat):
            each.axvspan(0.4 * END, 0.7 * END, color=GREY, alpha=0.15, linewidth=0)
            each.plot(fine, samples[:, :, i].T, color=BLUE, alpha=0.18, linewidth=0.9)
            each.plot(times, data.clean[i], color=GREY, linewidth=1.2, linestyle="--")
            each.plot(times, data.seen[i], "o", color=ORANGE, markersize=4)
            each.set(xlim=(0.0, 1.25 * END), ylim=(-2.0, 2.0))
        figure.suptitle("observations, the true series (dashed) and 30 samples of the posterior; the gap is shaded")
        save(figure, path, dpi=130)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill gaps of irregular series with a latent ODE.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/latent_ode.png"), help="file of the plot")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need("matplotlib")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # more threads do not help so small a network
    times = torch.cat((torch.zeros(1), END * torch.rand(POINTS - 1))).sort().values
    model = make_model()
    train(model, times, options.iterations)
    test = draw_series(200, times)
    print(f"{coverage(model, test):.0%} of the unseen values are between the 5 % and 95 % quantiles of the samples")
    draw(model, times, options.image)
    print(f"Plot: {options.image}")


if __name__ == "__main__":
    main()
