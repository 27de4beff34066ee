"""The linear systems of implicit methods: Jacobians, their factorisations, and a Krylov method that needs neither."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._field.linearisation import Linearisation
from .._untyped import block_diag, lu_factor_ex, lu_solve, vector_norm

LinearSolver = Literal["auto", "dense", "batched", "gmres"]
LINEAR_SOLVERS = ("auto", "dense", "batched", "gmres")
#: Eigenvalues of the matrix of a method with left and right eigenvectors; of a complex pair only one.
Spectrum = Sequence[tuple[complex, Sequence[complex], Sequence[complex]]]
#: `"auto"` stores no Jacobian with more rows than this.
DENSE_LIMIT = 1024
#: Krylov vectors between restarts, and how many restarts there may be.
RESTART, RESTARTS = 40, 50


class NotSeparable(ValueError):
    """The samples of a batch depend on each other."""


class Factor(ABC):
    """A solver for (I − s·J) x = r, where r is a vector of real or complex numbers."""

    @abstractmethod
    def solve(self, r: Tensor) -> Tensor: ...

    @abstractmethod
    def solve_transposed(self, r: Tensor) -> Tensor: ...


class Jacobian(ABC):
    """∂f/∂y at some state, in the form that the linear solver needs."""

    @abstractmethod
    def factorise(self, scale: complex) -> Factor | None:
        """A solver for I − scale·J, or `None` if that is singular."""


class LU(Factor):
    """By an LU factorisation of (B, d, d) diagonal blocks."""

    def __init__(self, lu: Tensor, pivots: Tensor):
        self._lu, self._pivots = lu, pivots

    def solve(self, r: Tensor) -> Tensor:
        columns = r.to(self._lu.dtype).reshape(*self._lu.shape[:2], 1)
        return lu_solve(self._lu, self._pivots, columns).reshape(-1)

    def solve_transposed(self, r: Tensor) -> Tensor:
        columns = r.to(self._lu.dtype).reshape(*self._lu.shape[:2], 1).conj()
        return lu_solve(self._lu, self._pivots, columns, adjoint=True).conj().reshape(-1)


class BlockJacobian(Jacobian):
    """Diagonal blocks (B, d, d): one for each sample of a separable batch, or a single one."""

    def __init__(self, blocks: Tensor):
        self.blocks = blocks

    def factorise(self, scale: complex) -> LU | None:
        return factorised(self.blocks, scale)


def factorised(blocks: Tensor, scale: complex) -> LU | None:
    """The LU factorisation of I − scale·J."""
    factor = scale.real if scale.imag == 0.0 else scale
    matrix = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device) - factor * blocks
    lu, pivots, info = lu_factor_ex(matrix)
    singular = bool(info.any()) or not bool(torch.isfinite(lu).all())
    return None if singular else LU(lu, pivots)


class MatrixFree(Jacobian):
    """Products with the Jacobian only."""

    def __init__(self, apply: Callable[[Tensor], Tensor], apply_transposed: Callable[[Tensor], Tensor]):
        self.apply, self.apply_transposed = apply, apply_transposed
        #: How small the residual of a linear system has to be, relative to its right-hand side.
        self.tolerance = 1e-2

    def factorise(self, scale: complex) -> Factor | None:
        return Krylov(self, scale)


class Krylov(Factor):
    """By GMRES, with nothing factorised."""

    def __init__(self, jacobian: MatrixFree, scale: complex):
        self._jacobian, self._scale = jacobian, scale

    def _solve(self, product: Callable[[Tensor], Tensor], r: Tensor) -> Tensor:
        scale = self._scale
        if scale.imag == 0.0 and not r.is_complex():
            return gmres(lambda v: v - scale.real * product(v), r, self._jacobian.tolerance)
        # A complex system as a real one of twice the size.
        pairs = torch.view_as_real(r if r.is_complex() else torch.complex(r, torch.zeros_like(r)))
        n = len(r)

        def apply(v: Tensor) -> Tensor:
            re, im = v[:n], v[n:]
            jre, jim = product(re), product(im)
            return torch.cat([re - scale.real * jre + scale.imag * jim, im - scale.real * jim - scale.imag * jre])

        x = gmres(apply, torch.cat([pairs[:, 0], pairs[:, 1]]), self._jacobian.tolerance)
        return torch.complex(x[:n], x[n:])

    def solve(self, r: Tensor) -> Tensor:
        return self._solve(self._jacobian.apply, r)

    def solve_transposed(self, r: Tensor) -> Tensor:
        return self._solve(self._jacobian.apply_transposed, r)


class AdjointJacobian(Jacobian):
    """The Jacobian diag(0, −Jᵀ) of an adjoint equation in (z, a), where z comes from the forward solution."""

    def __init__(self, forward: Jacobian):
        self._forward = forward

    def factorise(self, scale: complex) -> Factor | None:
        factor = self._forward.factorise(-scale)
        return None if factor is None else AdjointFactor(factor)


class AdjointFactor(Factor):
    """I + s·Jᵀ for the second half of a vector, the identity for the first."""

    def __init__(self, factor: Factor):
        self._factor = factor

    def solve(self, r: Tensor) -> Tensor:
        z, a = r.chunk(2)
        a = self._factor.solve_transposed(a)
        return torch.cat([z.to(a.dtype), a])

    def solve_transposed(self, r: Tensor) -> Tensor:
        z, a = r.chunk(2)
        a = self._factor.solve(a)
        return torch.cat([z.to(a.dtype), a])


def jacobian_of(linearisation: Linearisation, choice: LinearSolver, count: Callable[[], None]) -> Jacobian:
    """The Jacobian in the form that was chosen; `count` is told about products with it."""
    y, size = linearisation.y, linearisation.size
    if choice in ("auto", "batched") and y.ndim > 1 and len(y) > 1:
        blocks = linearisation.blocks()
        if blocks is not None:
            return BlockJacobian(blocks)
    if choice == "batched":
        raise NotSeparable(
            "linear_solver: 'batched' needs a state of shape (B, ...) whose samples do not depend on each other; the "
            f"field couples them or the state, of shape {tuple(y.shape)}, has no batch. Pass 'dense' or 'gmres'."
        )
    if choice == "dense" or (choice == "auto" and size <= DENSE_LIMIT):
        return BlockJacobian(linearisation.matrix()[None])

    def counted(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def apply(v: Tensor) -> Tensor:
            count()
            return product(v)

        return apply

    return MatrixFree(counted(linearisation.jvp), counted(linearisation.vjp))


class StageFactors:
    """A solver for (I − dt·A⊗J) x = r by the eigenvalues of A: one factorisation for each, or for each complex pair."""

    def __init__(self, spectrum: Spectrum, factors: Sequence[Factor]):
        self._spectrum = spectrum
        self.factors = factors

    @classmethod
    def of(cls, jacobian: Jacobian, spectrum: Spectrum, dt: float) -> StageFactors | None:
        factors = [jacobian.factorise(dt * value) for value, _, _ in spectrum]
        found = [factor for factor in factors if factor is not None]
        return cls(spectrum, found) if len(found) == len(factors) else None

    @property
    def real(self) -> Factor:
        """The factorisation for the real eigenvalue."""
        return next(f for f, (value, _, _) in zip(self.factors, self._spectrum, strict=True) if value.imag == 0.0)

    def solve(self, r: Tensor) -> Tensor:
        """For right-hand sides of all stages, stacked."""
        if len(r) == 1:
            return self.factors[0].solve(r[0])[None]
        total = torch.zeros_like(r)
        for (value, left, right), factor in zip(self._spectrum, self.factors, strict=True):
            if value.imag == 0.0:
                x = factor.solve(_weighted([w.real for w in left], r))
                total += torch.stack([w.real * x for w in right])
            else:
                x = factor.solve(_weighted(left, r))
                total += 2.0 * torch.stack([(w * x).real for w in right])
        return total


def _weighted(weights: Sequence[complex], r: Tensor) -> Tensor:
    total = weights[0] * r[0]
    for w, x in zip(weights[1:], r[1:], strict=True):
        total = total + w * x
    return total


class StageSystem:
    """(I − dt·[aᵢⱼ Jⱼ]) x = r with the Jacobian of every stage, and its transpose: for derivatives of the stages."""

    def __init__(self, jacobians: Sequence[Jacobian], a: Sequence[Sequence[float]], dt: float, tolerance: float):
        self._jacobians, self._a, self._dt, self._tolerance = jacobians, a, dt, tolerance
        self._lu: LU | None = None
        blocks = [x.blocks for x in jacobians if isinstance(x, BlockJacobian)]
        if len(blocks) == len(jacobians):
            # In a batch, all stages are treated as coupled if one of them is.
            if len({x.shape for x in blocks}) > 1:
                blocks = [x if len(x) == 1 else block_diag(*x)[None] for x in blocks]
            self._count = len(blocks[0])
            rows = [torch.cat([a_ij * x for a_ij, x in zip(row, blocks, strict=True)], -1) for row in a]
            self._lu = factorised(torch.cat(rows, -2), dt)
            if self._lu is None:
                raise RuntimeError("the derivative of an implicit step does not exist: its linear system is singular")

    def solve(self, r: Tensor, transposed: bool) -> Tensor:
        if self._lu is None:
            return self._iterated(r, transposed)
        stages = len(r)
        # (stages, B, d) to (B, stages, d) and back.
        columns = r.reshape(stages, self._count, -1).transpose(0, 1)
        x = self._lu.solve_transposed(columns) if transposed else self._lu.solve(columns)
        return x.reshape(columns.shape).transpose(0, 1).reshape(r.shape)

    def _iterated(self, r: Tensor, transposed: bool) -> Tensor:
        a, dt, shape = self._a, self._dt, r.shape

        def apply(x: Tensor) -> Tensor:
            xs = x.reshape(shape)
            if transposed:
                sums = [_weighted([row[j] for row in a], xs) for j in range(len(a))]
                products = [_matrix_free(jac).apply_transposed(s) for jac, s in zip(self._jacobians, sums, strict=True)]
            else:
                slopes = torch.stack([_matrix_free(j).apply(v) for j, v in zip(self._jacobians, xs, strict=True)])
                products = [_weighted(row, slopes) for row in a]
            return x - dt * torch.cat(products)

        b = r.reshape(-1)
        x = gmres(apply, b, self._tolerance)
        # A residual that rounding leaves in a large system is larger than the tolerance, but far below this limit.
        left, limit = _norm(b - apply(x)), math.sqrt(torch.finfo(b.dtype).eps) * _norm(b)
        if left > limit:
            raise RuntimeError(
                "linear_solver: GMRES does not solve the linear system of a derivative (it leaves "
                f"{left / _norm(b):.1g} of the right-hand side), so that the gradient would be wrong. Pass "
                "linear_solver='dense', or take shorter steps, which make the system easier"
            )
        return x.reshape(shape)


def _matrix_free(jacobian: Jacobian) -> MatrixFree:
    assert isinstance(jacobian, MatrixFree)
    return jacobian


def given_jacobian(matrix: Any, y: Tensor, choice: LinearSolver) -> BlockJacobian:
    """The Jacobian that the user's function returned."""
    size = y.numel()
    if y.is_complex():
        raise ValueError("jacobian: a complex state is solved for as pairs of real numbers; leave jacobian= out")
    shapes: list[tuple[int, ...]] = [(size, size)]
    if y.ndim > 1:
        shapes.append((len(y), size // len(y), size // len(y)))
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) not in shapes:
        found = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"jacobian: expected a tensor of shape {' or '.join(map(str, shapes))}, found {found}")
    if choice == "batched" and matrix.ndim == 2:
        raise ValueError(f"jacobian: linear_solver='batched' expects shape {shapes[-1]}, found {tuple(matrix.shape)}")
    if matrix.is_complex():
        raise TypeError(f"jacobian: expected a real matrix for a real state, found {matrix.dtype}")
    matrix = matrix.detach().to(y)
    return BlockJacobian(matrix if matrix.ndim == 3 else matrix[None])


