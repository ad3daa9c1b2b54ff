"""The offers of a store that has only the verbs that some test asks for: as `Store` declares them, none."""

from __future__ import annotations


class OffersNothing:
    """Beside `Store`, whose verbs it does not have all."""

    overlap = 1
    pending_puts = 0
    copies = False

    def flush_name(self, key: str) -> None:
        """Every name is durable."""

    def now_seconds(self) -> float | None:
        return None
