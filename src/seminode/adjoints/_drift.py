"""The warning that a state recovered on a backward pass is not the one of the forward pass."""

from __future__ import annotations

from ..errors import DriftWarning, warn

#: A recovered state this many tolerances away from the stored one causes a warning.
DRIFT = 100.0


def warn_of_drift(name: str, drift: float, t: float) -> None:
    warn(
        f"{name}: on the backward pass, the state recovered at t = {t:g} differs from the forward state by {drift:.3g} "
        "tolerances. The gradient may be wrong by about as much, relative to an accurate one; compare it with that of "
        "sn.Replay(). Solving backwards is unstable where the solution contracts: use sn.Replay() or "
        "sn.Interpolating(), or tighter tolerances or smaller steps.",
        DriftWarning,
    )
