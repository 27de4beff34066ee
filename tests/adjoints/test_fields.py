"""Fields of all kinds under every adjoint: autograd inside, randomness, buffers, dtypes, odd parameters."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn

WIDE = torch.float64
ADJOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "replay": (sn.Replay(), {}),
    "checkpointed": (sn.Checkpointed(3), {}),
    "backsolve": (sn.Backsolve(), {}),
    "mixed": (sn.Backsolve("mixed"), {}),
    "fresh": (sn.Backsolve(restart="fresh"), {}),
    "interpolating": (sn.Interpolating(), {}),
    "in windows": (sn.Interpolating(memory=16), {}),
    "lobatto": (sn.Quadrature(), {}),
    "kronrod": (sn.Quadrature("gauss-kronrod"), {}),
    "dense lobatto": (sn.Quadrature(z="dense"), {}),
    "reversible": (sn.Reversible(), {"solver": sn.ReversibleRK("dopri5")}),
    "reversible heun": (sn.Reversible(), {"solver": "reversible_heun"}),
}
every_adjoint = pytest.mark.parametrize("name", ADJOINTS)


def normal(*shape: int, dtype: torch.dtype = WIDE, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def network(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(a, b).double()
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(normal(*p.shape, seed=i) / a**0.5)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def gradient(
    field: Any,
    adjoint: Any,
    y0: Tensor,
    inputs: Sequence[Tensor] = (),
    ts: Sequence[float] = (0.0, 0.4, 1.0),
    **options: Any,
) -> list[Tensor | None]:
    start = y0.clone().requires_grad_()
    sol = sn.solve(field, start, ts, adjoint=adjoint, **options)
    return list(torch.autograd.grad(sol.ys.abs().square().sum(), [start, *inputs], allow_unused=True))


def compare(name: str, run: Callable[..., list[Tensor | None]], rtol: float = 1e-7, tolerance: float = 1e-4) -> None:
    """With Direct: to rounding where the steps are the same, else to the tolerance."""
    adjoint, own = ADJOINTS[name]
    rtol = max(rtol, 1e-4) if name == "reversible heun" else rtol
    options: dict[str, Any] = {"rtol": rtol, "atol": 1e-2 * rtol, **own}
    expected, found = run(sn.Direct(), **options), run(adjoint, **options)
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            assert x is None or not x.any()
            assert y is None or not y.any()
        else:
            assert x.dtype == y.dtype
            assert float((x - y).abs().max()) <= tolerance * (1e-3 + float(y.abs().max()))


@every_adjoint
def test_a_gradient_inside_the_field(name: str) -> None:
    """A Hamiltonian's, taken with requires_grad_ on what the solver hands over."""
    potential = network(4, 8, 1)

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            y = y if y.requires_grad else y.requires_grad_()
            (slope,) = torch.autograd.grad(potential(y).sum() + y.square().sum(), y, create_graph=True)
        return torch.cat([slope[:, 2:], -slope[:, :2]], -1)

    y0 = normal(3, 4)
    compare(name, lambda a, **o: gradient(field, a, y0, list(potential.parameters()), **o))
    adjoint, own = ADJOINTS[name]
    expected = sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, **own).ys.detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, **own).ys, expected)


