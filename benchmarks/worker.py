"""One contender on one problem in its own process, controlled by lines on stdin.

    python -m benchmarks.worker --problem small --contender "torchdiffeq: direct" --data FOLDER [--threads 1]

`benchmarks.race` starts it. It answers with lines of JSON: after the warm-up, the time of the first pass, including
compilation; to "warm FACTOR", the time after a warm-up with the tolerances times the factor; to "go FACTOR", the
seconds of one pass; to "gradient FACTOR PATH", that the gradient is saved there, with counts and the peak memory; to
"field", the costs of evaluations; to "stop", that it ends. A pass that fails is "refused" with the reason, and the
process goes on. The output of libraries goes to stderr.
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

        about = json.loads((data / "about.json").read_text())
        return JaxRunner(problem, arrays, about["rtol"], about["atol"], contender, about["differentiate"])

    import torch

    torch.set_num_threads(threads)
    from .suite import task_of
    from .tasks import load
    from .torch_runners import TorchRunner

    return TorchRunner(load(task_of(problem, quick), arrays), contender)


def lead_ins(seconds: float) -> int:
    """Number of untimed passes before a timed one, to fill the caches, which other processes have used."""
    return min(3, int(0.1 / max(seconds, 1e-9)))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Session:
    """Answers the lines that the race sends."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.seconds: dict[float, float] = {}

    def warmed_up(self, factor: float) -> dict[str, Any]:
        """The first pass compiles. The second may compile, too, if the compiler only then detects dynamic inputs."""
        first = self.runner.run(factor)["seconds"]
        again = [self.runner.run(factor) for _ in range(2 if first < 5.0 else 1)]
        self.seconds[factor] = again[-1]["seconds"]
        return {"first": first, "warm": again[-1]["seconds"], "round": again[-1]}

    def timed(self, factor: float) -> dict[str, Any]:
        gc.collect()
        for _ in range(lead_ins(self.seconds.get(factor, 1.0))):
            self.runner.run(factor)
        return self.runner.run(factor)

    def saved(self, factor: float, path: str) -> dict[str, Any]:
        import numpy as np

        runner = self.runner
        np.save(path, runner.gradient(factor))
        found = {"saved": path, "counts": runner.counts(factor), "needed": runner.needed(factor)}
        return {**found, "versions": runner.versions(), "peak_mb": peak_mb()}

    def answer(self, line: str) -> dict[str, Any]:
        command, _, argument = line.strip().partition(" ")
        if command == "stop":
            return {"stopped": True}
        try:
            if command == "field":
                return {"costs": self.runner.field_costs()}
            factor, _, path = argument.partition(" ")
            if command == "gradient":
                return self.saved(float(factor), path)
            return {"warm": self.warmed_up, "go": self.timed}[command](float(factor))
        except Exception as error:
            traceback.print_exc()
            return {"refused": reason(error)}


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
        session = Session(runner)
        say({"ready": True, "built": built, **session.warmed_up(1.0)})
        for line in sys.stdin:
            reply = session.answer(line)
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
