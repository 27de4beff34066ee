"""The race: time every contender in its own process, in several rounds with the same order.

    python -m benchmarks.race --problems small cde [--contenders diffrax] [--rounds 3] [--quick]

Contenders are bound to one core and one thread, and only one of them runs at a time. Each runs at several tolerances,
so that its results are a curve of time against error. The minimum and median of the rounds are reported, and separately
the first pass, which includes compilation. The results of each problem are written when it is finished, so that an
interrupted race can be resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .contenders import contenders
from .lanes import Lane, Start, finish, heats, run_rounds, warm_up
from .processes import Worker, worker_command
from .references import reference
from .report import curve_table, limit_line, race_table
from .settings import Contender
from .suite import CACHE, ENTRIES, numbers
from .verdict import verdict_table

RESULTS = Path("benchmarks/results")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def circumstances(threads: int) -> dict[str, Any]:
    """Date, machine and versions of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "python": platform.python_version(),
        "threads": threads,
    }


def race(
    name: str,
    who: Sequence[Contender],
    start: Start,
    *,
    quick: bool = False,
    rounds: int | None = None,
    factors: Sequence[float] | None = None,
    threads: int = 1,
    folder: Path = CACHE,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> dict[str, Any]:
    """All results of one problem, as a dict for JSON."""
    entry = ENTRIES[name]
    task, arrays = numbers(name, quick)
    exact = reference(name, task, arrays, quick, folder)
    lanes = [Lane(contender, factors or entry.factors) for contender in who]
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        np.savez(data / "arrays.npz", **arrays)  # type: ignore[arg-type]
        about = {"rtol": task.rtol, "atol": task.atol, "differentiate": task.differentiate}
        (data / "about.json").write_text(json.dumps(about))
        try:
            for heat in heats(lanes, entry.together):
                warm_up(heat, start, data, rounds or entry.rounds, entry.budget, say)
                run_rounds(heat)
                finish(heat, data, exact.error)
        finally:
            for lane in lanes:
                if lane.worker is not None:
                    lane.worker.end()
    title = f"Tiny: {entry.title}" if quick else entry.title
    about = {"problem": name, "title": title, "quick": quick, **about}
    sizes = {"parameters": sum(p.numel() for p in task.modules.parameters())}
    return {
        **about,
        **sizes,
        **circumstances(threads),
        "reference": {"how": exact.how, "good_to": exact.good_to},
        "rows": [lane.row() for lane in lanes],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--contenders", nargs="+", default=[""], help="only those whose names contain one of these")
    parser.add_argument(
        "--short", action="store_true", help="the fastest settings of each library; takes about an hour"
    )
    parser.add_argument("--rounds", type=int, help="maximum number of rounds; by default that of the problem")
    parser.add_argument("--factors", type=float, nargs="+", help="on the tolerances; by default those of the problem")
    parser.add_argument("--quick", action="store_true", help="tiny problems, as a test")
    parser.add_argument("--threads", type=int, default=1, help="threads and cores of every contender")
    parser.add_argument("--limit", type=float, default=1800.0, help="maximum seconds for one answer of a contender")
    parser.add_argument("--memory", type=float, default=8.0, help="maximum memory of a contender in gigabytes")
    parser.add_argument("--cold", action="store_true", help="empty caches for all problems, not only the small one")
    parser.add_argument("--warm-cache", action="store_true", help="let PyTorch use its compilation cache")
    parser.add_argument("--resume", action="store_true", help="skip problems that already have results")
    parser.add_argument("--out", type=Path, help=f"folder for the results; by default {RESULTS}")
    options = parser.parse_args(argv)
    if options.factors is not None and (1.0 not in options.factors or min(options.factors) <= 0.0):
        parser.error(f"--factors: expected positive numbers with 1 among them, found {options.factors}")
    return options


def starter(name: str, options: argparse.Namespace, logs: Path, cache: Path | None) -> Start:
    """A function that starts contenders. With `cache`, each has its own empty cache and compiles in its first pass."""

    def start(contender: Contender, data: Path) -> Worker:
        label = f"{name}, {contender.name.replace(': ', ', ')}"
        command = worker_command(name, contender.name, data, options.threads, options.quick)
        environment = {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache / label.replace(" ", "_"))}
        return Worker(command, logs / f"{label}.log", options.limit, options.memory, environment)

    return start


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    # A partial or quick race must not overwrite the results of a complete one.
    whole = not options.quick and options.contenders == [""] and options.factors is None
    out = options.out or (RESULTS if whole else CACHE / ("quick" if options.quick else "part"))
    logs = CACHE / "logs"
    for folder in (out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    for name in options.problems:
        path = out / f"{name}.json"
        if options.resume and path.exists():
            continue
        who = [
            each for each in contenders(name, options.short) if any(part in each.name for part in options.contenders)
        ]
        print(f"\n# {name}{', tiny' if options.quick else f': {ENTRIES[name].title}'}\n", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            cold = (options.cold or ENTRIES[name].cold) and not options.warm_cache
            start = starter(name, options, logs, Path(cache) if cold else None)
            limits: dict[str, Any] = {"rounds": options.rounds, "factors": options.factors, "threads": options.threads}
            result = race(name, who, start, quick=options.quick, **limits)
        path.write_text(json.dumps(result, indent=1) + "\n")
        tables = race_table(result), curve_table(result), verdict_table(result), limit_line(result)
        print("\n" + "\n\n".join(tables), flush=True)


if __name__ == "__main__":
    main()
