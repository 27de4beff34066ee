"""Step-size control of all lanes as one compiled program: the verdict on a step, and the plan of the next one.

Eagerly this takes some fifty small operations, more than a compiled step of a small batch. The program is made of the
same functions: the controller's `judge`, and `propose` and `advance` below, which `LaneSchedule` calls eagerly.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compile.inductor import compile_graph
from .._compile.library import Program
from ..controllers import Controller, Verdict
from .elementwise import select


class Proposed(NamedTuple):
    """A step of every lane in the solve's own direction: where it ends, and which lanes land there and finish."""

    ahead: Tensor  # its length, with what rounding has kept from the clock
    s1: Tensor
    lands: Tensor
    final: Tensor


class Clocks(NamedTuple):
    """Where the lanes are after a step."""

    s: Tensor
    carry: Tensor
    running: Tensor
    proposal: Tensor


def propose(s: Tensor, carry: Tensor, proposal: Any, end: Tensor, last: Tensor, running: Tensor) -> Proposed:
    """Steps of the proposed lengths, landing on the ends of the lanes if they would reach them."""
    ahead = proposal + carry
    s1 = s + ahead
    lands = s1 >= last
    return Proposed(ahead, torch.where(lands, end, s1), lands, lands & running)


def advance(
    proposed: Proposed, accept: Tensor, s: Tensor, carry: Tensor, end: Tensor, proposal: Any, zero: Tensor, idle: Tensor
) -> Clocks:
    """Move the clocks of the lanes that were accepted; what rounding takes from a step is added to the next one.

    `zero` and `idle` hold zeros and infinities: the carry of lanes that land, the proposal for lanes that have ended.
    """
    lost = torch.where(proposed.lands, zero, proposed.ahead - (proposed.s1 - s))
    new_s = torch.where(accept, proposed.s1, s)
    running = new_s < end
    return Clocks(new_s, torch.where(accept, lost, carry), running, select(running, proposal, idle))


class Decision(NamedTuple):
    """What the program returns."""

    accept: Tensor
    clocks: Clocks
    proposed: Proposed  # the next step
    dt: Tensor  # of this step, 0 where a lane does not move
    next_dt: Tensor
    facts: Tensor  # whether all running lanes were accepted, whether any was, and the shortest proposal
    history: tuple[Tensor, ...]


class CompiledControl:
    """`judge`, `advance` and `propose` in one program, for lanes that only land on their ends."""

    def __init__(self, controller: Controller, order: int, lanes: int, history: int):
        def decide(
            ratio: Tensor,
            proposal: Tensor,
            ahead: Tensor,
            s1: Tensor,
            lands: Tensor,
            final: Tensor,
            s: Tensor,
            carry: Tensor,
            running: Tensor,
            end: Tensor,
            last: Tensor,
            *past: Tensor,
        ) -> list[Tensor]:
            taken = torch.where(lands, s1 - s, proposal)
            verdict: Any = controller.judge(taken, proposal, ratio, order, past)  # type: ignore[arg-type]
            accept = running & verdict.accept
            proposed = Proposed(ahead, s1, lands, final)
            zero, idle = torch.zeros_like(s), torch.full_like(s, torch.inf)
            clocks = advance(proposed, accept, s, carry, end, verdict.proposal, zero, idle)
            following = propose(clocks.s, clocks.carry, clocks.proposal, end, last, clocks.running)
            facts = [(accept == running).all(), accept.any(), clocks.proposal.min()]
            lengths = [clocks.s - s, following.s1 - clocks.s]
            rest = [torch.stack([fact.to(s.dtype) for fact in facts]), *verdict.history]
            return [accept, *clocks, *following, *lengths, *rest]

        number, flag = torch.ones(lanes, dtype=torch.float64), torch.ones(lanes, dtype=torch.bool)
        kinds = "nnnnffnnfnn" + "n" * history
        # One tensor each: a tracer tells its inputs apart by their identity.
        examples = [(number if kind == "n" else flag).clone() for kind in kinds]
        self._run: Program = compile_graph(decide, examples)

    def __call__(self, inputs: list[Tensor]) -> Decision:
        accept, *rest = self._run(inputs)
        dt, next_dt, facts, *history = rest[8:]
        return Decision(accept, Clocks(*rest[:4]), Proposed(*rest[4:8]), dt, next_dt, facts, tuple(history))


@lru_cache(maxsize=16)
def compiled_control(controller: Controller, order: int, lanes: int, history: int) -> CompiledControl | None:
    """The program, or `None` where it cannot be made: the same functions then run eagerly."""
    try:
        return CompiledControl(controller, order, lanes, history)
    except Exception:
        return None


def each_lane(controller: Controller) -> Any:
    """The controller's `judge` for tensors; that of a controller for numbers only is called for every lane."""
    if vars(type(controller)).get("elementwise", False):
        return controller.judge

    def judge(dt: Tensor, proposal: Tensor, ratio: Tensor, order: int, history: tuple[Any, ...]) -> Verdict:
        columns = [h.tolist() if isinstance(h, Tensor) else itertools.repeat(h) for h in history]
        lanes = zip(dt.tolist(), proposal.tolist(), ratio.tolist(), strict=True)
        pasts = zip(*columns, strict=False) if columns else itertools.repeat(())
        verdicts = [
            controller.judge(*lane, order, past) if lane[0] > 0.0 else Verdict(False, 0.0, past)
            for lane, past in zip(lanes, pasts, strict=False)
        ]
        accept, proposals, histories = zip(*verdicts, strict=True)
        past = tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*histories, strict=True))
        return Verdict(torch.tensor(accept), torch.tensor(proposals, dtype=torch.float64), past)  # type: ignore[arg-type]

    return judge
