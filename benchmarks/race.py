"""The race: every contender in a process of its own, in heats, one round after the other, each in the same order.

    python -m benchmarks.race --problems small cde [--contenders diffrax] [--rounds 3] [--quick]

Contenders are bound to one core and one thread, and only one of them runs at a time. Minimum and median of the rounds
are reported; the first pass, which compiles, is apart. Every problem's results are written when it ends, so that a race
can be gone on with.
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
#: At least so many rounds, by the seconds of one pass: (at least so slow, rounds).
SLOW = ((20.0, 1), (5.0, 2), (0.0, 3))
#: From here on, in seconds, the pass after the first one counts as a round: nothing is warmed up by repeating it.
LONG = 1.0

Start = Callable[[Contender, Path], Worker]


@dataclass
class Lane:
    """One contender's part in a race: its process, and what is known of it."""

    contender: Contender
    worker: Worker | None = None
    planned: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer, or none if the contender has failed, now or before."""
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
    """As many as the budget has room for, at most `most`; a few in any case, but of the very slow only one."""
    least = next(rounds for slow, rounds in SLOW if seconds >= slow)
    return min(most, max(least, int(budget / max(seconds, 1e-9))))


def takes_part(round_: int, planned: int, rounds: int) -> bool:
    """Whoever runs in fewer rounds does so evenly over the race, so that the machine's moods hit all alike."""
    return (round_ + 1) * planned // rounds > round_ * planned // rounds


def warm_up(
    lanes: Sequence[Lane], start: Start, data: Path, most: int, budget: float, say: Callable[[str], None]
) -> None:
    """One after the other, so that nobody compiles while another is timed."""
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
    """At most so many at a time, since each holds on to its memory; libraries are spread evenly over the heats."""
    count = -(-len(lanes) // together)
    return [list(lanes[i::count]) for i in range(count)]


def run_rounds(lanes: Sequence[Lane]) -> None:
    rounds = max((lane.planned for lane in lanes if lane.worker), default=0)
    for round_ in range(rounds):
        for lane in lanes:
            if takes_part(round_, lane.planned, rounds):
                found = lane.ask("go")
                if found is not None:
                    lane.rounds.append(found)


def finish(lanes: Sequence[Lane], data: Path, error: Callable[[np.ndarray], float]) -> None:
    for i, lane in enumerate(lanes):
        found = lane.ask(f"gradient {data / f'{i}.npy'}")
        if found is not None:
            lane.known |= {"error": error(np.load(found["saved"]))}
            lane.known |= {name: found[name] for name in ("counts", "versions")}
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
    """Everything about one problem's race, ready for JSON."""
    entry = ENTRIES[name]
    task, found = numbers(name, quick)
    good = reference(name, task, found, quick, folder)
    lanes = [Lane(contender) for contender in who]
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        np.savez(data / "arrays.npz", **found)  # type: ignore[arg-type]
        (data / "tolerances.json").write_text(json.dumps({"rtol": task.rtol, "atol": task.atol}))
        try:
            for heat in heats(lanes, entry.together):
                warm_up(heat, start, data, rounds or entry.rounds, entry.budget, say)
                run_rounds(heat)
                finish(heat, data, good.error)
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
        "reference": {"how": good.how, "good_to": good.good_to},
        "rows": [lane.row() for lane in lanes],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--contenders", nargs="+", default=[""], help="only those with one of these in their names")
    parser.add_argument("--rounds", type=int, help="at most; by default the problem's own number")
    parser.add_argument("--quick", action="store_true", help="tiny problems, to see that all works")
    parser.add_argument("--threads", type=int, default=1, help="of every contender, bound to as many cores")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a contender may take for one answer")
    parser.add_argument("--memory", type=float, default=8.0, help="gigabytes that a contender may use")
    parser.add_argument("--cold", action="store_true", help="empty caches for all problems, not only the small one")
    parser.add_argument("--warm-cache", action="store_true", help="let PyTorch use what it has compiled before")
    parser.add_argument("--resume", action="store_true", help="leave out problems that have results already")
    parser.add_argument("--out", type=Path, help=f"folder of the results; by default {RESULTS}")
    return parser.parse_args(argv)


def starter(name: str, options: argparse.Namespace, logs: Path, cache: Path | None) -> Start:
    """Starts contenders; in a folder for caches each has its own, so that its first pass is one."""

    def start(contender: Contender, data: Path) -> Worker:
        label = f"{name}, {contender.name.replace(': ', ', ')}"
        command = worker_command(name, contender.name, data, options.threads, options.quick)
        environment = {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache / label.replace(" ", "_"))}
        return Worker(command, logs / f"{label}.log", options.limit, options.memory, environment)

    return start


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    # Part of a race is no race: it must not take the place of one.
    whole = not options.quick and options.contenders == [""]
    out = options.out or (RESULTS if whole else CACHE / ("quick" if options.quick else "part"))
    logs = CACHE / "logs"
    for path in (out, logs):
        path.mkdir(parents=True, exist_ok=True)
    for name in options.problems:
        results = out / f"{name}.json"
        if options.resume and results.exists():
            continue
        who = [each for each in contenders(name) if any(part in each.name for part in options.contenders)]
        print(f"\n# {name}{', tiny' if options.quick else f': {ENTRIES[name].title}'}\n", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            cold = (options.cold or ENTRIES[name].cold) and not options.warm_cache
            start = starter(name, options, logs, Path(cache) if cold else None)
            found = race(name, who, start, quick=options.quick, rounds=options.rounds, threads=options.threads)
        results.write_text(json.dumps(found, indent=1) + "\n")
        print(f"\n{race_table(found)}\n\n{verdict_table(found)}", flush=True)


if __name__ == "__main__":
    main()
