"""Runs diffrax: one jitted program for the loss and its gradient, or for the outputs of a task without a gradient.

Tolerances are arguments of the program, so another tolerance needs no other program. The exception are adjoints that
allocate memory for all steps or iterate over all of them: for these a first solve counts the steps, and `max_steps` is
set slightly above, which is faster.
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

from .jax_peer_tasks import task_named
from .jax_tasks import Arrays, Data
from .settings import Contender, step_size

NO_LIMIT = 100_000  # max_steps of solves that must not reach it
#: `max_steps` of every solve, or the fixed step size.
Bounds = tuple[int, ...]


def bound(steps: int) -> int:
    """1.25 times the counted steps, rounded up to a multiple of 16."""
    return 16 * math.ceil(1.25 * steps / 16)


class JaxRunner:
    """Loss and gradient of a task as one program, without a separate forward pass."""

    def __init__(
        self,
        problem: str,
        arrays: Mapping[str, np.ndarray],
        rtol: float,
        atol: float,
        contender: Contender,
        differentiate: bool = True,
    ):
        self.options, self.rtol, self.atol, self.differentiate = contender.options, rtol, atol, differentiate
        self.task, shift = task_named(problem, differentiate)
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
        self.shift = shift(self.parameters, self.data)
        self.count = jax.jit(self.counted)
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.steps: dict[float, list[int]] = {}
        self.results: dict[float, Any] = {}

    # Step-size control, solvers and adjoints.

    def tolerances(self, factor: float) -> tuple[Array, Array]:
        return jnp.asarray(factor * self.rtol, jnp.float32), jnp.asarray(factor * self.atol, jnp.float32)

    def controller(self, tolerances: tuple[Any, Any], norm: Callable[[Any], Any] | None = None) -> Any:
        options: dict[str, Any] = {} if norm is None else {"norm": norm}
        controller = diffrax.PIDController(rtol=tolerances[0], atol=tolerances[1], **options)
        jumps = self.data.get("jumps")
        return (
            controller
            if jumps is None
            else diffrax.ClipStepSizeController(controller, jump_ts=jnp.asarray(jumps[1:-1]))
        )

    def solver(self) -> Any:
        return getattr(diffrax, self.options["solver"])()

    def adjoint(self, max_steps: int, tolerances: tuple[Any, Any]) -> Any:
        kind = getattr(diffrax, self.options.get("adjoint", "RecursiveCheckpointAdjoint"))
        if kind is diffrax.BacksolveAdjoint:
            controller = self.controller(tolerances, diffrax.adjoint_rms_seminorm)
            return kind(solver=self.solver(), stepsize_controller=controller, max_steps=NO_LIMIT)
        kept = max_steps if self.options.get("keep", False) else self.options.get("checkpoints")
        return kind() if kept is None else kind(checkpoints=kept)

    def solution(
        self, field: Any, y0: Any, ts: np.ndarray, args: Arrays, max_steps: int, tolerances: Any, adjoint: Any
    ) -> Any:
        only_end = ts.shape[0] == 2
        fixed = "fixed" in self.options
        grid = diffrax.StepTo(ts=jnp.linspace(ts[0], ts[-1], max_steps + 1)) if fixed else None
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            self.solver(),
            t0=ts[0],
            t1=ts[-1],
            dt0=None,
            y0=y0,
            args=args,
            saveat=diffrax.SaveAt(t1=True) if only_end else diffrax.SaveAt(ts=jnp.asarray(ts)),
            stepsize_controller=self.controller(tolerances) if grid is None else grid,
            adjoint=adjoint,
            max_steps=max_steps,
        )

    # Programs.

    def counted(self, parameters: Arrays, shift: Any, tolerances: Any) -> list[Array]:
        """The number of steps of every solve of the task, in order."""
        steps: list[Array] = []

        def solve(field: Any, y0: Any, ts: np.ndarray, args: Arrays) -> Any:
            adjoint = diffrax.RecursiveCheckpointAdjoint()
            solution = self.solution(field, y0, ts, args, NO_LIMIT, tolerances, adjoint)
            steps.append(solution.stats["num_steps"])
            return self.outputs(solution, ts)

        self.task(parameters, self.data, shift, solve)
        return steps

    def bounds(self, factor: float) -> Bounds:
        if "fixed" in self.options:
            length = float(self.data["ts"][-1] - self.data["ts"][0])
            self.steps[factor] = [round(length / step_size(self.options, factor))]
            return tuple(self.steps[factor])
        if factor not in self.steps:
            self.steps[factor] = [int(n) for n in self.count(self.parameters, self.shift, self.tolerances(factor))]
        if not self.differentiate or self.options["adjoint"] == "BacksolveAdjoint":
            return tuple(NO_LIMIT for _ in self.steps[factor])
        return tuple(bound(n) for n in self.steps[factor])

    def program(self, bounds: Bounds) -> Callable[..., Any]:
        if bounds not in self.programs:

            def loss(parameters: Arrays, shift: Any, tolerances: Any) -> Array:
                each = iter(bounds)

                def solve(field: Any, y0: Any, ts: np.ndarray, args: Arrays) -> Any:
                    most = next(each)
                    adjoint = self.adjoint(most, tolerances)
                    return self.outputs(self.solution(field, y0, ts, args, most, tolerances, adjoint), ts)

                return self.task(parameters, self.data, shift, solve)

            function = jax.value_and_grad(loss, argnums=(0, 1)) if self.differentiate else loss
            self.programs[bounds] = jax.jit(function)
        return self.programs[bounds]

    @staticmethod
    def outputs(solution: Any, ts: np.ndarray) -> Any:
        return jax.tree.map(lambda y: y[-1], solution.ys) if ts.shape[0] == 2 else solution.ys

    def run(self, factor: float = 1.0) -> dict[str, float]:
        program, tolerances = self.program(self.bounds(factor)), self.tolerances(factor)
        begin = time.perf_counter()
        found = jax.block_until_ready(program(self.parameters, self.shift, tolerances))
        timing = {"seconds": time.perf_counter() - begin}
        self.results[factor] = found
        return {**timing, "loss": float(found[0])} if self.differentiate else timing

    # Results.

    def gradient(self, factor: float = 1.0) -> np.ndarray:
        """The gradient of the last pass at this factor, or its outputs."""
        if not self.differentiate:
            return np.asarray(self.results[factor]).ravel()
        by_name, shift = self.results[factor][1]
        leaves = [by_name[name] for name in self.parameters] + jax.tree.leaves(shift)
        return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])

    def counts(self, factor: float = 1.0) -> dict[str, int]:
        return {"forward_steps": sum(self.steps[factor])}

    def needed(self, factor: float = 1.0) -> list[dict[str, int]]:
        return []  # diffrax reports steps only

    def field_costs(self) -> list[dict[str, float]]:
        """Seconds of one jitted evaluation of every solve's field, and of its VJP with what surrounds it."""
        from .minima import fastest

        found: list[dict[str, float]] = []

        def solve(field: Any, y0: Any, ts: np.ndarray, args: Arrays) -> Any:
            t = jnp.asarray(0.5 * (ts[0] + ts[-1]), jnp.float32)
            evaluate = jax.jit(field)
            cost = {"evaluation": fastest(lambda: jax.block_until_ready(evaluate(t, y0, args)))}
            if self.differentiate:

                def product(t: Array, y: Any, args: Arrays) -> Any:
                    slope, vjp_fn = jax.vjp(lambda y, args: field(t, y, args), y, args)
                    return vjp_fn(jax.tree.map(jnp.ones_like, slope))

                both = jax.jit(product)
                with_evaluation = fastest(lambda: jax.block_until_ready(both(t, y0, args)))
                cost["vjp"] = max(with_evaluation - cost["evaluation"], 0.0)
            found.append(cost)
            constant = lambda y: y if ts.shape[0] == 2 else jnp.broadcast_to(y, (ts.shape[0], *y.shape))
            return jax.tree.map(constant, y0)

        self.task(self.parameters, self.data, self.shift, solve)
        return found

    def versions(self) -> dict[str, str]:
        return {library: version(library) for library in ("jax", "diffrax")}
