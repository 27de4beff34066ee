"""The forms of the files in a run folder: what training writes, and all that reports, tables and figures rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .forms import Anything, Array, Either, Flag, Form, ListOf, Nothing, Number, Pair, Record, Text, Unlike
from .modes import ALL_MODES
from .peers import LIBRARIES
from .schedule import DECAYS
from .settings import DATA_SETS, EXPERIMENTS, Settings

COUNT, POSITIVE = Number(0, integer=True), Number(1, integer=True)
AMOUNT, SHARE = Number(0), Number(0, 1)
#: Training may reach losses that are not finite; they are reported as they are.
LOSS = Number(finite=False)
SCALAR = Either(Nothing(), Flag(), Number(), Text())


def maybe(form: Form) -> Form:
    return Either(Nothing(), form)


# Settings.

SIZES = maybe(ListOf(POSITIVE, 3))
SCHEDULE = Record(
    {
        **{"epochs": POSITIVE, "lr": AMOUNT, "weight_decay": AMOUNT, "every": POSITIVE, "factor": SHARE},
        **{"patience": COUNT, "give_up": COUNT, "warm_up": COUNT, "optimiser": Text(("AdamW", "Adam"))},
    },
    {"selects": Flag(), "decay": Text(DECAYS)},
)
#: Arguments of the models' constructors that readers use; of others, only that they are JSON without parts.
MODEL: dict[str, Form] = dict.fromkeys(("hidden", "width", "layers", "scales", "blocks"), POSITIVE)
SETTINGS = Record(
    {
        **{"experiment": Text(EXPERIMENTS), "preset": Text(), "data": Text(), "mode": Text(ALL_MODES)},
        **{"rtol": AMOUNT, "atol": AMOUNT, "batch": POSITIVE, "schedule": SCHEDULE},
        **{"seed": Number(integer=True), "sizes": SIZES, "model": ListOf(Pair(MODEL, Either(SCALAR, ListOf(SCALAR))))},
        **{"fitted": COUNT, "compile": Flag(), "device": Text()},
    },
    {
        **{"adjoint": maybe(Text()), "library": maybe(Text(tuple(LIBRARIES))), "probe": maybe(AMOUNT)},
        "shifts": COUNT,
        "start": maybe(Record({"schedule": SCHEDULE, "sizes": SIZES}, {"rtol": maybe(AMOUNT), "atol": maybe(AMOUNT)})),
    },
)
CIRCUMSTANCES = Record(optional={"threads": POSITIVE, "processes": POSITIVE}, other=SCALAR)
CONFIG = Record(
    {"settings": SETTINGS},
    {
        "circumstances": CIRCUMSTANCES,
        "solve": Record(other=Text()),
        "resumes": ListOf(Record({"epoch": COUNT}, other=SCALAR)),
    },
    other=Anything(),
)


def check_config(found: Mapping[str, Any]) -> None:
    """Check the settings of a run and what they say together."""
    CONFIG.check(found)
    settings = found["settings"]
    data, experiment = settings["data"], settings["experiment"]
    if data not in DATA_SETS[experiment]:
        expected = ", ".join(DATA_SETS[experiment])
        raise Unlike(f"settings.data: expected one of {expected} for {experiment!r}, found {data!r:.60}")
    try:
        Settings.of_json(settings)
    except ValueError as error:
        raise Unlike(f"settings.{error}") from error


# Measurements.

#: The gains of the controllers that swing up the pendulum.
GAINS = ("published", "braked")
#: What every pass over data counts.
PASS = {
    **{"loss": LOSS, "samples": POSITIVE, "backward_nfe": COUNT},
    **dict.fromkeys(("backward_accepted", "backward_rejected", "published_accepted", "published_rejected"), COUNT),
}
MORE = {
    **{"seconds": AMOUNT, "accuracy": SHARE},
    **dict.fromkeys(("forward_nfe", "forward_accepted", "forward_rejected", "backward_vjp_params", "drifted"), COUNT),
}
TOTALS = Record(
    {"forward_nfe": AMOUNT, "backward_nfe": AMOUNT},
    dict.fromkeys(("backward_accepted", "backward_rejected", "drifted"), COUNT),
    Anything(),
)
SECONDS = Record(
    {"training": AMOUNT, "training_processor": AMOUNT}, {"preparation": AMOUNT, "evaluation": AMOUNT}, Anything()
)
PROBE = Record(
    {"iterations": COUNT, **dict.fromkeys(("mixed", "seminorm", "best"), ListOf(COUNT, least=1))}, other=Anything()
)
SWING = Record({"off": ListOf(Number()), "settled": maybe(AMOUNT)}, {"largest_torques": ListOf(Number())}, Anything())


def _pass(experiment: str) -> Record:
    """One pass over the data of a split. Only the neural CDE classifies."""
    accuracy = {"accuracy": SHARE} if experiment == "ncde" else {}
    return Record(PASS | accuracy, MORE, Anything())


def check_metrics(found: Sequence[Mapping[str, Any]], experiment: str, complete: bool) -> None:
    """Check the evaluations of a run. A complete run has some; all make a pass over the training set, or none does."""
    required = {"epoch": COUNT, "validation": _pass(experiment)}
    optional: dict[str, Form] = {"lr": AMOUNT, "totals": TOTALS, "seconds": SECONDS, "probe": PROBE}
    if found and "train" in found[0]:
        required["train"] = _pass(experiment)
    else:
        optional["train"] = Nothing()
    ListOf(Record(required, optional, Anything()), least=1 if complete else 0).check(found)


def check_result(found: Mapping[str, Any], experiment: str, epochs: int, trains: bool) -> None:
    """Check the result of a run of so many epochs at most, with a pass over the training set or maybe without."""
    each = _pass(experiment)
    required: dict[str, Form] = {"validation": each, "test": each, "totals": TOTALS, "seconds": SECONDS}
    required |= {"epochs": Number(1, epochs, integer=True), "best_epoch": Number(-1, epochs - 1, integer=True)}
    required["peak_memory"] = maybe(COUNT)
    control = Record(optional=dict.fromkeys(GAINS, maybe(SWING)), other=Anything())
    optional: dict[str, Form] = {"device_memory": COUNT, "control": control}
    (required if trains else optional)["train"] = each
    Record(required, optional, Anything()).check(found)


# Arrays.


def arrays(name: str) -> Record:
    """The form of the arrays in a file: the times of an evaluation, or a swing-up. Others are not read."""
    if name.startswith("times-"):
        return Record(other=Array(1))
    if name != "control":
        return Record(other=Anything())
    states = {f"{gains}_states": Array(2, 4) for gains in GAINS}
    torques = {f"{gains}_torques": Array(2, 2) for gains in GAINS}
    return Record(optional={"ts": Array(1), **states, **torques}, other=Anything())


def check_arrays(name: str, found: Mapping[str, np.ndarray]) -> None:
    """Check the arrays of a file, and that those of a swing-up belong together."""
    arrays(name).check(dict(found))
    if name != "control":
        return
    for gains in GAINS:
        states, torques = (found.get(f"{gains}_{what}") for what in ("states", "torques"))
        if states is None and torques is None:
            continue
        sizes = [None if x is None else len(x) for x in (found.get("ts"), states, torques)]
        if None in sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise Unlike(f"{gains}: expected as many states and torques as times, found {sizes}")


# Checkpoints.

_CHECKPOINT = Record(
    {
        **{"groups": ListOf(Record({"lr": AMOUNT}, other=Anything()), least=1), "plateau": Record(other=Anything())},
        **{"iterations": COUNT, "peak_memory": maybe(COUNT), "stopped": Flag()},
        "best": ListOf(Number(finite=False), 2),
        "seconds": Record(other=AMOUNT),
        "totals": Record(other=COUNT),
    },
    {"batch": COUNT},
    Anything(),
)


def check_checkpoint(found: Mapping[str, Any]) -> None:
    """Check the numbers of a checkpoint."""
    _CHECKPOINT.check(found)
