"""The overshoot of the published procedure: the last step of a backward solve runs past its end.

The published procedure does not cut the last step off. It steps as far as the controller proposes, and interpolates
back to the end. Near the end of a flow's backward solve the steps are long, so that the last one can run far past it,
where no trajectory of the data has ever been, and the interpolation between its two ends determines the gradient. Here
the same procedure is measured with and without a place at the end where a step must end. Nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import seminode as sn
from seminode.diagnostics.contenders import Contender
from seminode.diagnostics.isolation import Snapshot
from seminode.diagnostics.subject import flat_gradient, relative_error
from seminode.solvers import Dopri5

from .measuring import MAX_STEPS, OneBatch, PrecisionPlan, batch_of, reference_of, up_to_date
from .provenance import circumstances
from .running import Root
from .settings import Settings
from .store import write_json
from .training import drifts
from .weights import trained

FILE = "overshoot.json"
NORMS = ("mixed", "seminorm")
TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6)
BATCH = 8


@dataclass(frozen=True)
class Ending:
    """A backward pass of all blocks, and where the last step of each block began and ended. The solves end at 0."""

    norm: str
    tolerance: float  # rtol and atol
    lands: bool
    backward_nfe: int
    error: float  # of the gradient, relative
    last_steps: list[list[float]]

    @property
    def furthest(self) -> list[float]:
        """The last step that runs furthest."""
        return min(self.last_steps, key=lambda step: step[1])


def ending(batch: OneBatch, norm: Any, tolerance: float, lands: bool, reference: torch.Tensor) -> Ending:
    """Differentiate the loss by the published procedure, whose last step lands on the end or runs past it."""
    contender = Contender(sn.Backsolve(norm=norm, restart="fresh"), Dopri5(), False, rtol=tolerance, atol=tolerance)
    controller = sn.Integral(step_to=(0.0,)) if lands else sn.Integral()
    answer = batch.solve(contender, MAX_STEPS, controller=controller, record=True)
    with drifts():
        grads = torch.autograd.grad(answer.ys, batch.targets, allow_unused=True)
    backward = [record.backward for record in batch.task.model.records if record.backward is not None]
    stats = answer.stats.backward
    assert stats is not None
    last = [[record.accepted[-1].t0, record.accepted[-1].t1] for record in backward]
    error = relative_error(flat_gradient(grads, batch.targets), reference)
    return Ending(norm, tolerance, lands, stats.nfe, float(error), last)


def endings(batch: OneBatch) -> tuple[list[Ending], float | None]:
    """All endings, and the accuracy of the reference."""
    snapshot = Snapshot(list(batch.task.model.modules()), [], batch.leaf.device)
    plan = PrecisionPlan(tuple((x, x) for x in TOLERANCES), ("Replay",), BATCH)
    try:
        reference, gradient = reference_of(batch, plan, snapshot.restore)
        found = []
        for norm in NORMS:
            for tolerance in TOLERANCES:
                for lands in (False, True):
                    snapshot.restore()
                    found.append(ending(batch, norm, tolerance, lands, gradient))
    finally:
        snapshot.restore()
    return found, reference.good_to


def measure(settings: Settings, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> Path:
    """Measure a flow and write `out/overshoot.json`, unless that file exists with the same settings and weights."""
    path, weights = out / FILE, trained(settings, out)
    asked = {"settings": settings.as_json(), "tolerances": list(TOLERANCES), "batch": BATCH}
    if up_to_date(path, asked, weights):
        return path
    if progress is not None:
        progress(f"the overshoot of the published procedure: {settings.row}")
    found, good_to = endings(batch_of(settings, BATCH, 0, root, weights))
    about = {"circumstances": circumstances(), "good_to": good_to, "plan": {}}
    about["weights"] = None if weights is None else dict(weights.about)
    write_json(path, asked | about | {"endings": [asdict(each) for each in found]})
    return path
