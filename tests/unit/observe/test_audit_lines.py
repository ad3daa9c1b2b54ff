"""audit.jsonl: a removal is on record as a whole line, or is not begun."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING

import pytest

from ckptd.observe.audit import Audit

if TYPE_CHECKING:
    from pathlib import Path


def test_a_line_that_a_full_disk_cut_short_spoils_no_other(tmp_path: Path) -> None:
    """The kernel takes a part and refuses the rest: that is an error, and the next line stands alone."""
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    audit.write("prune", tag="one", generation=1, form="zero", reason="r")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            audit.write("prune", tag="two", generation=1, form="zero", reason="r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    audit.write("prune", tag="three", generation=1, form="zero", reason="r")
    first, torn, last = path.read_text().splitlines()
    assert [json.loads(line)["tag"] for line in (first, last)] == ["one", "three"]
    assert len(torn) == 10
