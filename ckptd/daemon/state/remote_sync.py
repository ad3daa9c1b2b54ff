"""Translate a remote's messages on a tag or a save into the records of `core`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ckptd.core.completeness.judge import State
from ckptd.core.completeness.missing import MissingPart
from ckptd.core.completeness.peer_evidence import PeerEvidence
from ckptd.core.model.generation import order_of
from ckptd.core.model.layouts import Role, is_in_roots
from ckptd.core.model.manifest import mark_of_manifest
from ckptd.core.model.other_layouts import layout_of
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.model.runs import run_of
from ckptd.core.model.save import Order
from ckptd.daemon.state.upload_records import note_parts
from ckptd.storage.remote.documents import stem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptd.core.model.manifest import Commit, ManifestName, NodeManifest
    from ckptd.core.model.save import SealedSave
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.remote.messages import CommitView, Observation, TagView

log = logging.getLogger("ckptd.knowledge")

_BESIDE = (Role.SIDE, Role.EXTRA)
_CLAIMED_OR_OPEN = (UploadState.COMMITTED, UploadState.NEW, UploadState.WAITING, UploadState.FAILED)
_GONE, _DISPUTED = "its COMMIT is gone", "its COMMIT is disputed"
_WILL_SEAL = (State.SAVING, State.RESAVING, State.UNKNOWN, State.COMPLETE)


def is_written_down(state: JobState, sessions: Iterable[RemoteSession], highest: Order | None) -> bool:
    """Tell whether the journal has what the remotes tell of order: no save here of a tag that they know is
    yet to be sealed, and one that was is as new as any there (`highest`).
    """
    known = frozenset[str]().union(*(session.known_tags() for session in sessions))
    for folder in state.folders.listing.folders if state.folders.listing is not None else ():
        verdict = state.folders.verdicts.get(folder.tag)
        is_open = folder.tag in known and state.saves.of_tag(folder.tag) is None
        if is_open and (verdict is None or verdict.state in _WILL_SEAL):
            return False
    return highest is None or any(row.save.order >= highest for row in state.saves.rows.values())


def commits_in(seen: Observation | None) -> dict[tuple[str | None, str | None], Commit]:
    """(key, digest) → COMMIT."""
    return {} if seen is None else {(v.key, v.sha256): v.commit for v in seen.commits}


def order_by_commits(own: Order, committed: Sequence[Order | None]) -> Order:
    """The order of a save, given those of its COMMITs; None: a remote has not told.

    The COMMIT's, whichever is higher. A node whose daemon was down while the run was rewound sealed its part
    as of the old branch; one that does not know a checkpoint that was restored took it for a rewind. What
    every node keeps follows the COMMITs alone (P9, adr/0105). Of several the highest counts, so an order is
    lowered only once all have told.

    >>> order_by_commits(Order(7, 90, 1), [Order(5, 90, 7)]), order_by_commits(Order(7, 90, 1), [None])
    (Order(branch=5, step=90, save_seq=7), Order(branch=7, step=90, save_seq=1))
    """
    known = [order for order in committed if order is not None]
    return max(known if known and len(known) == len(committed) else [*known, own])


def as_committed(save: SealedSave, read: Sequence[Commit | None]) -> SealedSave:
    """A save as its COMMITs have it: its order, the value of its metric, what its trainer calls the best.

    One node has trainer_state.json; by its COMMIT the others know what it says.
    """
    commits = [commit for commit in read if commit is not None]
    order = order_by_commits(save.order, [None if c is None else order_of(c) for c in read])
    best = next((c.best for c in commits if c.best is not None), save.best)
    named = next((c.names_best for c in commits if c.names_best), save.best_checkpoint)
    if (order, best, named) == (save.order, save.best, save.best_checkpoint):
        return save
    return save.model_copy(update={**order._asdict(), "best": best, "best_checkpoint": named})


def adopt_commits(state: JobState, sessions: Iterable[RemoteSession]) -> None:
    """Let each save here count as its COMMITs say."""
    commits = {session.name: commits_in(session.observation) for session in sessions}
    for row in list(state.saves.rows.values()):
        records = (state.uploads.record(row.id, remote, ZERO) for remote in commits)
        read = [
            commits[record.remote].get((record.commit_key, record.commit_sha256))
            for record in records
            if record.state is UploadState.COMMITTED
        ]
        save = as_committed(row.save, read) if read else row.save
        if save is not row.save:
            state.replace_sealed(row.id, save)


def forget_gone(state: JobState, sessions: Iterable[RemoteSession]) -> None:
    """Drop cached manifests of tags that are no longer here: they list every file of every node (P12: memory
    is bounded).
    """
    if state.folders.listing is None:
        return
    tags = {folder.tag for folder in state.folders.listing.folders}
    tags |= {row.save.tag for row in state.saves.rows.values() if row.state == "present" or row.held}
    for session in sessions:
        for tag in session.tag_views.keys() - tags:
            session.forget_tag(tag)


def learn_forms(state: JobState, remote: str, forms: Sequence[str], commits: Sequence[CommitView]) -> None:
    """Forms that another node made of a save that none has whole (adr/0118); what was begun here is ended by
    its own order, which also sweeps."""
    parts = [row for row in state.saves.rows.values() if row.save.is_part]
    there = {stem_of(v.commit): v for v in commits if v.commit.form != ZERO and not v.disputed}
    for row in parts if there else ():
        zero = state.uploads.record(row.id, remote, ZERO)
        for form in forms if zero.state is UploadState.COMMITTED else ():
            view = there.get((row.save.tag, zero.generation or 0, form))
            record = state.uploads.record(row.id, remote, form)
            is_open = record.state in (UploadState.NEW, UploadState.WAITING, UploadState.FAILED)
            if view is None or not is_open or row.derived_of(form).plan_sha256:
                continue
            state.uploads.update(
                row.id,
                record,
                state=UploadState.COMMITTED,
                generation=view.commit.generation,
                commit_key=view.key,
                commit_sha256=view.sha256,
                reason=None,
                hint="",
                is_damaged=False,
            )


def notice_lost(state: JobState, session: RemoteSession, forms: Sequence[str]) -> None:
    """COMMITs that somebody removed from a remote or disputed, or that cannot be read: nothing is called safe
    on their account (P17). `forms`: what the remote takes.

    A form of what a ZeRO form holds follows it: it is looked at once that is committed again.
    """
    seen = session.observation
    if seen is None or not session.is_current:
        return
    listed: dict[tuple[str | None, str | None], bool] = {
        (view.key, view.sha256): view.disputed for view in seen.commits
    }
    # what lies in the trash, whole, goes by these records alone (adr/0153)
    half = {one.save_id for one in state.journal.open_deletions()} if state.deletions.interrupted else set()
    for row in [r for r in state.saves.rows.values() if r.state == "present" or r.held or r.id in half]:
        records = [r for r in state.uploads.of(row.id).values() if r.remote == session.name]
        for record in sorted(records, key=lambda r: r.form != ZERO):
            where = (row.save.tag, record.generation or 0, record.form)
            if record.form != ZERO and where in seen.retired_beside and record.state in _CLAIMED_OR_OPEN:
                state.uploads.update(row.id, record, state=UploadState.DELETED)
                continue
            proof = (record.commit_key, record.commit_sha256)
            # a lesser form shares its generation with the ZeRO form, and could not be sent again
            is_disputed = listed.get(proof, False) and record.form == ZERO
            if record.state is not UploadState.COMMITTED or (proof in listed and not is_disputed):
                continue
            zero = state.uploads.record(row.id, session.name, ZERO)
            if record.form != ZERO and ZERO in forms and zero.state is not UploadState.COMMITTED:
                continue
            lost = _DISPUTED if is_disputed else _GONE
            reason = "its COMMIT cannot be read" if where in seen.unreadable else lost
            about = (row.save.tag, record.form, session.name, reason)
            log.error("%s (%s) on %s: %s; it is looked for again", *about)
            state.uploads.lose_commit(row.id, session.name, reason, record.form)
            session.forget_tag(row.save.tag)


def unreadable_in(view: TagView, form: str) -> frozenset[int]:
    """Generations whose COMMIT or tombstone of that form cannot be read."""
    return frozenset(generation for _, generation, one in view.unreadable if one == form)


def unread_manifests(view: TagView) -> list[tuple[int, ManifestName]]:
    """(generation, name) of manifests of the ZeRO form that were not read."""
    return [(one.generation, one.name) for one in view.named if one.form == ZERO]


def evidence_of(view: TagView) -> tuple[PeerEvidence, ...]:
    """Return what each ZeRO generation proves to a node without model states; of a settled one, what its
    COMMIT lists.
    """
    settled = {v.commit.generation for v in view.commits if v.commit.form == ZERO}
    settled |= {stone.generation for stone in view.retired if stone.form == ZERO}
    members: dict[int, list[NodeManifest]] = {}
    for seen in view.manifests:
        generation = seen.manifest.generation
        if seen.manifest.form == ZERO and (seen.committed or generation not in settled):
            members.setdefault(generation, []).append(seen.manifest)
    named = unread_manifests(view)
    return tuple(
        _told(
            read,
            tuple(name for g, name in named if g == generation),
            is_settled=generation in settled,
        )
        for generation, read in sorted(members.items())
    )


def _told(read: Sequence[NodeManifest], named: tuple[ManifestName, ...], *, is_settled: bool) -> PeerEvidence:
    """Build the evidence of one generation, from a manifest with model states where there is one."""
    first = next((m for m in read if any(f.role is Role.MODEL for f in m.files)), read[0])
    rows = frozenset((f.path, f.bytes, f.fingerprint) for m in read for f in m.files)
    return PeerEvidence(
        grid=first.grid,
        step=first.step,
        node=first.node,
        optimizer_step=first.optimizer_step,
        marks=tuple(mark_of_manifest(m) for m in read),
        named=named,
        listed=rows if is_settled else None,
    )


def open_parts(view: TagView) -> tuple[MissingPart, ...]:
    """Parts of the ZeRO form, read or by their names, in generations that may still get a COMMIT.

    What a disputed one held its nodes send again, as another.
    """
    taken = {v.commit.generation for v in view.commits if v.commit.form == ZERO}
    taken |= {stone.generation for stone in view.retired if stone.form == ZERO}
    read = [
        (m.generation, m.node, m.save_window.last // 10**9)
        for m in (v.manifest for v in view.manifests)
        if m.form == ZERO
    ]
    read += [(generation, name.node, name.last_seconds) for generation, name in unread_manifests(view)]
    return tuple(
        MissingPart(node=node, generation=generation, last_seconds=last)
        for generation, node, last in sorted(set(read))
        if generation not in taken
    )


def committed_shards(
    session: RemoteSession, tag: str
) -> Iterator[tuple[frozenset[tuple[str, str]], Order, str]]:
    """Shards, order and run of each committed manifest of a tag that was read, whichever run it is of."""
    for seen in session.seen(tag)[0]:
        found = seen.manifest
        if not seen.committed or seen.form != ZERO:
            continue
        mine = [f for f in found.files if f.role not in _BESIDE and f.replica_of is None]
        roots = layout_of(tag, (f.path for f in mine))[1] if found.grid.has_shards else ()
        shards = frozenset((f.path, f.fingerprint) for f in mine if is_in_roots(f.path, roots))
        yield shards, Order(found.branch, found.step, found.save_seq), run_of(found, found.job_id)


def hear_of_parts(state: JobState, remote: str, seen: Observation | None) -> None:
    """Let who waits for other parts ask sooner, once the names of manifests tell that none is missing."""
    for key, waiting in list(state.uploads.waiting.items()):
        row, record = state.saves.rows.get(key[0]), state.uploads.record(*key)
        if seen is None or row is None or key[1] != remote or record.state is not UploadState.WAITING:
            continue
        is_whole = (row.save.tag, record.generation, record.form) in seen.listed_whole
        before = record.retry_at_seconds
        parts, again_at = note_parts(waiting, before, is_whole=is_whole, now_seconds=time.monotonic())
        state.uploads.wait(key, parts)
        if again_at != before:
            state.uploads.update(row.id, record, retry_at_seconds=again_at)
