"""Compiling without Python's garbage collector, which would take much of the time and find little."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collections in here, of any thread. A collector that is off already stays off.

    Tracing and compiling make millions of objects that live for seconds, each of which it would look at several times.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
