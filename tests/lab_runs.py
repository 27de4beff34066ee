"""Run folders in the form that training leaves them, with made-up numbers: for tests of what reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seminode_lab.counting import strided
from seminode_lab.figures import Drawn, animation, style
from seminode_lab.schedule import Schedule
from seminode_lab.settings import TOLERANCES, Settings, modes_of
from seminode_lab.store import Run
from seminode_lab.task import SPLITS

EPOCHS = (0, 10, 20)
SCHEDULE = Schedule(epochs=21, lr=1e-3)
#: Backward evaluations of a batch, by experiment and mode.
NFE = {
    "ncde": {"mixed": 2300, "seminorm": 1200, "best": 1120},
    "cnf": {"mixed": 1770, "seminorm": 1580, "best": 900},
    "hnn": {"mixed": 98, "seminorm": 98, "published": 56, "best": 28},
}
BATCHES = {"train": 4, "validation": 1, "test": 2}


def rows() -> list[Settings]:
    found = [
        Settings("ncde", "made-up", "speech_commands", "mixed", rtol, atol, 128, SCHEDULE) for rtol, atol in TOLERANCES
    ]
    found.append(Settings("cnf", "made-up", "mnist", "mixed", 1e-5, 1e-5, 64, SCHEDULE, model=(("hidden", 32),)))
    found.append(Settings("hnn", "made-up", "pendulum", "mixed", 1e-4, 1e-4, 256, SCHEDULE))
    return found


def numbers(settings: Settings, split: str, epoch: int, chance: np.random.Generator) -> dict[str, Any]:
    nfe = NFE[settings.experiment][settings.mode] * BATCHES[split]
    steps = nfe // 7
    found: dict[str, Any] = {
        "loss": float(1.0 / (1 + epoch) + 0.01 * chance.random()),
        "samples": settings.batch * BATCHES[split],
        "seconds": nfe * 1e-3,
        "forward_nfe": 1100 * BATCHES[split],
        "forward_accepted": 160 * BATCHES[split],
        "forward_rejected": 3,
        "backward_nfe": nfe,
        "backward_accepted": steps,
        "backward_rejected": steps // 10,
        "backward_vjp_params": nfe,
        "published_accepted": steps + 5,
        "published_rejected": steps // 9,
    }
    if settings.experiment == "ncde":
        found["accuracy"] = float(0.9 - 0.5 / (1 + epoch) + 0.01 * chance.random())
    return found


def times(nfe: int) -> dict[str, np.ndarray]:
    evaluations = np.linspace(0.35, -0.01, nfe, dtype=np.float32)
    return {
        "evaluations": evaluations,
        "accepted": evaluations[6::7],
        "rejected": evaluations[:0],
        "published_accepted": evaluations[7::9],
        "published_rejected": evaluations[8::20],
    }


def control() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A pendulum that rises evenly within ten seconds and stays."""
    ts = 0.05 * np.arange(400)
    up = np.minimum(ts / 10.0, 1.0)
    states = np.stack((np.pi * up, 0.3 * np.sin(np.pi * up), np.gradient(np.pi * up, 0.05), 0 * ts), 1)
    torques = np.stack((np.sin(ts), 20 * np.cos(ts)), 1)
    said = {"off": [0.0, 0.0], "settled": 9.7, "largest_torques": [1.0, 20.0]}
    arrays = {"ts": ts}
    for name in ("published", "braked"):
        arrays |= {f"{name}_states": states, f"{name}_torques": torques}
    return {"published": said, "braked": said}, arrays


