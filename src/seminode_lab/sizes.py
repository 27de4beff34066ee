"""The sizes of a model: of its state and of the parameters that its adjoint integrates."""

from __future__ import annotations

import torch

from .running import model_of
from .settings import Settings

#: Shapes of samples: channels of series, shapes of images.
SHAPES = {
    "speech_commands": (20,),
    "japanese_vowels": (12,),
    "mnist": (1, 28, 28),
    "mnist14": (1, 14, 14),
    "cifar10": (3, 32, 32),
    "digits": (1, 8, 8),
    "pendulum": (),
}


def sizes(settings: Settings) -> tuple[int, float]:
    """d and p of a model: the size of the state per sample, and the parameters of a solve (the mean over flow blocks).

    >>> from .settings import rows
    >>> sizes(rows("paper")[0])
    (90, 86050.0)
    """
    with torch.device("meta"):  # without allocating memory
        model = model_of(settings, SHAPES[settings.data])
    if settings.experiment == "ncde":
        return model.hidden, _parameters(model.field)
    if settings.experiment == "hnn":
        return 3 * model.dof + model.inputs, _parameters(model.field)
    return model.dims, _parameters(model) / sum(len(scale) for scale in model.scales)


def _parameters(module: torch.nn.Module) -> float:
    return float(sum(x.numel() for x in module.parameters()))
