"""Implicit Runge-Kutta methods as data: frozen Butcher tableaux that check their coefficients when they are created.

As for explicit methods, a tableau includes its dense output, p(x) = y0 + dt sum_i b_i(x) k_i, 0 <= x <= 1. Those of
L-stable methods with an explicit first stage are combinations of the states of the other stages, sum_i w_i(x) Y_i,
with b(x) = w(x) a: in f(t0, y0) the error of a stiff state is magnified, in these states it is damped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, sqrt

import torch

from ._conditions import order_conditions, require
from ._polynomials import Matrix


@dataclass(frozen=True)
class ImplicitTableau:
    """An implicit Runge-Kutta method with s stages.

    k_i = f(t0 + c_i dt, y0 + dt sum_j a_ij k_j),  y1 = y0 + dt sum_i b_i k_i,  error = dt sum_i e_i k_i.

    Diagonally implicit methods have a lower triangular `a` with one number gamma on its diagonal, except for the first
    stage, which may be explicit. The stages of all others are coupled. A tableau that violates an order condition
    raises an error. Hairer and Wanner, *Solving Ordinary Differential Equations II* (1996), IV.3 and IV.8.

    Arguments:
        name: for messages, and the name of a solver with this tableau.
        order: the order of convergence of y1.
        c: s nodes.
        a: s rows of s entries.
        b: s weights.
        interpolant: s rows, b_i(x) = sum_m row_i[m - 1] x^m.
        interpolant_order: q in y(t0 + x dt) = p(x) + O(dt^(q + 1)).
        embedded_order: that of the embedded solution; `None` without an error estimate.
        e: s weights b - b_hat of the error estimate, or a multiple of them; `None` without one.
        e_start: the weight of f(t0, y0) in a filtered estimate.
        filtered: whether the error estimate is to be multiplied by (I - gamma dt J)^-1, without which stiff components
            would dominate it.

    Example:
        >>> import seminode as sn
        >>> from seminode.solvers import ImplicitRungeKutta
        >>> class Backward(ImplicitRungeKutta):  # Euler's, with a line between the ends of a step
        ...     tableau = ImplicitTableau("backward", 1, (1.0,), ((1.0,),), (1.0,), ((1.0,),), 1)
        >>> sol = sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], solver=Backward(), controller=sn.FixedStep(0.5))
        >>> round(sol.ys[-1].item(), 4)  # 1 / 1.5²
        0.4444
    """

    name: str
    order: int
    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    interpolant: tuple[tuple[float, ...], ...]
    interpolant_order: int
    embedded_order: int | None = None
    e: tuple[float, ...] | None = None
    e_start: float = 0.0
    filtered: bool = False

    def __post_init__(self) -> None:
        s = len(self.b)
        shapes = [
            len(self.c),
            len(self.a),
            len(self.interpolant),
            *map(len, self.a),
            s if self.e is None else len(self.e),
        ]
        if set(shapes) != {s}:
            raise ValueError(f"tableau {self.name!r} has a wrong shape, expected {s} stages throughout, found {shapes}")
        self._check_weights()
        self._check_interpolant()

    @property
    def stages(self) -> int:
        """The number s of stages."""
        return len(self.b)

    @property
    def diagonal(self) -> bool:
        """Whether the stages can be solved for one after the other."""
        return all(a == 0.0 for i, row in enumerate(self.a) for a in row[i + 1 :])

    @property
    def gamma(self) -> float:
        """The number on the diagonal of a diagonally implicit method, of others the real eigenvalue of `a`."""
        if self.diagonal:
            return self.a[-1][-1]
        return next(value.real for value, *_ in self.spectrum if value.imag == 0.0)

    @property
    def explicit_start(self) -> bool:
        """Whether the first stage is f(t0, y0)."""
        return not any(self.a[0])

    @property
    def stiffly_accurate(self) -> bool:
        """Whether y1 is the last stage, so that the slope there is that of the next step's start."""
        return self.a[-1] == self.b and self.c[-1] == 1.0

    @property
    def error_order(self) -> int | None:
        """The p in error = O(dt^p)."""
        return None if self.embedded_order is None else 1 + min(self.order, self.embedded_order)

    @cached_property
    def inverse(self) -> tuple[tuple[float, ...], ...]:
        """The inverse of `a`, for methods whose stages are coupled."""
        return tuple(map(tuple, torch.linalg.inv(torch.tensor(self.a, dtype=torch.float64)).tolist()))

    @cached_property
    def spectrum(self) -> tuple[tuple[complex, tuple[complex, ...], tuple[complex, ...]], ...]:
        """Eigenvalues of `a` with left and right eigenvectors; of a complex pair only one.

        a = sum of value * right * left^T over all of them, so that functions of `a` are the same sums.
        """
        values, right = torch.linalg.eig(torch.tensor(self.a, dtype=torch.float64))
        left = torch.linalg.inv(right)
        tiny = 1e-12 * float(values.abs().max())
        parts = []
        for i, value in enumerate(values.tolist()):
            if value.imag < -tiny:
                continue
            if abs(value.imag) <= tiny:
                value = complex(value.real, 0.0)
            parts.append((value, tuple(left[i].tolist()), tuple(right[:, i].tolist())))
        return tuple(parts)

    def _require(self, identity: str, found: float, expected: float) -> None:
        require(self.name, identity, found, expected)

    def _check_weights(self) -> None:
        for condition in order_conditions(self.a, self.b, self.c, self.order):
            self._require(*condition)
        if self.diagonal:
            for i, row in enumerate(self.a[int(self.explicit_start) :], int(self.explicit_start)):
                self._require(f"a[{i}][{i}] = gamma", row[i], self.gamma)
        if (self.e is None) != (self.embedded_order is None):
            raise ValueError(f"tableau {self.name!r}: e and embedded_order go together")
        if self.e is not None:
            self._require("sum e = 0", self.e_start + fsum(self.e), 0)

    def _check_interpolant(self) -> None:
        for m, column in enumerate(zip(*self.interpolant, strict=True), start=1):
            self._require(f"sum_i b_i(x) = x (power {m})", fsum(column), m == 1)
        for i, (row, weight) in enumerate(zip(self.interpolant, self.b, strict=True)):
            self._require(f"b_{i}(1) = b[{i}]", fsum(row), weight)


