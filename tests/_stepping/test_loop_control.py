"""What the stepping loop does with what its collaborators say, by stubs: no field, no numerics."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from stubs import (
    Outcome,
    StubController,
    StubEngine,
    StubMemory,
    StubObserver,
    StubSchedule,
    StubSolver,
    number,
    plans,
)
from torch import Tensor

import seminode as sn
from seminode._stepping import loop
from seminode._stepping.known_plans import RecordedSchedule
from seminode._stepping.loop import integrate
from seminode._stepping.observers import Observer
from seminode._stepping.schedule import Schedule
from seminode._stepping.step import Step

START = StubMemory(number(0.0), None, "start")
REJECTED, ACCEPTED = Outcome(ratio=4.0), Outcome(ratio=0.5)
FAILED = Outcome(failure="the iteration did not converge")


def run(stub: StubEngine, schedule: Any, *observers: Observer, controlled: bool = True, **options: Any) -> Any:
    """Integrate from 0 with the stub's counter, and its norm where steps are controlled."""
    error = stub.norm if controlled else None
    return integrate(
        stub.engine, schedule, number(0.0), [stub.counter, *observers], memory=START, error=error, **options
    )


# The solver's memory


def test_memory_is_handed_on_after_acceptance() -> None:
    stub = StubEngine.of()
    y, memory = run(stub, StubSchedule(plans(3)))
    assert y.item() == 3.0
    assert [(m.copy.item(), m.slope, m.guess) for m in stub.solver.asked] == [
        (0.0, None, "start"),
        (1.0, None, "start+"),
        (2.0, None, "start++"),
    ]
    assert (memory.copy.item(), memory.slope, memory.guess) == (3.0, None, "start+++")
    assert stub.evaluate.asked == [(0.0, 0), (1.0, 0), (2.0, 0)]


def test_the_slope_at_the_end_is_the_first_one_of_the_next_step() -> None:
    stub = StubEngine.of(fsal=True)
    _, memory = run(stub, StubSchedule(plans(3)))
    slopes = [m.slope for m in stub.solver.asked]
    assert slopes[0] is None
    assert [k.item() for k in slopes[1:] if k is not None] == [1.0, 2.0]  # the evaluations' own numbers
    assert memory.slope is not None
    assert memory.slope.item() == 3.0
    assert stub.evaluate.asked == [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 1)]


def test_a_rejected_step_is_tried_again_with_what_it_learned() -> None:
    stub = StubEngine.of(REJECTED, REJECTED, ACCEPTED, fsal=True)
    y, _ = run(stub, StubSchedule(plans(1)))
    assert y.item() == 1.0
    first, second, third = stub.solver.asked
    assert first is START
    for again in (second, third):
        assert (again.copy.item(), again.guess) == (0.0, "retried")  # not the copy of the rejected step
        assert again.slope is not None
        assert again.slope.item() == 0.0
    # The first slope once, then the slope at the end of each attempt.
    assert stub.evaluate.asked == [(0.0, 0), (1.0, 1), (0.5, 1), (0.25, 1)]


def test_a_failed_step_is_tried_again_without_its_slopes() -> None:
    stub = StubEngine.of(FAILED, ACCEPTED)
    run(stub, StubSchedule(plans(1)))
    again = stub.solver.asked[1]
    assert (again.copy.item(), again.slope, again.guess) == (0.0, None, "retried")


@pytest.mark.parametrize("fsal", [False, True])
def test_memory_is_forgotten_across_a_jump(fsal: bool) -> None:
    before, after = plans(2)
    stub = StubEngine.of(fsal=fsal)
    run(stub, StubSchedule([before._replace(landing=True, crosses_jump=True), after]))
    again = stub.solver.asked[1]
    assert (again.copy.item(), again.slope, again.guess) == (1.0, None, "recalled")
    assert stub.counter.jumps == 1
    first_slopes = [t for t, stage in stub.evaluate.asked if stage == 0]
    assert first_slopes == [0.0, 1.0]


def test_a_step_before_a_jump_that_is_rejected_keeps_its_first_slope() -> None:
    stub = StubEngine.of(REJECTED, ACCEPTED)
    only = plans(1)[0]._replace(final=False, crosses_jump=True)
    run(stub, StubSchedule([only]))
    again = stub.solver.asked[1]
    assert again.slope is not None
    assert again.guess == "retried"


# Failures of the solver


