"""Products of matrices that programs compute themselves: every size and layout, and only where they are meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seminode._compile import inductor, products, rewrites
from seminode._compile.inductor import compile_graph
from seminode._compile.library import Building, quickly_built

#: Rows, inner size and columns: whole tiles and rests, few of each, more terms than are added at a time, work for two
#: threads by rows and by columns.
SIZES = (
    *((8, 32, 32), (16, 7, 48), (13, 19, 33), (5, 200, 64), (1, 1, 1), (1, 50, 2), (30, 50, 3), (9, 400, 17)),
    *((3, 6, 100), (100, 6, 3), (4, 33, 256), (256, 33, 4), (130, 193, 97), (20, 500, 300), (7, 385, 8)),
)
LAYOUTS = [(False, False), (False, True), (True, False), (True, True)]
slow = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the products need AVX-512 instructions"
)


@pytest.fixture(autouse=True)
def slow_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which products are not left to the library; without AVX-512 the text of ours is empty."""
    monkeypatch.setattr(products, "library_is_slow", lambda: True)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the libraries that are built from now on."""
    found: list[str] = []

    def noted(build: Any) -> Any:
        def build_noted(edited: Callable[[str], str] = str) -> Any:
            return build(lambda code: found.append(edited(code)) or found[-1])

        return quickly_built(build_noted)

    monkeypatch.setattr(inductor, "quickly_built", noted)
    return found


def matrix(rows: int, columns: int, by_columns: bool, generator: torch.Generator) -> Tensor:
    x = torch.randn((columns, rows) if by_columns else (rows, columns), generator=generator)
    return x.T if by_columns else x


def factors() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SIZES:
        for first, second in LAYOUTS:
            yield matrix(rows, inner, first, generator)
            yield matrix(inner, columns, second, generator)


def compiled(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    program = compile_graph(function, given)
    if isinstance(program, Building):
        program.wait()
    return program


@pytest.fixture(scope="module")
def given() -> list[Tensor]:
    return list(factors())


def test_every_size_and_layout(given: list[Tensor], sources: list[str]) -> None:
    """On one thread and two, as exactly as by the library."""

    def function(*inputs: Tensor) -> list[Tensor]:
        return [torch.mm(a, b) for a, b in zip(inputs[::2], inputs[1::2], strict=True)]

    program, threads = compiled(function, given), torch.get_num_threads()
    assert sources[0].count("product_out(") > 40  # some are loops
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found = program(list(given))
            for a, b, c in zip(given[::2], given[1::2], found, strict=True):
                scale = (a.abs().double() @ b.abs().double()).clamp(min=1e-30)  # of the sums of rounding errors
                error = ((c - a.double() @ b.double()).abs() / scale).max()
                assert error < 4e-7, (a.shape, b.shape, a.stride(), b.stride(), float(error))
    finally:
        torch.set_num_threads(threads)


def test_other_numbers_and_gaps(sources: list[str]) -> None:
    """Double precision, parts of larger matrices, repeated rows, no terms and no rows: right all the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 60, generator=generator)
    given = [
        *(x.double(), x.double().T.contiguous()),
        *(x[3:33:2, 5:37:3], x[1:12, 2:39]),
        *(x[:1].expand(20, 60), x.T),
        *(torch.empty(5, 0), torch.empty(0, 20)),
        *(torch.empty(0, 6), x[:6, :20]),
    ]
    given[3] = torch.randn(11, 37, generator=generator)

    def function(*inputs: Tensor) -> list[Tensor]:
        return [torch.mm(a, b) for a, b in zip(inputs[::2], inputs[1::2], strict=True)]

    found = compiled(function, given)(list(given))
    for a, b, c in zip(given[::2], given[1::2], found, strict=True):
        torch.testing.assert_close(c, a @ b, rtol=2e-5, atol=2e-5)


def test_infinity_and_nan_stay_in_their_rows_and_columns(sources: list[str]) -> None:
    a, b = torch.ones(9, 20), torch.ones(20, 18)
    a[2, 3], b[4, 17] = torch.inf, torch.nan
    (found,) = compiled(lambda a, b: [torch.mm(a, b)], [a, b])([a, b])
    torch.testing.assert_close(found, a @ b, equal_nan=True)


def test_what_comes_before_and_after(sources: list[str]) -> None:
    """Both factors may be results of other operations, and the product a part of others."""

    def function(a: Tensor, w: Tensor, g: Tensor, total: Tensor, bias: Tensor) -> list[Tensor]:
        return [(a @ w.T).tanh() + 1.0, (g * 2.0) @ w + a, g.T @ (a + 1.0) + total, torch.addmm(bias, a, w[:3].T)]

    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 130), (140, 130), (128, 140), (140, 130), (3,))
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    for found, expected in zip(compiled(function, given)(list(given)), function(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert "product_out(" in sources[0]


def test_a_source_without_products_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, call = "\nvoid entry(", "aoti_torch_cpu_mm_out(c, a, b)"
    assert products.with_products(f"{entry}) {{}}", entry) == f"{entry}) {{}}"
    assert products.with_products(call, entry) == call
    assert f"{entry}) {{ product_out(c, a, b); }}" in products.with_products(f"{entry}) {{ {call}; }}", entry)
    monkeypatch.setattr(products, "library_is_slow", lambda: False)
    assert products.with_products(f"{entry}) {{ {call}; }}", entry) == f"{entry}) {{ {call}; }}"


def test_without_it_a_library_is_built_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_source", lambda: "nonsense")
    a, b = torch.randn(21, 23), torch.randn(23, 25)
    run = compile_graph(lambda a, b: [torch.mm(a, b) + 2.0], [a, b])
    assert isinstance(run, Building)
    monkeypatch.setattr(run, "_otherwise", lambda: pytest.fail("compiled without the C++ wrapper"))
    torch.testing.assert_close(run([a, b])[0], a @ b + 2.0)


def test_formulas_leave_to_it_what_it_can_do() -> None:
    """For the library, the gradient of a layer with more outputs than inputs is turned round."""
    g, x = torch.randn(50, 20), torch.randn(50, 17)
    assert rewrites.mm(g.T, x) is None
    assert rewrites.mm(g.double().T, x.double()) is not None


@slow
def test_processors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    products.library_is_slow.cache_clear()
    try:
        for maker, expected in (("AuthenticAMD", True), ("GenuineIntel", False)):
            monkeypatch.setattr(Path, "read_text", lambda _, maker=maker: f"vendor_id : {maker}")
            products.library_is_slow.cache_clear()
            assert products.library_is_slow() is (expected and torch.backends.mkl.is_available())
    finally:
        monkeypatch.undo()
        products.library_is_slow.cache_clear()
