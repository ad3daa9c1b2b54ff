"""The one way in which a document is written, so that equal documents have equal digests.

Rows are written one by one: as one tree, the files of a large checkpoint are many times their text (P12).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.identity import Model

_NO_ROWS = '"files":[]'
"""Quotes are escaped in a value, so that this is the key."""


def canonical(document: Model) -> str:
    """Sorted keys, no blanks; None and defaults included."""
    return json.dumps(document.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def canonical_with_rows(empty: Model, rows: Iterable[Model]) -> str:
    """The same of a document with these `files`, given the one without any."""
    head, none, tail = canonical(empty).partition(_NO_ROWS)
    return f"{head}{none[:-1]}{','.join(map(canonical, rows))}]{tail}"
