"""Generate the JSON schema of status.json from the models that are written (docs/status.schema.json).

`python -m ckptd.observe.schema > docs/status.schema.json`; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from ckptd.observe.status import SCHEMA_VERSION, Status


def schema() -> dict[str, Any]:
    """Return the JSON schema of status.json as this version writes it; readers must accept unknown fields."""
    made = TypeAdapter(Status).json_schema(mode="serialization")
    made["properties"]["schema_version"] = {"const": SCHEMA_VERSION, "type": "integer"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | made | {"title": "ckptd status.json"}


def schema_text() -> str:
    """Return the text of the file in docs/."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
