"""The shape of the house: imports point one way, rooms stay small, starting up stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "seminode"

#: Rooms from the ground floor up. A room may import from lower floors, and within a package from its siblings.
FLOORS = [
    {"errors", "checkpoints", "combination", "rewrites", "rules", "state", "tableaux"},
    {"norms", "interpolation", "parameters", "taint", "graphs"},
    {"problem", "field", "purity"},
    {"solvers", "controllers", "integrals", "observers"},
    {"pace", "engine", "programs", "steering"},
    {"loop", "arguments", "fused"},
    {"adjoints"},
    {"solve"},
    {"paths", "diagnostics"},
    {"models"},
    {"experiments"},
    {"cli"},
]


def room_of(path: Path, source: Path) -> str:
    return path.relative_to(source).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    for i, floor in enumerate(FLOORS):
        if room in floor:
            return i
    raise AssertionError(f"{room} stands on no floor: add it to FLOORS")


def imports(path: Path, source: Path) -> list[tuple[str, int]]:
    """Rooms that a file imports when it is loaded (imports for type checking do not count), with line numbers."""
    found = []
    package = ["seminode", *path.relative_to(source).parent.parts]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [*base, *(node.module.split(".") if node.module else [])]
            if names[0] == "seminode":
                rooms = [names[1]] if len(names) > 1 else [alias.name for alias in node.names]
                found.extend((room, node.lineno) for room in rooms)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "seminode" and len(parts) > 1:
                    found.append((parts[1], node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def upward_imports(source: Path) -> list[str]:
    wrong = []
    for path in sorted(source.rglob("*.py")):
        room = room_of(path, source)
        if room in ("__init__", "__main__"):
            continue
        for imported, line in imports(path, source):
            if imported != room and floor_of(imported) >= floor_of(room):
                wrong.append(f"{path.relative_to(source)}:{line} imports {imported}")
    return wrong


def test_imports_point_one_way() -> None:
    assert upward_imports(SOURCE) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("norms.py", "from .loop import integrate"),
        ("loop.py", "from seminode.adjoints import Replay"),
        ("controllers.py", "import seminode.engine"),
        ("solvers/explicit.py", "from ..pace import Pace"),
        ("problem.py", "def late():\n    from . import solve"),
    ],
)
def test_a_planted_upward_import_is_found(room: str, line: str, tmp_path: Path) -> None:
    planted = tmp_path / "seminode"
    for path in SOURCE.rglob("*.py"):
        target = planted / path.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    assert upward_imports(planted) == []
    (planted / room).write_text((planted / room).read_text() + f"\n{line}\n")
    assert len(upward_imports(planted)) == 1


def test_rooms_and_functions_stay_small() -> None:
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
