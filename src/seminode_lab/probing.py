"""Backward evaluations of each block of a flow, on one batch, in all modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seminode.models import MultiscaleCNF

from .counting import evaluations
from .modes import solve_options

#: The modes whose evaluations are counted.
MODES = ("mixed", "seminorm", "best")
#: The noise of all counts is the same, so that only the weights differ.
SEED = 0


def block_evaluations(model: MultiscaleCNF, pixels: Tensor, tolerance: float) -> dict[str, Any]:
    """Backward evaluations of each block at a tolerance, by mode. The model and the random numbers are as before.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> flow = MultiscaleCNF((1, 4, 4), hidden=4, scales=2, blocks=1)
        >>> found = block_evaluations(flow, torch.zeros(2, 1, 4, 4, dtype=torch.uint8), 1e-3)
        >>> len(found["mixed"]), found["tolerance"], found["samples"]
        (2, 0.001, 2)
    """
    found: dict[str, Any] = {"tolerance": tolerance, "samples": len(pixels)}
    options: Any = model.options
    before = dict(options)
    common = {name: value for name, value in before.items() if name not in ("norm", "adjoint")}
    common |= {"rtol": tolerance, "atol": tolerance, "compile": False}
    try:
        for mode in MODES:
            options.clear()
            options.update({**common, **solve_options("cnf", mode)})
            found[mode] = _counts(model, pixels)
    finally:
        options.clear()
        options.update(before)
    return found


def _counts(model: MultiscaleCNF, pixels: Tensor) -> list[int]:
    params = [x for x in model.parameters() if x.requires_grad]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        loss = model.bits_per_dim(pixels).mean()
        torch.autograd.grad(loss, params)
    return [0 if each.backward is None else evaluations(each.backward) for each in model.stats]
