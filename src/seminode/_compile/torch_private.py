"""The only module that uses private names of torch.

Every name is looked up when it is first needed, so that importing the package needs none of them. README.md in this
folder says what each is for and what happens without it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class MissingPrivateName(ImportError):
    """This version of torch has no such private name."""


@functools.cache
def private(module: str, name: str) -> Any:
    """A private name of torch; raises `MissingPrivateName` if this version does not have it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingPrivateName(f"torch {torch.__version__} has no {module}.{name}") from error


def _or_none(module: str, name: str) -> Any:
    try:
        return private(module, name)
    except MissingPrivateName:
        return None


_no_transforms = _or_none("torch._C", "_are_functorch_transforms_active")


def transforms_active() -> bool:
    """Whether we are inside a torch.func transform, where tensors have no values to look at."""
    return _no_transforms is not None and _no_transforms()


def is_wrapped(x: Tensor) -> bool:
    """Whether a torch.func transform wraps this tensor."""
    wrapped = _or_none("torch._C._functorch", "is_functorch_wrapped_tensor")
    return wrapped is not None and wrapped(x)


def is_batched(grad: Tensor | None) -> bool:
    """Whether a gradient stands for a batch of them, as with `torch.autograd.grad(..., is_grads_batched=True)`.

    That uses an older vmap, of which `transforms_active` does not know.
    """
    batched = _or_none("torch._C._functorch", "is_legacy_batchedtensor")
    return grad is not None and batched is not None and batched(grad)


@contextlib.contextmanager
def transforms_unwound() -> Iterator[None]:
    """A transform of torch.func that fails half-way may leave its layers behind, and nothing would work any more."""
    depth_of = _or_none("torch._C._functorch", "get_dynamic_layer_stack_depth")
    undo_to = _or_none("torch._C._functorch", "pop_dynamic_layer_stack_and_undo_to_depth")
    if depth_of is None or undo_to is None:
        yield
        return
    depth = depth_of()
    try:
        yield
    finally:
        if depth_of() > depth:
            with contextlib.suppress(RuntimeError):  # torch 2.8 complains if none is left
                undo_to(depth)


def compiler_loaded() -> bool:
    """Whether torch's compiler has been imported, which takes seconds."""
    return "torch._dynamo" in sys.modules


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile step over a function and what it calls, other than what is compiled itself.

    A solver's loop is decided by values: traced, it falls into a hundred pieces. `torch.compiler.disable` does the
    same, but loads the compiler, which takes seconds, at import.
    """
    try:
        strategy = private("torch._C._dynamo.eval_frame", "_FrameExecStrategy")
        action = private("torch._C._dynamo.eval_frame", "_FrameAction")
        set_strategy = private("torch._C._dynamo.eval_frame", "set_code_exec_strategy")
        # Leave the frames of the function alone, but not of those that it calls.
        alone = strategy(action.SKIP, action.DEFAULT)
        set_eval_frame = private("torch._C._dynamo.eval_frame", "set_eval_frame")
    except (MissingPrivateName, AttributeError, TypeError):  # traced, it still works
        return function

    def stepped_over(*args: P.args, **kwargs: P.kwargs) -> R:
        tracer = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(tracer)

    set_strategy(stepped_over.__code__, alone)
    stepped_over.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg="solve() decides by values")
    return functools.wraps(function)(stepped_over)


_foreach_add = _or_none("torch", "_foreach_add_")


def add_all(totals: Sequence[Tensor], terms: Sequence[Tensor], weight: float) -> None:
    """totals[i] += weight·terms[i] in place, in one call where torch has one."""
    if _foreach_add is not None:
        _foreach_add(totals, terms, alpha=weight)
        return
    for total, term in zip(totals, terms, strict=True):
        total.add_(term, alpha=weight)


_engine = _or_none("torch._C", "_ImperativeEngine")
_run_backward = None if _engine is None else _engine().run_backward


def backpropagate(
    values: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad(values, inputs, cotangents, allow_unused=True)` without its checks in Python.

    They take as long as the VJP of a small layer. Cotangents must have the shapes and the dtypes of the values.
    """
    if _run_backward is None:
        return torch.autograd.grad(values, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)
    options = {"allow_unreachable": True, "accumulate_grad": False}
    return _run_backward(tuple(values), tuple(cotangents), retain_graph, False, tuple(inputs), **options)


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Operations in here are not seen by `TorchFunctionMode`s."""
    return private("torch._C", "DisableTorchFunction")()


def without_torch_dispatch() -> contextlib.AbstractContextManager[Any]:
    """Operations in here are not seen by `TorchDispatchMode`s."""
    return private("torch._C", "_DisableTorchDispatch")()


class _NoDispatchMode:
    def __init__(self) -> None:
        private("torch.utils._python_dispatch", "TorchDispatchMode")  # says that it is missing


#: The base class of modes that see every operation of the dispatcher; see `DispatchMode`.
TorchDispatchMode: Any = _or_none("torch.utils._python_dispatch", "TorchDispatchMode") or _NoDispatchMode
_NON_INFRA = "torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode"


def dispatch_flags() -> dict[str, bool]:
    """Whether some thread is in such a mode, as torch notes it for the whole process."""
    known = vars(sys.modules["torch.utils._python_dispatch"])
    names = "torch.utils._python_dispatch._is_in_torch_dispatch_mode", _NON_INFRA
    return {each: known[each] for name in names if (each := name.rpartition(".")[2]) in known}


def set_dispatch_flags(flags: dict[str, bool]) -> None:
    vars(sys.modules["torch.utils._python_dispatch"]).update(flags)


def make_fx(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A tracer from a function of tensors to a graph of plain tensor operations."""
    return private("torch.fx.experimental.proxy_tensor", "make_fx")(function, *args, **options)


