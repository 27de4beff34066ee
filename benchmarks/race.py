"""The race: time every contender in its own process, in several rounds with the same order.

    python -m benchmarks.race --problems small cde [--contenders diffrax] [--rounds 3] [--quick]

Contenders are bound to one core and one thread, and only one of them runs at a time. The minimum and median of the
rounds are reported, and separately the first pass, which includes compilation. The results of each problem are written
when it is finished, so that an interrupted race can be resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .contenders import Contender, contenders
from .processes import Worker, WorkerFailed, worker_command
from .references import reference
from .report import race_table
from .suite import CACHE, ENTRIES, numbers
from .verdict import verdict_table

RESULTS = Path("benchmarks/results")
#: The minimum number of rounds by the seconds of one pass: (seconds at least, rounds).
SLOW = ((20.0, 1), (5.0, 2), (0.0, 3))
#: If a pass takes at least this many seconds, the warm-up pass after the first one counts as a round.
LONG = 1.0

Start = Callable[[Contender, Path], Worker]


@dataclass
class Lane:
    """A contender in a race: its process, its planned and finished rounds, and its other results."""

    contender: Contender
    worker: Worker | None = None
    planned: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer, or `None` if the contender fails or has failed."""
        if self.worker is None:
            return None
        try:
            return self.worker.ask(line)
        except WorkerFailed as failure:
            self.fail(failure)
            return None

    def fail(self, failure: WorkerFailed) -> None:
        self.known["failed"] = str(failure)
        self.worker = None

    def row(self) -> dict[str, Any]:
        contender = self.contender
        row = {"name": contender.name, "library": contender.library, "setting": contender.setting}
        row |= {"compiled": contender.compiled, "options": dict(contender.options), **self.known}
        if self.rounds:
            seconds = [each["seconds"] for each in self.rounds]
            row |= {"minimum": min(seconds), "median": statistics.median(seconds), "rounds": self.rounds}
        return row


def planned_rounds(seconds: float, most: int, budget: float) -> int:
    """As many rounds as fit in the budget, at most `most`, and at least the number in `SLOW`."""
    least = next(rounds for slow, rounds in SLOW if seconds >= slow)
    return min(most, max(least, int(budget / max(seconds, 1e-9))))


def takes_part(round_: int, planned: int, rounds: int) -> bool:
    """Whether a contender runs in this round: its rounds are spread evenly, so that other load affects all alike."""
    return (round_ + 1) * planned // rounds > round_ * planned // rounds


def warm_up(
    lanes: Sequence[Lane], start: Start, data: Path, most: int, budget: float, say: Callable[[str], None]
) -> None:
    """Start and warm up the contenders one by one, so that none compiles while another is timed."""
    for lane in lanes:
        try:
            lane.worker = start(lane.contender, data)
            ready = lane.worker.answer()
            lane.planned = planned_rounds(ready["warm"], most, budget)
            if ready["warm"] >= LONG:
                lane.rounds.append(ready["round"])
                lane.planned -= 1
            lane.known |= {"first": ready["first"]}
            say(f"{lane.contender.name}: first {ready['first']:.2f} s, then {ready['warm']:.4f} s")
        except WorkerFailed as failure:
            lane.fail(failure)
            say(f"{lane.contender.name}: {failure}")


def heats(lanes: Sequence[Lane], together: int) -> list[list[Lane]]:
    """Groups of at most `together` contenders, which all keep their memory; each library is spread over the groups."""
    count = -(-len(lanes) // together)
    return [list(lanes[i::count]) for i in range(count)]


def run_rounds(lanes: Sequence[Lane]) -> None:
    rounds = max((lane.planned for lane in lanes if lane.worker), default=0)
    for round_ in range(rounds):
        for lane in lanes:
            if takes_part(round_, lane.planned, rounds):
                timing = lane.ask("go")
                if timing is not None:
                    lane.rounds.append(timing)


def finish(lanes: Sequence[Lane], data: Path, error: Callable[[np.ndarray], float]) -> None:
    for i, lane in enumerate(lanes):
        answer = lane.ask(f"gradient {data / f'{i}.npy'}")
        if answer is not None:
            lane.known |= {"error": error(np.load(answer["saved"]))}
            lane.known |= {name: answer[name] for name in ("counts", "versions")}
        stopped = lane.ask("stop")
        if stopped is not None:
            lane.known |= {"peak_mb": stopped["peak_mb"]}
        if lane.worker is not None:
            lane.worker.end()


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
    threads: int = 1,
    folder: Path = CACHE,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> dict[str, Any]:
    """All results of one problem, as a dict for JSON."""
    entry = ENTRIES[name]
    task, arrays = numbers(name, quick)
    exact = reference(name, task, arrays, quick, folder)
    lanes = [Lane(contender) for contender in who]
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        np.savez(data / "arrays.npz", **arrays)  # type: ignore[arg-type]
        (data / "tolerances.json").write_text(json.dumps({"rtol": task.rtol, "atol": task.atol}))
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
    about = {"problem": name, "title": title, "quick": quick, "rtol": task.rtol, "atol": task.atol}
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
    parser.add_argument("--rounds", type=int, help="maximum number of rounds; by default that of the problem")
    parser.add_argument("--quick", action="store_true", help="tiny problems, as a test")
    parser.add_argument("--threads", type=int, default=1, help="threads and cores of every contender")
    parser.add_argument("--limit", type=float, default=1800.0, help="maximum seconds for one answer of a contender")
    parser.add_argument("--memory", type=float, default=8.0, help="maximum memory of a contender in gigabytes")
    parser.add_argument("--cold", action="store_true", help="empty caches for all problems, not only the small one")
    parser.add_argument("--warm-cache", action="store_true", help="let PyTorch use its compilation cache")
    parser.add_argument("--resume", action="store_true", help="skip problems that already have results")
    parser.add_argument("--out", type=Path, help=f"folder for the results; by default {RESULTS}")
    return parser.parse_args(argv)


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
    whole = not options.quick and options.contenders == [""]
    out = options.out or (RESULTS if whole else CACHE / ("quick" if options.quick else "part"))
    logs = CACHE / "logs"
    for folder in (out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    for name in options.problems:
        path = out / f"{name}.json"
        if options.resume and path.exists():
            continue
        who = [each for each in contenders(name) if any(part in each.name for part in options.contenders)]
        print(f"\n# {name}{', tiny' if options.quick else f': {ENTRIES[name].title}'}\n", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            cold = (options.cold or ENTRIES[name].cold) and not options.warm_cache
            start = starter(name, options, logs, Path(cache) if cold else None)
            result = race(name, who, start, quick=options.quick, rounds=options.rounds, threads=options.threads)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{race_table(result)}\n\n{verdict_table(result)}", flush=True)


if __name__ == "__main__":
    main()
