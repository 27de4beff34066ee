"""How upright a pendulum is at the end of its swing-up, in degrees, and from when on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .store import Finished

#: Degrees by which the angles may differ from their targets: upright, and roughly so.
UPRIGHT, ROUGHLY = 3.0, 10.0


class Uprightness(NamedTuple):
    """The end of a swing-up.

    Attributes:
        bound: `UPRIGHT` or `ROUGHLY`, the smallest within which the pendulum stays in the end; `None` for neither.
        since: the time from which on it stays within the bound.
        last: degrees by which the angle that is further off differs from its target at the end.
    """

    bound: float | None
    since: float | None
    last: float


def deviations(states: np.ndarray) -> np.ndarray:
    """Degrees by which the angles differ from their targets at every time, the larger of both.

    States are (q₁, q₂, …), where q₂ is relative to the first link. The targets are π and 0.

    >>> deviations(np.array([[np.pi, np.pi / 2], [np.pi - np.pi / 60, 2 * np.pi]])).round(6).tolist()
    [90.0, 3.0]
    """
    cosines = np.cos(states[:, :2]) * np.array([-1.0, 1.0])
    return np.degrees(np.abs(np.arctan2(np.sin(states[:, :2]), cosines))).max(axis=1)


def uprightness(ts: np.ndarray, states: np.ndarray) -> Uprightness:
    """How and when a swing-up ends."""
    off = deviations(states.astype(np.float64))
    for bound in (UPRIGHT, ROUGHLY):
        late = np.flatnonzero(~(off <= bound))
        first = int(late[-1]) + 1 if len(late) else 0
        if first < len(off):
            return Uprightness(bound, float(ts[first]), float(off[-1]))
    return Uprightness(None, None, float(off[-1]))


def of_run(run: Finished, gains: str) -> Uprightness | None:
    """How the swing-up of a run with a controller ends; `None` if it was not simulated to its end."""
    if ((run.result or {}).get("control") or {}).get(gains) is None:
        return None
    arrays = run.arrays("control")
    states = arrays.get(f"{gains}_states")
    return None if states is None or "ts" not in arrays else uprightness(arrays["ts"], states)


def in_words(found: Sequence[Uprightness | None]) -> str:
    """How many of several swing-ups end upright, in what time, and how far off those are at the end.

    >>> in_words([Uprightness(3.0, 9.7, 0.24), Uprightness(3.0, 12.0, 0.1), None])
    '2 of 3 within 3°, from 9.7 to 12.0 s on, off by 0.1 to 0.24° at the end'
    """
    parts = []
    for bound in (UPRIGHT, ROUGHLY):
        own = [each for each in found if each is not None and each.bound == bound]
        if own:
            since = _range([f"{each.since:.1f}" for each in sorted(own, key=lambda each: each.since or 0.0)])
            last = _range([f"{each.last:.2g}" for each in sorted(own, key=lambda each: each.last)])
            parts.append(f"{len(own)} of {len(found)} within {bound:g}°, from {since} s on, off by {last}° at the end")
    return "; ".join(parts) or f"none of {len(found)}"


def _range(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))
