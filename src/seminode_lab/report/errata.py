"""Errors and omissions in the paper or its code, with the evidence from the runs."""

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
    name, title = "slice", "The slice in the pendulum's seminorm has the wrong size"
    row = next(row for row in published.ROWS if row.experiment == "hnn")
    said = (
        "The code takes the size of a whole window of eight points for the size of the state. The slice that should "
        "hold only the state then also holds its adjoint and many parameters. This divides the error of the state by "
        f"√8 and leads to a longer first step. It is the cause of the saving of {percent(row.saving)} in the paper."
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
            f"and {texts[2]} with the seminorm as defined. The saving is {percent(slip)} with the error and "
            f"{percent(own)} without it"
        )
        good.append(own < NOTHING <= slip)
    if not found:
        return untested(name, title, said, "This needs runs with the error, without it, and with the mixed norm.")
    return Finding(name, title, said, f"{'. '.join(found)}.", Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED)


def _steps(problem: ProblemRuns, mode: str) -> list[float] | None:
    """Steps in a pass over the test set: rejected and accepted as the paper counts, truly rejected and accepted."""
    names = ("published_rejected", "published_accepted", "backward_rejected", "backward_accepted")
    found = [_mean(problem, mode, tested(name)) for name in names]
    return None if None in found else [x for x in found if x is not None]


