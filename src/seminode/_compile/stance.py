"""Disables `torch.compile` for a while. Torch has one switch for the whole process, which threads share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .torch_private import compiler_loaded


class _Switch:
    """Set to eager while some thread requests that and no thread traces a field."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few instructions only
        self._eager = self._tracing = 0  # how many threads ask for what
        self._forced: Any = None

    def change(self, eager: int = 0, tracing: int = 0) -> None:
        with self._lock:
            wanted = self._eager + eager > 0 and self._tracing + tracing == 0
            if wanted and self._forced is None:
                self._forced = torch.compiler.set_stance("force_eager")
            elif not wanted and self._forced is not None:
                self._forced.__exit__(None, None, None)
                self._forced = None
            self._eager += eager
            self._tracing += tracing

    def forget_other_threads(self) -> None:
        """In a copy of the process, which has one thread."""
        self._lock = threading.Lock()
        self.change(_here.eager - self._eager, _here.tracing - self._tracing)


class _Here(threading.local):
    """How many nested requests this thread has made."""

    eager = 0
    tracing = 0


_switch, _here = _Switch(), _Here()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch.forget_other_threads)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Where a field must be followed operation by operation, what is compiled in it runs eagerly.

    Compiled code hides its operations, and a compiler that first meets a function under a watch gives up on that
    function for good. The compiler is not loaded for this.
    """
    if not compiler_loaded():
        yield
        return
    _switch.change(eager=1)
    _here.eager += 1
    try:
        yield
    finally:
        _here.eager -= 1
        _switch.change(eager=-1)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Around a field that is traced: what other threads want to run eagerly does not keep it from being traced."""
    if _here.eager:
        yield
        return
    _switch.change(tracing=1)
    _here.tracing += 1
    try:
        yield
    finally:
        _here.tracing -= 1
        _switch.change(tracing=-1)
