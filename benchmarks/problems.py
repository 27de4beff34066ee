"""Problems on which ways to differentiate a solve are compared: a field, a start, output times and a loss each.

Random numbers are drawn in float64 from a generator of the problem's own and rounded to the wanted dtype, so that one
seed means the same problem in either precision. "The paper" is Kidger, Chen and Lyons, "Hey, that's not an ODE": Faster
ODE Adjoints via Seminorms (ICML 2021).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class GradientProblem:
    """y′ = field(t, y), y(ts[0]) = start(), to be differentiated through loss(ys), ys being the outputs at all ts.

    `start` is a function because the start may have parameters of its own; those of `modules` are all there are.
    """

    field: nn.Module
    start: Callable[[], Any]
    ts: Tensor
    loss: Callable[[Any], Tensor]
    modules: nn.ModuleList
    rtol: float
    atol: float
    jumps: Tensor | None = None


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A float64 layer with PyTorch's default initialisation, but from our own generator."""
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64))
    bound = 1.0 / math.sqrt(inputs)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


def mlp(widths: Sequence[int], activation: type[nn.Module], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [linear(inputs, outputs, generator), activation()]
    return nn.Sequential(*layers[:-1])


# The fully actuated double pendulum and the Symplectic ODE-Net that learns it (the paper, third experiment).

PENDULUM_SEED = 456789
PENDULUM_DT = 0.05
PENDULUM_RESET = 3.14  # angles and velocities start uniformly within ±this
PENDULUM_SPEEDS = (4 * math.pi - 1e-3, 9 * math.pi - 1e-3)  # a trial that comes this fast is drawn again
TORQUES = ((0, 0), (0, 1), (0, -1), (0, 2), (0, -2), (1, 0), (-1, 0), (2, 0), (-2, 0))


def pendulum_accelerations(q1: Any, q2: Any, w1: Any, w2: Any, u1: Any, u2: Any, xp: Any = math) -> tuple[Any, Any]:
    """(w1′, w2′) of floats, or with xp = torch or numpy of arrays.

    q1 is the angle of the first link from straight down, q2 that of the second relative to the first. Links of length
    1, mass 1 and moment of inertia 1 about their middles; g = 9.8. The actuation is the data set's own: u1 drives the
    second joint, and −u2 the first and with it the second.
    """
    d1 = 3.5 + xp.cos(q2)
    d2 = 1.25 + 0.5 * xp.cos(q2)
    s2 = 0.5 * xp.sin(q2)
    phi2 = 4.9 * xp.sin(q1 + q2)
    phi1 = -(w2 * w2 + 2.0 * w1 * w2) * s2 + 14.7 * xp.sin(q1) + phi2
    dw2 = (u1 + d2 / d1 * phi1 - w1 * w1 * s2 - phi2) / (1.25 - d2 * d2 / d1)
    return -(u2 + d2 * dw2 + phi1) / d1, dw2


def pendulum_resets(seed: int = PENDULUM_SEED) -> np.random.RandomState:
    """The generator of initial states, seeded as OpenAI gym used to do."""
    words = np.frombuffer(hashlib.sha512(str(seed).encode()).digest()[:8], dtype="<u4")
    return np.random.RandomState(words.tolist())


def pendulum_trial(rng: np.random.RandomState, torque: tuple[float, float], steps: int) -> np.ndarray:
    """States (q1, q2, w1, w2) after each of the steps, from a random start that is not recorded itself."""
    from scipy.integrate import solve_ivp

    def field(t: float, x: Sequence[float]) -> tuple[float, ...]:
        q1, q2, w1, w2 = (float(v) for v in x)
        return w1, w2, *pendulum_accelerations(q1, q2, w1, w2, *torque)

    while True:
        x = rng.uniform(-PENDULUM_RESET, PENDULUM_RESET, size=4)
        states = []
        for _ in range(steps):
            x = solve_ivp(field, (0.0, PENDULUM_DT), x).y[:, -1]
            states.append(x)
        trial = np.stack(states)
        if (np.abs(trial[:, 2:]) < PENDULUM_SPEEDS).all():
            return trial


def pendulum_trajectories(trials: int = 128, steps: int = 32, seed: int = PENDULUM_SEED) -> Tensor:
    """The first trials of the data set: (9 torques, trials, steps, 8) observations, in float64.

    An observation is (cos q1, cos q2, sin q1, sin q2, w1, w2, u1, u2). All torques share their initial states. The
    paper trains on trials 0–88, validates on 89–107 and tests on 108–127. All of them take SciPy a few seconds.
    """
    observations = []
    for torque in TORQUES:
        rng = pendulum_resets(seed)
        states = np.stack([pendulum_trial(rng, torque, steps) for _ in range(trials)])
        q, w = np.split(states, 2, axis=-1)
        u = np.broadcast_to(np.asarray(torque, dtype=np.float64), w.shape)
        observations.append(np.concatenate([np.cos(q), np.sin(q), w, u], axis=-1))
    return torch.from_numpy(np.stack(observations))


def pendulum_windows(trajectories: Tensor, length: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """All contiguous windows of trajectories (…, steps, channels), as (windows, length, channels)."""
    windows = trajectories.unfold(-2, length, 1).transpose(-1, -2)
    return windows.reshape(-1, length, trajectories.shape[-1]).to(dtype)


def pendulum_batch(batch: int = 256, trials: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random windows of the first trials. Fewer than about four trials are too much alike to stand for the data set."""
    windows = pendulum_windows(pendulum_trajectories(trials), dtype=dtype)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:batch]]


class SymplecticField(nn.Module):
    """Symplectic ODE-Net (Zhong, Dey and Chakraborty, 2020) on states (cos q, sin q, q′, u); 509,108 parameters.

    Networks of (cos q, sin q) give the inverse mass matrix M⁻¹ = LLᵀ + 0.1 I, the potential V and the input matrix g.
    With p = M q′ and H = ½pᵀM⁻¹p + V, the field is that of Hamilton's equations q′ = ∂H/∂p, p′ = −∂H/∂q + g u, written
    in the observed variables. It differentiates H itself, and does so under `torch.no_grad()` as well.
    """

    def __init__(self, widths: tuple[int, int] = (400, 300), seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        wide, narrow = widths
        # This order is that of the parameters in the flat adjoint state, on which a published norm depends.
        self.inverse_mass = mlp((4, wide, wide, wide, 3), nn.Softplus, generator)
        self.potential = mlp((4, narrow, narrow, 1), nn.Softplus, generator)
        self.input_matrix = mlp((4, narrow, narrow, 4), nn.Softplus, generator)
        self.to(dtype)

    def inverse_mass_entries(self, angles: Tensor) -> Tensor:
        """M⁻¹ as (m11, m12, m22)."""
        a, b, o = self.inverse_mass(angles).unbind(-1)
        return torch.stack((a * a + 0.1, a * o, o * o + b * b + 0.1), -1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        again = torch.is_grad_enabled()  # whether someone outside will differentiate what we differentiate here
        cos, sin, w, u = x.split(2, -1)
        with torch.enable_grad():
            angles = x[..., :4]
            if not angles.requires_grad:
                angles = angles.detach().requires_grad_()
            m = self.inverse_mass_entries(angles)
            V = self.potential(angles)
        m11, m12, m22 = m.unbind(-1)
        w1, w2 = w.unbind(-1)
        det = m11 * m22 - m12 * m12
        p1, p2 = (m22 * w1 - m12 * w2) / det, (m11 * w2 - m12 * w1) / det

        # Rows of J = ∂(M⁻¹p)/∂(cos q, sin q) with p held fixed: p enters as the vector of a product, so that its own
        # dependence on the angles stays out of J, but not out of the gradient of J.
        zero = torch.zeros_like(p1)
        grad = partial(torch.autograd.grad, inputs=angles, create_graph=again)
        (J1,) = grad(m, grad_outputs=torch.stack((p1, p2, zero), -1), retain_graph=True)
        (J2,) = grad(m, grad_outputs=torch.stack((zero, p1, p2), -1))
        (dV,) = grad(V, grad_outputs=torch.ones_like(V))
        dH = 0.5 * (p1.unsqueeze(-1) * J1 + p2.unsqueeze(-1) * J2) + dV

        g = self.input_matrix(x[..., :4]).unflatten(-1, (2, 2))
        dp = sin * dH[..., :2] - cos * dH[..., 2:] + (g @ u.unsqueeze(-1)).squeeze(-1)
        dp1, dp2 = dp.unbind(-1)
        turn = torch.cat((-sin * w, cos * w), -1)
        dw1 = m11 * dp1 + m12 * dp2 + (J1 * turn).sum(-1)
        dw2 = m12 * dp1 + m22 * dp2 + (J2 * turn).sum(-1)
        return torch.cat((turn, torch.stack((dw1, dw2), -1), torch.zeros_like(u)), -1)


def pendulum_states(trials: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Observations and accelerations along fresh trials of the true pendulum, all at once by RK4; float64."""
    x = PENDULUM_RESET * (2 * torch.rand(trials, 4, generator=generator, dtype=torch.float64) - 1)
    torques = torch.tensor(TORQUES, dtype=torch.float64)
    u = torques[torch.randint(len(TORQUES), (trials,), generator=generator)]

    def field(x: Tensor) -> Tensor:
        q1, q2, w1, w2 = x.unbind(-1)
        return torch.stack((w1, w2, *pendulum_accelerations(q1, q2, w1, w2, *u.unbind(-1), xp=torch)), -1)

    observations, accelerations = [], []
    for _ in range(steps):
        k1 = field(x)
        k2 = field(x + PENDULUM_DT / 2 * k1)
        k3 = field(x + PENDULUM_DT / 2 * k2)
        k4 = field(x + PENDULUM_DT * k3)
        x = x + PENDULUM_DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        q, w = x.split(2, -1)
        observations.append(torch.cat((q.cos(), q.sin(), w, u), -1))
        accelerations.append(field(x)[:, 2:])
    return torch.cat(observations), torch.cat(accelerations)


def fitted_pendulum(
    iterations: int = 800, batch: int = 64, lr: float = 1e-2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> SymplecticField:
    """A Symplectic ODE-Net fitted to the pendulum's true accelerations: no solves, so seconds instead of hours.

    The mean squared error on windows of the data set comes to about 1e-5, where the training of the paper ends at 1e-4;
    200 iterations make it 1e-3. Fitted in float32, whatever the dtype asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    x, target = (tensor.float() for tensor in pendulum_states(4096, 32, generator))
    field, t = SymplecticField(seed=seed), torch.zeros(())
    optimiser = torch.optim.Adam(field.parameters(), lr=lr, betas=(0.9, 0.99))

    def pace(i: int) -> float:
        return min((i + 1) / (0.2 * iterations), 0.5 + 0.5 * math.cos(math.pi * i / iterations))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, pace)
    with torch.enable_grad():
        for _ in range(iterations):
            chosen = torch.randint(len(x), (batch,), generator=generator)
            loss = functional.mse_loss(field(t, x[chosen])[:, 4:6], target[chosen])
            optimiser.zero_grad()
            loss.backward()
            # The first gradients are huge, as fast states count most; unclipped, some seeds do not recover.
            nn.utils.clip_grad_norm_(field.parameters(), 10.0)
            optimiser.step()
            schedule.step()
    optimiser.zero_grad()
    return field.to(dtype)


def pendulum_problem(field: SymplecticField, windows: Tensor) -> GradientProblem:
    """Windows (batch, times, 8) predicted from their first points; mean squared error. Tolerances of the paper."""
    return GradientProblem(
        field=field,
        start=lambda: windows[:, 0],
        ts=PENDULUM_DT * torch.arange(windows.shape[1], dtype=torch.float64),
        loss=lambda ys: functional.mse_loss(ys, windows.transpose(0, 1)),
        modules=nn.ModuleList([field]),
        rtol=1e-4,
        atol=1e-4,
    )


# A neural controlled differential equation on random data (the paper, first experiment, but for the data).


class LinearControl(nn.Module):
    """A piecewise linear path through values (batch, knots, channels) at increasing times."""

    times: Tensor
    values: Tensor
    slopes: Tensor

    def __init__(self, times: Tensor, values: Tensor):
        super().__init__()
        self.register_buffer("times", times)
        self.register_buffer("values", values)
        slopes = values.diff(dim=1) / times.diff().unsqueeze(-1)
        self.register_buffer("slopes", slopes.transpose(0, 1).contiguous())

    def derivative(self, t: Tensor) -> Tensor:
        """dX/dt, (batch, channels): at a knot that of the interval before, outside that of the nearest interval."""
        interval = torch.searchsorted(self.times, t.detach()) - 1
        return self.slopes[interval.clamp(0, len(self.slopes) - 1)]


class ControlledField(nn.Module):
    """z′ = F(z) dX/dt with a network F from z to (hidden, channels) matrices; 86,050 parameters as in the paper."""

    def __init__(self, control: LinearControl, hidden: int, width: int, generator: torch.Generator):
        super().__init__()
        channels = control.values.shape[-1]
        self.control = control
        self.shape = (hidden, channels)
        self.net = mlp((hidden, width, width, width, width, hidden * channels), nn.ReLU, generator)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        matrix = self.net(z).tanh().unflatten(-1, self.shape)
        return (matrix @ self.control.derivative(t).unsqueeze(-1)).squeeze(-1)


def random_control(batch: int, knots: int, channels: int, generator: torch.Generator) -> LinearControl:
    """Time itself as channel 0; in the others stationary series of unit variance, at knots 0, 1, 2, …

    Neighbouring values are correlated by 0.7, somewhere between white noise and a random walk, as normalised features
    of speech are.
    """
    times = torch.arange(knots, dtype=torch.float64)
    first, *rest = normal((batch, knots, channels - 1), generator).unbind(1)
    series = list(itertools.accumulate(rest, lambda x, noise: 0.7 * x + math.sqrt(1.0 - 0.7**2) * noise, initial=first))
    values = torch.cat((times.expand(batch, knots).unsqueeze(-1), torch.stack(series, 1)), -1)
    return LinearControl(times, values)


def cde_problem(
    batch: int = 16,
    knots: int = 161,
    channels: int = 21,
    hidden: int = 90,
    width: int = 40,
    classes: int = 10,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> GradientProblem:
    """A neural CDE that classifies random series; the sizes, by default, are those of the paper's speech commands.

    z(0) is linear in X(0), the classes' scores are linear in z at the end, the loss is the mean cross-entropy. The
    field is discontinuous at every knot.
    """
    generator = torch.Generator().manual_seed(seed)
    control = random_control(batch, knots, channels, generator)
    labels = torch.randint(classes, (batch,), generator=generator)
    field = ControlledField(control, hidden, width, generator)
    initial, readout = linear(channels, hidden, generator), linear(hidden, classes, generator)
    modules = nn.ModuleList([field, initial, readout]).to(dtype)
    return GradientProblem(
        field=field,
        start=lambda: initial(control.values[:, 0]),
        ts=torch.tensor([0.0, knots - 1.0], dtype=torch.float64),
        loss=lambda ys: functional.cross_entropy(readout(ys[-1]), labels),
        modules=modules,
        rtol=1e-3,
        atol=1e-6,
        jumps=torch.arange(knots, dtype=torch.float64),
    )


# Contracting systems: harmless forwards, but on the way back from the end every error grows exponentially.


class DrivenLinear(nn.Module):
    """y′ = A y + C (cos ωt, sin ωt); A is not normal, its eigenvalues are a geometric series from −1 to −stiffness."""

    def __init__(self, size: int = 6, stiffness: float = 20.0, omega: float = 2.0, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rates = torch.logspace(0.0, math.log10(stiffness), size, dtype=torch.float64)
        triangular = torch.diag(-rates) + normal((size, size), generator).triu(1)
        Q = torch.linalg.qr(normal((size, size), generator)).Q
        self.A = nn.Parameter(Q @ triangular @ Q.T)
        self.C = nn.Parameter(normal((size, 2), generator))
        self.omega = omega

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        phase = self.omega * t
        return y @ self.A.T + self.C @ torch.stack((phase.cos(), phase.sin()))

    def exact(self, t: Tensor | float, y0: Tensor) -> Tensor:
        """y(t) from y(0) = y0 (…, size): the driving is a solution of a linear equation too, so one exponential does.

        Differentiable with respect to A, C, t and y0.
        """
        size = len(self.A)
        turn = self.A.new_tensor([[0.0, -self.omega], [self.omega, 0.0]])
        top = torch.cat((self.A, self.C), 1)
        bottom = torch.cat((self.A.new_zeros(2, size), turn), 1)
        driving = y0.new_tensor([1.0, 0.0]).expand(*y0.shape[:-1], 2)
        flow = torch.linalg.matrix_exp(t * torch.cat((top, bottom)))
        return (torch.cat((y0, driving), -1) @ flow.T)[..., :size]


def linear_problem(
    batch: int = 4,
    size: int = 6,
    stiffness: float = 20.0,
    end: float = 2.0,
    outputs: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> GradientProblem:
    """`DrivenLinear` from random starts; half the sum of squares at all output times."""
    field = DrivenLinear(size, stiffness, seed=seed)
    y0 = normal((batch, size), torch.Generator().manual_seed(seed + 1)).to(dtype)
    return GradientProblem(
        field=field.to(dtype),
        start=lambda: y0,
        ts=torch.linspace(0.0, end, outputs, dtype=torch.float64),
        loss=lambda ys: 0.5 * ys.square().sum(),
        modules=nn.ModuleList([field]),
        rtol=1e-6,
        atol=1e-8,
    )


def exact_linear_outputs(problem: GradientProblem) -> Tensor:
    """The outputs of a `linear_problem` in closed form; problem.loss of them has the exact gradient."""
    field, y0 = problem.field, problem.start()
    assert isinstance(field, DrivenLinear)
    return torch.stack([field.exact(t, y0) for t in problem.ts.to(y0).unbind()])


class Contracting(nn.Module):
    """y′ = −D (y − sin 3t) + W tanh y with a diagonal D: y is pulled to sin 3t at rates from 1 to `stiffness`."""

    def __init__(self, size: int = 8, stiffness: float = 60.0, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.D = nn.Parameter(torch.linspace(1.0, stiffness, size, dtype=torch.float64))
        self.W = nn.Parameter(normal((size, size), generator) / math.sqrt(size))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.D * (y - (3.0 * t).sin()) + y.tanh() @ self.W.T


def contracting_problem(
    batch: int = 1, size: int = 8, stiffness: float = 60.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> GradientProblem:
    """`Contracting` on [0, 2] from random starts; half the sum of squares at the end."""
    field = Contracting(size, stiffness, seed)
    y0 = normal((batch, size), torch.Generator().manual_seed(seed + 1)).to(dtype)
    return GradientProblem(
        field=field.to(dtype),
        start=lambda: y0,
        ts=torch.tensor([0.0, 2.0], dtype=torch.float64),
        loss=lambda ys: 0.5 * ys[-1].square().sum(),
        modules=nn.ModuleList([field]),
        rtol=1e-6,
        atol=1e-8,
    )


# A continuous normalising flow.


class Flow(nn.Module):
    """z′ = f(t, z) = W₂ tanh(W₁ z + t w + b₁) + b₂ with log-density and kinetic energy, per sample, on the side.

    logp′ = −tr ∂f/∂z (Chen et al., 2018), here exactly; energy′ = ½ mean f² (Finlay et al., 2020). Both are plain
    integrals: nothing depends on them.
    """

    def __init__(self, size: int = 2, width: int = 16, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = linear(size + 1, width, generator)
        self.outer = linear(width, size, generator)

    def velocity(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """f and the trace of its Jacobian."""
        h = self.inner(torch.cat((z, t.expand(*z.shape[:-1], 1)), -1)).tanh()
        diagonal = (self.inner.weight[:, :-1] * self.outer.weight.T).sum(1)
        return self.outer(h), (1.0 - h.square()) @ diagonal

    def forward(self, t: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        f, trace = self.velocity(t, state["z"])
        return {"z": f, "logp": -trace, "energy": 0.5 * f.square().mean(-1)}


def flow_problem(
    batch: int = 32, size: int = 2, width: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GradientProblem:
    """A flow on [0, 1] from random data to a standard normal: negative log-likelihood and a little kinetic energy."""
    field = Flow(size, width, seed)
    z0 = (1.5 * normal((batch, size), torch.Generator().manual_seed(seed + 1)) + 0.5).to(dtype)

    def start() -> dict[str, Tensor]:
        return {"z": z0, "logp": z0.new_zeros(batch), "energy": z0.new_zeros(batch)}

    def loss(ys: dict[str, Tensor]) -> Tensor:
        z, logp, energy = (ys[name][-1] for name in ("z", "logp", "energy"))
        base = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        return (0.01 * energy - base + logp).mean()

    return GradientProblem(
        field=field.to(dtype),
        start=start,
        ts=torch.tensor([0.0, 1.0], dtype=torch.float64),
        loss=loss,
        modules=nn.ModuleList([field]),
        rtol=1e-5,
        atol=1e-5,
    )
