"""Identify nine speakers by the vowel /ae/ with a neural CDE, on series of 7 to 29 points in one batch.

The Japanese Vowels data are part of the package. A piecewise linear path through each series drives the equation;
padding after the end of a series is ignored. The plot shows the output over time, not only at the end of a series. It
takes about a minute on one core.

    python examples/vowels.py [--image out/demo/vowels.png] [--iterations 140] [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from drawing import INK, STYLE, need, save
from torch import Tensor, nn
from torch.nn import functional

from seminode.models import MatrixField, NeuralCDE
from seminode_lab.data import SeriesSet, japanese_vowels

BATCH, LEARNING_RATE, DECAY, NOISE = 64, 1e-2, 0.05, 0.05
SPEAKERS = ["#17607c", "#e4572e", "#f2a541", "#6a994e", "#8e5ea2", "#3cb4c9", "#b56576", "#4d5a66", "#c9b79c"]


def build() -> NeuralCDE:
    field = MatrixField(hidden=32, channels=13, width=48, layers=2)  # 12 coefficients and the time
    return NeuralCDE(channels=12, hidden=32, outputs=9, field=field, path="linear", rtol=1e-2, atol=1e-3)


def cut(data: SeriesSet, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The series of some rows, cut to the longest of them, and their lengths."""
    lengths = data.lengths[rows]
    return data.x[rows, : int(lengths.max())], lengths


def train(model: NeuralCDE, data: SeriesSet, test: SeriesSet, iterations: int) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=iterations)
    print("iteration     loss   test accuracy   nfe   backward nfe   seconds")
    losses, begin = [], time.perf_counter()
    for i in range(1, iterations + 1):
        rows = torch.randperm(len(data))[:BATCH]
        x, lengths = cut(data, rows)
        scores = model(x + NOISE * torch.randn_like(x), lengths=lengths)
        loss = functional.cross_entropy(scores, data.labels[rows])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if i % 20 == 0 or i == iterations:
            counts = f"{model.nfe:>5} {model.backward_nfe:>14}"
            accuracy = float((predict(model, test) == test.labels).double().mean())
            seconds = time.perf_counter() - begin
            print(f"{i:>9} {losses[-1]:>8.4f} {accuracy:>15.1%} {counts} {seconds:>9.1f}", flush=True)
    return losses


@torch.no_grad()
def predict(model: NeuralCDE, data: SeriesSet) -> Tensor:
    return model(data.x, lengths=data.lengths).argmax(-1)


@torch.no_grad()
def hidden_states(model: NeuralCDE, data: SeriesSet) -> Tensor:
    """z at the end of every series, projected on the two directions along which the class means vary most."""
    readout, model.readout = model.readout, None
    try:
        z = model(data.x, lengths=data.lengths)
    finally:
        model.readout = readout
    means = torch.stack([z[data.labels == k].mean(0) for k in range(data.classes)])
    directions = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:2]
    return (z - means.mean(0)) @ directions.T


