"""What the processes of tests/test_distributed.py run: many small cases in one group, each with its result.

A case returns a number, which the test compares with a bound, or raises. Everything is compared with one process that
has the whole batch; each rank computes that for itself.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiled import run_graph
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seminode as sn
from seminode._compile import inductor

Results = dict[str, Any]

ADJOINTS: dict[str, Any] = {
    "Direct": sn.Direct(),
    "Replay": sn.Replay(),
    "Replay every 2": sn.Replay(every=2),
    "Checkpointed": sn.Checkpointed(3),
    "Backsolve": sn.Backsolve(),
    "Backsolve fresh": sn.Backsolve(restart="fresh"),
    "Backsolve seminorm_rms": sn.Backsolve(norm="seminorm_rms"),
    "Interpolating": sn.Interpolating(),
    "Quadrature": sn.Quadrature(),
    "Quadrature dense": sn.Quadrature(z="dense", rule="gauss"),
    "Reversible": sn.Reversible(),
}
#: Models of the library, as functions of the options of `solve`.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "NeuralODE": lambda **options: sn.models.NeuralODE(Network(), regularisers=[sn.models.KineticEnergy()], **options),
    "CNF": lambda **options: sn.models.CNF(sn.models.ConcatMLP(3, (8,)), trace="exact", **options),
    "OTFlow": lambda **options: sn.models.OTFlow(3, width=8, **options),
    "NeuralCDE": lambda **options: sn.models.NeuralCDE(3, hidden=4, outputs=2, **options),
    "LogNCDE": lambda **options: sn.models.LogNCDE(3, 4, 2, window_length=2.0, **options),
    "ODERNN": lambda **options: sn.models.ODERNN(3, hidden=4, outputs=2, **options),
    "HamiltonianNet": lambda **options: sn.models.HamiltonianNet(1, hidden=(8,), **options),
}
#: With which of them every model is tried: one that is discrete and one that is continuous.
OF_MODELS = ("Direct", "Backsolve")
#: With which of them the short test compiles; with the others a slow one does.
COMPILED = ("Replay", "Backsolve")


def spawn(program: str, world: int, folder: Path, **environment: str) -> list[Results]:
    """Run a function of this module in several processes; the results of each."""
    mp.spawn(_process, (program, world, str(folder), environment), nprocs=world)  # type: ignore[no-untyped-call]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def _process(rank: int, program: str, world: int, folder: str, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(environment)
    limit = datetime.timedelta(seconds=60)
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world, timeout=limit)
    results: Results = {}
    globals()[program](Cases(results, Path(folder)))
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


class Cases:
    """Runs cases and keeps what they return or raise."""

    def __init__(self, results: Results, folder: Path):
        self.results, self.folder = results, folder

    def __call__(self, name: str, case: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            self.results[name] = case(*args, **options)
        except Exception as error:
            self.results[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y) - 0.1 * y


class Model(nn.Module):
    """A model that solves in its forward pass."""

    def __init__(self, field: nn.Module, **options: Any):
        super().__init__()
        self.field, self.options = field, options
        self.stats: Any = None

    def forward(self, x: Tensor) -> Tensor:
        solution = sn.solve(self.field, x, [0.0, 1.0, 2.0], **self.options)
        self.stats = solution.stats
        return solution.ys[1:].pow(2).mean()


def batch() -> Tensor:
    """Samples of very different sizes, so that ranks alone would take different steps."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-1, 0.7, 8, dtype=torch.float64)[:, None]
    return torch.randn(8, 3, dtype=torch.float64, generator=generator) * sizes


