"""A disk that does not give some files: what the inspecting child says of them is put in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.conversion.engine import inspect

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def refuse(patch: pytest.MonkeyPatch, *paths: str) -> None:
    """Files of these paths (within their folder) cannot be read, until the patch is undone."""
    hear = inspect._hear

    def refusing(
        request: dict[str, Any], timeout_seconds: float, on_line: Callable[[dict[str, Any]], None]
    ) -> str:
        def heard(line: dict[str, Any]) -> None:
            path = request["files"][line["index"]]["path"] if "index" in line else None
            if path in paths:
                reason = f"{path} cannot be read (Input/output error)"
                line = {
                    "index": line["index"],
                    "final": True,
                    "bytes": 0,
                    "archive": "torn",
                    "reason": reason,
                    "is_unread": True,
                }
            on_line(line)

        return hear(request, timeout_seconds, heard)

    patch.setattr(inspect, "_hear", refusing)
