"""status.json against its published schema; a daemon of these tests writes nothing beyond it."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "status.schema.json"
_seen: set[str] = set()


@cache
def _validator() -> Any:
    schema = json.loads(SCHEMA.read_text())
    for one in (schema, *schema["$defs"].values()):
        if "properties" in one:
            one["additionalProperties"] = False
    return import_module("jsonschema").Draft202012Validator(schema)


def problems_of(document: dict[str, Any]) -> list[str]:
    """What differs from the schema; empty: nothing."""
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(document)]


def checked(data: bytes) -> dict[str, Any]:
    """A document as it was read, looked at once for each shape that a job takes.

    Raises:
        AssertionError: it is not as published. ValueError: it is no JSON.
    """
    document: dict[str, Any] = json.loads(data)
    shape = str([(job["name"], job["state"], len(job["checkpoints"])) for job in document["jobs"]])
    if shape not in _seen:
        assert problems_of(document) == []
        _seen.add(shape)
    return document
