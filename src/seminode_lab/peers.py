"""Training with the real torchdiffeq: the same models on the same batches, solved by that package.

A model of seminode calls its method `solve`. Here that method is replaced for one model by a function that calls
`torchdiffeq.odeint_adjoint` and counts what it does, so that everything else stays as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn
from seminode.models.base import SolvingModule
from seminode.solution import BackwardReport

#: Other libraries that runs can be made with, and their modes: `per_tensor` is the default norm of torchdiffeq.
LIBRARIES = {"torchdiffeq": ("mixed", "seminorm", "per_tensor")}


def concatenated(leaves: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """The mixed norm of the paper: that of torchdiffeq up to version 0.1, with all parameters as one vector.

    Its argument is (a_t, z…, a_z…, a_params…), where z has this number of leaves.
    """

    def norm(state: Sequence[Tensor]) -> Tensor:
        split = 1 + 2 * leaves
        sizes = [sn.norms.rms(x) for x in state[1:split]]
        params = torch.cat([x.reshape(-1) for x in state[split:]])
        return torch.stack([state[0].abs().reshape(()), *sizes, sn.norms.rms(params)]).max()

    return norm


@dataclass
class Counter(BackwardReport):
    """The evaluations and steps of one solve, and of the backward pass when there has been one."""

    forward: sn.Stats | None = None
    evaluations: int = 0
    accepted: int = 0
    rejected: int = 0
    backward_accepted: int = 0
    backward_rejected: int = 0

    def total(self) -> sn.Stats | None:
        """What the backward pass has cost."""
        nfe = self.evaluations - (0 if self.forward is None else self.forward.nfe)
        if self.forward is None or nfe == 0:
            return None
        return sn.Stats(
            nfe, accepted=self.backward_accepted, rejected=self.backward_rejected, vjp_y=nfe, vjp_params=nfe
        )

    def count(self, name: str, *_: Any) -> None:
        setattr(self, name, getattr(self, name) + 1)


class CountedField:
    """A field with the callbacks of torchdiffeq."""

    def __init__(self, field: Callable[..., Any], args: tuple[Any, ...], counter: Counter) -> None:
        self._field, self._args, self._counter = field, args, counter
        self.callback_accept_step = partial(counter.count, "accepted")
        self.callback_reject_step = partial(counter.count, "rejected")
        self.callback_accept_step_adjoint = partial(counter.count, "backward_accepted")
        self.callback_reject_step_adjoint = partial(counter.count, "backward_rejected")

    def __call__(self, t: Tensor, y: Any) -> Any:
        self._counter.evaluations += 1
        return self._field(t, y, *self._args)


class SolveLog:
    """The statistics of solves, in order."""

    def __init__(self) -> None:
        self._stats: list[sn.Stats] = []

    def add(self, stats: sn.Stats) -> None:
        self._stats.append(stats)

    def taken(self) -> tuple[sn.Stats, ...]:
        """All that were added since the last call."""
        found, self._stats = tuple(self._stats), []
        return found


@dataclass(frozen=True)
class Solved:
    """What the models read of a solution."""

    ys: Any
    stats: sn.Stats
    record: None = None


def _solve(model: SolvingModule, mode: str, field: Callable[..., Any], y0: Any, ts: Any, **more: Any) -> Solved:
    torchdiffeq = importlib.import_module("torchdiffeq")
    options = {**model.options, **more}
    state = y0 if isinstance(y0, tuple) else (y0,)
    times = torch.as_tensor(ts, dtype=torch.float64, device=state[0].device)
    jumps = [t for t in map(float, options.get("jumps") or ()) if float(times[0]) < t < float(times[-1])]
    steps = {"jump_t": torch.tensor(jumps, dtype=torch.float64, device=times.device)} if jumps else {}
    norms = {"mixed": {"norm": concatenated(len(state))}, "seminorm": {"norm": "seminorm"}, "per_tensor": {}}
    counter = Counter()
    params = tuple(x for x in _own(model).parameters() if x.requires_grad)
    ys = torchdiffeq.odeint_adjoint(
        CountedField(field, tuple(options.get("args") or ()), counter),
        y0,
        times,
        rtol=options["rtol"],
        atol=options["atol"],
        method="dopri5",
        options=dict(steps),
        adjoint_options={**steps, **norms[mode]},
        adjoint_params=params,
    )
    stats = sn.Stats(counter.evaluations, accepted=counter.accepted, rejected=counter.rejected, report=counter)
    counter.forward = stats
    return Solved(ys, stats)


def _own(model: SolvingModule) -> nn.Module:
    """The network of the field, whose parameters the adjoint integrates."""
    field = getattr(model, "field", None)
    if not isinstance(field, nn.Module):
        raise TypeError(f"model: expected one with a field that is a module, found {type(model).__name__}")
    return field


def solved_by(library: str, model: nn.Module, mode: str) -> SolveLog:
    """Let a library solve whatever the model, or a part of it, solves; return a log of these solves."""
    if mode not in LIBRARIES[library]:
        raise ValueError(f"mode: expected one of {', '.join(LIBRARIES[library])} for {library}, found {mode!r}")
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"library: {library} is not installed: pip install {library}") from error
    log = SolveLog()
    for part in model.modules():
        if isinstance(part, SolvingModule):

            def solve(field: Any, y0: Any, ts: Any, *, own: SolvingModule = part, **more: Any) -> Solved:
                for name in ("integrals", "save"):
                    more.pop(name, None)
                found = _solve(own, mode, field, y0, ts, **more)
                log.add(found.stats)
                return found

            # Not the class: other models go on as they were.
            object.__setattr__(part, "solve", solve)
    return log
