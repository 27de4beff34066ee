"""What is not in order with the paper or its code, each with the evidence that these runs have."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from .. import measures, published
from ..counting import STRIDE
from ..measures import Gathered, ProblemRuns, Quantity, batches, result, tested
from ..store import Finished
from ..tables import proportion
from .findings import NOTHING, SPACE, Conclusion, Finding, compatible_saving, correct_saving, listed, percent, untested

NORMS = ("mixed", "seminorm")


def errata(gathered: Gathered) -> list[Finding]:
    return [
        _slice(gathered.of("hnn")),
        _pendulum_counter(gathered.of("hnn")),
        _jump_counter(gathered.of("ncde")),
        _extrapolation(gathered.problems),
        _worst_run(gathered.of("ncde")),
        _median(gathered.problems),
        _printed_proportion(),
        _evaluations_a_step(gathered.problems),
        _selection(gathered.problems),
        _optimiser(gathered.problems),
        *NOT_IN_RUNS,
    ]


def _mean(problem: ProblemRuns, mode: str, quantity: Quantity) -> float | None:
    spread = problem.spread(mode, quantity)
    return None if spread is None else spread.mean


def _slice(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "slice", "The pendulum's seminorm is cut from the wrong tensor"
    row = next(row for row in published.ROWS if row.experiment == "hnn")
    said = (
        "The code takes the size of the state from a whole window of eight points. The slice that should hold the "
        "state then holds its adjoint and many parameters too, the error of the state is divided by √8, and a longer "
        f"first step is chosen. The {percent(row.saving)} that the paper saves come from this."
    )
    found, good = [], []
    for problem in problems:
        counts = [_mean(problem, mode, measures.true_per_batch) for mode in ("mixed", "published", "seminorm")]
        if None in counts:
            continue
        texts = [f"{count:.4g}" for count in counts]
        slip, own = compatible_saving(problem) or 0.0, correct_saving(problem) or 0.0
        found.append(
            f"A batch takes {texts[0]} backward evaluations with the mixed norm, {texts[1]} with the published slice "
            f"and {texts[2]} with the seminorm as it is defined: {percent(slip)} saved with the slip, {percent(own)} "
            "without it"
        )
        good.append(own < NOTHING <= slip)
    if not found:
        return untested(name, title, said, "There are no runs with the slip, without it, and with the mixed norm.")
    return Finding(name, title, said, f"{'. '.join(found)}.", Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED)


def _steps(problem: ProblemRuns, mode: str) -> list[float] | None:
    """On a pass over the test set: strided rejected and accepted, true rejected and accepted."""
    names = ("published_rejected", "published_accepted", "backward_rejected", "backward_accepted")
    found = [_mean(problem, mode, tested(name)) for name in names]
    return None if None in found else [x for x in found if x is not None]


def _pendulum_counter(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "pendulum-counter", "The pendulum's rejected steps are an artefact of counting"
    said = (
        "Steps were not observed but inferred: every sixth evaluation is taken for the end of one, and rejected if the "
        "next ends later. Each of the seven intervals of a window starts anew with two evaluations more, which shifts "
        "the stride and makes restarts look like rejections."
    )
    found, good = [], []
    for problem in problems:
        for mode in ("mixed", "published", "seminorm"):
            steps = _steps(problem, mode)
            if steps is None:
                continue
            strided_r, strided_a, true_r, true_a = steps
            share = percent(100 * strided_r / max(1.0, strided_r + strided_a))
            found.append(
                f"{mode}: {strided_r:,.0f} rejected and {strided_a:,.0f} accepted as counted ({share}), {true_r:,.0f} "
                f"and {true_a:,.0f} in truth"
            )
            if mode == "mixed":
                good.append(strided_r > true_r)
    if not good:
        return untested(name, title, said)
    conclusion = Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    return Finding(name, title, said, "On a pass over the test set:", conclusion, tuple(found))


def _restarts(run: Finished) -> float:
    """Evaluations of a backward pass beyond those of its steps, a batch of the test set."""
    test = result(run)["test"]
    steps = test["backward_accepted"] + test["backward_rejected"]
    return (test["backward_nfe"] - STRIDE * steps) / batches(run, "test")


def _inflation(run: Finished) -> float:
    """Accepted steps too many, a batch of the test set."""
    test = result(run)["test"]
    return (test["published_accepted"] - test["backward_accepted"]) / batches(run, "test")


def _jump_counter(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "jump-counter", "Jumps inflate the neural CDE's accepted steps"
    said = (
        "After every jump of the control's slope the field is evaluated once more. The same counter takes each sixth "
        "of these evaluations for an accepted step."
    )
    found, good = [], []
    for problem in problems:
        for mode in NORMS:
            more, extra = _mean(problem, mode, _inflation), _mean(problem, mode, _restarts)
            steps = _steps(problem, mode)
            if more is None or extra is None or steps is None:
                continue
            found.append(
                f"{problem.title}, {mode}: {more:.1f} accepted steps a batch too many, where {extra:.0f} evaluations "
                f"belong to no step; {steps[0]:,.0f} rejections counted, {steps[2]:,.0f} true"
            )
            good.append(more > 0)
    if not found:
        return untested(name, title, said)
    conclusion = Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    return Finding(name, title, said, "On a pass over the test set:", conclusion, tuple(found))


def _extrapolation(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "extrapolation", "Evaluations in training are extrapolated, and too many"
    said = (
        "They were not added up over training steps. Those of every tenth epoch's evaluation pass count ten times, and "
        "those of the last one too, though it stands for fewer epochs."
    )
    found, good = [], []
    for problem in problems:
        counted, true = (_mean(problem, "mixed", f) for f in (measures.published_nfe, measures.true_nfe))
        if counted is None or not true or not measures.extrapolated(problem.modes["mixed"][0]):
            continue
        run = problem.modes["mixed"][0]
        epochs, stand = result(run)["epochs"], measures.published_epochs(run)
        over = 100 * (counted / true - 1)
        found.append(f"{problem.title}: {over:+.1f}{SPACE}% (epochs counted: {stand}, trained: {epochs})")
        if stand != epochs:
            good.append(over > 0)
    # Where every epoch is evaluated there is nothing to extrapolate.
    conclusion = Conclusion.UNTESTED if not good else Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    as_many = "" if good else "Here as many epochs are counted as were trained. "
    text = f"{as_many}The paper's count against the true sum, with the mixed norm:" if found else ""
    return Finding(name, title, said, text, conclusion, tuple(found))


def _worst_run(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "worst-run", "The accuracy curve leaves out the worst run"
    said = (
        "At every epoch the lowest of five accuracies is dropped before mean and deviation are taken. It is not said."
    )
    found = []
    for problem in problems:
        for mode in NORMS:
            runs = problem.modes.get(mode, ())
            last = sorted(run.metrics[-1]["validation"]["accuracy"] for run in runs)
            if len(last) > 1:
                found.append(
                    f"{problem.title}, {mode}: {percent(100 * mean(last))} with all {len(last)} runs, "
                    f"{percent(100 * mean(last[1:]))} without the lowest"
                )
    if not found:
        return untested(name, title, said, "No row has two seeds.")
    return Finding(name, title, said, "Validation accuracy at the end:", Conclusion.MEASURED, tuple(found))


def _median(problems: Sequence[ProblemRuns]) -> Finding:
    said = (
        f"The median improvement is said to be {percent(published.CLAIMED_MEDIAN, 0)}. That of the "
        f"{len(published.ROWS)} printed rows is {percent(published.median_saving())}."
    )
    own = [x for x in map(correct_saving, problems) if x is not None]
    found = f"The median of the {len(own)} rows that were run here is {percent(median(own))}." if own else ""
    wrong = abs(published.median_saving() - published.CLAIMED_MEDIAN) > 1
    return Finding("median", "The median improvement is not the one that is claimed", said, found,
                   Conclusion.PRINTED if wrong else Conclusion.REFUTED)  # fmt: skip


def _printed_proportion() -> Finding:
    """Rows whose proportion is not that of their own steps, which are rounded."""
    wrong = []
    for row in published.ROWS:
        for name in NORMS:
            norm: published.Norm = getattr(row, name)
            own = proportion(norm.rejected, norm.accepted) or 0.0
            if abs(own - norm.proportion) > 1:
                wrong.append(
                    f"{row.title}, {name}: {percent(norm.proportion, 2)} printed, {percent(own, 2)} by its steps"
                )
    return Finding(
        "proportion",
        "A printed proportion of rejected steps contradicts its own row",
        "Proportions should be those of the steps beside them.",
        f"{'; '.join(wrong)}.",
        Conclusion.PRINTED,
    )


def _evaluations_a_step(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "evaluations-a-step", "A step costs more than six evaluations"
    said = f"A step is said to take {STRIDE}. Starts take two more, jumps one more each."
    found, good = [], []
    for problem in problems:
        counts = [_mean(problem, "mixed", tested(f"backward_{kind}")) for kind in ("nfe", "accepted", "rejected")]
        nfe, *steps = [x for x in counts if x is not None] or [0.0, 0.0]
        if sum(steps):
            found.append(f"{nfe / sum(steps):.2f} on {problem.title}")
            good.append(nfe / sum(steps) > STRIDE)
    if not found:
        return untested(name, title, said)
    conclusion = Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    return Finding(name, title, said, "Backward evaluations a step, with the mixed norm:", conclusion, tuple(found))


def _selection(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "selection", "The final model is chosen by its training loss"
    said = "Weights with the lowest training loss are kept; validation data choose nothing."
    total, other = 0, 0
    selecting = (run for problem in problems for run in problem.runs if run.settings["schedule"].get("selects", True))
    for run in selecting:
        losses = {evaluation["epoch"]: evaluation["validation"]["loss"] for evaluation in run.metrics}
        total += 1
        other += min(losses, key=lambda epoch: losses[epoch]) != result(run)["best_epoch"]
    if not total:
        return untested(name, title, said)
    text = f"In {other} of {total} runs the validation loss would have chosen another epoch."
    return Finding(name, title, said, text, Conclusion.MEASURED)


def _optimiser(problems: Sequence[ProblemRuns]) -> Finding:
    used = sorted({(run.settings["schedule"]["optimiser"], run.settings["schedule"]["weight_decay"])
                   for problem in problems for run in problem.runs})  # fmt: skip
    text = listed([f"{name} with decay {decay:g}" for name, decay in used]) if used else "nothing"
    return untested(
        "optimiser",
        "AdamW instead of Adam with L² regularisation",
        "The paper describes the second, the code has the first; of the flows it is said that they, too, decay, but no "
        "number is given.",
        f"These runs use {text}; Adam with L² was not tried.",
    )


NOT_IN_RUNS = (
    untested(
        "interpolation",
        "The control is interpolated linearly",
        "The paper speaks of natural cubic splines, its code is piecewise linear.",
        "All runs here are piecewise linear.",
    ),
    untested(
        "oscillations",
        "The pendulum does not make small oscillations",
        "Its angles and velocities are drawn from all directions, the state is (cos q, sin q, velocity, torque) rather "
        "than (q, p, torque), and one of the torques acts on both joints.",
        "The data here are made as the code makes them.",
    ),
    untested(
        "scale",
        "The scale of the error lacks absolute values",
        "Printed without the bars, the scale could be negative. The code has them.",
        "So has seminode.",
    ),
    untested(
        "library",
        "Later versions of the library are another baseline",
        "After the experiments its default norm became one by parameter tensor, which is stricter and makes the "
        "seminorm look better; and steps that end on a jump by themselves make it lose all later jumps.",
        "Mixed, here, is the norm of the paper: all parameters as one vector.",
    ),
    untested(
        "script",
        "The released scripts are not those of the paper's runs",
        "The neural CDE's trains for no epochs and saves nothing; a comment says windows of two points where they have "
        "eight; the parameter counter tests a method instead of a flag, without effect.",
    ),
)
