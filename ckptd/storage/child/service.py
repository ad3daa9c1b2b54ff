"""Carry out one order in a remote's child process, apart from the process around it.

It holds no state that matters: the attached remote, found again when lost; the rate limit; which orders were
cancelled. Every failure of the error tree becomes a `Failed` answer, anything else is a bug and ends the
process (docs/design.md §3).
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, DocumentDamaged, RemoteError, RemoteNotOurs, VerifyError, from_os_error
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.documents import DocumentCache
from ckptd.storage.remote.early import delete_early, upload_early
from ckptd.storage.remote.heartbeats import Heartbeats, remove_stale_temporaries
from ckptd.storage.remote.kept import (
    KeptDocuments,
    audited,
    heal_commits,
    heal_identity,
    heal_side_documents,
    keep_documents,
    keep_side_documents,
)
from ckptd.storage.remote.messages import (
    Alive,
    Attach,
    Attached,
    Beat,
    Beats,
    Cancel,
    Claimed,
    ClaimRun,
    Confirm,
    DeleteCommit,
    DeleteEarly,
    DescribeTag,
    Discard,
    Done,
    EarlyRequest,
    Failed,
    ObjectDone,
    Observation,
    Observe,
    Pace,
    Point,
    RecordDecision,
    RemoteSettings,
    Scrub,
    TransferProgress,
    Unchanged,
    UploadedObject,
    UploadRequest,
    UploadResult,
    known,
)
from ckptd.storage.remote.observe import (
    AttachedRemote,
    confirm,
    describe,
    observe,
    point,
    publish,
    still_ours,
)
from ckptd.storage.remote.runs import claim_run
from ckptd.storage.remote.scrub import scrub
from ckptd.storage.remote.shares import hold_lease
from ckptd.storage.remote.supplement import supplement
from ckptd.storage.remote.transfer import TransferControl, sealed
from ckptd.storage.stores.base import WINDOW_BYTES, Progress
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import Cancelled, RateLimiter
from ckptd.storage.stores.retrying import Motion, WatchedRateLimiter, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.storage.remote.messages import Answer, Planned, Request
    from ckptd.storage.remote.transfer import OpenOrigin
    from ckptd.storage.stores.base import Store

_EVENT_SECONDS = 0.2
_SIGN_SECONDS = 1.0


class Service:
    """Carries out orders on one remote; `emit(order id, answer)` is called from several threads."""

    def __init__(
        self,
        emit: Callable[[int, Answer], None],
        *,
        window_bytes: int = WINDOW_BYTES,
        open_origin: OpenOrigin = sealed,
    ) -> None:
        self._emit = emit
        self._window_bytes = window_bytes
        self._open_origin = open_origin
        self._pacer = RateLimiter()
        self._settings: RemoteSettings | None = None
        self._remote: AttachedRemote | None = None
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._documents = DocumentCache()
        self._observed: Observation | None = None
        self._beats: Heartbeats | None = None
        self._claimed: dict[str, str] = {}  # the run of a claim → the run under which it was accepted
        self._is_tidied = False
        self._kept: KeptDocuments | None = None

    def expect(self, settings: RemoteSettings) -> None:
        """Note that an order to attach was read: what is read after it means that remote, whichever thread is
        first.
        """
        self._settings, self._remote, self._observed = settings, None, None
        self._pacer.set_rate(settings.bytes_per_second)

    def steer(self, order: Pace | Cancel) -> None:
        """Change the rate limit, or cancel an order that runs or waits; at once, from the reading thread."""
        if isinstance(order, Pace):
            self._pacer.set_fraction(order.fraction)
            self._pacer.set_rate(order.bytes_per_second)
        else:
            self._cancelled.add(order.order_id)

    def carry_out(self, order_id: int, order: Request) -> None:
        """Carry out an order and emit the answer that ends it."""
        try:
            answer = self._answer(order_id, order)
        except CkptdError as error:
            if isinstance(error, RemoteError | VerifyError):
                # the mount may be another one by now, a server may answer otherwise: the next order finds out
                self._remote = None
            answer = Failed(**error.as_data)
        except OSError as error:
            where = f"remote {self._settings.url if self._settings else '?'}"
            answer = Failed(**from_os_error(error, where).as_data)
        self._cancelled.discard(order_id)
        self._emit(order_id, answer)

    def _answer(self, order_id: int, order: Request) -> Answer:
        if isinstance(order, Attach):
            with self._lock:
                return self._attach(order.settings)
        reporter = _Reporter(order_id, self._emit, self._cancelled)
        found = self._attached()
        attached = replace(found, store=watched(found.store, reporter.heard))
        if isinstance(order, Observe):
            return self._observe(attached, order)
        if isinstance(order, DescribeTag):
            node = self._settings.node if self._settings else None
            return describe(
                attached.store, order.tag, attached.identity, node=node, manifests=attached.manifests
            )
        if isinstance(order, Confirm):
            return confirm(attached.store, order.commits, attached.identity)
        if isinstance(order, ClaimRun):
            still_ours(attached.store, attached.identity)
            return self._claim(attached, order)
        if isinstance(order, Beat):
            return self._beat(found, order)
        if isinstance(order, UploadRequest):
            return self._upload(attached, order, reporter.control(self._pacer))
        if isinstance(order, Scrub):
            pacer = reporter.control(self._pacer).pacer
            return scrub(attached, order, pacer, reporter.check, self._settings)
        if isinstance(order, DeleteCommit):
            delete_commit(attached, order, reporter.check)
        elif isinstance(order, EarlyRequest):
            upload_early(attached, order, reporter.control(self._pacer))
        elif isinstance(order, DeleteEarly):
            delete_early(attached, order, reporter.check)
        else:
            _note(attached, order)
        return Done()

    def _observe(self, attached: AttachedRemote, order: Observe) -> Observation | Unchanged:
        """Answer what the remote holds, or that it has not changed."""
        seen = observe(attached.store, attached.identity, self._documents)
        if repaired := self._repaired(attached, seen):
            seen = observe(attached.store, attached.identity, self._documents)
            seen = seen.model_copy(update={"repaired": repaired})
        bare = seen.model_copy(update={"free_bytes": None})
        before, self._observed = self._observed, bare
        is_same = order.only_changed and bare == before
        # a put of a process that died may arrive after a newer one; at the second look, for a COMMIT that was
        # made a moment ago is about to be pointed at, and a late listing may not show it yet
        is_wrong = before is not None and not (before.is_pointing or seen.is_pointing)
        if is_wrong and attached.abilities.create_only:
            with suppress(CkptdError):  # of a remote that may only be read
                point(attached.store, self._documents)
        return Unchanged(free_bytes=seen.free_bytes) if is_same else seen

    def _repaired(self, attached: AttachedRemote, seen: Observation) -> tuple[str, ...]:
        """Write documents again that rotted or are lost; before anybody takes them for another's, or gone."""
        settings = self._settings
        if settings is None or attached.kept is None:
            return ()
        # without scrub as well what is kept of COMMITs that were deleted is forgotten
        is_dry = not settings.is_scrubbed
        repaired = heal_commits(attached.kept, attached.store, seen, dry_run=is_dry)
        if is_dry:
            return ()
        with suppress(CkptdError):
            repaired += heal_side_documents(attached.kept, attached.store, seen.damaged)
            keep_side_documents(attached.kept, attached.store, seen)
        return audited(Path(settings.state_dir), settings.name, repaired)

    def _claim(self, attached: AttachedRemote, order: ClaimRun) -> Claimed:
        def beat(run_id: str) -> None:
            self._claimed[order.claim.run_id] = run_id
            if order.heartbeat is not None:
                said = {"run_id": run_id, "job_id": attached.identity.job_id}
                self._heartbeats(attached).put(order.heartbeat.model_copy(update=said))

        return Claimed(run=claim_run(attached.store, order.claim, attached.identity.job_id, beat))

    def _heartbeats(self, attached: AttachedRemote) -> Heartbeats:
        if self._beats is None or self._beats.store is not attached.store:
            self._beats = Heartbeats(attached.store)
        return self._beats

    def _beat(self, attached: AttachedRemote, order: Beat) -> Beats:
        """Write ours and look at the others'."""
        still_ours(attached.store, attached.identity)
        self._beats = self._heartbeats(attached)
        if (said := order.heartbeat) is not None:
            # one that was ordered before the daemon heard of its claim tells of no other run
            run_id = self._claimed.get(said.run_id or "", said.run_id)
            self._beats.put(said.model_copy(update={"run_id": run_id}))
        infos = self._beats.listed()
        nodes = self._beats.others(order.node, reads_all=order.reads_all, infos=infos)
        lease, beat = None, order.heartbeat
        if order.takeover_seconds is not None and beat is not None:
            # after our heartbeat: who looks for a silent holder from now on finds us alive
            lease = hold_lease(
                attached.store, beat.job_id, beat.node, beat.node_id, nodes, order.takeover_seconds
            )
        sharers = self._beats.elsewhere(beat, infos) if beat is not None else ()
        return Beats(nodes=nodes, sharers=sharers, lease=lease)

    def _upload(
        self, attached: AttachedRemote, order: UploadRequest, control: TransferControl
    ) -> UploadResult:
        if order.supplement_to is not None:
            return supplement(attached, order, control)
        done = upload_form(attached, order, control, self._open_origin)
        if done.outcome == "committed" and done.commit is not None and attached.kept is not None:
            node = order.manifest.node
            keep_documents(attached.kept, attached.store, [done.commit], attached.manifests, node)
        return done

    def _attach(self, settings: RemoteSettings) -> Attached:
        """Prove the remote and remember it; the lock is held."""
        store = open_store(
            settings.url,
            access=settings.access,
            owner=settings.node_id,
            read_back=settings.verify != "none",
            window_bytes=self._window_bytes,
        )
        self._settings, self._remote = settings, None
        try:
            found = attach(store, settings)
        except DocumentDamaged:
            if not self._is_identity_healed(store, settings):
                raise
            found = attach(store, settings)
        self._tidy(store)
        self._settings = known(settings, found)
        self._remote = AttachedRemote(
            store=store,
            abilities=found.abilities,
            identity=found.identity,
            documents=self._documents,
            kept=self._kept_of(found.identity.remote_id),
        )
        return found

    def _kept_of(self, remote_id: str) -> KeptDocuments | None:
        """Return what this node keeps of a remote: the same object each time it is attached."""
        state_dir = self._settings.state_dir if self._settings else ""
        if not state_dir:
            return None
        if self._kept is None or self._kept.remote_id != remote_id:
            self._kept = KeptDocuments(Path(state_dir), remote_id)
        return self._kept

    def _is_identity_healed(self, store: Store, settings: RemoteSettings) -> bool:
        """Write `remote.json` again where that may be done; tell whether it was."""
        kept = self._kept_of(settings.remote_id) if settings.remote_id and settings.is_scrubbed else None
        if kept is not None:
            with suppress(CkptdError):  # of a remote that may only be read
                return bool(audited(Path(settings.state_dir), settings.name, heal_identity(kept, store)))
        return False

    def _tidy(self, store: Store) -> None:
        """Remove what an earlier process of this node left, once; failing keeps nobody from attaching."""
        if self._is_tidied:
            return
        with suppress(CkptdError, OSError):
            remove_stale_temporaries(store)
            self._is_tidied = True

    def _attached(self) -> AttachedRemote:
        """Return the attached remote, attached anew where it was lost."""
        attached = self._remote
        if attached is not None:
            return attached
        with self._lock:
            if self._remote is None:
                if self._settings is None:
                    msg = "the remote was not attached"
                    raise RemoteNotOurs(msg, hint="attach comes first")
                self._attach(self._settings)
            assert self._remote is not None
            return self._remote


