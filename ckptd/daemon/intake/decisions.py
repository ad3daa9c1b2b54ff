"""Keep what people decided (pin, accept): files of the state directory and objects of the remotes (P8:
a decision counts on every node).

Pins of other nodes lie in the remotes alone, so the journal mirrors them: they hold while those are away. The
journal never ends a pin that a file here or a remote records. Decisions that a remote lacks are published
there again (adr/0165).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.owned_dirs import list_dir, opened_ours
from ckptd.core.model import manifest as mf
from ckptd.core.model.decision import (
    PINS,
    Decision,
    decision_file,
    lacking,
    named_pin,
    newest_decisions,
    pinned_tags,
)
from ckptd.errors import CkptdError, DamagedError, RefusedError, RemoteNotOurs, RemoteUnreachable
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.journal.journal import Journal

log = logging.getLogger("ckptd.decisions")

DECISIONS = "decisions"
_DECISION_LIMIT_BYTES = 16 << 20
_SETTLED_NS = 2_000_000_000
"""A folder that changed later than this before it was read may change again under the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """Decision files of a state directory, by name."""

    read: Mapping[str, Decision]
    named: Mapping[str, Decision]
    """Pins whose files cannot be read: their names say the tag."""
    unread: Mapping[str, OSError]
    """Files that may be readable later (no free descriptor, an I/O error)."""

    @property
    def all(self) -> tuple[Decision, ...]:
        return (*self.named.values(), *self.read.values())


def read_decisions(state_dir: Path, kinds: Collection[str] | None = None) -> list[Decision]:
    """Decision files of the state directory; of `kinds` alone, where given.

    What no ckptd wrote is left out; of a pin that cannot be read the name counts.

    Raises:
        OSError: the folder, or another file in it, cannot be read.
    """
    own = _read(state_dir, kinds)
    for error in (error for name, error in own.unread.items() if name not in own.named):
        raise error
    return list(own.all)


def _read(
    state_dir: Path, kinds: Collection[str] | None = None, known: Mapping[str, Decision] | None = None
) -> _Own:
    """Read them; a file that cannot be read now, and could before, says what it said then: none changes.

    Raises:
        OSError: the folder cannot be read.
    """
    read: dict[str, Decision] = {}
    named: dict[str, Decision] = {}
    unread: dict[str, OSError] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened_ours(state_dir / DECISIONS) as fd:
        for name in sorted(list_dir(fd)):
            is_one = name.endswith(".json") and not name.startswith(".")
            if not is_one or (kinds is not None and name.partition("~")[0] not in kinds):
                continue
            try:
                data = files.read_beneath(fd, name, limit_bytes=_DECISION_LIMIT_BYTES)
                read[name] = mf.parse(Decision, data, name)
            except FileNotFoundError:
                continue
            except (CkptdError, OSError) as error:
                if isinstance(error, OSError):
                    unread[name] = error
                if known is not None and name in known:
                    read[name] = known[name]
                elif (pin := named_pin(name)) is not None:
                    named[name] = pin
    return _Own(read=read, named=named, unread=unread)


def write_decision(state_dir: Path, decision: Decision) -> None:
    """Put a decision into the state directory, durable when it returns."""
    with opened_ours(state_dir) as state_fd:
        os.close(files.open_dir_beneath(state_fd, DECISIONS, create_mode=0o777, is_durable=True))
        with files.opened_dir(DECISIONS, state_fd) as fd:
            files.write_atomic(fd, decision_file(decision), mf.to_bytes(decision))


def _is_to_publish(decision: Decision) -> bool:
    """A first start of a release that noted no directory would count for any of that node's name."""
    return decision.kind != "first-start" or bool(decision.place)


