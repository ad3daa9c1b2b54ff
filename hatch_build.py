"""Put the manual page into the wheel where `make man` has written one; hatchling calls this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PAGE = ".build/man/ckptd.1"


class ManualPage(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `share/man/man1/ckptd.1` of the environment that the wheel is installed into."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See the module's first line."""
        page = Path(self.root) / _PAGE
        if version == "standard" and page.is_file():
            build_data["shared_data"][str(page)] = "share/man/man1/ckptd.1"
