"""Requirements on every model: repr, state dict, statistics, and support for the transformations of PyTorch modules."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import seminode as sn
from seminode import models
from seminode_lab.models import paper

TS = (0.0, 0.3, 0.5)


class Case(NamedTuple):
    """A small model, a batch for it, and a loss that is a mean over the batch."""

    make: Callable[..., nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[[Tensor], Tensor]


def normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape, generator=torch.Generator().manual_seed(1)),)


def angles() -> tuple[Any, ...]:
    q, rest = torch.randn(8, 2, 2, generator=torch.Generator().manual_seed(1)).unbind(1)
    return (torch.cat((q.cos(), q.sin(), rest, torch.zeros_like(q)), 1), TS)


def series() -> tuple[Any, ...]:
    x = torch.randn(8, 6, 2, generator=torch.Generator().manual_seed(1))
    x[0, 2, 1] = torch.nan
    return x, None, torch.tensor([6, 6, 4, 6, 2, 6, 5, 6])


def short_series() -> tuple[Any, ...]:
    x = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(1))
    x[0, 1, 1] = torch.nan
    return x, None, torch.tensor([3, 3, 2, 3, 1, 3, 3, 3])


def pixels() -> tuple[Any, ...]:
    return (torch.randint(256, (8, 1, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8),)


def squares(y: Tensor) -> Tensor:
    """The mean square over all entries."""
    return y.square().mean()


def likelihood(logp: Tensor) -> Tensor:
    return -logp.mean()


def smooth_matrix() -> nn.Module:
    """A smooth field, so that discrete and continuous adjoints agree at any tolerance."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 15), nn.Unflatten(-1, (5, 3)))


FIXED = {"solver": "rk4", "controller": sn.FixedStep(0.25)}

CASES: dict[str, Case] = {
    "NeuralODE": Case(
        lambda **o: models.NeuralODE(models.ConcatMLP(3, (8,)), augment=1, readout=nn.Linear(3, 2), **o),
        normal(8, 2),
        squares,
    ),
    "NeuralCDE": Case(lambda **o: models.NeuralCDE(2, 5, 3, field=smooth_matrix(), **o), series, squares),
    "LogNCDE": Case(
        lambda **o: models.LogNCDE(2, 5, 3, field=smooth_matrix(), window_length=2.0, **o), short_series, squares
    ),
    "ODERNN": Case(lambda **o: models.ODERNN(2, 5, 3, **o), short_series, squares),
    "LatentODE": Case(
        lambda **o: models.LatentODE(2, 3, 5, field=models.LatentField(3, 8), **o), short_series, squares
    ),
    "CNF": Case(lambda **o: models.CNF(models.ConcatMLP(2, (8,)), trace="exact", **o), normal(8, 2), likelihood),
    "MultiscaleCNF": Case(
        lambda **o: models.MultiscaleCNF((1, 4, 4), 4, scales=2, blocks=1, deterministic_eval=True, trace="exact", **o),
        pixels,
        likelihood,
    ),
    "OTFlow": Case(lambda **o: models.OTFlow(2, width=8, **o), normal(8, 2), torch.mean),
    "SymplecticODENet": Case(
        lambda **o: models.SymplecticODENet(mass_hidden=(8, 8), potential_hidden=(8,), input_hidden=(8,), **o),
        angles,
        squares,
    ),
    "HamiltonianNet": Case(lambda **o: models.HamiltonianNet(1, (8,), **o), lambda: (normal(8, 2)()[0], TS), squares),
}

every_model = pytest.mark.parametrize("name", CASES)


def make(name: str, **options: Any) -> tuple[Any, tuple[Any, ...], Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    case = CASES[name]
    return case.make(**options).eval(), case.batch(), case.loss


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """Gradients of all parameters; zero for parameters without one, such as the constant of a potential."""
    model.zero_grad()
    run().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-4) -> None:
    """With a tolerance relative to the largest entry of each expected tensor."""
    for a, b in zip(actual, expected, strict=True):
        scale = max(float(b.abs().max()), 1e-6)
        assert float((a - b).abs().max()) <= rtol * scale + 1e-7


def test_every_public_model_is_tested() -> None:
    kinds = {getattr(models, name) for name in models.__all__}
    public = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, models.SolvingModule)}
    assert {kind.__name__ for kind in public} - {"SolvingModule"} == set(CASES)


@every_model
def test_docstring_repr_and_options(name: str) -> None:
    model, _, _ = make(name, **FIXED)
    text = type(model).__doc__ or ""
    for part in ("Arguments:", ">>>", "[`solve`][seminode.solve]"):
        assert part in text, part
    assert "solver='rk4'" in repr(model)
    with pytest.raises(TypeError, match=f"{name}: unknown option 'rtoll'"):
        make(name, rtoll=1e-3)


