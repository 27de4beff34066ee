"""Checkpoints: what is held, what is recalled, and how many steps are taken again, against the optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seminode._stepping.checkpoints import Checkpoints, advances, first_stretch, least_missed


class State:
    """The state before a step."""

    def __init__(self, step: int) -> None:
        self.step = step


class Solve:
    """A stub: counts the steps that it takes and watches how many states are alive."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.taken = 0
        self.checkpoints = Checkpoints[State](n)
        self._alive: WeakSet[State] = WeakSet()

    def state(self, step: int) -> State:
        state = State(step)
        self._alive.add(state)
        self.check_memory()
        return state

    def check_memory(self) -> None:
        assert len(self._alive) <= self.n + 1  # the n that are held and the one in hand
        assert len(self.checkpoints.steps) <= self.n

    def forward(self, steps: int) -> None:
        for step in range(steps):
            self.checkpoints.offer(step, self.state(step))
            self.check_memory()

    def undo(self, step: int) -> None:
        i, state = self.checkpoints.recall(step)
        assert state.step == i <= step
        del state  # so that the one in hand is the next one
        for k in range(i, step):
            self.taken += 1
            self.checkpoints.offer(k + 1, self.state(k + 1))
            self.check_memory()

    def backward(self, steps: int) -> int:
        """How many steps are taken on the way to those that are undone."""
        taken = self.taken
        for step in reversed(range(steps)):
            self.undo(step)
        return self.taken - taken


def cost(kept: tuple[int, ...], steps: int, n: int) -> int:
    """How many steps must be taken again to go back over all of them."""
    return sum(advances(end - start, n - j) for j, (start, end) in enumerate(pairwise([*kept, steps])))


def optimum(steps: int, n: int) -> int:
    """The least cost of any kept set: what revolve needs for one step more, without the sweep forward."""
    return advances(steps + 1, n) - steps


def most_repetitions(steps: int, n: int) -> int:
    """The least ρ with N + 1 <= C(n + ρ + 1, n): if N is known, no step has to be taken again more than ρ times."""
    return next(r for r in range(steps + 1) if steps + 1 <= math.comb(n + r + 1, n))


def online(n: int, steps: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each number of steps, and what is kept if the solve ends with it."""
    checkpoints = Checkpoints[None](n)
    for step in range(steps):
        checkpoints.offer(step, None)
        yield step + 1, checkpoints.steps


def online_by_levels(n: int, steps: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The same by the rule of Wang, Moin and Iaccarino (2009), algorithm 1."""
    levels = {0: math.inf}
    yield 1, (0,)
    for step in range(1, steps):
        level = 0.0
        if len(levels) == n:
            dispensable = [i for i in levels if any(k > i and levels[k] > levels[i] for k in levels)]
            dropped = levels.pop(dispensable[-1] if dispensable else max(levels))
            level = 0.0 if dispensable else dropped + 1
        levels[step] = level
        yield step + 1, tuple(levels)


# The optimum


@cache
def least_advances(steps: int, slots: int) -> int:
    if steps == 1 or slots == 1:
        return steps * (steps - 1) // 2
    return min(with_first_stretch(m, steps, slots) for m in range(1, steps))


def with_first_stretch(m: int, steps: int, slots: int) -> int:
    return m + least_advances(steps - m, slots - 1) + least_advances(m, slots)


@cache
def least_after_the_sweep(steps: int, slots: int) -> int:
    """As `least_advances`, but the first time through is free, and leaves only kept states behind."""
    if steps == 0 or slots == 1:
        return steps * (steps - 1) // 2
    return min(least_after_the_sweep(steps - m, slots - 1) + least_advances(m, slots) for m in range(1, steps + 1))


@pytest.mark.parametrize("slots", range(1, 8))
def test_binomial_formulas_against_dynamic_programming(slots: int) -> None:
    for steps in range(1, 80):
        assert advances(steps, slots) == least_advances(steps, slots)
        assert optimum(steps, slots) == least_after_the_sweep(steps, slots)
        if steps > 1 < slots:
            assert with_first_stretch(first_stretch(steps, slots), steps, slots) == least_advances(steps, slots)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_the_one_dropped_is_missed_least(gaps: list[int]) -> None:
    steps = [0]
    for gap in gaps:
        steps.append(steps[-1] + gap)
    costs = [cost((*steps[:i], *steps[i + 1 :]), steps[-1] + 1, len(gaps)) for i in range(1, len(steps))]
    assert costs[least_missed(steps) - 1] == min(costs)


# What is held and recalled


def both_passes(n: int, steps: int) -> None:
    solve = Solve(n)
    solve.forward(steps)
    kept = solve.checkpoints.steps
    assert solve.backward(steps) == cost(kept, steps, n)
    assert solve.checkpoints.steps == (0,)
    assert solve.backward(steps) == advances(steps, n)  # now the number of steps is known: optimal
    assert solve.checkpoints.steps == (0,)


@pytest.mark.parametrize("n", range(1, 21))
def test_both_passes_hold_and_recall_what_they_should(n: int) -> None:
    for steps in (*range(1, 26), 64, 100, 300):
        both_passes(n, steps)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 30), st.integers(1, 800))
