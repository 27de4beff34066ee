"""Robertson's problem with an implicit and an explicit solver: a picture of the solution and of the steps.

python examples/stiff.py [--image out/demo/stiff.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from drawing import STYLE, need, save
from torch import Tensor

import seminode as sn


def robertson(t: Tensor, y: Tensor) -> Tensor:
    a, b, c = y.unbind()
    first, second, third = 0.04 * a, 1e4 * b * c, 3e7 * b * b
    return torch.stack([second - first, first - second - third, third])


def steps(solver: str, end: float) -> tuple[list[float], list[float]]:
    """Starts and lengths of the accepted steps."""
    y0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        sol = sn.solve(robertson, y0, [0.0, end], solver=solver, atol=1e-12, record=True)  # type: ignore[arg-type]
    assert sol.record is not None
    plans = sol.record.accepted
    return [plan.t1 for plan in plans], [plan.dt for plan in plans]


def draw(path: Path, explicit_end: float) -> None:
    import matplotlib.pyplot as plt

    y0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    ts = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-6, 8, 200, dtype=torch.float64)])
    with torch.no_grad():
        ys = sn.solve(robertson, y0, ts, solver="kvaerno5", atol=1e-12).ys[1:]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for column, label in enumerate(("a", "10⁴ · b", "c")):
            left.semilogx(ts[1:], ys[:, column] * (1e4 if column == 1 else 1.0), label=label)
        left.set(xlabel="t", title="Robertson's problem")
        left.legend()
        for solver, end in (("kvaerno5", 1e8), ("dopri5", explicit_end)):
            times, lengths = steps(solver, end)
            right.loglog(times, lengths, ".", ms=4, label=f"{solver}: {len(times)} steps to t = {end:g}")
        right.set(xlabel="t", ylabel="dt", title="accepted steps")
        right.legend()
        save(figure, path, dpi=130)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", type=Path, default=Path("out/demo/stiff.png"), help="file of the plot")
    parser.add_argument("--explicit-end", type=float, default=1.0, help="where the explicit solve ends")
    options = parser.parse_args()
    need("matplotlib")
    draw(options.image, options.explicit_end)
    print(f"Plot: {options.image}")


if __name__ == "__main__":
    main()
