"""Train a Symplectic ODE-Net on the double pendulum, use it to swing the pendulum up, and plot the motion.

The network learns mass matrix, potential and input matrix by regression on true accelerations, which a simulator
provides but an experiment does not. The papers train through solves instead, which needs only observations and takes
much longer. The test is that of the papers: solves predict windows of 0.35 s from their first points. The learned model
gives a controller, which inverts the potential and damps the motion. It swings the true pendulum up from hanging at
rest. It takes less than two minutes on two cores.

    python examples/pendulum.py [--image out/demo/pendulum.png] [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from drawing import need, save
from torch import Tensor
from torch.nn import functional

from seminode.models.symplectic import SymplecticODENet
from seminode_lab.figures.swing import Swing, swing_figure
from seminode_lab.models import pendulum

ITERATIONS, BATCH = 800, 64
TRIALS = 20  # trials per torque; three of them are test data
TOLERANCE = 1e-4
DAMPING_RATE = 1.0  # per second


@torch.no_grad()
def window_error(model: SymplecticODENet, windows: Tensor) -> float:
    """Mean squared error of predictions of windows (batch, times, 8) from their first points."""
    ts = pendulum.DT * torch.arange(windows.shape[1])
    return float(functional.mse_loss(model(windows[:, 0], ts), windows.transpose(0, 1)))


def learn(model: SymplecticODENet, seed: int) -> None:
    windows = pendulum.dataset(trials=TRIALS).test
    print(f"Mean squared error of the predictions of {len(windows)} windows of the data set by solves:")
    print(f"  untrained             {window_error(model, windows):.1e}", flush=True)
    start = time.perf_counter()
    pendulum.fit_accelerations(model.field, ITERATIONS, BATCH, seed=seed)
    seconds = time.perf_counter() - start
    print(f"  after the regression  {window_error(model, windows):.1e}", end="")
    print(f"   {ITERATIONS} iterations in {seconds:.0f} s; {model.nfe} evaluations per solve", flush=True)


def damping(model: SymplecticODENet) -> float:
    """DAMPING_RATE·M₁₁ at the hanging pendulum, because the learned mass is determined only up to a factor."""
    hanging = torch.tensor([1.0, 1.0, 0.0, 0.0])
    with torch.no_grad():
        return DAMPING_RATE * float(torch.linalg.inv(model.field.inverse_mass_matrix(hanging))[0, 0])


def report(title: str, run: pendulum.Run) -> None:
    errors = (run.states[:, :2].cos() - torch.tensor([-1.0, 1.0])).abs()
    unsettled = (errors.amax(-1) > 0.01).nonzero().flatten().tolist()
    first, second = errors[-1].tolist()
    print(f"{title}: |cos q1 + 1| = {first:.4f}, |cos q2 - 1| = {second:.4f} after {float(run.ts[-1]):.2f} s", end="; ")
    settled = unsettled[-1] + 1 if unsettled else 0
    print(f"both below 0.01 from {float(run.ts[settled]):.2f} s on" if settled < len(errors) else "not settled")
    print("  largest torques: {:.1f}, {:.1f}".format(*run.torques.abs().amax(0).tolist()))


def draw(run: pendulum.Run, path: Path) -> None:
    """Top: the pendulum at some times and the path of its tip. Below: angles, velocities and torques over time."""
    save(swing_figure(Swing(*(part.numpy() for part in run))), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the double pendulum and swing it up.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/pendulum.png"), help="file of the plot")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need("matplotlib", "scipy")
    torch.manual_seed(options.seed)

    model = SymplecticODENet(rtol=TOLERANCE, atol=TOLERANCE)
    learn(model, options.seed)
    print("\nClosed-loop control of the true pendulum, from hanging at rest:")
    report("published gains", pendulum.simulate(model.control))
    run = pendulum.simulate(partial(model.control, damping=damping(model)))
    report("mass-scaled damping", run)
    draw(run, options.image)
    print(f"Plot: {options.image}")


if __name__ == "__main__":
    main()
