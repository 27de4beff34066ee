"""solve(..., batched=True): every sample of a batch has its own clock, steps and status."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping import lane_control
from seminode._stepping.lane_control import each_lane
from seminode._stepping.lane_outputs import LaneOutputs
from seminode._stepping.lane_places import Marks
from seminode._stepping.lane_plan import LanePlan
from seminode._stepping.lanes import LaneSchedule, mean_interval
from seminode.controllers import Adaptive, History, Verdict
from seminode.solvers import RK4, Dopri5

DOUBLE = torch.float64


def van_der_pol(t: Tensor, y: Tensor, mu: Tensor) -> Tensor:
    x, v = y[..., 0], y[..., 1]
    return torch.stack([v, mu * (1 - x**2) * v - x], -1)


def oscillators(count: int, highest: float = 30.0) -> tuple[Tensor, Tensor]:
    mu = torch.logspace(-1, math.log10(highest), count, dtype=DOUBLE)
    return torch.tensor([2.0, 0.0], dtype=DOUBLE).repeat(count, 1), mu


TS = torch.linspace(0, 5, 7, dtype=DOUBLE)


class Cautious(Adaptive):
    """A controller for numbers only."""

    def growth(self, ratio: float, order: int, history: History) -> float:
        return 0.8 * math.exp(-math.log(max(ratio, 1e-10)) / (order + 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"controller": sn.PID.preset("PI42")},
        {"controller": sn.PID.preset("H312PID"), "solver": "tsit5"},
        {"controller": sn.Integral(dt0=0.1, dt_max=0.2)},
        {"controller": sn.Integral(dt_min=1e-2, at_dt_min="accept")},
        {"controller": sn.Integral(step_to=(0.7, 2.1))},
        {"controller": Cautious()},
        {"controller": sn.FixedStep(0.01)},
        {"controller": sn.FixedStep(0.01), "solver": "rk4"},
        {"controller": sn.PrescribedSteps([0.01] * 100, step_to=[1.5]), "solver": "midpoint"},
        {"solver": "tsit5"},
        {"solver": "dopri8"},
        {"solver": "adaptive_heun", "rtol": 1e-4, "atol": 1e-4},
        {"jumps": [1.3, 2.0]},
        {"norm": "max"},
        {"save": "last"},
    ],
    ids=str,
)
def test_samples_take_the_steps_that_they_take_alone(options: dict[str, Any]) -> None:
    y0, mu = oscillators(9, 10.0)
    controller = options.get("controller")
    ts = TS[TS <= 1.0] if isinstance(controller, sn.PrescribedSteps) else TS
    sol = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True, **options)
    assert sol.stats.per_sample is not None
    for i in range(len(y0)):
        alone = sn.solve(van_der_pol, y0[i], ts, args=(mu[i],), **options)
        torch.testing.assert_close(sol.ys[:, i], alone.ys, rtol=1e-9, atol=1e-9)
        assert int(sol.stats.per_sample.accepted[i]) == alone.stats.accepted
        assert int(sol.stats.per_sample.rejected[i]) == alone.stats.rejected
    torch.testing.assert_close(sol.ts, ts if options.get("save") != "last" else ts[-1:])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_times_of_every_sample(sign: float) -> None:
    y0, mu = oscillators(5)
    ts = sign * (TS * torch.linspace(0.2, 1.0, 5, dtype=DOUBLE)[:, None] + torch.arange(5, dtype=DOUBLE)[:, None])

    def field(t: Tensor, y: Tensor, mu: Tensor) -> Tensor:
        assert t.shape in ((), (5,))
        return van_der_pol(t, y, mu) * sign + torch.cos(t)[..., None]

    sol = sn.solve(field, y0, ts, args=(mu,), batched=True)
    assert sol.ts.shape == (7, 5)
    for i in range(5):
        alone = sn.solve(field, y0[i], ts[i], args=(mu[i],))
        torch.testing.assert_close(sol.ys[:, i], alone.ys, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(sol.ts[:, i], ts[i])


def test_a_sample_with_an_empty_interval_stays_where_it_is() -> None:
    y0, mu = oscillators(3)
    ts = torch.stack([TS, torch.full_like(TS, 2.0), TS])
    sol = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True)
    assert torch.equal(sol.ys[:, 1], y0[1].expand(7, 2))
    assert sol.stats.per_sample is not None
    assert int(sol.stats.per_sample.accepted[1]) == 0
    whole = sn.solve(van_der_pol, y0, torch.full((3, 2), 1.0, dtype=DOUBLE), args=(mu,), batched=True)
    assert torch.equal(whole.ys, y0.expand(2, 3, 2))
    assert whole.stats.accepted == 0


def test_structures_keep_their_leaves() -> None:
    y0, mu = oscillators(4)
    tree = {"x": y0[:, 0], "rest": (y0[:, 1:], torch.zeros(4, 2, 2, dtype=DOUBLE))}

    def field(t: Tensor, y: Any, mu: Tensor) -> Any:
        x, v = y["x"], y["rest"][0][:, 0]
        energy = (x**2 + v**2)[:, None, None].expand(-1, 2, 2) * torch.cos(t)[:, None, None]
        return {"x": v, "rest": ((mu * (1 - x**2) * v - x)[:, None], energy)}

    sol = sn.solve(field, tree, TS, args=(mu,), batched=True, norm=sn.norms.Without((False, False, True)))
    assert sol.ys["x"].shape == (7, 4)
    assert sol.ys["rest"][1].shape == (7, 4, 2, 2)
    plain = sn.solve(van_der_pol, y0, TS, args=(mu,), batched=True)
    torch.testing.assert_close(sol.ys["x"], plain.ys[..., 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    rate = torch.tensor([0.5, 2.0, 5.0])
    y0 = torch.ones(3, 2, dtype=dtype)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return -rate.to(y.dtype)[:, None] * y

    sol = sn.solve(field, y0, [0.0, 0.3, 1.0], batched=True)
    assert sol.ys.dtype == dtype
    expected = torch.exp(-rate).to(dtype)[:, None].expand(3, 2)
    torch.testing.assert_close(sol.ys[-1], expected, rtol=3e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)


def test_a_function_of_the_outputs_sees_one_time_per_sample() -> None:
    y0, mu = oscillators(3)
    sol = sn.solve(van_der_pol, y0, TS, args=(mu,), batched=True, save=lambda t, y: t + y[:, 0])
    plain = sn.solve(van_der_pol, y0, TS, args=(mu,), batched=True)
    torch.testing.assert_close(sol.ys, TS[:, None] + plain.ys[..., 0])


# ── Gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Inputs:
    """A problem with every kind of differentiable input."""

    def __init__(self, own_times: bool, times_too: bool = True):
        generator = torch.Generator().manual_seed(1)
        self.weight = (0.7 * torch.randn(3, 3, dtype=DOUBLE, generator=generator)).requires_grad_()
        self.rate = torch.linspace(0.5, 8, 4, dtype=DOUBLE).requires_grad_()
        self.y0 = torch.randn(4, 3, dtype=DOUBLE, generator=generator).requires_grad_()
        ts = torch.tensor([0.0, 0.13, 0.4, 0.743, 1.0], dtype=DOUBLE)
        if own_times:
            ts = ts * torch.linspace(1, 2, 4, dtype=DOUBLE)[:, None] + 0.1 * torch.arange(4, dtype=DOUBLE)[:, None]
        self.ts = ts.requires_grad_(times_too)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.y0, self.ts, self.rate, self.weight) if x.requires_grad]

    def field(self) -> Callable[..., Tensor]:
        weight = self.weight

        def field(t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
            side = torch.where(t < 0.5, 1.0, 0.3)
            return torch.tanh(y @ weight) * torch.cos(rate * t)[..., None] - (rate * side)[..., None] * y

        return field

    def batched(self, **options: Any) -> Tensor:
        ys = sn.solve(self.field(), self.y0, self.ts, args=(self.rate,), batched=True, **options).ys
        return loss(ys)

    def alone(self, **options: Any) -> Tensor:
        solutions = [
            sn.solve(self.field(), y0, self.ts if self.ts.ndim == 1 else self.ts[i], args=(rate,), **options).ys
            for i, (y0, rate) in enumerate(zip(self.y0, self.rate, strict=True))
        ]
        return loss(torch.stack(solutions, 1))


def loss(ys: Tensor) -> Tensor:
    return (ys * torch.cos(torch.arange(ys.numel(), dtype=DOUBLE)).reshape(ys.shape)).sum() + 0.1 * (ys**2).sum()


def gradients_of(value: Tensor, inputs: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(value, inputs.tensors))


ADJOINTS = [sn.Replay(), sn.Replay(every=3), sn.Checkpointed(3), sn.Direct()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
@pytest.mark.parametrize("own_times", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jumps": [0.5]},
        {"save": "last"},
        {"controller": sn.FixedStep(0.07)},
        {"solver": "adaptive_heun", "rtol": 1e-3},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_samples_alone(adjoint: Any, own_times: bool, options: dict[str, Any]) -> None:
    alone, together = Inputs(own_times), Inputs(own_times)
    expected = gradients_of(alone.alone(**options), alone)
    found = gradients_of(together.batched(adjoint=adjoint, **options), together)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_second_derivatives() -> None:
    alone, together = Inputs(False), Inputs(False)
    seconds = []
    for inputs, value in ((alone, alone.alone()), (together, together.batched())):
        first = torch.autograd.grad(value, [inputs.y0, inputs.rate], create_graph=True)
        seconds.append(torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), inputs.tensors))
    torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-6, atol=1e-7)


def test_gradients_for_times_are_those_of_the_frozen_map() -> None:
    """Central differences with the steps held fixed: fixed steps that depend on nothing."""
    options = {"controller": sn.FixedStep(0.11)}
    inputs = Inputs(True)
    found = gradients_of(inputs.batched(**options), inputs)[1]
    direction = torch.cos(torch.arange(inputs.ts.numel(), dtype=DOUBLE)).reshape(inputs.ts.shape)
    sides = []
    for h in (1e-5, -1e-5):
        moved = Inputs(True)
        moved.ts = (moved.ts.detach() + h * direction).requires_grad_()
        sides.append(float(moved.batched(**options).detach()))
    assert float((found * direction).sum()) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("times_too", [False, True])
@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Checkpointed(3), sn.Direct()], ids=str)
def test_compiled_gradients(adjoint: Any, times_too: bool) -> None:
    alone, together = Inputs(True, times_too), Inputs(True, times_too)
    expected = gradients_of(alone.alone(), alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sn.errors.CompileWarning)
        found = gradients_of(together.batched(adjoint=adjoint, compile=True), together)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_nothing_is_compiled_again_while_samples_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    from seminode._compile import inductor

    compiled: list[Any] = []
    back_end = inductor.back_end
    monkeypatch.setattr(inductor, "back_end", lambda *args: compiled.append(args) or back_end(*args))
    y0, mu = oscillators(6, 5.0)
    y0.requires_grad_()
    ts = TS * torch.linspace(0.1, 1.0, 6, dtype=DOUBLE)[:, None]
    counts = []
    for scale in (1.0, 0.7):
        sol = sn.solve(van_der_pol, y0, scale * ts, args=(mu,), batched=True, compile=True)
        sol.ys.square().sum().backward()
        counts.append(len(compiled))
    # An evaluation, a step, VJPs with and without outputs inside, and the step-size control.
    assert counts[0] == counts[1] <= 5


# ── Failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def growth(t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
    return rate[:, None] * y**2


BROKEN = [
    {},
    {"adjoint": sn.Direct()},
    {"adjoint": sn.Checkpointed(2)},
    {"controller": sn.FixedStep(0.05)},
    {"controller": sn.FixedStep(0.05), "adjoint": sn.Direct()},
    {"solver": "adaptive_heun", "rtol": 1e-3},
]


@pytest.mark.parametrize("options", BROKEN, ids=str)
def test_failed_samples_change_no_other(options: dict[str, Any]) -> None:
    """One is NaN from the start, one blows up on the way; shared weights get a finite gradient."""
    y0 = torch.linspace(0.1, 1, 12, dtype=DOUBLE).reshape(6, 2)
    rate = torch.tensor([0.1, 0.2, 0.0, 0.3, -1.0, 0.4], dtype=DOUBLE)
    ts = torch.linspace(0, 1, 5, dtype=DOUBLE)
    good, results = [0, 2, 4, 5], []
    for broken in (False, True):
        start, rates = y0.clone(), rate.clone()
        if broken:
            start[3] = torch.nan
            rates[1] = 2e200 if "controller" in options else 50.0
        start.requires_grad_()
        scale = torch.ones((), dtype=DOUBLE, requires_grad=True)
        field = lambda t, y, rate, scale=scale: scale * growth(t, y, rate)
        sol = sn.solve(field, start, ts, args=(rates,), batched=True, throw=False, **options)
        grads = torch.autograd.grad(sol.ys[:, good].sum(), [start, scale])
        results.append((sol, grads))
    (whole, grads), (partial, broken_grads) = results
    assert torch.equal(partial.ys[:, good], whole.ys[:, good])
    assert torch.equal(broken_grads[0][good], grads[0][good])
    assert torch.isfinite(broken_grads[1])
    assert torch.equal(broken_grads[0][[1, 3]], torch.zeros(2, 2, dtype=DOUBLE))
    assert partial.stats.per_sample is not None
    assert partial.stats.per_sample.failed == [1, 3]
    assert partial.stats.per_sample.statuses[3] is sn.Status.NON_FINITE_STATE
    assert partial.status is not sn.Status.SUCCESS
    assert partial.error is not None
    assert partial.error.samples == (1, 3)
    assert bool(torch.isnan(partial.ys[-1, [1, 3]]).all())
    assert bool(torch.isfinite(partial.ys[:, good]).all())


def test_one_nan_among_many_changes_no_other_by_a_bit() -> None:
    y0, mu = oscillators(1024, 3.0)
    ts = torch.linspace(0, 1, 3, dtype=DOUBLE)
    whole = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True)
    y0[300, 1] = torch.nan
    sol = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True, throw=False)
    others = torch.arange(1024) != 300
    assert torch.equal(sol.ys[:, others], whole.ys[:, others])
    assert bool(torch.isnan(sol.ys[1:, 300]).all())


def test_an_error_names_the_samples() -> None:
    y0 = torch.ones(12, 2, dtype=DOUBLE)
    rate = torch.zeros(12, dtype=DOUBLE)
    rate[4] = 50.0
    with pytest.raises(sn.StepSizeUnderflow, match=r"1 of 12 samples failed: sample 4 \(step size underflow") as caught:
        sn.solve(growth, y0, [0.0, 1.0], args=(rate,), batched=True)
    assert caught.value.samples == (4,)
    assert int(caught.value.stats.per_sample.accepted[0]) > 0
    y0[1:] = torch.nan
    with pytest.raises(sn.NonFiniteState, match=r"sample 8 .* and 3 more"):
        sn.solve(growth, y0, [0.0, 1.0], args=(torch.zeros(12, dtype=DOUBLE),), batched=True)


def test_a_gradient_that_is_not_finite_is_named_by_output_and_sample() -> None:
    y0, mu = oscillators(3, 2.0)
    sol = sn.solve(van_der_pol, y0.requires_grad_(), TS, args=(mu,), batched=True)
    weights = torch.ones_like(sol.ys)
    weights[4, 1] = torch.nan
    with pytest.raises(sn.NonFiniteState, match="output 4 of sample 1"):
        (weights * sol.ys).sum().backward()


def test_max_steps_counts_the_steps_of_each_sample() -> None:
    y0, mu = oscillators(4, 20.0)
    sol = sn.solve(van_der_pol, y0, TS, args=(mu,), batched=True, throw=False, max_steps=60)
    assert sol.stats.per_sample is not None
    total = sol.stats.per_sample.accepted + sol.stats.per_sample.rejected
    assert sol.stats.per_sample.statuses[-1] is sn.Status.MAX_STEPS_REACHED
    assert int(total[-1]) == 60
    assert sol.stats.per_sample.statuses[0] is sn.Status.SUCCESS
    assert int(total[0]) < 60


def test_all_samples_may_fail() -> None:
    y0 = torch.full((3, 2), torch.nan, dtype=DOUBLE)
    sol = sn.solve(growth, y0, [0.0, 1.0], args=(torch.zeros(3, dtype=DOUBLE),), batched=True, throw=False)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.failed == [0, 1, 2]


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjoint": sn.Backsolve()}, "adjoint: Backsolve has one backward clock.*sn.Replay"),
        ({"adjoint": sn.Interpolating()}, "adjoint: Interpolating"),
        ({"adjoint": sn.Quadrature()}, "adjoint: Quadrature"),
        ({"adjoint": sn.Reversible()}, "adjoint: Reversible"),
        (
            {"solver": sn.solvers.ReversibleHeun() if hasattr(sn.solvers, "ReversibleHeun") else "reversible_heun"},
            "solver",
        ),
        ({"norm": "auto"}, "norm: 'auto'.*Without"),
        ({"save": "steps"}, "save: 'steps' has no common shape"),
        ({"dense": True}, "dense: is not available"),
        ({"record": True}, "record: is not available.*per_sample"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    y0, mu = oscillators(3)
    with pytest.raises(ValueError, match=message):
        sn.solve(van_der_pol, y0, TS, args=(mu,), batched=True, **options)


@pytest.mark.parametrize(
    ("ts", "message"),
    [
        (torch.zeros(2, 7), r"expected shape \(T,\) or \(B, T\) with B = 3, found \(2, 7\)"),
        (torch.zeros(7, 3), r"found \(7, 3\); transpose it"),
        (torch.zeros(3, 2, 2), r"found \(3, 2, 2\)"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), "sample 0 goes forward and sample 1 backward"),
        (torch.tensor([[0.0, 1.0, 0.5, 2.0]] * 3), r"increasing, but ts\[0, 2\] = 0.5 after 1.0"),
        (torch.tensor([[0.0, 1.0], [0.0, torch.inf], [0.0, 1.0]]), r"ts\[1, 1\]: expected a finite time"),
    ],
    ids=str,
)
def test_times_that_make_no_sense(ts: Tensor, message: str) -> None:
    y0, mu = oscillators(3)
    with pytest.raises(ValueError, match=message):
        sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True)


def test_states_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"same size of the first axis.*3 in y0\[0\] and 2 in y0\[1\]"):
        sn.solve(lambda t, y: y, (torch.zeros(3, 2), torch.zeros(2, 2)), [0.0, 1.0], batched=True)
    with pytest.raises(ValueError, match="y0: with batched=True expected a batch axis"):
        sn.solve(lambda t, y: y, torch.zeros(()), [0.0, 1.0], batched=True)
    with pytest.raises(TypeError, match="batched: expected True or False"):
        sn.solve(lambda t, y: y, torch.zeros(3, 2), [0.0, 1.0], batched=1)  # type: ignore[call-overload]


def test_a_field_for_one_time_is_told_that_there_are_several() -> None:
    with pytest.raises(ValueError, match=r"batched.*t has shape \(3,\)"):
        sn.solve(lambda t, y: y if t < 1.0 else -y, torch.ones(3, 2), [0.0, 2.0], batched=True)
    with pytest.raises(ValueError, match=r"t has shape \(3,\).*size of tensor"):
        sn.solve(lambda t, y: torch.cos(t) * y, torch.ones(3, 2), [0.0, 2.0], batched=True)


def test_fields_that_couple_samples_are_refused() -> None:
    # As many samples as entries: the product broadcasts over the wrong axis.
    with pytest.raises(
        ValueError, match=r"derivative of sample 1 depends on the time or the state of sample 0.*t\[:, "
    ):
        sn.solve(lambda t, y: torch.cos(t) * y, torch.ones(3, 3), [0.0, 2.0], batched=True)
    with pytest.raises(ValueError, match="must not depend on each other"):
        sn.solve(lambda t, y: y.mean(0) - y, torch.rand(3, 2), [0.0, 2.0], batched=True)
    with pytest.raises(ValueError, match="must not depend on each other"):
        sn.solve(lambda t, y: y.flip(0), torch.rand(2, 1), [0.0, 2.0], batched=True)


@pytest.mark.slow
def test_a_thousand_oscillators() -> None:
    """Each is within the tolerance; the easy half takes far fewer steps than with a step size for all."""
    y0, mu = oscillators(1024, 100.0)
    ts = torch.tensor([0.0, 2.0], dtype=DOUBLE)
    tolerances: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
    sol = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True, **tolerances)
    exact = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True, rtol=1e-11, atol=1e-12, solver="dopri8")
    error = (sol.ys[-1] - exact.ys[-1]).abs() / (1e-6 + 1e-6 * exact.ys[-1].abs())
    assert float(error.square().mean(1).sqrt().max()) < 5.0  # the tolerance is one on the error of a step
    shared = sn.solve(van_der_pol, y0, ts, args=(mu,), norm="max", **tolerances)
    assert sol.stats.per_sample is not None
    assert float(sol.stats.per_sample.accepted[:512].double().mean()) * 5 < shared.stats.accepted
    for i in range(0, 1024, 93):
        alone = sn.solve(van_der_pol, y0[i], ts, args=(mu[i],), **tolerances)
        assert int(sol.stats.per_sample.accepted[i]) == alone.stats.accepted


def test_outputs_of_samples_that_go_backwards_in_time() -> None:
    """At times of each sample's own, inside of steps."""
    ts = torch.tensor([[2.0, 1.7, 0.4, 0.0], [1.0, 0.2, 0.1, -1.0]], dtype=torch.float64)
    y0 = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    sol = sn.solve(lambda t, y: torch.sin(t)[:, None] * y, y0, ts, batched=True, rtol=1e-9, atol=1e-9)
    exact = y0 * torch.exp(torch.cos(ts[:, :1]) - torch.cos(ts))
    torch.testing.assert_close(sol.ys[..., 0].T, exact, rtol=1e-7, atol=1e-7)


