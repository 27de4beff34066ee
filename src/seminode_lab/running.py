"""Makes a run from its settings: loads the data, builds and trains the model, and writes the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode.models import MatrixField, MultiscaleCNF, NeuralCDE, SymplecticODENet

from . import data as sets
from .models import pendulum
from .modes import solve_options
from .peers import solved_by
from .progress import TrainingCallbacks
from .provenance import circumstances
from .ranks import Ranks, own_device
from .restoring import load_weights
from .settings import PRESETS, Settings, all_runs
from .store import CHECKPOINT, RESULT, Checkpoint, Finished, FollowedRun, Run, Taken, present
from .task import SPLITS
from .tasks import FlowTask, ModelTask, PendulumTask, SeriesTask
from .training import Training
from .weights import final

Root = str | os.PathLike[str] | None


#: The number of classes of the labelled series. A reduced set may not contain all of them.
CLASSES = {"speech_commands": 10, "japanese_vowels": 9}


def _rows(part: Any, rows: Tensor) -> Any:
    if not isinstance(part, sets.SeriesSet):
        return part[rows]
    return replace(part, x=part.x[rows], lengths=part.lengths[rows], labels=part.labels[rows])


def _reduced(settings: Settings, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The splits, reduced to the sizes in the settings. The choice of samples does not depend on the seed."""
    if settings.sizes is None:
        return dict(parts)
    chance = torch.Generator().manual_seed(0)
    orders = {split: torch.randperm(len(parts[split]), generator=chance) for split in SPLITS}
    return {split: _rows(parts[split], orders[split][:n]) for split, n in zip(SPLITS, settings.sizes, strict=True)}


def series(settings: Settings, root: Root) -> dict[str, sets.SeriesSet]:
    if settings.data == "speech_commands":
        return _reduced(settings, dict(zip(SPLITS, sets.speech_commands(root, progress=True), strict=True)))
    if settings.data != "japanese_vowels":
        raise ValueError(f"data: expected speech_commands or japanese_vowels for 'ncde', found {settings.data!r}")
    train, test = sets.japanese_vowels()
    mean, std = train.statistics()
    # Every fifth series is for validation, which is six per speaker.
    rows = torch.arange(len(train))
    parts = {"train": _rows(train, rows[rows % 5 != 0]), "validation": _rows(train, rows[rows % 5 == 0]), "test": test}
    return _reduced(settings, {split: part.normalised(mean, std) for split, part in parts.items()})


def options_of(settings: Settings) -> dict[str, Any]:
    """The options of `solve` that the mode of a run determines."""
    return solve_options(settings.experiment, settings.mode, settings.adjoint, settings.batch)


def model_of(settings: Settings, shape: Sequence[int], levels: int = 256, **options: Any) -> Any:
    """The model of a run for samples of a shape: (channels,) for series, (channels, height, width) for images.

    `levels` is the number of levels of a pixel, and `options` are those of `solve`.
    """
    given = dict(settings.model)
    if settings.experiment == "ncde":
        (channels,), hidden = shape, given.get("hidden", 90)
        field = MatrixField(hidden, channels + 1, width=given.get("width", 40), layers=4)
        return NeuralCDE(channels, hidden, CLASSES[settings.data], field=field, path="linear", **options)
    if settings.experiment == "hnn":
        return SymplecticODENet(**given, **options)
    alpha = 0.05 if settings.data == "cifar10" else 1e-5
    return MultiscaleCNF(shape, alpha=alpha, levels=levels, **given, **options)


def common_steps(settings: Settings) -> dict[str, Any]:
    """Options of `solve` with which several processes take the steps of one process that has the whole batch.

    The processes of a flow take their own steps: they draw their own noise anyway.
    """
    if settings.experiment == "cnf":
        return {}
    if settings.mode in ("mixed", "published") and settings.adjoint is None:
        raise ValueError(
            f"nproc: the norm of the mode {settings.mode!r} reads the gradients of parameters, of which a process has "
            "only its part; expected the mode seminorm or best"
        )
    return {"norm": sn.norms.distributed(options_of(settings).get("norm"))}


def task_of(settings: Settings, root: Root = None, ranks: Ranks | None = None) -> ModelTask[Any, Any]:
    """The task of a run. The model is initialised from the seed."""
    options = {"rtol": settings.rtol, "atol": settings.atol, "compile": settings.compile, **options_of(settings)}
    ranks = ranks or Ranks()
    if settings.library is not None:
        if ranks.size > 1:
            raise ValueError(f"nproc: expected 1 for runs with {settings.library}, found {ranks.size}")
        task = _task(settings, root, options | {"compile": False})
        task.solves = solved_by(settings.library, task.model, settings.mode)
        return task
    if ranks.size > 1:
        task = _task(settings, root, options | common_steps(settings))
        task.share(ranks)
        return task
    return _task(settings, root, options)