@every_model
def test_state_dict_round_trip_and_copies(name: str, tmp_path: Path) -> None:
    model, batch, _ = make(name, **FIXED)
    expected = model(*batch)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.manual_seed(99)
    other = CASES[name].make(**FIXED).eval()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(*batch), expected)
    assert torch.equal(copy.deepcopy(model)(*batch), expected)
    assert model.nfe > 0


@every_model
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Backsolve(), sn.Quadrature()], ids=lambda a: type(a).__name__)
def test_any_adjoint_and_solver(name: str, adjoint: Any) -> None:
    """The same gradient as with the default adjoint, up to the tolerance."""
    options: dict[str, Any] = {"solver": "tsit5", "controller": sn.PID(), "rtol": 1e-5, "atol": 1e-7}
    model, batch, loss = make(name, **options)
    expected = gradients(model, lambda: loss(model(*batch)))
    model.options["adjoint"] = adjoint
    assert_close(gradients(model, lambda: loss(model(*batch))), expected, rtol=2e-2)
    assert model.backward_nfe > 0 or isinstance(adjoint, sn.Direct)


@every_model
def test_functional_call(name: str) -> None:
    model, batch, loss = make(name, **FIXED)
    direct = gradients(model, lambda: loss(model(*batch)))
    params = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # functional_call must not read the parameters of the module
    loss(torch.func.functional_call(model, params, batch)).backward()
    assert_close([torch.zeros_like(p) if p.grad is None else p.grad for p in params.values()], direct, rtol=1e-6)


@every_model
def test_autocast(name: str) -> None:
    """Fields are evaluated in half precision, states stay in float32."""
    model, batch, loss = make(name, **FIXED)
    expected = model(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(*batch)
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model(*batch).float())
    value.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@every_model
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compile(name: str) -> None:
    torch._dynamo.reset()
    model, batch, loss = make(name, **FIXED)
    expected = gradients(model, lambda: loss(model(*batch)))
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(gradients(model, lambda: loss(compiled(*batch))), expected)


@every_model
def test_inference_mode(name: str) -> None:
    model, batch, _ = make(name, **FIXED)
    expected = model(*batch)
    with torch.inference_mode():
        torch.testing.assert_close(model(*batch), expected.detach())


def parallel(rank: int, port: int, out: str) -> None:
    """One of two processes: gradients for half of the batch, averaged by DistributedDataParallel."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    for name in CASES:
        model, batch, loss = make(name, **FIXED)
        half = [half_of(x, rank) for x in batch]
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # the second pass fails if the first one left out a parameter
            results[name] = gradients(model, lambda: loss(wrapped(*half)))  # noqa: B023
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes crash during a regular exit


def half_of(x: Any, rank: int) -> Any:
    return x[4 * rank : 4 * rank + 4] if isinstance(x, Tensor) else x


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch was built without gloo")
def test_two_processes(tmp_path: Path) -> None:
    """The same gradients as in one process with the whole batch."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spawn(parallel, (port, str(tmp_path / "gradients.pt")), nprocs=2)
    results = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name in CASES:
        model, batch, loss = make(name, **FIXED)
        assert_close(results[name], gradients(model, lambda: loss(model(*batch))), rtol=1e-4)  # noqa: B023


def count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts_of_the_models_of_the_paper() -> None:
    cde = paper.speech_commands_cde()
    assert (count(cde), count(cde.field), count(cde.initial), count(cde.readout)) == (88_940, 86_050, 1_980, 910)
    net = paper.pendulum_symoden()
    parts = [count(part) for part in (net.inverse_mass, net.potential, net.input_matrix)]
    assert (count(net), parts) == (509_108, [324_003, 92_101, 93_004])
    assert [count(paper.mnist_flow(hidden)) for hidden in (32, 64, 128)] == [281_928, 1_005_384, 3_779_400]
    assert count(paper.cifar10_flow(64)) == 1_200_600
    assert cde.options.get("adjoint") == sn.Backsolve()
    assert paper.mnist_flow(adjoint=sn.Replay()).options.get("adjoint") == sn.Replay()


def test_the_speech_commands_model_runs() -> None:
    torch.manual_seed(0)
    model = paper.speech_commands_cde(solver="euler", controller=sn.FixedStep(1.0), rtol=None, atol=None)
    assert model(torch.randn(2, 161, 20)).shape == (2, 10)
