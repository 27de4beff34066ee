"""What the solves of a program cost: `python -m seminode.compat` prints it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...solution import Stats


@dataclass
class Ledger:
    """Solves and their cost. The backward passes are read from the statistics when the program has ended."""

    solves: list[Stats] = field(default_factory=list[Stats])
    seconds: float = 0.0

    def summary(self) -> str:
        """One line for forward passes, one for backward passes."""
        back = [stats.backward for stats in self.solves if stats.backward is not None]
        lines = [_line("forward", self.solves, f" in {self.seconds:.3g} s"), _line("backward", back, "")]
        return "\n".join(lines)


def _line(what: str, found: list[Stats], end: str) -> str:
    nfe, accepted, rejected = (sum(getattr(x, name) for x in found) for name in ("nfe", "accepted", "rejected"))
    solves = f"{len(found)} solve{'' if len(found) == 1 else 's'}"
    return f"{what}: {solves}, {nfe} evaluations, {accepted} steps accepted and {rejected} rejected{end}"


#: Where solves are noted; `None` notes nothing.
ledger: Ledger | None = None


def keep() -> Ledger:
    """Note all following solves."""
    global ledger
    ledger = Ledger()
    return ledger


@contextmanager
def timed() -> Generator[Callable[[Stats], None], None, None]:
    """Time a solve; call the result with its statistics."""
    if ledger is None:
        yield lambda stats: None
        return
    start = time.perf_counter()
    yield ledger.solves.append
    ledger.seconds += time.perf_counter() - start
