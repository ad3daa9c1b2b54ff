"""Find the files that the wheel carries beside the code: example configurations and units of systemd."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_IN_CHECKOUT = {"examples": "config", "systemd": "systemd"}
"""Folder of the package → folder of the source tree it is filled from (`force-include` in pyproject.toml)."""


def data_file(folder: str, name: str) -> Traversable:
    """Return a file of a folder of the package; `name` may hold `/`.

    An installed wheel has it in the package; in a checkout it lies beside the package, so that the tree holds
    one copy.
    """
    package = importlib.resources.files("ckptd")
    bundled = package / folder / name
    return bundled if bundled.is_file() else package / ".." / _IN_CHECKOUT[folder] / name
