"""The error of a step relative to the tolerances."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from ._field.pytree import Layout, real_dtype
from ._ranks import ALONE, Alone, Ranks
from ._untyped import vector_norm
from .norms import Distributed, Moments, Norm, depends_on_state_only, rms
from .norms import max as largest

#: The part of the size of a row that counts for each of its entries.
ROW_PART = 0.3


class ErrorNorm:
    """The norm of an error relative to the tolerances.

    `rtol` and `atol` are numbers or flat tensors that broadcast against the state. Of a batched solve, whose layout has
    a batch axis, the norm gives one number per sample, and so do the methods that return a number here.
    """

    def __init__(
        self,
        layout: Layout,
        norm: Norm,
        rtol: float | Tensor,
        atol: float | Tensor,
        like: Tensor,
        in_rows: tuple[bool, ...] = (),
    ):
        self.layout = layout
        #: Leaves whose entries are measured by the size of their rows too.
        self.in_rows = in_rows
        self.ranks: Alone = ALONE
        self._counts: list[float] = []  # of entries on all ranks
        if isinstance(norm, Distributed):
            self.ranks, norm = Ranks(norm.group), Moments(norm.norm)
        #: What is computed of a state; over several ranks, its moments.
        self.norm = norm
        #: Whether programs may contain the norm. Otherwise they return what it measures.
        self.in_programs = depends_on_state_only(norm)
        self.rtol = rtol
        # The usual case, the root mean square of one tensor, divides by √n on the host: one kernel less per step.
        self._root = math.sqrt(like.numel()) if norm is rms and layout.single else None
        dtype = real_dtype(like)
        # With atol = 0, an entry that stays exactly zero would give 0/0 = NaN.
        floor = torch.finfo(dtype).tiny
        if isinstance(atol, Tensor):
            self.atol = atol.clamp(min=floor)
        else:
            self.atol = torch.full((), max(atol, floor), dtype=dtype, device=like.device)

    def sizes(self, magnitude: Tensor) -> Tensor:
        """What rtol is relative to: |y|, in some leaves plus a part of the mean of |y| over the last axis."""
        if not any(self.in_rows):
            return magnitude
        pieces = magnitude.split([math.prod(shape) for shape in self.layout.shapes])
        found = [
            (x + ROW_PART * x.mean(-1, keepdim=True)).flatten() if rows else x.flatten()
            for x, rows in zip(map(Tensor.reshape, pieces, self.layout.shapes), self.in_rows, strict=True)
        ]
        return torch.cat(found)

    def allowed(self, magnitude: Tensor) -> Tensor:
        """atol + rtol·sizes."""
        magnitude = self.sizes(magnitude)
        if isinstance(self.rtol, float):
            return torch.add(self.atol, magnitude, alpha=self.rtol)
        return self.atol + self.rtol * magnitude

    def size(self, x: Tensor, y: Tensor) -> float:
        """‖x / (atol + rtol·|y|)‖."""
        return self.measured(x / self.allowed(y.abs()))

    def ratio(self, error: Tensor, y0: Tensor, y1: Tensor) -> float:
        """‖error / (atol + rtol·max(|y0|, |y1|))‖: a step is accepted when this is at most one."""
        return self.measured(error / self.allowed(torch.maximum(y0.abs(), y1.abs())))

    def worst_leaf(self, error: Tensor, y0: Tensor, y1: Tensor) -> str | None:
        """Name of the leaf with the largest relative error; `None` if the state has only one leaf."""
        if self.layout.single:
            return None
        ratio = error / self.allowed(torch.maximum(y0.abs(), y1.abs()))
        sizes = [float(rms(leaf)) if leaf.numel() else 0.0 for leaf in self.layout.segments(ratio)]
        return self.layout.names[sizes.index(max(sizes))]

    def over(self, layout: Layout) -> ErrorNorm:
        """The same for a state with other sizes, inside programs."""
        found = copy.copy(self)
        found.layout = layout
        return found

    def scaled(self, factor: float) -> ErrorNorm:
        """The same with tolerances multiplied by a factor."""
        scaled = copy.copy(self)
        scaled.rtol, scaled.atol = self.rtol * factor, self.atol * factor
        return scaled

    def failed(self, like: Tensor) -> float:
        """The size of an error that could not be computed: infinite, on all ranks."""
        return self.measured(torch.full_like(like, math.inf)) if self.ranks.several else math.inf

    def measured(self, ratio: Tensor) -> float:
        """The norm of an error that is already divided by the tolerance, as a Python float."""
        if self._root is not None:
            return vector_norm(ratio).item() / self._root
        if isinstance(self.norm, Moments):
            return self.read(self.norm(self.layout.unpack(ratio)))
        size: Any = self.norm(self.layout.unpack(ratio))  # which a user may have written
        expected = 1 if self.layout.axis == 0 else len(ratio)
        if isinstance(size, Tensor) and size.numel() == expected and not size.is_complex():
            return self.read(size)
        returned: Any = type(size).__name__
        if isinstance(size, Tensor):
            returned = size.dtype if size.is_complex() else tuple(size.shape)
        raise ValueError(f"norm: expected a function that returns a 0-d tensor, found {returned}")

    def of_program(self, found: Tensor) -> float:
        """The norm of an error, from the result of a program."""
        return self.read(found) if self.in_programs else self.measured(found)

    def read(self, size: Tensor) -> Any:
        """A norm as a Python float; one number per sample, as a tensor on the host."""
        if isinstance(self.norm, Moments):
            if not self._counts and self.norm.norm is not largest:
                shapes = self.layout.unpack(torch.empty(sum(x.numel() for x in self.layout.shapes), device="meta"))
                self._counts = self.ranks.sums(self.norm.counts(shapes))
            return self.norm.value(size, self._counts, self.ranks)
        return size.item() if self.layout.axis == 0 else size.to("cpu", torch.float64)