def gmres(apply: Callable[[Tensor], Tensor], b: Tensor, tolerance: float) -> Tensor:
    """Solve A x = b to ‖b − A x‖ ≤ tolerance·‖b‖ with products A v only: GMRES with restarts.

    Memory is `RESTART` vectors. Saad and Schultz, *GMRES: a generalized minimal residual algorithm* (1986).
    """
    x, r = torch.zeros_like(b), b
    size = _norm(b)
    target = tolerance * size
    for _ in range(RESTARTS):
        if not target < size < math.inf:
            break
        x = x + _correction(apply, r, size, target)
        before, r = size, b - apply(x)
        size = _norm(r)
        if size > 0.9 * before:  # no progress that would pay
            break
    return x


def _correction(apply: Callable[[Tensor], Tensor], r: Tensor, size: float, target: float) -> Tensor:
    """The x of a Krylov space with the least residual. The basis is freed before the next one is built."""
    basis, triangle, rotated = _krylov(apply, r, size, target)
    x = torch.zeros_like(r)
    for q, weight in zip(basis, _substituted(triangle, rotated), strict=False):
        x = torch.add(x, q, alpha=weight)
    return x


def _krylov(
    apply: Callable[[Tensor], Tensor], r: Tensor, size: float, target: float
) -> tuple[list[Tensor], list[list[float]], list[float]]:
    """An orthonormal basis, and the least-squares problem over it: a triangle by columns, and the right-hand side."""
    basis, rotated = [r / size], [size]
    triangle: list[list[float]] = []
    rotations: list[tuple[float, float]] = []
    while len(triangle) < RESTART:
        v = apply(basis[-1])
        column: list[float] = []
        for q in basis:  # modified Gram–Schmidt
            column.append(float(torch.dot(q, v)))
            v = torch.add(v, q, alpha=-column[-1])
        below = _norm(v)
        for i, (cos, sin) in enumerate(rotations):
            column[i], column[i + 1] = cos * column[i] + sin * column[i + 1], cos * column[i + 1] - sin * column[i]
        length = math.hypot(column[-1], below)
        if not 0.0 < length < math.inf:
            break
        cos, sin = column[-1] / length, below / length
        column[-1] = length
        rotations.append((cos, sin))
        triangle.append(column)
        rotated[-1:] = [cos * rotated[-1], -sin * rotated[-1]]
        if abs(rotated[-1]) <= target or below <= 1e-15 * length:
            break
        basis.append(v / below)
    return basis, triangle, rotated


def _substituted(triangle: list[list[float]], rotated: list[float]) -> list[float]:
    weights = rotated[: len(triangle)]
    for i in range(len(triangle) - 1, -1, -1):
        weights[i] /= triangle[i][i]
        for j in range(i):
            weights[j] -= triangle[i][j] * weights[i]
    return weights


def _norm(x: Tensor) -> float:
    return float(vector_norm(x))
