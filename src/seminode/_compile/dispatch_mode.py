"""Dispatch modes of torch, which see every operation, for use in several threads."""

from __future__ import annotations

import os
import threading
from typing import Any

from .torch_private import TorchDispatchMode, dispatch_flags, set_dispatch_flags


class _Threads:
    """The threads that are in a mode, and the flags that the first of them has found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held for a few instructions only
        self.active = 0
        self.flags: dict[str, bool] = {}

    def forget_other_threads(self) -> None:
        """In a copy of the process, which has one thread."""
        self.lock = threading.Lock()


_threads = _Threads()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.forget_other_threads)


class DispatchMode(TorchDispatchMode):
    """The base class of our modes.

    Torch has flags for the whole process that a mode is active, and each mode puts back what it has found. Of threads
    that enter and leave in turn, one would find the flag of another and leave it for good; some versions of torch then
    compile nothing any more. So the last one to leave puts back what the first one has found.
    """

    def __enter__(self) -> Any:
        with _threads.lock:
            if _threads.active == 0:
                _threads.flags = dispatch_flags()
            found = super().__enter__()
            _threads.active += 1
            return found

    def __exit__(self, *error: Any) -> None:
        with _threads.lock:
            super().__exit__(*error)
            _threads.active -= 1
            if _threads.active == 0:
                set_dispatch_flags(_threads.flags)