def test_times_to_step_to_are_no_jumps() -> None:
    """The field sees the time itself, and the slope there is that of both steps."""
    seen: list[float] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        seen.extend(t.reshape(-1).tolist())
        return -y

    y0, controller = torch.ones(2, 1, dtype=DOUBLE), sn.FixedStep(0.5, step_to=(0.3,))
    sn.solve(field, y0, [0.0, 1.0], solver="heun", controller=controller, batched=True)
    assert 0.3 in seen
    assert not {math.nextafter(0.3, 0.0), math.nextafter(0.3, 1.0)} & set(seen)


def test_a_controller_for_numbers_judges_no_sample_that_rests() -> None:
    asked: list[float] = []

    class Asked(Cautious):
        def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
            asked.append(dt)
            return super().judge(dt, proposal, ratio, order, history)

    numbers = [torch.tensor(x, dtype=DOUBLE) for x in ([0.0, 0.5], [math.inf, 0.5], [0.0, 0.1])]
    verdict: Any = each_lane(Asked())(*numbers, 4, (1.0, 1.0))
    assert asked == [0.5]
    assert verdict.accept.tolist() == [False, True]
    assert float(verdict.proposal[0]) == 0.0


def test_outputs_at_the_ends_of_steps_cost_no_slope() -> None:
    """The interpolant of RK4 reads the slope at the end of a step, which the last step does not have."""
    y0, options = torch.ones(3, 2, dtype=DOUBLE), {"solver": "rk4", "controller": sn.FixedStep(0.25)}
    assert sn.solve(lambda t, y: -y, y0, [0.0, 1.0], batched=True, **options).stats.nfe == 16