def usual_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor makes of operations before it compiles them."""
    return private("torch._inductor.decomposition", "select_decomp_table")()


def partition(module: torch.fx.GraphModule, outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut the graph of a function and its VJP into two, with as little as possible kept between them."""
    cut = private("torch._functorch.partitioners", "min_cut_rematerialization_partition")
    return cut(module, None, num_fwd_outputs=outputs)


def inductor(module: torch.fx.GraphModule, examples: list[Any], options: dict[str, Any]) -> Any:
    """Compile a graph with Inductor; the result takes a list of inputs."""
    caches = importlib.import_module("torch._functorch.config")
    context, tracing = private("torch._guards", "TracingContext"), private("torch._guards", "tracing")
    config = importlib.import_module("torch._inductor.config")
    compile_inner = private("torch._inductor.compile_fx", "compile_fx_inner")
    fake = private("torch._subclasses.fake_tensor", "FakeTensorMode")
    shapes = private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")
    # Tensors without values: otherwise those would be part of the name by which a program is found on disk again. On
    # disk it is looked for only if nobody waits for a bundle of both passes to be stored.
    inputs = all_without_values(examples)
    if inputs is examples:
        mode = fake(shape_env=shapes())
        inputs = [static_fake(mode, x) for x in examples]
    else:
        mode = mode_of(inputs)
    bundled = hasattr(caches, "bundled_autograd_cache")
    alone = caches.patch(bundled_autograd_cache=False) if bundled else contextlib.nullcontext()
    if getattr(config.cpp, "vec_isa_ok", False) is None and _all_instructions_known():
        options = options | {"cpp.vec_isa_ok": True}
    if hasattr(config, "cpp_cache_precompile_headers"):
        options = options | {"cpp_cache_precompile_headers": False}  # to look for one takes as long as to read it
    with tracing(context(mode)), config.patch(options), alone, _quick():
        if options.get("cpp_wrapper", False):
            _select_instructions()
        return compile_inner(module, inputs, cpp_wrapper=options.get("cpp_wrapper", False))


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Inductor without what it does again and again, or what is known.

    Its table of dtype rules is one object, but is filled again for every operation of a kernel. If all vector
    instructions are known to the C++ compiler, only those are tried out that need more than that.
    """
    rules = _or_none("torch._inductor.utils", "op_dtype_propagation_rules")
    table = _or_none("torch._inductor.dtype_propagation", "DtypePropagationOpsHandler")
    vectors = _or_none("torch._inductor.cpu_vec_isa", "VecISA")
    fill, check, filled = getattr(table, "__init__", id), getattr(vectors, "check_build", None), set()

    def fill_once(self: Any) -> None:
        if len(rules) not in filled:  # there is one table, and rules are only added
            filled.add(len(rules))
            fill(self)

    with contextlib.ExitStack() as undo:
        if rules is not None and hasattr(table, "_instance"):
            table.__init__ = fill_once
            undo.callback(setattr, table, "__init__", fill)
        if check is not None and _all_instructions_known():
            vectors.check_build = lambda self, code: "_tile_" not in code or check(self, code)
            undo.callback(setattr, vectors, "check_build", check)
        yield


def _select_instructions() -> None:
    """Have Inductor select the vector instructions, once, before threads build libraries.

    While it checks a set of instructions it changes the flags of that set for a moment. A thread that reads them then
    builds a library with other flags, which is not found on disk again.
    """
    select = _or_none("torch._inductor.cpu_vec_isa", "pick_vec_isa")
    if select is not None:
        select()


@contextlib.contextmanager
def libraries_by(library: Callable[[Callable[..., Callable[..., Any]]], Callable[..., Any]]) -> Iterator[None]:
    """Inductor's C++ wrappers in here are what `library` makes of the function that builds and loads one.

    It may be called later, in another thread: options of Inductor are variables of a context, which is copied. Where
    they are not, or a name is missing, libraries are built at once. It takes a function that edits the source.
    """
    cache = _or_none("torch._inductor.codecache", "CppWrapperCodeCache")
    config = importlib.import_module("torch._inductor.config")
    option = getattr(config, "_config", {}).get("cpp_wrapper")
    local = isinstance(getattr(option, "user_override", None), contextvars.ContextVar)
    if not local or not hasattr(cache, "load_pybinding") or "load_pybinding" in vars(cache):
        yield
        return
    build = cache.load_pybinding

    def load_later(*args: Any, **options: Any) -> Callable[..., Any]:
        context, code = contextvars.copy_context(), options.get("main_code")

        def load(edited: Callable[[str], str] = str) -> Callable[..., Any]:
            return context.run(build, *args, **options | ({"main_code": edited(code)} if code else {}))

        return library(load)

    cache.load_pybinding = load_later
    try:
        yield
    finally:
        del cache.load_pybinding


def handles_of(tensors: list[Tensor]) -> list[Any]:
    """Capsules with handles of tensors for C++, which has to free them."""
    return private("torch._C._aoti", "unsafe_alloc_void_ptrs_from_tensors")(tensors)


def tensors_of(handles: list[Any]) -> list[Tensor]:
    """The tensors of such handles, which are freed."""
    return private("torch._C._aoti", "alloc_tensors_by_stealing_from_void_ptrs")(handles)


def mode_of(examples: Sequence[Any]) -> Any:
    """The mode of tensors without values; `None` if all have values."""
    return next((x.fake_mode for x in examples if hasattr(x, "fake_mode")), None)


def all_without_values(examples: Sequence[Any]) -> Sequence[Any]:
    """If some of these tensors have no values, all without values; the sizes of the others are fixed."""
    mode = mode_of(examples)
    return examples if mode is None else [static_fake(mode, x) for x in examples]


def static_fake(mode: Any, x: Tensor) -> Tensor:
    """The tensor without its values; unless it has none already."""
    return x if hasattr(x, "fake_mode") else mode.from_tensor(x, static_shapes=True)


def symbolic_size(hint: int) -> tuple[Any, Any]:
    """A mode in which tensors have no values, and a size that may occur in their shapes; it counts as `hint`."""
    fake = private("torch._subclasses.fake_tensor", "FakeTensorMode")
    env = private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")(duck_shape=False)
    dynamic = private("torch.fx.experimental.symbolic_shapes", "DimDynamic").DYNAMIC
    source = private("torch._dynamo.source", "ConstantSource")("batch")
    symbol = env.create_symbol(hint, source, dynamic_dim=dynamic)
    return fake(shape_env=env), env.create_symintnode(symbol, hint=hint, source=source)


@contextlib.contextmanager
def of_any_size(axes: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
    """Have the front end trace with symbolic sizes of these axes. It may still find that one has to be fixed."""
    mark = private("torch._dynamo.decorators", "maybe_mark_dynamic")
    options = importlib.import_module("torch._dynamo.config")
    for x, axis in axes:
        mark(x, axis)
    try:
        # Those of buffers would be fixed otherwise; others stay fixed by default.
        with options.patch(force_parameter_static_shapes=False, force_nn_module_property_static_shapes=False):
            yield
    finally:
        for x, _ in axes:
            for name in ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"):
                if name in vars(x):
                    delattr(x, name)


@contextlib.contextmanager
def hooks_guarded() -> Iterator[None]:
    """Have the front end guard on hooks of modules, which it leaves out by default: graphs would ignore new ones."""
    options, name = sys.modules.get("torch._dynamo.config"), "skip_nnmodule_hook_guards"
    before = getattr(options, name, False)
    if before:
        setattr(options, name, False)  # its `patch` takes five times as long
    try:
        yield
    finally:
        if before:
            setattr(options, name, True)


#: The vector instructions that Inductor asks a compiler for on x86 processors.
_X86 = ("avx512f", "avx512dq", "avx512vl", "avx512bw", "avx512vnni", "avx512bf16", "avx2", "fma", "f16c")


@functools.cache
def _all_instructions_known() -> bool:
    """Whether the C++ compiler knows the vector instructions of all processors.

    Inductor compiles and loads a library for each set of instructions that the processor has, to see whether the
    compiler knows it. With an empty cache that takes as long as the programs of a small field.
    """
    compiler = _or_none("torch._inductor.cpp_builder", "get_cpp_compiler")
    if compiler is None or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        command = [compiler(), *(f"-m{name}" for name in _X86), "-E", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except Exception:  # no compiler: Inductor says so itself
        return False


def recompile_limit(limit: int) -> dict[str, Any]:
    """The option of `torch.compile` that limits the graphs of one function.

    Older versions have one limit for all functions instead, and stop at eight graphs.
    """
    return {"recompile_limit": limit} if "recompile_limit" in signature(torch.compile).parameters else {}


def forget_code(code: CodeType) -> None:
    """Free what the compiler's front end keeps for a function's code.

    It keeps that forever, the code itself included: its table of original codes holds them by the compiled ones, and
    those are kept with the original ones.
    """
    reset = _or_none("torch._C._dynamo.eval_frame", "reset_code")
    if reset is not None:
        reset(code)
