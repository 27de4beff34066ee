"""The benchmarks run and measure what they say, and show every contender or the reason why not."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import replace_back_end
from project import ROOT
from torch import Tensor

import seminode as sn
from benchmarks import adjoints, anatomy, compiled, merged, overhead, report, scaling, ways, work_precision
from benchmarks.adjoints import Ours, Torchdiffeq, backsolve, compare, measure, reference_gradient
from benchmarks.contenders import contenders
from benchmarks.mutation import SURVIVING, survivors
from benchmarks.problems import GradientProblem, cde_problem, exact_linear_outputs, flow_problem, linear_problem
from benchmarks.references import reference
from benchmarks.suite import ENTRIES, numbers, task_of
from benchmarks.tasks import arrays, digest, load
from benchmarks.tested import SECTIONS, results_text
from benchmarks.torch_runners import TorchRunner
from benchmarks.verdict import verdict_table, verdicts
from seminode.adjoints import BackwardNorm

RESULTS = Path(report.__file__).parent / "results"
TINY_CDE = partial(cde_problem, batch=2, knots=4, channels=3, hidden=4, width=4)
TINY = {
    "cde": TINY_CDE,
    "flow": partial(flow_problem, batch=4, width=4),
    "linear": partial(linear_problem, batch=1, size=3, stiffness=2.0),
}


@pytest.mark.parametrize("name", TINY)
def test_the_table_has_a_row_with_a_small_error_for_every_adjoint(name: str) -> None:
    problem = TINY[name]()
    everyone = adjoints.contenders(problem)
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

    def verdict(nfe: dict[BackwardNorm, int]) -> str:
        measured = {}
        for norm, count in nfe.items():
            backward = dataclasses.replace(one.backward, nfe=count)
            measured[backsolve(norm, "fresh").name] = dataclasses.replace(one, backward=backward)
        return adjoints.ordering(measured)

    assert " holds (10, 20, 30)" in verdict({"mixed_per_tensor": 30, "seminorm": 10, "mixed": 20})
    assert " does not hold (10, 10, 30)" in verdict({"mixed_per_tensor": 30, "seminorm": 10, "mixed": 10})


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


# The tasks and their references.


@pytest.mark.parametrize("name", ENTRIES)
def test_settings_have_names_of_their_own(name: str) -> None:
    names = [contender.name for contender in contenders(name)]
    assert len(set(names)) == len(names)
    complete = not name.startswith(("sampling", "reversible")) and not name.endswith(("forward", "1024"))
    assert ({"seminode: Direct", "torchdiffeq: adjoint"} <= set(names)) == complete
    assert {"seminode", "diffrax"} <= {each.split(":")[0] for each in names}
    assert any(each.startswith("torchcde: ") for each in names) == name.startswith("cde")
    short = [contender.name for contender in contenders(name, short=True)]
    assert set(short) <= set(names)
    assert {each.split(":")[0] for each in short} >= {each.split(":")[0] for each in names} - {"torchode"}


def test_a_task_is_its_numbers() -> None:
    task, found = numbers("small", quick=True)
    other = task_of("small", quick=True)
    with torch.no_grad():
        next(other.modules.parameters()).mul_(2.0)
    assert digest(other) != digest(task)
    assert digest(load(other, found)) == digest(task)
    assert list(arrays(task)) == list(found)


@pytest.mark.parametrize("name", ["cde", "pendulum", "flow"])
def test_gradients_of_the_libraries_agree_with_the_reference(name: str, tmp_path: Path) -> None:
    task, found = numbers(name, quick=True)
    good = reference(name, task, found, quick=True, folder=tmp_path)
    assert 0.0 < good.good_to < 1e-3
    again = reference(name, task, {}, quick=True, folder=tmp_path)  # it is kept: nothing is computed
    np.testing.assert_array_equal(again.gradient, good.gradient)
    wanted = {"seminode: Replay", "torchdiffeq: adjoint, seminorm", "torchcde: direct"}
    for contender in contenders(name):
        if contender.name in wanted:
            runner = TorchRunner(load(task_of(name, quick=True), found), contender)
            assert runner.run()["seconds"] > 0.0
            assert good.error(runner.gradient()) < 2e-2, contender.name


# What is made of the results.


def row(name: str, minimum: float, error: float, compiled: bool = False) -> dict[str, Any]:
    library, setting = name.split(": ")
    rounds = [{"seconds": minimum, "forward": 0.4 * minimum, "backward": 0.6 * minimum}]
    timing = {"minimum": minimum, "median": 1.1 * minimum, "first": 3.0, "rounds": rounds}
    about = {"name": name, "library": library, "setting": setting, "compiled": compiled}
    return {**about, **timing, "error": error, "versions": {library: "1.0"}}


def result(problem: str = "small", **extra: Any) -> dict[str, Any]:
    rows = [
        row("seminode: Direct", 0.2, 1e-4),
        row("seminode: fast and bad, compiled", 0.01, 1e-1, compiled=True),
        row("seminode: Direct, compiled", 0.05, 1.04e-4, compiled=True),
        row("torchdiffeq: adjoint", 1.0, 5e-4),
        row("torchdiffeq: direct", 0.3, 1e-4),
        row("diffrax: Direct", 0.04, 2e-4, compiled=True),
        {"name": "torchode: x", "library": "torchode", "setting": "x", "compiled": False, "failed": "RuntimeError: no"},
    ]
    about = {"problem": problem, "title": f"Problem {problem}", "rtol": 1e-3, "atol": 1e-6, "parameters": 1348}
    where = {"date": "2026-01-01T00:00:00", "machine": {"processor": "A CPU"}, "threads": 1}
    return {**about, **where, "reference": {"how": "float64", "good_to": 1e-7}, "rows": rows, **extra}


def test_only_settings_as_accurate_are_compared() -> None:
    found = {each.against: each for each in verdicts(result())}
    adjoint = found["torchdiffeq's adjoint"]
    assert adjoint.ours is not None
    assert adjoint.ours.name == "seminode: Direct, compiled"  # not the one that is fast and bad
    assert adjoint.ratio == pytest.approx(20.0)
    assert adjoint.says == "met"
    assert found["torchdiffeq's best"].ratio == pytest.approx(6.0)  # 4 % worse is as good
    assert found["diffrax's best"].ratio == pytest.approx(0.8)
    assert found["diffrax's best"].says == "missed"
    eager = found["torchdiffeq's odeint, seminode eager"]
    assert eager.ratio == pytest.approx(1.5)
    assert eager.says == "met"
    assert "torchode's best" not in found


def test_nobody_as_accurate_is_a_miss() -> None:
    rows = [*result()["rows"], row("diffrax: exact", 0.001, 1e-9, compiled=True)]
    found = {each.against: each for each in verdicts(result(rows=rows))}
    assert found["diffrax's best"].ratio is None
    assert found["diffrax's best"].says == "missed: no setting as accurate"
    assert "missed: no setting as accurate" in verdict_table(result(rows=rows))
    alone = {each.against: each for each in verdicts(result(rows=rows[:3]))}
    assert alone["diffrax's best"].says == "no such peer ran"


def test_the_page_and_its_picture_come_from_the_results(tmp_path: Path) -> None:
    folder, page, picture = tmp_path / "results", tmp_path / "page.md", tmp_path / "images" / "picture.png"
    folder.mkdir()
    for name in ("cde", "small", "flow"):
        (folder / f"{name}.json").write_text(json.dumps(result(name)))
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- bench -->\nold\n<!-- /bench -->\nz\n")
    tested = tmp_path / "tested.md"
    tested.write_text(f"a\n{report.BEGIN}\nold\n{report.END}\nz\n")
    (folder / "versions.json").write_text((RESULTS / "versions.json").read_text())
    arguments = ["--results", str(folder), "--page", str(page), "--picture", str(picture), "--readme", str(readme)]
    arguments += ["--tested", str(tested)]
    report.main(arguments)
    assert "## Versions" in tested.read_text()
    assert "old" not in tested.read_text()
    assert "## Mutants" not in tested.read_text()  # for which there are no results here
    once = page.read_text()
    report.main(arguments)
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert once.index("### Problem small") < once.index("### Problem cde")  # the order of the suite
    assert "RuntimeError: no" in once
    assert "20.00 (10: met)" in once
    assert "50 ms" in once
    assert 10_000 < picture.stat().st_size < 500_000
    assert "300 ms / 50.0 ms = 6.00×" in readme.read_text()
    assert readme.read_text().startswith("a\n<!-- bench -->\n")
    assert readme.read_text().endswith("<!-- /bench -->\nz\n")


def test_ratios_of_the_readme_follow_from_the_times_beside_them() -> None:
    """With the saved results too: each cell holds the pair of times that was compared."""
    saved = report.load(Path(report.__file__).parent / "results")
    assert saved
    odd = result(rows=[row("seminode: x", 11.875234, 1e-3), row("torchdiffeq: adjoint", 51.725673, 1e-3)])
    for results in ([result()], [odd], saved):
        text = report.short_text(results)
        cells = re.findall(r"([\d.]+) (m?s) / ([\d.]+) (m?s) = ([\d.]+)×", text)
        assert len(cells) == text.count("×") > 0
        for theirs, unit, ours, other, ratio in cells:
            assert unit == other
            assert f"{float(theirs) / float(ours):.2f}" == ratio
    assert "51.726 s / 11.875 s = 4.36×" in report.short_text([odd])
    assert "| – |" in " ".join(report.short_text([odd]).split())  # diffrax did not run


def test_the_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    block = text.partition(report.MARKS[0])[2].partition(report.MARKS[1])[0]
    assert block.strip() == report.short_text(report.load(Path(report.__file__).parent / "results"))


def test_the_page_of_what_is_tested_is_up_to_date() -> None:
    found = report.named(RESULTS, SECTIONS)
    assert list(found) == list(SECTIONS)
    text = (ROOT / report.TESTED).read_text()
    block = text.partition(report.BEGIN)[2].partition(report.END)[0]
    assert block.strip() == results_text(found)


def test_what_is_claimed_was_kept() -> None:
    """No stored result that docs/tested.md shows is a failure."""
    found = report.named(RESULTS, SECTIONS)
    assert not any(row["failed"] for row in found["versions"])
    assert all(row["passed"] > 2000 for row in found["versions"])
    assert set(found["distributed"]["processes"]) == {"2", "4"}
    assert not any("FAILED" in cells.values() for cells in found["distributed"]["processes"].values())
    files = found["fuzzing"]["damaged"] + found["fuzzing"]["expanding"]
    assert all("error" not in each and each["peak_megabytes"] < 1000 for each in files)
    assert all(each["examples"] >= 5000 for each in found["fuzzing"]["damaged"])
    assert all(line["good"] for line in found["soak"]["lines"])
    reasons = json.loads(SURVIVING.read_text())
    assert all(row["name"] in reasons for row in survivors(found["mutation"]))
    mutants = found["mutation"]["score"]["all"]
    tried = mutants["killed"] + mutants["survived"]
    assert tried >= 100
    assert mutants["killed"] >= 0.9 * tried


def test_overhead_and_scaling_have_their_sections() -> None:
    halves = {f"{way}_{what}": 2.0 for way in ("forward", "backward") for what in ("seconds", "alone", "evaluations")}
    kinds = {kind: {name: [3.0] for name in ("seminode", "torchdiffeq", "field")} for kind in overhead.FIELDS}
    size = {"steps": 100, "adjoint": "Replay", "compiled": True, "seconds": 0.5, "mb": 7.0}
    others = {
        "overhead": {**kinds, "evaluations": {"cde": {"Direct": halves}}},
        "scaling": {"along": {"steps": [size]}},
    }
    page = report.text([], others)
    assert "Trivial field" in page
    assert "1.00" in page  # 2 s over 2 s
    assert "0.500 s, 7 MB" in page


def test_without_results_the_page_says_so() -> None:
    assert report.text([]) == "No results yet."
    page = ROOT / "docs" / "benchmarks.md"
    assert report.BEGIN in page.read_text()
    assert report.END in page.read_text()


def test_time_is_linear_if_a_step_more_costs_the_same() -> None:
    sizes = [{"steps": n, "seconds": 0.5 + 0.001 * n} for n in (100, 1000, 10000)]
    assert scaling.growth(sizes) == pytest.approx(1.0)
    assert scaling.linear(1.0) == "1.00 (linear)"
    sizes[-1]["seconds"] *= 1.5
    assert scaling.linear(scaling.growth(sizes)).endswith("(not linear)")
    assert scaling.growth([*sizes[:2], {"failed": "no"}]) is None


@pytest.fixture
def no_back_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run as they were traced."""
    replace_back_end(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_back_end")
def test_a_pass_is_taken_apart() -> None:
    parts = anatomy.anatomy("small", "Direct, compiled", repeats=1, quick=True)
    assert parts.calls >= 3  # the first slope, the probe, and a step each way
    assert 0.0 < parts.products < parts.whole
    assert 0.0 < parts.programs < parts.whole


def test_products_are_timed_in_a_program_that_consists_of_them() -> None:
    x, w = torch.randn(6, 4), torch.randn(5, 4)
    images, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)

    def function(x: Tensor, w: Tensor, images: Tensor, kernel: Tensor) -> list[Tensor]:
        outputs = torch.tanh(x @ w.T)
        images = torch.nn.functional.conv2d(images, kernel, padding=1)
        options = [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        grads = torch.ops.aten.convolution_backward(torch.relu(images), torch.ones(2, 3, 8, 8), kernel, *options)
        return [outputs @ w, grads[1]]

    given = [x, w, images, kernel]
    recorder = anatomy.ProductRecorder(anatomy.inductor.traced(function, given, rewritten=False))
    recorder.run(*given)
    compiled_alone: list[Any] = []

    def compile(module: Any, examples: list[Any]) -> Any:
        compiled_alone.append(module)
        assert (examples[1].shape, examples[1].stride()) == ((4, 5), (1, 4))  # wᵀ in its layout
        return lambda inputs: module(*inputs)

    program = anatomy.Program(recorder.products, lambda inputs: None, compile)
    assert program.product_seconds(repeats=2) > 0.0
    (alone,) = compiled_alone
    ops = [n.target for n in alone.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    aten = torch.ops.aten
    expected = [aten.mm, aten.convolution, aten.convolution_backward, aten.mm]
    assert sorted(map(str, ops)) == sorted(str(op.default) for op in expected)
    assert anatomy.Program([], lambda inputs: None, compile).product_seconds() == 0.0


@pytest.mark.usefixtures("no_back_end")
def test_eager_and_compiled_passes_agree() -> None:
    passes = compiled.compare("small", ["Replay", "Reversible"], repeats=1, quick=True)
    for line, by_mode in zip(compiled.rows("small", passes), passes.values(), strict=True):
        assert len(line) == len(compiled.HEADER)
        eager, run = by_mode["eager"], by_mode["compiled"]
        assert 0 < run.cost <= eager.cost
        assert 0.0 < run.seconds < float("inf")
        assert compiled.difference(eager.gradient, run.gradient) < 1e-5
        assert 0.0 < run.backward < run.seconds
        assert 0 < run.backward_cost < run.cost


@pytest.mark.usefixtures("no_back_end")
def test_passes_over_longer_times_cost_more() -> None:
    short, long = (
        compiled.compare("small", ["Interpolating"], repeats=1, quick=True, longer=longer)["Interpolating"]
        for longer in (1.0, 20.0)
    )
    assert long["compiled"].cost > 2 * short["compiled"].cost


@pytest.mark.usefixtures("no_back_end")
def test_ways_to_compile_a_step_agree() -> None:
    given = ways.setting()
    expected = ways.eager(given)
    with torch.no_grad():
        for way in (ways.programs(given), ways.saving(given)):
            torch.testing.assert_close(way.step()[0], expected.step()[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(way.vjp()[0], expected.vjp()[0], rtol=1e-4, atol=1e-5)


def test_scaling_measures_every_adjoint(capsys: pytest.CaptureFixture[str]) -> None:
    found = scaling.run(["batch"], ["Direct", "Replay"], repeats=1, quick=True)
    assert [each["adjoint"] for each in found["batch"]] == ["Direct", "Direct", "Replay", "Replay"]
    assert all(each["seconds"] > 0.0 for each in found["batch"])
    assert "Replay" in capsys.readouterr().out


def test_merged_programs_agree_with_those_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    rows = merged.measure(1, quick=True)
    assert [row[0].partition(" ")[2] for row in rows] == [
        "slope and first step",
        "steps, two by two",
        "VJPs, two by two",
    ]