def own(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def one_each_and_the_rest(x: Tensor) -> Tensor:
    """The first samples, one for each rank but the last, which has all others."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return x[rank:] if rank == last else x[rank : rank + 1]


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def distance(found: Any, wanted: Any) -> float:
    return float((whole(found) - wanted).abs().max() / wanted.abs().max())


def options_of(name: str, **more: Any) -> dict[str, Any]:
    solver = "reversible_heun" if name == "Reversible" else "dopri5"
    tolerance = 1e-3 if name == "Reversible" else 1e-5
    return {"adjoint": ADJOINTS[name], "solver": solver, "rtol": tolerance, "atol": 1e-2 * tolerance, **more}


@contextlib.contextmanager
def seconds_saved() -> Iterator[None]:
    """Compile with a stand-in for Inductor."""
    before, inductor.back_end = inductor.back_end, run_graph
    try:
        yield
    finally:
        inductor.back_end = before


def wrapped_in(kind: str, model: nn.Module) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def trained(name: str, wrapper: str, compile: bool) -> dict[str, Any]:
    """The gradient of a wrapped model, against one process; and whether the steps are the same."""
    options = options_of(name, compile=compile)
    if name == "Backsolve fresh":  # which is not scale-free: cotangents must be those of the whole batch
        options["adjoint"] = sn.Backsolve(restart="fresh", rtol=1e-5, atol=1e-12)
    with seconds_saved():
        alone = Model(Network(), **options)
        alone(batch()).backward()
        model = Model(Network(), **options, norm=sn.norms.distributed())
        together = wrapped_in(wrapper, model)
        together(own(batch())).backward()
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    sharded = {type(p.grad).__name__ for p in together.parameters()}
    return {
        "error": max(distance(p.grad, q.grad) for p, q in pairs),
        "stats": (counts(model.stats), counts(alone.stats)),
        "backward": (counts(model.stats.backward), counts(alone.stats.backward)),
        "kinds": sharded,
    }


def library_model(name: str, adjoint: str) -> dict[str, Any]:
    """The same of a model of the library."""
    series, running = name in ("NeuralCDE", "LogNCDE", "ODERNN"), name == "NeuralODE"

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if name == "HamiltonianNet":
            return model(x[:, :2], [0.0, 1.0]).pow(2).mean()
        x = torch.stack((x, x.sin(), x.cos()), 1) if series else x
        y, costs = model(x, costs=True) if running else (model(x), {})
        return y.pow(2).mean() + sum(cost.mean() for cost in costs.values())

    found = []
    for norm in (None, sn.norms.distributed()):
        torch.manual_seed(0)
        model: Any = MODELS[name](**options_of(adjoint, norm=norm)).double()
        # The bias of an energy has no influence; with `Direct` it has no gradient.
        unused = name == "HamiltonianNet" and adjoint == "Direct"
        wrapped = DistributedDataParallel(model, find_unused_parameters=unused) if norm else model
        loss(wrapped, own(batch()) if norm else batch()).backward()
        steps = [[counts(each) for each in (stats, stats.backward)] for stats in model.stats]
        found.append((steps, [p.grad for p in model.parameters()]))
    (steps, grads), (own_steps, own_grads) = found
    pairs = zip(own_grads, grads, strict=True)
    return {"error": max(distance(p, q) for p, q in pairs if q is not None and q.any()), "steps": (own_steps, steps)}


def counts(stats: Any) -> tuple[int, ...] | None:
    return None if stats is None else (stats.nfe, stats.accepted, stats.rejected)


def sharded_field(name: str, both: bool) -> float:
    field = Network()
    model = Model(field, **options_of(name), norm=sn.norms.distributed())
    fully_shard(field)
    if both:
        fully_shard(model)
    model(own(batch())).backward()
    alone = Model(Network(), **options_of(name))
    alone(batch()).backward()
    return max(distance(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def sharded_without_norm() -> None:
    field = Network()
    fully_shard(field)
    Model(field, **options_of("Direct"))(own(batch()))


def over_samples(x: Tensor) -> Tensor:
    """The mean over the samples of all ranks, differentiable."""
    import torch.distributed.nn.functional as collectives

    total = collectives.all_reduce(x.sum(0))
    return total / batch().shape[0]


def communicating(name: str, last_rank_only: bool = False) -> dict[str, float]:
    """Samples that attract each other, some of which are on another rank."""
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def apart(t: Tensor, y: Tensor) -> Tensor:
        return rate * (over_samples(y) - y) + torch.sin(y)

    def alone(t: Tensor, y: Tensor) -> Tensor:
        return rate * (y.mean(0) - y) + torch.sin(y)

    options = options_of(name)
    weights = torch.ones(8, 1, dtype=torch.float64)
    if last_rank_only:
        weights[: 8 - 8 // dist.get_world_size()] = 0.0
    x = own(batch()).clone().requires_grad_()
    there = sn.solve(apart, x, [0.0, 0.5, 1.0], **options, norm=sn.norms.distributed())
    (there.ys[1] * own(weights)).pow(2).sum().backward()
    of_rate, rate.grad = rate.grad, None
    assert of_rate is not None
    dist.all_reduce(of_rate)
    x_all = batch().requires_grad_()
    here = sn.solve(alone, x_all, [0.0, 0.5, 1.0], **options)
    (here.ys[1] * weights).pow(2).sum().backward()
    assert counts(there.stats) == counts(here.stats)
    assert x.grad is not None
    assert x_all.grad is not None
    size = x_all.grad.abs().max()
    return {
        "solution": distance(there.ys.detach(), torch.stack([own(y) for y in here.ys.detach()])),
        "y0": float((x.grad - own(x_all.grad)).abs().max() / size),
        "rate": distance(of_rate, rate.grad),
    }


def steps(norm: Any, alone: Any, uneven: bool = False, compile: bool = False) -> dict[str, Any]:
    """A state of two leaves, one of which is an integral: steps on the ranks, and of one process."""

    def field(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.sin(3.0 * y[0]) - y[0], 30.0 * torch.cos(5.0 * y[0].sum(1))

    def state(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.zeros(len(x), dtype=x.dtype)

    x = batch()
    part = own(x) if not uneven else one_each_and_the_rest(x)
    with seconds_saved():
        there = sn.solve(field, state(part), [0.0, 2.0], norm=norm, compile=compile, record=True)
        here = sn.solve(field, state(x), [0.0, 2.0], norm=alone, compile=compile, record=True)
    assert there.record is not None
    assert here.record is not None
    pairs = zip(there.record.ts, here.record.ts, strict=True)
    return {"stats": (counts(there.stats), counts(here.stats)), "error": max(abs(a - b) for a, b in pairs)}


def fixed_steps() -> None:
    """With fixed steps the norm says that backward passes agree, and nothing else."""
    options: Any = {"controller": sn.FixedStep(0.1), "solver": "rk4"}
    x = own(batch()).requires_grad_()
    solution = sn.solve(lambda t, y: over_samples(y) - y, x, [0.0, 0.5, 1.0], norm=sn.norms.distributed(), **options)
    row = 1 if dist.get_rank() == 0 else 2
    solution.ys[row].sum().backward()
    assert solution.stats.backward is not None
    assert solution.stats.backward.accepted == 10


def nan_on_last_rank(**options: Any) -> int:
    """Fixed steps of a field that communicates, in whose own part the last rank arrives at a NaN at t = 0.5."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def field(t: Tensor, y: Tensor) -> Tensor:
        apart = torch.where(y[:, 1:] > (0.45 if last else 9.0), math.nan, 1.0)
        return torch.cat([over_samples(y[:, :1]) - y[:, :1], apart], 1)

    y0 = torch.zeros(2, 2, dtype=torch.float64)
    fixed: Any = {"solver": "rk4", "controller": sn.FixedStep(0.1), "norm": sn.norms.distributed()}
    return sn.solve(field, y0, [0.0, 1.0], **fixed, **options).stats.accepted


def nan_gradient_on_last_rank(**options: Any) -> None:
    """A field that communicates, whose derivative is infinite on the last rank."""
    shift = 0.0 if dist.get_rank() == dist.get_world_size() - 1 else 1.0

    def field(t: Tensor, y: Tensor) -> Tensor:
        root = (y[:, 1:] - y[:, 1:].detach() + shift).sqrt()
        return torch.cat([over_samples(y[:, :1]) - y[:, :1], 0.0 * root], 1)

    y0 = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    sn.solve(field, y0, [0.0, 1.0], norm=sn.norms.distributed(), **options).ys[-1].sum().backward()


def uneven_memory(memory: str) -> dict[str, Any]:
    """A field that communicates, with so little memory for activations that a rank with few samples has more room."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return over_samples(y) - y + torch.sin(y)

    x = batch()
    part = (x[:1] if dist.get_rank() == 0 else x[1:]).clone().requires_grad_()
    options: dict[str, Any] = {"adjoint": sn.Direct(memory=memory), "norm": sn.norms.distributed()}
    there = sn.solve(field, part, [0.0, 1.0], **options)
    there.ys[-1].pow(2).sum().backward()
    x.requires_grad_()
    sn.solve(lambda t, y: y.mean(0) - y + torch.sin(y), x, [0.0, 1.0]).ys[-1].pow(2).sum().backward()
    assert x.grad is not None
    assert there.stats.backward is not None
    wanted = x.grad[:1] if dist.get_rank() == 0 else x.grad[1:]
    return {"error": distance(part.grad, wanted), "kept": there.stats.backward.kept}


def different(**option: Any) -> None:
    """A solve with another value of an option on the first rank."""
    options: dict[str, Any] = {name: pair[dist.get_rank() > 0] for name, pair in option.items()}
    y0, ts = options.pop("y0", own(batch())), options.pop("ts", [0.0, 1.0])
    single = isinstance(y0, Tensor)
    options.setdefault("norm", sn.norms.distributed())
    sn.solve((lambda t, y: -y) if single else (lambda t, y: tuple(-x for x in y)), y0, ts, **options)


def in_background() -> list[str]:
    """What is said about compilation in another process."""
    with seconds_saved(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"norm": sn.norms.distributed(), "compile": "background"}
        sn.solve(lambda t, y: torch.sin(y), own(batch()), [0.0, 1.0], **options)
    return [str(each.message) for each in caught]


def checked_groups() -> int:
    """With the check, groups that need not do the same."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return checked(sn.norms.distributed(group=groups[dist.get_rank()]))


def failures(run: Cases) -> None:
    """Failures of one rank, which are those of all; and solves that are not the same on all ranks."""
    run("fixed steps, NaN", nan_on_last_rank)
    run("fixed steps, NaN, no exception", nan_on_last_rank, throw=False)
    fixed: Any = {"solver": "rk4", "controller": sn.FixedStep(0.1)}
    for name, options in {"Replay": {}, "fixed Replay": fixed, "fixed Backsolve": fixed, "Backsolve": {}}.items():
        run(f"NaN gradient, {name}", nan_gradient_on_last_rank, adjoint=ADJOINTS[name.split()[-1]], **options)
    for memory in ("3kB", "12kB"):
        run(f"uneven memory, {memory}", uneven_memory, memory)
    event, x = sn.Event(lambda t, y: t - 0.5), torch.ones(2)
    run("different event", different, event=(event, None))
    run("different ts", different, ts=([0.0, 1.0], [0.0, 2.0]))
    run("different y0", different, y0=((x, x), x))
    run("different norm", different, norm=(sn.norms.distributed("max"), sn.norms.distributed()))
    run("different solver", different, solver=("tsit5", "dopri5"))
    run("background", in_background)
    run("check, groups", checked_groups)


def bad_start() -> None:
    x = own(batch())
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    sn.solve(lambda t, y: -y, x, [0.0, 1.0], norm=sn.norms.distributed())


def blow_up() -> None:
    x = torch.full((1,), 0.1 if dist.get_rank() == 0 else 1.0, dtype=torch.float64)
    sn.solve(lambda t, y: y**2, x, [0.0, 2.0], norm=sn.norms.distributed())


def too_many_steps() -> None:
    rate = 1.0 if dist.get_rank() == 0 else 1e5
    sn.solve(lambda t, y: -rate * (y - 1.0), own(batch()), [0.0, 9.0], norm=sn.norms.distributed(), max_steps=200)


def mean_event(grad: bool, local: bool = False, compile: bool = False, kind: str | None = None) -> float:
    """An event where the mean over all samples passes a level."""
    x = own(batch()).abs() + 0.1
    mean = (lambda y: y.mean()) if local else (lambda y: over_samples(y).mean())
    event = sn.Event(lambda t, y: mean(y) - 0.3, terminal=True)
    options: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10, "norm": sn.norms.distributed(kind), "compile": compile}
    with torch.set_grad_enabled(grad):
        there = sn.solve(lambda t, y: -y, x.requires_grad_(grad), [0.0, 9.0], event=event, save="last", **options)
    start = float((batch().abs() + 0.1).mean())
    return abs(float(there.ts[-1]) - math.log(start / 0.3))


