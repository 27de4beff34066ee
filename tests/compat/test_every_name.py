"""A program with every public name and every option of both peers, run with the originals and with the drop-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("every_name.py")
#: Relative distances of results; by default that of solves with a relative tolerance of 1e-5.
DISTANCES = {"times of odeint_adjoint on a grid": 0.2, "odeint_adjoint dopri8": 1e-4, "adjoint_rtol": 1e-3}
#: Warnings of torch and SciPy that tell nothing about a drop-in.
FOREIGN = ("Converting a tensor with requires_grad=True", "The following arguments have no effect for a chosen solver")
#: Cases whose warning says the same in other words.
REWORDED = ("rectilinear",)


def run(*command: str) -> dict[str, Any]:
    """What the program prints. The order of sets in messages depends on the seed of hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *command, str(PROGRAM)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def leaves(values: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, list):
        yield place, len(values)
        for i, value in enumerate(values):
            yield from leaves(value, f"{place}[{i}]")
    else:
        yield place, values


def differences(name: str, theirs: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between the outcomes of a case."""
    if theirs["error"] or found["error"]:
        same = theirs["error"] and found["error"] and theirs["error"][0] in found["error"]
        return [] if same else [f"{name}: expected error {theirs['error']}, found {found['error']}"]
    wrong = []
    before, after = (
        [w for w in outcome["warnings"] if not w.startswith(FOREIGN)] for outcome in (theirs, found)
    )  # fmt: skip
    if (len(before) != len(after)) if name in REWORDED else before != after:
        wrong.append(f"{name}: expected warnings {before}, found {after}")
    pairs = dict(leaves(theirs["values"])), dict(leaves(found["values"]))
    if pairs[0].keys() != pairs[1].keys():
        return [*wrong, f"{name}: expected {len(pairs[0])} values, found {len(pairs[1])}"]
    for place, expected in pairs[0].items():
        value = pairs[1][place]
        if expected is None or value is None:
            same = expected is value
        else:
            same = value == pytest.approx(expected, rel=DISTANCES.get(name, 3e-5), abs=1e-6, nan_ok=True)
        if not same:
            wrong.append(f"{name}{place}: expected {expected}, found {value}")
    return wrong


@pytest.mark.slow
def test_a_program_with_every_name_and_option() -> None:
    theirs, found = run(), run("-m", "seminode.compat")
    assert theirs.keys() == found.keys()
    assert len(theirs) > 120
    failed = sum(bool(outcome["error"]) for outcome in theirs.values())
    assert 10 < failed < 30  # the mistakes, and nothing else
    wrong = [line for name in theirs for line in differences(name, theirs[name], found[name])]
    assert not wrong, "\n".join(wrong)


def test_the_comparison_notices_differences() -> None:
    same: dict[str, Any] = {"values": [1.0, [2.0]], "error": None, "warnings": ["a"]}
    assert differences("case", same, same) == []
    for other in ({"values": [1.0, [2.1]]}, {"values": [1.0]}, {"warnings": []}, {"error": ["ValueError"]}):
        assert len(differences("case", same, {**same, **other})) == 1
    raised = {**same, "error": ["AssertionError", "Exception"]}
    assert differences("case", raised, {**raised, "error": ["Own", "AssertionError", "Exception"]}) == []