def _pendulum_counter(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "pendulum-counter", "The pendulum's rejected steps are an artefact of counting"
    said = (
        "The code does not observe steps but infers them. It takes every sixth evaluation for the end of a step, and "
        "counts the step as rejected if the next one ends later. The solver restarts in each of the seven intervals of "
        "a window, with two additional evaluations. These shift the stride, so that restarts look like rejections."
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
                f"{mode}: the counter finds {strided_r:,.0f} rejected and {strided_a:,.0f} accepted steps ({share}); "
                f"the solver took {true_r:,.0f} and {true_a:,.0f}"
            )
            if mode == "mixed":
                good.append(strided_r > true_r)
    if not good:
        return untested(name, title, said)
    conclusion = Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    return Finding(name, title, said, "In one pass over the test set:", conclusion, tuple(found))


def _restarts(run: Finished) -> float:
    """Evaluations of a backward pass that do not belong to steps, per batch of the test set."""
    test = result(run)["test"]
    steps = test["backward_accepted"] + test["backward_rejected"]
    return (test["backward_nfe"] - STRIDE * steps) / batches(run, "test")


def _inflation(run: Finished) -> float:
    """Accepted steps that are counted but were not made, per batch of the test set."""
    test = result(run)["test"]
    return (test["published_accepted"] - test["backward_accepted"]) / batches(run, "test")


def _jump_counter(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "jump-counter", "Jumps inflate the neural CDE's accepted steps"
    said = (
        "After every jump of the control's slope, the field is evaluated once more. The counter takes every sixth of "
        "these evaluations for an accepted step."
    )
    found, good = [], []
    for problem in problems:
        for mode in NORMS:
            more, extra = _mean(problem, mode, _inflation), _mean(problem, mode, _restarts)
            steps = _steps(problem, mode)
            if more is None or extra is None or steps is None:
                continue
            found.append(
                f"{problem.title}, {mode}: {more:.1f} accepted steps too many per batch, from {extra:.0f} evaluations "
                f"that belong to no step; {steps[0]:,.0f} rejections counted, {steps[2]:,.0f} actual"
            )
            good.append(more > 0)
    if not found:
        return untested(name, title, said)
    conclusion = Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    return Finding(name, title, said, "In one pass over the test set:", conclusion, tuple(found))


def _extrapolation(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "extrapolation", "The evaluations in training are extrapolated and overestimated"
    said = (
        "The paper does not sum the evaluations over training steps. It multiplies those of the evaluation pass at "
        "every tenth epoch by ten, and also those of the last epoch, although that represents fewer epochs. With its "
        f"schedules this counts 210 epochs instead of 200 (+5{SPACE}%) for the neural CDE and 60 instead of 50 "
        f"(+20{SPACE}%) for the pendulum."
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
    # If every epoch is evaluated, nothing is extrapolated.
    conclusion = Conclusion.UNTESTED if not good else Conclusion.CONFIRMED if all(good) else Conclusion.REFUTED
    as_many = "" if good else "Here the number of epochs counted equals the number trained. "
    text = (
        f"{as_many}What the same procedure makes of the schedules of these runs, compared with the correct sum (mixed "
        "norm):"
        if found
        else ""
    )
    return Finding(name, title, said, text, conclusion, tuple(found))


def _worst_run(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "worst-run", "The accuracy curve leaves out the worst run"
    said = (
        "At every epoch, the code drops the lowest of five accuracies before it computes mean and deviation. The paper "
        "does not mention this."
    )
    found = []
    for problem in problems:
        for mode in NORMS:
            runs = problem.modes.get(mode, ())
            last = sorted(run.metrics[-1]["validation"]["accuracy"] for run in runs)
            if len(last) > 2:
                found.append(
                    f"{problem.title}, {mode}: {percent(100 * mean(last))} with all {len(last)} runs, "
                    f"{percent(100 * mean(last[1:]))} without the lowest"
                )
    if not found:
        why = "No row has three seeds. Without the lowest of two runs, the mean would just be the higher one."
        return untested(name, title, said, why)
    return Finding(name, title, said, "Validation accuracy at the end:", Conclusion.MEASURED, tuple(found))


def _median(problems: Sequence[ProblemRuns]) -> Finding:
    rows, all_rows = published.ROWS, percent(published.median_saving())
    said = (
        f"The paper claims a median improvement of {percent(published.CLAIMED_MEDIAN, 0)}. The median of the "
        f"{len(rows)} printed rows is {all_rows}. The claim fits a median of {len(rows) - 1} rows: without any one of "
        f"the flows it is {percent(published.median_saving(without='cnf-mnist-32'))}."
    )
    own = [x for x in map(correct_saving, problems) if x is not None]
    found = f"The median of the {len(own)} rows that were run here is {percent(median(own))}." if own else ""
    wrong = abs(published.median_saving() - published.CLAIMED_MEDIAN) > 1
    return Finding("median", "The median improvement is smaller than claimed", said, found,
                   Conclusion.PRINTED if wrong else Conclusion.REFUTED)  # fmt: skip


def _printed_proportion() -> Finding:
    """Rows whose proportion differs from that of their steps by more than rounding explains."""
    wrong = []
    for row in published.ROWS:
        for name in NORMS:
            norm: published.Norm = getattr(row, name)
            own = proportion(norm.rejected, norm.accepted) or 0.0
            if abs(own - norm.proportion) > 1:
                wrong.append(
                    f"{row.title}, {name}: {percent(norm.proportion, 2)} is printed, the steps give {percent(own, 2)}"
                )
    return Finding(
        "proportion",
        "A printed proportion of rejected steps contradicts its own row",
        "Each proportion should follow from the numbers of steps in its row.",
        f"{'; '.join(wrong)}.",
        Conclusion.PRINTED,
    )


def _evaluations_a_step(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "evaluations-a-step", "A step costs more than six evaluations"
    said = f"The paper says that a step takes {STRIDE} evaluations. A start takes two more, and each jump one more."
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
    return Finding(name, title, said, "Backward evaluations per step, with the mixed norm:", conclusion, tuple(found))


def _selection(problems: Sequence[ProblemRuns]) -> Finding:
    name, title = "selection", "The final model is chosen by its training loss"
    said = "The code keeps the weights with the lowest training loss. Validation data are not used for selection."
    total, other = 0, 0
    selecting = (run for problem in problems for run in problem.runs if run.settings["schedule"].get("selects", True))
    for run in selecting:
        losses = {evaluation["epoch"]: evaluation["validation"]["loss"] for evaluation in run.metrics}
        total += 1
        other += min(losses, key=lambda epoch: losses[epoch]) != result(run)["best_epoch"]
    if not total:
        return untested(name, title, said)
    text = f"In {other} of {total} runs, selection by validation loss would have chosen another epoch."
    return Finding(name, title, said, text, Conclusion.MEASURED)


def _optimiser(problems: Sequence[ProblemRuns]) -> Finding:
    used = sorted({(run.settings["schedule"]["optimiser"], run.settings["schedule"]["weight_decay"])
                   for problem in problems for run in problem.runs})  # fmt: skip
    text = listed([f"{name} with decay {decay:g}" for name, decay in used]) if used else "nothing"
    return untested(
        "optimiser",
        "AdamW instead of Adam with L² regularisation",
        "The paper describes Adam with L² regularisation, and the code uses AdamW. The paper says that the flows also "
        "use weight decay but gives no number.",
        f"These runs use {text}. Adam with L² regularisation was not tried.",
    )


NOT_IN_RUNS = (
    untested(
        "interpolation",
        "The control is interpolated linearly",
        "The paper describes natural cubic splines. Its code interpolates linearly.",
        "All runs here interpolate linearly.",
    ),
    untested(
        "oscillations",
        "The pendulum does not make small oscillations",
        "Its initial angles and velocities are drawn uniformly from ±3.14, the state is (cos q, sin q, velocity, "
        "torque) rather than (q, p, torque), and one of the torques acts on both joints.",
        "The data here are generated as in the code.",
    ),
    untested(
        "scale",
        "The scale of the error lacks absolute values",
        "As printed, without absolute values, the scale could be negative. The code uses absolute values.",
        "So does seminode.",
    ),
    untested(
        "library",
        "Later versions of the library are a different baseline",
        "After the experiments, the default norm of the library changed to one that treats every parameter tensor "
        "separately. It is stricter and makes the seminorm look better. Also, if a step happens to end exactly on a "
        "jump, the library misses all later jumps.",
        "Here, mixed is the norm of the paper, with all parameters as one vector.",
    ),
    untested(
        "script",
        "The released scripts are not those of the paper's runs",
        "The script of the neural CDE trains for no epochs and saves nothing. A comment mentions windows of two points "
        "where they have eight. The parameter counter tests a method instead of a flag, which has no effect.",
    ),
)
