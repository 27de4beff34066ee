"""Three systems whose state jumps at events, and gradients through their events.

A ball bounces; the drag and the restitution of the ball are learned from the times of its bounces alone. Eight neurons
integrate their input, spike and lift each other. A drug is dosed whenever its level in the blood falls below a
threshold, and the dose is chosen by Newton's method so that the doses are eight hours apart. It takes less than a
minute on two cores.

    python examples/events.py [--image out/demo/events.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from drawing import BLUE, GREY, INK, ORANGE, STYLE, need, save
from torch import Tensor

import seminode as sn

GRAVITY = 9.81
NEURONS = 8


def ball(drag: Tensor, restitution: Tensor, ts: Tensor, bounces: int) -> sn.Solution[Tensor]:
    """A ball with quadratic drag that falls from a height of 2."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -GRAVITY - drag * y[1] * y[1].abs()])

    def bounce(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[0], -restitution * y[1]])

    touch = sn.Event(lambda t, y: y[0], direction=-1, reset=bounce, max_count=bounces)
    return sn.solve(field, torch.tensor([2.0, 0.0], dtype=torch.float64), ts, event=touch)


def learn_ball(ts: Tensor, bounces: int = 20) -> tuple[sn.Solution[Tensor], Tensor]:
    """Learn drag and restitution from the times of the bounces; the motion that was learned, and the true times."""
    truth = torch.tensor([0.03, 0.92], dtype=torch.float64)
    long = torch.tensor([0.0, 60.0], dtype=torch.float64)
    seen = ball(truth[0], truth[1], long, bounces).events[0].times
    raw = torch.tensor([-2.0, 1.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([raw], max_iter=40, line_search_fn="strong_wolfe")

    def guess() -> tuple[Tensor, Tensor]:
        return 0.1 * raw[0].sigmoid(), raw[1].sigmoid()  # the drag between 0 and 0.1, the restitution between 0 and 1

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (ball(*guess(), long, bounces).events[0].times - seen).square().mean()
        value.backward()
        return value

    optimiser.step(loss)
    with torch.no_grad():
        drag, restitution = guess()
        print(f"ball: drag {drag:.4f} and restitution {restitution:.4f} from the times of {bounces} bounces")
        return ball(drag, restitution, ts, bounces), seen


def neurons(ts: Tensor, coupling: float = 0.05) -> sn.Solution[Tensor]:
    """Leaky integrate-and-fire neurons v' = I − v. A spike resets its neuron and lifts all others towards 1."""
    current = torch.linspace(1.2, 2.2, NEURONS, dtype=torch.float64)

    def neuron(i: int) -> sn.Event:
        spiking = torch.arange(NEURONS) == i

        def spike(t: Tensor, v: Tensor) -> Tensor:
            return torch.where(spiking, torch.zeros_like(v), v + coupling * (1.0 - v))

        return sn.Event(lambda t, v: v[i] - 1.0, direction=1, reset=spike)

    start = torch.linspace(0.0, 0.9, NEURONS, dtype=torch.float64)
    return sn.solve(lambda t, v: current - v, start, ts, event=[neuron(i) for i in range(NEURONS)])


class Patient(NamedTuple):
    """The drug in gut and blood, in mg, over time in hours."""

    dose: float
    sol: sn.Solution[Tensor]


def patient(dose: Tensor, ts: Tensor) -> sn.Solution[Tensor]:
    """A dose enters the gut when less than 20 mg are in the blood."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([-0.9 * y[0], 0.9 * y[0] - 0.15 * y[1]])

    def dosed(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[0] + dose, y[1]])

    low = sn.Event(lambda t, y: y[1] - 20.0, direction=-1, reset=dosed)
    return sn.solve(field, torch.tensor([0.0, 40.0], dtype=torch.float64), ts, event=low)


def plan_doses(ts: Tensor, hours: float = 8.0) -> Patient:
    """The dose with which the last two doses are `hours` apart, by Newton's method with the gradient of event times."""
    dose = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    for _ in range(8):
        times = patient(dose, ts).events[0].times
        gap = times[-1] - times[-2]
        (slope,) = torch.autograd.grad(gap, dose)
        with torch.no_grad():
            dose -= (gap - hours) / slope
    with torch.no_grad():
        sol = patient(dose, ts)
        gap = float(sol.events[0].times[-1] - sol.events[0].times[-2])
        print(f"patient: doses of {float(dose):.2f} mg are {gap:.4f} h apart")
        return Patient(float(dose), sol)


def draw(path: Path, ball_ts: Tensor, spike_ts: Tensor, drug_ts: Tensor) -> None:
    import matplotlib.pyplot as plt

    bouncing, seen = learn_ball(ball_ts)
    spiking = neurons(spike_ts)
    treated = plan_doses(drug_ts)
    print(f"neurons: {spiking.stats.events} spikes; {spiking.stats}")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 1, figsize=(8.0, 7.6))
        axes[0].plot(bouncing.ts, bouncing.ys[:, 0], color=BLUE)
        axes[0].plot(seen, torch.zeros_like(seen), "o", color=ORANGE, clip_on=False, label="bounces that were seen")
        axes[0].set(title="A ball, learned from the times of its bounces", ylabel="height")
        axes[0].legend(loc="upper right")
        axes[1].plot(spiking.ts, spiking.ys, color=GREY, linewidth=0.7)
        axes[1].plot(spiking.ts, spiking.ys[:, -1], color=BLUE)
        for i, each in enumerate(spiking.events):
            axes[1].plot(each.times, torch.full_like(each.times, 1.08 + 0.05 * i), "|", color=INK, markersize=5)
        axes[1].set(title="Eight spiking neurons, and their spikes above", ylabel="potential")
        axes[2].plot(treated.sol.ts, treated.sol.ys[:, 1], color=BLUE, label="blood")
        axes[2].plot(treated.sol.ts, treated.sol.ys[:, 0], color=GREY, label="gut")
        axes[2].axhline(20.0, color=ORANGE, linestyle="--", label="threshold")
        axes[2].set(
            title=f"Doses of {treated.dose:.1f} mg, chosen to be 8 hours apart",
            xlabel="time",
            ylabel="drug (mg)",
        )
        axes[2].legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncol=3)
        figure.tight_layout()
        save(figure, path)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradients through events.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/events.png"))
    arguments = parser.parse_args()
    need("matplotlib")

    def grid(end: float, count: int) -> Tensor:
        return torch.linspace(0.0, end, count, dtype=torch.float64)

    draw(arguments.image, grid(12.0, 1201), grid(6.0, 1201), grid(48.0, 961))


if __name__ == "__main__":
    main()
