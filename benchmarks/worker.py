"""One contender on one problem in its own process, controlled by lines on stdin.

    python -m benchmarks.worker --problem small --contender "torchdiffeq: direct" --data FOLDER [--threads 1]

`benchmarks.race` starts it. It answers with lines of JSON: after the warm-up, the time of the first pass, including
compilation; to "go", the seconds of one forward and backward pass; to "gradient PATH", that the gradient is saved
there; to "stop", its peak memory. The output of libraries goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO


def bind(threads: int) -> None:
    """Bind this process to as many cores before a library starts its threads: XLA reads the CPU affinity."""
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes, which would outlive the worker


def build(problem: str, contender_name: str, data: Path, threads: int, quick: bool) -> Any:
    """The runner of a contender; a process imports either jax or torch."""
    import numpy as np

    from .contenders import named

    contender = named(problem, contender_name)
    with np.load(data / "arrays.npz") as file:
        arrays = dict(file)
    if contender.library == "diffrax":
        from .jax_runners import JaxRunner

        tolerances = json.loads((data / "tolerances.json").read_text())
        return JaxRunner(problem, arrays, tolerances["rtol"], tolerances["atol"], contender)

    import torch

    torch.set_num_threads(threads)
    from .suite import task_of
    from .tasks import load
    from .torch_runners import TorchRunner

    return TorchRunner(load(task_of(problem, quick), arrays), contender)


def warmed_up(runner: Any) -> dict[str, Any]:
    """The first pass compiles. The second pass may compile, too, if the compiler only then detects dynamic inputs."""
    first = runner.run()["seconds"]
    again = [runner.run() for _ in range(2 if first < 5.0 else 1)]
    return {"first": first, "warm": again[-1]["seconds"], "round": again[-1]}


def lead_ins(seconds: float) -> int:
    """Number of untimed passes before a timed one, to fill the caches, which other processes have used."""
    return min(3, int(0.1 / max(seconds, 1e-9)))


def answer(runner: Any, line: str, untimed: int = 0) -> dict[str, Any]:
    command, _, argument = line.strip().partition(" ")
    if command == "go":
        gc.collect()
        for _ in range(untimed):
            runner.run()
        return runner.run()
    if command == "gradient":
        import numpy as np

        np.save(argument, runner.gradient())
        return {"saved": argument, "counts": runner.counts(), "versions": runner.versions()}
    return {"stopped": True, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def reason(error: BaseException) -> str:
    """The error in one short line, since messages of compilers are long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def serve(options: argparse.Namespace, out: TextIO) -> None:
    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        begin = time.perf_counter()
        runner = build(options.problem, options.contender, options.data, options.threads, options.quick)
        built = time.perf_counter() - begin
        warm = warmed_up(runner)
        say({"ready": True, "built": built, **warm})
        for line in sys.stdin:
            reply = answer(runner, line, lead_ins(warm["warm"]))
            say(reply)
            if "stopped" in reply:
                return
    except Exception as error:
        traceback.print_exc()
        say({"failed": reason(error)})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    bind(options.threads)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(options, out)


if __name__ == "__main__":
    main()
