"""Batches of different sizes: the first size has programs of its own, all others share programs for any size."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import forget_programs, replace_back_end, run_graph
from torch import Tensor, nn

import seminode as sn
from seminode._compile import front_end, inductor
from seminode._compile.batch_axis import BatchAxis, NotOfAnySize
from seminode._compile.programs import pieces
from seminode.adjoints._continuous import parameter_integral

SLOW = pytest.mark.slow


class Made:
    """Counts the programs that are made, by whether they are for batches of any size."""

    def __init__(self) -> None:
        self.fixed = self.any_size = 0

    def __call__(self, module: Any, examples: list[Any]) -> Any:
        symbolic = any(isinstance(n, torch.SymInt) for x in examples for n in x.shape)
        self.any_size += symbolic
        self.fixed += not symbolic
        return run_graph(module, examples)

    @property
    def total(self) -> int:
        return self.fixed + self.any_size


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    torch._dynamo.reset()
    counter = Made()
    replace_back_end(monkeypatch, counter)
    yield counter
    torch._dynamo.reset()


class Field(nn.Module):
    """A network of (t, y), times whatever else there is."""

    noise: Tensor | None = None
    reads_all = True

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).to(dtype)

    def forward(self, t: Tensor, y: Any, *args: Tensor) -> Any:
        if isinstance(y, tuple):
            z, s = y
            k = self.velocity(t, z)
            return k * s.cos()[:, None] if self.reads_all else k, z.sum(1)
        k = self.velocity(t, y)
        for factor in (*args, self.noise):
            k = k if factor is None else k * factor
        return k

    def transposing(self, t: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return self(t, y, row.T)

    def ignoring(self, t: Tensor, y: Tensor, unused: Tensor) -> Tensor:
        return self(t, y)

    def velocity(self, t: Tensor, z: Tensor) -> Tensor:
        return self.net(torch.cat([t.expand(len(z), 1), z], 1))


def solve(field: Field, n: int, state: str = "tensor", **options: Any) -> list[Tensor]:
    """The solution, and the gradients with respect to the initial state, the parameters, the arguments and the times.

    "pair" is a state of two leaves, of which "integral" reads one only. "args" and "noise" have a factor for each
    sample, "row" has the samples on its second axis, and "unused" is not read. "times" have a gradient.
    """
    generator = torch.Generator().manual_seed(n)
    dtype = next(field.parameters()).dtype
    z = torch.randn(n, 2, generator=generator, dtype=dtype).requires_grad_()
    shape = (1, n) if state == "row" else (n, 1)
    factor = torch.rand(shape, generator=generator, dtype=dtype).requires_grad_(state in ("args", "row", "unused"))
    field.noise, field.reads_all = factor if state == "noise" else None, state != "integral"
    ts = torch.tensor([0.0, 0.3, 1.0], dtype=dtype, requires_grad=state == "times")
    field.zero_grad()
    options = {"solver": "adaptive_heun", "rtol": 1e-2, "atol": 1e-2} | options
    y0: Any = (z, z.sum(1)) if state in ("pair", "integral") else z
    args = (factor,) if state in ("args", "row", "unused") else ()
    func = field if state not in ("row", "unused") else field.transposing if state == "row" else field.ignoring
    ys = sn.solve(func, y0, ts, args=args, **options).ys
    leaves = list(ys) if isinstance(ys, tuple) else [ys]
    sum(x.square().sum() for x in leaves).backward()  # type: ignore[union-attr]
    grads = [x.grad for x in (z, factor, ts, *field.parameters()) if x.requires_grad]
    return [x.detach().clone() for x in (*leaves, *grads) if x is not None]


def agree(field: Field, n: int, state: str = "tensor", **options: Any) -> None:
    """A compiled solve equals an eager one to rounding."""
    compiled, eager = (solve(field, n, state, compile=c, **options) for c in (True, False))
    torch.testing.assert_close(compiled, eager, rtol=1e-11, atol=1e-11)


PAIRS = [
    ("tensor", sn.Replay()),
    ("tensor", sn.Checkpointed(3)),
    ("args", sn.Direct()),
    ("pair", sn.Replay()),
    ("tensor", sn.Backsolve()),
    ("args", sn.Backsolve(norm="mixed")),  # whose gradients are part of the solver's state
    ("pair", sn.Interpolating()),
    ("noise", sn.Quadrature()),
]
SLOW_PAIRS = [
    ("pair", sn.Direct()),
    ("noise", sn.Direct()),
    ("noise", sn.Replay()),
    ("args", sn.Direct(memory=2000)),
    ("args", sn.Backsolve()),
    ("pair", sn.Backsolve(norm="mixed_per_tensor")),
    ("noise", sn.Backsolve(restart="fresh")),
    ("row", sn.Backsolve(norm="mixed", restart="fresh")),
    ("times", sn.Backsolve()),
    ("tensor", sn.Backsolve(norm="seminorm_rms", relative_to="entry")),
    ("args", sn.Interpolating()),
    ("times", sn.Interpolating()),
    ("pair", sn.Quadrature()),
    ("row", sn.Quadrature()),
    ("args", sn.Quadrature(rule="gauss", z="dense")),
    ("times", sn.Quadrature(rule="gauss-kronrod")),
]


@pytest.mark.parametrize(
    ("state", "adjoint"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)]
)
def test_all_sizes_but_the_first_share_programs(state: str, adjoint: Any, made: Made) -> None:
    field = Field()
    agree(field, 24, state, adjoint=adjoint)
    first = made.total
    assert made.any_size == 0 < first
    agree(field, 40, state, adjoint=adjoint)
    assert (made.fixed, made.any_size) == (first, first)
    for n in (33, 24, 40, 99):
        agree(field, n, state, adjoint=adjoint)
    assert made.total == 2 * first


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct(), sn.Quadrature(), sn.Reversible()], ids=repr)
def test_states_stored_by_columns(adjoint: Any, made: Made) -> None:
    """Their strides depend on the size of the batch."""
    field, counts = Field(), []
    options: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2, "solver": "adaptive_heun", "adjoint": adjoint}
    if isinstance(adjoint, sn.Reversible):
        options = {"solver": "reversible_heun", "controller": sn.FixedStep(0.25), "adjoint": adjoint}
    for n in (24, 40, 33, 99):
        results = []
        for compile in (False, True):
            y0 = torch.rand(2, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).T.requires_grad_()
            ys = sn.solve(field, y0, [0.0, 0.3, 1.0], compile=compile, **options).ys
            results.append([ys, *torch.autograd.grad(ys.square().sum(), [y0, *field.parameters()])])
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
        counts.append(made.total)
    assert counts[1:] == [2 * counts[0]] * 3


def test_a_smaller_last_batch_is_compiled_once(made: Made) -> None:
    """A training loop of three epochs without `drop_last`; then one with another batch size."""
    field, after = Field(), []
    for _ in range(3):
        for n in (64, 64, 23):
            solve(field, n, compile=True)
        after.append(made.total)
    assert after[0] == after[-1] == 2 * made.fixed
    for n in (48, 48, 35):
        solve(field, n, compile=True)
    assert made.total == after[-1]


def test_the_first_size_keeps_its_own_programs(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for any size are not slower, but nothing changes for a loop with batches of one size."""
    field, used = Field(), []

    def noting(module: Any, examples: list[Any]) -> Any:
        run = made(module, examples)
        fixed = not any(isinstance(n, torch.SymInt) for x in examples for n in x.shape)
        return lambda inputs: used.append(fixed) or run(inputs)

    monkeypatch.setattr(inductor, "back_end", noting)
    for n, fixed in ((64, True), (23, False), (64, True), (31, False), (64, True)):
        used.clear()
        solve(field, n, compile=True)
        assert set(used) == {fixed}


