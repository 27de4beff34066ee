"""The fully actuated double pendulum: its simulator, and the data set from which its dynamics are learned.

States are (q1, q2, w1, w2): the angle of the first link, measured from straight down, the angle of the second link
relative to the first, and their velocities. Observations are (cos q1, cos q2, sin q1, sin q2, w1, w2, u1, u2), with the
torques u of the preceding step. Sizes, seeds and the split are those of Kidger, Chen and Lyons, "Hey, that's not an
ODE" (ICML 2021). The simulation needs SciPy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from seminode.models.base import check_channels

if TYPE_CHECKING:
    import numpy as np

SEED = 456789
DT = 0.05  # seconds, one step of the environment
RESET = 3.14  # angles and velocities start uniformly within ±this
SPEEDS = (4 * math.pi - 1e-3, 9 * math.pi - 1e-3)  # a trial that reaches these speeds is drawn again
REDRAWS = 100  # per trial
TORQUES = ((0, 0), (0, 1), (0, -1), (0, 2), (0, -2), (1, 0), (-1, 0), (2, 0), (-2, 0))
TRIALS, STEPS, WINDOW = 128, 32, 8
SHARES = (0.7, 0.15)  # proportions of trials for training and validation; the rest is for testing


def accelerations(q1: Any, q2: Any, w1: Any, w2: Any, u1: Any, u2: Any, xp: Any = math) -> tuple[Any, Any]:
    """The accelerations (w1′, w2′), for floats, or for arrays with xp = torch or numpy.

    The links have length 1, mass 1 and moment of inertia 1 about their centres; g = 9.8. The actuation is specific to
    the data set: u1 acts on the second joint, and −u2 acts on the first and thereby also on the second.

    Arguments:
        q1, q2: the angles of the two links.
        w1, w2: their velocities.
        u1, u2: the torques.
        xp: the module of the functions: `math`, `torch` or `numpy`.

    Example:
        >>> accelerations(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        (-0.6829268292682927, 1.7560975609756098)
    """
    d1 = 3.5 + xp.cos(q2)
    d2 = 1.25 + 0.5 * xp.cos(q2)
    s2 = 0.5 * xp.sin(q2)
    phi2 = 4.9 * xp.sin(q1 + q2)
    phi1 = -(w2 * w2 + 2.0 * w1 * w2) * s2 + 14.7 * xp.sin(q1) + phi2
    dw2 = (u1 + d2 / d1 * phi1 - w1 * w1 * s2 - phi2) / (1.25 - d2 * d2 / d1)
    return -(u2 + d2 * dw2 + phi1) / d1, dw2


def energy(q1: Any, q2: Any, w1: Any, w2: Any, xp: Any = math) -> Any:
    """½ q′ᵀM q′ − 14.7 cos q1 − 4.9 cos(q1 + q2), which is conserved without torques.

    Arguments:
        q1, q2, w1, w2, xp: as in `accelerations`.

    >>> energy(0.0, 0.0, 0.0, 0.0)
    -19.6
    """
    d1 = 3.5 + xp.cos(q2)
    d2 = 1.25 + 0.5 * xp.cos(q2)
    kinetic = 0.5 * d1 * w1 * w1 + d2 * w1 * w2 + 0.625 * w2 * w2
    return kinetic - 14.7 * xp.cos(q1) - 4.9 * xp.cos(q1 + q2)


def observe(x: Tensor, u: Tensor) -> Tensor:
    """Observations (…, 8) of states that were reached under torques.

    Arguments:
        x: states (q1, q2, w1, w2), shape (…, 4).
        u: torques (u1, u2), shape (…, 2).

    >>> observe(torch.zeros(4), torch.tensor([0.5, -0.5]))
    tensor([ 1.0000,  1.0000,  0.0000,  0.0000,  0.0000,  0.0000,  0.5000, -0.5000])
    """
    check_channels("x", x, (4,), "states (q1, q2, w1, w2)")
    check_channels("u", u, (2,), "torques")
    q, w = x.split(2, -1)
    return torch.cat((q.cos(), q.sin(), w, u.expand(w.shape)), -1)


# Simulation. SciPy's RK45 with its default tolerances is part of the definition of the data set.


def _lab() -> tuple[Any, Any]:
    """NumPy and SciPy's solve_ivp, which are optional dependencies."""
    try:
        import numpy
        from scipy.integrate import solve_ivp
    except ImportError as error:
        raise ImportError("the simulation of the pendulum needs SciPy: pip install 'seminode[lab]'") from error
    return numpy, solve_ivp


def step(x: Sequence[float] | np.ndarray, u: Sequence[float]) -> np.ndarray:
    """The state 0.05 s after x under constant torques. Angles are not wrapped, and nothing is clipped.

    Arguments:
        x: a state (q1, q2, w1, w2).
        u: torques (u1, u2).

    >>> [round(float(value), 4) for value in step((3.0, 0.0, 0.0, 0.0), (0.0, 0.0))]  # falls
    [2.9989, 0.0008, -0.044, 0.0339]
    """
    _, solve_ivp = _lab()
    u1, u2 = u
    if not (math.isfinite(u1) and math.isfinite(u2) and all(map(math.isfinite, x))):
        raise ValueError(f"x, u: expected finite states and torques, found {tuple(x)} and {(u1, u2)}")

    def field(t: float, x: Sequence[float]) -> tuple[float, ...]:
        q1, q2, w1, w2 = (float(v) for v in x)
        return w1, w2, *accelerations(q1, q2, w1, w2, u1, u2)

    return solve_ivp(field, (0.0, DT), x).y[:, -1]


def resets(seed: int = SEED) -> np.random.RandomState:
    """The random generator of initial states, seeded as in old versions of OpenAI's gym."""
    np, _ = _lab()
    words = np.frombuffer(hashlib.sha512(str(seed).encode()).digest()[:8], dtype="<u4")
    return np.random.RandomState(words.tolist())


def trial(rng: np.random.RandomState, torque: Sequence[float], steps: int = STEPS) -> np.ndarray:
    """The states (steps, 4) after each step, from a random initial state, which is not included."""
    np, _ = _lab()
    for _ in range(REDRAWS):
        states = [rng.uniform(-RESET, RESET, size=4)]
        while len(states) <= steps and (np.abs(states[-1][2:]) < SPEEDS).all():
            states.append(step(states[-1], torque))
        if len(states) > steps and (np.abs(states[-1][2:]) < SPEEDS).all():
            return np.stack(states[1:])
    raise ValueError(
        f"torque, steps: expected a pendulum that stays below the speeds {SPEEDS}, found none in {REDRAWS} trials with "
        f"torque {tuple(torque)} and {steps} steps"
    )


def check_count(name: str, count: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, found {count!r}")
    return count


def trajectories(trials: int = TRIALS, steps: int = STEPS, seed: int = SEED) -> Tensor:
    """The first trials of the data set: (9 torques, trials, steps, 8) observations, in float64.

    All torques share their initial states. The default is the whole data set, which takes about ten seconds.

    Arguments:
        trials: number of trials for each torque.
        steps: number of observations of each, 0.05 s apart.
        seed: of the initial states.

    >>> trajectories(trials=2, steps=3).shape
    torch.Size([9, 2, 3, 8])
    """
    check_count("trials", trials)
    check_count("steps", steps)
    np, _ = _lab()
    found = []
    for torque in TORQUES:
        rng = resets(seed)
        states = torch.from_numpy(np.stack([trial(rng, torque, steps) for _ in range(trials)]))
        found.append(observe(states, torch.tensor(torque, dtype=torch.float64)))
    return torch.stack(found)


def windows(trajectories: Tensor, length: int = WINDOW, dtype: torch.dtype = torch.float32) -> Tensor:
    """All contiguous windows of trajectories, with shape (windows, length, channels).

    Arguments:
        trajectories: shape (…, steps, channels).
        length: number of points of a window.
        dtype: of the windows.

    >>> windows(torch.arange(4.0).reshape(1, 4, 1), length=3).squeeze(-1)
    tensor([[0., 1., 2.],
            [1., 2., 3.]])
    """
    if trajectories.ndim < 2 or trajectories.shape[-2] < check_count("length", length):
        shape = tuple(trajectories.shape)
        raise ValueError(
            f"trajectories: expected shape (..., steps, channels) of at least {length} steps, found {shape}"
        )
    pieces = trajectories.unfold(-2, length, 1).transpose(-1, -2)
    return pieces.reshape(-1, length, trajectories.shape[-1]).to(dtype)


class Split(NamedTuple):
    """Tensors for training, validation and testing."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split(trajectories: Tensor) -> Split:
    """Split by trial, so that windows of one trajectory are in one part: 128 trials become 89, 19 and 20."""
    trials = trajectories.shape[1]
    train, validation = (int(trials * share) for share in SHARES)
    return Split(*trajectories.split((train, validation, trials - train - validation), dim=1))


def dataset(dtype: torch.dtype = torch.float32, **options: int) -> Split:
    """Windows (…, 8 times, 8 channels) for training, validation and testing; 20,025, 4,275 and 4,500 of them.

    Windows start 0.05 s apart, and their points are 0.05 s apart.

    Arguments:
        dtype: of the windows.
        options: as for `trajectories`.

    >>> train, validation, test = dataset(trials=7, steps=8)
    >>> train.shape, validation.shape, test.shape
    (torch.Size([36, 8, 8]), torch.Size([9, 8, 8]), torch.Size([18, 8, 8]))
    """
    return Split(*(windows(part, dtype=dtype) for part in split(trajectories(**options))))


class Run(NamedTuple):
    """A closed-loop simulation. torques[i] acts before states[i], which is observed next."""

    ts: Tensor
    states: Tensor
    torques: Tensor

    @property
    def observations(self) -> Tensor:
        return observe(self.states, self.torques)


def simulate(
    controller: Callable[[Tensor], Tensor],
    steps: int = 399,
    x0: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    dtype: torch.dtype = torch.float32,
) -> Run:
    """Simulate the pendulum under the torques controller(observation). By default it starts hanging at rest.

    Arguments:
        controller: maps an observation (cos q1, cos q2, sin q1, sin q2, w1, w2) of shape (6,) to torques (2,), which
            act until the next observation, 0.05 s later.
        steps: number of steps; 399 steps take 20 s.
        x0: initial state.
        dtype: of the observations. The simulation and its result are in float64.

    >>> run = simulate(lambda observation: -2.0 * observation[4:], steps=5, x0=(0.1, 0.0, 0.0, 0.0))
    >>> run.ts[-1].item(), run.states.shape, run.torques.shape
    (0.25, torch.Size([6, 4]), torch.Size([6, 2]))
    """
    check_count("steps", steps)
    if len(x0) != 4:
        raise ValueError(f"x0: expected a state (q1, q2, w1, w2), found {len(x0)} numbers")
    state, torque = torch.tensor(tuple(x0), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    states, torques = [state], [torque]
    with torch.no_grad():
        for _ in range(steps):
            torque = controller(observe(state, torque)[:6].to(dtype)).to("cpu", torch.float64)
            if torque.shape != (2,):
                raise ValueError(f"controller: expected torques of shape (2,), found {tuple(torque.shape)}")
            state = torch.from_numpy(step(state.tolist(), torque.tolist()))
            states.append(state)
            torques.append(torque)
    ts = DT * torch.arange(steps + 1, dtype=torch.float64)
    return Run(ts, torch.stack(states), torch.stack(torques))


# A fast initialisation of models of the pendulum.


def samples(trials: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Observations (trials·steps, 8) and true accelerations (…, 2) of new trials, in float64, by a batched RK4."""
    x = RESET * (2 * torch.rand(trials, 4, generator=generator, dtype=torch.float64) - 1)
    torques = torch.tensor(TORQUES, dtype=torch.float64)
    u = torques[torch.randint(len(TORQUES), (trials,), generator=generator)]

    def field(x: Tensor) -> Tensor:
        q1, q2, w1, w2 = x.unbind(-1)
        return torch.stack((w1, w2, *accelerations(q1, q2, w1, w2, *u.unbind(-1), xp=torch)), -1)

    observations, found = [], []
    for _ in range(steps):
        k1 = field(x)
        k2 = field(x + DT / 2 * k1)
        k3 = field(x + DT / 2 * k2)
        k4 = field(x + DT * k3)
        x = x + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        observations.append(observe(x, u))
        found.append(field(x)[:, 2:])
    return torch.cat(observations), torch.cat(found)


def fit_accelerations(
    field: nn.Module, iterations: int = 800, batch: int = 64, lr: float = 1e-2, seed: int = 0
) -> list[float]:
    """Fit a field(t, observation) to the true accelerations of the pendulum; return the losses of all iterations.

    This is regression without solves, and therefore much faster than training through the solver. It needs the true
    accelerations, which are not observed in an experiment, and is meant for benchmarks and demonstrations. It runs in
    the dtype of the field.
    """
    generator = torch.Generator().manual_seed(seed)
    like = next(field.parameters())
    x, target = (tensor.to(like) for tensor in samples(4096, 32, generator))
    optimiser = torch.optim.Adam(field.parameters(), lr=lr, betas=(0.9, 0.99))

    def factor(i: int) -> float:
        return min((i + 1) / (0.2 * iterations), 0.5 + 0.5 * math.cos(math.pi * i / iterations))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
    losses = []
    with torch.enable_grad():
        for _ in range(iterations):
            chosen = torch.randint(len(x), (batch,), generator=generator).to(x.device)
            loss = functional.mse_loss(field(like.new_zeros(()), x[chosen])[:, 4:6], target[chosen])
            optimiser.zero_grad()
            loss.backward()
            # The first gradients are huge, because fast states dominate. Without clipping, some seeds do not recover.
            nn.utils.clip_grad_norm_(field.parameters(), 10.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
    optimiser.zero_grad()
    return torch.stack(losses).tolist()
