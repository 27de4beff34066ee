"""The peers' own problems in JAX, as in `jax_tasks`. Those without a gradient return outputs instead of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .jax_tasks import TASKS, Arrays, Data, Solve, TaskFunction, network, under


def from_y0(parameters: Arrays, data: Data) -> Array:
    return jnp.zeros_like(data["y0"])


def later(ys: Array, ts: np.ndarray) -> Array:
    """The outputs after the initial value; with two times a solve returns only the last."""
    return ys[None] if ts.shape[0] == 2 else ys[1:]


def diffrax_outputs(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    def field(t: Array, y: Array, args: Arrays) -> Array:
        return jnp.tanh(network(args, jax.nn.softplus, y))

    return later(solve(field, data["y0"] + shift, data["ts"], under(parameters, "0.net.0.")), data["ts"])


def diffrax_loss(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    return jnp.square(diffrax_outputs(parameters, data, shift, solve)).mean()


def spiral(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    def field(t: Array, y: Array, args: Arrays) -> Array:
        return network(args, jnp.tanh, y * y * y)

    ys = solve(field, data["y0"] + shift, data["ts"], under(parameters, "0.net."))
    return jnp.square(ys - data["targets"]).sum()


def reversible(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    def field(t: Array, y: Array, args: Arrays) -> Array:
        cos, sin, w = y[..., :2], y[..., 2:4], y[..., 4:]
        return jnp.concatenate((-sin * w, cos * w, network(args, jnp.tanh, y)), -1)

    ys = solve(field, data["y0"] + shift, data["ts"], under(parameters, "0.net."))
    return jnp.square(ys - data["targets"]).mean()


def sampling(parameters: Arrays, data: Data, shift: Array, solve: Solve) -> Array:
    frequencies = np.pi * 2.0 ** np.arange(4, dtype=np.float32)

    def field(t: Array, y: Array, args: Arrays) -> Array:
        phase = t * frequencies
        features = jnp.broadcast_to(jnp.concatenate((jnp.sin(phase), jnp.cos(phase))), (*y.shape[:-1], 8))
        return network(args, jax.nn.silu, jnp.concatenate((y, features.astype(y.dtype)), -1))

    return later(solve(field, data["y0"] + shift, data["ts"], under(parameters, "0.net.")), data["ts"])


PEER_TASKS: dict[str, tuple[TaskFunction, Callable[[Arrays, Data], Any]]] = {
    "diffrax": (diffrax_loss, from_y0),
    "spiral": (spiral, from_y0),
    "reversible": (reversible, from_y0),
    "sampling": (sampling, from_y0),
}


def task_named(problem: str, differentiate: bool) -> tuple[TaskFunction, Callable[[Arrays, Data], Any]]:
    """The task of a problem, and the function that makes its shift."""
    word = problem.split("-")[0]
    if word == "diffrax" and not differentiate:
        return diffrax_outputs, from_y0
    return (TASKS | PEER_TASKS)[word]