def clock_event(compile: bool = False, kind: str | None = None) -> float:
    """An event that depends on t alone, with a reset; differentiated."""

    def run(x: Tensor, **options: Any) -> Tensor:
        event = sn.Event(lambda t, y: t - 0.4, reset=lambda t, y: 2.0 * y)
        sol = sn.solve(lambda t, y: torch.sin(y), x, [0.0, 1.0], event=event, compile=compile, **options)
        return sol.ys[-1].sum()

    x, x_all = own(batch()).requires_grad_(), batch().requires_grad_()
    run(x, norm=sn.norms.distributed(kind)).backward()
    run(x_all, norm=kind).backward()
    assert x.grad is not None
    assert x_all.grad is not None
    return distance(x.grad, own(x_all.grad))


def checked(norm: Any) -> Any:
    """The check at the end of a solve and of its backward pass."""
    os.environ["SEMINODE_CHECK_RANKS"] = "20"
    try:
        x = own(batch()).requires_grad_()
        solution = sn.solve(lambda t, y: torch.sin(3.0 * y), x, [0.0, 3.0], norm=norm, adjoint=sn.Backsolve())
        solution.ys[-1].sum().backward()
    finally:
        del os.environ["SEMINODE_CHECK_RANKS"]
    return solution.stats.nfe