REVERSIBLE = {"solver": "reversible_heun", "adjoint": sn.Reversible(), "controller": sn.FixedStep(0.5)}


@pytest.mark.parametrize("options", [REVERSIBLE, {"dense": True}], ids=["reversible", "dense"])
def test_other_programs(options: dict[str, Any], made: Made) -> None:
    field = Field()
    if "controller" in options:
        options = options | {"rtol": None, "atol": None}
    for n in (24, 40):
        agree(field, n, **options)
    before = made.total
    agree(field, 33, **options)
    assert made.total == before
    assert made.any_size == made.fixed


@pytest.mark.parametrize(
    "adjoint", [sn.Backsolve(), *(pytest.param(x, marks=SLOW) for x in (sn.Backsolve(norm="mixed"), sn.Quadrature()))]
)
def test_integrals_are_no_part_of_backward_states(adjoint: Any, made: Made) -> None:
    """A leaf that the field does not read is not solved for on the backward pass."""
    field = Field()
    for n in (24, 40):
        agree(field, n, "integral", adjoint=adjoint, norm="auto")
    before = made.total
    for n in (33, 24, 99):
        agree(field, n, "integral", adjoint=adjoint, norm="auto")
    assert made.total == before == 2 * made.any_size


@pytest.mark.parametrize("adjoint", [sn.Backsolve(), pytest.param(sn.Quadrature(), marks=SLOW)])
def test_backward_passes_of_large_fields(adjoint: Any, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LARGE", 0)
    field = Field()
    for n in (24, 40):
        agree(field, n, "args", adjoint=adjoint)
    before = made.total
    for n in (33, 99):
        agree(field, n, "args", adjoint=adjoint)
    assert made.total == before == 2 * made.any_size


@pytest.mark.parametrize("adjoint", [sn.Backsolve(norm="mixed"), pytest.param(sn.Backsolve(), marks=SLOW)])
def test_an_argument_that_the_field_does_not_read(adjoint: Any, made: Made) -> None:
    """Its size is not seen in the graph of the field, but with `norm="mixed"` it is part of the backward state."""
    field = Field()
    for n in (24, 40, 33, 24):
        agree(field, n, "unused", adjoint=adjoint)
    before = made.total
    for n in (24, 40, 33):
        agree(field, n, "unused", adjoint=adjoint)
    assert made.total == before


def test_the_estimated_error_of_gradients(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many entries of a gradient are looked at depends on the size of the batch."""
    monkeypatch.setattr(parameter_integral, "SAMPLED", 20)
    field = Field()
    for n in (18, 40, 19, 99, 70):
        errors = []
        for compile in (True, False):
            y0 = torch.linspace(0.0, 1.0, 2 * n, dtype=torch.float64).reshape(n, 2)
            factor = y0[:, :1].cos().requires_grad_()
            options: dict[str, Any] = {
                "adjoint": sn.Quadrature(),
                "solver": "adaptive_heun",
                "rtol": 1e-2,
                "atol": 1e-2,
            }
            sol = sn.solve(field, y0, [0.0, 1.0], args=(factor,), compile=compile, **options)
            sol.ys.square().sum().backward()
            assert sol.stats.backward is not None
            errors.append(sol.stats.backward.params_error)
        assert errors[0] == pytest.approx(errors[1], rel=1e-9)
    assert made.any_size == made.fixed


def test_a_field_with_a_fixed_size_has_programs_for_each(made: Made) -> None:
    field = Field()

    def fixed(t: Tensor, y: Tensor) -> Tensor:
        return -y * sum(1.0 for _ in range(len(y)))

    for n in (24, 40, 33, 24, 40, 33):
        y0 = torch.ones(n, 2, dtype=torch.float64)
        results = [sn.solve(fixed, y0, [0.0, 0.01], solver="adaptive_heun", compile=c).ys for c in (True, False)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=0.0)
    assert made.any_size == 0
    agree(field, 33)


def test_sizes_of_zero_and_one(made: Made) -> None:
    """They broadcast, so that no program for any size covers them."""
    field = Field()
    for n in (24, 40, 1, 2):
        agree(field, n, "args")
        agree(field, n, "args", adjoint=sn.Backsolve(norm="mixed"))


@pytest.mark.slow
def test_guards_are_observed(made: Made) -> None:
    """The formulas for products of matrices depend on whether there are more rows than columns."""
    field = Field()
    field.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for n in (64, 40, 3, 4, 6, 17, 2):
        agree(field, n)
        agree(field, n, "pair", adjoint=sn.Direct())
        agree(field, n, "pair", adjoint=sn.Backsolve(norm="mixed"))
        agree(field, n, "args", adjoint=sn.Quadrature())


def test_an_argument_that_no_longer_has_the_size(made: Made) -> None:
    """One factor per sample for two sizes, then one for all samples."""
    field = Field()

    def solved(factor: Tensor, n: int, compile: bool) -> Tensor:
        y0 = torch.ones(n, 2, dtype=torch.float64)
        return sn.solve(field, y0, [0.0, 1.0], args=(factor,), solver="adaptive_heun", compile=compile).ys

    for shape, n in (((24, 1), 24), ((40, 1), 40), ((33, 1), 33), ((1, 1), 33), ((2,), 50), ((50, 2), 50)):
        factor = torch.rand(shape, dtype=torch.float64)
        torch.testing.assert_close(solved(factor, n, True), solved(factor, n, False), rtol=1e-11, atol=1e-11)


def test_tolerances_of_entries(made: Made) -> None:
    """Programs for tolerances of all entries are others than those for one number, and are for any size too."""
    field = Field()
    entries = torch.tensor([1e-3, 1e-7], dtype=torch.float64)
    counts = []
    for n in (24, 40, 33, 99):
        agree(field, n)
        for adjoint in (sn.Replay(), sn.Backsolve()):
            agree(field, n, atol=entries, adjoint=adjoint)
            agree(field, n, atol=torch.linspace(1e-6, 1e-3, 2 * n, dtype=torch.float64).reshape(n, 2), adjoint=adjoint)
        agree(field, n, "pair", rtol=(1e-2, 1e-3), adjoint=sn.Backsolve())
        counts.append(made.total)
    assert counts[1] == counts[-1] == 2 * made.fixed == 2 * made.any_size


@pytest.mark.slow
def test_fields_of_the_same_kind(made: Made) -> None:
    """Fields of other widths share a front end, but no program."""
    wide = Field()
    wide.net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    narrow = Field()
    narrow.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for n in (24, 40):
        agree(wide, n)
        agree(narrow, n)
    before = made.total
    for n in (28, 51):
        agree(wide, n)
        agree(narrow, n)
    assert made.total == before


def test_partials_and_methods(made: Made) -> None:
    def scaled(factor: float, t: Tensor, y: Tensor) -> Tensor:
        return -factor * y

    for func in (functools.partial(scaled, 2.0), Field().forward):
        for n in (24, 40, 33):
            y0 = torch.ones(n, 2, dtype=torch.float64)
            results = [sn.solve(func, y0, [0.0, 1.0], solver="adaptive_heun", compile=c).ys for c in (True, False)]
            torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
    assert made.any_size > 0


def test_marks_are_removed(made: Made) -> None:
    """The tensors of a user are as before."""
    field = Field()
    factors = [torch.rand(n, 1, dtype=torch.float64) for n in (24, 40, 33)]
    for factor in factors:
        y0 = torch.ones(len(factor), 2, dtype=torch.float64)
        sn.solve(field, y0, [0.0, 1.0], args=(factor,), solver="adaptive_heun", compile=True)
    assert made.any_size > 0
    assert all(not vars(factor) for factor in factors)


def test_front_ends_for_any_size_are_bounded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "FRONT_ENDS", 3)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return -y

    for m in range(1, 5):
        for n in (24, 40):
            sn.solve(field, torch.ones(n, m), [0.0, 0.1], solver="adaptive_heun", compile=True)
    assert len(front_end._wide_front_ends) == 3 >= len(front_end._front_ends)


# The axis itself


def test_an_axis_admits_what_was_assumed_of_it() -> None:
    axis = BatchAxis(12)
    assert axis.admits(7)
    assert not axis.admits(1)
    assert bool(axis.size > 9)
    assert [n for n in (2, 9, 10, 500) if axis.admits(n)] == [10, 500]
    assert axis.at(3 * axis.size, 5) == 15
    assert axis.at(4, 5) == 4


def test_memory_layouts_of_an_axis() -> None:
    axis = BatchAxis(12)
    rows = torch.zeros(12, 5)
    columns = torch.zeros(5, 12).T
    for x in (rows, columns):
        like = axis.batched(x, (True, False))
        assert [axis.at(n, 12) for n in like.stride()] == list(x.stride())
        assert [axis.at(n, 7) for n in like.shape] == [7, 5]
    with pytest.raises(NotOfAnySize, match="gaps in memory"):
        axis.batched(torch.zeros(12, 10)[:, ::2], (True, False))
    with pytest.raises(NotOfAnySize, match="no input"):
        axis.source([rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "adjoint"),
    [
        ("args", sn.Direct()),
        ("pair", sn.Direct()),
        ("args", sn.Backsolve(norm="mixed")),
        ("pair", sn.Backsolve()),
        ("noise", sn.Interpolating()),
        ("tensor", sn.Quadrature()),
    ],
)
def test_with_inductor(state: str, adjoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs for any size equal those for one size to rounding, and are made once."""
    torch._dynamo.reset()
    forget_programs(monkeypatch)
    made, compiler = Made(), inductor.back_end
    monkeypatch.setattr(
        inductor, "back_end", lambda module, examples: (made(module, examples), compiler(module, examples))[1]
    )
    field = Field()
    agree(field, 64, state, adjoint=adjoint)
    first = made.total
    agree(field, 40, state, adjoint=adjoint)
    before = made.total
    for n in (64, 57, 40):
        agree(field, n, state, adjoint=adjoint)
    assert made.fixed == first  # with `Quadrature` the steps of one size may need more programs than those of another
    assert made.any_size >= first
    assert made.total == before
