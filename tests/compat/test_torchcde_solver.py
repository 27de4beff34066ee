"""`cdeint` of the drop-in for torchcde, beside torchcde 0.2.5: results, gradients, exceptions and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchcde as theirs
from observations import series
from torch import Tensor, nn

import seminode as sn
import seminode.compat.torchcde as ours
from seminode.compat import torchdiffeq

pytestmark = pytest.mark.filterwarnings("ignore::seminode.DriftWarning")

NATURAL, LINEAR = "natural_cubic_coeffs", "linear_interpolation_coeffs"
HERMITE = "hermite_cubic_coefficients_with_backward_differences"
#: Tolerances at which both libraries are near the exact solution.
TIGHT: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-8}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
TS = torch.tensor([0.0, 0.6, 1.5], dtype=torch.float64)


class Field(nn.Module):
    """F(t, z) of shape (batch..., hidden, channels), with a parameter that is not in use."""

    def __init__(self, channels: int = 2, hidden: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(channels)
        self.weight = nn.Parameter(torch.randn(hidden * channels, hidden, generator=generator, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return (z @ self.weight.mT + 0.1 * t).sin().unflatten(-1, (z.shape[-1], -1)) / 2.0


class ProductField(Field):
    def prod(self, t: Tensor, z: Tensor, slope: Tensor) -> Tensor:
        return (self.forward(t, z) @ slope.unsqueeze(-1)).squeeze(-1)


class TupleField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Field(2), Field(2, 5)

    def forward(self, t: Tensor, z: Any) -> tuple[Tensor, Tensor]:
        return self.first(t, z[0]), self.second(t, z[1])


class TupleProductField(TupleField):
    def prod(self, t: Tensor, z: Any, slope: Any) -> Any:
        return tuple((f @ s.unsqueeze(-1)).squeeze(-1) for f, s in zip(self.forward(t, z), slope, strict=True))


def coefficients(torchcde: Any, name: str = NATURAL, *batch: int) -> Tensor:
    return getattr(torchcde, name)(series(*(batch or (2,)), 4, 2))


def interpolation(torchcde: Any, coeffs: Tensor, name: str = NATURAL) -> Any:
    return (torchcde.LinearInterpolation if name == LINEAR else torchcde.CubicSpline)(coeffs)


def start(batch: tuple[int, ...] = (2,), hidden: int = 3) -> Tensor:
    return series(*batch, 1, hidden, seed=7).squeeze(-2).requires_grad_()


def gradients(zs: Any, inputs: Any) -> tuple[Tensor | None, ...]:
    zs = (zs,) if isinstance(zs, Tensor) else zs
    return torch.autograd.grad(torch.stack([z.sin().sum() for z in zs]).sum(), inputs, allow_unused=True)


def compare(run: Callable[[Any], tuple[Any, ...]], **tolerance: Any) -> None:
    """Run a program with both libraries and compare all that it returns."""
    expected, results = run(theirs), run(ours)
    for i, (a, b) in enumerate(zip(expected, results, strict=True)):
        if a is None:
            assert b is None or not b.any(), f"result {i}: expected no gradient, found {b}"
        else:
            torch.testing.assert_close(b, a, **(tolerance or CLOSE), msg=lambda m, i=i: f"result {i}: {m}")


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("name", [NATURAL, LINEAR, HERMITE])
@pytest.mark.parametrize("batch", [(2,), (2, 1, 3), ()], ids=str)
def test_results_and_gradients(adjoint: bool, name: str, batch: tuple[int, ...]) -> None:
    """Gradients for the start, the parameters, the coefficients and the times."""

    def run(torchcde: Any) -> tuple[Any, ...]:
        x = series(*batch, 4, 2)
        coeffs = getattr(torchcde, name)(x).requires_grad_()
        X, field, z0 = interpolation(torchcde, coeffs, name), Field(), start(batch)
        ts = TS.clone().requires_grad_()
        more: dict[str, Any] = {"options": {"jump_t": X.grid_points}} if name == LINEAR else {}
        if adjoint:
            more["adjoint_params"] = (*field.parameters(), coeffs)
        zs = torchcde.cdeint(X, field, z0, ts, adjoint=adjoint, **TIGHT, **more)
        assert zs.shape == (*batch, 3, 3)
        inputs = z0, field.weight, field.unused, coeffs, *([] if name == LINEAR else [ts])
        return zs, *gradients(zs, inputs)

    compare(run)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("kind", [TupleField, TupleProductField])
def test_tuples(adjoint: bool, kind: type[TupleField]) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X = torchcde.TupleControl(*(interpolation(torchcde, coefficients(torchcde, n), n) for n in (NATURAL, HERMITE)))
        field, z0 = kind(), (start(), start(hidden=5))
        zs = torchcde.cdeint(X=X, func=field, z0=z0, t=TS, adjoint=adjoint, **TIGHT)
        assert isinstance(zs, tuple)
        assert [z.shape for z in zs] == [(2, 3, 3), (2, 3, 5)]
        return *zs, *gradients(zs, (*z0, *field.parameters()))

    compare(run)


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_product_of_the_fields_own(adjoint: bool) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = interpolation(torchcde, coefficients(torchcde)), ProductField(), start()
        zs = torchcde.cdeint(X, field, z0, TS, adjoint, **TIGHT)
        return zs, *gradients(zs, (z0, field.weight))

    compare(run)


def wave(torchcde: Any) -> Any:
    """A control of the user's own, with a parameter: X(t) = (sin(a·t), t) for a batch of 2."""

    class Wave(torchcde.InterpolationBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.speed = nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))

        @property
        def grid_points(self) -> Tensor:
            return torch.tensor([0.0, 3.0], dtype=torch.float64)

        @property
        def interval(self) -> Tensor:
            return self.grid_points

        def evaluate(self, t: Tensor) -> Tensor:
            return torch.stack(((self.speed * t).sin(), t.expand(2)), -1)

        def derivative(self, t: Tensor) -> Tensor:
            return torch.stack((self.speed * (self.speed * t).cos(), torch.ones_like(self.speed)), -1)

    return Wave()


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_control_of_ones_own(adjoint: bool) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = wave(torchcde), Field(), start()
        zs = torchcde.cdeint(X, field, z0, X.interval, adjoint=adjoint, **TIGHT)
        return zs, *gradients(zs, (z0, field.weight, X.speed))

    compare(run)