class Decisions:
    """Those of one job, as last read."""

    def __init__(self, journal: Journal, state_dir: Path) -> None:
        self.known: tuple[Decision, ...] = ()
        """Decisions in own files and in remotes that answer."""
        self._journal = journal
        self._state_dir = state_dir
        self._kept = newest_decisions(journal.decisions())
        self._own = _Own(read={}, named={}, unread={})
        self._damaged: tuple[Decision, ...] = ()
        self._read_as_of_ns: int | None = None

    def refresh(self, seen: list[Decision], damaged: Sequence[Decision] = ()) -> bool:
        """Read own files again, beside what remotes showed; whether anything changed.

        `damaged`: pins in remotes that cannot be read, as their names tell.

        Raises:
            OSError: own files cannot be listed.
        """
        self._keep(seen)
        self._read_own()
        self._damaged = tuple(damaged)
        every = [*damaged, *self._own.named.values(), *seen, *self._own.read.values()]
        known = {(d.kind, d.tag, d.serial): d for d in every}
        before, self.known = self.known, tuple(sorted(known.values(), key=lambda d: d.serial))
        return self.known != before

    def _keep(self, seen: list[Decision]) -> None:
        """Pins alone: what lets something go (adopt, accept) counts where it can be read."""
        for tag, decision in newest_decisions(seen).items():
            old = self._kept.get(tag)
            if old is None or old.serial < decision.serial:
                self._journal.put_decision(decision)
                self._kept = {**self._kept, tag: decision}  # another thread may read

    def _read_own(self) -> None:
        """Read the state directory's when the folder has changed or may just be changing, and again for as
        long as a file of it could not be read.
        """
        try:
            changed_ns = (self._state_dir / DECISIONS).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            self._own, self._read_as_of_ns = _Own(read={}, named={}, unread={}), None
            return
        if changed_ns != self._read_as_of_ns:
            own = _read(self._state_dir, known=self._own.read)
            is_settled = not own.unread and time.time_ns() - changed_ns > _SETTLED_NS
            self._own, self._read_as_of_ns = own, changed_ns if is_settled else None

    @property
    def pins(self) -> frozenset[str]:
        """Pinned tags."""
        return self._pins(self.known)

    def is_pinned(self, tag: str) -> bool:
        """Tell whether a tag is pinned, or may be: a pin may have come since the last turn (any thread)."""
        try:
            own = _read(self._state_dir, known=self._own.read)
        except OSError as error:
            log.warning("%s counts as pinned: decisions cannot be read: %s", tag, error)
            return True
        if own.all != self._own.all:
            self._read_as_of_ns = None  # whatever the folder's time says
        return tag in self._pins((*self.known, *own.all))

    @property
    def words(self) -> tuple[Decision, ...]:
        """Return the decisions that every remote must hold.

        These are the newest pin or unpin of each tag, whoever made it, and the other decisions of this state
        directory. A decision that permits a deletion (adopt, accept) is published only where it was made.
        """
        pins = self.pins
        # a name does not say who pinned it, and when
        by_name = (*self._own.named.values(), *self._damaged)
        read = (word for word in self.known if word not in by_name)
        newest = newest_decisions([*self._kept.values(), *read]).values()
        # an unpin that the journal alone has ends no pin, there either
        words = [word for word in newest if (word.kind == "pin") == (word.tag in pins)]
        return (*words, *(d for d in self._own.read.values() if d.kind not in PINS and _is_to_publish(d)))

    def _pins(self, known: tuple[Decision, ...]) -> frozenset[str]:
        # the journal alone ends no pin: a remote that was made anew may count its serials from lower ones
        return pinned_tags(known) | pinned_tags([*self._kept.values(), *known])

    @property
    def accepted(self) -> frozenset[tuple[tuple[str, str], ...]]:
        """Fingerprint sets that a person accepted."""
        return frozenset(d.fingerprints for d in self.known if d.kind == "accept")


# --- Publishing decisions again to remotes that lack them (adr/0165) -------------------------------------
# `ckptd pin` writes its decision into the remotes of that moment. A remote that is added later, or restored
# from a snapshot, gets it only from here: nodes that see that remote alone would delete the checkpoint.