def _task(settings: Settings, root: Root, options: Mapping[str, Any]) -> ModelTask[Any, Any]:
    batch, device = settings.batch, own_device(settings.device)
    torch.manual_seed(settings.seed)
    if settings.experiment == "ncde":
        found = series(settings, root)
        net = model_of(settings, (found["train"].channels,), **options)
        return SeriesTask(net, found, batch, device, settings.shifts)
    if settings.experiment == "hnn":
        windows: dict[str, Tensor] = dict(zip(SPLITS, sets.pendulum(root), strict=True))
        net = model_of(settings, (), **options)
        if settings.fitted:
            pendulum.fit_accelerations(net.field, settings.fitted, seed=settings.seed)
        return PendulumTask(net, _reduced(settings, windows), pendulum.DT, batch, device)
    loaders = {
        "mnist": sets.mnist,
        "mnist14": lambda root: sets.reduced_images(sets.mnist(root), 2),
        "cifar10": sets.cifar10,
        "digits": lambda root: sets.digits(),
    }
    if settings.data not in loaders:
        raise ValueError(f"data: expected one of {', '.join(loaders)} for 'cnf', found {settings.data!r}")
    train, test = loaders[settings.data](root)
    # As in the paper, the test set is evaluated during training; nothing is selected by it.
    pixels = {"train": train.x, "validation": test.x, "test": test.x}
    flow = model_of(settings, train.shape, train.levels, **options)
    return FlowTask(flow, _reduced(settings, pixels), batch, settings.data == "cifar10", device, settings.probe)


def description(settings: Settings) -> str:
    """A run in one line.

    >>> from .settings import rows
    >>> description(rows("quick")[-1].changed(mode="best"))
    'hnn-pendulum-best-0: 2 epochs in batches of 64, rtol 0.0001, atol 0.0001, Replay(every=1) on cpu'
    """
    adjoint = options_of(settings)["adjoint"]
    epochs = f"{settings.schedule.epochs} epoch{'s' * (settings.schedule.epochs > 1)} in batches of {settings.batch}"
    return f"{settings.name}: {epochs}, rtol {settings.rtol:g}, atol {settings.atol:g}, {adjoint} on {settings.device}"


#: Minutes between two checkpoints within an epoch. The end of an epoch has one too.
CHECKPOINT_MINUTES = 10.0
#: The folder, among the run folders, of the runs that provide initial weights.
STARTS = "starts"


def comes_first(settings: Settings, out: Path) -> Settings | None:
    """The run that provides the initial weights of a run; `None` if that has been started or is not warm-started."""
    folder = out / settings.name
    begun = any(present(folder / name) for name in (CHECKPOINT, RESULT))
    return None if begun else settings.before()


def start_folder(first: Settings, out: Path) -> Path:
    """The folder of run folders that a run with initial weights belongs to.

    A run of the preset, which has its own place in the tables, is not made twice.
    """
    known = first.preset in PRESETS and first in all_runs(first.preset)
    return out if known else out / STARTS


def run(
    settings: Settings,
    out: Path,
    root: Root = None,
    progress: TrainingCallbacks | None = None,
    resume: bool = True,
    wait: bool = False,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Make a run in the folder `out/<name>`, or resume it; return its result.

    A complete run is not made again. If `resume` is false, an incomplete run raises an error. If another process works
    on the run, this waits for it if `wait` is true, and raises an error otherwise. If several processes make the run,
    `ranks` says which of them this one is.
    """
    ranks = ranks or Ranks()
    solve = {name: repr(value) for name, value in options_of(settings).items()}
    config = {"settings": settings.as_json(), "solve": solve, "circumstances": circumstances()}
    if ranks.size > 1:
        config["circumstances"]["processes"] = ranks.size
    with (Run if ranks.first else FollowedRun)(out / settings.name, config, wait) as folder:
        ranks.meet()
        if folder.begun or folder.done:
            Finished.load(folder.path).check()
        if folder.done:
            return folder.result()
        if folder.begun and not resume:
            raise Taken(f"{folder.path}: holds an unfinished run. Add --resume to continue it, or use another folder.")
        if progress is not None:
            progress.load(description(settings))
        task = task_of(settings, root, ranks)
        first = comes_first(settings, out)
        if first is not None:
            place = start_folder(first, out)
            run(first, place, root, wait=True, checkpoint_minutes=checkpoint_minutes, ranks=ranks)
            path = place / first.name / CHECKPOINT
            load_weights(task.model, final(Checkpoint.load(path), first), path)
        training = Training(folder, task, settings.schedule, settings.seed, progress, checkpoint_minutes, ranks)
        if training.resume():
            folder.resumed(training.next_epoch, config["circumstances"])
        ranks.meet()
        return training.train()
