"""A process that makes one run. Its order comes on standard input; when that is closed, the sweep is gone, and it goes.

What it says goes to a log. It may be killed at any moment: run folders are written so that nothing is lost by that.
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
from .settings import Settings


@dataclass(frozen=True)
class Order:
    """A run to be made, where, and by how many threads."""

    settings: Settings
    out: Path
    root: Path | None = None
    threads: int = 1
    tensorboard: bool = True

    @property
    def log(self) -> Path:
        return self.out / "logs" / f"{self.settings.name}.log"

    def written(self) -> str:
        """In one line."""
        given = {"settings": self.settings.as_json(), "out": str(self.out), "threads": self.threads}
        given |= {"root": None if self.root is None else str(self.root), "tensorboard": self.tensorboard}
        return json.dumps(given)

    @classmethod
    def read(cls, text: str) -> Order:
        given = json.loads(text)
        root = None if given["root"] is None else Path(given["root"])
        settings = Settings.of_json(given["settings"])
        return cls(settings, Path(given["out"]), root, given["threads"], given["tensorboard"])


def _leave_with_the_other_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(STOPPED)


def work(order: Order) -> int:
    """Make the run, from where it has come to; the status."""
    import torch

    torch.set_num_threads(order.threads)
    try:
        result = attempt(order.settings, order.out, order.root, tensorboard=order.tensorboard)
    except Exception as error:
        known = explained(error)
        if known is None:
            traceback.print_exc()
            return DIED
        print(in_one_line(known[1]), file=sys.stderr)
        return known[0]
    print(summary(order.settings, result, order.out))
    return DONE


def main() -> int:
    order = Order.read(sys.stdin.readline())
    threading.Thread(target=_leave_with_the_other_end, daemon=True).start()
    return work(order)


if __name__ == "__main__":
    sys.exit(main())
