"""Several steps by one call: the same steps, counted one by one, and only where they can be taken so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
import seminode.extending
from seminode._compile import ahead, chain
from seminode._compile.inductor import compile_graph
from seminode._stepping.known_plans import ForeseenSchedule, RecordedSchedule
from seminode._stepping.schedule import Schedule


class Swinging(nn.Module):
    """A small network and a force that depends on the time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) + torch.sin(3.0 * t)


FIELD = Swinging()
Y0 = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def has_chains() -> bool:
    """Whether the sources of libraries can be edited, as they cannot in torch 2.8."""
    program: Any = compile_graph(lambda x: [x + 1.0], [torch.ones(2)])
    program.wait()
    return program.chain is not None


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch, has_chains: bool) -> list[int]:
    """How many steps each chain has."""
    if not has_chains:
        pytest.skip("one step at a time with this version of torch")
    found: list[int] = []
    steps = chain.Chain.steps

    def noted(self: Any, clocks: Any, *args: Any) -> Any:
        found.append(len(clocks))
        return steps(self, clocks, *args)

    monkeypatch.setattr(chain.Chain, "steps", noted)
    return found


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LARGEST", -1)


def solved(solver: Any, ts: list[float], y0: Tensor = Y0, **options: Any) -> sn.Solution:
    return sn.solve(FIELD, y0, ts, solver=solver, compile=True, record=True, **options)


CONTROLLERS = {
    "fixed": {"controller": sn.FixedStep(0.04)},
    "with a jump": {"controller": sn.FixedStep(0.04), "jumps": [0.51]},
    "landing": {"controller": sn.FixedStep(0.07, step_to=[0.5])},
    "prescribed": {"controller": sn.PrescribedSteps([0.01] * 20 + [0.02] * 60)},
}


