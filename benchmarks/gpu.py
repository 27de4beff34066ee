"""The race on a GPU: the same problems, settings and tables, on CUDA or MPS.

    python -m benchmarks.gpu [--problems small cde] [--contenders seminode] [--rounds 5] [--quick] [--device cuda]

All contenders run in this process, in turn, and the device is synchronised before the clock is read. References are
computed on the CPU in float64. diffrax takes part if JAX has the same device. Without a GPU the command says so and
exits with code 2; `--device cpu` runs it anyway, as a test.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .contenders import contenders
from .devices import accelerator, moved, synchroniser
from .lanes import Start
from .processes import WorkerFailed
from .race import race
from .report import curve_table, limit_line, race_table
from .settings import Contender
from .suite import CACHE, ENTRIES, task_of
from .tasks import load
from .torch_runners import TorchRunner
from .verdict import verdict_table
from .worker import Session, reason

NO_DEVICE = "No GPU: neither CUDA nor MPS is available to torch {version}. Pass --device cpu to try the command."


class LocalWorker:
    """A contender in this process, which answers as a worker process does."""

    def __init__(self, build: Callable[[], Any]):
        self.build = build
        self.session: Session | None = None

    def answer(self) -> dict[str, Any]:
        try:
            self.session = Session(self.build())
            return self.session.warmed_up(1.0)
        except Exception as error:
            self.end()
            raise WorkerFailed(reason(error)) from error

    def ask(self, line: str) -> dict[str, Any]:
        assert self.session is not None
        return self.session.answer(line)

    def end(self) -> None:
        self.session = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def starter(name: str, device: torch.device, quick: bool) -> Start:
    def start(contender: Contender, data: Path) -> LocalWorker:
        def build() -> Any:
            with np.load(data / "arrays.npz") as file:
                arrays = dict(file)
            task = task_of(name, quick)
            if contender.library == "diffrax":
                from .jax_runners import JaxRunner

                return JaxRunner(name, arrays, task.rtol, task.atol, contender, task.differentiate)
            return TorchRunner(moved(load(task, arrays), device), contender, synchroniser(device))

        return LocalWorker(build)

    return start


def jax_has(device: torch.device) -> bool:
    """Whether diffrax would run on the same kind of device."""
    if find_spec("diffrax") is None:
        return False
    import jax

    return jax.default_backend() == {"cuda": "gpu", "cpu": "cpu"}.get(device.type)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--contenders", nargs="+", default=[""], help="only those whose names contain one of these")
    parser.add_argument("--rounds", type=int, help="maximum number of rounds; by default that of the problem")
    parser.add_argument("--factors", type=float, nargs="+", help="on the tolerances, with 1 among them")
    parser.add_argument("--quick", action="store_true", help="tiny problems, as a test")
    parser.add_argument("--device", type=torch.device, help="by default CUDA or MPS, whichever there is")
    parser.add_argument("--out", type=Path, default=CACHE / "gpu", help="folder for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = options.device or accelerator()
    if device is None:
        print(NO_DEVICE.format(version=torch.__version__))
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with_jax = jax_has(device)
    for name in options.problems:
        wanted = [each for each in contenders(name) if any(part in each.name for part in options.contenders)]
        who = [each for each in wanted if with_jax or each.library != "diffrax"]
        print(f"\n# {name} on {device_name(device)}\n", flush=True)
        limits: dict[str, Any] = {"quick": options.quick, "rounds": options.rounds, "factors": options.factors}
        result = race(name, who, starter(name, device, options.quick), **limits)
        result["device"] = device_name(device)
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        tables = race_table(result), curve_table(result), verdict_table(result), limit_line(result)
        print("\n" + "\n\n".join(tables), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
