"""What every model has in common: its forward pass solves a differential equation, with options of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..norms import Without
from ..problem import Solution, Stats
from ..solve import solve

#: Options of `solve` that a model takes; the others are its own business.
OPTIONS = frozenset(inspect.signature(solve).parameters) - {
    *("field", "y0", "ts", "args", "params", "jumps", "save", "dense", "throw"),
}


class SolvingModule(nn.Module):
    """A module whose forward pass solves a differential equation.

    Every model takes options of [`solve`][seminode.solve] by their names: `solver`, `rtol`, `atol`, `controller`,
    `norm`, `adjoint`, `max_steps`, `record`, `progress`. They are kept in `options`, a dict that may be changed later.

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stats": ()}  # what was counted belongs to a run, not to the model

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
