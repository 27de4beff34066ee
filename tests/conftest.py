"""Settings for all tests."""

import gc
import sys
from typing import Any

import pytest
import torch

# The tensors are small and other work may be going on: threads that wait for each other would cost more than they give.
torch.set_num_threads(1)

# Modules and collected tests are a million objects that live until the end. Left to itself, Python's garbage collector
# walks through all of them again and again, which takes up to a quarter of the time. So it rests while they are made,
# forgets about them, and looks less often at the rest (the first threshold is 700 otherwise).
THRESHOLDS = 10_000, 10, 10
#: Freeze again after so many new modules: PyTorch imports its compiler when it is first used.
NEW_MODULES = 200
_frozen_modules = 0

gc.disable()


def _freeze() -> None:
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    _freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


def _skip_timing_of_guards() -> None:
    """Dynamo flushes the processor's caches after every capture, only to log how long its guards take. That is a fifth
    of the time of a test that captures a small field."""
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None and hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


def pytest_runtest_logfinish() -> None:
    if len(sys.modules) >= _frozen_modules + NEW_MODULES:
        _skip_timing_of_guards()
        _freeze()


@pytest.fixture
def no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the only thread. Libraries and test runners have others, beside which random fields are checked
    by another evaluation."""
    from seminode._field import random_numbers

    monkeypatch.setattr(random_numbers, "beside_others", lambda: False)