def test_a_step_in_which_no_sample_moves_has_the_time_of_the_first() -> None:
    times, still = torch.tensor([1.0, 2.0], dtype=DOUBLE), torch.tensor([False, False])
    proposed: Any = SimpleNamespace(lands=still, final=still)
    plan = LanePlan(times, times, 0.0 * times, times, proposed, still)
    assert plan.time == 1.0
    plan.moved = torch.tensor([False, True])
    assert plan.time == 2.0


def test_a_sample_that_misses_its_event_takes_an_ordinary_step() -> None:
    """One that aims at the end of its interval still lands there."""
    times = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], dtype=DOUBLE)
    schedule = LaneSchedule(sn.FixedStep(2.0), 4, times, (), DOUBLE, 100)
    schedule.aim(torch.tensor([True, False, True]), torch.tensor([0.4, 1.0, 0.4], dtype=DOUBLE))
    plan = schedule.next()
    assert plan is not None
    assert plan.t1.tolist() == [0.4, 1.0, 0.4]
    none = torch.tensor([False, False, False])
    schedule.withhold(plan, none, none, torch.tensor([True, True, False]))
    assert plan.lands.tolist() == [False, True, True]
    assert plan.final.tolist() == [False, True, True]
    assert schedule.end.tolist() == [1.0, 1.0, 1.0]