def refused(**options: Any) -> None:
    x = own(batch()).requires_grad_()
    options.setdefault("norm", sn.norms.distributed())
    sn.solve(lambda t, y: torch.sin(y), x, [0.0, 1.0], **options)


def grouped(compile: bool) -> dict[str, Any]:
    """Each rank is a group of its own, and takes the steps that it takes without the others."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    norm = sn.norms.distributed("auto", group=groups[dist.get_rank()])
    found = []
    with seconds_saved():
        for each in (norm, "auto"):
            options = options_of("Backsolve", compile=compile, norm=each)
            model = Model(Network(), **options)
            model(own(batch())).backward()
            found.append((counts(model.stats), counts(model.stats.backward), [p.grad for p in model.parameters()]))
    (*steps, grads), (*alone, wanted) = found
    assert steps == alone
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, steps[0])
    return {
        "error": max(distance(p, q) for p, q in zip(grads, wanted, strict=True)),
        "different": len({tuple(each) for each in everywhere}),
    }


def compiled_events(norm: str) -> dict[str, float]:
    """Compiled steps with an event of the states of all ranks, and with a reset at a time, differentiated."""
    with seconds_saved():
        return {
            "mean": mean_event(False, compile=True, kind=norm),
            "clock": clock_event(compile=True, kind=norm),
        }


def resumed(folder: Path) -> float:
    """Train a sharded model, save it half-way, load it into another one, and go on: the same parameters."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(Network(), **options_of("Replay"), norm=sn.norms.distributed())
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(own(batch())).backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer, 2)
    parts = get_state_dict(model, optimizer)
    save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "checkpoint")
    train(model, optimizer, 2)
    again, optimizer_again = fresh()
    model_state, optimizer_state = get_state_dict(again, optimizer_again)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(again, optimizer_again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(again, optimizer_again, 2)
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    return max(distance(p.detach(), whole(q.detach())) for p, q in pairs)


def everything(run: Cases) -> None:
    for name in ADJOINTS:
        for wrapper in ("DDP", "FSDP2"):
            run(f"{wrapper}, {name}, eager", trained, name, wrapper, compile=False)
            if name in COMPILED:
                run(f"{wrapper}, {name}, compiled", trained, name, wrapper, compile=True)
        run(f"field sharded, {name}", sharded_field, name, both=False)
        run(f"field and model sharded, {name}", sharded_field, name, both=True)
        run(f"communicating, {name}", communicating, name)
        run(f"communicating, last rank only, {name}", communicating, name, last_rank_only=True)
    for name in MODELS:
        for adjoint in OF_MODELS:
            run(f"{name}, {adjoint}", library_model, name, adjoint)
    run("sharded without norm", sharded_without_norm)
    distributed, without = sn.norms.distributed, sn.norms.Without((False, True))
    for norm in (None, "rms", "max", "mixed", "mixed_per_tensor", "auto"):
        run(f"steps, {norm}", steps, distributed(norm), norm)
    run("steps, Without", steps, distributed(without), without)
    run("steps, auto, compiled", steps, distributed("auto"), "auto", compile=True)
    for norm in ("rms", "auto", "max"):
        run(f"steps, {norm}, uneven", steps, distributed(norm), norm, uneven=True)
    run("fixed steps", fixed_steps)
    failures(run)
    run("bad start", bad_start)
    run("blow up", blow_up)
    run("too many steps", too_many_steps)
    run("mean event", mean_event, grad=False)
    run("mean event, local", mean_event, grad=False, local=True)
    run("mean event, gradient", mean_event, grad=True)
    run("clock event", clock_event)
    subgroups_and_events(run)
    run("check, same", checked, distributed())
    run("check, different", checked, None)
    run("refused, batched", refused, batched=True)
    run("refused, implicit", refused, solver="kvaerno5")
    run("refused, implicit backward", refused, adjoint=sn.Interpolating(solver="kvaerno5"))
    run("refused, mixed", refused, adjoint=sn.Backsolve(norm="mixed"))
    run("refused, gauss-kronrod", refused, adjoint=sn.Quadrature(rule="gauss-kronrod"))
    run("refused, auto with fixed steps", refused, norm=distributed("auto"), controller=sn.FixedStep(0.1))
    run("resumed", resumed, run.folder)


def subgroups_and_events(run: Cases) -> None:
    for compile in (False, True):
        run(f"groups, {'compiled' if compile else 'eager'}", grouped, compile)
    for norm in ("rms", "max", "auto"):
        run(f"compiled events, {norm}", compiled_events, norm)


def compiled(run: Cases) -> None:
    """All adjoints with compiled steps, and what else is the same for any number of ranks."""
    for name in ADJOINTS:
        for wrapper in ("DDP", "FSDP2"):
            run(f"{wrapper}, {name}, compiled", trained, name, wrapper, compile=True)
    run("steps, max, compiled", steps, sn.norms.distributed("max"), "max", compile=True)


def collectives_out_of_step(run: Cases) -> None:
    """A field that communicates, on ranks that take different steps: the first to finish notices."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.sin(3.0 * y) + 0.0 * over_samples(y)

    run("out of step", lambda: sn.solve(field, own(batch()), [0.0, 3.0]).stats.nfe)
