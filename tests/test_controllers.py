"""Step-size control, compared with the published formulas and with torchdiffeq."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchdiffeq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seminode as sn
from seminode._stepping.schedule import Schedule, neighbours
from seminode.controllers import PIDPreset


def field(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1] * (1 + 0.3 * torch.sin(5 * t)), -3 * torch.sin(y[0])])


Y0 = torch.tensor([1.2, 0.0], dtype=torch.float64)


def published(rtol: float, atol: float, end: float) -> tuple[list[float], int]:
    """Accepted steps and number of rejections of the elementary controller with dopri5, in a plain loop."""
    a = [
        [],
        [1 / 5],
        [3 / 40, 9 / 40],
        [44 / 45, -56 / 15, 32 / 9],
        [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
        [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
        [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
    ]
    c = [0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1, 1]
    hat = [1951 / 21600, 0, 22642 / 50085, 451 / 720, -12231 / 42400, 649 / 6300, 1 / 60]

    def norm(x: Tensor) -> float:
        return float((x**2).mean().sqrt())

    def f(t: float, y: Tensor) -> Tensor:
        return field(torch.tensor(t, dtype=torch.float64), y)

    y, t, k1 = Y0, 0.0, f(0.0, Y0)
    scale = atol + rtol * y.abs()
    d0, d1 = norm(y / scale), norm(k1 / scale)
    h0 = 1e-6 if d0 < 1e-5 or d1 < 1e-5 else 0.01 * d0 / d1
    d2 = norm((f(h0, y + h0 * k1) - k1) / scale) / h0
    h1 = max(1e-6, 1e-3 * h0) if d1 <= 1e-15 and d2 <= 1e-15 else (0.01 / max(d1, d2)) ** (1 / 5)
    dt, steps, rejected = min(100 * h0, h1), [], 0
    while t < end:
        dt = min(dt, end - t)
        ks = [k1]
        for i in range(1, 7):
            ks.append(f(t + c[i] * dt, y + dt * sum(w * k for w, k in zip(a[i], ks, strict=True))))
        y1 = y + dt * sum(w * k for w, k in zip(a[6], ks, strict=False))
        error = dt * sum((b - bh) * k for b, bh, k in zip([*a[6], 0], hat, ks, strict=True))
        r = norm(error / (atol + rtol * torch.maximum(y.abs(), y1.abs())))
        floor = 1.0 if r < 1 else 0.2
        factor = 10.0 if r == 0 else min(10.0, max(0.9 * r ** (-1 / 5), floor))
        if r <= 1:
            steps.append(dt)
            t, y, k1 = (end if t + dt >= end else t + dt), y1, ks[6]
        else:
            rejected += 1
        dt *= factor
    return steps, rejected


@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-7])
def test_integral_controller_is_the_published_one(rtol: float) -> None:
    steps, rejected = published(rtol, 1e-2 * rtol, 6.0)
    sol = sn.solve(field, Y0, [0.0, 6.0], rtol=rtol, atol=1e-2 * rtol, record=True)
    assert sol.record is not None
    assert sol.stats.rejected == rejected
    assert [plan.dt for plan in sol.record.accepted] == pytest.approx(steps, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_same_steps_as_torchdiffeq(seed: int) -> None:
    """The same NFE up to the last step, which torchdiffeq does not shorten to the end of the interval."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    y0 = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    calls: list[float] = []

    def random_field(t: Tensor, y: Tensor) -> Tensor:
        calls.append(float(t))
        return torch.tanh(y @ w) * torch.cos(t) - 0.1 * y

    ts = torch.tensor([0.0, 5.0], dtype=torch.float64)
    with torch.no_grad():
        sol = sn.solve(random_field, y0, ts, rtol=1e-5, atol=1e-7)
        ours = len(calls)
        calls.clear()
        theirs_ys: Any = torchdiffeq.odeint(random_field, y0, ts, rtol=1e-5, atol=1e-7)
    assert ours == sol.stats.nfe
    assert abs(len(calls) - ours) <= 6  # a shortened last step may be accepted where the long one is rejected
    assert torch.allclose(sol.ys[-1], theirs_ys[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", sn.PID.PRESETS)
def test_presets_solve_and_differ(preset: PIDPreset) -> None:
    sol = sn.solve(field, Y0, [0.0, 6.0], rtol=1e-6, atol=1e-8, controller=sn.PID.preset(preset), record=True)
    plain = sn.solve(field, Y0, [0.0, 6.0], rtol=1e-6, atol=1e-8, record=True)
    tight = sn.solve(field, Y0, [0.0, 6.0], rtol=1e-11, atol=1e-12)
    assert torch.allclose(sol.ys[-1], tight.ys[-1], atol=1e-4)
    assert sol.record is not None
    assert plain.record is not None
    assert [p.dt for p in sol.record.accepted] != [p.dt for p in plain.record.accepted]
    assert sol.stats.rejected <= plain.stats.rejected


#: The published exponents (β₁, β₂, β₃) of the error ratios rₙ, rₙ₋₁, rₙ₋₂.
BETAS: dict[PIDPreset, tuple[float, float, float]] = {
    "H211PI": (1 / 6, 1 / 6, 0.0),
    "H312PID": (1 / 18, 1 / 9, 1 / 18),
    "PI33": (2 / 3, -1 / 3, 0.0),
    "PI34": (0.7, -0.4, 0.0),
    "PI42": (0.6, -0.2, 0.0),
}


@pytest.mark.parametrize("order", [3, 5])
@pytest.mark.parametrize("preset", sn.PID.PRESETS)
def test_presets_have_the_published_exponents(preset: PIDPreset, order: int) -> None:
    """dt ← dt · 0.9 · rₙ^(−β₁/k) · rₙ₋₁^(−β₂/k) · rₙ₋₂^(−β₃/k), where all ratios but one are 1."""
    for i, beta in enumerate(BETAS[preset]):
        ratio, *history = (0.5 if j == i else 1.0 for j in range(3))
        verdict = sn.PID.preset(preset).judge(0.1, 0.1, ratio, order, tuple(history))
        assert verdict.accept
        assert verdict.proposal == pytest.approx(0.1 * 0.9 * 0.5 ** (-beta / order), rel=1e-12)


def test_pid_uses_the_last_three_error_ratios() -> None:
    """p = 1, i = 2, d = 3 and k = 1 give β = (6, −7, 3), and powers of 2 as error ratios give proposals by hand."""
    pid = sn.PID(pcoeff=1.0, icoeff=2.0, dcoeff=3.0)
    _, history = pid.first()
    proposals = []
    for ratio in (1 / 8, 1 / 4, 1 / 2):
        verdict = pid.judge(0.1, 0.1, ratio, 1, history)
        proposals.append(verdict.proposal)
        history = verdict.history
    assert history == (1 / 2, 1 / 4)
    # 8⁶ is above factor_max = 10; 4⁶/8⁷ = 2⁻⁹ is below factor_min = 0.2; 0.9 · 2⁶/4⁷ · 8³ = 0.9 · 2.
    assert proposals == pytest.approx([0.1 * 10.0, 0.1 * 0.2, 0.1 * 1.8], rel=1e-12)


def test_pid_with_only_an_integral_part_is_integral_without_its_lower_bound() -> None:
    pid, integral = sn.PID(pcoeff=0.0, icoeff=1.0), sn.Integral()
    for ratio in (1e-4, 0.3, 0.5):
        assert pid.judge(0.1, 0.1, ratio, 5, (1.0, 1.0)).proposal == pytest.approx(
            integral.judge(0.1, 0.1, ratio, 5, (1.0, 1.0)).proposal
        )
    assert pid.judge(0.1, 0.1, 0.9, 5, (1.0, 1.0)).proposal < 0.1
    assert integral.judge(0.1, 0.1, 0.9, 5, (1.0, 1.0)).proposal == 0.1


@given(ratio=st.floats(0.0, 1e12), dt=st.floats(1e-6, 10.0))
def test_verdicts_stay_inside_their_limits(ratio: float, dt: float) -> None:
    for controller in (sn.Integral(), *map(sn.PID.preset, sn.PID.PRESETS)):
        verdict = controller.judge(dt, dt, ratio, 5, (1.0, 1.0))
        assert verdict.accept == (ratio <= 1.0)
        assert 0.2 * dt * (1 - 1e-12) <= verdict.proposal <= 10 * dt * (1 + 1e-12)
        if not verdict.accept:
            assert verdict.proposal < dt


@pytest.mark.parametrize("ratio", [math.nan, math.inf])
def test_a_ratio_that_is_not_finite_is_rejected(ratio: float) -> None:
    assert sn.Integral().judge(1.0, 1.0, ratio, 5, (1.0, 1.0)) == (False, 0.2, (1.0, 1.0))


def test_bounds_on_the_step() -> None:
    sol = sn.solve(field, Y0, [0.0, 3.0], rtol=1e-3, controller=sn.Integral(dt_max=0.05), record=True)
    assert sol.record is not None
    assert max(p.dt for p in sol.record.accepted) == pytest.approx(0.05)
    forced = sn.Integral(dt_min=0.2, at_dt_min="accept")
    sol = sn.solve(field, Y0, [0.0, 3.0], rtol=1e-10, atol=1e-12, controller=forced, record=True)
    assert sol.record is not None
    assert all(p.dt >= 0.2 - 1e-12 for p in sol.record.accepted[:-1])
    with pytest.raises(sn.StepSizeUnderflow):
        sn.solve(field, Y0, [0.0, 3.0], rtol=1e-10, atol=1e-12, controller=sn.Integral(dt_min=0.2))


@pytest.mark.parametrize("controller", [sn.Integral(step_to=(0.3, 1.1)), sn.FixedStep(0.2, step_to=(0.3, 1.1))])
def test_step_to_times(controller: Any) -> None:
    """Steps end on these times without extra evaluations."""
    options: dict[str, Any] = {"rtol": 1e-3} if controller.adaptive else {}
    sol = sn.solve(field, Y0, [0.0, 2.0], controller=controller, record=True, **options)
    assert sol.record is not None
    ends = {p.t1 for p in sol.record.accepted}
    assert {0.3, 1.1} <= ends
    assert sol.stats.jumps == 0
    probe = 2 if controller.adaptive else 0
    assert sol.stats.nfe == probe + 6 * (sol.stats.accepted + sol.stats.rejected)


def test_fixed_steps_reach_the_end_without_a_tiny_last_step() -> None:
    for end, dt, n in ((1.0, 0.1, 10), (0.3, 0.1, 3), (1.0, 0.3, 4), (1e4, 0.1, 100_000)):
        schedule = Schedule(sn.FixedStep(dt), 5, [0.0, end], [], torch.float64)
        count = 0
        while (plan := schedule.next()) is not None:
            assert schedule.judge(plan, math.nan)
            count += 1
        assert count == n


def test_prescribed_steps_repeat_a_recorded_solve() -> None:
    options: dict[str, Any] = {"jumps": [1.0], "record": True}
    first = sn.solve(field, Y0, [0.0, 3.0], rtol=1e-5, **options)
    assert first.record is not None
    again = sn.solve(field, Y0, [0.0, 3.0], controller=sn.PrescribedSteps.recorded(first.record), **options)
    assert again.record is not None
    assert [p[:3] for p in again.record.accepted] == [p[:3] for p in first.record.accepted]
    assert torch.equal(first.ys, again.ys)


@settings(max_examples=50, deadline=None)
@given(t=st.floats(-1e6, 1e6, width=32))
def test_neighbours(t: float) -> None:
    for dtype in (torch.float32, torch.float64):
        below, above = neighbours(t, dtype)
        at = torch.tensor(t, dtype=dtype)
        assert torch.tensor(below, dtype=dtype) < at < torch.tensor(above, dtype=dtype)


@pytest.mark.parametrize("n", [7, 18, 24, 49, 93])
@pytest.mark.parametrize("ts", [(0.0, 1.0), (1.0, 0.0), (-1.0, 0.0), (0.0, -1.0)])
def test_fixed_steps_of_one_nth_take_n_steps(n, ts):
    sol = sn.solve(lambda t, y: -y, torch.ones(1), ts, solver="euler", controller=sn.FixedStep(1 / n))
    assert sol.stats.accepted == n


@pytest.mark.parametrize(
    "controller",
    [
        sn.Integral(),
        sn.Integral(dt_min=0.05, at_dt_min="accept", dt_max=0.5),
        sn.PID(),
        sn.PID.preset("H312PID"),
    ],
    ids=str,
)
def test_tensors_of_samples_are_judged_as_numbers_are(controller: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(200, dtype=torch.float64, generator=generator)

    ratio = torch.exp(uniform(-12.0, 4.0))
    ratio[:6] = torch.tensor([0.0, 1.0, torch.inf, torch.nan, 1e-300, 1e300])
    proposal = uniform(0.01, 1.0)
    taken = torch.where(uniform(0.0, 1.0) < 0.3, proposal * uniform(0.01, 1.0), proposal)
    history = uniform(0.1, 2.0), uniform(0.1, 2.0)
    each = controller.judge(taken, proposal, ratio, 5, history)
    for i in range(len(ratio)):
        past = tuple(float(h[i]) for h in history)
        alone = controller.judge(float(taken[i]), float(proposal[i]), float(ratio[i]), 5, past)
        assert bool(each.accept[i]) == alone.accept
        assert float(each.proposal[i]) == pytest.approx(alone.proposal, rel=1e-14)
        if isinstance(controller, sn.PID):
            assert tuple(float(h[i]) for h in each.history) == alone.history


@pytest.mark.parametrize(("proposal", "predicts"), [(5.0, True), (10.0, True), (10.1, False), (19.0, False)])
def test_the_error_of_a_much_shortened_step_does_not_predict(proposal: float, predicts: bool) -> None:
    """A step of 0.5 that was shortened by more than a factor of 20 changes neither the proposal nor the history."""
    controller, history = sn.PID.preset("PI42"), (0.7, 0.6)
    verdict = controller.judge(0.5, proposal, 1e-3, 5, history)
    assert verdict.accept
    assert verdict.history == ((1e-3, 0.7) if predicts else history)
    assert (verdict.proposal == proposal) is not predicts
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (0.5, proposal, 1e-3)]
    judge: Any = controller.judge
    each = judge(*tensors, 5, tuple(torch.tensor([h], dtype=torch.float64) for h in history))
    assert [float(h) for h in each.history] == list(verdict.history)
    assert float(each.proposal) == pytest.approx(verdict.proposal)


def test_prescribed_steps_that_run_out_go_on_to_the_times_to_step_to() -> None:
    controller = sn.PrescribedSteps([0.1], step_to=[0.5, 0.7])
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], controller=controller, save="steps")
    assert sol.ts.tolist() == pytest.approx([0.0, 0.1, 0.5, 0.7, 1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_times_to_step_to_are_finite(bad: float) -> None:
    with pytest.raises(ValueError, match=r"step_to\[1\]: expected a finite time"):
        sn.Integral(step_to=[0.5, bad])


@pytest.mark.parametrize(
    "factors", [{"factor_min": 1.5}, {"factor_max": 0.9}, {"factor_min": 1.0}, {"factor_max": 1.0}]
)
def test_factors_lie_on_both_sides_of_one(factors: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected factor_min < 1 < factor_max"):
        sn.Integral(**factors)
    assert sn.Integral(factor_min=0.9, factor_max=1.5).factor_max == 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"safety": 1.01}, r"^safety: expected at most 1, found 1.01$"),
        ({"dt_min": 0.3, "dt_max": 0.2}, r"^dt_min: expected 0 <= dt_min <= dt_max = 0.2, found 0.3$"),
        ({"dt_min": -0.1}, r"^dt_min: expected 0 <= dt_min <= dt_max = inf, found -0.1$"),
        ({"dt_min": math.inf}, r"^dt_min: .*found inf$"),
        ({"dt0": 0.05, "dt_min": 0.1}, r"^dt0: expected between dt_min = 0.1 and dt_max = inf, found 0.05$"),
        ({"dt0": 0.3, "dt_max": 0.2}, r"^dt0: expected between dt_min = 0.0 and dt_max = 0.2, found 0.3$"),
        ({"at_dt_min": "stop"}, r"^at_dt_min: expected 'raise' or 'accept', found 'stop'$"),
        ({"at_dt_min": "accept"}, r"^at_dt_min: 'accept' does nothing without a dt_min$"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.Integral(**options)


def test_bounds_may_be_equal() -> None:
    controller = sn.Integral(safety=1.0, dt_min=0.1, dt0=0.1, dt_max=0.1)
    assert controller.first() == (0.1, (1.0, 1.0))
    assert sn.Integral(dt0=0.1, dt_min=0.1, at_dt_min="accept").first()[0] == 0.1


def test_an_unknown_preset_is_refused() -> None:
    name: Any = "PI35"
    with pytest.raises(ValueError, match=r"^name: expected one of PI33, PI34, PI42, H211PI, H312PID, found 'PI35'$"):
        sn.PID.preset(name)


@pytest.mark.parametrize(("ratio", "factor"), [(0.0, 10.0), (0.999, 1.0), (1.0, 0.9), (0.9**5, 1.0), (1e-10, 10.0)])
def test_growth_of_the_elementary_controller(ratio: float, factor: float) -> None:
    """0.9·r^(−1/k), at least 1 below the tolerance, at most 10; on the tolerance itself the step shrinks."""
    assert sn.Integral().judge(0.5, 0.5, ratio, 5, (1.0, 1.0)).proposal == pytest.approx(0.5 * factor, rel=1e-12)
    if ratio > 0.0:
        assert sn.Integral().growth(ratio, 5, ()) == pytest.approx(max(factor, 0.9 * ratio**-0.2), rel=1e-12)


@pytest.mark.parametrize(("ratio", "factor"), [(1.0 + 1e-9, 0.9), (2.0**5, 0.45), (10.0**5, 0.2), (0.95**-5, 0.855)])
def test_a_rejected_step_shrinks_by_the_integral_rule(ratio: float, factor: float) -> None:
    """0.9·r^(−1/k), at least 0.2, whatever the history; `PID` does the same."""
    for controller in (sn.Integral(), sn.PID.preset("H312PID")):
        verdict = controller.judge(0.5, 0.5, ratio, 5, (0.1, 7.0))
        assert verdict == (False, pytest.approx(0.5 * factor, rel=1e-8), (0.1, 7.0))


def test_a_step_of_the_least_length_is_accepted_whatever_its_error() -> None:
    """The step itself or what was proposed, up to `dt_min` and not above it; an error that is not finite is no step."""
    controller = sn.Integral(dt_min=0.1, at_dt_min="accept")
    for dt, proposal, accept in (
        (0.1, 0.1, True),
        (0.05, 0.3, True),
        (0.1 + 1e-9, 0.1 + 1e-9, False),
        (0.2, 0.1, True),
    ):
        assert controller.judge(dt, proposal, 50.0, 5, (1.0, 1.0)).accept is accept
    assert controller.judge(0.1, 0.1, math.inf, 5, (1.0, 1.0)) == (False, 0.1 * 0.2, (1.0, 1.0))
    assert controller.judge(0.2, 0.2, 50.0, 5, (1.0, 1.0)).proposal == 0.1
    assert not sn.Integral(dt_min=0.1).judge(0.1, 0.1, 50.0, 5, (1.0, 1.0)).accept


def test_a_shortened_step_grows_back_to_its_proposal_at_once() -> None:
    """By more than `factor_max`, if the error allows."""
    assert sn.Integral().judge(0.1, 1.5, 0.0, 5, (1.0, 1.0)).proposal == pytest.approx(1.5)
    assert sn.Integral().judge(0.1, 0.5, 0.0, 5, (1.0, 1.0)).proposal == pytest.approx(1.0)
    assert sn.Integral().judge(0.1, 1.5, 0.9**5, 5, (1.0, 1.0)).proposal == pytest.approx(0.1)
