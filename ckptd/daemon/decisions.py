"""What people decided (pin, accept, adopt): files of the state directory and objects of the remotes (P8).

Pins of other nodes lie in the remotes alone, so the journal mirrors them: they hold while those are away. It
never ends a pin that a file here or a remote tells of.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from ckptd import files
from ckptd.core import manifest as mf
from ckptd.core.decision import PINS, Decision, newest_words
from ckptd.errors import CkptdError
from ckptd.place import opened_ours

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckptd.journal import Journal

DECISIONS = "decisions"
_DECISION_LIMIT_BYTES = 16 << 20
_SETTLED_NS = 2_000_000_000
"""A folder that changed later than this before it was read may change again under the same time."""


def read_decisions(state_dir: Path) -> list[Decision]:
    """Decision files of the state directory; an unreadable one is left out (its remote copy counts)."""
    found: list[Decision] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened_ours(state_dir / DECISIONS) as fd:
        for name in sorted(os.listdir(fd)):
            if name.endswith(".json") and not name.startswith("."):
                with contextlib.suppress(CkptdError, OSError):
                    data = files.read_beneath(fd, name, limit_bytes=_DECISION_LIMIT_BYTES)
                    found.append(mf.parse(Decision, data, name))
    return found


def write_decision(state_dir: Path, decision: Decision) -> None:
    """Put a decision into the state directory, durable when it returns."""
    name = f"{decision.kind}~{mf.encode_name(decision.tag)}~{decision.serial}.json"
    with opened_ours(state_dir) as state_fd:
        os.close(files.open_dir_beneath(state_fd, DECISIONS, create_mode=0o777, is_durable=True))
        with files.opened_dir(DECISIONS, state_fd) as fd:
            files.write_atomic(fd, name, mf.to_bytes(decision))


def pinned_tags(decisions: Iterable[Decision]) -> frozenset[str]:
    """Tags whose newest pin or unpin is a pin."""
    return frozenset(tag for tag, decision in newest_words(decisions).items() if decision.kind == "pin")


def _is_to_publish(decision: Decision) -> bool:
    """A first start of a release that noted no directory would count for any of that node's name."""
    return decision.kind != "first-start" or bool(decision.place)


class Decisions:
    """Those of one job, as last read."""

    def __init__(self, journal: Journal, state_dir: Path) -> None:
        self.known: tuple[Decision, ...] = ()
        """Of own files and of remotes that are there."""
        self._journal = journal
        self._state_dir = state_dir
        self._kept = newest_words(journal.decisions())
        self._own: list[Decision] = []
        self._read_as_of_ns: int | None = None

    def refresh(self, seen: list[Decision]) -> bool:
        """Read own files again, beside what remotes showed; whether anything changed."""
        self._keep(seen)
        known = {(d.kind, d.tag, d.serial): d for d in [*seen, *self._read_own()]}
        before, self.known = self.known, tuple(sorted(known.values(), key=lambda d: d.serial))
        return self.known != before

    def _keep(self, seen: list[Decision]) -> None:
        """Pins alone: what lets something go (adopt, accept) counts where it can be read."""
        for tag, decision in newest_words(seen).items():
            old = self._kept.get(tag)
            if old is None or old.serial < decision.serial:
                self._journal.put_decision(decision)
                self._kept = {**self._kept, tag: decision}  # another thread may read

    def _read_own(self) -> list[Decision]:
        """Those of the state directory, read when the folder has changed or may just be changing."""
        try:
            changed_ns = (self._state_dir / DECISIONS).stat().st_mtime_ns
        except OSError:
            return []
        if changed_ns != self._read_as_of_ns:
            self._read_as_of_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else None
            self._own = read_decisions(self._state_dir)
        return self._own

    @property
    def pins(self) -> frozenset[str]:
        """Pinned tags."""
        return self._pins(self.known)

    def is_pinned(self, tag: str) -> bool:
        """Whether it is now: a pin may have come since the last turn (any thread)."""
        if (own := read_decisions(self._state_dir)) != self._own:
            self._read_as_of_ns = None  # whatever the folder's time says
        return tag in self._pins((*self.known, *own))

    @property
    def words(self) -> tuple[Decision, ...]:
        """What every remote is to have: the newest pin or unpin of each tag, whoever said it, and what else
        this state directory holds. What lets something go (adopt, accept) is published where it was said.
        """
        pins = self.pins
        newest = newest_words([*self._kept.values(), *self.known]).values()
        # an unpin that the journal alone has ends no pin, there either
        words = [word for word in newest if (word.kind == "pin") == (word.tag in pins)]
        return (*words, *(d for d in self._own if d.kind not in PINS and _is_to_publish(d)))

    def _pins(self, known: tuple[Decision, ...]) -> frozenset[str]:
        # the journal alone ends no pin: a remote that was made anew may count its serials from lower ones
        return pinned_tags(known) | pinned_tags([*self._kept.values(), *known])

    @property
    def accepted(self) -> frozenset[tuple[tuple[str, str], ...]]:
        """Fingerprint sets that a person accepted."""
        return frozenset(d.fingerprints for d in self.known if d.kind == "accept")