class _Reporter:
    """Events of one order: each flushed window, else one every 0.2 s, and a sign of life every second.

    Each says how long nothing has moved: a request that is repeated in vain is life, and no motion.
    """

    def __init__(self, order_id: int, emit: Callable[[int, Answer], None], cancelled: set[int]) -> None:
        self._id = order_id
        self._emit = emit
        self._cancelled = cancelled
        self._at = time.monotonic()
        self._flushed: dict[str, tuple[int, str]] = {}
        self._motion = Motion()

    def control(self, pacer: RateLimiter) -> TransferControl:
        """Return the callbacks and the rate limit that a transfer needs."""
        return TransferControl(
            pacer=WatchedRateLimiter(pacer, self._motion),
            check=self.check,
            on_moving=self._on_moving,
            on_done=self._on_done,
            on_planned=self._send,
        )

    def heard(self) -> None:
        """Note that the store answered."""
        self._motion.moved()
        self._give_sign()

    def check(self) -> None:
        """Raise `Cancelled` when the daemon wants that; give a sign of life when it has been quiet."""
        if self._id in self._cancelled:
            msg = "the transfer was cancelled"
            raise Cancelled(msg, hint="it goes on where it stopped when it is ordered again")
        self._give_sign()

    def _give_sign(self) -> None:
        if time.monotonic() - self._at >= _SIGN_SECONDS:
            self._send(Alive(idle_seconds=self._motion.idle_seconds))

    def _on_moving(self, key: str, total_bytes: int, progress: Progress) -> None:
        self._motion.advanced(key, progress.done_bytes)
        flushed = (progress.flushed_bytes, progress.token)
        is_known = flushed == self._flushed.get(key, (0, ""))
        if is_known and time.monotonic() - self._at < _EVENT_SECONDS:
            return
        self._flushed[key] = flushed
        self._send(
            TransferProgress(
                key=key,
                done_bytes=progress.done_bytes,
                total_bytes=total_bytes,
                flushed_bytes=progress.flushed_bytes,
                crc64=progress.crc64,
                token=progress.token,
                idle_seconds=self._motion.idle_seconds,
            )
        )

    def _on_done(self, uploaded: UploadedObject) -> None:
        self._flushed.pop(uploaded.key, None)
        self._send(ObjectDone(object=uploaded))

    def _send(self, event: TransferProgress | ObjectDone | Planned | Alive) -> None:
        self._at = time.monotonic()
        self._emit(self._id, event)


def _note(attached: AttachedRemote, order: Request) -> None:
    """Carry out small changes: a person's decision, the pointers, uploads that nobody goes on with."""
    if isinstance(order, RecordDecision):
        publish(attached.store, order.decision, attached.identity)
    elif isinstance(order, Discard):
        still_ours(attached.store, attached.identity)
        for key, token in order.uploads:
            attached.store.discard(key, token)
    elif isinstance(order, Point):
        still_ours(attached.store, attached.identity)
        point(attached.store)
