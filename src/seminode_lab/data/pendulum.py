"""The data set of the double pendulum, which is simulated once and then saved."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

import torch

from ..models import pendulum as simulator
from .base import DataSet, DataStatus
from .cache import cached
from .errors import DataError
from .folders import data_dir, features_dir

FILE = "pendulum.safetensors"
TOTAL = 28_800  # windows: 9 torques × 25 windows × 128 trials
#: The parameters that determine the data set, together with the version of SciPy, which may choose other steps.
PARAMETERS = (
    simulator.SEED,
    simulator.DT,
    simulator.RESET,
    simulator.TORQUES,
    simulator.TRIALS,
    simulator.STEPS,
)


def pendulum(root: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32) -> simulator.Split:
    """Windows (…, 8 times, 8 channels): 20,025 for training, 4,275 for validation, 4,500 for testing.

    They are those of [`dataset`][seminode_lab.models.pendulum.dataset], which describes them. The simulation takes
    about ten seconds; its result is saved below `root`.

    Arguments:
        root: the folder with data; by default that of `SEMINODE_DATA`, or the user's cache.
        dtype: of the windows; the simulation is in float64.

    Example:
        >>> train, validation, test = pendulum()  # doctest: +SKIP
        >>> train.shape  # doctest: +SKIP
        torch.Size([20025, 8, 8])
    """
    found = cached(_path(data_dir(root)), _key(), lambda: {"trajectories": simulator.trajectories()})
    parts = simulator.split(found["trajectories"])
    return simulator.Split(*(simulator.windows(part, dtype=dtype) for part in parts))


def _path(root: Path) -> Path:
    return features_dir(root) / FILE


def _key() -> str:
    text = repr((1, PARAMETERS, importlib.metadata.version("scipy") if _scipy() else None))
    return hashlib.sha256(text.encode()).hexdigest()


def _scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


class Pendulum(DataSet):
    name = "pendulum"
    title = "fully actuated double pendulum"
    unit = "windows"
    origin = "simulated by seminode_lab.models.pendulum"
    licence = "that of seminode, Apache-2.0"

    def status(self, root: Path) -> DataStatus:
        path = _path(root)
        if path.is_file():
            return DataStatus("complete", path, TOTAL, TOTAL, path.stat().st_size)
        note = "is simulated when it is first needed, in about ten seconds" if _scipy() else "needs SciPy"
        return DataStatus("absent", expected=TOTAL, notes=(note,))

    def check(self, root: Path, progress: bool = True) -> DataStatus:
        """Simulate the first trials again and compare them with the saved ones."""
        status = self.status(root)
        if status.place is None or not _scipy():
            return status
        found = cached(_path(root), _key(), lambda: {"trajectories": simulator.trajectories()})["trajectories"]
        first = simulator.trajectories(trials=2)
        if found.shape != (9, simulator.TRIALS, simulator.STEPS, 8) or not torch.equal(found[:, :2], first):
            return status.noting(f"{status.place}: differs from the simulation; remove it", state="broken")
        return status

    def fetch(self, root: Path, progress: bool = True) -> None:
        if not _scipy():
            raise DataError("pendulum: the simulation needs SciPy: pip install 'seminode[lab]'")
        pendulum(root)
