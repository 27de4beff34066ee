"""Old import paths of public names: they still work, with a `DeprecationWarning` that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old module to new module.
MOVED = {
    "seminode.checkpoints": "seminode._stepping.checkpoints",
    "seminode.integrals": "seminode._integrals.detect",
    "seminode.interpolation": "seminode._stepping.interpolation",
    "seminode.models.paper": "seminode_lab.models.paper",
    "seminode.models.pendulum": "seminode_lab.models.pendulum",
    "seminode.problem": "seminode.solution",
}
#: Names whose new path differs from that of their old module.
PUBLIC = {
    "seminode.integrals": "seminode.integral_leaves",
    "seminode.interpolation": "seminode.DenseSolution",
    "seminode.problem": "seminode.Solution, seminode.Stats, seminode.Status and seminode.Record",
}


class MovedFinder(MetaPathFinder, Loader):
    """Finds a module at its new place. It comes last, so that it costs nothing for modules that exist."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = PUBLIC.get(spec.name, MOVED[spec.name])
        warnings.warn(f"{spec.name} has moved: import {new} instead", DeprecationWarning, stacklevel=2)
        return _Alias(spec.name, importlib.import_module(MOVED[spec.name]))

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: the module at the new place has run already."""


class _Alias(ModuleType):
    """A module under its old name; its attributes are those of the module at the new place."""

    def __init__(self, name: str, module: ModuleType):
        super().__init__(name, module.__doc__)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def __dir__(self) -> list[str]:
        return dir(self._module)


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
