"""Whether the tensors of a checkpoint fit what they are restored to: a model, an optimiser, random generators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn, optim

from .store import CHECKPOINT_REMEDY, StoreError


def _described(x: Tensor | None) -> str:
    return "none" if x is None else f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def check_tensors(path: Path, what: str, found: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Check that tensors have the names, shapes and types of others.

    Raises:
        StoreError: for the first that has not. It names the file.
    """
    for name in (*like, *(name for name in found if name not in like)):
        expected, x = like.get(name), found.get(name)
        if expected is None or x is None or x.shape != expected.shape or x.dtype != expected.dtype:
            said = f"expected {_described(expected)}, found {_described(x)}"
            raise StoreError(f"{path}: {what}:{name[:60]}: {said}. {CHECKPOINT_REMEDY}")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path, what: str = "model") -> None:
    """Load weights that were read from a file into a model that they fit."""
    check_tensors(path, what, weights, model.state_dict())
    model.load_state_dict(dict(weights))


def optimiser_state(
    optimiser: optim.Optimizer, found: Mapping[str, Tensor], path: Path
) -> dict[int, dict[str, Tensor]]:
    """The state of an optimiser, by the index of the parameter, from tensors with names such as `3:exp_avg`."""
    params = [x for group in optimiser.param_groups for x in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in found.items():
        i, _, key = name.partition(":")
        if not i.isdecimal() or len(i) > 9 or int(i) >= len(params):
            raise StoreError(
                f"{path}: optimiser:{name[:60]}: expected one of {len(params)} parameters. {CHECKPOINT_REMEDY}"
            )
        state.setdefault(int(i), {})[key] = x
    for i, each in state.items():
        like = {"exp_avg": params[i], "exp_avg_sq": params[i], "step": each.get("step", params[i])}
        check_tensors(path, f"optimiser:{i}", each, like)
        if each["step"].numel() != 1 or not each["step"].is_floating_point():
            said = f"expected one number, found {_described(each['step'])}"
            raise StoreError(f"{path}: optimiser:{i}:step: {said}. {CHECKPOINT_REMEDY}")
    return state