@every_adjoint
def test_a_divergence_inside_the_field(name: str) -> None:
    net = network(2, 8, 2)

    def field(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = y[0] if y[0].requires_grad else y[0].requires_grad_()
            f = net(z)
            rows = [torch.autograd.grad(f[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(2)]
        return f, -sum(rows, torch.zeros(()))

    def run(adjoint: Any, **options: Any) -> list[Tensor | None]:
        z = normal(3, 2).requires_grad_()
        sol = sn.solve(field, (z, torch.zeros(3, dtype=WIDE)), [0.0, 0.5, 1.0], adjoint=adjoint, norm="auto", **options)
        loss = sol.ys[1].sum() + sol.ys[0][-1].square().sum()
        return list(torch.autograd.grad(loss, [z, *net.parameters()]))

    compare(name, run)


@every_adjoint
def test_one_dropout_mask_a_solve(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)).double()

    def run(adjoint: Any, **options: Any) -> list[Tensor | None]:
        torch.manual_seed(5)
        return gradient(lambda t, y: net(y), adjoint, normal(4, 3), list(net.parameters()), **options)

    compare(name, run)


@every_adjoint
def test_buffers_are_updated_once_a_solve(name: str) -> None:
    net = nn.Sequential(network(3, 3), nn.BatchNorm1d(3).double())
    counter: Any = net[1].num_batches_tracked

    def run(adjoint: Any, **options: Any) -> list[Tensor | None]:
        before = int(counter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sn.StatefulFieldWarning)
            found = gradient(lambda t, y: torch.tanh(net(y)), adjoint, normal(4, 3), list(net.parameters()), **options)
        assert int(counter) == before + 1
        return found

    compare(name, run, rtol=1e-6, tolerance=1e-3)


@every_adjoint
@pytest.mark.parametrize("autocast", [False, True])
def test_lower_precision(name: str, autocast: bool) -> None:
    """Under autocast the field alone runs in bfloat16; a bfloat16 state is integrated in float32."""
    dtype = torch.float32 if autocast else torch.bfloat16
    net = network(3, 3).to(dtype)

    def run(adjoint: Any, rtol: float, atol: float, **options: Any) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            y0 = normal(4, 3).to(dtype)
            return gradient(lambda t, y: torch.tanh(net(y)), adjoint, y0, list(net.parameters()), rtol=1e-2, **options)

    compare(name, run, tolerance=0.05)


@every_adjoint
def test_complex_states(name: str) -> None:
    weight = normal(3, 3, dtype=torch.complex128).requires_grad_()
    scale = torch.tensor(0.5, dtype=WIDE, requires_grad=True)
    field = lambda t, y: torch.tanh(weight @ y) * scale * torch.exp(1j * t)
    y0 = normal(3, dtype=torch.complex128, seed=1)
    compare(name, lambda a, **o: gradient(field, a, y0, [weight, scale], **o))


class Sometimes(nn.Module):
    """One parameter early, another one late, a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.never = (nn.Parameter(torch.full((3,), x, dtype=WIDE)) for x in (0.3, 0.2, 1.0))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.early * y if t < 0.5 else torch.sin(self.late * y)


@every_adjoint
def test_parameters_that_are_used_at_times_or_never(name: str) -> None:
    field = Sometimes()
    compare(name, lambda a, **o: gradient(field, a, normal(4, 3), list(field.parameters()), jumps=[0.5], **o))


WEIGHT = normal(3, 3).requires_grad_()
PLAIN: dict[str, tuple[Callable[..., Tensor], list[Tensor], dict[str, Any]]] = {
    "constant": (lambda t, y: torch.ones_like(y), [], {}),
    "the state itself": (lambda t, y: y, [], {}),
    "of time alone": (lambda t, y: (WEIGHT[0] * torch.cos(t)).expand(4, 3), [WEIGHT], {}),
    "frozen": (lambda t, y: torch.tanh(y @ WEIGHT.detach()), [], {}),
    "with arguments": (lambda t, y, w, k: torch.sin(k * y @ w), [WEIGHT], {"args": (WEIGHT, 2)}),
    "with chosen parameters": (lambda t, y: torch.sin(y @ WEIGHT), [WEIGHT], {"params": [WEIGHT]}),
}


@every_adjoint
@pytest.mark.parametrize("kind", PLAIN)
def test_odd_fields(kind: str, name: str) -> None:
    field, inputs, options = PLAIN[kind]
    compare(name, lambda a, **o: gradient(field, a, normal(4, 3), inputs, **options, **o))


@every_adjoint
def test_a_computed_weight(name: str) -> None:
    """What a field captures may itself be the result of a computation, as with a hypernetwork."""

    def run(adjoint: Any, **options: Any) -> list[Tensor | None]:
        computed = torch.tanh(WEIGHT) @ WEIGHT
        return gradient(lambda t, y: torch.sin(y @ computed), adjoint, normal(4, 3), [WEIGHT], **options)

    compare(name, run)


@every_adjoint
def test_a_second_backward_pass(name: str) -> None:
    """The same gradient and the same count, also where the first has used something up."""
    adjoint, own = ADJOINTS[name]
    y0 = normal(4, 3).requires_grad_()
    sol = sn.solve(lambda t, y: torch.sin(y @ WEIGHT), y0, [0.0, 0.5, 1.0], adjoint=adjoint, record=True, **own)
    loss = sol.ys.square().sum()
    first = torch.autograd.grad(loss, [y0, WEIGHT], retain_graph=True)
    stats = sol.stats.backward
    second = torch.autograd.grad(loss, [y0, WEIGHT])
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    assert stats is not None
    assert sol.stats.backward is not None
    assert (stats.accepted, stats.rejected) == (sol.stats.backward.accepted, sol.stats.backward.rejected)
    assert sol.record is not None
    assert sol.record.backward is not None
    assert len(sol.record.backward.evaluations) == sol.stats.backward.nfe
    assert len(sol.record.backward.accepted) == sol.stats.backward.accepted
    assert len(sol.record.backward.rejected) == sol.stats.backward.rejected


@every_adjoint
def test_evaluations_are_counted(name: str) -> None:
    adjoint, own = ADJOINTS[name]
    calls = 0

    def field(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(y @ WEIGHT) + torch.cos(3 * t)

    y0 = normal(4, 3).requires_grad_()
    ts = torch.tensor([0.0, 0.5, 1.0], dtype=WIDE, requires_grad=True)
    sol = sn.solve(field, y0, ts, adjoint=adjoint, rtol=1e-4, atol=1e-6, **own)
    assert calls == sol.stats.nfe
    calls = 0
    torch.autograd.grad(sol.ys.square().sum(), [y0, ts, WEIGHT])
    assert sol.stats.backward is not None
    assert calls == sol.stats.backward.nfe + sol.stats.backward.checks


@pytest.mark.parametrize("name", ["direct", *ADJOINTS])
@pytest.mark.parametrize("options", [{}, {"norm": "auto"}], ids=["plain", "auto norm"])
def test_lazy_modules_without_shapes_are_refused(name: str, options: dict[str, Any]) -> None:
    adjoint, more = ADJOINTS.get(name, (sn.Direct(), {}))
    for field, place in (
        (nn.LazyLinear(2), "'weight' of LazyLinear"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "'1.weight' of Sequential"),
    ):
        with pytest.raises(ValueError, match=f"field: {place} is a lazy parameter .* call the module once"):
            sn.solve(lambda t, y, f=field: f(y), torch.ones(3, 2), [0.0, 1.0], adjoint=adjoint, **more, **options)


def test_lazy_modules_with_shapes_are_modules_like_others() -> None:
    field = nn.LazyLinear(2)
    field(torch.ones(3, 2))
    sn.solve(lambda t, y: field(y), torch.ones(3, 2), [0.0, 1.0]).ys[-1].sum().backward()
    assert field.weight.grad is not None
