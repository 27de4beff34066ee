"""Explicit Runge-Kutta methods as data: frozen Butcher tableaux that check their coefficients when they are created.

A tableau includes its dense output: p(x) = y0 + dt sum_i b_i(x) k_i + dt b_end(x) f(t1, y1), 0 <= x <= 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from ._conditions import dot, order_conditions, require
from ._polynomials import Matrix, cubic_hermite, pinned_at_end, product, quartic_through_midpoint, slope_at_end


@dataclass(frozen=True, slots=True)
class Tableau:
    """An explicit Runge-Kutta pair with s stages plus the *end slope* f(t1, y1).

    k_i = f(t0 + c_i dt, y0 + dt sum_j a_ij k_j),  y1 = y0 + dt sum_i b_i k_i,
    error = dt sum_i e_i k_i + dt e_end f(t1, y1).

    The end slope is not a stage. A first-same-as-last method needs it for its error estimate (`fsal`), other methods
    only for their dense output, or as the first stage of the next step. A tableau that violates an order condition, or
    whose polynomial does not end at y1, raises an error.

    Butcher, *Numerical Methods for Ordinary Differential Equations* (2016); Hairer, Nørsett and Wanner, *Solving
    Ordinary Differential Equations I* (1993), II.1 and II.6.

    Arguments:
        name: for messages, and the name of a solver with this tableau.
        order: the order of convergence of y1.
        embedded_order: that of the embedded solution; `None` without an error estimate.
        c: s nodes, the first is 0.
        a: s rows, row i holds i entries.
        b: s weights.
        e: s + 1 weights b - b_hat of the error estimate; the last belongs to the end slope. `None` without one.
        interpolant: s + 1 rows, b_i(x) = sum_m row_i[m - 1] x^m; the last belongs to the end slope.
        interpolant_order: q in y(t0 + x dt) = p(x) + O(dt^(q + 1)).

    Example:
        >>> from seminode.tableaux import Tableau
        >>> kutta3 = Tableau.classical(
        ...     "kutta3", order=3, c=(0, 1 / 2, 1), a=((), (1 / 2,), (-1, 2)), b=(1 / 6, 2 / 3, 1 / 6)
        ... )
        >>> kutta3.stages, kutta3.error_order, kutta3.fsal
        (3, 4, False)
        >>> Tableau.classical("wrong", order=2, c=(0, 1), a=((), (1,)), b=(1 / 3, 2 / 3))
        Traceback (most recent call last):
        ...
        ValueError: tableau 'wrong' violates sum b c = 1/2: 0.6666666666666666 instead of 0.5
    """

    name: str
    order: int
    embedded_order: int | None
    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    e: tuple[float, ...] | None
    interpolant: tuple[tuple[float, ...], ...]
    interpolant_order: int

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_weights()
        self._check_interpolant()

    @classmethod
    def classical(
        cls,
        name: str,
        order: int,
        c: Sequence[float],
        a: Matrix,
        b: Sequence[float],
        *,
        b_hat: Sequence[float] | None = None,
        embedded_order: int | None = None,
        interpolant: Matrix | None = None,
        interpolant_order: int | None = None,
    ) -> "Tableau":
        """Make a tableau from its published form, in which the end slope may be the last stage.

        If the last row of `a` equals `b` and the last node is 1, the last stage is f(t1, y1). It is then removed from
        a, b and c, and its weights become the last entries of `e` and `interpolant`.

        Arguments:
            name, order: as in the class.
            c, a, b: nodes, rows and weights as published.
            b_hat: weights of the embedded solution, as published; `None` without an error estimate.
            embedded_order: the order of the embedded solution.
            interpolant: one row per slope, including the end slope; `None` is the cubic Hermite polynomial.
            interpolant_order: its order; that of the Hermite polynomial is known.
        """
        fsal = len(b) > 1 and tuple(a[-1]) == tuple(b[:-1]) and b[-1] == 0 and c[-1] == 1
        s = len(b) - 1 if fsal else len(b)
        e = None
        if b_hat is not None:
            if len(b_hat) != len(b):
                raise ValueError(f"tableau {name!r}: b_hat has {len(b_hat)} weights, b has {len(b)}")
            e = _floats(x - y for x, y in zip(b, b_hat, strict=True)) + (() if fsal else (0.0,))
        if interpolant is None:
            interpolant = cubic_hermite(b[:s])
            interpolant_order = min(order, 3) if interpolant_order is None else interpolant_order
        elif interpolant_order is None:
            raise ValueError(f"tableau {name!r}: an interpolant needs its interpolant_order")
        return cls(
            name=name,
            order=order,
            embedded_order=embedded_order,
            c=_floats(c[:s]),
            a=tuple(_floats(row) for row in a[:s]),
            b=_floats(b[:s]),
            e=e,
            interpolant=tuple(_floats(row) for row in interpolant),
            interpolant_order=interpolant_order,
        )

    @property
    def stages(self) -> int:
        """The number s of stages, without the end slope."""
        return len(self.b)

    @property
    def fsal(self) -> bool:
        """Whether the error estimate uses the end slope, which is then the first stage of the next step."""
        return self.e is not None and self.e[-1] != 0

    @property
    def error_order(self) -> int:
        """The p in error = O(dt^p), for step control; without an estimate, the p of the local error."""
        return 1 + (self.order if self.embedded_order is None else min(self.order, self.embedded_order))

    @property
    def degree(self) -> int:
        """Degree of the interpolating polynomial."""
        return len(self.interpolant[0])

    @property
    def interpolant_reads_end(self) -> bool:
        """Whether the dense output uses the end slope. If so, its derivative is continuous across steps."""
        return any(self.interpolant[-1])

    def _require(self, identity: str, found: float, expected: float) -> None:
        require(self.name, identity, found, expected)

    def _check_shapes(self) -> None:
        s = len(self.b)
        expected = {
            "at least one stage": s > 0,
            "len(c) = s": len(self.c) == s,
            "row i of a has i entries": [len(row) for row in self.a] == list(range(s)),
            "len(e) = s + 1": self.e is None or len(self.e) == s + 1,
            "embedded_order goes with e": (self.e is None) == (self.embedded_order is None),
            "len(interpolant) = s + 1": len(self.interpolant) == s + 1,
            "rows of the interpolant have the same length": len({len(row) for row in self.interpolant}) == 1,
            "order >= 1": self.order >= 1,
            "1 <= interpolant_order <= order": 1 <= self.interpolant_order <= self.order,
        }
        for what, holds in expected.items():
            if not holds:
                raise ValueError(f"tableau {self.name!r} has a wrong shape, expected: {what}")

    def _check_weights(self) -> None:
        e = self.e
        for condition in order_conditions(self.a, self.b, self.c, self.order):
            self._require(*condition)
        if e is not None and self.embedded_order is not None:
            self._require("sum e = 0", fsum(e), 0)
            if self.embedded_order >= 2:
                self._require("sum e c = 0", dot(e, (*self.c, 1.0)), 0)

    def _check_interpolant(self) -> None:
        rows = self.interpolant
        for m, column in enumerate(zip(*rows, strict=True), start=1):
            self._require(f"sum_i b_i(x) = x (power {m})", fsum(column), m == 1)
        for i, (row, weight) in enumerate(zip(rows, (*self.b, 0.0), strict=True)):
            self._require(f"b_{i}(1) = b[{i}] (0 for the end slope)", fsum(row), weight)
            # A straight line has one slope only.
            self._require(f"b_{i}'(0) = 1 for k_0, 0 otherwise", row[0], i == 0 if self.degree > 1 else weight)
            if self.interpolant_reads_end:
                last = i == len(self.b)
                self._require(f"b_{i}'(1) = 1 for the end slope, 0 otherwise", slope_at_end(row), last)


def _floats(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, numbers))


# Euler, Heun, Runge, Kutta: Hairer, Norsett, Wanner, Solving Ordinary Differential Equations I (1993), II.1.
# The dense output of Euler's method is a straight line: the order of the Hermite cubic, a smaller error, no cost.
EULER = Tableau.classical("euler", 1, (0,), ((),), (1,), interpolant=((1.0,), (0.0,)), interpolant_order=1)

MIDPOINT = Tableau.classical("midpoint", 2, (0, 1 / 2), ((), (1 / 2,)), (0, 1))

HEUN = Tableau.classical("heun", 2, (0, 1), ((), (1,)), (1 / 2, 1 / 2))

# Ralston, Runge-Kutta methods with minimum error bounds, Math. Comp. 16 (1962).
RALSTON = Tableau.classical("ralston", 2, (0, 2 / 3), ((), (2 / 3,)), (1 / 4, 3 / 4))

RK4 = Tableau.classical(
    "rk4", 4, (0, 1 / 2, 1 / 2, 1), ((), (1 / 2,), (0, 1 / 2), (0, 0, 1)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)
)

# Bogacki, Shampine, A 3(2) pair of Runge-Kutta formulas, Appl. Math. Lett. 2 (1989).
BOSH3 = Tableau.classical(
    "bosh3",
    3,
    (0, 1 / 2, 3 / 4, 1),
    ((), (1 / 2,), (0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
    (2 / 9, 1 / 3, 4 / 9, 0),
    b_hat=(7 / 24, 1 / 4, 1 / 3, 1 / 8),
    embedded_order=2,
)

# Heun's method with Euler's method as the embedded one.
ADAPTIVE_HEUN = Tableau.classical(
    "adaptive_heun", 2, (0, 1), ((), (1,)), (1 / 2, 1 / 2), b_hat=(1, 0), embedded_order=1
)

# Fehlberg, Low-order classical Runge-Kutta formulas with stepsize control, NASA TR R-315 (1969): RK1(2). As in
# torchdiffeq, the second-order weights advance the solution, so the pair is not first-same-as-last.
# The error estimate is dt^2 y'' / 512 + O(dt^3), but the local error has ordinary coefficients of dt^3. On y' = l y
# their ratio is 84.8 |l| dt, so the estimate is too small unless |l| dt < 0.012. With the factor 0.9 of the controller,
# the error of y' = i y grows by 69 rtol per unit of time; with adaptive_heun, whose estimate is dt^2 y'' / 2, by 0.27.
FEHLBERG2 = Tableau.classical(
    "fehlberg2",
    2,
    (0, 1 / 2, 1),
    ((), (1 / 2,), (1 / 256, 255 / 256)),
    (1 / 512, 255 / 256, 1 / 512),
    b_hat=(1 / 256, 255 / 256, 0),
    embedded_order=1,
)

# fmt: off
# Dormand, Prince, A family of embedded Runge-Kutta formulae, J. Comp. Appl. Math. 6 (1980): RK5(4)7M;
# embedded weights and midpoint from Shampine, Some practical Runge-Kutta formulas, Math. Comp. 46 (1986).
_DOPRI5_B = (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)
_DOPRI5_MID = (
    6025192743 / 30085553152 / 2, 0, 51252292925 / 65400821598 / 2, -2691868925 / 45128329728 / 2,
    187940372067 / 1594534317056 / 2, -1776094331 / 19743644256 / 2, 11237099 / 235043384 / 2,
)
DOPRI5 = Tableau.classical(
    "dopri5", 5,
    (0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1, 1),
    (
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        _DOPRI5_B,
    ),
    (*_DOPRI5_B, 0),
    b_hat=(1951 / 21600, 0, 22642 / 50085, 451 / 720, -12231 / 42400, 649 / 6300, 1 / 60),
    embedded_order=4,
    interpolant=quartic_through_midpoint(_DOPRI5_B, _DOPRI5_MID),
    interpolant_order=4,
)

# Tsitouras, Runge-Kutta pairs of order 5(4) satisfying only the first column simplifying assumption, Comput.
# Math. Appl. 62 (2011), with its free interpolant.
_TSIT5_B = (
    0.09646076681806522952, 1 / 100, 0.4798896504144995748, 1.379008574103741893, -3.290069515436080680,
    2.324710524099773982,
)
TSIT5 = Tableau.classical(
    "tsit5", 5,
    (0, 161 / 1000, 327 / 1000, 9 / 10, 0.9800255409045096857, 1, 1),
    (
        (),
        (161 / 1000,),
        (-0.008480655492356988544, 0.3354806554923569885),
        (2.897153057105493432, -6.359448489975074843, 4.362295432869581411),
        (5.325864828439256604, -11.74888356406282788, 7.495539342889836208, -0.09249506636175524926),
        (5.861455442946420029, -12.92096931784710929, 8.159367898576158643, -0.07158497328140099722,
         -0.02826905039406838291),
        _TSIT5_B,
    ),
    (*_TSIT5_B, 0),
    b_hat=(0.09468075576583945807, 0.009183565540343253097, 0.4877705284247615708, 1.234297566930478986,
           -2.707712349983525455, 1.866628418170587036, 1 / 66),
    embedded_order=4,
    interpolant=(
        product(-1.0530884977290216, (-1.3299890189751412, 1), (0.7139816917074209, -1.4364028541716351, 1)),
        product(0.1017, (0, 1), (1.2949852507374631, -2.1966568338249754, 1)),
        product(2.490627285651252793, (0, 1), (1.57803468208092486, -2.38535645472061657, 1)),
        product(-16.54810288924490272, (0, 1), (-1.21712927295533244, 1), (-0.61620406037800089, 1)),
        product(47.37952196281928122, (0, 1), (-1.203071208372362603, 1), (-0.658047292653547382, 1)),
        product(-34.87065786149660974, (0, 1), (-1.2, 1), (-2 / 3, 1)),
        product(2.5, (0, 1), (-1, 1), (-0.6, 1)),
    ),
    interpolant_order=4,
)

# Prince, Dormand, High order embedded Runge-Kutta formulae, J. Comp. Appl. Math. 7 (1981): RK8(7)13M;
# interpolant from Bogacki, Shampine, Interpolating high-order Runge-Kutta formulas, Comput. Math. Appl. 20
# (1990). Its order is 5, the highest that these 13 stages and the end slope allow: inside the step, the
# conditions of order 6 contradict each other. The published digits agree with b to 1e-12 and with the end slope
# to 3e-11 only, so pinned_at_end corrects them.
_DOPRI8_B = (
    14005451 / 335480064, 0, 0, 0, 0, -59238493 / 1068277825, 181606767 / 758867731, 561292985 / 797845732,
    -1041891430 / 1371343529, 760417239 / 1151165299, 118820643 / 751138087, -528747749 / 2220607170, 1 / 4,
)
_DOPRI8_INTERPOLANT = (  # columns: x, x^2, ..., x^6
    (1, -6.6910181737837595697, 19.9990069333683970610, -30.0610568289666450593, 22.1396504998094068976,
     -6.3448349392860401388),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0),
    (0, -7.6142658045872677172, 52.2273532792945524050, -121.4999627731334642623, 116.4422149550342161651,
     -39.6107919852202505218),
    (0, 10.7281392630428866124, -46.8919164181093621583, 83.1721004639847717481, -67.1451318825957197185,
     20.3761213808791436958),
    (0, 0.5526637063753648783, -0.1890893225010595467, 9.5724507555993664382, -16.5672243527496524646,
     7.3347098826795362023),
    (0, 4.2186562625665153803, -35.7075975946222072821, 87.8406057677205645007, -89.9916014847245016028,
     32.8801774352459155182),
    (0, -0.6627209125361597559, 6.2736448083240352160, -17.4152107770762969005, 22.6237489648532849093,
     -10.1588990526426760954),
    (0, -1.2636789001135462218, 10.3160881272450748458, -28.5903289514790976966, 32.2362340167355370113,
     -12.5401268098782561200),
    (0, 5.4106037898590422230, -34.7650769866611817349, 81.6630950584341412934, -82.1020315488359848644,
     29.5553001484516038033),
    (0, -7.0321379067945741781, 47.7457971078225540396, -114.9375291377009418170, 116.2662185791119533462,
     -41.7923486424390588923),
    (0, 2.3537586759714983486, -19.0082099341608028453, 50.2558364226176017553, -53.9020777466385396792,
     20.3006925822100825485),
)
DOPRI8 = Tableau.classical(
    "dopri8", 8,
    (0, 1 / 18, 1 / 12, 1 / 8, 5 / 16, 3 / 8, 59 / 400, 93 / 200, 5490023248 / 9719169821, 13 / 20,
     1201146811 / 1299019798, 1, 1),
    (
        (),
        (1 / 18,),
        (1 / 48, 1 / 16),
        (1 / 32, 0, 3 / 32),
        (5 / 16, 0, -75 / 64, 75 / 64),
        (3 / 80, 0, 0, 3 / 16, 3 / 20),
        (29443841 / 614563906, 0, 0, 77736538 / 692538347, -28693883 / 1125000000, 23124283 / 1800000000),
        (16016141 / 946692911, 0, 0, 61564180 / 158732637, 22789713 / 633445777, 545815736 / 2771057229,
         -180193667 / 1043307555),
        (39632708 / 573591083, 0, 0, -433636366 / 683701615, -421739975 / 2616292301, 100302831 / 723423059,
         790204164 / 839813087, 800635310 / 3783071287),
        (246121993 / 1340847787, 0, 0, -37695042795 / 15268766246, -309121744 / 1061227803,
         -12992083 / 490766935, 6005943493 / 2108947869, 393006217 / 1396673457, 123872331 / 1001029789),
        (-1028468189 / 846180014, 0, 0, 8478235783 / 508512852, 1311729495 / 1432422823,
         -10304129995 / 1701304382, -48777925059 / 3047939560, 15336726248 / 1032824649,
         -45442868181 / 3398467696, 3065993473 / 597172653),
        (185892177 / 718116043, 0, 0, -3185094517 / 667107341, -477755414 / 1098053517,
         -703635378 / 230739211, 5731566787 / 1027545527, 5232866602 / 850066563, -4093664535 / 808688257,
         3962137247 / 1805957418, 65686358 / 487910083),
        (403863854 / 491063109, 0, 0, -5068492393 / 434740067, -411421997 / 543043805, 652783627 / 914296604,
         11173962825 / 925320556, -13158990841 / 6184727034, 3936647629 / 1978049680, -160528059 / 685178525,
         248638103 / 1413531060, 0),
    ),
    _DOPRI8_B,
    b_hat=(13451932 / 455176623, 0, 0, 0, 0, -808719846 / 976000145, 1757004468 / 5645159321,
           656045339 / 265891186, -3867574721 / 1518517206, 465885868 / 322736535, 53011238 / 667516719,
           2 / 45, 0),
    embedded_order=7,
    interpolant=pinned_at_end(_DOPRI8_INTERPOLANT, _DOPRI8_B),
    interpolant_order=5,
)
# fmt: on
