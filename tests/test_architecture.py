"""The architecture: imports point one way, private names stay private, modules stay small, importing stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from project import ROOT, SOURCE
from test_plugins import PLUGINS

import seminode as sn

#: Modules and packages of `seminode`, from the lowest layer up. A module may import from lower layers and, within a
#: package that is listed as a whole, from its siblings.
LAYERS = [
    {
        "errors",
        "events",
        "_conditions",
        "_moved",
        "_polynomials",
        "_ranks",
        "_host_numbers",
        "_untyped",
        "_field.pytree",
        "_field.places",
        "_field.lineage",
        "_field.linearisation",
        "_field.buffers",
        "_stepping.budget",
        "_stepping.checkpoints",
        "_compile.process",
        "_compile.products",
        "_compile.symbolic_sizes",
        "_compile.torch_private",
    },
    {"_compile.chain"},
    {"_compile.dispatch_mode", "_compile.collector", "_compile.library", "_compile.stance"},
    {
        "tableaux",
        "norms",
        "_real_numbers",
        "_field.capture",
        "_field.random_numbers",
        "_field.reach",
        "_stepping.combination",
        "_stepping.roots",
        "_stepping.elementwise",
        "_compile.batch_axis",
        "_compile.rewrites",
        "_integrals.nan_probe",
    },
    {"_compile.recompute"},
    {"_compile.packing"},
    {
        "tableaux_implicit",
        "_error_norm",
        "_stepping.interpolation",
        "_field.accounting",
        "_field.field",
        "_field.determinism",
        "_field.sharding",
        "_verification",
        "_compile.graph",
        "_compile.inductor",
    },
    {
        "solution",
        "solvers",
        "_field.event_function",
        "_stepping.first_step",
        "_integrals.detect",
        "_stepping.output_blocks",
        "_compile.front_end",
    },
    {"controllers"},
    {"grids"},
    {
        "_stepping.problem",
        "_stepping.schedule",
        "_stepping.lane_control",
        "_stepping.lane_places",
        "_field.checks",
        "_field.rank_checks",
    },
    {"_stepping.known_plans", "_stepping.observers", "_stepping.step", "_stepping.lane_plan", "_field.batch_checks"},
    {
        "_stepping.engine",
        "_stepping.event_search",
        "_stepping.progress",
        "_stepping.lanes",
        "_stepping.outputs",
        "_stepping.lane_outputs",
        "_compile.capturing",
        "_compile.programs",
        "_integrals.auto_norm",
        "_integrals.separability",
    },
    {"_stepping.stiffness"},
    {"_compile.ahead", "_compile.coupled_stepper"},
    {
        "_stepping.beginning",
        "_stepping.loop",
        "_stepping.lane_step",
        "_stepping.lane_event_search",
        "_stepping.scipy_steps",
        "_compile.engine",
    },
    {"adjoints", "_compile.background"},
    {"_repetition"},
    {"solve", "extending"},
    {"paths", "diagnostics"},
    {"models", "compat"},
    {"training"},
    {"cli"},
]


def layer_of(module: str) -> tuple[int, str]:
    """The layer of a module, and the entry of `LAYERS` that it belongs to."""
    for i, layer in enumerate(LAYERS):
        for entry in layer:
            if module == entry or module.startswith(entry + "."):
                return i, entry
    raise AssertionError(f"{module} belongs to no layer: add it to LAYERS")


def module_of(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, source: Path) -> list[tuple[str, int]]:
    """Modules of `seminode` that a file imports when it is loaded (not those for type checking), with line numbers."""
    found = []
    package = ["seminode", *path.relative_to(source).parent.parts]

    def is_module(parts: list[str]) -> bool:
        place = source.joinpath(*parts)
        return place.with_suffix(".py").exists() or place.is_dir()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *(node.module.split(".") if node.module else [])]
            if names[0] == "seminode":
                for alias in node.names:
                    whole = [*names[1:], alias.name]
                    found.append((".".join(whole if is_module(whole) else names[1:]), node.lineno))
            elif names[0] == "seminode_lab":
                found.append(("seminode_lab", node.lineno))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "seminode" and len(parts) > 1:
                    found.append((".".join(parts[1:]), node.lineno))
                elif parts[0] == "seminode_lab":
                    found.append(("seminode_lab", node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def upward_imports(source: Path) -> list[str]:
    wrong = set()
    for path in sorted(source.rglob("*.py")):
        module = module_of(path, source)
        if path.parent == source and path.stem in ("__init__", "__main__"):
            continue
        if path.stem == "__init__" and path.parent.parent == source and path.parent.name.startswith("_"):
            continue
        layer, entry = layer_of(module)
        for imported, line in imports(path, source):
            if imported == "seminode_lab":
                wrong.add(f"{path.relative_to(source)}:{line} imports seminode_lab")
                continue
            other, other_entry = layer_of(imported)
            if other_entry != entry and other >= layer:
                wrong.add(f"{path.relative_to(source)}:{line} imports {imported}")
    return sorted(wrong)


def test_imports_point_one_way() -> None:
    assert upward_imports(SOURCE) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("norms.py", "from ._stepping.loop import integrate"),
        ("_stepping/loop.py", "from seminode.adjoints import Replay"),
        ("controllers.py", "import seminode._stepping.engine"),
        ("solvers/explicit.py", "from .._stepping.schedule import Schedule"),
        ("_stepping/problem.py", "def late():\n    from .. import solve"),
        ("solve.py", "from seminode_lab import training"),
    ],
)
def test_a_planted_upward_import_is_found(module: str, line: str, tmp_path: Path) -> None:
    planted = tmp_path / "seminode"
    for path in SOURCE.rglob("*.py"):
        target = planted / path.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    assert upward_imports(planted) == []
    (planted / module).write_text((planted / module).read_text() + f"\n{line}\n")
    assert len(upward_imports(planted)) == 1


#: A private name of torch in a line of code: `torch._C`, `torch.utils._pytree`, `torch.fx.experimental`.
PRIVATE = re.compile(r"\btorch(\.\w+)*\._[A-Za-z]|\btorch\.fx\.experimental\b")
DOOR = SOURCE / "_compile" / "torch_private.py"


def imported_names(code: str) -> Iterator[tuple[str, int]]:
    """The full names that a piece of Python imports absolutely, with line numbers."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def private_torch_names(path: Path) -> list[str]:
    """The lines of a file that touch private names of torch."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {i for i, line in enumerate(lines, 1) if PRIVATE.search(line)}
    found |= {line for name, line in imported_names(text) if PRIVATE.search(name)}
    return [f"{path.name}:{i}: {lines[i - 1].strip()}" for i in sorted(found)]


def test_only_one_module_touches_private_names_of_torch() -> None:
    files = [path for path in sorted(SOURCE.parent.rglob("*.py")) if path != DOOR]
    assert [line for path in files for line in private_torch_names(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _functorch",
        "from torch import _C",
        "from torch.nn.modules.batchnorm import (\n    BatchNorm1d,\n    _NormBase,\n)",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.fx import experimental",
        "x = torch._foreach_add_(a, b)",
        "x = torch.utils._pytree.tree_map(f, y)",
        "def late():\n    import torch._inductor.config as config",
    ],
)
def test_a_planted_private_name_of_torch_is_found(line: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"import torch\nfrom torch.fx import Graph\nprint(torch.__version__)\n{line}\n")
    assert len(private_torch_names(planted)) == 1


def names_behind_the_door() -> set[str]:
    """The names that torch_private.py looks up: arguments of its look-up functions, and any other name in a string."""
    tree, found = ast.parse(DOOR.read_text(encoding="utf-8")), set()
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if ast.unparse(node.func) in ("private", "_or_none") and len(texts) == 2:
                found.add(".".join(texts))
                modules.add(texts[0])
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | {text for text in strings - modules if re.fullmatch(r"torch\.(utils\.)?_[\w.]+", text)}


def test_every_private_name_of_torch_is_explained() -> None:
    names = names_behind_the_door()
    assert {"torch._foreach_add_", "torch._inductor.config", "torch._dynamo"} < names
    text = (DOOR.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(torch\.[\w.]+)` \|.*\| (?:yes|no) \| (?:yes|no) \| .+ \|$", text, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == names


#: Hides all private names of torch from seminode, before it is imported, and solves.
WITHOUT_PRIVATE_NAMES = """
import importlib, sys, warnings

