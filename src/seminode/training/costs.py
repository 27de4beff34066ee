"""Log what the solves of a training iteration cost: to a CSV file, TensorBoard, Weights & Biases or a function."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from .._field.checks import described
from ..models.base import SolvingModule

#: Receives the number of an iteration and its values by name.
Sink = Callable[[int, Mapping[str, float]], None]


def solve_costs(model: nn.Module) -> dict[str, float]:
    """What the solves of the latest forward and backward pass of a model cost, summed over all models inside it.

    A model that is called several times in one pass counts once, with its latest call.

    Arguments:
        model: a module that contains models of this library.

    Returns:
        `nfe`, `accepted` and `rejected` of the forward pass, and `backward_nfe`, `backward_accepted` and
        `backward_rejected` of the backward pass, 0 before there was one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from seminode.models import ConcatMLP, NeuralODE
        >>> from seminode.training import solve_costs
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 2), NeuralODE(ConcatMLP(2, (8,))), nn.Linear(2, 1))
        >>> model(torch.randn(4, 3)).sum().backward()
        >>> costs = solve_costs(model)
        >>> costs["nfe"] == model[1].nfe and costs["backward_nfe"] == model[1].backward_nfe > 0
        True
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model: expected a module, found {described(model)}")
    stats = [stats for module in dict.fromkeys(_outermost(model)) for stats in module.stats]
    backward = [each.backward for each in stats if each.backward is not None]
    costs: dict[str, float] = {}
    for prefix, several in (("", stats), ("backward_", backward)):
        for name in ("nfe", "accepted", "rejected"):
            costs[prefix + name] = sum(getattr(each, name) for each in several)
    return costs


def _outermost(module: nn.Module) -> Iterator[SolvingModule]:
    """The models inside a module that are not parts of other models, whose statistics include theirs."""
    if isinstance(module, SolvingModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


class CostLog:
    """Log the cost of every training iteration: evaluations, steps, seconds, and values of your own.

    Call `step()` after the backward pass of every iteration. `seconds` is the time since the previous call.

    Arguments:
        model: a module that contains models of this library.
        sinks: where to write: the path of a new CSV file; a TensorBoard `SummaryWriter`; a run of Weights & Biases, or
            any other object with a method `log(values, step=...)`; or a function `sink(step, values)`.
        prefix: in front of the names in TensorBoard and Weights & Biases.

    Example:
        >>> import torch
        >>> from seminode.models import ConcatMLP, NeuralODE
        >>> from seminode.training import CostLog
        >>> model = NeuralODE(ConcatMLP(2, (8,)))
        >>> rows = []
        >>> with CostLog(model, lambda step, values: rows.append(values)) as log:
        ...     for _ in range(2):
        ...         loss = model(torch.randn(4, 2)).square().mean()
        ...         loss.backward()
        ...         _ = log.step(loss=loss.item())
        >>> list(rows[0])
        ['nfe', 'accepted', 'rejected', 'backward_nfe', 'backward_accepted', 'backward_rejected', 'seconds', 'loss']
    """

    def __init__(self, model: nn.Module, *sinks: Any, prefix: str = "solve/"):
        solve_costs(model)  # raises an error if it is no module
        self._model = model
        self._sinks: list[Sink] = []
        try:
            for i, each in enumerate(sinks):
                self._sinks.append(_sink(i, each, prefix))
        except BaseException:
            self._discard()  # the files of the sinks before: a second attempt would find that they exist
            raise
        self._count = 0
        self._time = time.perf_counter()

    def step(self, number: int | None = None, **values: float) -> dict[str, float]:
        """Log one iteration with further values, and return all of them.

        Arguments:
            number: of the iteration; by default they are counted from 0.
            values: further numbers, such as `loss=loss.item()`.
        """
        now = time.perf_counter()
        row = {**solve_costs(self._model), "seconds": now - self._time}
        clash = sorted({"step", *row} & set(values))
        if clash:
            raise ValueError(f"{clash[0]}: expected another name, since the log has a column {clash[0]!r}")
        row.update({name: float(value) for name, value in values.items()})
        count = self._count if number is None else number
        for sink in self._sinks:
            sink(count, row)
        self._count, self._time = count + 1, now
        return row

    def close(self) -> None:
        """Close the CSV files; writers that were passed in stay open."""
        for sink in self._sinks:
            if isinstance(sink, CsvSink):
                sink.close()

    def _discard(self) -> None:
        for sink in self._sinks:
            if isinstance(sink, CsvSink):
                sink.close()
                sink.path.unlink()

    def __enter__(self) -> CostLog:
        self._time = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CsvSink:
    """One line per iteration; the columns are those of the first line. Lines are written at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("x", newline="", encoding="utf-8")
        self._columns: tuple[str, ...] | None = None
        self._writer = csv.writer(self._file)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if self._columns is None:
            self._columns = tuple(values)
            self._writer.writerow(("step", *self._columns))
        if tuple(values) != self._columns:
            raise ValueError(f"values: expected the columns {list(self._columns)} of the file, found {list(values)}")
        self._writer.writerow((step, *values.values()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _sink(i: int, sink: Any, prefix: str) -> Sink:
    if isinstance(sink, str | os.PathLike):
        path = Path(cast("str", sink))
        if path.exists():
            raise FileExistsError(f"sinks[{i}]: expected the path of a new file, found {path}, which exists")
        return CsvSink(path)
    if callable(getattr(sink, "add_scalar", None)):
        return lambda step, values: _add_scalars(sink, prefix, step, values)
    if callable(getattr(sink, "log", None)):
        return lambda step, values: sink.log({prefix + name: value for name, value in values.items()}, step=step)
    if callable(sink):
        return cast("Sink", sink)
    raise TypeError(
        f"sinks[{i}]: expected a path, a SummaryWriter, a run of Weights & Biases or a function, found "
        f"{described(sink)}"
    )


def _add_scalars(writer: Any, prefix: str, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        writer.add_scalar(prefix + name, value, step)
