"""Mutation testing: change one operator, number or condition at a time, and see whether a test notices.

    python -m benchmarks.mutation [MODULE ...] [--sample 300] [--seed 0] [--minutes 480] [--again] [--out FILE]

Cosmic Ray makes the mutants. Its own runner starts the same tests in a new process for every mutant; importing torch
alone takes longer than most tests here. So a process that has imported torch is copied for each mutant, which runs the
tests that cover the changed line until one fails, the quickest of each file of tests first. All of it happens in a copy
of the repository.

The fate of every mutant goes to a file at once. Another call goes on from there: it leaves out mutants that were killed
in the module as it is now, and tries the others again. `--again` tries all of them.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/seminode")
#: Modules of the core whose logic does not depend on the numbers of a method.
MODULES = ("controllers.py", "norms.py", "grids.py", "_stepping")
TESTS = (
    *("tests/_stepping", "tests/test_controllers.py", "tests/test_norms.py", "tests/test_grids.py"),
    *("tests/test_solve.py", "tests/test_events.py", "tests/test_properties.py", "tests/test_errors.py"),
    "tests/solvers/test_scipy.py",  # the tests of `scipy_steps`
)
#: Operators that floating-point numbers do not have: every test would notice.
TRIVIAL = ("RShift", "LShift", "BitOr", "BitAnd", "BitXor")
EQUIVALENT = ROOT / "benchmarks" / "equivalent_mutants.json"
#: Why mutants that could be noticed are not.
SURVIVING = ROOT / "benchmarks" / "surviving_mutants.json"
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
#: How many tests are tried without a mutant, if all of them were before.
QUICK = 100
#: A file for the output of the tests, to see why a mutant was killed.
LOG = os.environ.get("MUTATION_LOG")
#: Seconds between two looks at a process.
PAUSE = 0.02
#: The exit status of a process that could not run tests.
BROKEN = 70
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0", "-o", "addopts=--import-mode=importlib")


class Mutant(NamedTuple):
    """A change of a module: the operator of Cosmic Ray, and its how-manyeth place in the module."""

    module: str
    operator: str
    occurrence: int
    line: int
    column: int

    def applied(self, source: str) -> str:
        """The source with this change."""
        import cosmic_ray.plugins  # pyright: ignore[reportMissingImports]
        from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]

        mutated = mutate_code(source, cosmic_ray.plugins.get_operator(self.operator)(), self.occurrence)
        assert mutated is not None, "there is no such place"
        return mutated

    def compiles(self, source: str) -> bool:
        """Whether it is Python: a mutant that is not cannot be imported, which says nothing about the tests."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                compile(self.applied(source), self.module, "exec")
            except SyntaxError:
                return False
        return True

    def name(self, source: str) -> str:
        """What it is called in the list of equivalent ones: by the text of the line, since numbers of lines change."""
        before, after = (text.splitlines()[self.line - 1].strip() for text in (source, self.applied(source)))
        return f"{self.module}: {self.operator} at {self.column - _indent(source, self.line)}, `{before}` to `{after}`"


def _indent(source: str, line: int) -> int:
    text = source.splitlines()[line - 1]
    return len(text) - len(text.lstrip())


