"""`make audit` claims nothing that it was not told."""

from __future__ import annotations

from typing import Any

import pytest

from bench.audit import verdict

GOOD: dict[str, Any] = {"name": "pydantic", "version": "2.0", "vulns": []}
UNKNOWN: dict[str, Any] = {"name": "ours", "skip_reason": "Dependency not found"}
BAD: dict[str, Any] = {
    "name": "urllib3",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}],
}


@pytest.mark.parametrize(
    ("rows", "status", "words"),
    [
        ([GOOD, GOOD], 0, "2 packages, no known vulnerability"),
        ([GOOD, UNKNOWN], 0, "1 packages, no known vulnerability; not known to the service: ours"),
        ([UNKNOWN, UNKNOWN], 0, "skipped"),
        ([GOOD, BAD, UNKNOWN], 1, "urllib3 1.0: PYSEC-1, fixed in 1.1"),
    ],
)
def test_verdicts(rows: list[dict[str, Any]], status: int, words: str) -> None:
    code, lines = verdict({"dependencies": rows})
    assert code == status
    assert words in lines[0]
