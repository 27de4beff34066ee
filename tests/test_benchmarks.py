"""The benchmarks of adjoints run, measure what they say, and show every contender or the reason why not."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import seminode as sn
from benchmarks import adjoints, work_precision
from benchmarks.adjoints import Ours, Torchdiffeq, backsolve, compare, contenders, measure, reference_gradient
from benchmarks.problems import GradientProblem, cde_problem, exact_linear_outputs, flow_problem, linear_problem

TINY_CDE = partial(cde_problem, batch=2, knots=4, channels=3, hidden=4, width=4)
TINY = {
    "cde": TINY_CDE,
    "flow": partial(flow_problem, batch=4, width=4),
    "linear": partial(linear_problem, batch=1, size=3, stiffness=2.0),
}


@pytest.mark.parametrize("name", TINY)
def test_the_table_has_a_row_with_a_small_error_for_every_adjoint(name: str) -> None:
    problem = TINY[name]()
    everyone = contenders(problem)
    found, reasons = compare(problem, everyone, repeats=1)
    assert not reasons
    assert list(found) == [contender.name for contender in everyone]
    reference = reference_gradient(TINY[name](dtype=torch.float64))
    table = adjoints.report(found, reasons, reference)
    rows = table.splitlines()[2 : 2 + len(found)]
    assert len({len(row) for row in rows}) == 1
    for contender, row in zip(everyone, rows, strict=True):
        assert row.startswith(contender.name)
        # Jumps that a solver is not told of, and contraction for a reversible method, spoil a gradient.
        hard = "without jumps" in contender.name or "Reversible" in contender.name
        assert float(row.split()[-2]) < (0.3 if hard else 5e-2 if name == "cde" else 1e-3), row


def test_the_measured_error_is_that_of_the_gradient() -> None:
    problem = TINY["linear"]()
    parameters = list(problem.modules.parameters())
    exact = torch.autograd.grad(problem.loss(exact_linear_outputs(problem)), parameters)
    reference = reference_gradient(problem)
    assert len(reference) == sum(p.numel() for p in parameters) + problem.start().numel()
    torch.testing.assert_close(reference[:15], torch.cat([grad.flatten() for grad in exact]), rtol=1e-7, atol=0.0)
    found = measure(problem, Ours("Replay", sn.Replay()))
    assert 0.0 < found.error(reference) < 1e-5
    assert dataclasses.replace(found, gradient=2.0 * reference).error(reference) == pytest.approx(1.0)


def test_prices_are_in_evaluations() -> None:
    problem = TINY["flow"]()
    found = measure(problem, Ours("Replay", sn.Replay()))
    assert found.backward.nfe == found.backward.vjp_y == found.backward.vjp_params == 6 * found.forward.accepted
    assert found.cost == found.forward.nfe + 18 * found.forward.accepted
    peer = measure(problem, Torchdiffeq())
    assert peer.forward.nfe == found.forward.nfe
    assert peer.backward_cost == 3 * measure(problem, backsolve("mixed_per_tensor", "fresh")).backward.nfe
    assert not problem.field._forward_hooks


def test_who_cannot_is_named_with_the_reason() -> None:
    problem = TINY["linear"]()
    able, unable = Ours("Replay", sn.Replay()), Ours("Reversible, dopri5", sn.Reversible())
    found, reasons = compare(problem, [unable, able], repeats=2)
    assert list(found) == ["Replay"]
    assert list(reasons) == ["Reversible, dopri5"]
    last = adjoints.report(found, reasons, reference_gradient(problem)).splitlines()[-1]
    assert last.startswith("Reversible, dopri5: adjoint: Reversible needs a solver")
    assert "unknown without seminorm, mixed, mixed_per_tensor" in adjoints.ordering(found)


def test_the_order_of_the_norms_is_read_off_the_counts() -> None:
    one = measure(TINY["linear"](), Ours("Replay", sn.Replay()))

    def verdict(**nfe: int) -> str:
        stats = {norm: dataclasses.replace(one.backward, nfe=count) for norm, count in nfe.items()}
        return adjoints.ordering(
            {backsolve(norm, "fresh").name: dataclasses.replace(one, backward=each) for norm, each in stats.items()}
        )

    assert " holds (10, 20, 30)" in verdict(mixed_per_tensor=30, seminorm=10, mixed=20)
    assert " does not hold (10, 10, 30)" in verdict(mixed_per_tensor=30, seminorm=10, mixed=10)


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adjoints.PROBLEMS, "cde", (TINY_CDE, TINY_CDE))
    adjoints.main(["--small", "--repeats", "1"])
    text = capsys.readouterr().out
    assert text.startswith("cde, small:")
    assert "torchdiffeq, seminorm, without jumps" in text
    assert "Backsolve, seminorm, carry" in text
    assert "seminorm < mixed < mixed_per_tensor" in text.splitlines()[-1]


def test_the_picture_has_a_point_for_every_method_and_tolerance(tmp_path: Path) -> None:
    def tiny(dtype: torch.dtype) -> GradientProblem:
        return TINY["linear"](dtype=dtype)

    found = work_precision.points("tiny", work_precision.Column(tiny, (1e-3, 1e-5)), repeats=1)
    assert {(point.method, point.rtol) for point in found} >= {
        (method.name, rtol) for method in work_precision.METHODS[:-1] for rtol in (1e-3, 1e-5)
    }
    assert all(math.isfinite(point.error) and point.error > 0.0 for point in found)
    assert all(point.cost > 0 and point.seconds > 0.0 for point in found)
    for method in work_precision.METHODS[:-1]:
        coarse, fine = (point for point in found if point.method == method.name)
        assert fine.error < coarse.error
        assert fine.cost > coarse.cost
    out = tmp_path / "images" / "picture.png"
    work_precision.draw(found, out)
    assert 10_000 < out.stat().st_size < 300_000