def not_run(source: str) -> set[tuple[int, int]]:
    """The places of annotations, which are never evaluated, and of code for type checkers only."""
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        found += [x for x in (getattr(node, "annotation", None), getattr(node, "returns", None)) if x is not None]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.append(node)
        if isinstance(node, ast.ClassDef) and "TypedDict" in map(ast.unparse, node.bases):
            found.append(node)
        if isinstance(node, ast.FunctionDef) and any("overload" in ast.unparse(d) for d in node.decorator_list):
            found.append(node)
    places = set()
    for node in found:
        for line in range(node.lineno, node.end_lineno + 1):  # type: ignore[attr-defined]
            first = node.col_offset if line == node.lineno else 0  # type: ignore[attr-defined]
            last = node.end_col_offset if line == node.end_lineno else 400  # type: ignore[attr-defined]
            places |= {(line, column) for column in range(first, last)}
    return places


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of Cosmic Ray."""
    import cosmic_ray.plugins  # pyright: ignore[reportMissingImports]
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]

    source = (ROOT / PACKAGE / module).read_text()
    tree, ignored = get_ast(source), not_run(source)
    for name in cosmic_ray.plugins.operator_names():
        operator_class = cosmic_ray.plugins.get_operator(name)
        if operator_class.arguments() or name.endswith(TRIVIAL) or "Decorator" in name:
            continue
        operator = operator_class()
        places = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(places):
            if (line, column) not in ignored:
                yield Mutant(module, name, occurrence, line, column)


def sample(found: Sequence[Mutant], count: int, seed: int, sources: Mapping[str, str]) -> list[Mutant]:
    """As many mutants that are Python, at most one for each place as long as there are enough places."""
    draw = random.Random(seed)
    shuffled = list(found)
    draw.shuffle(shuffled)
    seen: set[tuple[str, int, int]] = set()
    first, rest = [], []
    for mutant in shuffled:
        place = mutant.module, mutant.line, mutant.column
        (rest if place in seen else first).append(mutant)
        seen.add(place)
    return list(itertools.islice((each for each in first + rest if each.compiles(sources[each.module])), count))


class Covering:
    """Which tests run which lines, and how long each takes; also a plugin of pytest, which finds that out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, list[str]]] = {}
        self.state = ""  # of the files that it belongs to

    def pytest_runtest_setup(self, item: Any) -> None:
        import coverage  # pyright: ignore[reportMissingImports]

        current = coverage.Coverage.current()
        assert current is not None
        current.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def of(self, mutant: Mutant, longest: float) -> list[str]:
        """The tests for a mutant that take so long; for code that runs at import, all of its module's."""
        by_line = self.lines.get(mutant.module, {})
        tests = [test for test in by_line.get(mutant.line, ()) if test]
        if not tests and "" in by_line.get(mutant.line, ()):
            tests = [test for tests in by_line.values() for test in tests if test]
        own = f"test_{Path(mutant.module).stem}.py"
        # Files take turns by the time that they have had, so that the slow tests of one do not use up all of it.
        turns: list[tuple[float, str]] = []
        spent: dict[str, float] = {}
        for test in sorted(set(tests), key=lambda test: (self.seconds.get(test, 0.0), test)):
            file = test.partition("::")[0]
            spent[file] = spent.get(file, 0.0) + self.seconds.get(test, 0.0)
            turns.append((spent[file] * (0.5 if file.endswith(own) else 1.0), test))
        return self._shortened([test for _, test in sorted(turns)], longest)

    def _shortened(self, tests: Sequence[str], longest: float) -> list[str]:
        """As many as do not take too long; at least one."""
        chosen, total = [], 0.0
        for test in tests:
            total += self.seconds.get(test, 0.0)
            if chosen and total > longest:
                break
            chosen.append(test)
        return chosen

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"state": self.state, "seconds": self.seconds, "lines": self.lines}))

    @classmethod
    def load(cls, path: Path) -> Covering:
        found, self = json.loads(path.read_text()), cls()
        self.seconds = found["seconds"]
        self.lines = {m: {int(k): v for k, v in lines.items()} for m, lines in found["lines"].items()}
        return self


def measure(place: Path, modules: Sequence[str], tests: Sequence[str], out: Path) -> int:
    """In a copy of this process: run all tests once, with a record of the lines that each of them runs."""
    import coverage  # pyright: ignore[reportMissingImports]
    import pytest

    paths = {module: str(place / PACKAGE / module) for module in modules}
    cover, covering = coverage.Coverage(data_file=None, include=list(paths.values())), Covering()
    cover.start()
    code = pytest.main([*PYTEST[1:], "-m", "not slow", *tests], plugins=[covering])
    cover.stop()
    data = cover.get_data()
    covering.lines = {module: data.contexts_by_lineno(path) for module, path in paths.items()}
    covering.save(out)
    return int(code)


