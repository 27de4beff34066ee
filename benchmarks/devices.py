"""Moves a task of the race to another device: its modules, and the tensors that its functions have closed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .problems import GradientProblem
from .tasks import Task


class Mover:
    """Replaces tensors by copies on a device. A tensor that is met again becomes the same copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen: dict[int, Any] = {}

    def tensor(self, x: Tensor) -> Tensor:
        if id(x) not in self.copies:
            # MPS has no float64, which only times have.
            dtype = torch.float32 if self.device.type == "mps" and x.dtype == torch.float64 else x.dtype
            self.copies[id(x)] = x, x.to(self.device, dtype)
        return self.copies[id(x)][1]

    def value(self, x: Any) -> Any:
        """The same value on the device. Modules and functions are changed in place."""
        if isinstance(x, Tensor):
            return self.tensor(x)
        if isinstance(x, nn.Module):
            return self.module(x)
        if isinstance(x, FunctionType):
            self.function(x)
        elif isinstance(x, partial):
            self.value(x.func)
        elif isinstance(x, GradientProblem):
            return dataclasses.replace(x, **{each.name: self.value(getattr(x, each.name)) for each in fields_of(x)})
        elif isinstance(x, (list, tuple)) and type(x) in (list, tuple):
            return type(x)(self.value(each) for each in x)
        elif isinstance(x, dict):
            return {key: self.value(each) for key, each in x.items()}
        return x

    def module(self, x: nn.Module) -> nn.Module:
        if self.device.type == "mps":
            for buffer in x.buffers():
                buffer.data = buffer.data.float() if buffer.dtype == torch.float64 else buffer.data
        return x.to(self.device)

    def function(self, function: FunctionType) -> None:
        if id(function) in self.seen:
            return
        self.seen[id(function)] = function
        for cell in function.__closure__ or ():
            cell.cell_contents = self.value(cell.cell_contents)


def fields_of(x: GradientProblem) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(x)


def moved(task: Task, device: torch.device) -> Task:
    """The task on the device. The given one must not be used any more, since its functions are changed."""
    mover = Mover(device)
    changed = {each.name: mover.value(getattr(task, each.name)) for each in dataclasses.fields(task)}
    return dataclasses.replace(task, **changed)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished."""
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None


def accelerator() -> torch.device | None:
    """CUDA or MPS, if this machine has one."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps") if torch.backends.mps.is_available() else None