@pytest.mark.parametrize("ts", [[0.0, 1.0], [1.0, 0.0], [0.0, 0.3, 0.31, 0.9, 1.0]], ids=["one", "back", "several"])
@pytest.mark.parametrize("options", CONTROLLERS.values(), ids=CONTROLLERS)
@pytest.mark.parametrize("solver", ["euler", "midpoint", "tsit5"])
def test_steps_of_a_chain_are_those_taken_one_by_one(
    solver: str, options: Any, ts: list[float], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        together = solved(solver, ts, **options)
        assert max(lengths) > 3
        one_by_one(monkeypatch)
        del lengths[:]
        alone = solved(solver, ts, **options)
    assert not lengths
    assert torch.equal(together.ys, alone.ys)
    assert together.stats == alone.stats
    assert together.record == alone.record


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Replay(every=8), sn.Checkpointed(3)], ids=repr)
def test_gradients_through_chains_are_those_without(
    adjoint: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> list[Tensor]:
        y0 = Y0.clone().requires_grad_()
        sol = sn.solve(FIELD, y0, [0.0, 3.0], rtol=1e-6, atol=1e-6, adjoint=adjoint, compile=True)
        return [*torch.autograd.grad(sol.ys[-1].square().sum(), [y0, *FIELD.parameters()])]

    together = gradients()
    found = list(lengths)
    one_by_one(monkeypatch)
    alone = gradients()
    assert lengths == found
    assert found or adjoint != sn.Replay(every=8)  # the others take too few steps at a time
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


def test_parameters_that_change_between_solves_are_seen(lengths: list[int]) -> None:
    scale = torch.ones(3)
    solutions = []
    for value in (1.0, -2.0):
        scale.fill_(value)
        with torch.no_grad():
            sol = sn.solve(lambda t, y: scale * y, Y0, [0.0, 1.0], controller=sn.FixedStep(0.05), compile=True)
        solutions.append(sol.ys[-1])
        expected = Y0 * torch.exp(scale)
        assert torch.allclose(sol.ys[-1], expected, rtol=1e-3)
    assert len(lengths) == 4


def test_a_state_that_becomes_infinite_is_refused_at_its_step(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure() -> sn.errors.NonFiniteState:
        with torch.no_grad(), pytest.raises(sn.errors.NonFiniteState) as error:
            sn.solve(lambda t, y: y * y, 3.0 + Y0.abs(), [0.0, 1.0], controller=sn.FixedStep(0.02), compile=True)
        return error.value

    together = failure()
    assert lengths
    one_by_one(monkeypatch)
    alone = failure()
    assert (together.t, together.stats) == (alone.t, alone.stats)


def test_steps_too_small_for_the_clock_are_refused() -> None:
    with pytest.raises(sn.errors.StepSizeUnderflow, match="too small to move the clock"):
        sn.solve(FIELD, Y0, [1.0, 2.0], controller=sn.FixedStep(1e-18), compile=True)


def test_max_steps_counts_steps_that_were_handed_out(lengths: list[int]) -> None:
    with torch.no_grad(), pytest.raises(sn.errors.MaxStepsReached) as error:
        sn.solve(FIELD, Y0, [0.0, 1.0], solver="tsit5", controller=sn.FixedStep(0.02), compile=True, max_steps=7)
    assert lengths[0] > 7
    assert error.value.stats is not None
    assert error.value.stats.accepted == 7


def test_a_step_that_fails_but_is_never_asked_for_is_no_error(lengths: list[int]) -> None:
    table = torch.ones(8)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return table[y.long()]  # as far as the table goes

    options: Any = {"solver": "euler", "controller": sn.FixedStep(0.1), "compile": True}
    with torch.no_grad():
        sol = sn.solve(field, torch.tensor([7.25]), [0.0, 5.0], max_steps=5, throw=False, **options)
        assert lengths
        assert sol.status is sn.Status.MAX_STEPS_REACHED
        assert sol.stats.accepted == 5
        with pytest.raises(RuntimeError, match="out of bounds"):
            sn.solve(field, torch.tensor([7.25]), [0.0, 5.0], **options)


def test_large_states_and_watched_solves_take_one_step_at_a_time(lengths: list[int]) -> None:
    large = torch.zeros(ahead.LARGEST // 3 + 1, 3)
    with torch.no_grad():
        solved("euler", [0.0, 1.0], large, controller=sn.FixedStep(0.1))
        solved("euler", [0.0, 1.0], controller=sn.FixedStep(0.1), observers=[seminode.extending.Observer()])
    assert not lengths


def test_states_in_another_memory_layout_take_one_step_at_a_time(lengths: list[int]) -> None:
    with torch.no_grad():
        sol = solved("euler", [0.0, 1.0], torch.randn(3, 5).T, controller=sn.FixedStep(0.1))
        expected = sn.solve(FIELD, sol.ys[0], [0.0, 1.0], solver="euler", controller=sn.FixedStep(0.1))
    assert torch.allclose(sol.ys, expected.ys, atol=1e-6)


@pytest.mark.parametrize("solver", ["tsit5", "fehlberg2"])
def test_a_rejected_first_step_from_a_state_with_gaps_is_taken_alone_again(
    solver: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    y0 = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))[:, ::2]
    options: Any = {"solver": solver, "controller": sn.Integral(dt0=2.0), "rtol": 1e-5, "atol": 1e-6, "record": True}

    def run() -> sn.Solution:
        return sn.solve(lambda t, y: 5.0 * FIELD(t, y), y0, [0.0, 2.0], compile=True, **options)

    with torch.no_grad():
        together = run()
        assert lengths
        one_by_one(monkeypatch)
        alone = run()
    assert together.record is not None
    assert together.record.rejected[0].t0 == 0.0
    assert torch.equal(together.ys, alone.ys)
    assert (together.stats, together.record) == (alone.stats, alone.record)


def test_the_source_of_a_library_of_another_form_is_left_as_it_is() -> None:
    entry = "auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);\n"
    usual = entry + "output_handles[0] = a.release();\noutput_handles[1] = b.release();"
    assert "#define SEMINODE_INPUTS 2\n#define SEMINODE_OUTPUTS 2\n" in chain.with_chain(usual)
    for other in ("", entry, entry + entry + "output_handles[0] = a;", entry + "output_handles[1] = b;"):
        assert chain.with_chain(other) == other


def test_plans_can_be_looked_at_before_they_are_handed_out() -> None:
    schedule = Schedule(sn.FixedStep(0.25), 1, [0.0, 1.0], [], torch.float64)
    plans = ForeseenSchedule(schedule)
    first, *_ = looked = plans.ahead(2)
    assert [plan.t1 for plan in looked] == [0.25, 0.5]
    assert plans.next() is first
    assert [plan.t1 for plan in plans.ahead(10)] == [0.5, 0.75, 1.0]
    assert [plan.t1 for plan in iter(plans.next, None)] == [0.5, 0.75, 1.0]
    assert plans.ahead(3) == RecordedSchedule([]).ahead(3) == []


STIFFER = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3, bias=False)).requires_grad_(False)