SEMINORM = {"norm": "seminorm"}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, {"rtol": 2e-3, "atol": 1e-3}),
        ({"rtol": 1e-6}, {"rtol": 1e-3, "atol": 1e-3}),
        ({"atol": 1e-9, "rtol": 1e-8}, {"rtol": 1e-6, "atol": 1e-6}),
        ({**TIGHT, "method": "dopri8"}, CLOSE),
        ({"rtol": 1e-5, "atol": 1e-6, "method": "bosh3"}, {"rtol": 1e-3, "atol": 1e-3}),
        ({"rtol": 1e-4, "atol": 1e-5, "method": "adaptive_heun"}, {"rtol": 1e-2, "atol": 1e-2}),
        ({"rtol": 1e-6, "atol": 1e-6, "method": "fehlberg2"}, {"rtol": 1e-2, "atol": 1e-2}),
        ({"method": "euler", "options": {"step_size": 0.1}}, {"rtol": 1e-9, "atol": 1e-9}),
        ({"method": "midpoint", "options": {"step_size": 0.2}}, {"rtol": 1e-9, "atol": 1e-9}),
        ({"method": "rk4", "options": {"step_size": 0.1}}, {"rtol": 1e-9, "atol": 1e-9}),
        ({"method": "heun3"}, {"rtol": 1e-9, "atol": 1e-9}),
        ({"method": "rk4", "options": {"step_size": 0.25, "interp": "cubic"}}, {"rtol": 1e-9, "atol": 1e-9}),
        ({"method": "rk4", "options": {"step_size": 0.25, "perturb": True}}, {"rtol": 1e-9, "atol": 1e-9}),
        ({**TIGHT, "options": {"jump_t": torch.tensor([1.0, 2.0])}}, CLOSE),
        ({**TIGHT, "options": {"step_t": torch.tensor([1.0, 2.0])}}, CLOSE),
        ({**TIGHT, "options": {"first_step": 0.01, "max_num_steps": 500, "safety": 0.8}}, CLOSE),
        ({**TIGHT, "options": {"ifactor": 5.0, "dfactor": 0.3, "max_step": 0.2}}, CLOSE),
        ({**TIGHT, "options": {"norm": lambda y: y.abs().max()}}, CLOSE),
        ({**TIGHT, "options": {"dtype": torch.float64}}, CLOSE),
    ],
)
@pytest.mark.parametrize("adjoint", [False, True])
def test_options(options: dict[str, Any], tolerance: dict[str, Any], adjoint: bool) -> None:
    """With fixed steps both take the same ones, so that the results agree to rounding, with the adjoint as well."""

    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = interpolation(torchcde, coefficients(torchcde)), Field(), start()
        zs = torchcde.cdeint(X, field, z0, TS, adjoint=adjoint, **options)
        return zs, *gradients(zs, (z0, field.weight))

    compare(run, **tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"adjoint_options": SEMINORM},
        {"adjoint_rtol": 1e-10, "adjoint_atol": 1e-12},
        {"adjoint_method": "dopri8"},
        {"adjoint_method": "dopri8", "adjoint_options": {"first_step": 0.01, **SEMINORM}},
        {"adjoint_method": "rk4", "adjoint_options": {"step_size": 0.01}},
    ],
    ids=str,
)
def test_options_of_the_adjoint(options: dict[str, Any]) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = interpolation(torchcde, coefficients(torchcde)), Field(), start()
        zs = torchcde.cdeint(X, field, z0, TS, **TIGHT, **options)
        return zs, *gradients(zs, (z0, field.weight))

    compare(run)


