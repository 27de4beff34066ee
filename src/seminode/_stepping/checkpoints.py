"""Checkpoints: a few of the states of a solve, chosen while its number of steps is still unknown.

On a backward pass the states between them are computed again; the choice keeps the number of repeated steps small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import comb
from typing import Generic, TypeVar

T = TypeVar("T")


class Checkpoints(Generic[T]):
    """At most n states of a solve, from which all its steps can be undone, the last one first.

    Going forward, `offer` the state before each step; going back, `recall` each step and offer again on the way to it:

        for j in reversed(range(steps)):
            i, y = checkpoints.recall(j)
            for k in range(i, j):
                y = step(k, y)
                checkpoints.offer(k + 1, y)
            ...  # y is the state before step j

    The state before step 0 is always kept, so that all of this can be done once more.

    Going back, the number of steps to undo is known and placement is optimal, as in Griewank and Walther, "Algorithm
    799: revolve", ACM Trans. Math. Softw. 26 (2000). Going forward it is not known, as in Wang, Moin and Iaccarino,
    "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint calculation", SIAM J. Sci. Comput. 31
    (2009), and Stumm and Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32 (2010).
    Wang et al. rank checkpoints by levels; here the one is dropped without which going back from the present step
    would cost least, the costs being known exactly. Nothing is proved of that, but it comes closer to the optimum for
    a known number of steps: the tests find at most a tenth above it (n = 3, ..., 20, up to 1500 steps), where levels
    with the same way back come to as much as 1.9 times the optimum.

    Arguments:
        n: how many states may be held at any moment, the one before step 0 included.

    >>> checkpoints = Checkpoints[str](3)
    >>> for step in range(9):
    ...     checkpoints.offer(step, f"y{step}")
    >>> checkpoints.steps
    (0, 4, 7)
    >>> checkpoints.recall(6)
    (4, 'y4')
    """

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"n: expected a whole number of at least 1, found {n!r}")
        self._n = n
        self._kept: dict[int, T] = {}  # in the order of the steps: whatever is offered comes after all that is kept
        self._next = 0  # the step to be offered next
        self._offered = 0  # how many states there were, going forward
        self._recalled: int | None = None  # None: going forward
        self._places: frozenset[int] = frozenset()  # going back: the steps to keep on the way to the recalled one

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be started from what is kept."""
        return tuple(self._kept)

    def offer(self, step: int, state: T) -> None:
        """Keep the state before `step`, or do not. Steps come one after another, from 0 or from the one recalled."""
        if step != self._next:
            raise ValueError(f"step: expected {self._next}, found {step}")
        self._next += 1
        if self._recalled is None:
            self._offered = self._next
            keep = self._make_room(step)
        else:
            keep = step in self._places
        if keep:
            self._kept[step] = state

    def beyond(self, step: int) -> tuple[int, T] | None:
        """The first step after `step` that can be started from what is kept, and the state before it."""
        return next(((kept, state) for kept, state in self._kept.items() if kept > step), None)

    def recall(self, step: int) -> tuple[int, T]:
        """The last step up to `step` that can be started from what is kept, and the state before it.

        Steps are recalled in reverse order, so what is kept beyond `step` is forgotten and makes room on the way to
        it. To recall a later step than the time before is to go back once more, which starts over from step 0.
        """
        if not 0 <= step < self._offered:
            raise ValueError(f"step: expected 0 <= step < {self._offered}, found {step}")
        # What an unfinished pass has left lies close together, far from the end: no good place to go on from.
        again = self._recalled is not None and step > self._recalled
        for kept in self.steps:
            if kept > (0 if again else step):
                del self._kept[kept]
        start, state = next(reversed(self._kept.items()))
        self._places = places(start, step, self._n - len(self._kept) + 1)
        self._recalled, self._next = step, start + 1
        return start, state

    def _make_room(self, step: int) -> bool:
        """Drop the state that is missed least if all slots are taken; False if that is the one before `step` itself."""
        if len(self._kept) < self._n:
            return True
        steps = [*self._kept, step]
        dropped = steps[least_missed(steps)]
        self._kept.pop(dropped, None)
        return dropped != step


def least_missed(steps: Sequence[int]) -> int:
    """Which of n + 1 kept steps, the first one excepted, to drop: going back costs least without it.

    The solve is taken to end with the last of them. Undoing the stretch from the j-th of n kept steps, j = 0, 1, ...,
    up to the next one can use n − j slots, since those beyond are free by then.
    """
    n = len(steps) - 1
    lengths = [end - start for start, end in pairwise([*steps, steps[-1] + 1])]
    before, after = 0, sum(advances(lengths[j], n + 1 - j) for j in range(1, n + 1))
    costs = []
    for i in range(1, n + 1):
        # Without step i, stretches i − 1 and i are one, and those after it have a slot more than before.
        slots = n + 1 - i
        after -= advances(lengths[i], slots)
        costs.append(before + advances(lengths[i - 1] + lengths[i], slots) + after)
        before += advances(lengths[i - 1], slots)
    return 1 + costs.index(min(costs))


def places(start: int, stop: int, slots: int) -> frozenset[int]:
    """The steps to keep on the way from `start`, which is kept in one of the slots, to `stop`: all in between, and
    these two, are to be undone."""
    found = set()
    while start < stop and slots > 1:
        start += first_stretch(stop - start + 1, slots)
        slots -= 1
        found.add(start)
    return frozenset(found)


@lru_cache(maxsize=2**14)  # going forward asks n questions a step, most of them those of the step before
def advances(steps: int, slots: int) -> int:
    """The fewest steps to take when undoing `steps` steps, the state before the first being in one of the slots.

    t(l, c) = min_m m + t(l − m, c − 1) + t(m, c) = r l − C(c + r, r − 1), with r = `repetitions` (Griewank and Walther
    2000). Only steps on the way to others count, not those that are taken to be pulled back through.
    """
    r = repetitions(steps, slots)
    return r * steps - comb(slots + r, r - 1) if r > 0 else 0


def first_stretch(steps: int, slots: int) -> int:
    """A minimiser m of t(l, c), see `advances`: how far the first state to be kept is from the start."""
    r = repetitions(steps, slots)
    return min(comb(slots + r - 1, slots), steps - comb(slots + r - 2, slots - 1))


def repetitions(steps: int, slots: int) -> int:
    """The least r such that l steps can be undone from c slots with none of them taken more than r times on the way to
    others: l <= C(c + r, c)."""
    if slots == 1:
        return steps - 1
    r, reach = 0, 1
    while reach < steps:
        r += 1
        reach = reach * (slots + r) // r
    return r