_AGAIN_SECONDS = 60.0
"""A store that lists late does not show at once what was put there."""
_GONE = (RemoteUnreachable, RemoteNotOurs)
_OF_ONE = (DamagedError, RefusedError)
"""Errors of one subject whose document cannot be read: the others are published all the same."""


@dataclass
class _Published:
    """Track what was published to one remote."""

    basis: tuple[tuple[Decision, ...], tuple[Decision, ...]] = ((), ())
    """The two sides that were compared: decisions known here, decisions that the remote showed."""
    lacks: tuple[Decision, ...] = ()
    left: list[Decision] = field(default_factory=list)
    """Decisions to publish; the first is under way."""
    asked: tuple[Decision, ...] = ()
    """All that was ordered then."""
    looked_at_seconds: float | None = None
    """The look after which it was last asked: once for each."""
    done: tuple[Decision, ...] = ()
    """Durable there, as it said `done_at_seconds`."""
    done_at_seconds: float = 0.0


class DecisionPublisher:
    """Publish one job's decisions to remotes that lack them; every method is called in the deciding
    thread.
    """

    def __init__(
        self, state: JobState, sessions: Mapping[str, RemoteSession], wake: Callable[[], None]
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._wake = wake
        self._published = {name: _Published() for name in sessions}

    def turn(self, words: tuple[Decision, ...]) -> None:
        """Compare with what each remote showed last, and order what it lacks: one at a time, once a look."""
        for name, session in self._sessions.items():
            published, seen = self._published.setdefault(name, _Published()), session.observation
            if seen is None:
                continue  # nothing is retired from it either
            if (basis := (words, (*seen.decisions, *seen.damaged_pins))) != published.basis:
                published.basis, published.lacks = basis, lacking(*basis)
            if not published.lacks:
                self._state.deletions.set_undecided(name, is_undecided=False)
                self._state.problems.clear("decision-unpublished", name)
                continue
            self._state.deletions.set_undecided(name, is_undecided=True)
            if self._is_due(session, published):
                published.asked, published.left = published.lacks, list(published.lacks)
                published.looked_at_seconds = session.observed_at_seconds
                self._order(session, published)

    def _is_due(self, session: RemoteSession, published: _Published) -> bool:
        if (
            published.left
            or not session.is_ready
            or published.looked_at_seconds == session.observed_at_seconds
        ):
            return False
        return (
            published.lacks != published.done
            or time.monotonic() - published.done_at_seconds >= _AGAIN_SECONDS
        )

    def _order(self, session: RemoteSession, published: _Published) -> None:
        session.request(
            m.RecordDecision(decision=published.left[0]), partial(self._recorded, session, published)
        )

    def _recorded(self, session: RemoteSession, published: _Published, answer: m.Answer) -> None:
        word = published.left.pop(0)
        if isinstance(answer, m.Failed):
            error = answer.raised
            self._not_recorded(session, word, error)
            if not isinstance(error, _OF_ONE):
                published.left.clear()
                return
        else:
            log.debug("%s of %s is recorded in %s", word.kind, word.tag, session.name)
        if published.left:
            self._order(session, published)
            return
        # what could not be read there is asked again after `_AGAIN_SECONDS`: each look would be too often
        published.done, published.done_at_seconds = published.asked, time.monotonic()
        session.mark_outdated()
        session.observe()
        self._wake()

    def _not_recorded(self, session: RemoteSession, word: Decision, error: CkptdError) -> None:
        log.warning("%s %s is not published to %s: %s", word.kind, word.tag, session.name, error)
        if isinstance(error, _GONE):
            session.note_error(error)
            return
        text = f"{session.name} lacks what was decided ({word.kind} {word.tag}): {error.message}"
        next_step = error.hint or "it is tried again at the next look"
        self._state.problems.put("decision-unpublished", session.name, text, next_step)
        self._wake()
