"""Several processes that train one model: each works on its part of every batch.

Their gradients are added, as `DistributedDataParallel` averages them. Averages would be wrong here if a batch cannot be
divided evenly, and would give the backward solves cotangents of another scale than those of one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """The number of this process and that of all processes. The default is one process, which communicates with none.

    Example:
        >>> Ranks(1, 2).own(torch.arange(5)).tolist()
        [3, 4]
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and displays what all have computed."""
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """The part of this process. Parts differ in length by one at most."""
        return rows.tensor_split(self.size)[self.rank]

    def check(self, samples: int, batch: int, split: str) -> None:
        """Raise an error if a process would have no sample of some batch: it would wait for the others in vain."""
        smallest = min(batch, samples % batch or batch)
        if smallest < self.size:
            raise ValueError(
                f"nproc: expected at most {smallest}, the number of samples in the smallest batch of {split}, found "
                f"{self.size}"
            )

    def sums(self, *values: float) -> tuple[float, ...]:
        """The sums of numbers over all processes."""
        if self.size == 1:
            return values
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, group=_on_hosts())
        return tuple(found.tolist())

    def add_gradients(self, model: nn.Module) -> None:
        """Replace the gradients of parameters by their sums over all processes."""
        if self.size == 1:
            return
        for x in model.parameters():
            if x.requires_grad:
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
                dist.all_reduce(x.grad)

    def meet(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier(group=_on_hosts())


def _on_hosts() -> dist.ProcessGroup | None:
    """A group for numbers in main memory, if the main group is one of GPUs."""
    global _HOSTS
    if dist.get_backend() == "gloo":
        return None
    if _HOSTS is None:
        _HOSTS = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    return _HOSTS


_HOSTS: dist.ProcessGroup | None = None


def launched() -> bool:
    """Whether `torchrun`, or `seminode run --nproc`, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that `torchrun` has started, or this one alone."""
    if not launched():
        yield Ranks()
        return
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """The device of this process: if it is one of several, the GPU with its number."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and launched() else device
