"""The base class of all models: a module whose forward pass solves a differential equation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor, nn

from .._field.checks import check_count, check_number
from .._stepping.problem import Save
from ..norms import Distributed, Without
from ..solution import Record, Solution, Stats
from ..solve import AllOptions, SolveOptions, solve
from .running import Noise, Running, along, integrals_of, noise_for, start
from .step_costs import StepRegulariser, step_regularisers, watch_steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

Y = TypeVar("Y")

#: Options of `solve` that a user may pass to a model. The model itself sets the other arguments.
OPTIONS = frozenset(inspect.signature(solve).parameters) - {
    *("field", "y0", "ts", "args", "params", "save", "dense", "throw"),
}


class SolvingModule(nn.Module):
    """A module whose forward pass solves a differential equation.

    Every model accepts the options of [`solve`][seminode.solve] as keyword arguments: `solver`, `rtol`, `atol`,
    `controller`, `norm`, `adjoint`, `jumps`, `max_steps`, `record`, `progress`, `compile`. They are stored in the dict
    `options`, which may be changed later.

    Leaves of the state that are plain integrals (log-probabilities, running costs) are left out of error control unless
    `norm` is given; `norms.distributed()` leaves them out too. `norm="mixed"` includes every leaf, as the published
    experiments do.

    Attributes:
        options: options of `solve`.
        stats: the cost of the solves of the latest forward pass, one [`Stats`][seminode.Stats] per solve.
        records: with the option `record`, one [`Record`][seminode.Record] per solve of the latest forward pass.

    Example:
        >>> import torch
        >>> from seminode.models import SolvingModule
        >>> class Decay(SolvingModule):
        ...     def __init__(self, **options):
        ...         super().__init__(**options)
        ...         self.rate = nn.Parameter(torch.tensor(1.0))
        ...
        ...     def forward(self, x):
        ...         return self.solve(lambda t, y: -self.rate * y, x, [0.0, 1.0], save="last").ys[-1]
        >>> model = Decay(solver="tsit5", rtol=1e-6)
        >>> model(torch.ones(4, 1)).sum().backward()
        >>> model.rate.grad  # −4e⁻¹
        tensor(-1.4715)
        >>> model.nfe == model.stats[0].nfe, model.backward_nfe == model.stats[0].backward.nfe
        (True, True)
    """

    def __init__(self, **options: Unpack[SolveOptions]):
        super().__init__()
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: unknown option {unknown[0]!r}; known: {', '.join(sorted(OPTIONS))}"
            )
        self.options: SolveOptions = options
        self._stats: tuple[Stats, ...] = ()
        self._records: tuple[Record, ...] = ()

    def _solvers(self) -> list[SolvingModule]:
        """The modules that call `solve`: the model itself, or its submodules."""
        if self._stats:
            return [self]
        return [m for part in self.children() for m in part.modules() if isinstance(m, SolvingModule)]

    @property
    def stats(self) -> tuple[Stats, ...]:
        return tuple(stats for module in self._solvers() for stats in module._stats)

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for module in self._solvers() for record in module._records)

    @property
    def nfe(self) -> int:
        """Evaluations of the field in the latest forward pass."""
        return sum(stats.nfe for stats in self.stats)

    @property
    def backward_nfe(self) -> int:
        """Evaluations of the field in the latest backward pass; 0 before the first one."""
        return sum(stats.backward.nfe for stats in self.stats if stats.backward is not None)

    def solve(
        self,
        field: Callable[..., Any],
        y0: Y,
        ts: Tensor | Sequence[float],
        *,
        integrals: Sequence[bool] = (),
        save: Save = "ts",
        **more: Unpack[AllOptions],
    ) -> Solution[Y]:
        """Solve with the model's options and keep the statistics.

        Arguments:
            field, y0, ts, save: as for [`solve`][seminode.solve].
            integrals: one flag per leaf of the state, `True` for a plain integral.
            more: options of `solve` that take precedence over the model's.
        """
        options: dict[str, Any] = {**self.options, **more}
        if any(integrals):
            options.update(_without_integrals(options, integrals))
        solution = solve(field, y0, ts, save=save, **options)
        self._stats = (solution.stats,)
        self._records = () if solution.record is None else (solution.record,)
        return solution

    def solve_along(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        z0: Tensor,
        ts: Tensor | Sequence[float],
        running: Sequence[Running] = (),
        *,
        noise: Noise = "gaussian",
        save: Save = "ts",
        **more: Unpack[AllOptions],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The solution at all ts, and the running integrals at the last time, by name."""
        step_costs = step_regularisers(running)
        rates = tuple(each for each in running if each not in step_costs)
        if not rates:
            ys, costs = self.watched(field, z0, ts, step_costs, save=save, **more)
            return ys, costs
        more.setdefault("args", noise_for(rates, z0, noise))
        state, flags = start(z0, rates), integrals_of(rates)
        along_field = partial(along, field, rates)
        ys, costs = self.watched(along_field, state, ts, step_costs, integrals=flags, save=save, **more)
        zs, *integrals = ys
        # A cost is ∫ r |dt|: it is positive in either direction of time.
        sign = -1.0 if float(ts[-1]) < float(ts[0]) else 1.0
        ends = {integral.name: sign * values[-1] for integral, values in zip(rates, integrals, strict=True)}
        return zs, {each.name: {**ends, **costs}[each.name] for each in running}

    def watched(
        self,
        field: Callable[..., Any],
        y0: Any,
        ts: Tensor | Sequence[float],
        step_costs: Sequence[StepRegulariser],
        *,
        integrals: Sequence[bool] = (),
        save: Save = "ts",
        **more: Unpack[AllOptions],
    ) -> tuple[Any, dict[str, Tensor]]:
        """The solution at all ts, and the costs that are read off its steps, by name."""
        if not step_costs:
            return self.solve(field, y0, ts, integrals=integrals, save=save, **more).ys, {}
        observer = watch_steps(step_costs, y0, {**self.options, **more})
        more["observers"] = (*more.get("observers", ()), observer)
        ys = self.solve(field, y0, ts, integrals=integrals, save=save, **more).ys
        return ys, observer.result()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stats": (), "_records": ()}  # statistics are not part of the model

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


