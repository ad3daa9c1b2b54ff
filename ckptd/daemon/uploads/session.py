"""Manage the session of one remote in the deciding thread: attachment, last observation, requests under way,
back-off.

What a remote holds reaches the thread only as a dated observation from the remote's child process; a child
that hangs or dies costs this remote, nothing else (docs/design.md §3, §5).
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from ckptd import errors
from ckptd.base.retry import Breaker, RetryTimer
from ckptd.config.remote_names import said_of, shown_remote
from ckptd.config.timetable import constant
from ckptd.core.model.generation import SeenCommit, SeenManifest
from ckptd.core.model.runs import run_of
from ckptd.storage.child.slots import RemoteProcess
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.documents import stem_of
from ckptd.storage.remote.messages import ObjectDone, TransferProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.base.retry import BackedOff
    from ckptd.config.timetable import Timetable
    from ckptd.core.model.runs import Place
    from ckptd.daemon.state.problems import Code, Problems
    from ckptd.storage.child.slots import SlotPool
    from ckptd.storage.remote.messages import Observation, TagView

# --- Stalled uploads: when one is cut, and what proves that uploads work again ---------------------------

IDLE_SECONDS = 60.0
"""An upload of which no byte moved for so long is cut and goes on with a new child."""
MOST_PATIENCE = 16
"""Each cut doubles that time, up to so many times, until an upload is finished."""
STILL_SECONDS = 10.0
"""Seconds without a moved byte after which an upload counts as still; a slow link moves some."""
NEXT_STEP = "it accepts and then hangs: look at the server, the mount, the network in between"


class StallDetector:
    """Detect that one remote's uploads make no progress."""

    def __init__(self) -> None:
        self._patience = 1
        self._durable: dict[str, int] = {}
        self.is_cut = False
        """Nothing more is durable there since an upload was cut."""

    @property
    def limit_seconds(self) -> float:
        """Return the seconds without any progress after which an upload is cut."""
        return IDLE_SECONDS * self._patience

    def note_cut(self) -> None:
        """Double the time limit after a stall: a slow step (a flush, a driver's block) must not be cut for
        ever.
        """
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.is_cut = True

    def note_end(self, *, is_done: bool) -> None:
        """An upload or removal ended."""
        self._durable = {}
        if is_done:
            self._patience = 1

    def is_durable(self, event: TransferProgress | ObjectDone) -> bool:
        """More is durable than before: only that is a sign that uploads work, not what a buffer took."""
        if not isinstance(event, TransferProgress):
            return True
        before = self._durable.setdefault(event.key, event.flushed_bytes)
        self._durable[event.key] = max(before, event.flushed_bytes)
        return event.flushed_bytes > before


# --- Problems: which code a remote's error has (docs/problems.md), and how long it stays open ----------

FULL_SECONDS = 180.0
"""An upload that found no room is tried again every minute: no longer than that after the last one."""
_FULL_STEP = "free space there, or set or lower its keep_last and `ckptd reload`; nothing local is deleted"


def report_error(
    problems: Problems, name: str, url: str, error: errors.CkptdError, *, lacks_room: bool
) -> Code:
    """Raise the problem of a remote's error and return its code; `lacks_room`: an upload failed, while reads
    work.
    """
    code: Code = "remote-unreachable"
    if isinstance(error, errors.RemoteNotOurs | errors.ConfigError):
        code = "remote-not-ours"
    elif isinstance(error, errors.DocumentDamaged):
        code = "remote-damaged"
    elif isinstance(error, errors.NoSpaceError | errors.NotPermitted):
        code = "remote-full" if isinstance(error, errors.NoSpaceError) else "remote-denied"
    hint = _FULL_STEP if code == "remote-full" else error.hint
    seconds = FULL_SECONDS if lacks_room else math.inf
    text = said_of(name, url, error.message).removeprefix("remote ")
    problems.put(code, name, text, hint, lasts_seconds=seconds)
    return code


# --- The session -----------------------------------------------------------------------------------------

log = logging.getLogger("ckptd.remote")

OBSERVE_SECONDS = 10.0
AT_REST_SECONDS = 60.0
STALLED_SECONDS = 120.0


