"""Figures: what they show, not only that they are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lab_runs
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from seminode_lab import figures, store
from seminode_lab.figures import control, costs, curves, histograms, precision, ratio, style
from seminode_lab.figures.selection import ByMode, by_row, of_experiment
from seminode_lab.figures.swing import Swing
from seminode_lab.settings import rows
from seminode_lab.store import Finished, Run

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = lab_runs.write_all(tmp_path_factory.mktemp("runs"), SEEDS)
    steps = {"mixed": 2, "seminorm": 2, "published": 1, "best": 1}
    for run in of_experiment(load(out), "hnn"):
        times = lab_runs.pendulum_times(lab_runs.BATCHES["train"], steps[run.settings["mode"]])
        with Run(run.path, run.config) as opened:
            for epoch in lab_runs.EPOCHS:
                opened.keep(store.times_name(epoch), times)
    store.write_json(out / "precision-hnn.json", lab_runs.precision("hnn"))
    return out


def load(folder: Path) -> list[Finished]:
    def never(error: store.StoreError) -> None:
        raise error

    return store.runs(folder, never)


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Finished]:
    return load(folder)


def medium(runs: Sequence[Finished]) -> ByMode:
    return by_row([run for run in runs if run.settings["rtol"] == curves.MEDIUM])["ncde-speech_commands-0.0001"]


def hnn(runs: Sequence[Finished]) -> ByMode:
    return by_row(of_experiment(runs, "hnn"))["hnn-pendulum"]


def accuracies(runs: Sequence[Finished]) -> np.ndarray:
    return np.array([[each["validation"]["accuracy"] for each in run.metrics] for run in runs])


def inches(figure: style.Picture) -> list[float]:
    return figure.figure.get_size_inches().tolist()


def test_the_lowest_run_of_every_epoch_is_dropped_in_the_published_accuracy_only(runs: list[Finished]) -> None:
    modes = medium(runs)
    published, correct = (curves.accuracy_picture(modes, which, "f") for which in (True, False))
    for mode, colour in (("mixed", "tab:red"), ("seminorm", "tab:blue")):
        values = accuracies(modes[mode])
        kept = np.sort(values, 0)[1:]
        lines = [next(x for x in f.figure.axes[0].lines if x.get_color() == colour) for f in (published, correct)]
        np.testing.assert_allclose(lines[0].get_ydata(), kept.mean(0))
        np.testing.assert_allclose(lines[1].get_ydata(), values.mean(0))
        assert (kept.mean(0) > values.mean(0)).all()
    assert [len(f.figure.axes[0].lines) for f in (published, correct)] == [2, 3]
    assert "lowest run is dropped" in published.caption
    assert "No run is dropped" in correct.caption
    assert inches(published) == inches(correct) == [7.0, 2.0]
    assert correct.figure.axes[0].get_ylim() == (0.0, 1.0)


def test_the_band_is_one_sample_deviation_to_either_side(runs: list[Finished]) -> None:
    group = medium(runs)["mixed"]
    found = curves.curve(group, curves.accuracy)
    np.testing.assert_allclose(found.sd, accuracies(group).std(0, ddof=1))
    band = curves.accuracy_picture({"mixed": group}, False, "f").figure.axes[0].collections[0]
    low = band.get_paths()[0].vertices[:, 1].min()
    assert low == pytest.approx((found.mean - found.sd).min())
    assert band.get_alpha() == 0.5


def test_the_last_evaluation_stands_at_the_number_of_epochs(runs: list[Finished]) -> None:
    found = curves.curve(medium(runs)["mixed"], curves.accuracy)
    assert found.epochs.tolist() == [0, 10, 21]


def test_a_single_run_has_no_band_and_no_published_accuracy(runs: list[Finished]) -> None:
    single = [run for run in runs if run.settings["seed"] == 0]
    names = [picture.name for picture in curves.pictures(single)]
    assert "f1a-accuracy" in names
    assert "f1a-accuracy-published" not in names
    assert np.isnan(curves.curve(medium(single)["mixed"], curves.accuracy).sd).all()


def test_backward_evaluations_are_those_of_the_validation_set_by_tolerance(runs: list[Finished]) -> None:
    one = [run for run in runs if run.settings["rtol"] == 1e-4]
    single, several = (
        next(picture for picture in curves.pictures(part) if picture.name == "f1b-nfe") for part in (one, runs)
    )
    for axes in (single.figure.axes[0], several.figure.axes[1]):
        ends = {line.get_label(): line.get_ydata()[-1] for line in axes.lines}
        assert ends == {"mixed norm": 2300, "seminorm": 1200, "seminode's best": 1120}
    assert "rtol 0.0001" in single.caption
    assert "48 % fewer" in single.caption
    assert several.caption.endswith("48 % fewer, 48 % fewer, 48 % fewer.")
    titles = [axes.get_title("left") for axes in several.figure.axes]
    assert titles == ["rtol 0.001, atol 1e-06", "rtol 0.0001, atol 1e-07", "rtol 1e-05, atol 1e-08"]


def test_runs_on_several_data_sets_get_figures_of_their_own(folder: Path, tmp_path: Path) -> None:
    for data in ("speech_commands", "japanese_vowels"):
        lab_runs.write(lab_runs.rows()[0].changed(data=data), tmp_path)
    names = {picture.name for picture in curves.pictures(load(tmp_path))}
    assert {"f1a-accuracy-speech_commands", "f1a-accuracy-japanese_vowels"} <= names


def test_the_bar_at_the_start_of_the_way_back_counts_every_batch_once(runs: list[Finished]) -> None:
    import matplotlib.colors

    every_batch = lab_runs.BATCHES["train"] * len(lab_runs.EPOCHS) * len(SEEDS)
    picture = histograms.evaluations_picture(hnn(runs), published=True)
    assert picture is not None
    bars = picture.figure.axes[0].patches
    assert len(bars) == 2 * histograms.BINS
    for last, colour in ((bars[199], "tab:red"), (bars[399], "tab:blue")):
        assert last.get_x() + last.get_width() == pytest.approx(0.35)
        assert last.get_height() == every_batch
        assert last.get_facecolor() == matplotlib.colors.to_rgba(colour, 0.8)
    assert sum(bar.get_height() for bar in bars[:200]) == 98 * every_batch
    assert sum(bar.get_height() for bar in bars[200:]) == 56 * every_batch
    assert inches(picture) == [7.0, 2.0]


def test_norms_as_they_are_meant_are_drawn_apart_from_the_published_slice(runs: list[Finished]) -> None:
    picture = histograms.evaluations_picture(hnn(runs), published=False)
    assert picture is not None
    labels = [text.get_text() for text in picture.figure.axes[0].get_legend().get_texts()]
    assert labels == ["mixed norm (3,528)", "seminorm (3,528)", "seminode's best (2,016)"]
    assert "same number of evaluations" in picture.caption


def test_rejected_steps_are_shown_as_they_were_and_as_they_were_counted(runs: list[Finished]) -> None:
    picture = histograms.rejections_picture(hnn(runs))
    assert picture is not None
    true, strided = picture.figure.axes
    assert len(true.patches) == 0
    assert "none" in [text.get_text() for text in true.texts]
    every_batch = lab_runs.BATCHES["train"] * len(lab_runs.EPOCHS) * len(SEEDS)
    assert sum(bar.get_height() for bar in strided.patches) == 6 * every_batch  # the artefact: six a batch
    assert "artefacts" in picture.caption
    assert inches(picture) == [7.0, 4.0]


def test_the_published_points_are_those_of_the_table() -> None:
    expected = {
        "MNIST 32": (15.97, 10.8),
        "CIFAR-10": (17.28, 6.5),
        "MNIST 64": (54.40, 14.4),
        "MNIST 128": (201.73, 13.9),
        "Neural CDE": (476.4, 39.6),
        "HNN": (29_948, 42.8),
    }
    found = {point.name: point for point in ratio.published_points()}
    assert found.keys() == expected.keys()
    for name, (rho, saving) in expected.items():
        assert found[name].ratio == pytest.approx(rho, rel=5e-4)
        assert found[name].saving == pytest.approx(saving, abs=0.05)


def test_sizes_of_the_published_models_are_those_of_the_table() -> None:
    cifar, *mnist = ((3072, 100_050), (784, 23_494), (784, 83_782), (784, 314_950))
    expected = [*[(90, 86_050)] * 3, cifar, *mnist, (8, 509_108)]
    assert [ratio.sizes(row) for row in rows("paper")] == expected


def test_of_a_neural_cde_the_loosest_tolerance_that_was_run_is_shown(runs: list[Finished]) -> None:
    tight = [run for run in of_experiment(runs, "ncde") if run.settings["rtol"] < 1e-3]
    picture = ratio.ratio_picture(tight)
    assert picture is not None
    names = [text.get_text() for text in picture.figure.axes[0].texts]
    assert "Speech Commands, rtol 1e-4" in names
    assert not any("1e-5" in name for name in names)


def test_our_savings_stand_beside_the_published_ones(runs: list[Finished]) -> None:
    picture = ratio.ratio_picture(runs)
    assert picture is not None
    found = {line.get_label(): line.get_ydata() for line in picture.figure.axes[0].lines}
    np.testing.assert_allclose(found["published"], [point.saving for point in ratio.published_points()])
    order = ["MNIST 32", "double pendulum", "Speech Commands, rtol 1e-3"]
    savings = {kind.label: {p.name: p.saving for p in kind.points} for kind in ratio.our_points(by_row(runs))}
    assert savings["ours, by the published procedure"]["double pendulum"] == pytest.approx(100 * (1 - 56 / 98))
    assert savings["ours, correct"]["double pendulum"] == 0.0
    assert savings["ours, best"]["double pendulum"] == pytest.approx(100 * (1 - 28 / 98))
    for label in savings:
        np.testing.assert_allclose(found[label], [savings[label][name] for name in order])
    assert "43 % with the published slice and 0 %" in picture.caption


def test_frames_are_of_every_second_of_a_model_trained_with_the_seminorm(runs: list[Finished]) -> None:
    choice = control.choose(of_experiment(runs, "hnn"))
    assert choice is not None
    assert choice.run.settings["mode"] == "seminorm"
    picture = control.frames_picture(choice)
    assert inches(picture) == [12.0, 1.3]
    assert len(picture.figure.axes) == 10
    ends = choice.swing.joints()
    for axes, i in zip(picture.figure.axes, range(0, 200, 20), strict=True):
        _, first, _, second = axes.patches
        np.testing.assert_allclose(first.center, (0.0, 0.0), atol=1e-12)
        np.testing.assert_allclose(second.center, ends[i, 0])
        assert axes.get_xlim() == (-2.2, 2.2)
    end = ends[-1]
    np.testing.assert_allclose(end, [[0.0, 1.0], [0.0, 2.0]], atol=1e-9)


def test_the_state_is_shown_with_its_targets_and_without_torque_at_the_start(runs: list[Finished]) -> None:
    choice = control.choose(of_experiment(runs, "hnn"))
    assert choice is not None
    picture = control.evolution_picture(choice)
    assert inches(picture) == [12.0, 4.0]
    panels = picture.figure.axes
    assert len(panels) == 6
    for row, (axes, target) in enumerate(((panels[0], -1.0), (panels[3], 1.0))):
        assert axes.lines[0].get_linestyle() == "--"
        np.testing.assert_allclose(axes.lines[0].get_ydata(), np.cos(choice.swing.states[:, row]))
        np.testing.assert_allclose(axes.lines[1].get_ydata(), np.sin(choice.swing.states[:, row]))
        assert list(axes.lines[2].get_ydata()) == [target, target]
    assert choice.swing.torques[0, 1] == 20.0
    assert panels[5].lines[0].get_ydata()[0] == 0.0


def test_the_brake_is_shown_where_the_published_gains_do_not_settle(runs: list[Finished]) -> None:
    def unsettled(run: Finished) -> Finished:
        result = json.loads(json.dumps(run.result))
        result["control"]["published"] = None
        return replace(run, result=result)

    choice = control.choose([unsettled(run) for run in of_experiment(runs, "hnn")])
    assert choice is not None
    assert choice.gains == "braked"
    assert "With damping proportional" in choice.sentence
    assert "Of 12 runs, 0 settle within 10° with the published gains and 12 with the damping." in choice.sentence


def test_every_mode_has_its_costs_an_epoch(runs: list[Finished]) -> None:
    picture = costs.costs_picture(runs)
    counts, times = picture.figure.axes[-2:]
    widths = [bar.get_width() for bar in counts.patches]
    batches = lab_runs.BATCHES["train"]
    expected = [
        x * batches for mode in ("mixed", "seminorm", "published", "best") for x in (1100, lab_runs.NFE["hnn"][mode])
    ]
    np.testing.assert_allclose(widths, expected)
    np.testing.assert_allclose([bar.get_width() for bar in times.patches], [x * 1e-3 for x in expected[1::2]])
    assert "48 runs" in picture.caption


def test_work_and_precision_go_from_loose_to_tight(folder: Path) -> None:
    (picture,) = precision.pictures(folder)
    assert picture.name == "precision-hnn"
    seconds, nfe = picture.figure.axes
    default, replay = nfe.lines
    assert default.get_xdata().tolist() == [122, 212]
    np.testing.assert_allclose(default.get_ydata(), [1e-3, 1e-4])
    assert replay.get_xdata().tolist() == [62]  # the other was not to be had
    assert [line.get_label() for line in seconds.lines] == ["Backsolve, mixed norm, fresh", "Replay"]
    assert "90 with Backsolve, mixed norm, fresh; 30 with Replay" in picture.caption
    assert "the fastest of 3 passes" in picture.caption
    assert "dotted" not in picture.caption


def test_what_a_coarse_reference_does_not_resolve_is_marked() -> None:
    found = lab_runs.precision("ncde")
    found["reference"]["good_to"] = 5e-4
    picture = precision.precision_picture(found)
    assert picture is not None
    assert "The dotted line is the accuracy of the reference; smaller errors cannot be resolved." in picture.caption
    for axes in picture.figure.axes:
        assert list(axes.lines[-1].get_ydata()) == [5e-4, 5e-4]


def test_all_figures_are_drawn_and_drawn_again_the_same(
    runs: list[Finished], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab_runs.draw_coarsely(monkeypatch)
    some = [run for run in runs if run.settings["seed"] < 2]
    first, second = (figures.draw_all(some, folder, tmp_path / name) for name in ("first", "second"))
    assert [each.name for each in first] == [
        *("f1a-accuracy-published", "f1a-accuracy", "f1b-nfe"),
        *("f2-control-frames", "f3-state-evolution", "f4-evaluations-published", "f4-evaluations", "f5-rejections"),
        *("locations-ncde", "locations-cnf", "f6-parameter-state-ratio", "costs", "precision-hnn", "swing-up"),
    ]
    for a, b in zip(first, second, strict=True):
        assert a.svg is not None
        assert b.svg is not None
        assert a.svg.read_bytes() == b.svg.read_bytes(), a.name
        assert a.png.read_bytes() == b.png.read_bytes(), a.name
        assert b"<dc:date>" not in a.svg.read_bytes()
        assert a.title
        assert a.caption.endswith(".")
        assert (a.gif is not None) == (a.name == "swing-up")
    assert len(list((tmp_path / "first").iterdir())) == 2 * len(first) + 1


def test_the_moving_picture_is_small_and_in_the_time_of_the_pendulum(runs: list[Finished], tmp_path: Path) -> None:
    from PIL import Image

    from seminode_lab.figures.animation import REST, animate

    choice = control.choose(of_experiment(runs, "hnn"))
    assert choice is not None
    path = tmp_path / "swing.gif"
    animate(choice.swing, path)
    assert path.stat().st_size < 1_500_000
    with Image.open(path) as image:
        total = 0
        for i in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(i)
            total += image.info["duration"]
        assert image.n_frames > 200  # type: ignore[attr-defined]
    assert total == 399 * 50 + REST


def test_figures_without_their_data_are_left_out(tmp_path: Path) -> None:
    row = lab_runs.rows()[-1]
    path = lab_runs.write(row, tmp_path)
    for each in [path / "control.npz", *path.glob("times-*.npz")]:
        each.unlink()
    assert [each.name for each in figures.pictures(load(tmp_path), tmp_path)] == ["costs"]


def test_runs_that_are_not_complete_are_left_out(tmp_path: Path) -> None:
    lab_runs.write(lab_runs.rows()[0], tmp_path, complete=False)
    assert figures.draw_all(load(tmp_path), tmp_path, tmp_path / "out") == []


def test_runs_with_another_adjoint_than_that_of_their_mode_are_left_out(tmp_path: Path) -> None:
    lab_runs.write(lab_runs.rows()[0].changed(adjoint="Quadrature"), tmp_path)
    assert figures.pictures(load(tmp_path), tmp_path) == []


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    (tmp_path / "precision-cnf.json").write_text("{")
    with pytest.raises(store.StoreError, match=r"precision-cnf\.json: expected JSON"):
        figures.pictures([], tmp_path)


def test_a_pendulum_that_never_rises_is_drawn_at_its_start_and_its_end() -> None:
    ts = 0.05 * np.arange(400)
    still = Swing(ts, np.zeros((400, 4)), np.zeros((400, 2)))
    assert still.moments() == [0, 399]
