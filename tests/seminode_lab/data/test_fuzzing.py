"""Readers get damaged files: each is read or refused with one line, without other errors and with little memory."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
from hostile_files import BOMBS, CORPUS, READERS, expand, in_a_small_process, read, repacked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QUICK = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore", UserWarning)  # old checkpoints


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_the_corpus(path: Path, tmp_path: Path) -> None:
    refused = read(path.parent.name, path.read_bytes(), tmp_path)
    if path.name.startswith("good"):
        assert refused is None


@pytest.mark.parametrize("form", READERS)
@QUICK
@given(chance=st.randoms(use_true_random=False))
def test_damaged_files(form: str, chance: random.Random, tmp_path: Path) -> None:
    read(form, repacked(form, chance), tmp_path)


@pytest.mark.parametrize("form", READERS)
@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(form: str, content: bytes, tmp_path: Path) -> None:
    read(form, content, tmp_path)


# In a process that may allocate one gigabyte, which counts what it needs.


@pytest.mark.slow
@pytest.mark.parametrize("form", READERS)
def test_thousands_of_damaged_files(form: str) -> None:
    found = in_a_small_process(form, "5000", "0")
    print(found)
    assert "error" not in found, found
    assert int(found["peak_megabytes"]) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_files_that_expand_need_little_memory(kind: str) -> None:
    found = expand(kind)
    print(kind, found)
    assert "error" not in found, found
    assert int(found["peak_megabytes"]) < 1000
    assert bool(found["refused"]) == (kind != "json")
