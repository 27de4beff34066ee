"""Train a neural ODE with Lightning, and log the cost of its solves to a CSV file.

Points of two classes, one ring around the other, cannot be separated by a flow of the plane, whose trajectories cannot
cross; with two more channels they can. The callback of `seminode.training` writes evaluations, steps and seconds of
every batch. Needs Lightning: `pip install "seminode[lightning]"`.

    python examples/lightning_rings.py [--epochs 8] [--folder out/demo/lightning]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything  # pyright: ignore[reportMissingImports]
from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from seminode.models import ConcatMLP, NeuralODE
from seminode.training import lightning_callback


def rings(n: int) -> TensorDataset:
    """Points on two noisy circles around the origin, and which circle each belongs to."""
    labels = torch.randint(2, (n,))
    angles = 2.0 * torch.pi * torch.rand(n)
    radii = 0.5 + labels + 0.1 * torch.randn(n)
    return TensorDataset(radii.unsqueeze(-1) * torch.stack((angles.cos(), angles.sin()), -1), labels)


class Classifier(LightningModule):
    """A neural ODE with two additional channels and a linear readout."""

    def __init__(self, width: int = 32):
        super().__init__()
        field = ConcatMLP(4, (width,))
        self.model = NeuralODE(field, augment=2, readout=nn.Linear(4, 2), rtol=1e-3, atol=1e-4)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, labels = batch
        loss = functional.cross_entropy(self.model(x), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, labels = batch
        self.log("accuracy", (self.model(x).argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def train(epochs: int, folder: Path, samples: int = 1_000) -> float:
    """Train, and return the accuracy on new points."""
    seed_everything(0, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    costs = folder / "costs.csv"
    costs.unlink(missing_ok=True)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[lightning_callback(costs)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(
        module, DataLoader(rings(samples), batch_size=100, shuffle=True), DataLoader(rings(400), batch_size=400)
    )
    return float(trainer.callback_metrics["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a neural ODE with Lightning.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("out/demo/lightning"))
    options = parser.parse_args()
    print(f"accuracy {train(options.epochs, options.folder):.3f}")
    lines = (options.folder / "costs.csv").read_text(encoding="utf-8").splitlines()
    print(lines[0], lines[1], lines[-1], sep="\n")


if __name__ == "__main__":
    main()
