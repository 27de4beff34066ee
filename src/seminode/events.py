"""Events: conditions on the state that end a solve or change its state, and what a solution knows about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Y = TypeVar("Y")


@dataclass(frozen=True)
class Event:
    """A zero crossing of g(t, y) along the solution, at which the solve ends or continues from another state.

    The event time tₑ is the root of g(t, y(t)). The solve locates it to float precision and takes a step that ends
    exactly there. tₑ, the state there and everything that follows are differentiable, also with respect to the tensors
    that `fn` and `reset` use:

        dtₑ = −(∂g/∂y·dy + ∂g/∂θ·dθ) / (∂g/∂t + ∂g/∂y·f)

    Arguments:
        fn: `fn(t, y, *args)`, the function g: a 0-d real tensor. `args` are those of `solve`. With `batched=True`, t
            has shape (B,), y its batch axis first, and the result one number per sample, shape (B,).
        direction: 1 for crossings from below to above zero only, −1 for those from above to below, 0 for both,
            in the direction of the solve, also for decreasing times.
        terminal: whether the event ends the solve. By default it does, unless there is a `reset`.
        reset: `reset(t, y, *args)`, the state to continue from, in the structure, shapes and dtype of y.
        max_count: the number of the occurrence that ends the solve. The reset is not applied at it.

    A zero of `fn` at the start of the solve is not an event. See [Events and hybrid systems](events.md).

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I*, II.6 (discontinuous equations).

    Example:
        >>> import torch, seminode as sn
        >>> falling = lambda t, y: torch.stack([y[1], torch.full_like(y[1], -9.81)])
        >>> ball = torch.tensor([10.0, 0.0], dtype=torch.float64)
        >>> sol = sn.solve(falling, ball, [0.0, 5.0], event=sn.Event(lambda t, y: y[0]))
        >>> sol.status.value, round(float(sol.events[0].times[0]), 6)
        ('ended by an event', 1.427843)
    """

    fn: Callable[..., Tensor]
    direction: int = 0
    terminal: bool | None = None
    reset: Callable[..., Any] | None = None
    max_count: int | None = None

    def __post_init__(self) -> None:
        _check_callable("fn", self.fn, "fn(t, y, *args)")
        if self.reset is not None:
            _check_callable("reset", self.reset, "reset(t, y, *args)")
        if isinstance(self.direction, bool) or self.direction not in (-1, 0, 1):
            raise ValueError(f"direction: expected -1, 0 or 1, found {self.direction!r}")
        if self.terminal is not None and not isinstance(self.terminal, bool):
            raise TypeError(f"terminal: expected True, False or None, found {self.terminal!r}; see also max_count")
        count = self.max_count
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"max_count: expected a whole number of at least 1, found {count!r}")
        if count is not None and self.terminal is False:
            raise ValueError("max_count: ends the solve, but terminal=False; leave one of them out")
        if self.reset is not None and self.last == 1:
            raise ValueError(
                "reset: is never applied, since the first occurrence ends the solve; leave out one of them"
            )

    @property
    def last(self) -> int | None:
        """The number of the occurrence that ends the solve, if one does."""
        if self.max_count is not None:
            return self.max_count
        terminal = self.reset is None if self.terminal is None else self.terminal
        return 1 if terminal else None


def _check_callable(name: str, value: object, call: str) -> None:
    if isinstance(value, type) or not callable(value):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name}: expected a callable {call}, found {found}")


@dataclass(frozen=True)
class Occurrences(Generic[Y]):
    """When an event occurred, and in which states: an entry of `Solution.events`.

    Attributes:
        times: the event times, shape (n,), in float64; differentiable.
        states: the states there, before any reset, in the structure of `y0`, the occurrences first; differentiable.
        counts: how often the event occurred.

    With `batched=True`, times have the shape (n, B): entry [k, b] is occurrence k in sample b, or NaN if there are
    fewer in that sample. States have an axis of occurrences in front of the batch axis, and counts have the shape (B,).

    Example:
        >>> import torch, seminode as sn
        >>> swing = lambda t, y: torch.stack([y[1], -y[0]])
        >>> through_zero = sn.Event(lambda t, y: y[0], terminal=False)
        >>> sol = sn.solve(swing, torch.tensor([1.0, 0.0], dtype=torch.float64), [0.0, 6.0], event=through_zero)
        >>> sol.events[0].counts, sol.events[0].times  # ½π and 1½π
        (2, tensor([1.5708, 4.7124], dtype=torch.float64))
        >>> sol.events[0].states[:, 1]
        tensor([-1.0000,  1.0000], dtype=torch.float64)
    """

    times: Tensor
    states: Y
    counts: Any  # an int or, of a batched solve, a tensor

    def __len__(self) -> int:
        return len(self.times)

    def __repr__(self) -> str:
        counts = self.counts.tolist() if isinstance(self.counts, Tensor) else self.counts
        times = self.times.detach().to("cpu", torch.float64)
        return f"Occurrences({counts}, times={torch.round(times, decimals=6).tolist()})"