def in_copy(work: Callable[[], int], limit: float) -> int | None:
    """The exit status of work in a copy of this process; None if it takes longer than the limit, in seconds."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            os.setsid()
            silent = os.open(os.devnull if LOG is None else LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:  # this process must not clean up what belongs to the other
            os._exit(code)
    # Counted, not measured, since a machine that others use may stop this process for a while.
    for _ in range(int(limit / PAUSE)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(PAUSE)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_tests(tests: Sequence[str], limit: float) -> str:
    """The fate of the mutant that is in place: killed, survived or timeout."""
    code = in_copy(lambda: int(importlib.import_module("pytest").main([*PYTEST, *tests])), limit)
    # Status 4 is that of tests whose modules cannot be imported any more, because of the mutant.
    if code in (3, 5, BROKEN):  # an internal error of pytest, no tests
        raise RuntimeError(f"the tests could not be run (exit status {code}): {tests[:3]}; see MUTATION_LOG")
    return "timeout" if code is None else "survived" if code == 0 else "killed"


def fate(mutant: Mutant, place: Path, covering: Covering, longest: float) -> str:
    path = place / PACKAGE / mutant.module
    source = path.read_text()
    tests = covering.of(mutant, longest)
    if not tests:
        return "no test"
    path.write_text(mutant.applied(source))
    try:
        return run_tests(tests, 30.0 + 5.0 * sum(covering.seconds.get(test, 0.0) for test in tests))
    finally:
        path.write_text(source)


def core_modules(named: Sequence[str]) -> list[str]:
    """The files behind names of modules and packages, relative to the package."""
    found = []
    for name in named or MODULES:
        path = ROOT / PACKAGE / name.removeprefix(f"{PACKAGE}/")
        paths = sorted(path.glob("*.py")) if path.is_dir() else [path]
        found += [str(each.relative_to(ROOT / PACKAGE)) for each in paths if each.name != "__init__.py"]
    return found


def digest(*paths: Path) -> str:
    """Of the content of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


