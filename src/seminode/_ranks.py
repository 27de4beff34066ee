"""Decisions that several processes take together: numbers and flags reduced over a process group.

A solve on one rank of a group reads its decisions from `Ranks`, so that all ranks take the same ones. A solve that has
nothing to do with other processes has `ALONE`, which reduces nothing.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Set to 1 to compare the work of all ranks after every solve; a larger number is a limit for the wait, in seconds.
CHECK = "SEMINODE_CHECK_RANKS"
#: How long a rank waits for the others by default, in seconds.
PATIENCE = 60.0


class Alone:
    """One process by itself."""

    several = False

    def sums(self, values: Tensor) -> list[float]:
        """Sums over the ranks."""
        return values.double().tolist()

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest on any rank; a NaN counts as infinite."""
        return list(values)

    def all(self, *flags: bool) -> list[bool]:
        """Which flags are set on every rank."""
        return list(flags)

    def every(self, flag: bool) -> bool:
        """Whether a flag is set on every rank."""
        return flag

    def same(self, value: float, what: str) -> float:
        """A value that must be the same on every rank, to rounding."""
        return value


ALONE = Alone()


class Ranks(Alone):
    """The processes of a group; all of them must make the same calls in the same order.

    Arguments:
        group: a `torch.distributed.ProcessGroup`; `None` stands for the default one.
    """

    several = True

    def __init__(self, group: Any = None):
        distributed = _initialised("norm: distributed() reduces over the ranks of a process group")
        if distributed.get_rank(group) < 0:
            raise ValueError("norm: distributed() expects a group that this process belongs to, found one without it")
        self.group = group
        # NCCL has no communication between hosts.
        nccl = "nccl" in str(distributed.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def sums(self, values: Tensor) -> list[float]:
        return self._reduced(values.detach(), "SUM")

    def largest(self, values: Sequence[float]) -> list[float]:
        numbers = [math.inf if math.isnan(x) else x for x in values]  # a maximum may lose a NaN
        return self._reduced(torch.tensor(numbers, dtype=torch.float64), "MAX") if numbers else []

    def all(self, *flags: bool) -> list[bool]:
        return [x == 0.0 for x in self.largest([0.0 if flag else 1.0 for flag in flags])]

    def every(self, flag: bool) -> bool:
        return self.all(flag)[0]

    def same(self, value: float, what: str) -> float:
        high, low = self.largest([value, -value])
        low = -low
        if not high - low <= 1e-5 * max(abs(high), abs(low)) and (math.isfinite(high) or math.isfinite(low)):
            raise ValueError(
                f"{what}: with norms.distributed() expected the same value on all ranks, since they take the same "
                f"steps; found values from {low:.6g} to {high:.6g}. Reduce it over the ranks inside the function, or "
                "give every sample its own steps with batched=True, which needs no common norm"
            )
        return high

    def _reduced(self, values: Tensor, operation: str) -> list[float]:
        import torch.distributed as distributed

        reduced = values.to(self._device, torch.float64, copy=True)
        distributed.all_reduce(reduced, getattr(distributed.ReduceOp, operation), self.group)
        return reduced.tolist()


class RankCheck:
    """Compares what the ranks have done, over connections of its own: the field may communicate on the others."""

    def __init__(self, patience: float):
        import torch.distributed as distributed

        self._patience = patience
        self._group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience))

    def compare(self, what: str, counts: dict[str, int], ranks: Alone = ALONE) -> None:
        """Raise an error if a count of this rank is not that of all others, or of those it takes its steps with."""
        import torch.distributed as distributed

        own = torch.tensor(list(counts.values()))
        everyone = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        try:
            distributed.all_gather(everyone, own, self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{CHECK}: rank {distributed.get_rank()} has finished {what} with {_described(counts, own)}, but not "
                f"all other ranks have finished theirs within {self._patience:g} s. {_REMEDY}"
            ) from error
        members = range(len(everyone))
        if isinstance(ranks, Ranks) and ranks.group is not None:
            members = distributed.get_process_group_ranks(ranks.group)
        if any(not torch.equal(own, everyone[i]) for i in members):
            found = "; ".join(f"rank {i}: {_described(counts, everyone[i])}" for i in members)
            raise RuntimeError(f"{CHECK}: the ranks did not do the same in {what} ({found}). {_REMEDY}")


_REMEDY = (
    "If the field communicates, its collectives are paired wrongly from here on: pass norm=sn.norms.distributed(), so "
    "that all ranks take the same steps, and make the same solves on all ranks."
)

#: The check of this process, as soon as there is one: a new group is expensive, and all ranks must make it together.
_checks: dict[Any, RankCheck] = {}


def rank_check() -> RankCheck | None:
    """The check that compares the ranks, if the environment asks for it and there is a process group."""
    setting = os.environ.get(CHECK, "")
    if setting in ("", "0"):
        return None
    try:
        number = float(setting)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ValueError(f"{CHECK}: expected 0, 1 or a number of seconds, found {setting!r}")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    world = torch.distributed.group.WORLD
    if world not in _checks:
        _checks.clear()
        _checks[world] = RankCheck(PATIENCE if number == 1.0 else number)
    return _checks[world]


def _described(names: dict[str, int], values: Tensor) -> str:
    return ", ".join(f"{value} {name}" for name, value in zip(names, values.tolist(), strict=True))


def _initialised(what: str) -> Any:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            f"{what}, but torch.distributed is not initialised; call torch.distributed.init_process_group() first, or "
            "leave it out in a program of one process"
        )
    return torch.distributed
