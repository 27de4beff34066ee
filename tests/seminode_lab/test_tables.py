"""Tables out of run folders: numbers computed here from the files once more, and folders that are not whole."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import lab_runs
import pytest

from seminode_lab import published, settings, store, tables
from seminode_lab.grid import Column, Table
from seminode_lab.schedule import Schedule
from seminode_lab.settings import Settings

SAVING = [(group, "seminorm") for group in ("as published", "published-compatible", "correct")] + [("best", "best")]
GROUPS = ("as published", "published-compatible", "correct", "best")
NCDE, CNF, HNN = "ncde-speech_commands-0.001", "cnf-mnist-32", "hnn-pendulum"


def read(folder: Path) -> list[store.Finished]:
    def refuse(error: store.StoreError) -> None:
        raise error

    return store.runs(folder, refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab_runs.write_all(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[store.Finished]:
    return read(folder)


def cell(table: Table, heading: str, label: str, group: str, name: str) -> str:
    """By its names; the first heading that begins so."""
    below = next(i for i, row in enumerate(table.rows) if len(row) == 1 and row[0].startswith(heading))
    row = next(row for row in table.rows[below + 1 :] if row[0] == label)
    return row[[column[:2] for column in table.columns].index((name, group))]


def test_there_is_a_table_for_each_experiment_and_one_of_steps(runs: list[store.Finished]) -> None:
    found = tables.all_tables(runs)
    assert [table.name for table in found] == ["ncde", "cnf", "hnn", "rejections"]
    for table in found:
        assert {column.group for column in table.columns} == {"", *GROUPS}
    assert [row for row in found[0].rows if len(row) == 1] == [
        ("Speech Commands, rtol 0.001, atol 1e-06",),
        ("Speech Commands, rtol 0.0001, atol 1e-07",),
        ("Speech Commands, rtol 1e-05, atol 1e-08",),
    ]


def test_evaluations_are_counted_as_published_and_in_truth(runs: list[store.Finished]) -> None:
    table = tables.ncde(runs)
    nfe = {mode: lab_runs.NFE["ncde"][mode] for mode in ("mixed", "seminorm", "best")}
    passes, steps = 10 * 3 * lab_runs.BATCHES["train"], 21 * lab_runs.BATCHES["train"]
    expected = {
        ("as published", "mixed"): "14.36 ± 1.09 M",
        ("as published", "seminorm"): "8.67 ± 1.60 M",
        ("published-compatible", "mixed"): f"{passes * nfe['mixed'] / 1e3:.2f} ± 0.00 k",
        ("published-compatible", "seminorm"): f"{passes * nfe['seminorm'] / 1e3:.2f} ± 0.00 k",
        ("correct", "mixed"): f"{steps * nfe['mixed'] / 1e3:.2f} ± 0.00 k",
        ("correct", "seminorm"): f"{steps * nfe['seminorm'] / 1e3:.2f} ± 0.00 k",
        ("best", "best"): f"{steps * nfe['best'] / 1e3:.2f} ± 0.00 k",
    }
    found = {key: cell(table, "Speech Commands, rtol 0.001", "backward NFE in training", *key) for key in expected}
    assert found == expected
    assert "10 × the 3 passes at every 10th epoch and the last: 30 epochs instead of 21" in table.notes[1]


def test_savings_and_speed_ups_are_against_the_mixed_norm_of_the_same_count(runs: list[store.Finished]) -> None:
    table, where = tables.ncde(runs), "Speech Commands, rtol 0.0001"
    saved = [cell(table, where, "saved compared with mixed (%)", *key) for key in SAVING]
    assert saved == [
        "58.4",
        f"{100 * (1 - 1200 / 2300):.1f}",
        f"{100 * (1 - 1200 / 2300):.1f}",
        f"{100 * (1 - 1120 / 2300):.1f}",
    ]
    assert cell(table, where, "speed-up over mixed", "best", "best") == f"{2300 / 1120:.2f}"
    assert cell(table, where, "saved compared with mixed (%)", "correct", "mixed") == ""
    assert cell(table, where, "seconds in training", "correct", "mixed") == f"{2300 * 84 * 1e-3:.0f} ± 0"


def test_savings_have_a_line_a_row_and_what_they_are_in_time(runs: list[store.Finished]) -> None:
    line = next(row for row in tables.savings(runs).rows if "rtol 0.0001" in row[0])
    assert line[1] == "58.4 %"
    assert line[4:] == (f"{100 * (1 - 1120 / 2300):.1f} %", f"{2300 / 1120:.2f}")


def test_memory_that_nobody_measured_has_no_line(runs: list[store.Finished]) -> None:
    bare = [replace(run, result={**run.result, "peak_memory": None}) for run in runs if run.result is not None]
    assert "peak memory (MB)" in [row[0] for row in tables.hnn(runs).rows]
    assert "peak memory (MB)" not in [row[0] for row in tables.hnn(bare).rows]


def test_accuracy_is_the_mean_over_seeds_with_its_sample_deviation(folder: Path, runs: list[store.Finished]) -> None:
    values = [
        100 * json.loads((folder / f"{NCDE}-mixed-{seed}" / "result.json").read_text())["test"]["accuracy"]
        for seed in (0, 1)
    ]
    expected = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
    table = tables.ncde(runs)
    assert cell(table, "Speech Commands, rtol 0.001", "test accuracy (%)", "correct", "mixed") == expected
    assert cell(table, "Speech Commands, rtol 0.001", "runs", "correct", "mixed") == "2"
    assert cell(table, "Speech Commands, rtol 0.001", "runs", "as published", "mixed") == "5"


def test_the_pendulum_has_the_published_slice_among_the_compatible(runs: list[store.Finished]) -> None:
    table = tables.hnn(runs)
    keys = [(group, norm) for group in GROUPS[:3] for norm in ("mixed", "seminorm")] + [("best", "best")]
    found = [cell(table, "double pendulum", "backward NFE per batch", *key) for key in keys]
    assert found == ["98.0 ± 0.0", "56.0 ± 0.0", "98 ± 0", "56 ± 0", "98 ± 0", "98 ± 0", "28 ± 0"]
    assert cell(table, "double pendulum", "saved compared with mixed (%)", "published-compatible", "seminorm") == "42.9"
    assert cell(table, "double pendulum", "saved compared with mixed (%)", "correct", "seminorm") == "0.0"


def test_steps_are_those_of_the_counter_and_the_true_ones(folder: Path, runs: list[store.Finished]) -> None:
    table, heading = tables.rejections(runs), "Symplectic ODE-Net: double pendulum"
    test = json.loads((folder / f"{HNN}-published-0" / "result.json").read_text())["test"]
    key = ("published-compatible", "seminorm")
    assert cell(table, heading, "accepted steps", *key) == f"{test['published_accepted']} ± 0"
    share = 100 * test["published_rejected"] / (test["published_rejected"] + test["published_accepted"])
    assert cell(table, heading, "rejected (%)", *key) == f"{share:.2f}"
    assert cell(table, heading, "rejected (%)", "as published", "mixed") == "37.93"
    true = json.loads((folder / f"{HNN}-mixed-0" / "result.json").read_text())["test"]
    assert cell(table, heading, "rejected steps", "correct", "mixed") == f"{true['backward_rejected']} ± 0"


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    table = tables.hnn(read(lab_runs.write_all(tmp_path, seeds=(3,))))
    assert cell(table, "double pendulum", "backward NFE per batch", "correct", "mixed") == "98"


def test_a_schedule_of_its_own_is_counted_by_its_own(tmp_path: Path) -> None:
    row = lab_runs.rows()[-1]
    lab_runs.write(row.changed(schedule=Schedule(epochs=21, lr=1e-3, every=5)), tmp_path)
    table = tables.hnn(read(tmp_path))
    found = cell(table, "double pendulum", "backward NFE in training", "published-compatible", "mixed")
    assert found == f"{5 * 3 * 4 * 98:,}"
    assert "5 × the 3 passes at every 5th epoch" in table.notes[1]


def test_flows_that_make_no_passes_over_the_training_set_are_counted_by_their_steps(tmp_path: Path) -> None:
    row = Settings("cnf", "made-up", "digits", "mixed", 1e-5, 1e-5, 256, lab_runs.SCHEDULE)
    path = lab_runs.write(row, tmp_path)
    for name in (store.METRICS, store.RESULT):
        found = json.loads((path / name).read_text())
        for each in found if isinstance(found, list) else [found]:
            del each["train"]
        (path / name).write_text(json.dumps(found))
    table = tables.cnf(read(tmp_path))
    nfe, batches = 21 * 4 * 1770, 1437 // 256 + 1
    for group in ("published-compatible", "correct"):
        assert cell(table, "digits", "backward NFE in training", group, "mixed") == f"{nfe / 1e3:.2f} k"
        assert cell(table, "digits", "backward NFE per batch", group, "mixed") == f"{nfe / (21 * batches):,.0f}"
    assert "extrapolated" not in " ".join(table.notes)


def test_solves_that_drifted_are_told_where_there_are_some(tmp_path: Path, runs: list[store.Finished]) -> None:
    assert "drifted backward solves" not in tables.hnn(runs).text()
    path = lab_runs.write(lab_runs.rows()[-1], tmp_path) / store.RESULT
    found = json.loads(path.read_text())
    found["totals"]["drifted"] = 7
    path.write_text(json.dumps(found))
    assert cell(tables.hnn(read(tmp_path)), "double pendulum", "drifted backward solves", "correct", "mixed") == "7"


def test_incomplete_runs_are_left_out_and_named(tmp_path: Path) -> None:
    row = lab_runs.rows()[-1]
    lab_runs.write(row, tmp_path)
    lab_runs.write(row.changed(seed=1), tmp_path, complete=False)
    lab_runs.write(lab_runs.rows()[0], tmp_path, complete=False)
    found = tables.all_tables(read(tmp_path))
    assert [table.name for table in found] == ["hnn", "rejections"]
    assert cell(found[0], "double pendulum", "runs", "correct", "mixed") == "1"
    assert "Left out: hnn-pendulum-mixed-1 (not complete)." in found[0].notes
    assert f"{NCDE}-mixed-0 (not complete)" in " ".join(found[1].notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("totals", {}), ("test", {"samples": 3}), ("seconds", None), ("train", {"samples": "many"}), ("epochs", 0)],
)
def test_a_result_without_its_numbers_is_left_out_and_named(tmp_path: Path, key: str, value: object) -> None:
    row = lab_runs.rows()[-1]
    lab_runs.write(row.changed(seed=1), tmp_path)
    path = lab_runs.write(row, tmp_path) / store.RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    found = tables.all_tables(read(tmp_path))[0]
    assert cell(found, "double pendulum", "runs", "correct", "mixed") == "1"
    assert any(note.startswith("Left out: hnn-pendulum-mixed-0 (damaged") for note in found.notes)


def test_a_run_with_another_adjoint_is_not_taken_for_its_mode(tmp_path: Path) -> None:
    row = lab_runs.rows()[-1]
    lab_runs.write(row.changed(seed=1), tmp_path)
    path = lab_runs.write(row, tmp_path) / store.CONFIG
    config = json.loads(path.read_text())
    config["settings"]["adjoint"] = "Quadrature"
    path.write_text(json.dumps(config))
    notes = " ".join(tables.hnn(read(tmp_path)).notes)
    assert "hnn-pendulum-mixed-0" in notes


def test_runs_of_a_row_that_differ_in_more_than_mode_and_seed_are_told(tmp_path: Path) -> None:
    row = lab_runs.rows()[-1]
    lab_runs.write(row, tmp_path)
    lab_runs.write(row.changed(mode="best", batch=128), tmp_path)
    assert "Runs of hnn-pendulum differ in more than mode and seed: batch." in tables.hnn(read(tmp_path)).notes


def test_without_complete_runs_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: expected a complete one, found none at all"):
        tables.all_tables([])
    lab_runs.write(lab_runs.rows()[0], tmp_path, complete=False)
    with pytest.raises(ValueError, match=r"found ncde-speech_commands-0.001-mixed-0 \(not complete\)"):
        tables.all_tables(read(tmp_path))


# What differs from the paper.


def test_the_paper_itself_has_no_reductions_but_those_of_seeds(tmp_path: Path) -> None:
    for row in settings.rows("paper"):
        lab_runs.write(row, tmp_path)
    found = tables.reductions(read(tmp_path))
    assert found == [
        "Differs from the published neural CDE: 1 seed instead of 5.",
        "Differs from the published flows: 1 seed instead of 3.",
        "Differs from the published pendulum: 1 seed instead of 5.",
    ]


def test_what_a_preset_reduces_is_said(tmp_path: Path) -> None:
    cde, flow, pendulum = (row for row in settings.rows("paper") if row.row in (NCDE, CNF, HNN))
    brief = Schedule(epochs=8, lr=1e-2, every=4)
    small = (("hidden", 24), ("width", 24))
    lab_runs.write(cde.changed(data="japanese_vowels", batch=108, schedule=brief, model=small), tmp_path)
    lab_runs.write(flow.changed(data="digits", model=(("hidden", 16),), rtol=1e-3), tmp_path)
    lab_runs.write(pendulum.changed(sizes=(512, 256, 256), fitted=800), tmp_path)
    assert tables.reductions(read(tmp_path)) == [
        "Differs from the published neural CDE: data japanese_vowels instead of speech_commands; hidden 24 instead of "
        "the published value; width 24 instead of the published value; batches of 108 instead of 1,024; epochs 8 "
        "instead of 200; learning rate 0.01 instead of 0.0016; epochs between evaluations 4 instead of 10; 1 seed "
        "instead of 5.",
        "Rows of the paper that were not run: ncde-speech_commands-0.0001, ncde-speech_commands-1e-05.",
        "Differs from the published flows: data digits instead of mnist; hidden 16 instead of 32; rtol 0.001 instead "
        "of 1e-05; 1 seed instead of 3.",
        "Rows of the paper that were not run: cnf-cifar10-64, cnf-mnist-64, cnf-mnist-128.",
        "Differs from the published pendulum: 512 / 256 / 256 samples for training / validation / test instead of all; "
        "800 iterations of regression on true accelerations before training through the solver; 1 seed instead of 5.",
    ]


# The published numbers.


def test_every_row_of_the_paper_preset_has_its_published_numbers() -> None:
    assert [row.row for row in settings.rows("paper")] == [row.name for row in published.ROWS]
    assert all(row.experiment == row.name.split("-")[0] for row in published.ROWS)


def test_published_savings_are_the_printed_ones() -> None:
    found = [round(row.saving, 1) for row in published.ROWS]
    assert found == [39.6, 58.4, 62.3, 6.5, 10.8, 14.4, 13.9, 42.8]
    assert round(published.median_saving(), 1) == 27.0


def test_published_counts_of_the_pendulum_are_whole_batches() -> None:
    row = published.ROWS[-1]
    assert abs(row.mixed.nfe.mean - 98 * 79 * 6 * 10) < 50
    assert abs(row.seminorm.nfe.mean - 56 * 79 * 6 * 10) < 100
    assert round(row.mixed.nfe.mean / row.updates) == 98
    assert round(row.seminorm.nfe.mean / row.updates) == 56


def test_printed_proportions_are_those_of_their_steps_but_for_one() -> None:
    wrong = [
        row.name
        for row in published.ROWS
        for norm in (row.mixed, row.seminorm)
        if abs(100 * norm.rejected.mean / (norm.rejected.mean + norm.accepted.mean) - norm.proportion) > 0.6
    ]
    assert wrong == ["cnf-mnist-64"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"experiment": "cnf", "data": "mnist", "model": (("hidden", 8),)}, "cnf-mnist-32"),
        ({"experiment": "cnf", "data": "mnist", "model": (("hidden", 100),)}, "cnf-mnist-128"),
        ({"experiment": "cnf", "data": "cifar10", "model": (("hidden", 16),)}, "cnf-cifar10-64"),
        ({"experiment": "cnf", "data": "digits", "model": ()}, "cnf-mnist-64"),
        ({"experiment": "ncde", "data": "japanese_vowels", "rtol": 1e-4}, "ncde-speech_commands-0.0001"),
        ({"experiment": "ncde", "data": "japanese_vowels", "rtol": 1e-2}, None),
        ({"experiment": "hnn", "data": "pendulum"}, "hnn-pendulum"),
    ],
)
def test_reduced_runs_are_set_beside_the_nearest_row(changes: dict, expected: str | None) -> None:
    own = Settings(**({"preset": "x", "mode": "mixed", "rtol": 1e-5, "atol": 1e-8, "batch": 4,
                       "schedule": lab_runs.SCHEDULE} | changes))  # fmt: skip
    found = published.beside(own)
    assert (found and found.name) == expected


# Rendering.


TABLE = Table(
    "small",
    "A <small> one",
    (Column(""), Column("a", "group"), Column("b", "group"), Column("c", "c")),
    (("first | half",), ("x", "1 ± 2", "", "3")),
    ("A & note.",),
)


def test_a_table_is_text_for_a_terminal() -> None:
    assert TABLE.text().splitlines() == [
        "A <small> one",
        "",
        "   group   c",
        "     a  b  c",
        "-  ---  -  -",
        "",
        "first | half",
        "x  1±2     3",
        "",
        "- A & note.",
    ]


def test_a_table_is_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "**A &lt;small&gt; one**",
        "",
        "|  | group: a | group: b | c |",
        "| --- | ---: | ---: | ---: |",
        "| **first \\| half** |  |  |  |",
        "| x | 1 ± 2 |  | 3 |",
        "",
        "- A &amp; note.",
    ]


def test_a_table_is_html_in_a_box_of_its_own_and_escaped() -> None:
    text = TABLE.html()
    assert '<div class="scroll"' in text
    assert "A &lt;small&gt; one" in text
    assert "<small>" not in text
    assert '<th scope="colgroup" colspan="2">group</th>' in text
    assert '<th scope="rowgroup" colspan="4">' in text
    assert '<td>1 <span class="sd">± 2</span></td><td></td><td>3</td>' in text
    assert "<li>A &amp; note.</li>" in text


def test_narrow_screens_leave_out_minor_columns() -> None:
    columns = (Column(""), Column("a", "x", minor=True), Column("b", "x", minor=True), Column("c", "y"))
    text = Table("t", "T", columns, (("row", "1", "2", "3"),)).html()
    assert '<th scope="colgroup" colspan="2" class="minor">x</th>' in text
    assert '<th scope="colgroup" colspan="1">y</th>' in text
    assert '<td class="minor">1</td><td class="minor">2</td><td>3</td>' in text


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: expected 1 or 2 cells, found 3"):
        Table("x", "x", (Column("a"), Column("b")), (("1", "2", "3"),))
