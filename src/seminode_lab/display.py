"""The display of a run: a bar on a terminal, plain lines elsewhere, and TensorBoard logs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

import seminode as sn

from .counting import evaluations
from .progress import Start, TrainingCallbacks
from .task import SPLITS

#: The folder of TensorBoard's files in a run folder.
LOGS = "tensorboard"
#: The number of latest batches that are averaged for display.
LATEST = 10
#: Seconds between two updates of the bar in an evaluation.
PAUSE = 0.1
#: Seconds without a plain line after which the current work is reported.
SILENCE = 10.0
Display = Literal["bar", "lines", "nothing"]
WAYS = ("forward", "backward")


class Costs(NamedTuple):
    """The cost of solves in one direction, forward or backward."""

    nfe: int
    accepted: int
    rejected: int

    @classmethod
    def of(cls, stats: Sequence[sn.Stats]) -> Costs:
        return cls(*(sum(getattr(each, name) for each in stats) for name in cls._fields))

    @property
    def share(self) -> float:
        """The proportion of rejected steps."""
        return share(self.accepted, self.rejected)


def share(accepted: int, rejected: int) -> float:
    return rejected / max(1, accepted + rejected)


def both_ways(stats: Sequence[sn.Stats]) -> dict[str, Costs]:
    back = [each.backward for each in stats if each.backward is not None]
    return dict(zip(WAYS, (Costs.of(stats), Costs.of(back)._replace(nfe=sum(map(evaluations, back)))), strict=True))


class Meter:
    """A short summary of the latest batches."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LATEST)
        self._costs: deque[dict[str, Costs]] = deque(maxlen=LATEST)

    def batch(self, loss: float, stats: Sequence[sn.Stats]) -> None:
        self._losses.append(loss)
        self._costs.append(both_ways(stats))

    def __str__(self) -> str:
        n = len(self._losses)
        if not n:
            return ""
        ways = [Costs(*map(sum, zip(*(each[way] for each in self._costs), strict=True))) for way in WAYS]
        nfe = "+".join(f"{each.nfe / n:.0f}" for each in ways)
        rejected = "+".join(f"{100 * each.share:.0f}" for each in ways)
        return f"loss {sum(self._losses) / n:.4g}, NFE {nfe}, {rejected} % rejected"


