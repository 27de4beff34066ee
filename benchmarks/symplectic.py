"""Time of one evaluation of a Symplectic ODE-Net and of its VJP, compared with the textbook implementation.

    python -m benchmarks.symplectic [--repeats 40] [--batch 256]

"Textbook" differentiates each entry of the inverse mass matrix separately. The field of seminode uses one VJP and one
JVP, written as two VJPs. "Rows" also needs two VJPs, because there are two angles, and computes them with
`autograd.grad` instead of torch.func. All three share their parameters. `forward` is an evaluation under no_grad, as in
the forward pass of a solve; `vjp` is an evaluation with the gradients for the state and all parameters, as in the
backward pass. All contenders run in turn, in one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seminode.models.symplectic import SymplecticField
from seminode_lab.models import pendulum

from .problems import SymplecticField as PendulumField


class Textbook(nn.Module):
    """Symplectic ODE-Net as in Zhong, Dey and Chakraborty (ICLR 2020): p is a variable in addition to the angles.

    M⁻¹ is evaluated once for p = M q′ and again for H(cos q, sin q, p), whose derivatives are computed by
    `autograd.grad`. For dM⁻¹/dt there is one more call of `autograd.grad` for each entry of M⁻¹.
    """

    def __init__(self, field: SymplecticField):
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        create_graph = torch.is_grad_enabled()
        n, field = self.field.dof, self.field
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            angles, w, u = x.split((2 * n, n, field.inputs), -1)
            p = torch.linalg.solve(field.inverse_mass_matrix(angles), w)
            both = torch.cat((angles, p), -1)
            angles, p = both.split((2 * n, n), -1)
            inverse = field.inverse_mass_matrix(angles)
            V = field.potential(angles).squeeze(-1)
            H = 0.5 * (p * (inverse @ p.unsqueeze(-1)).squeeze(-1)).sum(-1) + V
            g = field.actuation(angles)

            (dH,) = torch.autograd.grad(H.sum(), both, create_graph=create_graph, retain_graph=True)
            dcos, dsin, dq = dH.split(n, -1)
            cos, sin = angles.split(n, -1)
            dp = sin * dcos - cos * dsin + (g @ u.unsqueeze(-1)).squeeze(-1)
            dangles = torch.cat((-sin * dq, cos * dq), -1)
            rows = []
            for i in range(n):
                row = []
                for j in range(n):
                    (entry,) = torch.autograd.grad(
                        inverse[..., i, j].sum(), angles, create_graph=create_graph, retain_graph=True
                    )
                    row.append((entry * dangles).sum(-1))
                rows.append(torch.stack(row, -1))
            dinverse = torch.stack(rows, -2)
            dw = (inverse @ dp.unsqueeze(-1) + dinverse @ p.unsqueeze(-1)).squeeze(-1)
            dx = torch.cat((dangles, dw, torch.zeros_like(u)), -1)
        return dx if create_graph else dx.detach()


class Rows(nn.Module):
    """The rows of ∂(M⁻¹p)/∂(cos q, sin q) with p held fixed, one VJP each by `autograd.grad`; for two angles."""

    def __init__(self, field: SymplecticField):
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        create_graph = torch.is_grad_enabled()
        cos, sin, w, u = x.split(2, -1)
        with torch.enable_grad():
            angles = x[..., :4]
            if not angles.requires_grad:
                angles = angles.detach().requires_grad_()
            a, b, o = self.field.inverse_mass(angles).unbind(-1)
            m11, m12, m22 = a * a + self.field.floor, a * o, o * o + b * b + self.field.floor
            m = torch.stack((m11, m12, m22), -1)
            V = self.field.potential(angles)
        w1, w2 = w.unbind(-1)
        det = m11 * m22 - m12 * m12
        p1, p2 = (m22 * w1 - m12 * w2) / det, (m11 * w2 - m12 * w1) / det
        zero = torch.zeros_like(p1)
        (J1,) = torch.autograd.grad(
            m, angles, torch.stack((p1, p2, zero), -1), retain_graph=True, create_graph=create_graph
        )
        (J2,) = torch.autograd.grad(m, angles, torch.stack((zero, p1, p2), -1), create_graph=create_graph)
        (dV,) = torch.autograd.grad(V, angles, torch.ones_like(V), create_graph=create_graph)
        dH = 0.5 * (p1.unsqueeze(-1) * J1 + p2.unsqueeze(-1) * J2) + dV
        g = self.field.actuation(x[..., :4])
        dp = sin * dH[..., :2] - cos * dH[..., 2:] + (g @ u.unsqueeze(-1)).squeeze(-1)
        dp1, dp2 = dp.unbind(-1)
        dangles = torch.cat((-sin * w, cos * w), -1)
        dw1 = m11 * dp1 + m12 * dp2 + (J1 * dangles).sum(-1)
        dw2 = m12 * dp1 + m22 * dp2 + (J2 * dangles).sum(-1)
        dx = torch.cat((dangles, torch.stack((dw1, dw2), -1), torch.zeros_like(u)), -1)
        return dx if create_graph else dx.detach()


def product(field: nn.Module, x: Tensor, cotangent: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """An evaluation, and its VJP with respect to the state and all parameters."""
    x = x.detach().requires_grad_()
    dx = field(x.new_zeros(()), x)
    return dx.detach(), list(torch.autograd.grad(dx, [x, *field.parameters()], cotangent, allow_unused=True))


def evaluation(field: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return field(x.new_zeros(()), x)


def milliseconds(run: Callable[[], object]) -> float:
    """CPU time: in one thread, the time of the run without interruptions by other processes."""
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


Times = dict[str, dict[str, list[float]]]


def measure(repeats: int, batch: int = 256, widths: tuple[int, int] = (400, 300)) -> Times:
    """Milliseconds of every round, by kind and contender."""
    ours = PendulumField(widths)
    fields = {"textbook": Textbook(ours), "rows": Rows(ours), "seminode": ours}
    x = pendulum.samples(batch, 1, torch.Generator().manual_seed(0))[0].float()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    times: Times = {kind: {name: [] for name in fields} for kind in ("forward", "vjp")}
    for i in range(repeats + 1):
        for name, field in fields.items():
            forward = milliseconds(lambda field=field: evaluation(field, x))
            vjp = milliseconds(lambda field=field: product(field, x, cotangent))
            if i:  # the first round is a warm-up
                times["forward"][name].append(forward)
                times["vjp"][name].append(vjp)
    return times


def report(measured: Times) -> str:
    lines = ["ms        contender       min   median   ratio of textbook to contender: minima, medians"]
    for kind, contenders in measured.items():
        slow = contenders["textbook"]
        for name, times in contenders.items():
            median = statistics.median(times)
            ratios = f"{min(slow) / min(times):8.2f} {statistics.median(slow) / median:8.2f}"
            lines.append(f"{kind:9} {name:10} {min(times):8.2f} {median:8.2f} {ratios}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(
        f"Symplectic ODE-Net, 509,108 parameters, batch {options.batch}, float32, one thread; torch {torch.__version__}"
    )
    print(report(measure(options.repeats, options.batch)))


if __name__ == "__main__":
    main()
