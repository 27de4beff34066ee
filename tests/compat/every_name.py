"""A program that uses every public name and every option of torchdiffeq 0.2.5 and torchcde 0.2.5.

It knows nothing of seminode. It prints, as JSON, the values, the type of the error and the warnings of every call.
`test_every_name.py` runs it with the originals and, by `python -m seminode.compat`, with the drop-ins.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchcde as torchcde_module
import torchdiffeq as torchdiffeq_module
from torch import Tensor, nn
from torchdiffeq._impl.odeint import SOLVERS

# Results depend on the arguments in ways that types do not tell.
torchdiffeq: Any = torchdiffeq_module
torchcde: Any = torchcde_module

DOUBLE = torch.float64
Y0 = torch.tensor([1.0, -0.5], dtype=DOUBLE)
T = torch.tensor([0.0, 0.4, 1.0], dtype=DOUBLE)
ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun")
ON_GRID = ("euler", "midpoint", "heun2", "heun3", "rk4")
ADAMS = ("explicit_adams", "implicit_adams", "fixed_adams")
LOOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}

Case = Callable[[], Any]
CASES: dict[str, Case] = {}


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.2, -1.0], [0.9, -0.1]], dtype=DOUBLE))
        self.unused = nn.Parameter(torch.ones(2, dtype=DOUBLE))
        self.log: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y @ self.weight) * torch.cos(t)


class Watched(Field):
    """A field with all callbacks."""

    def _note(self, t: Tensor, y: Any, dt: Tensor) -> None:
        self.log += [float(t), float(dt), float(sum(x.sum() for x in y) if isinstance(y, tuple) else y.sum())]

    callback_step = callback_accept_step = callback_reject_step = _note
    callback_step_adjoint = callback_accept_step_adjoint = callback_reject_step_adjoint = _note


class Pair(Field):
    def forward(self, t: Tensor, y: Any) -> Any:
        return super().forward(t, y[0]), -y[1]


def grid(func: Any, y0: Any, t: Tensor) -> Tensor:
    return torch.cat([t[:1], t[:1] + 0.3 * (t[-1:] - t[:1]), t[-1:]])


def largest(x: Tensor) -> Tensor:
    return x.abs().max()


def largest_of(parts: Any) -> Tensor:
    return torch.stack([x.abs().max() for x in parts]).max()


def odeint(field: Any = None, y0: Any = Y0, t: Tensor = T, **options: Any) -> list[Any]:
    """Values and gradients of `odeint`."""
    field = Field() if field is None else field
    y0 = tuple(x.clone().requires_grad_() for x in y0) if isinstance(y0, tuple) else y0.clone().requires_grad_()
    return differentiated(torchdiffeq.odeint(field, y0, t, **options), field, y0, t)


def adjoint(field: Any = None, y0: Any = Y0, t: Tensor = T, **options: Any) -> list[Any]:
    """Values and gradients of `odeint_adjoint`, and what callbacks have seen."""
    field = Field() if field is None else field
    y0 = tuple(x.clone().requires_grad_() for x in y0) if isinstance(y0, tuple) else y0.clone().requires_grad_()
    return [*differentiated(torchdiffeq.odeint_adjoint(field, y0, t, **options), field, y0, t), field.log]


def differentiated(ys: Any, field: Any, y0: Any, t: Tensor) -> list[Any]:
    outputs = ys if isinstance(ys, tuple) else (ys,)
    starts = y0 if isinstance(y0, tuple) else (y0,)
    values = [x.detach() for x in outputs]
    loss = torch.stack([x.square().sum() for x in outputs]).sum()
    if not loss.requires_grad:
        return values
    inputs = [*starts, *([t] if t.requires_grad else []), *(field.parameters() if isinstance(field, nn.Module) else ())]
    return [*values, *torch.autograd.grad(loss, inputs, allow_unused=True)]


def _methods() -> None:
    for method in (*ADAPTIVE, *ON_GRID, *ADAMS):
        assert method in SOLVERS
        step: dict[str, Any] = {} if method in ADAPTIVE else {"options": {"step_size": 0.05}}
        CASES[f"odeint {method}"] = lambda m=method, s=step: odeint(method=m, **LOOSE, **s)
        CASES[f"odeint_adjoint {method}"] = lambda m=method, s=step: adjoint(method=m, **LOOSE, **s)
    for solver in ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA"):
        options = {"solver": solver, "max_step": 0.5}
        CASES[f"scipy {solver}"] = lambda o=options: odeint(method="scipy_solver", options=o, rtol=1e-8, atol=1e-9)
    CASES["scipy min_step"] = lambda: odeint(method="scipy_solver", options={"min_step": 1e-9}, rtol=1e-8, atol=1e-9)


def _options() -> None:
    adaptive: dict[str, Any] = {
        "norm": largest,
        "min_step": 0.2,
        "max_step": 0.1,
        "first_step": 0.05,
        "step_t": torch.tensor([0.3, 0.7], dtype=DOUBLE),
        "jump_t": torch.tensor([0.55], dtype=DOUBLE),
        "safety": 0.7,
        "ifactor": 3.0,
        "dfactor": 0.5,
        "max_num_steps": 1000,
        "dtype": torch.float32,
    }
    for name, value in adaptive.items():
        CASES[f"adaptive {name}"] = lambda o={name: value}: odeint(options=o, **LOOSE)
        CASES[f"adaptive {name}, adjoint"] = lambda o={name: value}: adjoint(options=o, **LOOSE)
    fixed: list[dict[str, Any]] = [
        {},
        {"step_size": 0.15},
        {"grid_constructor": grid},
        {"step_size": 0.15, "interp": "cubic"},
        {"step_size": 0.15, "interp": "linear", "perturb": True},
    ]
    for options in fixed:
        name = ", ".join(f"{key} {value if isinstance(value, str) else ''}".strip() for key, value in options.items())
        for method in ("rk4", "heun2"):
            CASES[f"{method}: {name}"] = lambda m=method, o=options: odeint(method=m, options=o)
            CASES[f"{method}, adjoint: {name}"] = lambda m=method, o=options: adjoint(method=m, options=o)
    for method in ADAMS:
        options = {"max_order": 5, "step_size": 0.05, **({} if method == "explicit_adams" else {"max_iters": 6})}
        CASES[f"{method} max_order"] = lambda m=method, o=options: odeint(method=m, options=o)
    CASES["tolerances as tensors"] = lambda: odeint(rtol=torch.tensor(1e-5), atol=torch.tensor(1e-7))
    CASES["keywords"] = lambda: torchdiffeq.odeint(func=Field(), y0=Y0, t=T).detach()


def _adjoint_options() -> None:
    backward: dict[str, dict[str, Any]] = {
        "adjoint_rtol": {"adjoint_rtol": 1e-3},
        "adjoint_atol": {"adjoint_atol": 1e-3},
        "adjoint_method": {"adjoint_method": "bosh3"},
        "adjoint_options": {"adjoint_options": {"max_step": 0.1}},
        "seminorm": {"adjoint_options": {"norm": "seminorm"}},
        "norm": {"adjoint_options": {"norm": largest_of}},
    }
    for name, options in backward.items():
        CASES[name] = lambda o=options: adjoint(**LOOSE, **o)
    CASES["adjoint_params"] = lambda: adjoint(field := Field(), adjoint_params=(field.weight,), **LOOSE)
    CASES["callbacks"] = lambda: adjoint(Watched(), **LOOSE)
    CASES["callbacks on a grid"] = lambda: adjoint(Watched(), method="rk4")
    for name, solve in (("odeint", odeint), ("odeint_adjoint", adjoint)):
        CASES[f"times of {name}"] = lambda s=solve: s(t=T.clone().requires_grad_(), rtol=1e-9, atol=1e-10)
        CASES[f"times of {name} on a grid"] = lambda s=solve: s(t=T.clone().requires_grad_(), method="midpoint")
    CASES["backwards in time"] = lambda: adjoint(t=T.flip(0), **LOOSE)


def _states() -> None:
    pair = Y0, torch.tensor([[2.0]], dtype=DOUBLE)
    for name, options in {"numbers": LOOSE, "tuples": {"rtol": (1e-5, 1e-4), "atol": [1e-7, 1e-6]}}.items():
        CASES[f"tuple, tolerances as {name}"] = lambda o=options: odeint(Pair(), pair, **o)
    CASES["tuple, adjoint"] = lambda: adjoint(Pair(), pair, **LOOSE)
    CASES["complex"] = lambda: torchdiffeq.odeint(lambda t, y: 1j * y, Y0 + 1j * Y0, T, **LOOSE).real
    CASES["float32"] = lambda: torchdiffeq.odeint(lambda t, y: -y, Y0.float(), T.float(), rtol=1e-4, atol=1e-5)


def event(interface: Any, backwards: bool = False, **options: Any) -> list[Any]:
    start = torch.tensor([1.0, -0.3 if not backwards else 0.3], dtype=DOUBLE, requires_grad=True)
    gravity = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    t0 = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)

    def fall(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -gravity])

    if interface is torchdiffeq.odeint_adjoint:
        options["adjoint_params"] = (gravity,)
    time, ys = torchdiffeq.odeint_event(
        fall, start, t0, event_fn=lambda t, y: y[0], reverse_time=backwards, odeint_interface=interface, **options
    )
    grads = torch.autograd.grad(time.sum() + ys[-1].sum(), [start, gravity])
    return [time.reshape(()).detach(), ys.detach(), *grads]


def _events() -> None:
    for name in ("odeint", "odeint_adjoint"):
        interface = getattr(torchdiffeq, name)
        CASES[f"odeint_event {name}"] = lambda i=interface: event(i, rtol=1e-9, atol=1e-9)
        CASES[f"odeint_event {name} on a grid"] = lambda i=interface: event(
            i, method="rk4", options={"step_size": 0.01}
        )
    CASES["odeint_event reverse_time"] = lambda: event(torchdiffeq.odeint, True, rtol=1e-9, atol=1e-9)
    CASES["event_fn"] = lambda: [
        x.detach()
        for x in torchdiffeq.odeint(
            lambda t, y: -y, Y0, T[:2], event_fn=lambda t, y: y - torch.tensor([0.5, -9.0]), rtol=1e-9, atol=1e-9
        )
    ]

    def dense() -> list[Tensor]:
        y = torchdiffeq.odeint_dense(Field(), Y0, T[0], T[-1], rtol=1e-8, atol=1e-9)
        return [y(torch.tensor(t, dtype=DOUBLE)).detach() for t in (0.05, 0.5, 0.95)]

    CASES["odeint_dense"] = dense
    CASES["odeint_dense options"] = lambda: torchdiffeq.odeint_dense(
        Field(), Y0, T[0], T[-1], rtol=1e-8, atol=1e-9, method="dopri5", options={"max_step": 0.2}
    )(torch.tensor(0.3, dtype=DOUBLE)).detach()


def _mistakes() -> None:
    for name, options in {
        "unknown option": {"options": {"colour": 1}},
        "unknown option on a grid": {"method": "euler", "options": {"colour": 1}},
        "low order": {"method": "fixed_adams", "options": {"max_order": 3, "step_size": 0.1}},
        "callbacks that are not called": {"field": Watched(), "method": "euler"},
        "unknown method": {"method": "rk5"},
        "y0 list": {"y0": [Y0]},
        "repeated times": {"t": T[[0, 1, 1]]},
        "two grids": {"method": "euler", "options": {"step_size": 0.1, "grid_constructor": grid}},
        "high order": {"method": "fixed_adams", "options": {"max_order": 13}},
        "interpolation": {"method": "euler", "options": {"interp": "quintic"}},
        "few steps": {"options": {"max_num_steps": 1}},
        "no event step": {"method": "euler", "t": T[:2], "event_fn": lambda t, y: y[0] - 0.5},
    }.items():
        CASES[name] = lambda o=options: odeint(**o) if "y0" not in o else torchdiffeq.odeint(Field(), o["y0"], T)
    CASES["no module"] = lambda: torchdiffeq.odeint_adjoint(lambda t, y: -y, Y0, T)
    CASES["options of another method"] = lambda: adjoint(adjoint_method="rk4", method="dopri5", options={})
    CASES["parameter without gradient, norm"] = lambda: adjoint(
        Field(), adjoint_params=(Y0,), adjoint_options={"norm": largest_of}, **LOOSE
    )[:1]


# torchcde


def series() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 6, 3, generator=generator, dtype=DOUBLE).cumsum(-2)


def gaps() -> Tensor:
    x = series()
    x[0, 2, 1] = x[1, 3:5, 2] = x[0, 0, 2] = torch.nan
    return x


KNOTS = torch.tensor([0.0, 0.5, 1.5, 2.0, 3.5, 4.0], dtype=DOUBLE)
COEFFICIENTS = (
    "natural_cubic_coeffs",
    "natural_cubic_spline_coeffs",
    "linear_interpolation_coeffs",
    "hermite_cubic_coefficients_with_backward_differences",
)


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(0.4 * torch.randn(4, 12, generator=generator, dtype=DOUBLE))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight).unflatten(-1, (4, 3))


class Product(Matrix):
    def prod(self, t: Tensor, z: Tensor, slope: Tensor) -> Tensor:
        return (self.forward(t, z) @ slope.unsqueeze(-1)).squeeze(-1)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Matrix(), Matrix()

    def forward(self, t: Tensor, z: Any) -> Any:
        return self.one(t, z[0]), self.two(t, z[1])


def cde(field: nn.Module | None = None, interpolation: str = "CubicSpline", **options: Any) -> list[Any]:
    field = Matrix() if field is None else field
    name = "linear_interpolation_coeffs" if interpolation == "LinearInterpolation" else "natural_cubic_coeffs"
    coeffs = getattr(torchcde, name)(series(), KNOTS)
    X = getattr(torchcde, interpolation)(coeffs, KNOTS)
    z0 = torch.full((2, 4), 0.1, dtype=DOUBLE, requires_grad=True)
    start: Any = z0
    if isinstance(field, Matrices):
        X, start = torchcde.TupleControl(X, X), (z0, 2 * z0)
        assert torch.equal(X.grid_points, KNOTS)
    zs = torchcde.cdeint(X, field, start, X.interval, **options)
    outputs = zs if isinstance(zs, tuple) else (zs,)
    loss = torch.stack([z.square().sum() for z in outputs]).sum()
    return [*(z.detach() for z in outputs), *torch.autograd.grad(loss, [z0, *field.parameters()])]


def _cdes() -> None:
    tight: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}
    for flag in (True, False):
        CASES[f"cdeint adjoint={flag}"] = lambda f=flag: cde(adjoint=f, **tight)
        CASES[f"cdeint adjoint={flag}, linear"] = lambda f=flag: cde(
            interpolation="LinearInterpolation", adjoint=f, method="rk4", options={"step_size": 0.05}
        )
        CASES[f"cdeint adjoint={flag}, prod"] = lambda f=flag: cde(Product(), adjoint=f, **tight)
        CASES[f"cdeint adjoint={flag}, tuple"] = lambda f=flag: cde(Matrices(), adjoint=f, **tight)
        CASES[f"cdeint adjoint={flag}, torchsde"] = lambda f=flag: cde(
            adjoint=f, backend="torchsde", dt=0.05, method="midpoint"
        )
    CASES["cdeint defaults"] = cde
    CASES["cdeint seminorm"] = lambda: cde(adjoint_options={"norm": "seminorm"}, **tight)
    CASES["cdeint backend"] = lambda: cde(backend="jax")


def _paths() -> None:
    for name in COEFFICIENTS:
        make = getattr(torchcde, name)
        kind = torchcde.LinearInterpolation if name.startswith("linear") else torchcde.CubicSpline
        for label, t in (("", None), (", times", KNOTS)):
            CASES[f"{name}{label}"] = lambda m=make, t=t: m(series(), t)
            CASES[f"{name}{label}, gaps"] = lambda m=make, t=t: m(gaps(), t)

            def control(make: Any = make, kind: Any = kind, t: Any = t) -> list[Tensor]:
                X = kind(make(series(), t), t)
                assert isinstance(X, torchcde.InterpolationBase)
                times = torch.tensor([0.25, 1.7, 3.9], dtype=DOUBLE)
                return [X.grid_points, X.interval, X.evaluate(times), X.derivative(times), X.evaluate(times[1])]

            CASES[f"control of {name}{label}"] = control
    filled = torchcde.misc.forward_fill
    CASES["rectilinear"] = lambda: torchcde.linear_interpolation_coeffs(
        torch.cat([KNOTS.expand(2, 6).unsqueeze(-1), gaps()], -1), rectilinear=0
    )
    CASES["forward_fill"] = lambda: filled(gaps())
    CASES["forward_fill along an axis"] = lambda: filled(gaps(), fill_index=-1)
    CASES["cheap_stack"] = lambda: torchcde.misc.cheap_stack([KNOTS, KNOTS], dim=0)
    CASES["tridiagonal_solve"] = lambda: torchcde.misc.tridiagonal_solve(KNOTS, KNOTS[:-1], KNOTS + 9, KNOTS[1:])
    CASES["short series"] = lambda: torchcde.natural_cubic_coeffs(series()[:, :1])
    CASES["whole numbers"] = lambda: torchcde.linear_interpolation_coeffs(series().long())
    CASES["knots that fall"] = lambda: torchcde.linear_interpolation_coeffs(series(), KNOTS.flip(0))
    CASES["no controls"] = lambda: torchcde.TupleControl()
    CASES["abstract"] = lambda: torchcde.InterpolationBase().evaluate(0.0)
    for name in ("logsig_windows", "logsignature_windows"):
        assert callable(getattr(torchcde, name))  # the original needs signatory, which cannot be installed any more
    CASES["versions"] = lambda: [float(x.__version__.replace(".", "")) for x in (torchdiffeq, torchcde)]


def numbers(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().tolist()
    return [numbers(x) for x in found] if isinstance(found, list | tuple) else found


def outcome(case: Case) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values, error = numbers(case()), None
        except Exception as raised:
            values, error = None, [kind.__name__ for kind in type(raised).__mro__]
    return {"values": values, "error": error, "warnings": sorted({str(each.message) for each in caught})}


def main() -> None:
    torch.set_num_threads(1)
    for fill in (_methods, _options, _adjoint_options, _states, _events, _mistakes, _cdes, _paths):
        fill()
    print(json.dumps({name: outcome(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
