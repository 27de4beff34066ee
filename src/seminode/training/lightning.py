"""A callback for Lightning that logs the cost of solves."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from .costs import CostLog

#: The packages under which Lightning is installed, new name first.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_callback(*sinks: Any, model: nn.Module | None = None, prefix: str = "solve/") -> Any:
    """A Lightning callback that logs evaluations, steps and seconds of every training batch.

    The values go to the logger of the trainer, and to the given sinks. Needs Lightning:
    `pip install seminode[lightning]`.

    Arguments:
        sinks: as in [`CostLog`][seminode.training.CostLog].
        model: the module whose solves are logged; by default the `LightningModule` that is trained.
        prefix: in front of the names in the logger.

    Example:
        >>> from lightning import Trainer  # doctest: +SKIP
        >>> trainer = Trainer(max_epochs=3, callbacks=[lightning_callback("costs.csv")])  # doctest: +SKIP
        >>> trainer.fit(model, data)  # doctest: +SKIP
        >>> sorted(trainer.logged_metrics)  # doctest: +SKIP
        ['solve/accepted', 'solve/backward_accepted', ..., 'solve/rejected', 'solve/seconds']
    """
    base = _callback_class()

    class SolveCostsCallback(base):  # type: ignore[misc, valid-type]
        """Logs the cost of solves after every training batch."""

        def __init__(self) -> None:
            super().__init__()
            self._log: CostLog | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._log = CostLog(pl_module if model is None else model, *sinks, prefix=prefix)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            assert self._log is not None
            row = self._log.step(int(trainer.global_step))
            pl_module.log_dict({prefix + name: float(value) for name, value in row.items()})

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self._log is not None:
                self._log.close()

    return SolveCostsCallback()


def _callback_class() -> Any:
    for name in PACKAGES:
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise ImportError(
        "lightning_callback: needs Lightning: pip install seminode[lightning]; or call CostLog in your own loop"
    )
