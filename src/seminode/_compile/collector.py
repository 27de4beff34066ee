"""Pauses Python's garbage collector while programs are compiled: it would take much time and free little."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector of all threads. A collector that is already off stays off.

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
