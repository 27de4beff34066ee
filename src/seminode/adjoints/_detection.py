"""Which tensors a solve is differentiated by: detected with the first evaluation, or named by the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._compile.graph import Capture
from .._field.capture import CaptureWatch, own_leaf
from .._field.lineage import Lineage
from .._field.reach import Reach, reachable
from .base import ForwardPass


class Detected(NamedTuple):
    """What was learned about a field before the solve."""

    params: list[Tensor]  # the tensors to differentiate
    used: set[int]  # the ids of those that were seen in use
    candidates: list[Tensor]  # computed tensors within reach that may come into use later
    cut: int = 0  # from what the field makes new leaves, where the gradient would end
    others: bool = True  # whether the field may use tensors that require a gradient other than these


def detect(forward: ForwardPass) -> Detected:
    """Make the first evaluation, and learn from it and by looking at the callable what the field uses."""
    problem = forward.problem
    if problem.trivial:
        return Detected([], set(), [])
    if forward.capture is not None:
        return _inputs_of(forward.capture, forward)
    determinism = forward.determinism
    try:
        watch = _first_evaluation(forward)
    finally:
        determinism.restore_buffers()
    determinism.remember(watch.constants.values(), forward.counter.nfe)
    used = {**watch.captured, **{id(x): x for x in watch.held()}}
    reach = reachable(problem.field.reach)
    if problem.params is not None:
        return _among(problem.params, used, reach)
    params = {**{id(x): x for x in reach.leaves()}, **used}
    candidates = [x for x in reach.computed() if id(x) not in used]
    return Detected(list(params.values()), set(used), candidates, watch.cut)


def _among(named: Sequence[Tensor], used: dict[int, Tensor], reach: Reach) -> Detected:
    """The parameters that the user has named, and the tensors in use that were computed from them before the solve.

    A path, say, is computed from coefficients. Autograd takes its gradient on to them.
    """
    lineage = Lineage(named)
    params = {id(x): x for x in named}
    derived = [x for x in (*used.values(), *reach.computed()) if id(x) not in params and lineage.includes(x)]
    params.update((id(x), x) for x in derived if id(x) in used)
    candidates = [x for x in derived if id(x) not in used]
    known = params.keys() | {id(x) for x in candidates}
    others = {*used, *(id(x) for x in (*reach.leaves(), *reach.computed()))} - known
    return Detected(list(params.values()), set(used), candidates, others=bool(others))


def _first_evaluation(forward: ForwardPass) -> CaptureWatch:
    """The first evaluation of the solve, under a watch; with a graph, where a gradient may be asked for.

    With a graph, a weight that is computed in this evaluation and cached keeps its own. Some operations (out=, numpy)
    need to run without one: then the evaluation is made again. Errors of the field itself are raised by both.
    """
    problem = forward.problem
    within_reach = forward.determinism.reach
    tensors = problem.y0, problem.ts, *problem.field.arg_tensors, *within_reach.leaves(), *within_reach.computed()
    if any(x.requires_grad for x in tensors):
        try:
            return _watched_evaluation(forward, graph=True)
        except RuntimeError:
            pass
    with torch.no_grad():
        watch = _watched_evaluation(forward, graph=False)
    watch.cut = 0  # a field may make a leaf of y only because y has no graph
    return watch


def _watched_evaluation(forward: ForwardPass, graph: bool) -> CaptureWatch:
    problem = forward.problem
    # Copies, so that a tensor which is also closed over counts as captured.
    y0 = own_leaf(problem.y0, graph)
    args = [own_leaf(x, graph and x.requires_grad) for x in problem.field.arg_tensors]
    watch = CaptureWatch([y0, *args])
    engine = forward.engine(problem.field.bind(args, watch.over_field(problem.field.func)))
    count, times = forward.counter.nfe, forward.log.times
    with forward.determinism.solving():
        try:
            forward.k1 = forward.first_slope(engine, y0).detach()
        except RuntimeError:
            if times is not None:
                del times[count:]
            forward.counter.nfe = count
            raise
    return watch


def _inputs_of(capture: Capture, forward: ForwardPass) -> Detected:
    """The tensors to differentiate for a field that is a graph: it can only use the inputs of the graph."""
    problem = forward.problem
    args = {id(x) for x in problem.field.arg_tensors}
    rest = [x for x in capture.rest if id(x) not in args]
    constants = ((x, x._version) for x in rest if not x.requires_grad and not x.is_inference())
    forward.determinism.remember(constants, forward.counter.nfe)
    used = [x for x in rest if x.requires_grad]
    params = used if problem.params is None else problem.params
    return Detected(list({id(x): x for x in params}.values()), {id(x) for x in used}, [])