def _square(rows: Matrix) -> tuple[tuple[float, ...], ...]:
    """Rows of a lower triangular matrix, filled up with zeros."""
    return tuple(tuple(map(float, row)) + (0.0,) * (len(rows) - len(row)) for row in rows)


def collocation(c: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """The weights b_i(x) = integral of the i-th Lagrange polynomial of the nodes, one row each, powers from x on."""
    rows = []
    for i, node in enumerate(c):
        poly = [1.0]
        for j, other in enumerate(c):
            if j != i:
                scaled = [x / (node - other) for x in poly]
                poly = [-other * x for x in scaled] + [0.0]
                for m, x in enumerate(scaled):
                    poly[m + 1] += x
        rows.append(tuple(x / (m + 1) for m, x in enumerate(poly)))
    return tuple(rows)


def _values(rows: Matrix, x: float) -> tuple[float, ...]:
    return tuple(fsum(coefficient * x**m for m, coefficient in enumerate(row, start=1)) for row in rows)


def _collocation_method(
    name: str, order: int, c: Sequence[float], **more: float | tuple[float, ...]
) -> ImplicitTableau:
    """The collocation method of the nodes: Hairer, Wanner, Solving Ordinary Differential Equations II (1996), IV.5."""
    rows = collocation(c)
    a = tuple(_values(rows, x) for x in c)
    options: dict[str, object] = dict(more)
    b = a[-1] if c[-1] == 1.0 else _values(rows, 1.0)
    return ImplicitTableau(name, order, tuple(c), a, b, rows, len(c), **options)  # type: ignore[arg-type]


IMPLICIT_EULER = ImplicitTableau("implicit_euler", 1, (1.0,), ((1.0,),), (1.0,), ((1.0,),), 1)

IMPLICIT_MIDPOINT = ImplicitTableau("implicit_midpoint", 2, (0.5,), ((0.5,),), (1.0,), ((1.0,),), 1)

TRAPEZOID = ImplicitTableau(
    "trapezoid", 2, (0.0, 1.0), ((0.0, 0.0), (0.5, 0.5)), (0.5, 0.5), ((1.0, -0.5), (0.0, 0.5)), 2
)

# Alexander, Diagonally implicit Runge-Kutta methods for stiff O.D.E.'s, SIAM J. Numer. Anal. 14 (1977): order 2,
# L-stable. The dense output is the one quadratic of order 2 in these two slopes.
_G = 1.0 - sqrt(0.5)
SDIRK2 = ImplicitTableau(
    "sdirk2",
    2,
    (_G, 1.0),
    ((_G, 0.0), (1.0 - _G, _G)),
    (1.0 - _G, _G),
    ((1.0 + _G / (1.0 - _G), -0.5 / (1.0 - _G)), (-_G / (1.0 - _G), 0.5 / (1.0 - _G))),
    2,
)

# Bank et al. (1985); error estimate of order 3 and its filter: Hosea, Shampine, Analysis and implementation of TR-BDF2,
# Appl. Numer. Math. 20 (1996). The dense output is the one quadratic of order 2 in the states of the stages.
_D, _W = 1.0 - sqrt(0.5), sqrt(0.125)
TRBDF2 = ImplicitTableau(
    "trbdf2",
    2,
    (0.0, 2.0 * _D, 1.0),
    ((0.0, 0.0, 0.0), (_D, _D, 0.0), (_W, _W, _D)),
    (_W, _W, _D),
    ((2.0 * _W, -_W), (2.0 * _W, -_W), (1.0 - 4.0 * _W, 2.0 * _W)),
    2,
    embedded_order=2,
    e=(_W - (1.0 - _W) / 3.0, _W - (3.0 * _W + 1.0) / 3.0, _D - _D / 3.0),
    filtered=True,
)

# Kvaerno, Singly diagonally implicit Runge-Kutta methods with an explicit first stage, BIT 44 (2004): ESDIRK3/2 with
# gamma the root of x^3 - 3 x^2 + 3/2 x - 1/6 near 0.44. The dense output is the one cubic of order 3 in the states of
# the stages.
_K = 0.43586652150845899942
_K3_HAT = ((-4 * _K**2 + 6 * _K - 1) / (4 * _K), (1 - 2 * _K) / (4 * _K), _K)
_K3 = ((6 * _K - 1) / (12 * _K), -1 / ((24 * _K - 12) * _K), (-6 * _K**2 + 6 * _K - 1) / (6 * _K - 3), _K)
KVAERNO3 = ImplicitTableau(
    "kvaerno3",
    3,
    (0.0, 2.0 * _K, 1.0, 1.0),
    _square(((0.0,), (_K, _K), _K3_HAT, _K3)),
    _K3,
    (
        (1.0, -1.0735700900697591, 0.38238006004650893),
        (0.0, 4.4716901652653362, -2.9811267768435692),
        (1.0452602553350860, -5.7962401503911556, 3.5157400151490843),
        (-1.0452602553350860, 2.3981200751955796, -0.91699329835202514),
    ),
    3,
    embedded_order=2,
    e=(_K3[0] - _K3_HAT[0], _K3[1] - _K3_HAT[1], _K3[2] - _K3_HAT[2], _K3[3]),
)

# The same paper: ESDIRK5/4. Its third node is 1.23, past the end of the step. The dense output is ours: of the
# quartics of order 4 in the states of the stages, the one with the smallest coefficients. The error estimate is four
# times the difference of the two methods. With the difference itself, the error of van der Pol's equation in
# `benchmarks.stiff` is 13 rtol at rtol = 1e-8, and the worst entry of OREGO is wrong by 39 rtol, for 28 % fewer steps.
_K5_HAT = (0.13855640231268224, 0.0, -0.04245337201752043, 0.02446657898003141, 0.61943039072480676, 0.26)
_K5 = (
    *(0.13659751177640291, 0.0, -0.05496908796538376, -0.04118626728321046, 0.62993304899016403),
    *(0.06962479448202728, 0.26),
)
_K5_ROWS = _square(
    (
        (0.0,),
        (0.26, 0.26),
        (0.13, 0.84033320996790809, 0.26),
        (0.22371961478320505, 0.47675532319799699, -0.06470895363112615, 0.26),
        (0.16648564323248321, 0.10450018841591720, 0.03631482272098715, -0.13090704451073998, 0.26),
        _K5_HAT,
        _K5,
    )
)
KVAERNO5 = ImplicitTableau(
    "kvaerno5",
    5,
    tuple(fsum(row) for row in _K5_ROWS),
    _K5_ROWS,
    _K5,
    (
        (0.98880125037926814, -2.0754713023444120, 1.7291260659594214, -0.50585850221787243),
        (0.0, 0.0, 0.0, 0.0),
        (-0.071550894053905009, 0.82078568460196455, -1.6583136850728124, 0.85410980655936153),
        (-0.37532969483203971, -0.78166772744051027, 2.4641568856121983, -1.3483457306228570),
        (0.060042477151296125, 3.2753387864296331, -4.2014068487777410, 1.4959586341869733),
        (0.24801282478635198, -0.57429054369280430, 0.50783290631501277, -0.11193039292653079),
        (0.15002403656933691, -0.66469489755385702, 1.1586046759638093, -0.38393381497929291),
    ),
    4,
    embedded_order=4,
    e=(*(4.0 * (x - y) for x, y in zip(_K5, _K5_HAT, strict=False)), 4.0 * 0.26),
)

RADAU_IIA3 = _collocation_method("radauIIA3", 3, (1 / 3, 1.0))

# Hairer, Wanner, Solving Ordinary Differential Equations II, IV.8: the error estimate of order 3 has weight gamma_0 for
# f(t0, y0), with gamma_0 the real eigenvalue of a, and is filtered by (I - gamma_0 dt J)^-1.
_R = sqrt(6.0)
_GAMMA_0 = (6.0 + 81.0 ** (1 / 3) - 9.0 ** (1 / 3)) / 30.0
_RADAU_C = ((4.0 - _R) / 10.0, (4.0 + _R) / 10.0, 1.0)


def _radau_error() -> tuple[float, ...]:
    """Weights d with sum d = -gamma_0, sum d c = 0, sum d c^2 = 0: the negative of l_i(0) times gamma_0."""
    weights = []
    for i, node in enumerate(_RADAU_C):
        value = -_GAMMA_0
        for j, other in enumerate(_RADAU_C):
            if j != i:
                value *= -other / (node - other)
        weights.append(value)
    return tuple(weights)


RADAU_IIA5 = _collocation_method(
    "radauIIA5", 5, _RADAU_C, embedded_order=3, e=_radau_error(), e_start=_GAMMA_0, filtered=True
)

GL4 = _collocation_method("gl4", 4, (0.5 - sqrt(3.0) / 6.0, 0.5 + sqrt(3.0) / 6.0))

GL6 = _collocation_method("gl6", 6, (0.5 - sqrt(15.0) / 10.0, 0.5, 0.5 + sqrt(15.0) / 10.0))
