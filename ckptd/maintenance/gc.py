"""Remove what nothing refers to any more, on the node and in remotes; everything is listed first (`ckptd
gc`).

Nothing is guessed: remote keys come from tombstones and replaced manifests (storage/remote/garbage.py) and
from our own journal, as do the uploads that are aborted, and a local folder is removed only by its name and
for a reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base import files
from ckptd.base.humanize import ago, size_of
from ckptd.base.names import DESCRIPTION
from ckptd.base.owned_dirs import lock, opened_ours
from ckptd.config.commands import command_for
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.staging import partial_name
from ckptd.conversion.remote.uploader import NOTE, UploadNote, read_note, write_note
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, judge
from ckptd.core.completeness.sealing import same_files
from ckptd.core.model.heartbeat import DEAD_SECONDS
from ckptd.core.model.other_layouts import below
from ckptd.core.model.runs import short
from ckptd.core.model.save import SealedSave
from ckptd.errors import CkptdError, LockHeld, NotFoundError, RefusedError, StorageError
from ckptd.recover.execute import one_at_a_time
from ckptd.recover.files import FETCHED, damage_in, opened_save_dir, why_busy
from ckptd.recover.select.job import journal_rows
from ckptd.recover.select.runs import RemoteRuns, alive
from ckptd.recover.select.steps import DERIVED_UNIVERSAL
from ckptd.storage.child.apart import open_apart
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local import clones, fs
from ckptd.storage.local.fs import remove_incomplete
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.local.state_dir import read_node_id
from ckptd.storage.remote.garbage import Garbage, carry_out, find, remove_run, remove_unlisted
from ckptd.storage.remote.heartbeats import remove_stale_temporaries, stale_temporaries
from ckptd.storage.remote.repair import compare, lapse, leases_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing
    from ckptd.maintenance.repair import Unfinished
    from ckptd.observe.audit import Audit
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.remote.garbage import Collected
    from ckptd.storage.remote.repair import BlockingLease
    from ckptd.storage.stores.base import Store


HERE = "here"
_DAMAGED = "damaged: "
_STAGED = ("resume.", FETCHED)
_GIVEN_UP = (State.INCOMPLETE, State.TORN_RESAVE, State.LEFTOVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedItem:
    """One thing that goes, or would. `where`: `here` or a remote; bytes as far as they are known."""

    where: str
    what: str
    bytes: int
    why: str


class Collector:
    """One call of `gc`. Nothing is changed with `dry_run`; `say(line)`: what is left alone, and why."""

    def __init__(self, audit: Audit | None, say: Callable[[str], None], *, dry_run: bool) -> None:
        self._audit = audit
        self._say = say
        self._dry_run = dry_run
        self.removed: list[CollectedItem] = []
        self._ended: dict[str, tuple[Collected, tuple[SentObject, ...]]] = {}
        """Remote → what was found there, and the objects that this node uploaded in vain."""

    # --- remotes ---------------------------------------------------------------------------------------

    def remote(
        self, inventory: RemoteInventory, unfinished: Unfinished | None, state_dir: Path | None = None
    ) -> None:
        """Finish removals, remove what is provably nobody's, abort what a killed repair left.

        `state_dir`: its journal says which objects this node sent.

        Raises:
            RefusedError: a document cannot be read; nothing was removed.
        """
        store, identity = inventory.store, inventory.observation.identity
        found = find(store, identity)
        for stone, size in found.retiring:
            if self._dry_run:
                why = f"a removal that was cut short ({stone.reason})"
                self._add(inventory.name, f"{stone.tag} ({stone.form})", size, why)
        if self._dry_run:
            for one in found.objects:
                self._add(inventory.name, one.key, one.bytes, one.why)
        else:
            carry_out(store, identity, found, lambda one: self._gone(inventory.name, one))
        for key, token in unfinished.of(inventory.name) if unfinished is not None else ():
            self._add(inventory.name, f"an upload of {key}", 0, "a repair was killed")
            if not self._dry_run and unfinished is not None:
                store.discard(key, token)
                unfinished.note(inventory.name, key, "")
        if found.spares:
            self._say(
                f"{inventory.name}: {found.spares} spare objects stay, what they stand for is not right: a "
                "repair is at work or was killed; `ckptd verify --repair` goes on"
            )
        self._unlisted(inventory, found, sent_to(state_dir, inventory.name))

    def _unlisted(self, inventory: RemoteInventory, found: Collected, sent: Sequence[SentObject]) -> None:
        """Say whose the objects are that nobody lists; what is left of ended uploads goes later (`node`)."""
        left = dict(found.unlisted)
        ours = [one for one in sent if one.is_whole and left.get(one.key) == one.bytes]
        going_on = {one.key for one in sent if one.has_source}
        under_way = {one.key: one for one in ours if one.key in going_on}
        ended = {one.key: one for one in ours if one.key not in going_on}
        for key in (*under_way, *ended):
            left.pop(key, None)
        if under_way:
            tags = ", ".join(sorted({one.tag for one in under_way.values()}))
            self._say(
                f"{inventory.name}: {_counted(under_way, found)} are of this node's uploads that are not "
                f"finished ({tags}); its daemon goes on with them"
            )
        if ended:
            self._ended[inventory.name] = (found, tuple(ended.values()))
        if left:
            self._say(
                f"{inventory.name}: {_counted(left, found)} are in no manifest, and this node did not send "
                "them as far as it knows; they stay. `ckptd gc JOB` on the node that did knows more"
            )

    def gone(self, inventory: RemoteInventory, node: str) -> None:
        """Remove the leases of a node that will not come back, once what it was replacing is compared.

        Raises:
            RefusedError: another node is at work on what is wrong.
        """
        store, identity = inventory.store, inventory.observation.identity
        found = leases_of(store, node)
        for key, where in found:
            held = compare(store, key, where, node)
            tag, generation, form = where

            def done(name: str, size: int, held: BlockingLease = held) -> None:
                is_lease = name == held.key
                why = f"{node} is gone" if is_lease else "not what its manifest lists; it is sent again"
                self._gone(inventory.name, _garbage(name, size, why, held))

            if self._dry_run:
                for name, size in held.wrong or ((key, 0),):
                    self._add(inventory.name, name, size, f"{node} is gone ({tag}, {form})")
            else:
                lapse(store, identity, held, done)
            if held.wrong:
                self._say(
                    f"{inventory.name}: {len(held.wrong)} objects of {tag} (generation {generation}, {form}) "
                    "are not what manifests list; call it again when their nodes have sent them anew"
                )
        if not found:
            self._say(f"{inventory.name}: no lease of a node {node!r} holds up anything")

    def run(self, inventory: RemoteInventory, run_id: str) -> None:
        """Remove all that one run committed there, which is neither the newest nor saved by anybody now.

        Raises:
            LockHeld: somebody saves it (75). RefusedError: it is the newest there (65).
        """
        runs = RemoteRuns([inventory])
        view = runs.view(run_id)
        if view is None or not view.checkpoints:
            return
        if view.is_newest:
            msg = f"{view.words} is the newest in {inventory.name}: its checkpoints stay"
            raise RefusedError(msg, hint="only earlier runs are removed by name; see `ckptd list`")
        beat = alive(inventory, run_id)
        if beat is not None:
            msg = f"{view.words} is saved now, by node {beat.node} ({ago(beat.seconds_ago or 0.0)} ago)"
            raise LockHeld(msg, hint=f"stop that daemon; one that is gone counts for {ago(DEAD_SECONDS)}")
        commits = runs.only(inventory, run_id).commits
        if self._dry_run:
            for one in commits:
                folder, size = one.commit.folder, one.commit.bytes
                self._add(inventory.name, f"{folder} ({one.commit.form})", size, f"of run {short(run_id)}")
            return
        remove_run(
            inventory.store,
            inventory.observation.identity,
            commits,
            lambda one: self._gone(inventory.name, one),
            lambda error: self._say(f"{inventory.name}: {error}"),
        )

    def conversion(self, url: str, store: Store) -> bool:
        """Collect what a killed `ckptd convert` left open in its destination; False: no note is there."""
        note = read_note(store, NOTE)
        if note is None:
            return False
        for path, token in sorted(note.uploads.items()):
            self._add(url, f"an upload of {path}", 0, "a conversion was killed")
            if not self._dry_run:
                store.discard(path, token)
        if note.uploads and not self._dry_run:
            write_note(store, NOTE, UploadNote(plan_sha256=note.plan_sha256, uploads={}))
        left = [info.bytes for info in store.list("") if info.key not in (NOTE, DESCRIPTION)]
        self._say(
            f"{url}: {len(left)} objects ({sum(left)} bytes) of the conversion that was killed stay: the "
            "same `ckptd convert` goes on with them; to give it up, remove the folder"
        )
        return True

    def _gone(self, remote: str, one: Garbage) -> None:
        self._add(remote, one.key, one.bytes, one.why)
        if self._audit is not None:
            self._audit.write(
                "gc",
                tag=one.tag,
                generation=one.generation,
                form=one.form,
                reason=f"{remote}: {one.why}",
                files=[(one.key, one.bytes)],
            )

    # --- the node --------------------------------------------------------------------------------------

    def node(self, job: JobConfig, inventories: Sequence[RemoteInventory], state_dir: Path | None) -> None:
        """Collect trash and staging of ours, uploads in the journal: only where no daemon is at work."""
        with _opened(job) as fd:
            if fd is None:
                return
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say(f"a daemon owns {job.save_dir}: it tidies trash, staging and uploads by itself")
                return
            with one_at_a_time(fd):
                self._trash(fd)
                for name in fs.names_in(fd, fs.STAGING):
                    if name.startswith(_STAGED):
                        self._ours(fd, fs.STAGING, name, "left by a recovery")
                for folder in (fs.STAGING, DERIVED_UNIVERSAL):
                    self._half_made(fd, folder)
            if state_dir is not None and (state_dir / "journal.db").exists():
                self._uploads(inventories, state_dir)

    def _trash(self, fd: int) -> None:
        """Collect the trash: all of it is measured before any is removed."""
        found = [(folder, name) for folder in (fs.TRASH, fs.STAGING) for name in fs.names_in(fd, folder)]
        ours = [(folder, name) for folder, name in found if fs.is_ours_in_trash(name)]
        sizes = [(f"{folder}/{name}", _bytes_below(fd, f"{folder}/{name}")) for folder, name in ours]
        if ours and not self._dry_run:
            fs.empty_our_trash(fd)
        for what, size in sizes:
            self._noted(what, size, "half-removed")
        begun = [name for name in fs.names_in(fd, fs.TRASH) if not fs.is_ours_in_trash(name)]
        if begun:
            total = size_of(sum(_bytes_below(fd, f"{fs.TRASH}/{name}") for name in begun))
            self._say(
                f"{fs.TRASH}: {', '.join(begun)} ({total}): checkpoints whose removal was cut short; the "
                "daemon ends it at its next start, or moves them back"
            )

    def _half_made(self, fd: int, folder: str) -> None:
        """Collect conversions that were killed, of checkpoints that are gone or whose form is there since."""
        for name in fs.names_in(fd, folder):
            tag = name.removeprefix(".").removesuffix(partial_name("").removeprefix("."))
            if name != partial_name(tag):
                continue
            is_made = files.stat_beneath(fd, f"{DERIVED_UNIVERSAL}/{tag}") is not None
            if files.stat_beneath(fd, tag) is not None and not is_made:
                continue
            size = _bytes_below(fd, f"{folder}/{name}")
            if self._dry_run or fs.remove_idle(fd, folder, name):
                self._noted(f"{folder}/{name}", size, "left by a conversion that was killed")

    def _uploads(self, inventories: Sequence[RemoteInventory], state_dir: Path) -> None:
        """Collect uploads that killed or ended work of this node left in remotes, under its id."""
        with opened_ours(state_dir) as fd:
            node_id = read_node_id(fd) or ""
        journal = Journal(state_dir / "journal.db")
        try:
            for inventory in inventories:
                store = open_apart(inventory.name, inventory.url, inventory.access, owner=node_id)
                left = journal.leftovers(inventory.name)
                for key, token in left:
                    half = store.partial_bytes(key)
                    self._add(inventory.name, f"an upload of {key}", half, "of an attempt that ended")
                    if not self._dry_run:
                        store.discard(key, token)
                if left and not self._dry_run:
                    journal.forget_leftovers(inventory.name, left)
                for info in (stale_temporaries if self._dry_run else remove_stale_temporaries)(store):
                    self._add(
                        inventory.name, info.key, info.bytes, "left by a process of this node that was killed"
                    )
                if node_id:
                    self._sent_in_vain(inventory, node_id)
        finally:
            journal.close()

    def _sent_in_vain(self, inventory: RemoteInventory, node_id: str) -> None:
        """Collect whole objects of uploads that ended before a manifest listed them; their source is gone
        here.
        """
        if inventory.name not in self._ended:
            return
        found, ended = self._ended.pop(inventory.name)
        rows = {
            one.key: Garbage(
                key=one.key, bytes=one.bytes, why="sent by this node; its checkpoint is gone here"
            )
            for one in ended
        }
        if self._dry_run:
            for row in rows.values():
                self._add(inventory.name, row.key, row.bytes, row.why)
            return
        try:
            remove_unlisted(
                inventory.store,
                inventory.observation.identity,
                found,
                sorted(rows),
                node_id,
                lambda key: self._gone(inventory.name, rows[key]),
            )
        except RefusedError as error:
            self._say(f"{inventory.name}: {_counted(rows, found)} that this node sent stay: {error}")

    def aside(self, job: JobConfig) -> None:
        """Collect what `resume`, `restore` and repairs moved aside: kept until a person asks for this."""
        with _opened(job) as fd:
            for name in fs.names_in(fd, fs.ASIDE) if fd is not None else ():
                assert fd is not None
                self._ours(fd, fs.ASIDE, name, "moved aside")

    def _ours(self, fd: int, folder: str, name: str, why: str) -> None:
        size = _bytes_below(fd, f"{folder}/{name}")
        if not self._dry_run:
            fs.remove_ours(fd, folder, name)
        self._noted(f"{folder}/{name}", size, why)

    def incomplete(
        self, job: JobConfig, tag: str, pins: frozenset[str], sealed: Sequence[SealedSave] = ()
    ) -> None:
        """Remove one incomplete, torn or damaged checkpoint folder; `sealed`: what the daemon knows there.

        Raises:
            NotFoundError: there is none of that name. SourceChanged: somebody writes there.
            RefusedError: it is whole, in flight, pinned or no checkpoint; in doubt, and no byte is wrong.
            StorageError: the disk does not give one of its files now: whole, perhaps.
        """
        files.check_relative(tag)
        with _opened(job) as fd:
            listing = (
                scan_folder(fd, tag, declared=job.declared) if fd is not None and "/" not in tag else None
            )
            if fd is None or listing is None:
                raise NotFoundError(f"there is no folder {tag} in {job.save_dir}", hint="see `ckptd status`")
            with one_at_a_time(fd):
                is_sealed = any(same_files(save, listing) for save in sealed)
                reason = self._given_up(job, fd, listing, pins, is_sealed=is_sealed)
                size = sum(file.identity.size_bytes for file in listing.files)
                for file in listing.files:
                    self._say(f"{below(tag, file.path)} ({file.identity.size_bytes} bytes)")
                if not self._dry_run:
                    remove_incomplete(fd, tag, listing.files)
                self._noted(tag, size, reason)
                if reason.startswith(_DAMAGED):
                    self._clones(fd, tag)

    def _clones(self, fd: int, tag: str) -> None:
        """Collect damaged clones of a damaged checkpoint, which keep its bytes on the disk."""
        for name in fs.names_in(fd, fs.HOLD):
            place = f"{fs.HOLD}/{name}"
            is_its = name.rpartition(".")[0] == tag and name.rpartition(".")[2].isdecimal()
            listing = scan_folder(fd, place) if is_its else None
            damage = damage_in(fd, listing) if listing is not None else None
            if damage is None:
                continue
            size = _bytes_below(fd, place)
            if not self._dry_run:
                clones.release(fd, name)
            self._noted(place, size, f"{_DAMAGED}{damage}")

    def _given_up(
        self, job: JobConfig, fd: int, listing: FolderListing, pins: frozenset[str], *, is_sealed: bool
    ) -> str:
        """Return why the folder is not whole; refuses whatever may still be wanted.

        What was sealed is whole, or this node's part of a save, which looks like one that was cut short.
        """
        tag = listing.tag
        if tag in pins:
            raise RefusedError(f"{tag} is pinned", hint=f"{command_for(job, 'pin', tag, '--remove')} first")
        if not listing.is_checkpoint:
            raise RefusedError(f"{job.save_dir}/{tag} is no checkpoint folder", hint="ckptd leaves it alone")
        busy = why_busy(str(job.save_dir), fd, tag)
        if busy is not None:
            raise RefusedError(f"{tag}: {busy}", hint="call it again when nobody writes there")
        rows = _read(job.save_dir / listing.place, [file.path for file in listing.files], listing.manifest)
        context = Context(save_spread_seconds=job.save_spread_seconds)
        verdict = judge(listing, {row.path: row for row in rows}, None, context)
        if verdict.state in _GIVEN_UP and not is_sealed:
            return verdict.reason or verdict.state.value
        damage = damage_in(fd, listing)
        if damage is None:
            why = f" ({verdict.reason})" if verdict.reason else ""
            is_what = "what this node wrote of a save" if is_sealed else f"{verdict.state.value}{why}"
            msg = f"{tag} is {is_what}, and no byte is known to be wrong"
            raise RefusedError(msg, hint="only an incomplete, torn or damaged checkpoint is removed so")
        return f"{_DAMAGED}{damage}"

    # --- telling ---------------------------------------------------------------------------------------

    def _add(self, where: str, what: str, size: int, why: str) -> None:
        self.removed.append(CollectedItem(where=where, what=what, bytes=size, why=why))

    def _noted(self, what: str, size: int, why: str) -> None:
        self._add(HERE, what, size, why)
        if self._audit is not None and not self._dry_run:
            tag = "" if what.startswith("_") else what
            self._audit.write("gc", tag=tag, generation=0, form="", reason=why, files=[(what, size)])


def _garbage(key: str, size: int, why: str, held: BlockingLease) -> Garbage:
    tag, generation, form = held.where
    return Garbage(key=key, bytes=size, why=why, tag=tag, generation=generation, form=form)


def _read(folder: Path, paths: Sequence[str], manifest: str) -> list[FileFacts]:
    try:
        return inspect_files(folder, paths, manifest=manifest, is_final=False)
    except StorageError as error:
        hint = f"nothing was removed; call it again when the disk gives it, or move {folder} away by hand"
        raise StorageError(error.message, hint=hint) from error


@contextlib.contextmanager
def _opened(job: JobConfig) -> Iterator[int | None]:
    fd = opened_save_dir(job.save_dir)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _bytes_below(fd: int, name: str) -> int:
    """Return the bytes of a file, or of everything in a folder; 0 for what cannot be looked at."""
    with contextlib.suppress(OSError, CkptdError):
        status = files.stat_beneath(fd, name)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            return status.st_size
        with files.opened_dir(name, fd) as folder:
            found = [files.stat_beneath(folder, path) for path in fs.everything_in(folder)]
        return sum(status.st_size for status in found if status is not None)
    return 0


def _counted(keys: Iterable[str], found: Collected) -> str:
    """Say how many objects, and how large."""
    sizes = [found.unlisted[key] for key in keys]
    return f"{len(sizes)} object{'s' if len(sizes) != 1 else ''} ({size_of(sum(sizes))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentObject:
    """An object that this node sent, or began to send, and that no COMMIT of its own lists yet."""

    key: str
    tag: str
    bytes: int
    is_whole: bool
    """Verified in the remote; else half an upload."""
    has_source: bool
    """The daemon may go on with it; else what it is a copy of is gone from this node."""


def sent_to(state_dir: Path | None, remote: str) -> list[SentObject]:
    """Return the objects that the journal says lie in a remote: proof that an object there is ours."""
    if state_dir is None:
        return []
    # a form is also made of what the remote holds, until its ZeRO form is deleted there
    query = (
        "SELECT o.key, o.bytes, o.proof IS NOT NULL, coalesce(s.tag, ''), "
        "coalesce(s.state = 'present' OR s.held, 0) OR (o.form != 'zero' AND ("
        "(o.form = 'universal' AND json_extract(s.derived, '$.state') = 'ready') "
        "OR coalesce(json_extract(z.record, '$.state'), '') != 'retired')) "
        "FROM objects o LEFT JOIN saves s ON s.id = o.save_id "
        "LEFT JOIN ships z ON z.save_id = o.save_id AND z.remote = o.remote AND z.form = 'zero' "
        "WHERE o.remote = ? AND o.form NOT LIKE '%~'"
    )
    return [
        SentObject(
            key=str(key),
            tag=str(tag),
            bytes=int(str(size)),
            is_whole=bool(is_whole),
            has_source=bool(has_source),
        )
        for key, size, is_whole, tag, has_source in journal_rows(state_dir / "journal.db", query, remote)
    ]


def sealed_here(state_dir: Path | None, tag: str) -> list[SealedSave]:
    """Return the saves under that tag that the daemon sealed and that lie in save_dir."""
    if state_dir is None:
        return []
    query = "SELECT sealed FROM saves WHERE state = 'present' AND tag = ?"
    found = []
    for (sealed,) in journal_rows(state_dir / "journal.db", query, tag):
        try:
            found.append(SealedSave.model_validate_json(str(sealed)))
        except ValidationError:
            continue
    return found
