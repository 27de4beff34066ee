"""What every model has in common: its forward pass solves a differential equation, with options of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..norms import Without
from ..problem import Solution, Stats
from ..solve import solve
from .running import Running, along, integrals_of, noise_for, start

#: Options of `solve` that a model takes; the others are its own business.
OPTIONS = frozenset(inspect.signature(solve).parameters) - {
    *("field", "y0", "ts", "args", "params", "save", "dense", "throw"),
}


class SolvingModule(nn.Module):
    """A module whose forward pass solves a differential equation.

    Every model takes options of [`solve`][seminode.solve] by their names: `solver`, `rtol`, `atol`, `controller`,
    `norm`, `adjoint`, `jumps`, `max_steps`, `record`, `progress`. They are kept in `options`, a dict that may be
    changed later.

    Leaves of the state that are only integrals (log-probabilities, running costs) are left out of error control unless
    `norm` is given; `norm="mixed"` lets every leaf have its say, as in the published experiments.

    Attributes:
        options: options of `solve`.
        stats: what the solves of the latest forward pass cost, one [`Stats`][seminode.Stats] each.
    """

    def __init__(self, **options: Any):
        super().__init__()
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: unknown option {unknown[0]!r}; known: {', '.join(sorted(OPTIONS))}"
            )
        self.options = options
        self._stats: tuple[Stats, ...] = ()

    @property
    def stats(self) -> tuple[Stats, ...]:
        if self._stats:
            return self._stats
        return tuple(
            s for part in self.children() for m in part.modules() if isinstance(m, SolvingModule) for s in m._stats
        )

    @property
    def nfe(self) -> int:
        """Evaluations of the field in the latest forward pass."""
        return sum(stats.nfe for stats in self.stats)

    @property
    def backward_nfe(self) -> int:
        """Evaluations of the field in the latest backward pass; 0 before there was one."""
        return sum(stats.backward.nfe for stats in self.stats if stats.backward is not None)

    def solve(
        self,
        field: Callable[..., Any],
        y0: Any,
        ts: Tensor | Sequence[float],
        *,
        integrals: Sequence[bool] = (),
        **more: Any,
    ) -> Solution:
        """Solve with the model's options and count. `integrals` says which leaves of y0 are only integrals."""
        options = {**self.options, **more}
        controller = options.get("controller")
        if any(integrals) and options.get("norm") is None and (controller is None or controller.adaptive):
            options["norm"] = Without(integrals)
        solution = solve(field, y0, ts, **options)
        self._stats = (solution.stats,)
        return solution

    def solve_along(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        z0: Tensor,
        ts: Tensor | Sequence[float],
        running: Sequence[Running] = (),
        *,
        noise: str = "gaussian",
        **more: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The solution at all ts, and the running integrals at the last of them, by name."""
        if not running:
            return self.solve(field, z0, ts, **more).ys, {}
        more = {"args": noise_for(running, z0, noise), "integrals": integrals_of(running), **more}
        zs, *integrals = self.solve(partial(along, field, tuple(running)), start(z0, running), ts, **more).ys
        return zs, {one.name: values[-1] for one, values in zip(running, integrals, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stats": ()}  # what was counted belongs to a run, not to the model

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def check_channels(name: str, x: Any, channels: Sequence[int], meaning: str) -> None:
    """Refuse what is no floating-point tensor (…, c) with c one of `channels`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, found {x.dtype}")
    if x.ndim == 0 or x.shape[-1] not in channels:
        wanted = " or ".join(f"(..., {count})" for count in channels)
        raise ValueError(f"{name}: expected {meaning} of shape {wanted}, found {tuple(x.shape)}")
