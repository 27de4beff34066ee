"""The recommendation: the fastest row with a gradient that is good enough and with enough memory available."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .results import Recommendation, Row
from .table import memory_text, seconds_text

#: A gradient is good enough if its error is within this factor of the smallest error, ...
OF_BEST = 3.0
#: ... or of the tolerance, which bounds the error of a step and not that of a gradient, ...
OF_RTOL = 10.0
#: ... or if it is not worse than the default of `solve`, whose error must be within this factor of the tolerance.
DEFAULT_OF_RTOL = 100.0
#: Smaller relative differences in time are noise.
NOISE = 0.05
#: A row that needs less than this share of the memory of the recommended row is mentioned.
LEAN = 0.5


def recommend(
    rows: Sequence[Row], rtol: float, good_to: float | None = None, memory_limit: float | None = None
) -> Recommendation | None:
    """Choose one of the rows, which all have the same tolerance.

    An error is good enough up to the largest of: three times the smallest error; ten times rtol; the error of the
    reference; and the error of the default of `solve`, if that is within a hundred times rtol. A gradient with a
    `DriftWarning` is not trusted, whatever its error is. Among the rows that are as fast as the fastest one up to
    noise, eager is preferred to compiled, then less memory to more. `None` if no row qualifies.
    """
    measured = [row for row in rows if row.measured and math.isfinite(row.error)]
    trusted = [row for row in measured if not row.drifted]
    if not trusted:
        return None
    usual = [row.error for row in trusted if row.contender.usual and row.error <= DEFAULT_OF_RTOL * rtol]
    limit = max(OF_BEST * min(row.error for row in trusted), OF_RTOL * rtol, good_to or 0.0, *usual)
    good = [row for row in trusted if row.error <= limit]
    fits = [row for row in good if memory_limit is None or (row.memory or 0) <= memory_limit]
    # If none fits, take the one that needs the least memory.
    fits = fits or [min(good, key=_memory)]
    fastest = min(row.seconds for row in fits)
    row = min(
        (row for row in fits if row.seconds <= (1 + NOISE) * fastest),
        key=lambda row: (row.contender.compile, _memory(row), row.seconds),
    )
    lean = min(good, key=lambda other: (_memory(other), other.seconds))
    if row.memory is None or _memory(lean) > LEAN * row.memory:
        lean = None
    sentences = [_comparison(row, rows, limit), _payback(row, rows), _memory_word(row, lean)]
    sentences.append(_passed_over(row, measured, good, fits, limit))
    return Recommendation(row, " ".join(filter(None, sentences)), row.contender.call, limit, lean)


def _memory(row: Row) -> float:
    return math.inf if row.memory is None else row.memory


def _needs(row: Row) -> str:
    return "" if row.memory is None else f", {memory_text(row.memory)}"


def _comparison(row: Row, rows: Sequence[Row], limit: float) -> str:
    name = row.contender.label
    details = f"{seconds_text(row.seconds)}, gradient error {row.error:.0e}{_needs(row)}"
    usual = next((each for each in rows if each.contender.usual), None)
    if row.contender.usual:
        return f"{name}: the default is the fastest with a gradient error of at most {limit:.0e} ({details})."
    if usual is None or not usual.measured:
        return f"{name}: the fastest with a gradient error of at most {limit:.0e} ({details})."
    ratio = usual.seconds / row.seconds
    speed = f"{ratio:.1f} times as fast as" if ratio >= 1.05 else "as accurate as it should be, unlike"
    if ratio < 1.05 and usual.error <= limit:
        speed = "in place of"
    default = f"{seconds_text(usual.seconds)}, {usual.error:.0e}{_needs(usual)}"
    return f"{name}: {speed} the default, {usual.contender.label} ({details}; the default: {default})."


def _payback(row: Row, rows: Sequence[Row]) -> str:
    """The number of passes after which compilation pays off.

    Compiled programs are shared, so the first contender with this solver has the time of the compilation.
    """
    mine = row.contender
    alike = [each for each in rows if each.measured and each.contender.solver == mine.solver]
    seconds = max((each.compile_seconds for each in alike if each.contender.compile), default=0.0)
    if not mine.compile or seconds < 1.0:
        return ""
    eager = [each for each in alike if not each.contender.compile and each.contender.adjoint == mine.adjoint]
    took = f"Compiling for {mine.solver_name} took up to {seconds:.0f} s"
    if not eager or eager[0].seconds <= row.seconds:
        return f"{took}."
    return f"{took}, which pays off after {math.ceil(seconds / (eager[0].seconds - row.seconds))} passes."


def _memory_word(row: Row, lean: Row | None) -> str:
    if lean is None or lean.memory is None:
        return ""
    times = lean.seconds / row.seconds
    return f"If memory matters: {lean.contender.label}, {memory_text(lean.memory)}, {times:.1f} times the seconds."


def _passed_over(row: Row, measured: Sequence[Row], good: Sequence[Row], fits: Sequence[Row], limit: float) -> str:
    """Why the fastest row was not chosen, if it is faster."""
    faster = [each for each in measured if each.seconds < row.seconds / (1 + NOISE) and each not in fits]
    if not faster:
        return ""
    first = min(faster, key=lambda each: each.seconds)
    why = f"its gradient is wrong by {first.error:.0e}"
    if first in good:
        why = f"it needs {memory_text(first.memory or 0)}"
    elif first.drifted:
        why = f"it drifts (DriftWarning; error {first.error:.0e})"
    return f"{first.contender.label} is faster, but {why}."
