"""Fields whose parameters are sharded over processes: each call gathers them, and frees them again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from .capture import communicates
from .reach import reachable

REMEDY = (
    "Shard the module whose forward() calls solve, and not the field inside it: leave out fully_shard(field), and keep "
    "fully_shard(model). The parameters are then gathered once per solve"
)


def reason_to_refuse(differentiated: bool, common_steps: bool) -> str | None:
    """Why a field may not call sharded modules, if it may not.

    `differentiated`: whether the backward pass evaluates the field itself. FSDP reduces only gradients that autograd
    accumulates in the gathered parameters, as a part of the backward pass of each call. `common_steps`: whether all
    ranks make the same evaluations.
    """
    if differentiated:
        return (
            f"and this adjoint does not take part in FSDP's reduction of gradients. {REMEDY}; or pass "
            "adjoint=sn.Direct(), compile=False and norm=sn.norms.distributed()"
        )
    if not common_steps:
        return (
            "which all ranks must do equally often, but with a norm of their own they take different steps. "
            f"{REMEDY}; or pass norm=sn.norms.distributed()"
        )
    return None


def refusing_sharded(reach: Any, reason: str | None) -> AbstractContextManager[None]:
    """Raise an error as soon as a sharded module is called that the field can reach, if there is a reason to.

    A model that solves in its forward pass is within reach of its own field, but is not called by it.
    """
    modules = [] if reason is None else _sharded(reach)
    return _guarding(modules, str(reason)) if modules else contextlib.nullcontext()


@contextlib.contextmanager
def _guarding(modules: Sequence[nn.Module], reason: str) -> Generator[None, None, None]:
    handles = [_guarded(module, reason) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sharded(reach: Any) -> list[nn.Module]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # imported by the code that shards a module
    if fsdp is None or not communicates():
        return []
    kinds = fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    return [part for part in reachable(reach).parts if isinstance(part, kinds)]


def _guarded(module: nn.Module, reason: str) -> Any:
    def refuse(module: nn.Module, inputs: Any) -> None:
        raise ValueError(
            f"field: calls {type(module).__name__}, which is sharded: every evaluation gathers its parameters, {reason}"
        )

    return module.register_forward_pre_hook(refuse, prepend=True)
