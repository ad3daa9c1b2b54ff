"""Change modules of libraries right after they ran, before anyone binds a name of them.

For a `sitecustomize` on PYTHONPATH, so that every process of a run has the changes; nothing else is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    Changes = Mapping[str, Callable[[ModuleType], None]]


def change_modules(changes: Changes) -> None:
    """Call what is given for a module's name with that module, as soon as it is imported."""
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
