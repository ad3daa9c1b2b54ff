"""Request uploads and deletions from a remote's child, and journal the answers.

The intent is journalled before the request is sent and the outcome when the answer arrives, so that a crash
in between leaves an upload that the next start continues (P7: a crash at any moment loses nothing).
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from ckptd import errors
from ckptd.base.owned_dirs import path_of
from ckptd.base.retry import backoff_seconds, changed_seconds
from ckptd.config.commands import command_for
from ckptd.core.model.records import ZERO, DerivedRecord, DerivedState, ShipRecord, ShipState
from ckptd.core.policy.leases import beat_seconds
from ckptd.core.policy.view import Confirmation
from ckptd.daemon.state.state import Converting, JobState, UploadProgress
from ckptd.daemon.uploads.commit_wait import waiting_on
from ckptd.daemon.uploads.late_files import SupplementUploader
from ckptd.daemon.uploads.requests import (
    committed_source,
    derive_request,
    files_to_upload,
    forget_replaced_objects,
    half_row,
    pointer_to_ship,
    ship_order,
    verified_row,
)
from ckptd.daemon.uploads.retire import RemoteDeleter
from ckptd.observe.logs import doing
from ckptd.storage.child.slots import error_of
from ckptd.storage.local import fs
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.records import SaveRow
    from ckptd.core.policy.actions import AskConfirmation, MakeWay, Ship
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.observe.audit import Audit


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.daemon.state.state import JobState

log = logging.getLogger("ckptd.ship")

STEP_IN_SECONDS = 60.0
"""Until a part that waits is looked at again, and replicas are sent that their owner did not send (H29)."""

NEXT_STEP_CHANGED = "find out what writes there: ckptd sends it once it rests, an hour later at most"


class UploadManager:
    """The remote half of executing a plan, for one job."""

    def __init__(
        self,
        config: JobConfig,
        config_digest: str,
        state: JobState,
        links: Mapping[str, RemoteSession],
        audit: Audit,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._config_digest = config_digest
        self._state = state
        self._links = links
        self._wake = wake
        beat = beat_seconds(config.shared_takeover_seconds, STEP_IN_SECONDS)
        self._step_in_seconds = beat if config.shared_fs else STEP_IN_SECONDS
        self.retiring = RemoteDeleter(config, state, links, audit, wake)
        self.late = SupplementUploader(config, config_digest, state, links, wake)

    # --- ship ------------------------------------------------------------------------------------------

    def ship(self, action: Ship, save_dir_fd: int, memory_bytes: int) -> None:
        """Start shipping one form of one save; `memory_bytes`: what making it may use (P12)."""
        state, link = self._state, self._links[action.remote]
        row = state.rows[action.save_id]
        key = (action.save_id, action.remote, action.form)
        old = state.ship(*key)
        if old.generation not in (None, action.generation) or old.attempt != action.attempt:
            state.journal.forget_objects(*key)
        files, making = self._sources(row, action, save_dir_fd, memory_bytes)
        if files is None:
            if action.form != ZERO:  # somebody removed it, or the journal is of before it went
                state.put_derived(row.id, DerivedRecord(reason="its files are gone"), action.form)
            elif row.held:
                state.journal.set_held(row.id, held=False)
                state.reload(row.id)
            return
        forget_replaced_objects(state, row, action)
        record = old.model_copy(
            update={
                "state": ShipState.SHIPPING,
                "generation": action.generation,
                "attempt": action.attempt,
                "reason": None,
            }
        )
        state.put_ship(action.save_id, record)
        order = ship_order(
            row,
            action,
            files,
            making,
            root=str(self._config.save_dir),
            settings=link.settings,
            config_digest=self._config_digest,
            objects=state.journal.objects(*key),
            save_spread_seconds=self._config.save_spread_seconds,
            steps_in=old.state is ShipState.WAITING,
            takeover_seconds=self._config.shared_takeover_seconds if self._config.shared_fs else None,
            run_id=state.run_id,
        )
        total = sum(f.bytes for f in files)
        state.moving[key] = UploadProgress(done_bytes=0, total_bytes=total, started_seconds=time.monotonic())
        state.busy[action.save_id] += 1
        if making is not None:
            state.converting = Converting(save_id=action.save_id, form=action.form)
        link.ships, link.makes_way = action.form, False
        link.ship_order = link.order(order, lambda answer: self._on_ship(action, answer))
        what = (row.save.tag, action.form, action.remote, action.generation, total / 1e6)
        log.info("%s (%s) → %s as generation %d: %.1f MB", *what, extra=doing("ship", row.save.tag))

    def _sources(
        self, row: SaveRow, action: Ship, save_dir_fd: int, memory_bytes: int
    ) -> tuple[tuple[m.ShipFile, ...] | None, m.Making | None]:
        """Files that lie here, and what is made of shards while it is sent."""
        if not action.is_streamed:
            return files_to_upload(row, action, save_dir_fd), None
        os.close(fs.ensure_ours(save_dir_fd, fs.STAGING))
        staging = path_of(self._config.save_dir, fs.STAGING)
        zero = self._state.ship(row.id, action.remote, ZERO)
        source = committed_source(row, zero, self._config.shared_takeover_seconds)
        return pointer_to_ship(row, action), derive_request(row, action, source, str(staging), memory_bytes)

    def make_way(self, action: MakeWay) -> None:
        """Cancel the upload under way for a save; it continues later where it stopped."""
        link = self._links[action.remote]
        if not link.makes_way:
            log.info("the upload of a %s form to %s makes way: %s", link.ships, action.remote, action.reason)
            link.cancel_ship()

    def _on_ship(self, action: Ship, answer: m.Answer) -> None:
        key = (action.save_id, action.remote, action.form)
        if isinstance(answer, m.Moving):
            self._progress(key, answer)
            return
        if isinstance(answer, m.Planned):
            self._planned(action, answer)
            return
        if isinstance(answer, m.ObjectDone):
            done = answer.object
            self._state.journal.put_object(*key, verified_row(done))
            moving = self._state.moving.get(key)
            if moving is not None:
                moving.done_bytes += done.bytes - moving.objects.get(done.key, 0)
                moving.objects[done.key] = done.bytes
            return
        self._state.busy[action.save_id] -= 1
        if action.is_streamed:
            self._state.converting = None
        self._end_ship(action, answer)
        self._links[action.remote].ships = None
        self._state.moving.pop(key, None)
        self._wake()

    def _planned(self, action: Ship, planned: m.Planned) -> None:
        """Record the plan of a derived form, and forget objects that an attempt by another plan uploaded."""
        state, key = self._state, (action.save_id, action.remote, action.form)
        state.moving[key].total_bytes = planned.bytes
        record = state.rows[action.save_id].derived_of(action.form)
        if record.plan_sha256 not in ("", planned.plan_sha256):
            state.journal.forget_objects(*key)
        update = {"plan_sha256": planned.plan_sha256, "layout": planned.layout, "bytes": planned.bytes}
        state.put_derived(action.save_id, record.model_copy(update=update), action.form)

    def _progress(self, key: tuple[int, str, str], moving: m.Moving) -> None:
        state = self._state
        entry = state.moving.get(key)
        if entry is None:
            return
        entry.done_bytes += moving.done_bytes - entry.objects.get(moving.key, 0)
        entry.objects[moving.key] = moving.done_bytes
        durable = (moving.key, moving.flushed_bytes, moving.token)
        if (moving.flushed_bytes or moving.token) and durable != entry.durable:
            entry.durable = durable
            state.journal.put_object(*key, half_row(moving))

    def _end_ship(self, action: Ship, answer: m.Answer) -> None:
        state, link = self._state, self._links[action.remote]
        key = (action.save_id, action.remote, action.form)
        record = state.ship(*key)
        tag = state.rows[action.save_id].save.tag
        if isinstance(answer, m.ShipResult):
            link.tag_views.pop(tag, None)
            state.generations.pop(key, None)
            link.well()
            link.observe()
            self._shipped(action, record, answer)
        elif isinstance(answer, m.Failed) and link.makes_way:
            state.put_ship(action.save_id, record.model_copy(update={"state": ShipState.NEW}))
        elif isinstance(answer, m.Failed):
            self._failed(action, record, error_of(answer))

    def _shipped(self, action: Ship, record: ShipRecord, answer: m.ShipResult) -> None:
        state = self._state
        tag = state.rows[action.save_id].save.tag
        record = record.model_copy(update={"is_damaged": answer.outcome == "damaged", "hint": ""})
        if answer.outcome == "committed" and answer.commit is not None:
            moving = state.moving.get((action.save_id, action.remote, action.form))
            seconds = time.monotonic() - moving.started_seconds if moving else 0.0
            if answer.bytes_sent and seconds > 0:
                state.link_speeds[action.remote] = answer.bytes_sent / seconds
            record = record.model_copy(
                update={
                    "state": ShipState.COMMITTED,
                    "generation": answer.commit.commit.generation,
                    "commit_key": answer.commit.key,
                    "commit_sha256": answer.commit.sha256,
                    "unlisted": answer.unlisted,
                    "tries": 0,
                    "reason": None,
                    "bytes_sent": answer.bytes_sent,
                }
            )
            if action.is_streamed:  # half uploads of an attempt that does not count are given up
                state.journal.forget_objects(action.save_id, action.remote, action.form)
            log.info("%s (%s) committed on %s", tag, action.form, action.remote, extra=doing("commit", tag))
        elif answer.outcome in ("waiting", "damaged"):
            if answer.outcome == "damaged":
                step = command_for(self._config, "verify", tag, "--repair", "--read-data")
                record = record.model_copy(update={"hint": f"{step} on the node that has that shard"})
            again_at = time.monotonic() + self._wait_seconds(action, answer)
            update = {"state": ShipState.WAITING, "reason": answer.reason, "retry_at_seconds": again_at}
            record = record.model_copy(update=update)
        elif answer.outcome == "refused":
            record = record.model_copy(update={"state": ShipState.REFUSED, "reason": answer.reason})
            update = {"state": DerivedState.REFUSED, "reason": answer.reason, "hint": answer.hint}
            derived = state.rows[action.save_id].derived_of(action.form)
            state.put_derived(action.save_id, derived.model_copy(update=update), action.form)
            log.warning("%s (%s): %s", tag, action.form, answer.reason, extra=doing("ship", tag))
        else:
            record = self._again(record, answer.reason or "another save holds this generation")
            if action.form != ZERO:
                record = record.model_copy(update={"attempt": record.attempt + 1})
            state.journal.forget_objects(action.save_id, action.remote, action.form)
        state.put_ship(action.save_id, record)

    def _wait_seconds(self, action: Ship, answer: m.ShipResult) -> float:
        """Return the seconds until the next attempt, while other nodes' parts, another node's form or a
        repair are awaited.
        """
        if action.form != ZERO:
            return self._config.shared_takeover_seconds
        key, first = (action.save_id, action.remote, action.form), self._step_in_seconds
        waiting = self._state.waiting[key] = waiting_on(self._state.waiting.get(key), answer, first)
        # of a shared directory what takes over from a silent host is the attempt itself
        return first if self._config.shared_fs else waiting.retry_seconds

    def _again(
        self, record: ShipRecord, reason: str, pause_seconds: Callable[[int], float] = backoff_seconds
    ) -> ShipRecord:
        tries = record.tries + 1
        again_at = time.monotonic() + pause_seconds(tries)
        update = {"tries": tries, "reason": reason, "retry_at_seconds": again_at}
        return record.model_copy(update={"state": ShipState.FAILED, **update})

    def _failed(self, action: Ship, record: ShipRecord, error: errors.CkptdError) -> None:
        state, link = self._state, self._links[action.remote]
        key, tag = (action.save_id, action.remote, action.form), state.rows[action.save_id].save.tag
        log.warning("%s → %s (%s): %s", tag, action.remote, action.form, error, extra=doing("ship", tag))
        record = record.model_copy(update={"hint": error.hint, "is_damaged": False})
        if isinstance(error, errors.SourceChanged):
            state.journal.forget_objects(*key)
            record = record.model_copy(update={"hint": NEXT_STEP_CHANGED})
            record = self._again(record, error.message, changed_seconds)
        elif isinstance(error, errors.DocumentDamaged):
            # the remote's, not the save's; a COMMIT that cannot be read takes its generation: choose anew
            link.tag_views.pop(tag, None)
            state.generations.pop(key, None)
            record = self._again(record, error.message)
            link.observe()
        elif isinstance(error, errors.DamagedError) and not isinstance(error, errors.VerifyError):
            update = {"state": ShipState.REFUSED, "reason": error.message, "is_damaged": True}
            record = record.model_copy(update=update)
        else:
            record = self._again(record, error.message)
            wrong = isinstance(error, errors.VerifyError)
            if wrong or isinstance(error, errors.RemoteError | errors.StorageError) or error.exit_code == 77:
                link.move_failed(error, is_answering=wrong)
        state.put_ship(action.save_id, record)

    # --- confirm ---------------------------------------------------------------------------------------

    def confirm(self, action: AskConfirmation) -> None:
        """Ask every required remote for a fresh read of the COMMITs (P1)."""
        state = self._state
        if action.save_id in state.asking or not action.commits:
            return
        state.asking.add(action.save_id)
        waiting = {ref.remote for ref in action.commits}
        asked_at_seconds = time.monotonic()

        def heard(remote: str, answer: m.Answer) -> None:
            waiting.discard(remote)
            if not (isinstance(answer, m.Confirmed) and answer.ok):
                self._denied(action, remote, answer)
                waiting.add("")
            if not waiting:
                confirmation = Confirmation(commits=action.commits, at_seconds=asked_at_seconds)
                state.confirmations[action.save_id] = confirmation
            if not waiting - {""}:
                state.asking.discard(action.save_id)
                self._wake()

        for remote in tuple(waiting):
            refs = tuple((r.key, r.sha256) for r in action.commits if r.remote == remote)
            self._links[remote].order(m.Confirm(commits=refs), partial(heard, remote))

    def _denied(self, action: AskConfirmation, remote: str, answer: m.Answer) -> None:
        """Handle a failed confirmation: a save that the remote no longer vouches for is uploaded again."""
        state = self._state
        link = self._links[remote]
        if isinstance(answer, m.Failed):
            link.trouble(error_of(answer))
            return
        reason = (answer.reason if isinstance(answer, m.Confirmed) else None) or "no answer"
        asked = {ref.sha256 for ref in action.commits if ref.remote == remote}
        for save_id in list(state.ships):
            # with `unuploaded` the COMMITs may be those of a newer save
            if state.ship(save_id, remote, ZERO).commit_sha256 not in asked:
                continue
            tag = state.rows[save_id].save.tag
            log.error("%s: %s no longer holds its COMMIT (%s); it is uploaded again", tag, remote, reason)
            state.lose_commit(save_id, remote, reason)
            link.tag_views.pop(tag, None)
        link.observe()


def running_speed(state: JobState, remote: str, least_seconds: float) -> float | None:
    """Return the speed (bytes/s) of a ZeRO upload under way: on the first day there is no finished one to
    measure.
    """
    now = time.monotonic()
    for (_, name, form), moving in state.moving.items():
        seconds, done = now - moving.started_seconds, moving.done_bytes - moving.start_bytes
        if name == remote and form == ZERO and seconds >= least_seconds and done > 0:
            return done / seconds
    return None