class Fates:
    """What became of mutants, in a file that other calls go on with."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path = path
        rows = [] if again or not path.exists() else json.loads(path.read_text())["mutants"]
        self._rows: dict[str, dict[str, Any]] = {self._key(row["name"], row["occurrence"]): row for row in rows}

    @staticmethod
    def _key(name: str, occurrence: int) -> str:
        return f"{name} {occurrence}"

    def settled(self, name: str, mutant: Mutant) -> bool:
        """Whether it was killed already, in the module as it is now."""
        row = self._rows.get(self._key(name, mutant.occurrence), {})
        source = digest(ROOT / PACKAGE / mutant.module)
        return row.get("outcome") in ("killed", "timeout") and row.get("source") == source

    def add(self, name: str, mutant: Mutant, outcome: str) -> None:
        row = {"name": name, "occurrence": mutant.occurrence, "line": mutant.line, "module": mutant.module}
        row |= {"outcome": outcome, "source": digest(ROOT / PACKAGE / mutant.module)}
        self._rows[self._key(name, mutant.occurrence)] = row

    def rows(self) -> list[dict[str, Any]]:
        """Those that belong to the modules as they are now."""
        now = {path: digest(ROOT / PACKAGE / path) for path in {row["module"] for row in self._rows.values()}}
        rows = [row for row in self._rows.values() if row["source"] == now[row["module"]]]
        return sorted(rows, key=lambda row: (row["module"], row["line"], row["name"], row["occurrence"]))

    def save(self) -> None:
        rows, known = self.rows(), json.loads(EQUIVALENT.read_text())
        reasons = {row["name"]: known[row["name"]] for row in rows if row["outcome"] == "equivalent"}
        found = {"score": score(rows), "equivalent": reasons, "mutants": rows}
        self._path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def score(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many mutants of each module were killed, survived, and are equivalent; and of all of them."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        outcome = str({"timeout": "killed", "no test": "survived"}.get(row["outcome"], row["outcome"]))
        for module in (str(row["module"]), "all"):
            counts.setdefault(module, Counter())[outcome] += 1
    names = ("killed", "survived", "equivalent")
    return {module: {name: counts[module][name] for name in names} for module in sorted(counts, key=_all_last)}


def _all_last(module: str) -> tuple[bool, str]:
    return module == "all", module


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description="Mutation testing.")
    parser.add_argument("modules", nargs="*", help=f"files or folders in {PACKAGE}; by default {', '.join(MODULES)}")
    parser.add_argument("--sample", type=int, default=300, help="how many mutants; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--minutes", type=float, default=480.0, help="after which no other mutant is tried")
    parser.add_argument(
        "--longest", type=float, default=40.0, help="seconds of the tests of a mutant, which survives if those pass"
    )
    parser.add_argument("--again", action="store_true", help="also mutants that were killed before")
    parser.add_argument("--covering", type=Path, help="a file for which tests run which lines, used again if it fits")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a JSON file for the fate of every mutant")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    modules = core_modules(options.modules)
    end = time.monotonic() + 60.0 * options.minutes
    sources = {module: (ROOT / PACKAGE / module).read_text() for module in modules}
    found = [mutant for module in modules for mutant in mutants(module)]
    chosen = sample(found, options.sample or len(found), options.seed, sources)
    fates = Fates(options.out, options.again)
    open_ones = [mutant for mutant in chosen if not fates.settled(mutant.name(sources[mutant.module]), mutant)]
    print(f"{len(chosen)} of {len(found)} mutants of {len(modules)} modules, seed {options.seed}", flush=True)
    print(f"{len(chosen) - len(open_ones)} of them were killed before", flush=True)
    run_all(open_ones, sources, fates, options, end)
    report(fates.rows())


def run_all(
    chosen: Sequence[Mutant], sources: dict[str, str], fates: Fates, options: argparse.Namespace, end: float
) -> None:
    """Find the fate of every mutant, in a copy of the repository."""
    known: dict[str, str] = json.loads(EQUIVALENT.read_text())
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        covering = covered(place, options)
        for i, mutant in enumerate(chosen):
            if time.monotonic() > end:
                print(f"{len(chosen) - i} mutants are left; call it again to go on", flush=True)
                break
            name = mutant.name(sources[mutant.module])
            outcome = "equivalent" if name in known else fate(mutant, place, covering, options.longest)
            fates.add(name, mutant, outcome)
            fates.save()
            print(f"{i + 1:4} {outcome:>10}  {mutant.module}:{mutant.line} {mutant.operator}", flush=True)


def copied(folder: Path) -> Path:
    """A copy of the repository, from which Python imports from now on."""
    place = folder / "copy"
    for name in ("src", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, place / name)
    os.environ.update(
        PYTHONPATH=f"{place}/src:{place}", PYTHONDONTWRITEBYTECODE="1", HYPOTHESIS_STORAGE_DIRECTORY=str(folder)
    )
    return place


def covered(place: Path, options: argparse.Namespace) -> Covering:
    """Which tests cover which lines; they pass without a mutant, also in the way in which mutants are tried."""
    tests = [path for name in options.tests for path in sorted([ROOT / name, *(ROOT / name).rglob("*.py")])]
    files = [*sorted((ROOT / PACKAGE).rglob("*.py")), *(path for path in tests if path.is_file())]
    state = digest(*files) + " ".join(options.modules)
    kept: Path | None = options.covering
    prepare(place)
    if kept is not None and kept.exists() and json.loads(kept.read_text())["state"] == state:
        covering = Covering.load(kept)
        quickest = sorted(covering.seconds, key=covering.seconds.__getitem__)[:QUICK]
        if run_tests(quickest, 600.0) != "survived":
            raise SystemExit("the tests fail without any mutant; see MUTATION_LOG")
        return covering
    path, modules = place.parent / "covering.json", core_modules(options.modules)
    code = in_copy(lambda: measure(place, modules, options.tests, path), 3600.0)
    if code != 0:
        raise SystemExit(f"the tests fail without any mutant (exit status {code}); see MUTATION_LOG")
    covering = Covering.load(path)
    covering.state = state
    if kept is not None:
        covering.save(kept)
    return covering


def prepare(place: Path) -> None:
    """Import what takes long, but nothing that may be mutated."""
    import pytest  # noqa: F401
    import scipy.integrate  # noqa: F401
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or every copy would walk through all of it
    os.chdir(place)
    sys.dont_write_bytecode = True
    old = {str(ROOT), str(ROOT / "src"), ""}
    sys.path[:] = [f"{place}/src", str(place), *(path for path in sys.path if path not in old)]
    # Packages of the repository are imported from the copy.
    for name in [name for name in sys.modules if name.split(".")[0] in ("seminode", "benchmarks")]:
        del sys.modules[name]


def survivors(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The mutants that no test noticed."""
    return [row for row in found["mutants"] if row["outcome"] in ("survived", "no test")]


def report(rows: Sequence[dict[str, Any]]) -> None:
    for row in survivors({"mutants": rows}):
        print(f"{row['outcome']:>10}  line {row['line']}: {row['name']}")
    for module, counts in score(rows).items():
        killed, possible = counts["killed"], counts["killed"] + counts["survived"]
        share = killed / max(1, possible)
        print(f"{module}: {killed} of {possible} killed ({share:.1%}), and {counts['equivalent']} equivalent ones")


if __name__ == "__main__":
    main()
