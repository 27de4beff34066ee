"""Groups of runs for figures, and their labels."""

from __future__ import annotations

from collections.abc import Sequence

from ..measures import DATA, gather
from ..modes import MODES
from ..settings import Settings
from ..spread import counted
from ..store import Finished

#: Runs by mode, sorted by seed.
ByMode = dict[str, list[Finished]]


def settings_of(run: Finished) -> Settings:
    return Settings.of_json(run.settings)


def complete(runs: Sequence[Finished]) -> list[Finished]:
    """The runs that are complete, undamaged, made by seminode and with the adjoint of their mode."""
    left_out = gather(runs).left_out
    return [run for run in runs if run.path.name not in left_out and run.settings.get("library") is None]


def of_experiment(runs: Sequence[Finished], experiment: str) -> list[Finished]:
    return [run for run in runs if run.settings["experiment"] == experiment]


def by_row(runs: Sequence[Finished]) -> dict[str, ByMode]:
    """Runs by row and mode. Rows are sorted by data and from loose to tight tolerances, modes as in `MODES`."""
    found: dict[str, ByMode] = {}
    for run in sorted(runs, key=lambda run: (run.settings["data"], -run.settings["rtol"], settings_of(run).row)):
        found.setdefault(settings_of(run).row, {}).setdefault(run.settings["mode"], []).append(run)
    return {row: {mode: _by_seed(modes[mode]) for mode in MODES if mode in modes} for row, modes in found.items()}


def _by_seed(runs: Sequence[Finished]) -> list[Finished]:
    return sorted(runs, key=lambda run: run.settings["seed"])


def row_label(modes: ByMode) -> str:
    """The label of a row."""
    settings = settings_of(next(iter(modes.values()))[0])
    hidden = dict(settings.model).get("hidden", "") if settings.experiment == "cnf" else ""
    tolerance = f", rtol {settings.rtol:.0e}" if settings.experiment == "ncde" else ""
    data = data_label(settings.data)
    comma = "," if hidden and data[-1].isdigit() else ""
    return f"{data}{comma} {hidden}".strip() + tolerance.replace("e-0", "e-")


def data_label(data: str) -> str:
    return DATA.get(data, data)


def by_data(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    found: dict[str, list[Finished]] = {}
    for run in runs:
        found.setdefault(run.settings["data"], []).append(run)
    return found


def tolerances(runs: Sequence[Finished]) -> list[float]:
    """The values of rtol, from loose to tight."""
    return sorted({run.settings["rtol"] for run in runs}, reverse=True)


def made_of(modes: ByMode) -> str:
    """The number of runs per mode, their data and presets, for captions."""
    runs = [run for group in modes.values() for run in group]
    counts = sorted({len(group) for group in modes.values()})
    each = counted(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counted(counts[-1], 'run')}"
    presets = ", ".join(sorted({run.settings["preset"] for run in runs}))
    data = ", ".join(sorted({data_label(run.settings["data"]) for run in runs}))
    return f"{each} per mode ({data}, preset {presets})"