def write(settings: Settings, folder: Path, complete: bool = True) -> Path:
    """A run of these settings in `folder/<name>`."""
    chance = np.random.default_rng(settings.seed + 17)
    nfe = NFE[settings.experiment][settings.mode]
    circumstances = {"seminode": "0.1.0", "torch": "2.13.0", "python": "3.11", "threads": 1, "commit": "0123456789ab"}
    with Run(folder / settings.name, {"settings": settings.as_json(), "circumstances": circumstances}) as run:
        evaluations: list[dict[str, Any]] = []
        for i, epoch in enumerate(EPOCHS):
            train, validation = (numbers(settings, split, epoch, chance) for split in ("train", "validation"))
            done = (epoch + 1) * BATCHES["train"]
            totals = {"forward_nfe": 1100 * done, "backward_nfe": nfe * done}
            totals |= {"backward_accepted": nfe * done // 7, "backward_rejected": nfe * done // 70}
            seconds = {"training": nfe * done * 2e-3, "evaluation": nfe * (i + 1) * 1e-3}
            seconds["training_processor"] = nfe * done * 1e-3
            evaluations.append({"epoch": epoch, "lr": 1e-3, "train": train, "validation": validation})
            evaluations[-1] |= {"totals": totals, "seconds": seconds}
            run.evaluated(evaluations, times(nfe * BATCHES["train"]))
        if complete:
            result: dict[str, Any] = {split: numbers(settings, split, EPOCHS[-1], chance) for split in SPLITS}
            last = evaluations[-1]
            epochs = min(21, settings.schedule.epochs)
            result |= {"best_epoch": epochs - 1, "epochs": epochs, "totals": last["totals"], "seconds": last["seconds"]}
            result["peak_memory"] = 500_000_000
            if settings.experiment == "hnn":
                result["control"], arrays = control()
                run.keep("control", arrays)
            run.finish(result)
    return run.path


def write_all(folder: Path, seeds: Sequence[int] = (0, 1)) -> Path:
    """All rows, modes and seeds."""
    for row in rows():
        for mode in modes_of(row.experiment):
            for seed in seeds:
                write(row.changed(mode=mode, seed=seed), folder)
    return folder


def png(width: int, height: int) -> bytes:
    """A grey image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


#: The smallest GIF there is.
GIF = bytes.fromhex("47494638396101000100800000ffffff00000021f90401000000002c00000000010001000002024401003b")


def draw(runs: Sequence[Any], folder: Path, out: Path) -> list[Drawn]:
    """Figures of nothing in particular, quickly."""
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for name in ("f1a-accuracy", "f1b-nfe", "f2-frames", "f3-states", "f4-evaluations", "f5-rejections", "swing-up"):
        image = out / f"{name}.png"
        image.write_bytes(png(70, 20))
        svg, gif = out / f"{name}.svg", None
        svg.write_text(
            '<svg xmlns="http://www.w3.org/2000/svg" width="70" height="20"><rect width="9" height="9"/></svg>'
        )
        if name == "swing-up":
            gif = out / f"{name}.gif"
            gif.write_bytes(GIF)
        found.append(Drawn(name, f"The title of {name}", f"What {name} shows & how.", image, svg, gif))
    return found


def draw_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw real figures and animations with fewer pixels, where a test does not look at them."""
    monkeypatch.setattr(style, "save_png", partial(style.save_png, dpi=40))
    monkeypatch.setattr(animation, "PIXELS", 20)


def pendulum_times(batches: int, steps: int) -> dict[str, np.ndarray]:
    """As dopri5 evaluates on the backward pass through seven intervals of 0.05: in two steps each, or in one."""
    nodes = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
    lengths = {1: (0.052,), 2: (0.042, 0.08)}[steps]  # the last one goes beyond the output, as steps did
    batch: list[float] = []
    ends: list[float] = []
    for i in range(7):
        t = 0.35 - 0.05 * i
        batch += [t, t - 0.004]
        for dt in lengths:
            batch += [t - dt * c for c in nodes]
            t -= dt
            ends.append(t)
    counted = [strided(batch)] * batches
    lists = {
        "evaluations": batch * batches,
        "accepted": ends * batches,
        "rejected": [],
        "published_accepted": [t for each in counted for t in each.accepted],
        "published_rejected": [t for each in counted for t in each.rejected],
    }
    return {name: np.asarray(values, dtype=np.float32) for name, values in lists.items()}


def precision(experiment: str) -> dict[str, Any]:
    """What `measuring.measure` writes, of two adjoints at two tolerances; the last one was not to be had."""
    found = []
    for name, nfe, error in (("Backsolve, mixed norm, fresh", 90, 1e-3), ("Replay", 30, 1e-4)):
        for i, rtol in enumerate((1e-3, 1e-4)):
            row = {"name": name, "rtol": rtol, "atol": rtol, "reason": None, "notes": [], "memory": None}
            row |= {"forward": {"nfe": 32}, "backward": {"nfe": nfe * (i + 1), "rejected": 0}}
            row |= {"median_seconds": 1e-3 * nfe * (i + 1), "error": error, "params_error": error / 10**i}
            found.append(row)
    found[-1] = {"name": "Replay", "rtol": 1e-4, "atol": 1e-4, "reason": "takes too long", "notes": []}
    settings = next(row for row in rows() if row.experiment == experiment)
    plan = {"tolerances": [[1e-3, 1e-3], [1e-4, 1e-4]], "batch": 8, "fitted": 0, "repeats": 3}
    reference = {"dtype": "float64", "good_to": 1e-9, "note": "dopri8, rtol 1e-07"}
    return {"settings": settings.as_json(), "plan": plan, "reference": reference, "rows": found}
