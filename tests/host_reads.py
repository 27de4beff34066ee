"""Counts reads of tensors by the host, each of which would wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: Operators whose results the host needs, because they are numbers or because their shapes depend on values.
READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}
#: Methods that copy a whole tensor to the host; on a CPU no operator shows them.
COPIES = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


class HostReads(TorchDispatchMode):
    """Counts the operators that read values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


class HostCopies(TorchFunctionMode):
    """Counts the methods that copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in COPIES
        return func(*args, **(kwargs or {}))


def host_reads(run: Callable[[], Any]) -> int:
    """How often the host reads tensors while a function runs."""
    with HostReads() as reads, HostCopies() as copies:
        run()
    return reads.count + copies.count


def method_reads(run: Callable[[], Any]) -> int:
    """The same by replacing methods of tensors, for compiled solves: the compiler does not run under modes."""
    count = 0

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return method(*args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero"):
            patch.setattr(Tensor, name, counting(getattr(Tensor, name)))
        for name in ("equal", "is_nonzero", "nonzero"):
            patch.setattr(torch, name, counting(getattr(torch, name)))
        run()
    return count
