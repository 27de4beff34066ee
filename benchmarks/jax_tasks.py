"""The tasks in JAX, with the arrays of the PyTorch tasks; each field is written in the form that is fastest in JAX.

A task is a function (parameters, data, shift, solve) to a loss. The shift is zero and is added to the initial value, so
its gradient is the gradient with respect to the initial value. Fields receive their parameters through `args`, as
BacksolveAdjoint requires, and their data by closure, so that it does not differentiate with respect to the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Arrays = dict[str, Array]
Data = dict[str, np.ndarray]
#: (field, y0, ts, args) to the outputs: at all ts, or only at the last time if there are two.
Solve = Callable[[Callable[..., Any], Any, np.ndarray, Arrays], Any]
TaskFunction = Callable[[Arrays, Data, Any, Solve], Array]


def under(parameters: Arrays, prefix: str) -> Arrays:
    """The parameters of one module, by their names within it."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def network(parameters: Arrays, activation: Callable[[Array], Array], x: Array) -> Array:
    """torch.nn.Sequential of linear layers, at even indices, and activations."""
    indices = sorted({int(name.split(".")[0]) for name in parameters})
    for i in indices:
        x = activation(x) if i else x
        x = x @ parameters[f"{i}.weight"].T + parameters[f"{i}.bias"]
    return x