class RemoteSession:
    """Manage one remote for the deciding thread, where all methods are called."""

    def __init__(
        self,
        settings: m.RemoteSettings,
        problems: Problems,
        post: Callable[[Callable[[], None]], None],
        on_attached: Callable[[m.Attached], None],
        wake: Callable[[], None],
        bandwidth: Timetable | None = None,
        places: SlotPool | None = None,
    ) -> None:
        self.name, self._shown = settings.name, shown_remote(settings.name, settings.url)
        self.settings = settings
        self.bandwidth = bandwidth or constant(settings.bytes_per_second)
        """The remote's own limit."""
        self.attached: m.Attached | None = None
        self.is_away = self.is_duplicate = self.is_new = False
        """It was asked in vain, at a start nobody knows yet; it is another one's directory; it answers, is no
        remote yet and may not be made one."""
        self.seen_all: m.Observation | None = None  # what the remote holds, of all runs
        self._own: m.Observation | None = None
        self.run_id: str | None = None  # None: all runs are one; "": it is not known yet
        self.is_claimed = True  # this place may send there, for its run
        self.others: tuple[Place, ...] = ()  # who saves there instead
        self.observed_at_seconds = 0.0
        self.repaired: list[str] = []  # documents that were written again, of which nobody was told yet
        self.is_current = False
        """Nothing that we know of changed the remote since its observation was asked for."""
        self.tag_views: dict[str, m.TagView] = {}
        self.transfer: int | None = None
        """The request under way that uploads or deletes: one at a time."""
        self.uploading: str | None = None  # the form that it uploads
        self.is_cancelled = False
        """The last transfer was cancelled for another upload."""
        self.scrub: int | None = None  # a slow reading that is under way; anything else comes first
        self.heartbeat: int | None = None
        self._problems = problems
        self._post = post
        self._on_attached = on_attached
        self._wake = wake
        self._client = RemoteProcess(settings, self._deliver, places)
        self._open: dict[int, Callable[[m.Answer], None]] = {}
        self._requests_breaker = Breaker()
        self._transfers_breaker = Breaker()
        """Apart: a remote that answers every look and takes no upload is left alone with uploads."""
        self._logged = ""
        """The error that was logged last: tries again are not logged each time."""
        self._lacks_room = False
        """The last upload or removal found none: looks that are answered do not mean that it is over."""
        self._stalls = StallDetector()
        self._is_asking = self._is_regular_look = False
        self._knows_what_child_said = True
        """False: the last observation came too late to count, so "unchanged" since then means nothing."""
        self._asked_at_seconds = 0.0
        self._changed_at_seconds = 0.0
        """Time of the last change that ckptd made here: an observation requested earlier is out of date."""
        self._describing = RetryTimer()
        self._fraction = 1.0
        self.bytes_per_second = settings.bytes_per_second
        """The limit that holds now; None: there is none."""

    # --- state -----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Tell whether the remote is there, ours, observed, and not backing off."""
        return (
            self.attached is not None
            and self.observation is not None
            and not self._requests_breaker.seconds_left
        )

    @property
    def is_transferring(self) -> bool:
        """An upload or deletion is under way."""
        return self.transfer is not None

    @property
    def idle_seconds(self) -> float:
        """Return how long no byte has moved of the upload or removal under way; 0 when there is none."""
        return self._client.idle_seconds(self.transfer) if self.transfer is not None else 0.0

    @property
    def is_moving(self) -> bool:
        """An upload or removal is under way, and bytes of it move."""
        return self.is_transferring and self.idle_seconds < STILL_SECONDS

    @property
    def is_still(self) -> bool:
        """An upload or removal is under way, and no byte of it moves."""
        return self.is_transferring and not self.is_moving

    @property
    def is_stalled(self) -> bool:
        """An upload was cut since no byte moved; nothing is durable since then, and nothing moves now."""
        return self._stalls.is_cut and not self.is_moving

    @property
    def may_transfer(self) -> bool:
        """Tell whether a transfer may begin: the remote is there, its mover is free, and few transfers
        failed just now."""
        return self.is_ready and not self.is_transferring and not self.seconds_to_transfer

    @property
    def open_requests(self) -> int:
        """Orders without an answer yet, but for the regular look and the slow reading."""
        is_look = self._is_asking and self.attached is not None and self._is_regular_look
        is_in_vain = is_look and self._asked_at_seconds >= self._changed_at_seconds
        return len(self._open) - is_in_vain - sum(x is not None for x in (self.scrub, self.heartbeat))

    def seconds_to_retry(self) -> float:
        """Return how long the backoff lasts; 0 when there is none."""
        return self._requests_breaker.seconds_left

    @property
    def seconds_to_transfer(self) -> float:
        """Return how long no upload is tried because the last ones failed; 0 when one may be."""
        return self._transfers_breaker.seconds_left if self._transfers_breaker.backed_off else 0.0

    @property
    def seconds_to_wake(self) -> float:
        """Return the seconds until something is tried again; 0 when nothing waits."""
        return (
            self._requests_breaker.seconds_left or self.seconds_to_transfer or self._describing.seconds_left
        )

    @property
    def backed_off(self) -> BackedOff | None:
        """Return the operation that failed so often that it is tried only seldom; None: there is none."""
        return self._requests_breaker.backed_off or self._transfers_breaker.backed_off

    # --- turn ------------------------------------------------------------------------------------------

    def turn(self, now_seconds: float, *, is_at_rest: bool = False) -> None:
        """Attach or observe when due, seldom while the job is at rest; restart a child that gives no sign."""
        if self._is_cut() or self._is_asking or self._requests_breaker.seconds_left:
            return
        due_seconds = AT_REST_SECONDS if is_at_rest else OBSERVE_SECONDS
        if self.attached is None:
            self._is_asking = True
            self.request(m.Attach(settings=self.settings), self._attached)
        elif self.observation is None or now_seconds - self.observed_at_seconds >= due_seconds:
            self.observe()
            self._is_regular_look = self.observation is not None

    def _is_cut(self) -> bool:
        """End a hanging operation together with its child process, and tell whether one was ended.

        Nothing else ends a call on a dead mount, or inside a library.
        """
        limit = self._stalls.limit_seconds
        if self.transfer is not None and self._client.idle_seconds(self.transfer) > limit:
            reason = f"no byte moved for {limit:.0f} s"
            text = f"{self.name}: {reason}, so the transfer was cut; it goes on anew"
            self._problems.put("transfer-stalled", self.name, text, NEXT_STEP)
            self._stalls.note_cut()
        elif self._client.silent_seconds(self.transfer) > STALLED_SECONDS:
            reason = f"no sign of life for {STALLED_SECONDS:.0f} s"
        else:
            return False
        log.warning("%s: %s, its child is restarted", self._shown, reason)
        self._client.abandon(reason)
        return True

    def bind(self, run_id: str) -> None:
        """Count from here on only what this run committed in the remote."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.others = ()
            self.observation = self.seen_all

    @property
    def observation(self) -> m.Observation | None:
        """Return what the remote holds of this job's run; other runs are not counted, kept or deleted here
        (adr/0185).
        """
        return self._own

    @observation.setter
    def observation(self, seen: m.Observation | None) -> None:
        """Store an observation of all runs, and its part of this job's run."""
        self.seen_all = self._own = seen
        if seen is not None and self.run_id is not None:
            self._own = of_run(seen, self.run_id)

    def set_claim(self, *, is_claimed: bool, others: tuple[Place, ...] | None = None) -> None:
        """Record whether this place may upload there for its run, and who saves there instead."""
        self.is_claimed = is_claimed
        if others is not None:
            self.others = others

    def set_duplicate(self, *, is_duplicate: bool) -> None:
        """Record whether this remote is another one's directory or bucket."""
        self.is_duplicate = is_duplicate

    def reject(self, error: errors.CkptdError, *, job_id: str | None, remote_id: str | None) -> None:
        """Undo what was taken over from an answer that is another remote's."""
        update = {"job_id": job_id, "remote_id": remote_id}
        self.settings = self.settings.model_copy(update=update)
        self.is_duplicate = isinstance(error, errors.RemoteNotOurs)
        self.note_error(error)

    def forget_tag(self, tag: str) -> None:
        """Forget the manifests of a tag: they are read again when they are needed."""
        self.tag_views.pop(tag, None)

    def propose_job_id(self, job_id: str | None) -> None:
        """Propose the job id of the job's other remotes to a remote that is new."""
        if job_id is not None and self.settings.job_id is None:
            self.settings = self.settings.model_copy(update={"proposed_job_id": job_id})

    def observe(self) -> None:
        """Ask for a fresh observation unless one is under way."""
        if not self._is_asking and self.attached is not None:
            self._is_asking, self._is_regular_look = True, False
            self._asked_at_seconds = time.monotonic()
            may_be_same = self.observation is not None and self._knows_what_child_said
            self.request(m.Observe(only_changed=may_be_same), self._observed)

    def describe(self, tag: str, then: Callable[[], None]) -> None:
        """Read every manifest of a tag into `tag_views`."""
        if not self._describing.begin(tag):
            return

        def done(answer: m.Answer) -> None:
            self._describing.end(tag, is_done=isinstance(answer, m.TagView))
            if isinstance(answer, m.TagView):
                self.tag_views[tag] = answer
            elif isinstance(answer, m.Failed):
                self.note_error(answer.raised)
            then()

        self.request(m.DescribeTag(tag=tag), done)

    def request(self, order: m.Request, on_answer: Callable[[m.Answer], None]) -> int:
        """Send an order; every event and the final answer reach `on_answer` in the deciding thread."""
        order_id = self._client.submit(order)
        self._open[order_id] = on_answer
        return order_id

    def start_transfer(
        self, request: m.Request, on_answer: Callable[[m.Answer], None], form: str | None = None
    ) -> None:
        """Start an upload of a form, or a deletion."""
        self.uploading, self.is_cancelled = form, False
        self.transfer = self.request(request, on_answer)

    def start_scrub(self, request: m.Request, on_answer: Callable[[m.Answer], None]) -> None:
        """Start a slow reading."""
        self.scrub = self.request(request, on_answer)

    def send_heartbeat(self, request: m.Beat, on_answer: Callable[[m.Answer], None] | None = None) -> None:
        """Send a heartbeat, or read those of others."""
        self.heartbeat = self.request(request, on_answer or (lambda _: None))

    def pace(self, fraction: float) -> None:
        """Move at a fraction of the allowed speed while a save is in flight (P11)."""
        if fraction != self._fraction:
            self._fraction = fraction
            self._client.pace(fraction, self.bytes_per_second)

    def limit(self, bytes_per_second: int | None) -> None:
        """Move at most at this speed: the remote's own, or its share of the daemon's (None: no limit)."""
        if bytes_per_second != self.bytes_per_second:
            self.bytes_per_second = bytes_per_second
            self._client.pace(self._fraction, bytes_per_second)

    def cancel_transfer(self) -> None:
        """End the transfer at its next window; what is durable stays for the next attempt."""
        if self.transfer is not None and not self.is_cancelled:
            self.is_cancelled = True
            self._client.cancel(self.transfer)

    def cancel_scrub(self) -> None:
        """End the slow reading at its next step."""
        if self.scrub is not None:
            self._client.cancel(self.scrub)

    def end_child(self) -> None:
        """End the child if it has nothing to do; the next order starts another."""
        if self._client.pid is not None:
            self._client.make_room()

    def close(self) -> None:
        """End the child; answers that are on their way concern nobody any more."""
        self._client.close()
        self._open.clear()

    # --- answers ---------------------------------------------------------------------------------------

    def _deliver(self, order_id: int, answer: m.Answer) -> None:
        """Hand an answer over to the deciding thread; called in the client's reader thread."""
        self._post(lambda: self._dispatch(order_id, answer))

    def _dispatch(self, order_id: int, answer: m.Answer) -> None:
        handler = self._open.get(order_id)
        if handler is None:
            return
        if isinstance(answer, m.EVENTS):
            if isinstance(answer, m.TransferProgress | m.ObjectDone) and self._stalls.is_durable(answer):
                self._transfer_works()
        else:
            del self._open[order_id]
            self._client.ended()
            self.scrub = None if self.scrub == order_id else self.scrub
            self.heartbeat = None if self.heartbeat == order_id else self.heartbeat
            if self.transfer == order_id:
                self.transfer = self.uploading = None
                self.mark_outdated()
                is_done = not isinstance(answer, m.Failed)
                self._stalls.note_end(is_done=is_done)
                if is_done:
                    self._transfer_works()
        handler(answer)

    def mark_outdated(self) -> None:
        """Mark the last observation as out of date."""
        self._changed_at_seconds, self.is_current = time.monotonic(), False

    def _attached(self, answer: m.Answer) -> None:
        self._is_asking = False
        if isinstance(answer, m.Attached):
            can = answer.abilities
            if not can.create_only and (self.attached is None or self.attached.abilities != can):
                log.warning("%s: only one node may write there: %s", self._shown, "; ".join(can.notes))
            self.attached, self.is_away = answer, False
            seen = {"remote_id": answer.identity.remote_id, "job_id": answer.identity.job_id}
            self.settings = self.settings.model_copy(update={**seen, "abilities": can})
            self._on_attached(answer)
            self.observe()
        elif isinstance(answer, m.Failed) and isinstance(answer.raised, errors.RemoteNotInitialised):
            self.is_new = True
            self.note_answer()
            self._wake()
        elif isinstance(answer, m.Failed):
            self.note_error(answer.raised)

    def _observed(self, answer: m.Answer) -> None:
        self._is_asking = False
        is_late = self._asked_at_seconds < self._changed_at_seconds
        if isinstance(answer, m.Observation):
            self.repaired += answer.repaired
            self._knows_what_child_said = self.is_current = not is_late
        if isinstance(answer, m.Observation | m.Unchanged) and is_late:
            self.observe()
        elif isinstance(answer, m.Unchanged) and self.seen_all is not None:
            self.observed_at_seconds, self.is_current = time.monotonic(), True
            self.observation = self.seen_all.model_copy(update={"free_bytes": answer.free_bytes})
            self.note_answer()
        elif isinstance(answer, m.Observation):
            self.observation = answer
            self.observed_at_seconds = time.monotonic()
            self.note_answer()
            self._wake()
        elif isinstance(answer, m.Failed):
            self.note_error(answer.raised)

    def _transfer_works(self) -> None:
        """An upload or removal works."""
        self._lacks_room = self._stalls.is_cut = False
        self._problems.clear("transfer-stalled", self.name)
        if self._transfers_breaker.succeeded():
            self._wake()

    def note_answer(self) -> None:
        """The remote answered: forget the backoff and its problems."""
        if self._requests_breaker.succeeded():
            self._wake()
        self._logged = ""
        for code in ("remote-unreachable", "remote-not-ours", "remote-denied", "remote-full"):
            if code != "remote-full" or not self._lacks_room:
                self._problems.clear(code, self.name)
        if self.observation is not None and not self.observation.damaged:
            self._problems.clear("remote-damaged", self.name)

    def note_transfer_failed(self, error: errors.CkptdError, *, is_answering: bool = False) -> None:
        """An upload or removal failed for a reason that lies with the remote."""
        self._transfers_breaker.failed(error.message)
        self._lacks_room = isinstance(error, errors.NoSpaceError)
        if not is_answering:
            self.note_error(error)

    def note_error(self, error: errors.CkptdError) -> None:
        """The remote failed: say so, back off; an unreachable or foreign one must attach anew (P2)."""
        self._requests_breaker.failed(error.message)
        code = report_error(self._problems, self.name, self.settings.url, error, lacks_room=self._lacks_room)
        if code not in ("remote-full", "remote-denied"):
            self.attached, self.observation, self.is_away = None, None, True
        is_new, self._logged = self._logged != error.message, error.message
        text = said_of(self.name, self.settings.url, str(error))
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s", text)
        self._wake()

    def forget_commit(self, key: str) -> None:
        """A COMMIT was retired: do not plan on it until the next observation."""
        seen = self.seen_all
        if seen is not None:
            left = tuple(v for v in seen.commits if v.key != key)
            self.observation = seen.model_copy(update={"commits": left})

    # --- what the planner needs ------------------------------------------------------------------------

    def seen(self, tag: str) -> tuple[list[SeenManifest], list[SeenCommit]]:
        """Manifests and COMMITs of a tag in the words of `choose_generation`."""
        view = self.tag_views.get(tag)
        return ([], []) if view is None else commits_of(view)

    def known_tags(self) -> frozenset[str]:
        """Tags that the remote holds anything of."""
        seen = self.seen_all
        if seen is None:
            return frozenset()
        tags = {tag for tag, _, _ in (*seen.uncommitted, *seen.unreadable)}
        return frozenset(tags).union(seen.retired_tags, (v.commit.tag for v in seen.commits))


