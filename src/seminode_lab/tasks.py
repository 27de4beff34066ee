"""The tasks of the three experiments: a neural CDE, a flow on images, and a Symplectic ODE-Net."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from seminode.models import MultiscaleCNF, NeuralCDE, SymplecticODENet
from seminode.models.base import SolvingModule

from .data import SeriesSet
from .models import pendulum
from .peers import SolveLog
from .probing import block_evaluations
from .ranks import Ranks
from .task import Outcome, Task, Trial

#: A pendulum has settled if its cosines differ from -1 and 1 by at most this. Reports measure degrees.
UPRIGHT = 0.01

Solving = TypeVar("Solving", bound=SolvingModule)
Samples = TypeVar("Samples", SeriesSet, Tensor)


class ModelTask(Task[Solving], Generic[Solving, Samples]):
    """A task with data for each split, whose model records the statistics of its solves."""

    #: Processes that share every batch.
    ranks: Ranks = Ranks()
    #: The solves of another library, if the model does not solve itself.
    solves: SolveLog | None = None

    def __init__(self, model: Solving, data: Mapping[str, Samples], batch: int, device: torch.device | str = "cpu"):
        self.model = model.to(device)
        self.data = data
        self.batch = batch
        self.device = torch.device(device)

    def share(self, ranks: Ranks) -> None:
        """Work on the own part of every batch only."""
        for split in self.data:
            ranks.check(self.samples(split), self.batch, split)
        self.ranks = ranks

    def samples(self, split: str) -> int:
        return len(self.data[split])

    def batches(self, split: str, shuffle: bool) -> Iterator[tuple[Any, ...]]:
        """The split and the indices of the samples, for every batch. The last batch may be smaller."""
        count = self.samples(split)
        order = torch.randperm(count) if shuffle else torch.arange(count)
        return ((split, rows) for rows in order.split(self.batch))

    def count(self, split: str) -> int:
        return -(-self.samples(split) // self.batch)

    def outcome(self, batch: Any, record: bool) -> Outcome:
        self.model.options["record"] = record
        split, *drawn = batch
        rows, *drawn = map(self.ranks.own, drawn)
        loss, right = self.loss(split, rows, *drawn)
        if self.solves is not None:
            return Outcome(loss, len(rows), self.solves.taken(), (), right)
        return Outcome(loss, len(rows), self.model.stats, self.model.records, right)

    def prepare(self) -> None:
        """Compile the model with a pass over the first samples, whose gradient is discarded."""
        if self.model.options.get("compile"):
            self.outcome(("train", torch.arange(min(self.batch, self.samples("train")))), False).loss.backward()
            self.model.zero_grad()

    @abstractmethod
    def loss(self, split: str, rows: Tensor, *drawn: Tensor) -> tuple[Tensor, int]:
        """The loss of a batch and the number of correctly classified samples.

        `drawn` has the random numbers of the samples, if `batches` has drawn some.
        """


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """Series (batch, times, channels), each shifted by its own number of samples; the first or last sample is repeated.

    Example:
        >>> shifted(torch.arange(4.0).expand(2, 4)[..., None], torch.tensor([1, -2]))[..., 0].tolist()
        [[0.0, 0.0, 1.0, 2.0], [2.0, 3.0, 3.0, 3.0]]
    """
    times = x.shape[1]
    at = (torch.arange(times) - by[:, None]).clamp(0, times - 1)
    return x.gather(1, at[..., None].expand_as(x))


class SeriesTask(ModelTask[NeuralCDE, SeriesSet]):
    """Classify series by the final value of a neural CDE. The loss is the mean cross-entropy."""

    accuracy = True

    def __init__(
        self,
        model: NeuralCDE,
        data: Mapping[str, SeriesSet],
        batch: int,
        device: torch.device | str = "cpu",
        shifts: int = 0,
    ):
        super().__init__(model, data, batch, device)
        self.shifts = shifts  # samples by which series are shifted in training, at most, earlier or later

    def batches(self, split: str, shuffle: bool) -> Iterator[tuple[Any, ...]]:
        """The split, the indices and, in training with shifts, by how many samples each series is shifted."""
        for _, rows in super().batches(split, shuffle):
            moved = self.shifts and split == "train" and self.model.training
            by = (torch.randint(-self.shifts, self.shifts + 1, (len(rows),)),) if moved else ()
            yield (split, rows, *by)

    def loss(self, split: str, rows: Tensor, *drawn: Tensor) -> tuple[Tensor, int]:
        data = self.data[split]
        x, labels, lengths = data.x[rows], data.labels[rows].to(self.device), data.lengths[rows]
        if drawn:
            x = shifted(x, *drawn)
        x = x.to(self.device)
        # Series of equal length, such as those of the paper, need no mask.
        same = bool((lengths == x.shape[1]).all())
        logits = self.model(x, lengths=None if same else lengths.to(self.device))
        return functional.cross_entropy(logits, labels), int((logits.argmax(1) == labels).sum())


class FlowTask(ModelTask[MultiscaleCNF, Tensor]):
    """Model images with a flow. The loss is in bits per dimension, with new noise in every pass."""

    noisy = True

    def __init__(
        self,
        model: MultiscaleCNF,
        data: Mapping[str, Tensor],
        batch: int,
        flips: bool = False,
        device: torch.device | str = "cpu",
        probe_at: float | None = None,
    ):
        super().__init__(model, data, batch, device)
        self.flips = flips  # whether training images are flipped horizontally at random
        self.probe_at = probe_at  # tolerance of `probe`; `None` for none

    def loss(self, split: str, rows: Tensor, *drawn: Tensor) -> tuple[Tensor, int]:
        pixels = self.data[split][rows]
        if self.flips and split == "train" and self.model.training:
            turned = torch.rand(len(pixels)) < 0.5
            pixels = torch.where(turned[:, None, None, None], pixels.flip(-1), pixels)
        return self.model.bits_per_dim(pixels.to(self.device)).mean(), 0

    def probe(self) -> Mapping[str, Any] | None:
        if self.probe_at is None:
            return None
        return block_evaluations(self.model, self.data["test"][: self.batch].to(self.device), self.probe_at)


class PendulumTask(ModelTask[SymplecticODENet, Tensor]):
    """Predict windows of eight points from the first. The loss is the mean squared error over channels and times."""

    def __init__(
        self,
        model: SymplecticODENet,
        data: Mapping[str, Tensor],
        dt: float,
        batch: int,
        device: torch.device | str = "cpu",
    ):
        super().__init__(model, data, batch, device)
        points = data["train"].shape[1]
        self.ts = dt * torch.arange(points, dtype=torch.float64)

    def loss(self, split: str, rows: Tensor, *drawn: Tensor) -> tuple[Tensor, int]:
        windows = self.data[split][rows].to(self.device)
        found = self.model(windows[:, 0], self.ts)
        return functional.mse_loss(found, windows.transpose(0, 1)), 0

    def trial(self) -> Trial:
        """Swing up the true pendulum, with the published gains and with damping proportional to the learned mass.

        The published gains are not robust: mass, potential and actuation are determined only up to a common factor, and
        the effect of a damping gain of 1 depends on that factor.
        """
        controllers = {"published": self.model.control, "braked": partial(self.model.control, damping=self.brake())}
        arrays, numbers = {}, {}
        for name, controller in controllers.items():
            try:
                run = pendulum.simulate(lambda x, to=controller: to(x.to(self.device)))
            except ValueError:  # torques that are not finite
                numbers[name] = None
                continue
            off = (run.states[:, :2].cos() - torch.tensor([-1.0, 1.0])).abs()
            late = (off.amax(-1) > UPRIGHT).nonzero().flatten()
            settled = int(late[-1]) + 1 if len(late) else 0
            numbers[name] = {
                "off": off[-1].tolist(),
                "settled": float(run.ts[settled]) if settled < len(off) else None,
                "largest_torques": run.torques.abs().amax(0).tolist(),
            }
            arrays |= {f"{name}_states": run.states.numpy(), f"{name}_torques": run.torques.numpy()}
            arrays["ts"] = run.ts.numpy()
        return Trial("control", numbers, arrays)

    @torch.no_grad()
    def brake(self) -> float:
        """The learned M₁₁ of the hanging pendulum, which is used as damping gain."""
        hanging = torch.tensor([1.0, 1.0, 0.0, 0.0], device=self.device)
        return float(torch.linalg.inv(self.model.field.inverse_mass_matrix(hanging))[0, 0])
