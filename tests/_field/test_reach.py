"""What a field can reach."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seminode._field.reach import reachable

_weight = torch.ones(2, requires_grad=True)
_other = torch.ones(3, requires_grad=True)


def _built() -> Tensor:
    return _other


def _used(y: Tensor) -> Tensor:
    return _weight * y


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = len(_built())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return _used(y)


def test_what_methods_name_is_within_reach_but_not_what_constructors_name() -> None:
    reach = reachable((_Net(),))
    assert any(x is _weight for x in reach.tensors)
    assert not any(x is _other for x in reach.tensors)
