"""Step-size control: whether to accept a step, and how long the next one is.

All numbers are Python floats (float64), for every dtype of the state. In a batched solve, they are float64 tensors on
the host with one number per sample; the functions of `_stepping.elementwise` work on both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, get_args

from torch import Tensor

from ._compile.torch_private import transforms_active
from ._real_numbers import check_finite, check_positive, finite_times, positive_steps, real_number
from ._stepping.elementwise import isfinite, maximum, minimum, number_or, select
from .solution import Record

if TYPE_CHECKING:
    from typing_extensions import Unpack

History = tuple[float, ...]

#: What an adaptive controller does when a step of length `dt_min` fails the error test.
AtDtMin = Literal["raise", "accept"]

#: Names of the presets of `PID`.
PIDPreset = Literal["PI33", "PI34", "PI42", "H211PI", "H312PID"]

#: The error of a step that was shortened by more than this factor does not predict the next step.
MAX_SHORTENING = 20.0


class Verdict(NamedTuple):
    """A controller's decision about a step.

    Attributes:
        accept: whether the step is accepted.
        proposal: length of the next step.
        history: passed to the next call of `judge`; for adaptive controllers the latest error ratios.
    """

    accept: bool
    proposal: float
    history: History


class Controller(ABC):
    """Chooses step sizes. A controller holds configuration only; its state is passed around as `history`.

    A subclass provides:

    1. `adaptive`: whether it needs an error estimate;
    2. `first()`: the first step and the first history; `None` as the step selects it from the problem;
    3. `judge(dt, proposal, ratio, order, history)`: a `Verdict` on a step of length `dt`. `dt` is shorter than
       `proposal` if the step was shortened to end on a jump, on a time of `step_to` or on the last output time. `ratio`
       is the norm of the error relative to the tolerance and `order` the order of the error estimate;
    4. `step_to`: times at which steps must end;
    5. `dt_min`, `dt_max`: bounds on the proposed step;
    6. `land`: whether the last step ends on the last output time;
    7. `elementwise = True`, in the class itself, if its `judge` also takes tensors with one entry per sample. Others
       are called once for every sample of a batched solve.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.extending import Controller, Verdict
        >>> class Doubling(Controller):  # every step is twice as long as the one before it
        ...     adaptive = False
        ...
        ...     def first(self):
        ...         return 0.1, ()
        ...
        ...     def judge(self, dt, proposal, ratio, order, history):
        ...         return Verdict(True, 2.0 * dt, history)
        >>> options = {"solver": "rk4", "controller": Doubling()}
        >>> sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.5], **options).stats.accepted  # 0.1, 0.2, 0.4, 0.8
        4
    """

    adaptive: ClassVar[bool]
    elementwise: ClassVar[bool] = False
    step_to: Sequence[float] = ()
    dt_min: float = 0.0
    dt_max: float = math.inf
    land: bool = True
    #: Whether the state is checked for NaN and infinity after every step without error control, or at the end only.
    check: ClassVar[bool] = True

    def landings(self, times: Sequence[float]) -> Sequence[float]:
        """The times at which steps must end in a solve with these output times."""
        return self.step_to

    @abstractmethod
    def first(self) -> tuple[float | None, History]: ...

    @abstractmethod
    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        """A `Verdict` on a step of length `dt`, from `proposal`, `ratio`, `order` and `history`; see 3. above."""


class AdaptiveOptions(TypedDict, total=False):
    """The arguments of `Adaptive`, for type checkers."""

    safety: float
    factor_min: float
    factor_max: float
    dt0: float | None
    dt_min: float
    dt_max: float
    at_dt_min: AtDtMin
    step_to: Sequence[float]
    land: bool


@dataclass(frozen=True, kw_only=True)
class Adaptive(Controller):
    """Base class of the controllers that adapt the step to the error. A subclass provides `growth`.

    Arguments:
        safety: factor on every predicted step, at most 1.
        factor_min, factor_max: bounds on the ratio of a step to the one before it.
        dt0: the first step; `None` selects it from the problem.
        dt_min, dt_max: bounds on the step. A step that must end on a given time may always be shorter.
        at_dt_min: what happens when a step of length `dt_min` fails the error test: `"raise"` an error, or
            `"accept"` the step.
        step_to: times at which steps must end.
        land: whether the last step ends on the last output time. With `False` it runs past it, and the output there is
            interpolated like all others, as in torchdiffeq; only for `save="ts"`.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.extending import Adaptive
        >>> class Doubling(Adaptive):  # after an accepted step, the next one is as long or twice as long
        ...     def growth(self, ratio, order, history):
        ...         return 2.0 if self.safety * ratio ** (-1 / order) > 2.0 else 1.0
        >>> options = {"controller": Doubling(dt0=1 / 32), "record": True}
        >>> sol = sn.solve(lambda t, y: -y, torch.ones(1, dtype=torch.float64), [0.0, 2.0], **options)
        >>> [plan.dt for plan in sol.record.accepted[:4]]
        [0.03125, 0.0625, 0.125, 0.25]
    """

    adaptive: ClassVar[bool] = True
    #: Whether `growth` reads the history.
    looks_back: ClassVar[bool] = True

    safety: float = 0.9
    factor_min: float = 0.2
    factor_max: float = 10.0
    dt0: float | None = None
    dt_min: float = 0.0
    dt_max: float = math.inf
    at_dt_min: AtDtMin = "raise"
    step_to: Sequence[float] = ()
    land: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "safety", "factor_min", "factor_max", "dt_max")
        if self.dt0 is not None:
            check_positive(self, "dt0")
        if self.safety > 1.0:
            raise ValueError(f"safety: expected at most 1, found {self.safety}")
        real_number("dt_min", self.dt_min)
        if not 0.0 <= self.dt_min <= self.dt_max or self.dt_min == math.inf:
            raise ValueError(f"dt_min: expected 0 <= dt_min <= dt_max = {self.dt_max}, found {self.dt_min}")
        if not self.factor_min < 1.0 < self.factor_max:
            found = f"{self.factor_min} and {self.factor_max}"
            raise ValueError(f"factor_min, factor_max: expected factor_min < 1 < factor_max, found {found}")
        if self.dt0 is not None and not self.dt_min <= self.dt0 <= self.dt_max:
            raise ValueError(
                f"dt0: expected between dt_min = {self.dt_min} and dt_max = {self.dt_max}, found {self.dt0}"
            )
        if self.at_dt_min not in get_args(AtDtMin):
            raise ValueError(f"at_dt_min: expected 'raise' or 'accept', found {self.at_dt_min!r}")
        if self.at_dt_min == "accept" and self.dt_min == 0.0:
            raise ValueError("at_dt_min: 'accept' does nothing without a dt_min")
        object.__setattr__(self, "step_to", finite_times("step_to", self.step_to))

    @abstractmethod
    def growth(self, ratio: float, order: int, history: History) -> float:
        """The factor from an accepted step to the next one, before `factor_max` and `dt_max` limit it."""

    def first(self) -> tuple[float | None, History]:
        return (None if self.dt0 is None else self._clip(self.dt0)), (1.0, 1.0)

    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        if isinstance(ratio, Tensor):
            return self._judge_each(dt, proposal, ratio, order, history)
        if not math.isfinite(ratio):  # rejected even with at_dt_min="accept"
            return Verdict(False, dt * self.factor_min, history)
        if ratio > 1.0 and not self._forced(dt, proposal):
            return Verdict(False, self._clip(dt * self._shrunk(ratio, order)), history)
        if proposal > MAX_SHORTENING * dt:
            # The error of so short a step is mostly rounding and does not predict that of a full one.
            return Verdict(True, self._clip(proposal), history)
        return Verdict(True, self._clip(dt * self._grown(dt, proposal, ratio, order, history)), (ratio, *history[:-1]))

    def _judge_each(self, dt: Any, proposal: Any, ratio: Tensor, order: int, history: Any) -> Verdict:
        """The same for tensors with one entry per sample."""
        accept: Any = ratio <= 1.0
        if self.at_dt_min == "accept":
            accept = accept | (self._forced(dt, proposal) & isfinite(ratio))
        predicts, length = accept, dt * self._grown(dt, proposal, ratio, order, history)
        if dt is not proposal:  # some steps were shortened
            predicts = accept & (proposal <= MAX_SHORTENING * dt)
            length = select(predicts, length, proposal)
        if not transforms_active() and bool(accept.all()):  # values cannot be read while a compiler traces
            length = self._clip(length)
        else:
            length = self._clip(select(accept, length, dt * self._shrunk(ratio, order)))
            if self.at_dt_min == "accept":
                length = select(isfinite(ratio), length, dt * self.factor_min)
        if self.looks_back:
            pairs = zip((ratio, *history), history, strict=False)
            history = tuple(select(predicts, now, before) for now, before in pairs)
        return Verdict(accept, length, history)

    def _forced(self, dt: Any, proposal: Any) -> Any:
        """Whether the step is too short to be rejected."""
        return self.at_dt_min == "accept" and minimum(dt, proposal) <= self.dt_min

    def _grown(self, dt: Any, proposal: Any, ratio: Any, order: int, history: Any) -> Any:
        # A shortened step may grow back to its proposal at once, if its error allows.
        limit = self.factor_max if dt is proposal else maximum(self.factor_max, proposal / dt)
        if isinstance(ratio, Tensor):
            each: Any = ratio
            return minimum(self.growth(each, order, history), limit)  # which is infinite for an error of zero
        return limit if ratio == 0.0 else min(limit, self.growth(ratio, order, history))

    def _shrunk(self, ratio: Any, order: int) -> Any:
        # In this order, so that NaN gives the smallest factor.
        return minimum(number_or(self.factor_min, self.safety * ratio ** (-1.0 / order)), 1.0)

    def _clip(self, dt: Any) -> Any:
        if self.at_dt_min == "accept":
            dt = maximum(dt, self.dt_min)
        return minimum(dt, self.dt_max) if self.dt_max < math.inf else dt


@dataclass(frozen=True, kw_only=True)
class Integral(Adaptive):
    """The elementary controller, dt ← dt · min(10, max(0.9·r^(−1/k), φ)): the default.

    r is the error ratio and k the order of the error estimate; φ = 1 for r < 1 (after an accepted step the next one is
    never shorter) and φ = `factor_min` otherwise. Kidger, Chen and Lyons (2021) and torchdiffeq use this controller.
    Its arguments are those of [`Adaptive`][seminode.controllers.Adaptive]. Hairer, Nørsett, Wanner, *Solving Ordinary
    Differential Equations I* (1993), II.4.

    Example:
        >>> import torch, seminode as sn
        >>> controller = sn.Integral(dt0=0.01, dt_max=0.1)
        >>> sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], controller=controller).stats.accepted >= 10
        True
    """

    elementwise: ClassVar[bool] = True
    looks_back: ClassVar[bool] = False

    def growth(self, ratio: Any, order: int, history: Any) -> Any:
        floor = select(ratio < 1.0, 1.0, self.factor_min)
        return maximum(self.safety * ratio ** (-1.0 / order), floor)


@dataclass(frozen=True, kw_only=True)
class PID(Adaptive):
    """Proportional–integral–derivative control: the next step depends on the last three error ratios.

        dt ← dt · 0.9 · rₙ^(−β₁/k) · rₙ₋₁^(−β₂/k) · rₙ₋₂^(−β₃/k)

    with β₁ = p + i + d, β₂ = −(p + 2d), β₃ = d. A rejected step shrinks by the integral rule. Where stability limits
    the step, PID control gives smoother step sequences and fewer rejections than `Integral`. Söderlind, *Digital
    filters in adaptive time-stepping* (2003).

    Arguments:
        pcoeff, icoeff, dcoeff: the coefficients p, i and d.

    The other arguments are those of [`Adaptive`][seminode.controllers.Adaptive].

    >>> PID.preset("PI42")
    PID(pcoeff=0.2, icoeff=0.4, dcoeff=0)
    """

    elementwise: ClassVar[bool] = True

    pcoeff: float = 0.4
    icoeff: float = 0.3
    dcoeff: float = 0.0

    #: (p, i, d) by name.
    PRESETS: ClassVar[dict[PIDPreset, tuple[float, float, float]]] = {
        "PI33": (1 / 3, 1 / 3, 0.0),
        "PI34": (0.4, 0.3, 0.0),
        "PI42": (0.2, 0.4, 0.0),
        "H211PI": (-1 / 6, 1 / 3, 0.0),
        "H312PID": (-2 / 9, 2 / 9, 1 / 18),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, "pcoeff", "icoeff", "dcoeff")

    @classmethod
    def preset(cls, name: PIDPreset, **options: Unpack[AdaptiveOptions]) -> PID:
        """A controller by name: PI33, PI34, PI42 (Hairer–Wanner, Gustafsson), H211PI, H312PID (Söderlind).

        `options` are those of [`Adaptive`][seminode.controllers.Adaptive].
        """
        if name not in cls.PRESETS:
            raise ValueError(f"name: expected one of {', '.join(cls.PRESETS)}, found {name!r}")
        p, i, d = cls.PRESETS[name]
        return cls(pcoeff=p, icoeff=i, dcoeff=d, **options)

    def growth(self, ratio: Any, order: int, history: Any) -> Any:
        p, i, d = self.pcoeff, self.icoeff, self.dcoeff
        betas = (p + i + d, -(p + 2 * d), d)
        # A step with almost no error does not show the trend: bound its ratio so that it does not dominate the product.
        ratios = (maximum(r, 1e-8) for r in (ratio, *history))
        factor = self.safety * math.prod(r ** (-b / order) for b, r in zip(betas, ratios, strict=True))
        return select(ratio == 0.0, math.inf, maximum(factor, self.factor_min))

    def __repr__(self) -> str:
        return f"PID(pcoeff={self.pcoeff:g}, icoeff={self.icoeff:g}, dcoeff={self.dcoeff:g})"


@dataclass(frozen=True)
class FixedStep(Controller):
    """Steps of constant length, shortened only to end on jumps, on times of `step_to` and on the last output time.

    Arguments:
        dt: length of a step.
        step_to: times at which steps must end.

    >>> FixedStep(0.1)
    FixedStep(dt=0.1, step_to=())
    """

    adaptive: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    dt: float
    step_to: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_positive(self, "dt")
        object.__setattr__(self, "step_to", finite_times("step_to", self.step_to))

    def first(self) -> tuple[float, History]:
        return self.dt, ()

    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        return Verdict(True, self.dt, history)


@dataclass(frozen=True)
class PrescribedSteps(Controller):
    """The given steps, in order.

    `PrescribedSteps.recorded(sol.record)` repeats the steps of an earlier solve: the map from y0 to the outputs, with
    its steps held fixed, whose derivative the discrete adjoints compute.

    Arguments:
        dts: lengths of the steps. `inf` means up to the next time at which a step must end, and so does the end of the
            list.
        step_to: times at which steps must end.

    Example:
        >>> import torch, seminode as sn
        >>> problem = (lambda t, y: -y, torch.ones(1), [0.0, 1.0])
        >>> sol = sn.solve(*problem, record=True)
        >>> again = sn.solve(*problem, controller=sn.PrescribedSteps.recorded(sol.record))
        >>> torch.equal(again.ys, sol.ys), again.stats.rejected
        (True, 0)
    """

    adaptive: ClassVar[bool] = False

    dts: Sequence[float]
    step_to: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dts", positive_steps("dts", self.dts))
        object.__setattr__(self, "step_to", finite_times("step_to", self.step_to))

    @classmethod
    def recorded(cls, record: Record) -> PrescribedSteps:
        """The accepted steps of a record. A step that was shortened to end on a given time ends on it again."""
        ends = [plan.t1 for plan in record.accepted if plan.landing and not plan.final]
        return cls([math.inf if plan.landing else plan.proposal for plan in record.accepted], step_to=ends)

    def first(self) -> tuple[float, History]:
        return self._dt(0), (1.0,)

    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        n_taken = int(history[0])
        return Verdict(True, self._dt(n_taken), (n_taken + 1.0,))

    def _dt(self, i: int) -> float:
        return self.dts[i] if i < len(self.dts) else math.inf
