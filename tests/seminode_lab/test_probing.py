"""Counts of backward evaluations per block, which are recorded in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import seminode as sn
from seminode.models import MultiscaleCNF
from seminode_lab import running
from seminode_lab.data import DataError, Images, ImageSet, reduced_images
from seminode_lab.probing import block_evaluations
from seminode_lab.schedule import Schedule
from seminode_lab.settings import Settings
from seminode_lab.store import Finished


def flow() -> MultiscaleCNF:
    torch.manual_seed(0)
    model = MultiscaleCNF((1, 4, 4), 4, scales=2, blocks=2, zero_init=False, rtol=1e-2, atol=1e-2, adjoint=sn.Replay())
    for x in model.parameters():  # so that the norms differ in what they need
        x.data.mul_(2.0)
    return model


def pixels(count: int = 3) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 1, 4, 4), generator=chance, dtype=torch.uint8)


ADJOINTS = {
    "mixed": {"norm": "mixed", "adjoint": sn.Backsolve(norm="mixed", restart="fresh")},
    "seminorm": {"norm": "mixed", "adjoint": sn.Backsolve(restart="fresh")},
    "best": {"adjoint": sn.Replay()},
}


@pytest.mark.parametrize("norm", ADJOINTS)
def test_counts_are_those_of_a_backward_pass_with_these_options(norm: str) -> None:
    found = block_evaluations(flow(), pixels(), 1e-5)
    model = flow()
    options: Any = {"rtol": 1e-5, "atol": 1e-5, **ADJOINTS[norm]}
    model.options.update(options)
    torch.manual_seed(0)
    model.bits_per_dim(pixels()).mean().backward()
    backward = [each.backward for each in model.stats]
    assert found[norm] == [each.nfe for each in backward if each is not None]
    assert len(found[norm]) == 4


def test_a_count_leaves_no_trace() -> None:
    model = flow()
    options, chance = dict(model.options), torch.get_rng_state()
    block_evaluations(model, pixels(), 1e-3)
    assert dict(model.options) == options
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(x.grad is None for x in model.parameters())


def test_training_records_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageSet(pixels(8), torch.zeros(8, dtype=torch.long))
    monkeypatch.setattr(running.sets, "mnist", lambda root: Images(images, images))
    schedule = Schedule(epochs=2, lr=1e-3, every=1, selects=False)
    model = (("hidden", 2), ("scales", 2), ("blocks", 1))
    given = {"sizes": (6, 3, 3), "model": model}
    plain = Settings("cnf", "test", "mnist", "best", 1e-2, 1e-2, 4, schedule, **given)
    probed = plain.changed(probe=1e-4)
    assert "probe" not in plain.as_json()
    assert Settings.of_json(probed.as_json()) == probed
    results = [running.run(each, tmp_path / str(each.probe)) for each in (plain, probed)]
    found = Finished.load(tmp_path / "0.0001" / probed.name).metrics
    assert [each["probe"]["iterations"] for each in found] == [2, 4]
    assert all(len(each["probe"]["mixed"]) == 2 and min(each["probe"]["mixed"]) > 0 for each in found)
    assert results[0]["test"]["loss"] == results[1]["test"]["loss"]  # counting changes nothing


def test_reduced_images_are_means_of_squares() -> None:
    part = ImageSet(pixels(2), torch.zeros(2, dtype=torch.long))
    small = reduced_images(Images(part, part), 2).test
    assert small.shape == (1, 2, 2)
    assert small.x[0, 0, 1, 0] == part.x[0, 0, 2:, :2].float().mean().round()
    with pytest.raises(DataError, match="expected a divisor"):
        reduced_images(Images(part, part), 3)
