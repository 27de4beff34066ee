"""A process that makes one run of a sweep.

It reads its order from standard input and exits when that is closed, because the sweep has then ended. Its output goes
to a log. It may be killed at any moment: a run folder is always in a state from which the run can be resumed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

from .attempts import DIED, DONE, STOPPED, attempt, explained, in_one_line, summary
from .running import CHECKPOINT_MINUTES
from .settings import Settings


@dataclass(frozen=True)
class Order:
    """A run to make: its settings, its folder, the folder with data, and the number of threads."""

    settings: Settings
    out: Path
    root: Path | None = None
    threads: int = 1
    tensorboard: bool = True
    checkpoint_minutes: float = CHECKPOINT_MINUTES
    resume: bool = True

    @property
    def log(self) -> Path:
        return self.out / "logs" / f"{self.settings.name}.log"

    def written(self) -> str:
        """As one line of JSON."""
        given = {"settings": self.settings.as_json(), "out": str(self.out), "threads": self.threads}
        given |= {"root": None if self.root is None else str(self.root), "tensorboard": self.tensorboard}
        given |= {"checkpoint_minutes": self.checkpoint_minutes, "resume": self.resume}
        return json.dumps(given)

    @classmethod
    def read(cls, text: str) -> Order:
        given = json.loads(text)
        root = None if given["root"] is None else Path(given["root"])
        settings = Settings.of_json(given["settings"])
        rest = (given[name] for name in ("threads", "tensorboard", "checkpoint_minutes", "resume"))
        return cls(settings, Path(given["out"]), root, *rest)


def _exit_when_the_sweep_ends() -> None:
    while os.read(0, 1):
        pass
    os._exit(STOPPED)


def work(order: Order) -> int:
    """Make the run, or resume it; return the exit status."""
    import torch

    torch.set_num_threads(order.threads)
    try:
        result = attempt(
            order.settings,
            order.out,
            order.root,
            order.resume,
            tensorboard=order.tensorboard,
            checkpoint_minutes=order.checkpoint_minutes,
        )
    except Exception as error:
        known = explained(error)
        if known is None:
            traceback.print_exc()
            return DIED
        print(in_one_line(known[1]), file=sys.stderr)
        return known[0]
    if int(os.environ.get("RANK", "0")) == 0:
        print(summary(order.settings, result, order.out))
    return DONE


def main() -> int:
    order = Order.read(sys.stdin.readline())
    threading.Thread(target=_exit_when_the_sweep_ends, daemon=True).start()
    return work(order)


if __name__ == "__main__":  # one of several processes that make a run together
    sys.exit(work(Order.read(sys.argv[1])))