def of_run(seen: Observation, run_id: str) -> Observation:
    """Reduce an observation to one run. Names of tags, open generations and decisions stay, being of all
    runs.
    """
    job_id = seen.identity.job_id
    stones = tuple(stone for stone in seen.retired if run_of(stone, job_id) == run_id)
    others = {stem_of(stone) for stone in seen.retired} - {stem_of(stone) for stone in stones}
    update = {
        "commits": tuple(v for v in seen.commits if run_of(v.commit, job_id) == run_id),
        "supplements": tuple(v for v in seen.supplements if run_of(v.commit, job_id) == run_id),
        "retired": stones,
        "retiring": tuple(where for where in seen.retiring if where not in others),
    }
    return seen.model_copy(update=update)


def commits_of(view: TagView) -> tuple[list[SeenManifest], list[SeenCommit]]:
    """Manifests and COMMITs of a tag."""
    manifests = [
        SeenManifest(
            generation=v.manifest.generation,
            form=v.manifest.form,
            manifest=v.manifest,
            committed=v.committed,
        )
        for v in view.manifests
    ]
    commits = [
        SeenCommit(
            generation=v.commit.generation,
            form=v.commit.form,
            key=v.key,
            sha256=v.sha256,
            disputed=v.disputed,
        )
        for v in view.commits
    ]
    return manifests, commits
