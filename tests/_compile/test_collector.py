"""Python's garbage collector is paused while programs are made, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import replace_back_end

import seminode as sn
from seminode._compile.collector import collector_paused
from seminode._compile.graph import FieldGraph


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_goes_on_afterwards() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_it_is_paused_while_programs_are_made_and_runs_during_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    run: list[bool] = []

    def back_end(module: Any, examples: list[Any]) -> Any:
        made.append(gc.isenabled())

        def program(inputs: list[Any]) -> list[Any]:
            run.append(gc.isenabled())
            return list(module(*inputs))

        return program

    replace_back_end(monkeypatch, back_end)
    sn.solve(lambda t, y: -y, torch.ones(3), [0.0, 1.0], compile=True)
    assert made
    assert not any(made)
    assert run
    assert all(run)


def test_it_is_paused_while_a_field_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering: list[bool] = []
    lower = FieldGraph.lower

    def recorded(*args: Any) -> None:
        lowering.append(gc.isenabled())
        lower(*args)

    replace_back_end(monkeypatch)
    monkeypatch.setattr(FieldGraph, "lower", recorded)
    sn.solve(lambda t, y: -2.0 * y, torch.ones(3), [0.0, 1.0], compile=True)
    assert lowering == [False]
