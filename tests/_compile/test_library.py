"""Libraries that are built in threads, and programs that wait for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from compiled import forget_programs

import seminode as sn
from seminode._compile import inductor, torch_private
from seminode._compile.graph import FieldGraph, NotCompiled, Unavailable
from seminode._compile.library import Building, Library, quickly_built, unfinished


def test_a_library_is_built_in_another_thread_and_called_when_it_is_there() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def build() -> Any:
        begun.set()
        assert go_on.wait(60)
        return lambda x: x + 1

    library = Library(build)
    assert begun.wait(60)
    go_on.set()
    assert library(1) == 2


def test_an_error_is_raised_where_one_waits() -> None:
    library = Library(lambda: 1 / 0)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            library.wait()


def test_a_copy_of_the_process_builds_it_itself() -> None:
    library = Library(lambda: lambda: 5)
    library.wait()
    library._function = None  # as in a copy that was made before the thread had ended
    assert library() == 5


def test_another_program_takes_the_place_of_one_that_cannot_be_built() -> None:
    other = [torch.ones(1)]
    building = Building(lambda inputs: [], [Library(lambda: 1 / 0)], lambda: lambda inputs: other, None)  # type: ignore[arg-type]
    assert building([]) is other
    assert building([]) is other


class TestAhead:
    def test_programs_are_made_without_waiting(self) -> None:
        go_on, graph = threading.Event(), FieldGraph(lambda *inputs: inputs)  # type: ignore[arg-type]

        def library() -> Any:
            assert go_on.wait(60)
            return lambda: None

        def make() -> Any:
            return unfinished.add(Building(lambda inputs: inputs, [Library(library)], lambda: lambda inputs: [], None))

        with graph.ahead():
            first = graph.program("first", make)
            second = graph.program("second", make)
        assert not go_on.is_set()
        assert first is not second
        go_on.set()
        assert graph.program("first", make) is first
        assert first._otherwise is None  # it has been waited for
        assert second._otherwise is not None

    def test_what_fails_later_is_remembered(self) -> None:
        graph = FieldGraph(lambda *inputs: inputs)  # type: ignore[arg-type]

        def otherwise() -> Any:
            raise ValueError("no compiler")

        def make() -> Any:
            return unfinished.add(Building(lambda inputs: inputs, [Library(lambda: 1 / 0)], otherwise, None))  # type: ignore[arg-type]

        with graph.ahead():
            graph.program("step", make)
        with pytest.raises(NotCompiled, match="no compiler"):
            graph.program("step", make)
        assert graph._programs["step"] == Unavailable("ValueError: no compiler")


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_all_programs_of_a_first_solve_are_begun_before_the_first_step(
    adjoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real back end; a step that is taken while others are built gives the same answer as an eager one."""
    forget_programs(monkeypatch)
    compiled, original = [], inductor.back_end

    def noted(module: Any, examples: list[Any]) -> Any:
        compiled.append(original(module, examples))
        return compiled[-1]

    monkeypatch.setattr(inductor, "back_end", noted)
    weight = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)

    def gradient(compile: bool) -> torch.Tensor:
        y0 = torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64)
        ys = sn.solve(
            lambda t, y: weight * torch.sin(y), y0, [0.0, 2.0], solver="bosh3", adjoint=adjoint, compile=compile
        ).ys
        if compile:
            made.append(len(compiled))
        return torch.autograd.grad(ys[-1].sum(), weight)[0]

    made: list[int] = []
    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-9, atol=1e-12)
    assert made == [3]
    assert len(compiled) == 3  # the backward pass has found its program
    assert all(isinstance(each, Building) for each in compiled)


def test_without_local_options_libraries_are_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache, config

    before = codecache.CppWrapperCodeCache.load_pybinding
    with torch_private.libraries_by(lambda build: build()):
        assert codecache.CppWrapperCodeCache.load_pybinding != before
    assert codecache.CppWrapperCodeCache.load_pybinding == before
    monkeypatch.setattr(config._config["cpp_wrapper"], "user_override", None)  # type: ignore[attr-defined]
    with torch_private.libraries_by(lambda build: build()):
        assert codecache.CppWrapperCodeCache.load_pybinding == before


def _sources(monkeypatch: pytest.MonkeyPatch, broken: bool = False) -> list[str]:
    """Of what is built from now on. With `broken`, what was made of a source cannot be compiled."""
    sources: list[str] = []

    def noted(build: Any) -> Any:
        def build_noted(edited: Any = str) -> Any:
            def changed(code: str) -> str:
                sources.append(edited(code))
                return sources[-1] + ("\nnonsense" if broken and edited is not str else "")

            return build(changed)

        return quickly_built(build_noted)

    monkeypatch.setattr(inductor, "quickly_built", noted)
    return sources


def test_sources_are_edited_to_compile_in_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the function that calls the kernels is compiled with less optimisation, and headers are left out."""
    sources = _sources(monkeypatch)
    run = inductor.compile_graph(lambda x: [torch.sin(x) + 1.0], [torch.ones(37)])
    x = torch.linspace(0.0, 1.0, 37)
    torch.testing.assert_close(run([x])[0], torch.sin(x) + 1.0)
    (source,) = sources
    assert source.count("optimize(") == 1
    assert source.split("optimize(")[1].split("void ", 1)[1].startswith("inductor_entry_impl(")
    assert "class RAIIPyObject" in source
    assert "stable/library.h" not in source


def test_a_source_that_cannot_be_edited_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = _sources(monkeypatch, broken=True)
    run = inductor.compile_graph(lambda x: [torch.cos(x) + 3.0], [torch.ones(37)])
    assert isinstance(run, Building)
    monkeypatch.setattr(run, "_otherwise", lambda: pytest.fail("compiled without the C++ wrapper"))
    x = torch.linspace(0.0, 1.0, 37)
    torch.testing.assert_close(run([x])[0], torch.cos(x) + 3.0)
    edited, plain = sources
    assert "optimize(" in edited
    assert "optimize(" not in plain


def test_the_rules_for_dtypes_are_filled_once_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Table

    calls, fill = [0], Table.__init__

    def counted(self: Any) -> None:
        calls[0] += 1
        fill(self)

    monkeypatch.setattr(Table, "__init__", counted)
    with config.patch(fx_graph_cache=False):
        run = inductor.compile_graph(lambda x: [torch.sin(x) + torch.cos(x) * 0.5], [torch.ones(37)])
    assert calls[0] == 1
    assert Table.__init__ is counted  # as it was
    x = torch.linspace(0.0, 1.0, 37)
    torch.testing.assert_close(run([x])[0], torch.sin(x) + torch.cos(x) * 0.5)


def test_instructions_are_selected_before_threads_build_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the source is found on disk: flags change while they are selected, and are a part of a file's name."""
    from torch._inductor import config, cpu_vec_isa

    selected: list[int] = []

    def noted(build: Any) -> Any:
        selected.append(cpu_vec_isa.valid_vec_isa_list.cache_info().currsize)
        return quickly_built(build)

    monkeypatch.setattr(inductor, "quickly_built", noted)
    x = torch.linspace(0.0, 1.0, 37)
    with config.patch(fx_graph_cache=True):
        for _ in range(2):
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
            run = inductor.compile_graph(lambda x: [torch.sin(x) * 0.7 - 2.0], [torch.ones(37)])
            torch.testing.assert_close(run([x])[0], torch.sin(x) * 0.7 - 2.0)
    assert selected == [1, 1]
