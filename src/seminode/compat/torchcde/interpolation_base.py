"""The base class of controls, for controls of the user's own."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor, nn


class InterpolationBase(nn.Module, metaclass=abc.ABCMeta):
    """A control X of a controlled differential equation. A subclass provides these four members."""

    @property
    @abc.abstractmethod
    def grid_points(self) -> Tensor:
        """The knots, of shape (K,)."""

    @property
    @abc.abstractmethod
    def interval(self) -> Tensor:
        """The first and the last knot, of shape (2,)."""

    @abc.abstractmethod
    def evaluate(self, t: Any) -> Any:
        """X(t)."""

    @abc.abstractmethod
    def derivative(self, t: Any) -> Any:
        """dX/dt."""