def test_a_failure_counts_as_a_rejection_with_an_infinite_ratio() -> None:
    calls: list[Any] = []
    stub = StubEngine.of(FAILED, FAILED, ACCEPTED)
    schedule = StubSchedule(plans(1))
    y, _ = run(stub, schedule, StubObserver("observer", calls))
    assert y.item() == 1.0
    assert [ratio for _, ratio in schedule.judged] == [math.inf, math.inf, 0.5]
    assert [call[1:] for call in calls] == [
        ("rejected", 0.0, 1.0, math.inf),
        ("rejected", 0.0, 0.5, math.inf),
        ("accepted", 0.0, 0.25, 0.5),
    ]
    assert (stub.counter.n_accepted, stub.counter.n_rejected) == (1, 2)


@pytest.mark.parametrize("fsal", [False, True])
def test_of_a_failed_step_nothing_is_evaluated_or_estimated(fsal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubEngine.of(FAILED, fsal=fsal)
    monkeypatch.setattr(stub.solver, "error", lambda dt, slopes: pytest.fail("estimated"))
    with pytest.raises(sn.StepFailure):
        run(stub, StubSchedule(plans(1), smallest=2.0), controlled=False)
    assert stub.evaluate.asked == [(0.0, 0)]


@pytest.mark.parametrize("check", [True, False])
def test_a_failure_of_a_fixed_step_is_an_error(check: bool) -> None:
    """Also where steps are followed that were taken before, whose states are not looked at."""
    calls: list[Any] = []
    stub = StubEngine.of(ACCEPTED, FAILED, controlled=False)
    with pytest.raises(sn.StepFailure, match=r"^at t = 1 .* a step of 1: the iteration did not converge") as caught:
        run(stub, RecordedSchedule(plans(3)), StubObserver("observer", calls), controlled=False, check=check)
    assert (caught.value.t, caught.value.dt, caught.value.status) == (1.0, 1.0, "step failure")
    assert len(calls) == 1


def test_a_failure_that_shrinking_does_not_help_is_an_error() -> None:
    stub = StubEngine.of(*[FAILED] * 10)
    schedule = StubSchedule([plans(2)[0]], smallest=0.2)
    with pytest.raises(sn.StepFailure, match=r"however small .*: the iteration did not converge") as caught:
        run(stub, schedule)
    assert (caught.value.t, caught.value.dt) == (0.0, 0.125)
    assert [plan.dt for plan, _ in schedule.judged] == [1.0, 0.5, 0.25]


def test_a_failure_of_an_earlier_step_is_not_blamed() -> None:
    """A step that failed, one that was accepted, and one that is too short for another reason."""
    first, second, _ = plans(3)
    stub = StubEngine.of(FAILED, ACCEPTED, REJECTED)
    with pytest.raises(sn.StepSizeUnderflow, match="misses the tolerance by a factor of 4"):
        run(stub, StubSchedule([first, second._replace(dt=0.4)], smallest=0.3))


@pytest.mark.parametrize("controller", [sn.FixedStep(0.25), sn.Integral(dt0=0.25)], ids=["fixed", "adaptive"])
def test_a_solver_that_fails_once(controller: Any) -> None:
    """The same through `solve`."""
    y0 = number(0.0)
    solver = StubSolver([ACCEPTED, FAILED])
    tolerances = {"rtol": 1.0, "atol": 1.0} if controller.adaptive else {}
    options: dict[str, Any] = {"solver": solver, "controller": controller, "throw": False, **tolerances}
    sol = sn.solve(lambda t, y: torch.ones_like(y), y0, [0.0, 1.0], **options)
    if controller.adaptive:
        assert sol.status is sn.Status.SUCCESS
        assert sol.stats.rejected == 1
    else:
        assert sol.status is sn.Status.STEP_FAILURE
        assert isinstance(sol.error, sn.StepFailure)
        assert (sol.stats.accepted, sol.stats.rejected) == (1, 0)
        assert sol.error.t == 0.25


# Limits


def test_the_number_of_attempts_is_limited() -> None:
    stub = StubEngine.of(ACCEPTED, REJECTED)
    with pytest.raises(sn.MaxStepsReached, match=r"^3 steps were tried .* only reached t = 2 ") as caught:
        run(stub, StubSchedule(plans(3)), max_steps=3)
    assert (caught.value.t, caught.value.dt) == (2.0, 1.0)
    assert len(stub.solver.asked) == 3


def test_as_many_steps_as_are_allowed() -> None:
    stub = StubEngine.of()
    run(stub, StubSchedule(plans(3)), max_steps=3)
    assert stub.counter.attempts == 3


def test_the_limit_holds_over_several_calls_with_one_counter() -> None:
    stub = StubEngine.of()
    run(stub, StubSchedule(plans(2)), max_steps=3)
    with pytest.raises(sn.MaxStepsReached):
        run(stub, StubSchedule(plans(2)), max_steps=3)
    assert stub.counter.attempts == 3


def test_a_step_that_misses_the_tolerance_however_small() -> None:
    stub = StubEngine.of(*[REJECTED] * 10)
    with pytest.raises(sn.StepSizeUnderflow, match=r"a step of 0.25 misses the tolerance by a factor of 4") as caught:
        run(stub, StubSchedule([plans(2)[0]], smallest=0.2))
    assert (caught.value.t, caught.value.dt) == (0.0, 0.25)  # of the step that was tried last


def test_a_step_that_is_not_finite_however_small() -> None:
    stub = StubEngine.of(*[Outcome(math.inf, change=math.nan)] * 10)
    with pytest.raises(sn.NonFiniteState, match=r"just after t = 0 .* however small the step") as caught:
        run(stub, StubSchedule([plans(2)[0]], smallest=0.2))
    assert (caught.value.dt, caught.value.leaf) == (0.125, "y")
    assert len(stub.solver.asked) == 3


def test_a_step_that_is_too_small_from_the_start() -> None:
    stub = StubEngine.of()
    with pytest.raises(sn.StepSizeUnderflow, match="has an error right at the tolerance"):
        run(stub, StubSchedule([plans(2)[0]], smallest=2.0))
    with pytest.raises(sn.StepSizeUnderflow, match="a step of 1 is too small to move the clock; take a larger dt"):
        run(stub, StubSchedule([plans(2)[0]], smallest=2.0), controlled=False)
    assert stub.solver.asked == []


def test_a_step_that_lands_may_be_as_short_as_it_must() -> None:
    stub = StubEngine.of()
    y, _ = run(stub, StubSchedule(plans(1), smallest=2.0))
    assert y.item() == 1.0


def test_states_of_fixed_steps_are_looked_at_where_that_is_wanted() -> None:
    bad = Outcome(change=math.inf)
    with pytest.raises(sn.NonFiniteState, match="became NaN or infinite at t = 2 ") as caught:
        run(StubEngine.of(ACCEPTED, bad, controlled=False), StubSchedule(plans(3)), controlled=False)
    assert (caught.value.t, caught.value.dt) == (2.0, 1.0)
    unchecked = StubEngine.of(ACCEPTED, bad, controlled=False)
    y, _ = run(unchecked, StubSchedule(plans(3)), controlled=False, check=False)
    assert y.item() == math.inf


def test_a_leaf_that_is_not_finite_is_named_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states on a device, only whether all of their entries are finite is read."""
    where = "the state became NaN or infinite at t = 1"
    for host, message, leaf in ((True, f"{where} (leaf y, dt = 1).", "y"), (False, f"{where} (dt = 1).", None)):
        monkeypatch.setattr(loop, "on_host", lambda x, host=host: host)
        stub = StubEngine.of(Outcome(change=math.inf), controlled=False)
        with pytest.raises(sn.NonFiniteState, match=re.escape(message)) as caught:
            run(stub, StubSchedule(plans(1)), controlled=False, together=True)
        assert caught.value.leaf == leaf


def test_every_fixed_step_is_accepted_with_no_ratio() -> None:
    calls: list[Any] = []
    stub = StubEngine.of(controlled=False)
    run(stub, StubSchedule(plans(2)), StubObserver("observer", calls), controlled=False)
    assert all(math.isnan(call[-1]) for call in calls)
    assert stub.counter.n_accepted == 2


# Observers


def test_observers_are_called_in_order() -> None:
    calls: list[Any] = []
    observers = [StubObserver(name, calls) for name in ("a", "b")]
    run(StubEngine.of(REJECTED, ACCEPTED, ACCEPTED), StubSchedule(plans(2)), *observers)
    expected = [("rejected", 0.0, 1.0, 4.0), ("accepted", 0.0, 0.5, 0.5), ("accepted", 1.0, 1.0, 0.5)]
    assert calls == [(name, *call) for call in expected for name in ("a", "b")]


def test_observers_are_called_before_the_next_step_is_tried() -> None:
    order: list[str] = []

    class Noting(Observer):
        def accepted(self, step: Step, ratio: float) -> None:
            order.append(f"accepted {step.plan.t0:g}")

    stub = StubEngine.of()
    stub.solver.before_step = lambda: order.append("step")
    run(stub, StubSchedule(plans(2)), Noting())
    assert order == ["step", "accepted 0", "step", "accepted 1"]


class Reading(Observer):
    """Asks for the slope at the end of every step."""

    def __init__(self) -> None:
        self.read: list[float] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self.read.append(step.end_slope().item())


def test_a_slope_that_observers_ask_for_is_evaluated_once_and_handed_on() -> None:
    stub, readers = StubEngine.of(), [Reading(), Reading()]
    run(stub, StubSchedule(plans(3)), *readers)
    assert stub.evaluate.asked == [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 1)]
    assert readers[0].read == readers[1].read == [1.0, 2.0, 3.0]


def test_a_slope_that_an_observer_asks_for_before_a_jump_is_not_handed_on() -> None:
    before, after = plans(2)
    stub = StubEngine.of()
    run(stub, StubSchedule([before._replace(landing=True, crosses_jump=True), after]), Reading())
    assert stub.evaluate.asked == [(0.0, 0), (1.0, 1), (1.0, 0), (2.0, 1)]


# What stays alive


def alive_before_steps(stub: StubEngine) -> list[list[int]]:
    """Which answers of the evaluator are alive before each attempt; filled in while the loop runs."""
    alive: list[list[int]] = []

    def note() -> None:
        stub.solver.asked.clear()  # which holds slopes
        alive.append(stub.evaluate.alive())

    stub.solver.before_step = note
    return alive


@pytest.mark.parametrize("fsal", [False, True])
def test_slopes_are_released_before_the_next_step(fsal: bool) -> None:
    """But for the one with which it starts."""
    stub = StubEngine.of(fsal=fsal, stages=3)
    alive = alive_before_steps(stub)
    run(stub, StubSchedule(plans(3)))
    assert alive == ([[], [3], [6]] if fsal else [[], [], []])


@pytest.mark.parametrize("outcome", [REJECTED, FAILED], ids=["rejected", "failed"])
def test_slopes_of_a_step_that_is_tried_again_are_released(outcome: Outcome) -> None:
    stub = StubEngine.of(outcome, outcome, ACCEPTED, fsal=True, stages=3)
    alive = alive_before_steps(stub)
    run(stub, StubSchedule(plans(1)))
    assert alive == ([[], [], []] if outcome is FAILED else [[], [0], [0]])


# Landing, by the real schedule


def schedule(*proposals: float, **options: Any) -> Schedule:
    return Schedule(StubController(proposals), 1, [0.0, 4.0], options.pop("jumps", ()), torch.float64, **options)


def steps_of(made: Schedule, stub: StubEngine) -> list[tuple[float, float, bool]]:
    """Where the accepted steps start and end, and whether they land."""
    taken: list[tuple[float, float, bool]] = []

    class Taken(Observer):
        def accepted(self, step: Step, ratio: float) -> None:
            taken.append((step.plan.t0, step.plan.t1, step.plan.landing))

    run(stub, made, Taken())
    return taken


def test_steps_land_on_the_end() -> None:
    assert steps_of(schedule(1.5, 1.5, 1.5), StubEngine.of()) == [
        (0.0, 1.5, False),
        (1.5, 3.0, False),
        (3.0, 4.0, True),
    ]


def test_steps_land_on_jumps_and_on_given_times() -> None:
    stub = StubEngine.of()
    made = schedule(1.5, 1.5, 1.5, 1.5, jumps=[2.0], step_to=[1.0])
    assert steps_of(made, stub) == [(0.0, 1.0, True), (1.0, 2.0, True), (2.0, 3.5, False), (3.5, 4.0, True)]
    assert [m.guess for m in stub.solver.asked] == ["start", "start+", "recalled", "recalled+"]


def test_a_landing_that_is_rejected_is_tried_again_shorter() -> None:
    stub = StubEngine.of(ACCEPTED, REJECTED, ACCEPTED, ACCEPTED)
    assert steps_of(schedule(3.0, 3.0, 3.0, jumps=()), stub) == [
        (0.0, 3.0, False),
        (3.0, 3.5, False),  # half of what the landing would have been
        (3.5, 4.0, True),
    ]


def test_a_jump_is_forgotten_only_when_it_is_crossed() -> None:
    """The step that starts on the jump and is rejected still starts there."""
    stub = StubEngine.of(ACCEPTED, REJECTED, ACCEPTED, ACCEPTED)
    steps_of(schedule(2.0, 2.0, 2.0, jumps=[2.0]), stub)
    just_after = math.nextafter(2.0, 3.0)
    assert [t for t, stage in stub.evaluate.asked if stage == 0][:2] == [0.0, just_after]
    assert [m.guess for m in stub.solver.asked] == ["start", "recalled", "retried", "retried+"]


def test_a_solve_past_its_end_without_landing() -> None:
    assert steps_of(schedule(3.0, 3.0, land=False), StubEngine.of()) == [(0.0, 3.0, False), (3.0, 6.0, False)]


def test_the_first_slope_may_be_known() -> None:
    known: Tensor = number(7.0)
    stub = StubEngine.of()
    integrate(stub.engine, StubSchedule(plans(1)), number(0.0), [stub.counter], memory=StubMemory(number(0.0), known))
    assert stub.evaluate.asked == []