def small(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    def field(t: Array, y: Array, args: Arrays) -> Array:
        return network(args, jnp.tanh, y)

    y1 = solve(field, data["y0"] + shift, data["ts"], under(parameters, "0.net."))
    return jnp.square(y1).mean()


def small_shift(parameters: Arrays, data: Data) -> Array:
    return jnp.zeros_like(data["y0"])


def cde(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    slopes = data["slopes"]
    batch, channels = slopes.shape[1:]
    hidden = parameters["1.bias"].shape[0]

    def field(t: Array, z: Array, args: Arrays) -> Array:
        # The knots are 0, 1, 2, …; the field is never evaluated exactly on a knot.
        interval = jnp.clip(jnp.ceil(t).astype(int) - 1, 0, len(slopes) - 1)
        slope = lax.dynamic_index_in_dim(jnp.asarray(slopes), interval, keepdims=False)
        matrix = jnp.tanh(network(args, jax.nn.relu, z)).reshape(batch, hidden, channels)
        return jnp.einsum("bhc,bc->bh", matrix, slope)

    z0 = data["x0"] @ parameters["1.weight"].T + parameters["1.bias"] + shift
    z1 = solve(field, z0, data["ts"], under(parameters, "0.net."))
    scores = jax.nn.log_softmax(z1 @ parameters["2.weight"].T + parameters["2.bias"])
    return -jnp.take_along_axis(scores, jnp.asarray(data["labels"])[:, None], 1).mean()


def cde_shift(parameters: Arrays, data: Data) -> Array:
    return jnp.zeros((len(data["x0"]), len(parameters["1.bias"])), data["x0"].dtype)


FLOOR = 0.1  # ε of M⁻¹ = LLᵀ + ε I


def symplectic(t: Array, x: Array, args: Arrays) -> Array:
    """Hamilton's equations for two angles with torques, in (cos q, sin q, q′, u), as in `SymplecticField`."""
    angles, w, u = x[:, :4], x[:, 4:6], x[:, 6:]
    turning = jnp.concatenate((-angles[:, 2:], angles[:, :2]), 1).reshape(-1, 2, 2)  # ∂(cos q, sin q)/∂q
    dangles = (turning * w[:, None]).reshape(-1, 4)
    mass = lambda c: network(under(args, "inverse_mass."), jax.nn.softplus, c)
    potential = lambda c: network(under(args, "potential."), jax.nn.softplus, c)

    def factor(entries: Array) -> Array:
        a, c, b = entries[:, 0], entries[:, 1], entries[:, 2]
        return jnp.stack((a, jnp.zeros_like(a), b, c), 1).reshape(-1, 2, 2)

    # XLA merges the evaluations of the JVP and the VJP into one.
    entries, dentries = jax.jvp(mass, (angles,), (dangles,))
    _, vjp_fn = jax.vjp(lambda c: (mass(c), potential(c)), angles)
    L, dL = factor(entries), factor(dentries)
    A = L @ L.mT + FLOOR * jnp.eye(2, dtype=x.dtype)
    a, o, c = A[:, 0, 0], A[:, 0, 1], A[:, 1, 1]
    p = jnp.stack((c * w[:, 0] - o * w[:, 1], a * w[:, 1] - o * w[:, 0]), 1)[..., None] / (a * c - o * o)[:, None, None]

    # With v = Lᵀp and p held fixed, H = ½|v|² + ½ε|p|² + V has ∂H/∂L = p vᵀ.
    v = L.mT @ p
    dHdL = p * v.mT
    weights = jnp.stack((dHdL[:, 0, 0], dHdL[:, 1, 1], dHdL[:, 1, 0]), 1)
    dH = vjp_fn((weights, jnp.ones((len(x), 1), x.dtype)))[0]
    dV = (turning * dH.reshape(-1, 2, 2)).sum(1)
    g = network(under(args, "input_matrix."), jax.nn.softplus, angles).reshape(-1, 2, 2)
    dp = g @ u[..., None] - dV[..., None]
    dw = L @ (L.mT @ dp + dL.mT @ p) + FLOOR * dp + dL @ v
    return jnp.concatenate((dangles, dw[..., 0], jnp.zeros_like(u)), 1)


def pendulum(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    windows = data["windows"]
    xs = solve(symplectic, windows[:, 0] + shift, data["ts"], under(parameters, "0."))
    return jnp.square(xs - windows.swapaxes(0, 1)).mean()


def pendulum_shift(parameters: Arrays, data: Data) -> Array:
    return jnp.zeros_like(data["windows"][:, 0])


def convolve(x: Array | np.ndarray, weight: Array) -> Array:
    """A padded 3×3 convolution of (batch, height, width, channels) with PyTorch's weights, as nine shifted products.

    XLA's convolution is faster on its own, but on a CPU it is much slower inside a loop, and a solver is a loop. Matrix
    products do not have this problem.
    """
    batch, height, width, channels = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = lambda i, j: padded[:, i : i + height, j : j + width].reshape(-1, channels) @ weight[:, :, i, j].T
    total = shifted(0, 0)
    for offset in range(1, 9):
        total = total + shifted(*divmod(offset, 3))
    return total.reshape(batch, height, width, -1)


def image_field(noise: np.ndarray) -> Callable[..., Any]:
    """The field of `ImageField` for the given noise."""
    ones = np.ones((1, *noise.shape[1:3], 1), noise.dtype)

    def velocity(t: Array, z: Array, args: Arrays) -> Array:
        for i in range(4):
            weight, bias = args[f"{i}.weight"], args[f"{i}.bias"]
            z = jax.nn.softplus(z) if i else z
            z = convolve(z, weight[:, 1:]) + (bias + t * convolve(ones, weight[:, :1]))
        return z

    def field(t: Array, state: tuple[Array, Array], args: Arrays) -> tuple[Array, Array]:
        f, vjp_fn = jax.vjp(lambda z: velocity(t, z, args), state[0])
        return f, -(vjp_fn(jnp.asarray(noise))[0] * noise).sum((1, 2, 3))

    return field


def squeezed(z: Array) -> Array:
    """2×2 squares of pixels to channels in the order (old channel, row, column), as PyTorch's pixel_unshuffle."""
    batch, height, width, channels = z.shape
    z = z.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return z.transpose(0, 1, 3, 5, 2, 4).reshape(batch, height // 2, width // 2, 4 * channels)


def flow(parameters: Arrays, data: Data, shift: tuple[Array, Array], solve: Solve) -> Array:
    z, delta = jnp.moveaxis(data["z0"] + shift[0], 1, -1), shift[1]
    ts = np.array([0.0, 1.0], np.float32)
    for scale in range(3):
        z = squeezed(z) if scale else z
        field = image_field(np.moveaxis(data[f"noise{scale}"], 1, -1))
        z, delta = solve(field, (z, delta), ts, under(parameters, f"{scale}.layers."))
    log_base = -0.5 * (jnp.square(z) + math.log(2.0 * math.pi)).sum((1, 2, 3))
    return (delta - log_base).mean() / math.prod(z.shape[1:])


def flow_shift(parameters: Arrays, data: Data) -> tuple[Array, Array]:
    z0 = data["z0"]
    return jnp.zeros_like(z0), jnp.zeros(len(z0), z0.dtype)


#: By the first word of a problem's name: the task, and the function that makes its shift.
TASKS: dict[str, tuple[TaskFunction, Callable[[Arrays, Data], Any]]] = {
    "small": (small, small_shift),
    "cde": (cde, cde_shift),
    "pendulum": (pendulum, pendulum_shift),
    "flow": (flow, flow_shift),
}
