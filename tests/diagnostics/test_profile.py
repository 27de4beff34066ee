"""Profiles count what a solve counts, measure errors that are there, leave no trace, and recommend with a reason."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn

import seminode as sn
from seminode.diagnostics import Profile, Reference, Row, backward_cost, cost, reference
from seminode.diagnostics.contenders import Contender, check_adjoints, check_solvers, written
from seminode.diagnostics.memory import peak_bytes
from seminode.diagnostics.recommendation import recommend

QUICK: dict[str, Any] = {"compile": False, "repeats": 1, "verbose": False}


class Field(nn.Module):
    """z′ = W₂ tanh(W₁ z)·cos t."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * torch.cos(t)


def start(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    y0 = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return y0.requires_grad_(requires_grad)


def loss(ys: Tensor) -> Tensor:
    return ys[-1].square().mean()


def named(profile: Profile, adjoint: str, solver: str = "dopri5", compile: bool = False) -> Row:
    label = f"{adjoint}, {solver}, {'compiled' if compile else 'eager'}"
    return next(row for row in profile.rows if row.contender.label == label)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled programs without the back end, which takes seconds for each."""

    def back_end(module: Any, examples: list[Any]) -> Callable[[list[Any]], Any]:
        return lambda inputs: list(module(*inputs))

    replace_back_end(monkeypatch, back_end)
    yield
    torch._dynamo.reset()


def test_counts_are_those_of_a_solve() -> None:
    field, y0, ts = Field(), start(requires_grad=True), torch.linspace(0, 2, 4)
    found = sn.profile(field, y0, ts, loss, solvers="dopri5", **QUICK)
    adjoints = {"Replay": sn.Replay(), "Direct": sn.Direct(), "Backsolve": sn.Backsolve()}
    adjoints |= {"Checkpointed(10)": sn.Checkpointed(10), "Quadrature": sn.Quadrature()}
    for name, adjoint in adjoints.items():
        sol = sn.solve(field, y0, ts, adjoint=adjoint)
        torch.autograd.grad(loss(sol.ys), [y0, *field.parameters()])
        row = named(found, name)
        assert row.forward == sol.stats
        assert row.backward == sol.stats.backward
        assert row.cost == cost(row.forward, row.backward) == row.forward.nfe + backward_cost(row.backward)
        assert len(row.forward_seconds) == 1
        assert row.seconds == row.median_seconds > 0
        assert row.memory is not None
        assert row.memory > 0


def test_rows_are_sorted_and_those_with_a_reason_come_last() -> None:
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=["Replay", "Reversible"], solvers="dopri5", **QUICK)
    assert [row.measured for row in found.rows] == [True, False]
    assert "Reversible needs a solver whose steps can be undone" in str(found.rows[1].reason)
    assert "Reversible needs a solver" in str(found)
    both = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=["Direct", "Replay", "Backsolve"], **QUICK)
    seconds = [row.seconds for row in both.rows]
    assert seconds == sorted(seconds)
    assert len(seconds) == 9


def test_reversible_gets_a_solver_of_its_own_unless_solvers_are_named() -> None:
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=sn.Reversible(), **QUICK)
    assert [row.contender.solver for row in found.rows] == [sn.ReversibleRK("dopri5")]
    assert found.rows[0].measured
    assert found.recommendation is not None
    assert found.recommendation.call == "sn.solve(..., solver=sn.ReversibleRK('dopri5'), adjoint=sn.Reversible())"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_is_that_of_the_gradient(dtype: torch.dtype) -> None:
    """y = y0·e^(at): the derivatives for y0 and a are known."""
    a = torch.tensor(0.7, dtype=dtype, requires_grad=True)
    y0 = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)

    def run(rtol: float) -> Row:
        # Dearer and more exact, cheaper and less: the same problem to two tolerances.
        field = lambda t, y: a * y
        options = {**QUICK, "adjoints": "Replay", "solvers": "dopri5", "rtol": rtol, "atol": rtol / 100}
        found = sn.profile(field, y0, [0.0, 2.0], lambda ys: ys[-1].square().sum(), **options)
        assert found.reference.dtype == "float64"
        assert found.reference.good_to is not None
        assert found.reference.good_to < 1e-8
        return found.rows[0]

    def error(rtol: float) -> float:
        sol = sn.solve(lambda t, y: a * y, y0, [0.0, 2.0], rtol=rtol, atol=rtol / 100)
        grads = torch.autograd.grad(sol.ys[-1].square().sum(), [y0, a])
        growth = math.exp(4 * float(a.detach()))
        y = y0.detach().double()
        exact = torch.cat([2 * y * growth, (4 * y.square().sum() * growth).reshape(1)])
        found = torch.cat([g.double().reshape(-1) for g in grads])
        return float((found - exact).norm() / exact.norm())

    loose, tight = run(1e-2), run(1e-6)
    assert loose.error == pytest.approx(error(1e-2), rel=1e-4)
    assert tight.error == pytest.approx(error(1e-6), rel=1e-3)
    assert loose.error > 100 * tight.error


def test_a_closure_and_the_layers_of_a_loss_go_to_double() -> None:
    net, readout = Field().net, nn.Linear(3, 1)
    target, gain = torch.ones(5, 1), torch.full((3,), 2.0)
    found = sn.profile(
        lambda t, y: net(y) * gain,
        start(),
        [0.0, 1.0],
        lambda ys: nn.functional.mse_loss(readout(ys[-1]), target),
        adjoints="Replay",
        solvers="dopri5",
        **QUICK,
    )
    assert (found.reference.dtype, found.reference.note) == ("float64", "")
    assert found.rows[0].error < 1e-4
    assert found.problem["gradients"] == sum(p.numel() for p in net.parameters())


class Inner(torch.autograd.Function):
    """A product that the substitution of tensors does not reach into."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(y, w)
        return y @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, w = ctx.saved_tensors
        return grad @ w.T, y.T @ grad


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return Inner.apply(y, self.w)  # type: ignore[return-value]


def test_a_module_that_cannot_be_reached_into_is_copied() -> None:
    options = {**QUICK, "adjoints": "Replay", "solvers": "dopri5"}
    found = sn.profile(Opaque(), start(), [0.0, 1.0], loss, **options)
    assert found.reference.dtype == "float64"
    assert found.reference.note.startswith("not in float64: ")
    assert found.rows[0].error < 1e-4
    module = Opaque()
    found = sn.profile(lambda t, y: module(t, y), start(), [0.0, 1.0], loss, **options)
    assert found.reference.dtype == "float32"
    assert found.rows[0].error < 1e-4


def test_random_numbers_are_the_same_for_all_and_for_the_reference() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    found = sn.profile(lambda t, y: net(y), start(), [0.0, 1.0], loss, solvers="dopri5", **QUICK)
    assert found.reference.dtype == "float32"
    assert "random numbers" in found.reference.note
    assert max(row.error for row in found.rows if row.measured) < 1e-2


def test_structures_args_jumps_and_times_get_gradients() -> None:
    rate = torch.tensor([1.0, 2.0], requires_grad=True)
    y0 = {"q": torch.ones(2, requires_grad=True), "p": torch.zeros(2)}

    def field(t: Tensor, y: Any, rate: Tensor) -> Any:
        return {"q": y["p"], "p": -rate * y["q"] * (1 + (t > 0.5))}

    found = sn.profile(
        field,
        y0,
        torch.tensor([0.0, 0.3, 1.0], requires_grad=True),
        lambda ys: ys["q"].sum() + ys["p"][1].square().sum(),
        args=(rate,),
        jumps=[0.5],
        norm="auto",
        solvers="dopri5",
        **QUICK,
    )
    assert found.problem["gradients"] == 2 + 3 + 2
    assert {row.contender.adjoint_name for row in found.rows if row.measured} >= {"Replay", "Direct", "Backsolve"}
    assert max(row.error for row in found.rows if row.measured) < 1e-3


def test_a_problem_on_which_backsolve_drifts() -> None:
    """It contracts quickly: going back, the state is lost."""
    rate = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([1.0, 0.3], dtype=torch.float64)
    found = sn.profile(
        lambda t, y: -rate * (y - torch.sin(3 * t)),
        y0,
        [0.0, 2.0],
        lambda ys: ys[-1].sum(),
        adjoints=["Replay", "Backsolve"],
        solvers="dopri5",
        **QUICK,
    )
    assert any(note.startswith("DriftWarning: Backsolve") for note in named(found, "Backsolve").notes)
    assert named(found, "Backsolve").drifted
    assert found.recommendation is not None
    assert found.recommendation.row is named(found, "Replay")
    assert "[1] DriftWarning: Backsolve" in str(found)


def test_fixed_steps() -> None:
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, controller=sn.FixedStep(0.1), adjoints="Direct", **QUICK)
    assert {row.contender.solver.name for row in found.rows if row.measured} == {"dopri5", "rk4", "bosh3"}
    assert all(row.forward.accepted == 10 for row in found.rows)
    assert "FixedStep" in str(found)


