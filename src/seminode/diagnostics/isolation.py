"""Saving and restoring the user's state: random numbers, parameters, gradients, buffers, modes, default dtype."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._field.random_numbers import device_generators


class Snapshot:
    """A copy of everything that a solve, the field or the loss may change. `restore` can be called repeatedly."""

    def __init__(self, parts: Sequence[nn.Module], tensors: Sequence[Tensor], device: torch.device):
        slots: list[dict[str, Any]] = [slot for part in parts for slot in (part._parameters, part._buffers)]
        held = [x for slot in slots for x in slot.values() if x is not None]
        own = {id(x): x for x in (*held, *tensors) if not x.is_inference()}
        self._modes = [(part, part.training) for part in parts]
        self._slots = [(slot, dict(slot)) for slot in slots]
        self._values = [(x, x.detach().clone()) for x in own.values()]
        self._flags = [(x, x.requires_grad) for x in own.values() if x.is_leaf]
        grads = ((x, x.grad) for x in own.values() if x.is_leaf)
        self._grads = [(x, grad, None if grad is None else grad.detach().clone()) for x, grad in grads]
        self._random = list(_generators(device))
        self._dtype = torch.get_default_dtype()

    def restore(self) -> None:
        """Put everything back. Tensors that have not changed are not touched, so that existing graphs stay valid."""
        torch.set_default_dtype(self._dtype)
        for part, training in self._modes:
            part.training = training
        for slot, before in self._slots:
            if list(slot) != list(before) or any(slot[key] is not before[key] for key in before):
                slot.clear()
                slot.update(before)
        for x, value in self._values:
            _put_back(x, value)
        for x, flag in self._flags:
            if x.requires_grad != flag:
                x.requires_grad_(flag)
        for x, grad, value in self._grads:
            if x.grad is not grad:
                x.grad = grad
            if grad is not None and value is not None:
                _put_back(grad, value)
        for restore in self._random:
            restore()


def _put_back(x: Tensor, value: Tensor) -> None:
    now = x.detach()
    if now.shape != value.shape or now.dtype != value.dtype:
        x.data = value.clone()
    elif not bool(((now == value) | ((now != now) & (value != value))).all()):
        x.data.copy_(value)  # through .data, so that autograd does not record it


def _generators(device: torch.device) -> Iterator[Callable[[], Any]]:
    """Functions that restore the states of the random number generators."""
    own = [torch.default_generator, *device_generators(device)]
    if torch.cuda.is_initialized():
        own += [g for g in torch.cuda.default_generators if not any(g is other for other in own)]
    for generator in own:
        yield partial(generator.set_state, generator.get_state())
    yield partial(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield partial(numpy.set_state, numpy.get_state())


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators. They change if random numbers are drawn."""
    return [generator.get_state() for generator in (torch.default_generator, *device_generators(device))]
