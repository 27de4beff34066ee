"""Runs diffrax: one jitted program for the loss and its gradient.

A first solve counts the steps, and `max_steps` is set slightly above. Such a tight bound helps the adjoints that
allocate memory for all steps, or that iterate over all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .contenders import Contender
from .jax_tasks import TASKS, Arrays, Data

NO_LIMIT = 100_000  # max_steps of solves that must not reach it


def bound(steps: int) -> int:
    """1.25 times the counted steps, rounded up to a multiple of 16."""
    return 16 * math.ceil(1.25 * steps / 16)


class JaxRunner:
    """Loss and gradient of a task as one program, without a separate forward pass."""

    def __init__(self, problem: str, arrays: Mapping[str, np.ndarray], rtol: float, atol: float, contender: Contender):
        self.options, self.rtol, self.atol = contender.options, rtol, atol
        self.task, shift = TASKS[problem.split("-")[0]]
        self.parameters: Arrays = {
            name.removeprefix("parameter:"): jnp.asarray(x)
            for name, x in arrays.items()
            if name.startswith("parameter:")
        }
        # NumPy constants: BacksolveAdjoint must not close over values that a JAX program computes, even from constants.
        self.data: Data = {
            name.removeprefix("data:"): x.astype(np.float32) if x.dtype.kind == "f" else x
            for name, x in arrays.items()
            if name.startswith("data:")
        }
        self.controllers = {norm: self.controller(norm) for norm in (None, diffrax.adjoint_rms_seminorm)}
        self.shift = shift(self.parameters, self.data)
        self.steps = [int(n) for n in jax.jit(self.counted)(self.parameters, self.shift)]
        self.program = jax.jit(jax.value_and_grad(self.loss, argnums=(0, 1)))
        self.grads: tuple[Any, Any] = ({}, ())

    def controller(self, norm: Callable[[Any], Any] | None = None) -> Any:
        options: dict[str, Any] = {} if norm is None else {"norm": norm}
        controller = diffrax.PIDController(rtol=self.rtol, atol=self.atol, **options)
        jumps = self.data.get("jumps")
        return (
            controller
            if jumps is None
            else diffrax.ClipStepSizeController(controller, jump_ts=jnp.asarray(jumps[1:-1]))
        )

    def solver(self) -> Any:
        return getattr(diffrax, self.options["solver"])()

    def adjoint(self, max_steps: int) -> Any:
        kind = getattr(diffrax, self.options["adjoint"])
        if kind is diffrax.BacksolveAdjoint:
            controller = self.controllers[diffrax.adjoint_rms_seminorm]
            return kind(solver=self.solver(), stepsize_controller=controller, max_steps=NO_LIMIT)
        return kind(checkpoints=max_steps) if self.options.get("keep", False) else kind()

    def solution(self, field: Any, y0: Any, ts: np.ndarray, args: Arrays, max_steps: int, adjoint: Any) -> Any:
        only_end = ts.shape[0] == 2
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            self.solver(),
            t0=ts[0],
            t1=ts[-1],
            dt0=None,
            y0=y0,
            args=args,
            saveat=diffrax.SaveAt(t1=True) if only_end else diffrax.SaveAt(ts=jnp.asarray(ts)),
            stepsize_controller=self.controllers[None],
            adjoint=adjoint,
            max_steps=max_steps,
        )

    def counted(self, parameters: Arrays, shift: Any) -> list[Array]:
        """The number of steps of every solve of the task, in order."""
        steps: list[Array] = []

        def solve(field: Any, y0: Any, ts: np.ndarray, args: Arrays) -> Any:
            solution = self.solution(field, y0, ts, args, NO_LIMIT, diffrax.RecursiveCheckpointAdjoint())
            steps.append(solution.stats["num_steps"])
            return self.outputs(solution, ts)

        self.task(parameters, self.data, shift, solve)
        return steps

    def loss(self, parameters: Arrays, shift: Any) -> Array:
        bounds = iter([bound(n) for n in self.steps])

        def solve(field: Any, y0: Any, ts: np.ndarray, args: Arrays) -> Any:
            max_steps = next(bounds)
            return self.outputs(self.solution(field, y0, ts, args, max_steps, self.adjoint(max_steps)), ts)

        return self.task(parameters, self.data, shift, solve)

    @staticmethod
    def outputs(solution: Any, ts: np.ndarray) -> Any:
        return jax.tree.map(lambda y: y[-1], solution.ys) if ts.shape[0] == 2 else solution.ys

    def run(self) -> dict[str, float]:
        begin = time.perf_counter()
        loss, self.grads = jax.block_until_ready(self.program(self.parameters, self.shift))
        return {"seconds": time.perf_counter() - begin, "loss": float(loss)}

    def gradient(self) -> np.ndarray:
        by_name, shift = self.grads
        leaves = [by_name[name] for name in self.parameters] + jax.tree.leaves(shift)
        return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])

    def counts(self) -> dict[str, int]:
        return {"forward_steps": sum(self.steps)}

    def versions(self) -> dict[str, str]:
        return {library: version(library) for library in ("jax", "diffrax")}