class Bar:
    """A bar over all batches of a run, with the latest loss, evaluations and rejected steps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._meter = Meter()
        self._bar: tqdm | None = None
        self._drawn = 0.0

    def progress(self) -> TrainingCallbacks:
        return TrainingCallbacks(self._load, self._begin, self._batch, self._look, end=self._end)

    def _load(self, description: str) -> None:
        print(description, file=sys.stderr, flush=True)

    def _begin(self, start: Start) -> None:
        total = None if start.batches is None else start.epochs * start.batches
        self._bar = tqdm(
            total=total, initial=start.iterations, desc=self._name, unit="batch", dynamic_ncols=True, file=sys.stderr
        )

    def _batch(self, epoch: int, batch: int, loss: float, stats: Sequence[sn.Stats]) -> None:
        assert self._bar is not None
        self._meter.batch(loss, stats)
        self._bar.set_postfix_str(f"epoch {epoch + 1}, {self._meter}", refresh=False)
        self._bar.update()

    def _look(self, split: str, batch: int) -> None:
        assert self._bar is not None
        now = time.monotonic()
        if now - self._drawn > PAUSE:
            self._drawn = now
            told = ", ".join(filter(None, (str(self._meter), f"evaluating {split} {batch + 1}")))
            self._bar.set_postfix_str(told, refresh=True)

    def _end(self, result: Mapping[str, Any]) -> None:
        assert self._bar is not None
        self._bar.set_postfix_str(str(self._meter), refresh=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Lines:
    """Plain lines on standard error, for logs and for terminals without a bar.

    There is a line at the start and one per epoch and per evaluation. A thread adds a line about the current work when
    `silence` seconds have passed without one.
    """

    def __init__(self, silence: float = SILENCE) -> None:
        self._silence = silence
        self._meter = Meter()
        self._epochs, self._batches = 0, ""
        self._work = ""
        self._began = self._printed = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._break_silence, daemon=True)

    def progress(self) -> TrainingCallbacks:
        calls = {"load": self._load, "begin": self._begin, "batch": self._batch, "look": self._look}
        return TrainingCallbacks(**calls, evaluated=self._evaluated, epoch=self._epoch)

    def _say(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def _break_silence(self) -> None:
        while not self._closed.wait(max(0.01, self._printed + self._silence - time.monotonic())):
            if time.monotonic() >= self._printed + self._silence:
                self._say(f"{self._work}, {time.monotonic() - self._began:.0f} s so far")

    def _load(self, description: str) -> None:
        self._work = "loading the data and building the model"
        self._say(description)
        self._began = self._printed
        self._thread.start()

    def _begin(self, start: Start) -> None:
        self._epochs = start.epochs
        self._batches = "" if start.batches is None else f" of {start.batches}"
        self._work = "preparing to train"
        if start.epoch:
            self._say(f"resuming after epoch {start.epoch} of {start.epochs}")

    def _batch(self, epoch: int, batch: int, loss: float, stats: Sequence[sn.Stats]) -> None:
        self._meter.batch(loss, stats)
        self._work = f"epoch {epoch + 1} of {self._epochs}, batch {batch + 1}{self._batches}: {self._meter}"

    def _look(self, split: str, batch: int) -> None:
        self._work = f"evaluating the {split} set, batch {batch + 1}"

    def _evaluated(self, evaluation: Mapping[str, Any]) -> None:
        told = [f"{split} {_standing(evaluation[split])}" for split in SPLITS if split in evaluation]
        self._say(f"epoch {evaluation['epoch'] + 1}, evaluated: {', '.join(told)}")

    def _epoch(self, epoch: int, lr: float, seconds: Mapping[str, float]) -> None:
        self._say(f"epoch {epoch + 1} of {self._epochs}: {self._meter}, {sum(seconds.values()):.1f} s")

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()


def _standing(numbers: Mapping[str, Any]) -> str:
    accuracy = f" ({100 * numbers['accuracy']:.1f} % correct)" if "accuracy" in numbers else ""
    return f"{numbers['loss']:.4g}{accuracy}"


class Board:
    """TensorBoard logs in the run folder. The step is the number of preceding training batches.

    A resumed run writes a new file, which makes TensorBoard discard the values after the checkpoint. All values are
    flushed at the end of an epoch, so that none before the checkpoint is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._step = 0

    def progress(self) -> TrainingCallbacks:
        return TrainingCallbacks(
            begin=self._begin, batch=self._batch, evaluated=self._evaluated, epoch=self._epoch, end=self._end
        )

    def _begin(self, start: Start) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            print(f"note: no TensorBoard logs ({error}); to get them: pip install 'seminode[lab]'", file=sys.stderr)
            return
        self._writer = SummaryWriter(str(self._folder / LOGS), purge_step=start.iterations)
        self._step = start.iterations - 1

    def _add(self, name: str, value: float) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, max(0, self._step))

    def _batch(self, epoch: int, batch: int, loss: float, stats: Sequence[sn.Stats]) -> None:
        self._step += 1
        self._add("loss/batch", loss)
        for way, costs in both_ways(stats).items():
            self._add(f"{way}_nfe/batch", costs.nfe)
            self._add(f"{way}_rejected/batch", costs.share)

    def _numbers(self, split: str, numbers: Mapping[str, Any]) -> None:
        for name in ("loss", "accuracy", "forward_nfe", "backward_nfe", "seconds"):
            if name in numbers:
                self._add(f"{name}/{split}", numbers[name])
        for way in WAYS:
            self._add(f"{way}_rejected/{split}", share(numbers[f"{way}_accepted"], numbers[f"{way}_rejected"]))

    def _evaluated(self, evaluation: Mapping[str, Any]) -> None:
        for split in SPLITS:
            if split in evaluation:
                self._numbers(split, evaluation[split])

    def _epoch(self, epoch: int, lr: float, seconds: Mapping[str, float]) -> None:
        self._add("lr", lr)
        for name, value in seconds.items():
            self._add(f"seconds/{name}", value)
        if self._writer is not None:
            self._writer.flush()

    def _end(self, result: Mapping[str, Any]) -> None:
        self._numbers("test", result["test"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def together(parts: Sequence[TrainingCallbacks]) -> TrainingCallbacks:
    """Callbacks that call several others in order."""

    def all_of(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            for each in calls:
                each(*args)

        return call

    return TrainingCallbacks(
        **{each.name: all_of([getattr(part, each.name) for part in parts]) for each in fields(TrainingCallbacks)}
    )


@contextlib.contextmanager
def showing(folder: Path, display: Display = "bar", tensorboard: bool = True) -> Iterator[TrainingCallbacks]:
    """The callbacks that display a run in this folder. Nothing is opened before the run starts.

    Arguments:
        folder: the run folder, which gets the TensorBoard logs.
        display: `"bar"` is a progress bar on a terminal and plain lines elsewhere, `"lines"` are always plain lines.
        tensorboard: whether to write TensorBoard logs.
    """
    parts: list[Bar | Lines | Board] = []
    if display != "nothing":
        parts.append(Bar(folder.name) if display == "bar" and sys.stderr.isatty() else Lines())
    if tensorboard:
        parts.append(Board(folder))
    try:
        yield together([part.progress() for part in parts])
    finally:
        for part in parts:
            part.close()
