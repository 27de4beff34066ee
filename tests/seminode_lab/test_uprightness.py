"""How upright pendulums end."""

from __future__ import annotations

import numpy as np
import pytest

from seminode_lab.uprightness import uprightness


@pytest.mark.parametrize(("off", "bound", "since"), [(2.9, 3.0, 5.0), (9.0, 10.0, 5.0), (11.0, None, None)])
@pytest.mark.parametrize("angle", [0, 1])
def test_the_end_decides(off: float, bound: float | None, since: float | None, angle: int) -> None:
    """The pendulum hangs for 5 s, except for one moment; whole turns do not matter."""
    ts = np.arange(100) / 10
    states = np.zeros((100, 4))
    states[20, 0] = states[50:, 0] = 3 * np.pi
    states[50:, angle] -= np.radians(off)
    found = uprightness(ts, states)
    assert (found.bound, found.since) == (bound, since)
    assert found.last == pytest.approx(off)