def test_both_passes_of_any_length(n: int, steps: int) -> None:
    both_passes(n, steps)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(2, 100), st.data())
def test_a_pass_that_was_broken_off_starts_over(n: int, steps: int, data: Any) -> None:
    solve = Solve(n)
    solve.forward(steps)
    for step in reversed(range(data.draw(st.integers(0, steps - 2), "broken off at"), steps)):
        solve.undo(step)
    assert solve.backward(steps) == advances(steps, n)
    assert solve.checkpoints.steps == (0,)


def test_asking_again_for_the_same_step_forgets_nothing() -> None:
    checkpoints = Checkpoints[str](3)
    for step in range(9):
        checkpoints.offer(step, f"y{step}")
    for _ in range(2):
        assert checkpoints.recall(8) == (7, "y7")
    assert checkpoints.steps == (0, 4, 7)


def test_nothing_is_taken_again_while_everything_fits() -> None:
    solve = Solve(7)
    solve.forward(7)
    assert solve.checkpoints.steps == tuple(range(7))
    assert solve.backward(7) == 0


def test_one_state_costs_a_square() -> None:
    solve = Solve(1)
    solve.forward(50)
    assert solve.checkpoints.steps == (0,)
    assert solve.backward(50) == 50 * 49 // 2


# How many steps are taken again


@pytest.mark.parametrize("n", range(1, 21))
def test_steps_taken_again_without_knowing_their_number(n: int) -> None:
    """At most N ρ, and never far above the optimum: 1.22 for n = 2 (N = 13), 1.10 for n = 3 (N = 11), 1.08 from n = 4
    on (N = 73) are the worst."""
    factor = {1: 1.0, 2: 1.22, 3: 1.1}.get(n, 1.08)
    for steps, kept in online(n, 1500):
        found, best = cost(kept, steps, n), optimum(steps, n)
        assert best <= found <= factor * best, steps
        assert found <= most_repetitions(steps, n) * steps, steps


@pytest.mark.parametrize("n", [2, 3, 5, 10, 20])
def test_fewer_steps_are_taken_again_than_with_levels(n: int) -> None:
    ours = [cost(kept, steps, n) for steps, kept in online(n, 600)]
    levels = [cost(kept, steps, n) for steps, kept in online_by_levels(n, 600)]
    best = [optimum(steps, n) for steps in range(1, 601)]
    worst_of_ours, worst_of_levels = (
        max(found / least for found, least in zip(costs, best, strict=True) if least > 0) for costs in (ours, levels)
    )
    assert worst_of_ours < worst_of_levels
    assert sum(ours) < sum(levels)


# Bad input


@pytest.mark.parametrize("n", [0, -1, True, 2.0, math.inf, "3", None])
def test_bad_n(n: Any) -> None:
    with pytest.raises(ValueError, match=r"^n: expected a whole number of at least 1, found ") as error:
        Checkpoints(n)
    assert str(error.value).endswith(f"found {n!r}")


def test_steps_are_offered_in_order() -> None:
    checkpoints = Checkpoints[str](2)
    with pytest.raises(ValueError, match=r"^step: expected 0, found 1$"):
        checkpoints.offer(1, "y1")
    for step in range(5):
        checkpoints.offer(step, f"y{step}")
    with pytest.raises(ValueError, match=r"^step: expected 5, found 4$"):
        checkpoints.offer(4, "y4")
    i, _ = checkpoints.recall(2)
    with pytest.raises(ValueError, match=rf"^step: expected {i + 1}, found 5$"):
        checkpoints.offer(5, "y5")


@pytest.mark.parametrize("step", [-1, 3])
def test_only_what_was_offered_can_be_recalled(step: int) -> None:
    checkpoints = Checkpoints[str](2)
    with pytest.raises(ValueError, match=rf"^step: expected 0 <= step < 0, found {step}$"):
        checkpoints.recall(step)
    for i in range(3):
        checkpoints.offer(i, f"y{i}")
    with pytest.raises(ValueError, match=rf"^step: expected 0 <= step < 3, found {step}$"):
        checkpoints.recall(step)


def test_what_is_kept_beyond_a_step() -> None:
    checkpoints = Checkpoints[str](3)
    for step in range(9):
        checkpoints.offer(step, f"y{step}")
    assert checkpoints.steps == (0, 4, 7)
    expected = [(4, "y4")] * 4 + [(7, "y7")] * 3 + [None, None]
    assert [checkpoints.beyond(step) for step in range(9)] == expected
