"""Status files for tests of the page (the gallery, hostile texts, many jobs), and `ckptd ui` over them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptd.observe import status as st
from ckptd.observe.status import rfc3339
from tests.support import status_gallery as gallery

PAYLOAD = '"\'><script>window.pwned=1</script><img src=x onerror="window.pwned=1">{{7*7}}\u202e\x1b[2J'
"""What a tag, an error or a name may contain: nothing of it may become part of the page."""
_FREE = {
    "name", "tag", "save_dir", "reason", "text", "next_step", "url", "notes", "keep", "goes", "opt_outs",
    "why", "start_command", "notify_error", "newest_complete", "proof", "by", "forms", "leaves",
}  # fmt: skip
_LIMIT_SECONDS = 60.0


def as_of_now(document: st.Status) -> dict[str, Any]:
    """A document of the gallery, with its times as long ago as they were at its moment."""
    shift = time.time() - gallery.NOW

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [moved(one) for one in value]
        if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value):
            return rfc3339(datetime.fromisoformat(value).timestamp() + shift)
        return value

    found: dict[str, Any] = moved(gallery.plain(document))
    return found


def hostile(document: dict[str, Any]) -> dict[str, Any]:
    """The same with `PAYLOAD` behind every text from outside, and in names of forms and remotes."""

    def poisoned(value: Any, is_free: bool) -> Any:
        if isinstance(value, dict):
            return {
                key
                + (
                    PAYLOAD if (isinstance(one, dict) and "state" in one) or key in ("s3", "nas") else ""
                ): poisoned(one, key in _FREE)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [poisoned(one, is_free) for one in value]
        return value + PAYLOAD if isinstance(value, str) and is_free else value

    found: dict[str, Any] = poisoned(document, False)
    return found


def many(jobs: int, checkpoints: int) -> st.Status:
    """That many jobs; the first has that many checkpoints."""
    newest = 1000 * checkpoints
    rows = tuple(gallery.whole(newest - 1000 * n) for n in range(checkpoints))
    every = [
        gallery.behind(name=f"job-{n:03}", save_dir=f"/nvme/job-{n:03}")
        if n % 10 == 5
        else gallery.job(f"job-{n:03}")
        for n in range(jobs)
    ]
    every[0] = replace(every[0], checkpoints=rows)
    return st.Status(generated_at=gallery.before(3.0), daemon=gallery.daemon(), jobs=tuple(every))


def publish(state: Path, document: dict[str, Any]) -> None:
    """Write it as a daemon does: by rename."""
    state.mkdir(parents=True, exist_ok=True)
    (state / "new").write_text(json.dumps(document))
    os.rename(state / "new", state / "status.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ui:
    """`ckptd ui` as it runs."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(re.findall(r":(\d+)/", self.address)[0])

    @property
    def token(self) -> str:
        """What the address has behind `#`."""
        return self.address.partition("#token=")[2]


@contextlib.contextmanager
def ui(*arguments: object) -> Iterator[Ui]:
    """Run `ckptd ui` on a free port until the test ends."""
    command = [sys.executable, "-m", "ckptd", "ui", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise AssertionError(process.communicate(timeout=_LIMIT_SECONDS)[1])
        yield Ui(address=address, process=process)
    finally:
        process.terminate()
        process.communicate(timeout=_LIMIT_SECONDS)