def test_sixteen_programs_that_control_samples_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(lane_control, "CompiledControl", lambda controller, order, lanes, history: made.append(lanes))
    lane_control.compiled_control.cache_clear()
    try:
        for lanes in (*range(16), *range(16)):
            lane_control.compiled_control(sn.Integral(), 5, lanes, 0)
        assert made == list(range(16))
        lane_control.compiled_control(sn.Integral(), 5, 16, 0)  # instead of the one that was used the longest ago
        lane_control.compiled_control(sn.Integral(), 5, 0, 0)
        assert made == [*range(16), 16, 0]
    finally:
        lane_control.compiled_control.cache_clear()


def test_the_weights_of_an_interpolant_are_made_once() -> None:
    times = torch.tensor([[0.0, 0.5, 1.0]], dtype=DOUBLE)
    outputs, like = LaneOutputs(times), torch.ones(1, dtype=DOUBLE)
    weights = outputs._weights(Dopri5(), like)
    assert outputs._weights(Dopri5(), like) is weights
    assert weights.shape == (len(Dopri5().interpolant[0]), len(Dopri5().interpolant))
    assert outputs._weights(RK4(), like) is not weights


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_program_that_controls_samples_decides_as_the_schedule_does(
    monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    monkeypatch.setattr(lane_control, "compile_graph", lambda function, examples: lambda inputs: function(*inputs))
    lane_control.compiled_control.cache_clear()
    times = sign * torch.tensor([[0.5, 1.5], [1.0, 3.0], [0.25, 0.75]], dtype=DOUBLE)
    options = sn.PID.preset("PI42"), 5, times, (), DOUBLE, 1000
    eager, compiled = (LaneSchedule(*options, compiled=way) for way in (False, True))
    lane_control.compiled_control.cache_clear()
    generator = torch.Generator().manual_seed(0)
    for schedule in (eager, compiled):
        schedule.begin(torch.tensor([0.1, 0.2, 0.05], dtype=DOUBLE))
    while (plan := eager.next()) is not None:
        same = compiled.next()
        assert same is not None
        ratio = 1.2 * torch.rand(3, dtype=DOUBLE, generator=generator)
        assert eager.judge(plan, ratio) == compiled.judge(same, ratio)
        for name in ("t0", "t1", "dt", "moved", "final"):
            torch.testing.assert_close(getattr(same, name), getattr(plan, name), rtol=1e-14, atol=1e-16)
        assert same.unanimous == plan.unanimous
    assert compiled.next() is None
    assert compiled.per_sample().accepted.tolist() == eager.per_sample().accepted.tolist()
    assert compiled.per_sample().rejected.tolist() == eager.per_sample().rejected.tolist()
    assert not bool(eager.running.any())


@pytest.mark.parametrize(("end", "at_end"), [(0.5, True), (0.7, False)])
def test_the_ends_of_samples_are_rows_after_those_of_the_last_step(end: float, at_end: bool) -> None:
    times = torch.tensor([[0.0, 0.5, 1.0]] * 2, dtype=DOUBLE)
    outputs = LaneOutputs(times, ends=True)
    t1, moved = torch.full((2,), end, dtype=DOUBLE), torch.tensor([True, True])
    plan: Any = SimpleNamespace(t0=torch.zeros(2, dtype=DOUBLE), t1=t1, dt=t1, moved=moved)
    assert outputs.begun == 2
    outputs.claim([plan], 2)
    assert outputs.close(2) == 2
    rows = outputs.rows(2)
    assert rows is not None
    assert rows.at_end is not None
    assert rows.at_end.tolist() == [at_end, at_end, True, True]
    assert rows.lanes.tolist() == [0, 1, 0, 1]
    assert rows.number.tolist() == [1, 1, 2, 2]
    assert rows.x.tolist() == [0.5 / end, 0.5 / end, 1.0, 1.0]


def test_shared_times_that_begin_with_a_repetition_and_go_backwards() -> None:
    sol = sn.solve(lambda t, y: -y, torch.ones(2, 1, dtype=DOUBLE), [1.0, 1.0, 0.0], batched=True, rtol=1e-8)
    expected = torch.tensor([1.0, 1.0, math.e], dtype=DOUBLE)
    torch.testing.assert_close(sol.ys[:, 0, 0], expected, rtol=1e-6, atol=0.0)


def test_the_interval_of_a_progress_bar_is_the_mean_of_those_of_the_samples() -> None:
    assert mean_interval(torch.tensor([[0.5, 1.0, 2.5], [1.0, 3.0, 4.0]], dtype=DOUBLE)) == (0.0, 2.5)


def test_a_step_that_ends_on_the_last_place_lands() -> None:
    zero, end, running = torch.zeros(3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE), torch.tensor([True, True, False])
    last = torch.tensor([0.75, 0.8, 0.75], dtype=DOUBLE)
    proposed = lane_control.propose(zero, zero, torch.tensor([0.75, 0.75, 0.75], dtype=DOUBLE), end, last, running)
    assert proposed.lands.tolist() == [True, False, True]
    assert proposed.final.tolist() == [True, False, False]
    assert proposed.s1.tolist() == [1.0, 0.75, 1.0]


@pytest.mark.parametrize(("marks", "on_jump"), [({0.0: True, 1.0: False}, True), ({0.0: False, 1.0: True}, False)])
def test_a_lane_that_starts_on_a_mark_knows_whether_it_is_a_jump(marks: dict[float, bool], on_jump: bool) -> None:
    found = Marks(marks, torch.tensor([0.0, 0.5], dtype=DOUBLE))
    assert found.on_jump.tolist() == [on_jump, False]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_landing_that_is_rejected_is_shortened_from_its_own_length(
    monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    """Not from the length that was proposed; wherever on the axis of time the step lies."""
    monkeypatch.setattr(lane_control, "compile_graph", lambda function, examples: lambda inputs: function(*inputs))
    times = sign * torch.tensor([[0.0, 1.0], [-2.0, 1.0], [1.0, 4.0], [-5.0, -3.0]], dtype=DOUBLE)
    lengths = (times[:, 1] - times[:, 0]).abs()
    for compiled in (False, True):
        lane_control.compiled_control.cache_clear()
        schedule = LaneSchedule(sn.Integral(), 5, times, (), DOUBLE, 100, compiled=compiled)
        lane_control.compiled_control.cache_clear()
        schedule.begin(100.0 * lengths)
        plan = schedule.next()
        assert plan is not None
        assert torch.equal(plan.t1, times[:, 1])
        assert not schedule.judge(plan, torch.full((4,), 1e30, dtype=DOUBLE))
        shorter = schedule.next()
        assert shorter is not None
        torch.testing.assert_close(shorter.dt, sign * sn.Integral().factor_min * lengths, rtol=1e-14, atol=0.0)


def test_outputs_inside_of_steps_of_complex_samples() -> None:
    rate = torch.tensor([1.0 - 0.5j, -2.0 + 1.0j], dtype=torch.complex128)
    y0, ts = torch.tensor([[1.0 + 2.0j], [0.5 - 1.0j]]).to(torch.complex128), torch.linspace(0.0, 1.0, 12, dtype=DOUBLE)
    sol = sn.solve(lambda t, y: rate[:, None] * y, y0, ts, batched=True, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sol.ys[..., 0], y0[:, 0] * torch.exp(rate * ts[:, None]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_samples_reach_a_jump_one_after_the_other(sign: float) -> None:
    """Their intervals differ in length. The field is undefined beyond them, and at the jump the solution has a kink."""
    ends = sign * torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)
    ts = torch.stack([torch.zeros_like(ends), ends], 1) - sign * torch.tensor([[0.0], [0.7], [1.9]], dtype=DOUBLE)

    def field(t: Tensor, y: Tensor) -> Tensor:
        assert bool((sign * t >= -1.9).all())
        assert bool((sign * t <= 1.3).all())
        return torch.where(sign * t < 0.5, 1.0, 3.0)[:, None] + 0.0 * y

    sol = sn.solve(field, torch.zeros(3, 1, dtype=DOUBLE), ts, jumps=[0.5 * sign], batched=True, rtol=1e-6)
    s = sign * ts
    expected = sign * ((0.5 - s[:, 0]) + 3.0 * (s[:, 1] - 0.5))
    torch.testing.assert_close(sol.ys[-1, :, 0], expected, rtol=1e-12, atol=0.0)


def test_a_sample_that_starts_on_a_jump_goes_on_to_the_next_place() -> None:
    found = Marks({-1.0: False, 0.0: True, 1.0: False}, torch.tensor([0.0, 0.5, -2.0], dtype=DOUBLE))
    assert found.on_jump.tolist() == [True, False, False]
    places, at_end = found.places(torch.full((3,), 2.0, dtype=DOUBLE))
    assert places.tolist() == [1.0, 1.0, -1.0]
    assert at_end.tolist() == [False, False, False]


def test_a_rejected_step_beyond_the_range_of_numbers_spoils_no_gradient() -> None:
    """The first step of one sample overflows, while the other takes it."""
    rates, y0 = torch.tensor([50.0, 0.1], dtype=DOUBLE), torch.ones(2, 1, dtype=DOUBLE)
    options: dict[str, Any] = {"adjoint": sn.Direct(), "controller": sn.Integral(dt0=0.5), "rtol": 1e-3}

    def gradient(y0: Tensor, rates: Tensor, **more: Any) -> tuple[Tensor, Any]:
        y0, rates = y0.clone().requires_grad_(), rates.clone().requires_grad_()
        field = lambda t, y, rate: -(rate.unsqueeze(-1) * y**3)
        sol = sn.solve(field, y0, [0.0, 1.0], args=(rates,), **options, **more)
        return torch.stack([x.sum() for x in torch.autograd.grad(sol.ys[-1].sum(), [y0, rates])]), sol

    together, sol = gradient(y0, rates, batched=True)
    assert sol.stats.per_sample.rejected.tolist()[0] > sol.stats.per_sample.rejected.tolist()[1] == 0
    alone = [gradient(y0[i], rates[i])[0] for i in range(2)]
    assert bool(torch.isfinite(together).all())
    torch.testing.assert_close(together, alone[0] + alone[1], rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("grad", [False, True])
def test_a_step_that_some_samples_reject_is_computed_once(grad: bool) -> None:
    """Also one that leaves the range of numbers; only with a graph it is computed again without that sample."""
    rates, y0 = torch.tensor([1e3, 0.1], dtype=DOUBLE), torch.ones(2, 1, dtype=DOUBLE)
    calls: list[Tensor] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        calls.append(y)
        return -rates[:, None] * y**3

    with torch.set_grad_enabled(grad):
        options: dict[str, Any] = {"adjoint": sn.Direct(), "controller": sn.Integral(dt0=0.5), "rtol": 1e-3}
        sol = sn.solve(field, y0, [0.0, 1.0], batched=True, **options)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.rejected.tolist()[0] > 0
    assert len(calls) == sol.stats.nfe + sol.stats.checks
    attempts = sol.stats.accepted + sol.stats.rejected
    assert (sol.stats.nfe == 1 + 6 * attempts) is not grad


def test_outputs_that_were_passed_leave_out_the_ends() -> None:
    """With or without ends, a sample has passed its first output at the start."""
    outputs = LaneOutputs(torch.tensor([[0.0, 0.5, 1.0]] * 2, dtype=DOUBLE), ends=True)
    before = outputs.passed()
    outputs.close(2)
    for lanes, numbers in (before, outputs.passed()):
        assert (lanes.tolist(), numbers.tolist()) == ([0, 1], [0, 0])


def test_an_error_names_eight_samples_and_counts_the_others() -> None:
    times = torch.tensor([[0.0, 1.0]] * 30, dtype=DOUBLE)
    for count, more in ((1, ""), (8, ""), (9, " and 1 more"), (12, " and 4 more"), (30, " and 22 more")):
        schedule = LaneSchedule(sn.FixedStep(0.5), 4, times, (), DOUBLE, 100)
        schedule.fail(torch.arange(30) < count, 0)
        error, last = schedule.error(), min(count, 8) - 1
        assert isinstance(error, sn.NonFiniteState)
        assert f"{count} of 30 samples failed: sample 0 (" in str(error)
        assert f"sample {last} (non-finite state at t = 0){more}. All other" in str(error)
        assert error.samples == tuple(range(count))


def test_a_sample_that_overflows_in_a_fixed_step_is_not_finite_from_its_end_on() -> None:
    rates, y0 = torch.tensor([0.1, 1e200], dtype=DOUBLE), torch.ones(2, 1, dtype=DOUBLE)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.25), "batched": True}
    sol = sn.solve(lambda t, y, r: r[:, None] * y**3, y0, [0.0, 1.0], args=(rates,), throw=False, **options)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.statuses == [sn.Status.SUCCESS, sn.Status.NON_FINITE_STATE]
    assert isinstance(sol.error, sn.NonFiniteState)
    assert "sample 1 (non-finite state at t = 0.25)" in str(sol.error)


def test_a_step_of_a_sample_that_stops_short_by_rounding_lands() -> None:
    """Four times the distance of neighbouring floats is rounding, more is not; as for a sample alone."""
    ulp = math.ulp(1.0)
    ends = torch.tensor([1.0 - 4.0 * ulp, 1.0 - 4.5 * ulp], dtype=DOUBLE)
    schedule = LaneSchedule(sn.Integral(), 4, torch.tensor([[0.0, 1.0]] * 2, dtype=DOUBLE), (), DOUBLE, 100)
    schedule.begin(ends)
    plan = schedule.next()
    assert plan is not None
    assert plan.lands.tolist() == [True, False]
    assert plan.t1.tolist() == [1.0, float(ends[1])]
