"""Contenders: an adjoint and a solver, eager or compiled, with a tolerance. How they are named and checked."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, cast

from .._field.checks import check_solver, described
from ..adjoints import Adjoint, Backsolve, Checkpointed, Direct, Interpolating, Quadrature, Replay, Reversible
from ..controllers import Controller
from ..solvers import BY_NAME, ReversibleRK, Solver

#: The default of `adjoints`.
ADJOINTS: tuple[Adjoint, ...] = (
    Replay(),
    Direct(),
    Checkpointed(10),
    Backsolve(),
    Interpolating(),
    Quadrature(),
    Reversible(),
)

ADJOINT_KINDS: dict[str, type[Adjoint]] = {type(adjoint).__name__: type(adjoint) for adjoint in ADJOINTS}
SOLVER_KINDS: dict[str, type[Solver]] = {kind.__name__: kind for kind in BY_NAME.values()}
SOLVER_KINDS["ReversibleRK"] = ReversibleRK


@dataclass(frozen=True)
class Contender:
    """A way to solve and to differentiate.

    Attributes:
        adjoint: the adjoint.
        solver: the solver.
        compile: whether steps are compiled.
        rtol, atol: the tolerances; `None` with fixed steps.
    """

    adjoint: Adjoint
    solver: Solver
    compile: bool = False
    rtol: Any = None
    atol: Any = None

    @property
    def adjoint_name(self) -> str:
        return written(self.adjoint).removeprefix("sn.").removesuffix("()")

    @property
    def solver_name(self) -> str:
        name = self.solver.name.replace("reversible ", "rev. ")
        usual = not isinstance(self.solver, ReversibleRK) or self.solver.coupling == ReversibleRK().coupling
        return name if usual else f"{name}, {self.solver.coupling:g}"  # type: ignore[attr-defined]

    @property
    def label(self) -> str:
        """Adjoint, solver, and whether it is compiled."""
        return f"{self.adjoint_name}, {self.solver_name}, {'compiled' if self.compile else 'eager'}"

    @property
    def call(self) -> str:
        """The call of `solve` that uses it."""
        options = [f"solver={written(self.solver)}", f"adjoint={written(self.adjoint)}"]
        return f"sn.solve(..., {', '.join([*options, *(['compile=True'] if self.compile else [])])})"

    @property
    def usual(self) -> bool:
        """Whether it is the default of `solve`."""
        return self.adjoint == Replay() and self.solver == BY_NAME["dopri5"]() and not self.compile


def written(thing: Any) -> str:
    """The source code of a solver or an adjoint, without default values.

    >>> written(Checkpointed(4)), written(Backsolve(norm="mixed")), written(ReversibleRK())
    ('sn.Checkpointed(4)', "sn.Backsolve(norm='mixed')", "sn.ReversibleRK('dopri5')")
    """
    if isinstance(thing, ReversibleRK):
        usual = thing.coupling == ReversibleRK().coupling
        return f"sn.ReversibleRK({thing.base.name!r}{'' if usual else f', coupling={thing.coupling:g}'})"
    if isinstance(thing, Solver):
        kind = BY_NAME.get(thing.name)
        return repr(thing.name) if kind is not None and thing == kind() else repr(thing)
    if isinstance(thing, Adjoint) and is_dataclass(thing):
        given: list[str] = []
        for each in fields(thing):
            value = getattr(thing, each.name)
            if each.default is MISSING:
                given.append(_value(value))
            elif value is not each.default and value != each.default:
                given.append(f"{each.name}={_value(value)}")
        return f"sn.{type(thing).__name__}({', '.join(given)})"
    return repr(thing)


def _value(value: Any) -> str:
    if isinstance(value, Solver | Adjoint):
        return written(value)
    return getattr(value, "__name__", None) or repr(value)


def check_adjoints(adjoints: Any) -> list[Adjoint]:
    """Adjoints from names such as `"Checkpointed(4)"` or objects; all of them for `None`."""
    if adjoints is None:
        return list(ADJOINTS)
    return [_adjoint(f"adjoints[{i}]", each) for i, each in enumerate(_several("adjoints", adjoints, Adjoint))]


def check_solvers(solvers: Any) -> list[Solver] | None:
    """Solvers from names such as `"ReversibleRK('bosh3')"` or objects."""
    if solvers is None:
        return None
    return [_solver(f"solvers[{i}]", each) for i, each in enumerate(_several("solvers", solvers, Solver))]


def _several(name: str, values: Any, kind: type) -> list[Any]:
    """The values as a list; a single value becomes a list of one."""
    if isinstance(values, str | kind):
        return [values]
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a sequence of names or objects, found {described(values)}")
    several = list(cast("Iterable[Any]", values))
    if not several:
        raise ValueError(f"{name}: expected at least one, found none; pass {name}=None for the default")
    return several


def _adjoint(where: str, value: Any) -> Adjoint:
    if isinstance(value, Adjoint):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{where}: expected a name or an object such as sn.Replay(), found {described(value)}")
    kinds = {name.lower(): kind for name, kind in ADJOINT_KINDS.items()}
    name, args, options = _parsed(where, value, ADJOINT_KINDS)
    if name.lower() not in kinds:
        raise ValueError(f"{where}: unknown name {value!r}{_near(name, ADJOINT_KINDS)}")
    kind = kinds[name.lower()]
    if kind is Checkpointed and not args and not options:
        return Checkpointed(10)
    return _built(where, value, kind, args, options)


def _solver(where: str, value: Any) -> Solver:
    if isinstance(value, str) and value not in BY_NAME:
        name, args, options = _parsed(where, value, BY_NAME)
        if name in SOLVER_KINDS:
            return _built(where, value, SOLVER_KINDS[name], args, options)
    try:
        return check_solver(value)
    except (ValueError, TypeError) as error:
        raise type(error)(where + str(error).removeprefix("solver")) from None


def _built(where: str, text: str, kind: type, args: list[Any], options: dict[str, Any]) -> Any:
    try:
        return kind(*args, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {text!r} is invalid: {error}") from None


def _parsed(where: str, text: str, known: Iterable[str]) -> tuple[str, list[Any], dict[str, Any]]:
    """The name and the arguments of a call; the arguments must be literals."""
    try:
        tree = ast.parse(text.strip().removeprefix("sn."), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            options = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
            return tree.func.id, [ast.literal_eval(each) for each in tree.args], options
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{where}: expected a name, found {text!r}. Known: {', '.join(known)}")


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.capitalize(), list(known), n=1, cutoff=0.4)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" Known: {', '.join(known)}"


def usual_solvers(controller: Controller | None, rtol: float | None) -> Sequence[str]:
    """Three solvers that suit the tolerance: two of order 5, and one of lower or higher order."""
    if controller is not None and not controller.adaptive:
        return "dopri5", "rk4", "bosh3"
    return ("dopri5", "tsit5", "dopri8") if rtol is not None and rtol <= 1e-6 else ("dopri5", "tsit5", "bosh3")


def pairs(adjoints: Sequence[Adjoint], solvers: Sequence[Solver] | None, usual: Sequence[str]) -> list[Any]:
    """All pairs of adjoints and solvers. If no solvers are named, `Reversible` gets a reversible one."""
    if solvers is not None:
        return [(adjoint, solver) for solver in solvers for adjoint in adjoints]
    plain = [adjoint for adjoint in adjoints if not isinstance(adjoint, Reversible)]
    found = [(adjoint, BY_NAME[name]()) for name in usual for adjoint in plain]
    return found + [(adjoint, ReversibleRK("dopri5")) for adjoint in adjoints if isinstance(adjoint, Reversible)]
