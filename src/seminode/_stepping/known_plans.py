"""Plans that are known before their steps are taken, so that the next ones can be read in advance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from .schedule import Plan, Schedule


class KnownPlans(Protocol):
    """Plans that can be read before they are handed out."""

    def ahead(self, count: int) -> list[Plan]:
        """The plans that have not been handed out yet."""
        ...


class RecordedSchedule:
    """Follows plans that are known before; every step is accepted."""

    smallest = 0.0

    def __init__(self, plans: Iterable[Plan]):
        self._plans = iter(plans)
        self._next: deque[Plan] = deque()  # those that were looked at

    def next(self) -> Plan | None:
        return self._next.popleft() if self._next else next(self._plans, None)

    def judge(self, plan: Plan, ratio: float) -> bool:
        return True

    def ahead(self, count: int) -> list[Plan]:
        self._next.extend(islice(self._plans, max(count - len(self._next), 0)))
        return list(islice(self._next, count))


class ForeseenSchedule:
    """Follows a schedule whose controller ignores errors, so that its steps are known before they are taken."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._plans = RecordedSchedule(self._foreseen())
        self._too_small: Plan | None = None
        self.smallest = 0.0

    def _foreseen(self) -> Iterator[Plan]:
        schedule = self._schedule
        while (plan := schedule.next()) is not None:
            if not plan.landing and abs(plan.dt) < schedule.smallest:
                self._too_small = plan
            schedule.judge(plan, math.nan)
            yield plan

    def next(self) -> Plan | None:
        plan = self._plans.next()
        self.smallest = 0.0 if plan is None or plan is not self._too_small else math.inf
        return plan

    def judge(self, plan: Plan, ratio: float) -> bool:
        return True

    def ahead(self, count: int) -> list[Plan]:
        return self._plans.ahead(count)
