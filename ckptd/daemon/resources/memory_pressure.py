"""Tell when tasks of this node wait for memory: what moves checkpoints rests then (P11; adr/0223).

A trainer whose page cache is too small reads from the disk what it just lost, and what a conversion reads and
writes delays that. Stalls of ckptd's own children are few (0.8 % of the time in a cgroup of 160 MB): what is
seen is somebody else's. Of processors and disks that cannot be told, so their files are not read.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

log = logging.getLogger("ckptd")

FILE = Path("/proc/pressure/memory")
STALLED_PERCENT = 7.0
"""Share of the last ten seconds in which a task waited for memory; as Android's low memory killer has it."""
LOOK_SECONDS = 2.0
REST_SECONDS = 60.0
"""No rest lasts longer: pressure may last as long as the training."""
WORK_SECONDS = 30.0
"""Between two rests."""
SAID_SECONDS = 3600.0


class MemoryPressure:
    """Decide whether to rest; a kernel that does not tell pressure has none."""

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self.is_high = False
        self._looked_at = self._changed_at = self._said_at = -math.inf

    def look(self, now_seconds: float) -> bool:
        """Look again, every two seconds at most; return whether that changed `is_high`."""
        if now_seconds - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now_seconds
        passed = now_seconds - self._changed_at
        percent = self._stalled_percent()
        is_high = percent >= STALLED_PERCENT and passed < REST_SECONDS
        if not self.is_high:
            is_high = percent >= STALLED_PERCENT and passed >= WORK_SECONDS
        if is_high == self.is_high:
            return False
        self.is_high, self._changed_at = is_high, now_seconds
        if is_high and now_seconds - self._said_at >= SAID_SECONDS:
            self._said_at = now_seconds
            words = (
                "tasks of this node waited for memory %.0f %% of the time (%s): conversions rest now and then"
            )
            log.info(f"{words}, uploads slow down", percent, self._file)
        return True

    def _stalled_percent(self) -> float:
        """Return avg10 of the line "some"; 0 where there is no such file."""
        try:
            some = self._file.read_text(encoding="ascii").split()
            return float(some[1].removeprefix("avg10="))
        except (OSError, ValueError, IndexError):
            return 0.0