def draw(model: NeuralCDE, test: SeriesSet, losses: list[float], path: Path) -> None:
    """Utterances with the probability of each speaker over time, hidden states, training loss, confusion matrix."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(11.0, 6.2), layout="constrained")
        grid = figure.add_gridspec(3, 4, width_ratios=(1.0, 1.0, 1.0, 1.15), height_ratios=(1.0, 0.9, 0.9))
        longest = [int(rows[test.lengths[rows].argmax()]) for rows in speakers(test)]
        for column, row in enumerate((longest[0], longest[3], longest[7])):
            draw_series(figure.add_subplot(grid[0, column]), test, row, column == 0)
            draw_probabilities(figure.add_subplot(grid[1, column]), model, test, row, column == 0)
        draw_states(figure.add_subplot(grid[:2, 3]), model, test)
        draw_loss(figure.add_subplot(grid[2, :2]), losses)
        draw_confusion(figure.add_subplot(grid[2, 2:]), model, test)
        save(figure, path, dpi=140)
        plt.close(figure)


def speakers(data: SeriesSet) -> list[Tensor]:
    return [(data.labels == k).nonzero().flatten() for k in range(data.classes)]


def draw_series(axes: Any, data: SeriesSet, row: int, first: bool) -> None:
    n = int(data.lengths[row])
    axes.imshow(data.x[row, :n].T, aspect="auto", cmap="RdBu_r", vmin=-3, vmax=3, extent=(0, n - 1, 11.5, -0.5))
    axes.set_title(f"speaker {int(data.labels[row]) + 1} says /ae/")
    axes.set(yticks=(0, 11), yticklabels=("1", "12"), xlim=(0, n - 1))
    axes.tick_params(labelbottom=False)
    if first:
        axes.set_ylabel("coefficient")


@torch.no_grad()
def draw_probabilities(axes: Any, model: NeuralCDE, data: SeriesSet, row: int, first: bool) -> None:
    n = int(data.lengths[row])
    ts = torch.linspace(0.0, n - 1.0, 200)
    probabilities = model(data.x[row : row + 1, :n], ts=ts)[:, 0].softmax(-1)
    axes.stackplot(ts.numpy(), probabilities.T.numpy(), colors=SPEAKERS, linewidth=0)
    axes.set(xlim=(0, n - 1), ylim=(0, 1), xlabel="t", yticks=(0, 1))
    if first:
        axes.set_ylabel("probability of\neach speaker")


def draw_states(axes: Any, model: NeuralCDE, data: SeriesSet) -> None:
    z = hidden_states(model, data)
    for k, rows in enumerate(speakers(data)):
        axes.plot(*z[rows].T.numpy(), "o", color=SPEAKERS[k], markersize=3.5, alpha=0.75, markeredgewidth=0)
        x, y = z[rows].median(0).values.tolist()
        axes.text(x, y, str(k + 1), color="white", fontsize=9, weight="bold", ha="center", va="center",
                  bbox={"boxstyle": "circle,pad=0.25", "color": SPEAKERS[k]})  # fmt: skip
    axes.set(xticks=(), yticks=())
    axes.set_title("test series: hidden state at the end")


def draw_loss(axes: Any, losses: list[float]) -> None:
    axes.semilogy(range(1, len(losses) + 1), losses, color=SPEAKERS[0], linewidth=1.2)
    axes.set(xlabel="iteration", xlim=(1, len(losses)))
    axes.set_title("training loss")


def draw_confusion(axes: Any, model: NeuralCDE, data: SeriesSet) -> None:
    predicted = predict(model, data)
    table = torch.zeros(data.classes, data.classes)
    for k, rows in enumerate(speakers(data)):
        table[k] = predicted[rows].bincount(minlength=data.classes) / len(rows)
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for i in range(data.classes):
        for j in range(data.classes):
            if table[i, j] > 0:
                colour = "white" if table[i, j] > 0.6 else INK
                axes.text(j, i, f"{100 * table[i, j]:.0f}", color=colour, fontsize=7, ha="center", va="center")
    numbers = [str(k + 1) for k in range(data.classes)]
    axes.set(xticks=range(9), xticklabels=numbers, yticks=range(9), yticklabels=numbers)
    axes.set(xlabel="predicted speaker", ylabel="speaker")
    axes.set_title(f"test accuracy {float((predicted == data.labels).double().mean()):.1%} (rows in %)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify series of different lengths with a neural CDE.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/vowels.png"), help="file of the plot")
    parser.add_argument("--iterations", type=int, default=140)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need("matplotlib")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # more threads do not help so small a network

    data, test = japanese_vowels()
    statistics = data.statistics()
    data, test = data.normalised(*statistics), test.normalised(*statistics)
    model = build()
    losses = train(model, data, test, options.iterations)
    draw(model, test, losses, options.image)
    print(f"Plot: {options.image}")


if __name__ == "__main__":
    main()