find, DOOR = importlib.import_module, "seminode._compile.torch_private"

def hidden(name, package=None):
    if sys._getframe(1).f_globals["__name__"] == DOOR:
        raise ImportError(name)
    return find(name, package)

importlib.import_module = hidden
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
import torch
import seminode as sn

door = sys.modules[DOOR]
assert door._or_none("torch._C", "_are_functorch_transforms_active") is None
assert door._no_transforms is None and door._foreach_add is None and door.TorchDispatchMode is door._NoDispatchMode

weight = torch.tensor([[0.3, -0.5], [0.7, 0.2]], dtype=torch.float64, requires_grad=True)

def gradient(**options):
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: torch.tanh(weight @ y), y0, [0.0, 0.5, 1.0], **options)
    return torch.cat([x.reshape(-1) for x in torch.autograd.grad(sol.ys.square().sum(), (y0, weight))])

expected = gradient()
for adjoint in (sn.Direct(), sn.Checkpointed(2), sn.Backsolve(), sn.Interpolating(), sn.Quadrature()):
    torch.testing.assert_close(gradient(adjoint=adjoint), expected, rtol=1e-4, atol=1e-6)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", sn.CompileWarning)
    torch.testing.assert_close(gradient(compile=True), expected, rtol=1e-12, atol=0.0)
