"""Builds compiled libraries in parallel: while the C++ compiler works, the next program is traced."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .chain import Chain, with_chain
from .products import with_products
from .torch_private import MissingPrivateName

Program = Callable[[list[Any]], Sequence[Tensor]]

#: How the function begins that calls the kernels of a library one after the other.
_WRAPPER = "\nvoid inductor_entry_impl("
_QUICK_WRAPPER = """
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O1")))
#endif
void inductor_entry_impl("""

_FOLDER = "torch/csrc/inductor/cpp_wrapper/"
_HEADER = f"#include <{_FOLDER}cpu.h>\n"
#: What the header includes that takes long to read, and a word that occurs in every source which needs it.
_UNUSED = {"#include <torch/csrc/stable/library.h>\n": "stable::", "#include <filesystem>\n": "filesystem"}


def quickly_built(build: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """What `build` makes of a source that takes less time to compile, has products of matrices of its own and can be
    called as a chain; or of the source as it is, if that fails."""
    try:
        return build(lambda code: with_chain(_with_short_header(quick_wrapper(with_products(code, _WRAPPER)))))
    except Exception:
        return build()


def quick_wrapper(code: str) -> str:
    """The source of a library, but that the function which calls its kernels is hardly optimised.

    It is a long list of calls without loops: to optimise it takes as long as all kernels, and the calls themselves take
    most of its time.
    """
    return code.replace(_WRAPPER, _QUICK_WRAPPER, 1)


def _with_short_header(code: str) -> str:
    """The source with the text of a header in place of the header, without includes that are not needed."""
    if any(word in code for word in _UNUSED.values()):
        return code
    text = _common_header()
    for line in _UNUSED:
        text = text.replace(line, "")
    return code.replace(_HEADER, f"{text}\n#include <{_FOLDER}device_internal/cpu.h>\n", 1) if text else code


@functools.cache
def _common_header() -> str:
    """The header on which those for all devices are based; empty if this version of torch is another one."""
    folder = Path(torch.__file__).parent / "include" / _FOLDER
    try:
        own, common = (folder / name for name in ("cpu.h", "common.h"))
        lines = [line for line in own.read_text().splitlines() if line.startswith("#include")]
        known = [f"#include <{_FOLDER}{name}>" for name in ("common.h", "device_internal/cpu.h")]
        return common.read_text().replace("#pragma once\n", "") if lines == known else ""
    except OSError:
        return ""


class Library:
    """A function of a library that is built in a thread of its own, and can be called when that has ended."""

    def __init__(self, build: Callable[[], Callable[..., Any]]):
        self._build = build
        self._function: Callable[..., Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function = self._build()
        except BaseException as error:  # raised in the thread that waits for it
            self._error = error

    def wait(self) -> None:
        """Wait until it can be called. Raises the error if the build failed."""
        self._thread.join()
        if self._function is None and self._error is None:
            self._run()  # in a copy of the process, which has no such thread
        if self._error is not None:
            raise self._error

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            self.wait()
        assert self._function is not None
        return self._function(*args)

    @functools.cached_property
    def chain(self) -> Chain | None:
        """What calls it several times, if it was built with that."""
        module = getattr(self._function, "__self__", None)
        try:
            return Chain(module.__file__)  # type: ignore[union-attr]
        except (AttributeError, OSError, MissingPrivateName):
            return None


class Building:
    """A program whose libraries may still be built. `otherwise` makes another one if that fails.

    `strides` are those of its outputs, if they are known.
    """

    def __init__(
        self,
        run: Program,
        libraries: Sequence[Library],
        otherwise: Callable[[], Program],
        strides: Sequence[Any] | None,
    ):
        self._program, self._libraries = run, libraries
        self._otherwise: Callable[[], Program] | None = otherwise
        self.strides = strides

    def wait(self) -> None:
        """Until it can be called."""
        otherwise, self._otherwise = self._otherwise, None
        if otherwise is None:
            return
        try:
            for library in self._libraries:
                library.wait()
        except Exception:
            self._program = otherwise()

    @property
    def chain(self) -> Chain | None:
        """What calls the program several times, if that can be done."""
        return self._libraries[0].chain if self._otherwise is None and len(self._libraries) == 1 else None

    def __call__(self, inputs: list[Any]) -> Sequence[Tensor]:
        if self._otherwise is not None:
            self.wait()
        return self._program(inputs)


class Unfinished:
    """The programs that are being built. Code that makes a program takes those that belong to it."""

    def __init__(self) -> None:
        self._programs: list[Building] = []

    def add(self, program: Building) -> Building:
        self._programs.append(program)
        return program

    def made_by(self, make: Callable[[], Any]) -> tuple[Any, list[Building]]:
        """What a function returns, and what it has begun to build."""
        before, self._programs = self._programs, []
        try:
            return make(), self._programs
        finally:
            self._programs = before


#: Of the thread that compiles; there is one at a time.
unfinished = Unfinished()