@pytest.mark.parametrize("adjoint", [False, True])
def test_backwards_in_time(adjoint: bool) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = interpolation(torchcde, coefficients(torchcde)), Field(), start()
        zs = torchcde.cdeint(X, field, z0, TS.flip(0), adjoint=adjoint, **TIGHT)
        return zs, *gradients(zs, (z0, field.weight))

    compare(run)


def test_only_adjoint_params_get_a_gradient() -> None:
    """Also if they name coefficients, from which the control was computed."""
    for torchcde in (theirs, ours):
        coeffs = coefficients(torchcde).requires_grad_()
        X, field, z0 = interpolation(torchcde, coeffs), Field(), start()
        for named in ((), (field.weight,), (coeffs,), (field.weight, coeffs)):
            zs = torchcde.cdeint(X, field, z0, TS, adjoint_params=named)
            grads = gradients(zs, (z0, field.weight, coeffs))
            expected = [True, *(any(x is p for p in named) for x in (field.weight, coeffs))]
            assert [g is not None and bool(g.any()) for g in grads] == expected


def test_a_control_with_a_gradient_that_was_not_asked_for() -> None:
    """torchcde warns and gives none. The drop-in warns, and gives the one that torchcde gives when asked."""
    coeffs = coefficients(theirs).requires_grad_()
    X, field, z0 = theirs.CubicSpline(coeffs), Field(), start()
    zs = theirs.cdeint(X, field, z0, TS, **TIGHT, adjoint_params=(*field.parameters(), coeffs))
    (expected,) = gradients(zs, coeffs)
    with pytest.warns(UserWarning, match="adjoint_params"):
        zs = theirs.cdeint(X, field, z0, TS, **TIGHT)
    assert gradients(zs, coeffs) == (None,)
    with pytest.warns(UserWarning, match="adjoint_params"):
        zs = ours.cdeint(ours.CubicSpline(coeffs), field, z0, TS, **TIGHT)
    (grad,) = gradients(zs, coeffs)
    torch.testing.assert_close(grad, expected, **CLOSE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.cdeint(ours.CubicSpline(coeffs.detach()), field, z0, TS)
        ours.cdeint(ours.CubicSpline(coeffs), field, z0, TS, adjoint=False)


def test_a_field_that_is_a_function() -> None:
    """With the adjoint, torchcde leaves the tensors of a function without a gradient, and says nothing."""
    weight = Field().weight

    def field(t: Tensor, z: Tensor) -> Tensor:
        return (z @ weight.mT).sin().unflatten(-1, (3, 2))

    X, z0 = interpolation(ours, coefficients(ours)), start()
    grads = [gradients(ours.cdeint(X, field, z0, TS, adjoint=a, **TIGHT), (z0, weight)) for a in (False, True)]
    for direct, adjoint in zip(*grads, strict=True):
        torch.testing.assert_close(adjoint, direct, **CLOSE)


@pytest.mark.parametrize("adjoint", [False, True])
def test_torchcde_itself_over_the_torchdiffeq_drop_in(adjoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its splines are views of the coefficients, which are named in `adjoint_params`."""
    results = []
    for module in (theirs.solver.torchdiffeq, torchdiffeq):
        monkeypatch.setattr(theirs.solver, "torchdiffeq", module)
        coeffs = coefficients(theirs).requires_grad_()
        X, field, z0 = theirs.CubicSpline(coeffs), Field(), start()
        more: dict[str, Any] = {"adjoint_params": (*field.parameters(), coeffs)} if adjoint else {}
        zs = theirs.cdeint(X, field, z0, TS, adjoint=adjoint, **TIGHT, **more)
        results.append((zs, *gradients(zs, (z0, field.weight, coeffs))))
    for expected, result in zip(*results, strict=True):
        assert float(result.abs().max()) > 0.01
        torch.testing.assert_close(result, expected, **CLOSE)


# The backend torchsde


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize(
    ("kind", "noise", "methods"),
    [
        (
            "stratonovich",
            "additive",
            [None, "midpoint", "heun", "euler_heun", "milstein", "log_ode", "reversible_heun"],
        ),
        ("stratonovich", "general", ["midpoint"]),
        ("ito", "additive", [None, "srk", "euler", "milstein"]),
        ("ito", "scalar", ["srk"]),
        ("ito", "general", [None]),
    ],
)
def test_methods_of_torchsde(kind: str, noise: str, methods: list[str | None], adjoint: bool) -> None:
    """Without noise both take the same steps, so that the results agree to rounding."""
    for method in methods:

        def run(torchcde: Any, method: str | None = method) -> tuple[Any, ...]:
            X, field, z0 = interpolation(torchcde, coefficients(torchcde)), Field(), start()
            vars(field).update(sde_type=kind, noise_type=noise)
            ts = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
            options: dict[str, Any] = {"backend": "torchsde", "method": method, "dt": 0.125}
            zs = torchcde.cdeint(X, field, z0, ts, adjoint=adjoint, **options)
            return zs, *gradients(zs, (z0, field.weight))

        compare(run, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("adjoint", [False, True])
def test_adaptive_steps_of_torchsde(adjoint: bool) -> None:
    def run(torchcde: Any) -> tuple[Any, ...]:
        X, field, z0 = interpolation(torchcde, coefficients(torchcde)), Field(), start()
        ts = torch.tensor([0.0, 1.3, 2.0], dtype=torch.float64)
        options: dict[str, Any] = {"backend": "torchsde", "adaptive": True, "dt": 0.05, "dt_min": 1e-4}
        if adjoint:
            options |= {"adjoint_adaptive": True, "adjoint_method": "heun"}
        zs = torchcde.cdeint(X, field, z0, ts, adjoint=adjoint, rtol=1e-6, atol=1e-6, **options)
        return zs, *gradients(zs, (z0, field.weight))

    compare(run, rtol=1e-3, atol=1e-3)


# Mistakes


def bad_field(answer: Callable[[Tensor], Any], **more: Any) -> Any:
    class Bad(nn.Module):
        def forward(self, t: Tensor, z: Any) -> Any:
            return answer(z)

    field = Bad()
    for name, value in more.items():
        setattr(field, name, value)
    return field


def call(torchcde: Any, field: Any = None, z0: Any = None, ts: Any = TS, X: Any = None, **options: Any) -> Any:
    X = interpolation(torchcde, coefficients(torchcde)) if X is None else X
    return torchcde.cdeint(X, Field() if field is None else field, start() if z0 is None else z0, ts, **options)


def sde(torchcde: Any, **options: Any) -> Any:
    return call(torchcde, backend="torchsde", dt=0.25, **options)


def tuple_call(torchcde: Any, field: Any, z0: Any) -> Any:
    X = torchcde.TupleControl(interpolation(torchcde, coefficients(torchcde)))
    return torchcde.cdeint(X, field, z0, TS)


X234 = series(2, 3, 4)
SHUFFLED = torch.tensor([0.0, 2.0, 1.0])
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "integers": lambda m: m.natural_cubic_coeffs(torch.arange(12).reshape(2, 3, 2)),
    "integers, linear": lambda m: m.linear_interpolation_coeffs(torch.arange(12).reshape(2, 3, 2)),
    "one axis": lambda m: m.natural_cubic_coeffs(torch.zeros(3)),
    "integer times": lambda m: m.natural_cubic_coeffs(X234, torch.arange(3)),
    "times of two axes": lambda m: m.hermite_cubic_coefficients_with_backward_differences(X234, torch.rand(2, 3)),
    "times not increasing": lambda m: m.linear_interpolation_coeffs(X234, SHUFFLED),
    "times repeated": lambda m: m.natural_cubic_coeffs(X234, torch.tensor([0.0, 1.0, 1.0])),
    "too few times": lambda m: m.natural_cubic_coeffs(X234, torch.tensor([0.0, 1.0])),
    "one knot": lambda m: m.natural_cubic_coeffs(X234[:, :1]),
    "one knot, linear": lambda m: m.linear_interpolation_coeffs(X234[:, :1]),
    "one knot, rectilinear": lambda m: m.linear_interpolation_coeffs(X234[:, :1], rectilinear=0),
    "channel too large": lambda m: m.linear_interpolation_coeffs(X234, rectilinear=4),
    "negative channel": lambda m: m.linear_interpolation_coeffs(X234, rectilinear=-1),
    "channel no integer": lambda m: m.linear_interpolation_coeffs(X234, rectilinear=0.0),
    "gaps in time": lambda m: m.linear_interpolation_coeffs(X234 * torch.nan, rectilinear=0),
    "times for rectilinear": lambda m: m.linear_interpolation_coeffs(X234, torch.rand(3).cumsum(0), rectilinear=0),
    "coefficients": lambda m: m.CubicSpline(torch.zeros(2, 3, 5)),
    "an option of a spline": lambda m: m.CubicSpline(torch.zeros(2, 3, 8), extra=1),
    "no controls": lambda m: m.TupleControl(),
    "intervals": lambda m: m.TupleControl(m.CubicSpline(torch.zeros(3, 8)), m.CubicSpline(torch.zeros(4, 8))),
    "forward_fill of a list": lambda m: m.misc.forward_fill([1.0]),
    "forward_fill of one axis": lambda m: m.misc.forward_fill(torch.zeros(3)),
    "no derivative": lambda m: call(m, X=nn.Linear(2, 2)),
    "batch axes": lambda m: call(m, z0=start((3,))),
    "a matrix too few": lambda m: call(m, bad_field(lambda z: z)),
    "hidden channels": lambda m: call(m, bad_field(lambda z: z.new_zeros(2, 4, 2))),
    "control channels": lambda m: call(m, bad_field(lambda z: z.new_zeros(2, 3, 5))),
    "batch of the field": lambda m: call(m, bad_field(lambda z: z.new_zeros(1, 3, 2))),
    "a tuple for a tensor": lambda m: call(m, bad_field(lambda z: (z.new_zeros(2, 3, 2),))),
    "product": lambda m: call(m, bad_field(lambda z: z, prod=lambda t, z, s: z[:, :2])),
    "product of a tuple": lambda m: call(m, bad_field(lambda z: z, prod=lambda t, z, s: (z,))),
    "a state that is no tensor": lambda m: call(m, bad_field(lambda z: torch.zeros(2, 3, 2)), z0=3.0),
    "a tuple of states for one control": lambda m: call(m, z0=(start(),)),
    "too few states": lambda m: tuple_call(m, TupleField(), (start(), start())),
    "a tensor for a tuple": lambda m: tuple_call(m, bad_field(lambda z: z[0]), (start(),)),
    "a tensor for a tuple of slopes": lambda m: tuple_call(m, Field(), start()),
    "numbers in a tuple": lambda m: tuple_call(m, bad_field(lambda z: (1.0,)), (start(),)),
    "backend": lambda m: call(m, backend="torchode"),
    "method": lambda m: call(m, method="rk45"),
    "torchsde: three axes": lambda m: m.cdeint(
        interpolation(m, coefficients(m, NATURAL, 2, 2)), Field(), start((2, 2)), TS, backend="torchsde"
    ),
    "torchsde: tuple": lambda m: m.cdeint(
        m.TupleControl(interpolation(m, coefficients(m))),
        bad_field(lambda z: (z[0].new_zeros(2, 3, 2),)),
        (start(),),
        TS,
        backend="torchsde",
    ),
    "torchsde: method": lambda m: sde(m, method="dopri5"),
    "torchsde: method of the other integral": lambda m: sde(m, method="srk"),
    "torchsde: times backwards": lambda m: sde(m, ts=TS.flip(0)),
    "torchsde: times with a gradient": lambda m: sde(m, ts=TS.clone().requires_grad_()),
    "torchsde: adjoint method forwards": lambda m: sde(m, method="adjoint_reversible_heun"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.filterwarnings("ignore")
def test_mistakes(mistake: Callable[[Any], Any]) -> None:
    """An error of the same type, with a message."""
    with pytest.raises(Exception) as expected:  # noqa: PT011
        mistake(theirs)
    with pytest.raises(expected.type) as found:
        mistake(ours)
    assert len(str(found.value)) > 10


def test_unknown_arguments_of_torchsde_warn() -> None:
    for torchcde in (theirs, ours):
        with pytest.warns(UserWarning, match="kind_of"):
            sde(torchcde, kind_of=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the tracer
@pytest.mark.parametrize("adjoint", ["replay", "direct"])
def test_compiled_steps_follow_their_coefficients(adjoint: Any) -> None:
    """The same programs serve other coefficients, and coefficients that are changed in place."""
    field, coeffs = Field(), coefficients(ours)

    def run(coeffs: Tensor, X: Any = None) -> list[Any]:
        coeffs = coeffs.clone().requires_grad_() if X is None else coeffs
        X, z0 = interpolation(ours, coeffs) if X is None else X, start()
        zs = ours.cdeint(X, field, z0, TS, adjoint=False, **TIGHT)
        inputs = [x for x in (z0, field.weight, coeffs) if x.requires_grad]
        return [zs.detach(), *gradients(zs, inputs)]

    X = interpolation(ours, coeffs)
    expected = [run(coeffs), run(2.0 * coeffs), run(3.0 * coeffs)]
    with torchdiffeq.use(adjoint=adjoint, compile=True), warnings.catch_warnings():
        warnings.simplefilter("error", sn.CompileWarning)
        found = [run(coeffs), run(2.0 * coeffs)]
        run(coeffs, X)
        for buffer in (X._a, X._b, X._two_c, X._three_d):
            buffer.mul_(3.0)
        found.append(run(coeffs, X))
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=False):
            torch.testing.assert_close(x, y, **CLOSE)