@dataclass(frozen=True)
class OfState:
    """A norm that the user wrote for the state z, applied to a state (z, integrals…)."""

    norm: Callable[[Any], Any]

    def __call__(self, y: Any) -> Tensor:
        return self.norm(y[0])


def _without_integrals(options: dict[str, Any], integrals: Sequence[bool]) -> dict[str, Any]:
    """The user's norm and tolerances are for the state z; adapt them to a state (z, integrals…)."""
    changed: dict[str, Any] = {}
    norm, controller = options.get("norm"), options.get("controller")
    if norm is None and (controller is None or getattr(controller, "adaptive", False)):
        changed["norm"] = Without(integrals)
    elif isinstance(norm, Distributed):
        if norm.norm is None:
            changed["norm"] = norm.over(Without(integrals))
    elif callable(norm) and not isinstance(norm, Without):
        changed["norm"] = OfState(norm)
    for name in ("rtol", "atol"):
        value = options.get(name)
        if isinstance(value, Tensor) and value.ndim > 0:
            changed[name] = (value, *(float(value.min()) for is_integral in integrals if is_integral))
    return changed


def check_channels(name: str, x: Any, channels: Sequence[int], meaning: str) -> None:
    """Raise an error unless x is a floating-point tensor of shape (…, c) with c in `channels`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, found {x.dtype}")
    if x.ndim == 0 or x.shape[-1] not in channels:
        shapes = " or ".join(f"(..., {count})" for count in channels)
        raise ValueError(f"{name}: expected {meaning} of shape {shapes}, found {tuple(x.shape)}")


def check_hidden(name: str, widths: Any) -> tuple[int, ...]:
    if isinstance(widths, int) or not isinstance(widths, Sequence):
        raise TypeError(f"{name}: expected the widths of the hidden layers, found {type(widths).__name__}")
    return tuple(check_count(f"{name}[{i}]", width) for i, width in enumerate(cast("Sequence[Any]", widths)))


def check_end(t1: Any) -> float:
    t1 = check_number("t1", t1)
    if not t1 > 0.0:
        raise ValueError(f"t1: expected a number above 0, found {t1:g}")
    return t1