print(*expected.tolist())
print(*(f"{w.category.__name__}: {w.message}" for w in caught), sep="\\n")
"""


def test_everything_eager_works_without_private_names_of_torch() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_PRIVATE_NAMES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    gradient, *warned = run.stdout.splitlines()
    weight = torch.tensor([[0.3, -0.5], [0.7, 0.2]], dtype=torch.float64, requires_grad=True)
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: torch.tanh(weight @ y), y0, [0.0, 0.5, 1.0])
    with_them = torch.autograd.grad(sol.ys.square().sum(), (y0, weight))
    expected = torch.cat([x.reshape(-1) for x in with_them]).tolist()
    assert list(map(float, gradient.split())) == pytest.approx(expected, rel=1e-12)
    assert len(warned) == 1
    assert re.match(
        r"CompileWarning: compile: the solve runs eagerly, since MissingPrivateName: torch .* has no", warned[0]
    )


def hidden_modules(code: str) -> list[str]:
    """The names that a piece of Python imports from modules of `seminode` that start with an underscore."""
    found = []
    for name, line in imported_names(code):
        package, *parts = name.split(".")
        if package in ("seminode", "seminode_lab") and any(re.match(r"_[a-z]", part) for part in parts):
            found.append(f"line {line}: {name}")
    return found


def page_blocks() -> Iterator[tuple[str, str]]:
    """The Python blocks on the pages, each with the name of its page."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        yield from ((page.name, code) for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def test_examples_the_lab_and_pages_import_public_modules() -> None:
    files = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "src" / "seminode_lab").rglob("*.py")]
    codes = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in files]
    codes += page_blocks()
    assert len(codes) > 60
    assert [f"{where}, {name}" for where, code in codes for name in hidden_modules(code)] == []


def test_plugins_import_public_modules() -> None:
    files = {name: text for plugin in PLUGINS for name, text in plugin.files.items()}
    assert [f"{name}, {hidden}" for name, text in files.items() for hidden in hidden_modules(text)] == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("import seminode as sn", 0),
        ("from seminode.solvers import Solver", 0),
        ("from __future__ import annotations", 0),
        ("from seminode import __version__", 0),
        ("import seminode._stepping.loop", 1),
        ("from seminode._field import checks", 1),
        ("from seminode import _stepping", 1),
        ("from seminode.adjoints import _autograd", 1),
        ("from seminode.adjoints._autograd import (\n    Inputs,\n    detect,\n)", 2),
        ("def late():\n    from seminode.controllers import _positive", 1),
    ],
)
def test_a_planted_import_of_a_hidden_module_is_found(line: str, count: int) -> None:
    assert len(hidden_modules(f"import torch\n{line}\n")) == count


def test_modules_and_functions_stay_small() -> None:
    """About 400 lines a file and 60 a function, docstrings not counted."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                doc = (ast.get_docstring(node) or "").count("\n")
                assert (node.end_lineno or 0) - node.lineno + 1 - doc <= 60, (path, node.name)


LOADED = """
import sys, seminode
print(*{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
from seminode import cli
cli.main(["data", "status"])
print(*{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def test_importing_and_the_data_command_load_nothing_of_the_lab() -> None:
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    imported, after_command = (set(line.split()) for line in run.stderr.splitlines())
    heavy = {"matplotlib", "ray", "scipy", "pandas", "safetensors", "sklearn", "tensorboard", "torchdiffeq"}
    assert "seminode" in imported
    assert heavy & imported == set()
    assert "seminode_lab" in after_command
    assert {"matplotlib", "scipy", "sklearn", "safetensors", "librosa"} & after_command == set()


@pytest.mark.slow
def test_importing_is_cheap() -> None:
    code = "import time, torch; a = time.perf_counter(); import seminode; print(time.perf_counter() - a)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.25
