"""What sealing asks of whoever knows the remotes: an interface, so that intake knows no remote itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.core.lifecycle import Verdict
    from ckptd.core.listing import FolderListing
    from ckptd.core.save import Order


class Recogniser:
    """Asks the remotes whether they know a save already; None from `order_of` means "not known yet"."""

    def is_run_settled(self, ready: list[tuple[FolderListing, Verdict]]) -> bool:
        """Whether it is known of which run they are."""
        raise NotImplementedError

    def may_seal(self, tag: str) -> bool:
        """False while a remote that may know the tag has not been asked."""
        raise NotImplementedError

    def known_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        """The order that a COMMIT recorded for exactly this content."""
        raise NotImplementedError

    def original(
        self, tag: str, fingerprints: tuple[tuple[str, str], ...], shards: frozenset[tuple[str, str]]
    ) -> Order | None:
        """The highest order of a save that has just these shards under another name."""
        raise NotImplementedError

    def highest(self) -> Order | None:
        """The highest order of any COMMIT."""
        raise NotImplementedError

    def may_precede(self, written_ns: int, order: Order) -> bool:
        """Whether what was written then may be older than the save that has a COMMIT of that order."""
        raise NotImplementedError

    def found_first(self) -> frozenset[str] | None:
        """Tags found at the first start; None: it is not settled yet whether this is one."""
        raise NotImplementedError

    def came_back(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> bool:
        """Found at the first start, and committed before it as just this: `resume` brought it."""
        raise NotImplementedError