def test_more_tolerances_have_more_rows(tmp_path: Path) -> None:
    options = {**QUICK, "adjoints": ["Replay", "Direct"], "solvers": "dopri5", "rtol": 1e-4}
    found = sn.profile(Field(), start(), [0.0, 3.0], loss, tolerances=(1e-2, 1e-4, 1e-6), **options)
    rtols = sorted((row.contender.rtol, row.contender.atol) for row in found.rows)
    assert rtols == [(1e-6, 1e-8)] * 2 + [(1e-4, 1e-6)] * 2 + [(1e-2, 1e-4)] * 2
    errors = {row.contender.rtol: row.error for row in found.rows}
    assert errors[1e-2] > errors[1e-6]
    assert found.recommendation is not None
    assert found.recommendation.row.contender.rtol == 1e-4
    path = tmp_path / "work.png"
    found.draw(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_steps_beyond_the_limit_of_time_are_broken_off() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.cos(50 * t) * y

    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    options = {**QUICK, "adjoints": "Replay", "solvers": "adaptive_heun", "time_limit": 0.01}
    found = sn.profile(field, y0, [0.0, 1.0], lambda ys: ys[-1].sum(), rtol=1e-8, atol=1e-10, **options)
    assert "time_limit=0.01" in str(found.rows[0].reason)
    assert found.recommendation is None
    assert "No recommendation" in str(found)


class Ticks:
    """A clock that moves on by one second whenever the field is evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(reference, "perf_counter", lambda: self.seconds)

    def over(self, field: Callable[..., Any]) -> Callable[..., Any]:
        def ticking(t: Tensor, y: Tensor) -> Tensor:
            self.seconds += 1.0
            return field(t, y)

        return ticking


def growth(clock: Ticks, time_limit: float, **options: Any) -> Profile:
    a = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y0 = torch.ones(2, dtype=torch.float64)
    options = {**QUICK, "adjoints": "Replay", "solvers": "dopri5", "rtol": 1e-4, "time_limit": time_limit, **options}
    return sn.profile(clock.over(lambda t, y: a * y), y0, [0.0, 20.0], lambda ys: ys[-1].sum(), **options)


def test_the_time_limit_holds_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks(monkeypatch)
    whole = growth(clock, 1e9)
    assert whole.reference.note == ""
    assert whole.reference.rtol == 1e-10
    tight = clock.seconds
    clock.seconds = 0.0
    found = growth(clock, 50.0)
    assert found.reference.dtype == "none"
    first, last = found.reference.note.split("; ", 1)
    assert first == "rtol 1e-10: not finished within half of time_limit=50 s"
    assert last.startswith("not finished within time_limit=50 s; pass a larger time_limit, or a looser tolerance such ")
    assert "reference=1e-06" in last
    rows = found.rows[0].forward.nfe + found.rows[0].backward.nfe
    assert clock.seconds <= 50 + 1 + 3 * rows + 3 < tight  # the reference; then a first, a timed and a last run
    assert math.isnan(found.rows[0].error)
    assert found.recommendation is None
    assert "errors relative to: no reference: rtol 1e-10: not finished" in " ".join(str(found).split())
    assert "No recommendation: without a reference, the errors of the gradients are unknown." in str(found)


def test_a_reference_that_takes_too_long_is_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = growth(Ticks(monkeypatch), 1000.0)
    assert found.reference.rtol == 1e-4
    assert found.reference.note == "rtol 1e-10: not finished within half of time_limit=1000 s"
    assert found.reference.good_to is not None
    assert found.recommendation is not None


def test_a_loose_reference_is_not_advised_to_be_looser(monkeypatch: pytest.MonkeyPatch) -> None:
    found = growth(Ticks(monkeypatch), 20.0, rtol=1e-1, reference=1e-4)
    assert found.reference.note == "not finished within time_limit=20 s; pass a larger time_limit"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "progress"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal_only(
    terminal: bool, progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    options = {"adjoints": ["Replay", "Direct"], "solvers": "dopri5", "compile": False, "repeats": 2}
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, progress=progress, **options)
    text = shown.getvalue()
    if terminal and progress:
        phases = ["reference, rtol 1e-10", "first runs", "timed runs 1/2", "timed runs 2/2", "memory"]
        assert sorted(phases, key=text.index) == phases
        assert "Direct, dopri5, eager" in text
        assert "time limit 30 s" in text
    else:
        assert text == ""
    assert capsys.readouterr().out == f"{found}\n"


def test_the_table_is_aligned_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"compile": False, "repeats": 1, "tolerances": (1e-3,), "solvers": "dopri5"}
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, **options)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 120
    head = next(i for i, line in enumerate(lines) if line.startswith("adjoint"))
    rows = lines[head + 1 : head + 1 + sum(row.measured for row in found.rows)]
    end = lines[head].index("memory") + len("memory")
    assert all(line[:end].endswith("B") for line in rows)
    assert found.recommendation is not None
    assert lines[-1].strip() == found.recommendation.call


def test_json(tmp_path: Path) -> None:
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=["Replay", "Reversible"], solvers="dopri5", **QUICK)
    found.to_json(tmp_path / "profile.json")
    read = json.loads((tmp_path / "profile.json").read_text())
    assert read == found.as_dict()
    assert read["machine"]["torch"] == torch.__version__
    assert [row["reason"] is None for row in read["rows"]] == [True, False]
    assert read["rows"][0]["backward"]["vjp_y"] == found.rows[0].backward.vjp_y
    assert read["recommendation"]["call"] == "sn.solve(..., solver='dopri5', adjoint=sn.Replay())"


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"draw: needs matplotlib, .*seminode\[lab\]"):
        Profile((), Reference("none", 0.0, None), None).draw(tmp_path / "x.png")


def test_compiled_contenders_are_measured_beside_eager_ones(programs: None) -> None:
    options = {"solvers": "dopri5", "repeats": 1, "verbose": False}
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=["Replay", "Direct"], **options)
    assert sorted(row.contender.compile for row in found.rows if row.measured) == [False, False, True, True]
    assert named(found, "Direct", compile=True).error < 1e-4
    assert named(found, "Direct", compile=True).contender.call.endswith("adjoint=sn.Direct(), compile=True)")


def test_what_cannot_be_compiled_has_a_reason(programs: None) -> None:
    net = Field()

    def field(t: Tensor, y: Tensor) -> Tensor:
        return net(t, y) if y.norm() > 0 else y

    options = {"adjoints": ["Replay", "Direct"], "solvers": "dopri5", "repeats": 1, "verbose": False}
    found = sn.profile(field, start(), [0.0, 1.0], loss, **options)
    assert [row.contender.compile for row in found.rows] == [False, False, True, True]
    assert [row.measured for row in found.rows] == [True, True, False, False]
    assert "Replay, dopri5, compiled; Direct, dopri5, compiled: " in str(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_really_compiled() -> None:
    found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints=["Replay", "Direct"], solvers="dopri5")
    assert all(row.measured for row in found.rows)
    for adjoint in ("Replay", "Direct"):
        eager, compiled = named(found, adjoint), named(found, adjoint, compile=True)
        assert compiled.seconds < eager.seconds
        assert compiled.compile_seconds > 0.1
        assert compiled.memory is not None
        assert compiled.memory > 0


# --- what belongs to the user -----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Batch normalisation, dropout and a layer whose mode differs from its parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 3)
        self.drop.eval()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        random.random()
        return self.out(self.drop(self.norm(y))) + 0.1 * torch.randn(3)


def state_of(field: nn.Module, y0: Tensor) -> Any:
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in field.parameters()]
    values = [(id(x), x.detach().clone()) for x in (*field.parameters(), *field.buffers())]
    modes = [module.training for module in field.modules()]
    flags = [p.requires_grad for p in field.parameters()]
    rest = torch.get_default_dtype(), random.getstate(), modes, flags, torch.is_grad_enabled()
    return torch.get_rng_state(), values, grads, y0.grad, y0.detach().clone(), rest


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [None, Broken, KeyboardInterrupt], ids=str)
def test_everything_is_as_it_was(error: type[BaseException] | None) -> None:
    field, y0 = Stateful(), start(requires_grad=True)
    field.out.bias.requires_grad_(False)
    field.out.weight.grad = torch.full((3, 3), 2.0)
    calls = 0

    def own_loss(ys: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        field.eval()
        if calls == 1:  # later there is a solve behind the loss, whose backward pass would notice the change
            field.out.weight.data.add_(1.0)
        field.out.weight.grad = None
        if calls == 6 and error is not None:
            torch.set_default_dtype(torch.float64)
            raise error
        return loss(ys)

    before = state_of(field, y0)
    options = {**QUICK, "adjoints": ["Replay", "Direct"], "solvers": "dopri5"}
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            sn.profile(field, y0, [0.0, 1.0], own_loss, **options)
    else:
        found = sn.profile(field, y0, [0.0, 1.0], own_loss, **options)
        assert any(row.measured for row in found.rows)
        assert (error is not None) == any("Broken" in str(row.reason) for row in found.rows)
    assert calls > 5
    assert same(before, state_of(field, y0))


def test_an_interrupt_in_the_reference() -> None:
    seen = []

    def own_loss(ys: Tensor) -> Tensor:
        if ys.dtype == torch.float64:
            seen.append(torch.get_default_dtype())
            raise KeyboardInterrupt
        return loss(ys)

    with pytest.raises(KeyboardInterrupt):
        sn.profile(Field(), start(), [0.0, 1.0], own_loss, **QUICK)
    assert seen == [torch.float64]
    assert torch.get_default_dtype() == torch.float32


def test_the_reference_is_good_at_outputs_between_steps() -> None:
    """The polynomial of dopri8 is of order 5 only."""
    a = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y0 = torch.ones(2, dtype=torch.float64)
    options = {**QUICK, "adjoints": "Replay", "solvers": "dopri5", "rtol": 1e-9, "atol": 1e-11}
    found = sn.profile(lambda t, y: a * y, y0, torch.linspace(0, 2, 20), lambda ys: ys.square().sum(), **options)
    assert found.reference.good_to is not None
    assert found.reference.good_to < 1e-9
    assert found.rows[0].error < 1e-7


def test_a_graph_that_was_there_before_can_still_be_pulled_back() -> None:
    field, y0 = Field(), start(requires_grad=True)
    held = field(torch.tensor(0.3), y0).square().sum()
    sn.profile(field, y0, [0.0, 1.0], loss, adjoints="Replay", solvers="dopri5", **QUICK)
    held.backward()
    assert y0.grad is not None


def test_without_gradients_around_it() -> None:
    with torch.no_grad():
        found = sn.profile(Field(), start(), [0.0, 1.0], loss, adjoints="Replay", solvers="dopri5", **QUICK)
        assert not torch.is_grad_enabled()
    assert found.rows[0].measured


# --- the recommendation, from rows that are made up -------------------------------------------------------------


def row(adjoint: Any, seconds: float, error: float, memory: int | None = 1000, **others: Any) -> Row:
    compile, solver = others.pop("compile", False), others.pop("solver", sn.Dopri5())
    contender = Contender(adjoint, solver, compile, 1e-4, 1e-6)
    timed = {"forward_seconds": (seconds / 2,), "backward_seconds": (seconds / 2,), "first_seconds": seconds}
    return Row(contender, memory=memory, error=error, **{**timed, **others})


def test_the_fastest_good_gradient_is_recommended() -> None:
    usual, fast, wrong = row(sn.Replay(), 2.0, 2e-4), row(sn.Direct(), 1.0, 2e-4), row(sn.Backsolve(), 0.5, 0.3)
    found = recommend([usual, wrong, fast], 1e-4)
    assert found is not None
    assert found.row is fast
    assert "2.0 times as fast as the default, Replay, dopri5, eager" in found.reason
    assert "Backsolve, dopri5, eager is faster, but its gradient is wrong by 3e-01" in found.reason
    assert found.limit == 1e-3


@pytest.mark.parametrize(
    ("errors", "limit"),
    [
        ((1e-6, 1e-6), 1e-3),  # ten tolerances
        ((5e-3, 5e-3), 1.5e-2),  # nobody is better: three times the best
        ((5e-3, 1e-5), 5e-3),  # the default is within a hundred tolerances
        ((5e-2, 1e-5), 1e-3),  # it is not
    ],
)
def test_what_is_good_enough(errors: tuple[float, float], limit: float) -> None:
    found = recommend([row(sn.Replay(), 1.0, errors[0]), row(sn.Direct(), 2.0, errors[1])], 1e-4)
    assert found is not None
    assert found.limit == pytest.approx(limit)


def test_below_what_the_reference_resolves_all_errors_are_the_same() -> None:
    rows = [row(sn.Replay(), 2.0, 1e-5), row(sn.Backsolve(), 1.0, 4e-3)]
    assert recommend(rows, 1e-5, good_to=1e-2).row is rows[1]  # type: ignore[union-attr]
    assert recommend(rows, 1e-5).row is rows[0]  # type: ignore[union-attr]


def test_a_drifting_gradient_is_not_trusted_even_if_right() -> None:
    drifting = row(sn.Backsolve(), 0.5, 1e-6, notes=("DriftWarning: far away",))
    found = recommend([row(sn.Replay(), 1.0, 1e-5), drifting], 1e-4)
    assert found is not None
    assert found.row.contender.usual
    assert "the default is the fastest" in found.reason
    assert "it drifts" in found.reason
    assert recommend([drifting], 1e-4) is None


def test_memory_has_a_limit_and_a_word() -> None:
    rows = [
        row(sn.Replay(), 2.0, 1e-5, 2000),
        row(sn.Direct(), 1.0, 1e-5, 9000),
        row(sn.Checkpointed(3), 3.0, 1e-5, 500),
    ]
    found = recommend(rows, 1e-4)
    assert found is not None
    assert (found.row, found.lean) == (rows[1], rows[2])
    assert "If memory matters: Checkpointed(3), dopri5, eager, 0.5 kB, 3.0 times the seconds." in found.reason
    found = recommend(rows, 1e-4, memory_limit=3000)
    assert found is not None
    assert found.row is rows[0]
    assert "Direct, dopri5, eager is faster, but it needs 9.0 kB" in found.reason
    assert recommend(rows, 1e-4, memory_limit=10).row is rows[2]  # type: ignore[union-attr]


def test_within_the_noise_eager_goes_first_then_less_memory() -> None:
    rows = [
        row(sn.Direct(), 1.0, 1e-5, compile=True),
        row(sn.Direct(), 1.03, 1e-5, 900),
        row(sn.Replay(), 1.04, 1e-5, 800),
    ]
    assert recommend(rows, 1e-4).row is rows[2]  # type: ignore[union-attr]
    assert recommend(rows[:2], 1e-4).row is rows[1]  # type: ignore[union-attr]


def test_when_compiling_pays() -> None:
    eager = row(sn.Direct(), 0.3, 1e-5)
    compiled = row(sn.Direct(), 0.1, 1e-5, compile=True, first_seconds=20.05)
    found = recommend([eager, compiled], 1e-4)
    assert found is not None
    assert "Compiling for dopri5 took up to 20 s, which pays off after 100 passes." in found.reason


def test_a_noisy_clock_is_told_of() -> None:
    calm = row(sn.Replay(), 1.0, 1e-5, forward_seconds=(1.0, 1.1, 1.2), backward_seconds=(1.0, 1.0, 1.0))
    noisy = row(sn.Replay(), 1.0, 1e-5, forward_seconds=(1.0, 2.0, 3.0), backward_seconds=(1.0, 2.0, 3.0))
    reference = Reference("float64", 1e-10, 1e-10)
    assert "noisy" not in str(Profile((calm,), reference, None))
    assert "the clock is noisy: medians are 2.0 times the minima" in str(Profile((noisy,), reference, None))


def test_rows_without_a_result_are_left_out() -> None:
    rows = [Row(Contender(sn.Replay(), sn.Dopri5()), reason="no"), row(sn.Direct(), 1.0, math.nan)]
    assert recommend(rows, 1e-4) is None


# --- names and what is refused ----------------------------------------------------------------------------------


def test_names() -> None:
    assert check_adjoints(["direct", "Checkpointed", "sn.Backsolve(norm='mixed')", sn.Replay()]) == [
        sn.Direct(),
        sn.Checkpointed(10),
        sn.Backsolve(norm="mixed"),
        sn.Replay(),
    ]
    assert check_solvers(["tsit5", "ReversibleRK('bosh3', coupling=0.99)", sn.Dopri8()]) == [
        sn.Tsit5(),
        sn.ReversibleRK("bosh3", 0.99),
        sn.Dopri8(),
    ]
    assert written(sn.Backsolve(solver="bosh3", rtol=1e-3)) == "sn.Backsolve(rtol=0.001, solver='bosh3')"
    assert written(sn.ReversibleRK("bosh3", 0.99)) == "sn.ReversibleRK('bosh3', coupling=0.99)"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": 3}, TypeError, r"loss: expected a callable loss\(ys\), found int"),
        ({"loss": lambda ys: ys}, ValueError, r"loss: expected loss\(ys\) to return a scalar, found shape \(2, 5, 3\)"),
        ({"loss": lambda ys: 1.0}, TypeError, r"loss: .* scalar tensor, found float"),
        ({"loss": lambda ys: ys.detach().sum()}, ValueError, r"loss: .* can be differentiated"),
        ({"loss": lambda ys: 0 * ys.sum()}, ValueError, r"loss: expected a gradient that is not zero, found 0"),
        (
            {"field": lambda t, y: -y},
            ValueError,
            r"field, y0, args: expected a parameter .* that requires a gradient, found none",
        ),
        ({"field": 3}, TypeError, r"field: expected a callable"),
        ({"y0": "x"}, TypeError, r"y0: expected a tensor, found str"),
        ({"ts": [1.0, 1.0]}, ValueError, r"ts: expected an interval to solve over, found the single time 1"),
        ({"args": 1}, TypeError, r"args: expected a tuple"),
        ({"repeats": 0}, ValueError, r"repeats: expected a whole number of at least 1, found 0"),
        ({"time_limit": 0.0}, ValueError, r"time_limit: expected a number above zero, found 0"),
        ({"reference": "x"}, TypeError, r"reference: expected a number, found str"),
        ({"adjoints": []}, ValueError, r"adjoints: expected at least one, found none"),
        ({"adjoints": ["Relay"]}, ValueError, r"adjoints\[0\]: unknown name 'Relay'; did you mean 'Replay'\? Known: "),
        ({"adjoints": [sn.Replay]}, TypeError, r"adjoints\[0\]: .* found the class Replay"),
        ({"adjoints": ["Checkpointed(0)"]}, ValueError, r"adjoints\[0\]: 'Checkpointed\(0\)' is invalid: n: "),
        ({"adjoints": ["open('x')()"]}, ValueError, r"adjoints\[0\]: expected a name, found"),
        ({"adjoints": 3}, TypeError, r"adjoints: expected a sequence of names or objects, found int"),
        ({"solvers": []}, ValueError, r"solvers: expected at least one"),
        ({"solvers": ["dopri5", "tsit"]}, ValueError, r"solvers\[1\]: unknown name 'tsit'; did you mean 'tsit5'"),
        ({"compile": ()}, ValueError, r"compile: expected True, False or both, found none"),
        ({"compile": "yes"}, TypeError, r"compile: expected True or False, found 'y"),
        ({"tolerances": [-1.0]}, ValueError, r"tolerances\[0\]: expected a finite number of at least 0"),
        ({"tolerances": "x"}, TypeError, r"tolerances: expected a sequence of numbers, found str"),
        ({"rtol": -1.0}, ValueError, r"rtol: expected a finite number"),
        ({"controller": 3}, TypeError, r"controller: expected a Controller, found int"),
        ({"controller": sn.FixedStep(0.1), "rtol": 1e-3}, ValueError, r"rtol: does nothing with FixedStep"),
        (
            {"controller": sn.FixedStep(0.1), "tolerances": [1e-3]},
            ValueError,
            r"tolerances: have no effect with FixedStep",
        ),
        ({"verbose": 1}, TypeError, r"verbose: expected True or False, found 1"),
        ({"params": 3}, TypeError, r"params: expected a module"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"field": Field(), "y0": start(), "ts": [0.0, 1.0], "loss": loss, **QUICK, "solvers": "dopri5", **options}
    with pytest.raises(kind, match=message):
        sn.profile(**given)


def test_an_error_in_the_field_is_not_hidden() -> None:
    field = Field()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        sn.profile(field, torch.ones(4), [0.0, 1.0], loss, **QUICK)


def test_the_measure_of_memory() -> None:
    held = torch.ones(1000)

    def run() -> None:
        grown = held + 1
        del grown
        torch.add(held * 2, held * 3)

    assert peak_bytes(run, torch.device("cpu")) == 12_000
    with torch.profiler.profile():
        assert peak_bytes(run, torch.device("cpu")) is None