def adaptive(ts: list[float], **options: Any) -> sn.Solution:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return 3.0 * STIFFER(y) + torch.tanh(40.0 * torch.sin(6.0 * t)) * y  # whose bends make steps fail

    return sn.solve(field, Y0, ts, rtol=1e-5, atol=1e-6, compile=True, record=True, **options)


ADAPTIVE = {
    "by default": {},
    "with bounds": {"controller": sn.Integral(dt_max=0.1, factor_max=1.5, safety=0.7)},
    "past the end": {"controller": sn.Integral(land=False)},
    "landing": {"controller": sn.Integral(step_to=[0.2, 0.7])},
    "with a jump": {"jumps": [0.51]},
    "without a last slope": {"solver": "fehlberg2"},
}


@pytest.mark.parametrize("ts", [[0.0, 1.5], [1.5, 0.0], [0.0, 0.3, 0.31, 0.9, 1.5]], ids=["one", "back", "several"])
@pytest.mark.parametrize("options", ADAPTIVE.values(), ids=ADAPTIVE)
def test_foretold_steps_are_those_that_the_controller_plans(
    options: Any, ts: list[float], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = []
    take = ahead.AheadStepper._take  # pyright: ignore[reportPrivateUsage]

    def noted(self: Any, plan: Any, y0: Tensor, memory: Any) -> None:
        dropped.extend(self._taken)
        take(self, plan, y0, memory)

    monkeypatch.setattr(ahead.AheadStepper, "_take", noted)
    with torch.no_grad():
        together = adaptive(ts, **options)
        found = list(lengths)
        one_by_one(monkeypatch)
        alone = adaptive(ts, **options)
    assert found
    assert lengths == found
    assert not dropped
    assert torch.equal(together.ys, alone.ys)
    assert together.stats == alone.stats
    assert together.stats.rejected > 0
    assert together.record == alone.record


def test_wrong_forecasts_change_no_number(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        expected = adaptive([0.0, 1.5])
    forecast = Schedule.forecast

    def wrong(self: Schedule) -> list[float] | None:
        numbers = forecast(self)
        return numbers and [*numbers[:9], 0.8 * numbers[9], *numbers[10:]]  # with more safety

    monkeypatch.setattr(Schedule, "forecast", wrong)
    del lengths[:]
    with torch.no_grad():
        found = adaptive([0.0, 1.5])
    assert len(lengths) == 1  # after the first wrong one, nothing is foretold any more
    assert torch.equal(found.ys, expected.ys)
    assert (found.stats, found.record) == (expected.stats, expected.record)


@pytest.mark.parametrize(
    "options", [{"controller": sn.PID()}, {"controller": sn.Integral(dt_min=1e-6, at_dt_min="accept")}, {"norm": "own"}]
)
def test_other_controllers_and_norms_are_not_foretold(options: Any, lengths: list[int]) -> None:
    if "norm" in options:
        options = {"norm": lambda y: y.abs().max()}
    with torch.no_grad():
        adaptive([0.0, 1.5], **options)
    assert not lengths


def test_events_are_searched_in_one_step_at_a_time(lengths: list[int]) -> None:
    with torch.no_grad():
        adaptive([0.0, 1.5], event=sn.Event(lambda t, y: y[0, 0] - 100.0))
    assert not lengths
