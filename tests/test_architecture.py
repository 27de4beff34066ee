"""The architecture: imports point one way, modules stay small, importing stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from project import SOURCE

#: Modules and packages of `seminode`, from the lowest layer up. A module may import from lower layers and, within a
#: package that is listed as a whole, from its siblings.
LAYERS = [
    {"errors", "tableaux", "_field.pytree", "_stepping.checkpoints", "_stepping.combination", "_compile.rewrites"},
    {"norms", "_stepping.interpolation", "_field.capture", "_integrals.nan_probe", "_compile.graph"},
    {"_stepping.problem", "_field.field", "_field.determinism"},
    {"solvers", "controllers", "_integrals.detect", "_stepping.observers"},
    {"_stepping.schedule", "_stepping.engine", "_compile.programs", "_integrals.auto_norm"},
    {"_stepping.loop", "_field.checks", "_compile.engine"},
    {"adjoints"},
    {"solve"},
    {"paths", "diagnostics"},
    {"models"},
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


def test_modules_and_functions_stay_small() -> None:
    """About 400 lines a file and 60 a function, docstrings not counted."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                doc = (ast.get_docstring(node) or "").count("\n")
                assert (node.end_lineno or 0) - node.lineno + 1 - doc <= 60, (path, node.name)


def test_importing_loads_nothing_of_the_lab() -> None:
    code = "import sys, seminode; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"matplotlib", "ray", "scipy", "pandas", "safetensors", "sklearn", "tensorboard", "torchdiffeq"}
    assert heavy & set(run.stdout.split()) == set()


@pytest.mark.slow
def test_importing_is_cheap() -> None:
    code = "import time, torch; a = time.perf_counter(); import seminode; print(time.perf_counter() - a)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.25
