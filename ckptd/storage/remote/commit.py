"""Upload one save and commit it once all nodes' manifests cover it (docs/design.md §5, docs/adr/0021).

Order of operations, each of which may be the last before a crash: objects → verification of each → every
source identity again → node manifest → (any node) COMMIT, created once → read back → pointers. A COMMIT is
never replaced; what cannot join it goes to the next generation.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.names import ROOT
from ckptd.core.model import generation
from ckptd.core.model.generation import KnownManifest
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import (
    Dispute,
    absent_by_names,
    commit_key,
    manifest_key,
    mark_of_manifest,
    named_conflict,
    node_in,
    sha256_of,
    side_key,
    stem,
    to_bytes,
)
from ckptd.core.model.records import ZERO
from ckptd.errors import CommitConflict, RefusedError, RemoteError, SourceChanged, SourceUnreadable
from ckptd.storage.remote import derive_attempts
from ckptd.storage.remote.documents import (
    GenerationSnapshot,
    now_utc,
    read_commit,
    read_snapshot,
    stem_of,
)
from ckptd.storage.remote.held_objects import HeldObjects
from ckptd.storage.remote.manifest_index import (
    ManifestIndex,
    holds_lease,
    manifest_entry,
    pending_replacement,
    release_lease,
    replaced_object,
)
from ckptd.storage.remote.messages import CommitView, UploadResult
from ckptd.storage.remote.observe import AttachedRemote, point, still_ours
from ckptd.storage.remote.shares import lacking, leave_to_owner, take_share, tensors, tensors_of
from ckptd.storage.remote.transfer import CannotBeMade, Transfer, changed, sealed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.model.layouts import NamedShard
    from ckptd.core.model.manifest import ManifestFile, NodeManifest
    from ckptd.storage.remote.messages import UploadFile, UploadRequest
    from ckptd.storage.remote.transfer import Carried, OpenOrigin, Origin, TransferControl
    from ckptd.storage.stores.base import Store


# --- results of an attempt that cannot commit now --------------------------------------------------------

MOST_NAMED = 4096
"""Missing shards that an answer names: what is missing of more is said in words."""


def waiting(
    why: tuple[str, str], ours: KnownManifest, carried: Carried, absent: tuple[NamedShard, ...]
) -> UploadResult:
    """Return the result "uploaded and listed, not committed"; `why`: reason and next step."""
    return UploadResult(
        outcome="waiting",
        reason=why[0],
        hint=why[1],
        missing=absent[:MOST_NAMED],
        manifest_key=ours.key,
        manifest_sha256=ours.sha256,
        bytes_sent=carried.bytes_sent,
        bytes_skipped=carried.bytes_skipped,
        bytes_copied=carried.bytes_copied,
    )


def as_others_committed(
    whole: UploadRequest, commit: CommitView, members: Iterable[KnownManifest]
) -> UploadResult:
    """Return the result where others committed: our files are listed all the same, or are not needed.

    `whole`: the order with all its files; `members`: the manifests that the COMMIT rests on.
    """
    known = tuple(members)
    held = tensors_of(known)
    rows = {(file.path, file.bytes, file.fingerprint) for one in known for file in one.manifest.files}
    absent = [
        f
        for f in whole.files
        # of what has no tensors, or is nobody's shard, the content counts
        if ((f.path, f.bytes, f.fingerprint) not in rows if _is_side(f) else tensors(f) not in held)
    ]
    if whole.takeover_seconds is not None:  # what lies beside a shared folder is sent by one host
        absent = [f for f in absent if not f.is_extra]
    words = f"committed by other nodes without {', '.join(f.path for f in absent[:3])}"
    is_conflict = any(file.role not in (Role.SIDE, Role.EXTRA) for file in absent)
    return UploadResult(
        outcome="conflict" if is_conflict else "committed",
        reason=words if absent else None,
        commit=commit,
        unlisted=tuple(f.path for f in absent if not f.is_extra),
    )


def _is_side(file: UploadFile) -> bool:
    return file.role is Role.SIDE and file.identity is not None


def left_out(whole: UploadRequest, ours: NodeManifest) -> tuple[str, ...]:
    """Side files of ours in whose place our own manifest lists another content: an earlier one, or a node's.

    What the object's name held was listed already, and is never replaced; ours is in no COMMIT (adr/0021).
    """
    listed = {file.path: (file.bytes, file.fingerprint) for file in ours.files}
    return tuple(
        file.path
        for file in whole.files
        if (file.role, whole.manifest.form) == (Role.SIDE, ZERO)
        and listed.get(file.path, (file.bytes, file.fingerprint)) != (file.bytes, file.fingerprint)
    )


# --- upload and commit -----------------------------------------------------------------------------------


def upload_form(
    attached: AttachedRemote, order: UploadRequest, control: TransferControl, open_origin: OpenOrigin = sealed
) -> UploadResult:
    """Upload one form of one save and commit it if the manifests of its generation cover the grid.

    Outcomes: committed; waiting (other nodes' shards are missing); conflict (this generation holds another
    save: choose again); refused (there is no such form of it); damaged (an object that it is made of is).
    Repeating an order is always right and sends nothing twice.

    Raises:
        SourceChanged, DamagedError, VerifyError: see `Transfer.run`.
        RefusedError: another node writes to a store without create-only writes (P10).
        RemoteError: as the store.
    """
    still_ours(attached.store, attached.identity)
    one_writer(attached, order)
    taken = derive_attempts.claim_attempt(attached, order)
    if isinstance(taken, UploadResult):
        return taken
    root = open_root(order.root)
    try:
        shipping = _Upload(attached, taken, control, root)
        return derive_attempts.finish_attempt(attached, taken, lambda: shipping.run(open_origin))
    finally:
        os.close(root)


def open_root(path: str) -> int:
    try:
        return os.open(path, files.DIR_FLAGS)
    except FileNotFoundError as error:
        msg = f"{path} is gone"
        raise SourceChanged(msg, hint="nothing to upload from; the next turn looks again") from error
    except OSError as error:
        raise SourceUnreadable(f"opening {path}: {error.strerror or error}") from error


class _Upload:
    def __init__(
        self, attached: AttachedRemote, order: UploadRequest, control: TransferControl, root: int
    ) -> None:
        self._attached, self._store, self._identity = attached, attached.store, attached.identity
        self._order = self._whole = order
        self._control = control
        self._root = root
        self._where = stem_of(order.manifest)

    def run(self, open_origin: OpenOrigin) -> UploadResult:
        seen = self._look()
        reason = self._conflict(seen)
        if reason is None and self._store.get(side_key("retired", stem(*self._where))) is not None:
            reason = f"generation {self._where[1]} of {self._where[0]} was deleted by retention"
        if reason is not None:
            return UploadResult(outcome="conflict", reason=reason)
        commit = read_commit(self._store, self._where)
        if commit is not None:
            return self._beside(commit, seen.read)
        if derive_attempts.folder_in_use(self._attached, self._where, self._order.manifest.folder):
            reason = f"a ZeRO form lists objects in {self._order.manifest.folder} under this form's names"
            return UploadResult(outcome="conflict", reason=reason)  # the next attempt has its own folder
        self._order = leave_to_owner(self._order, lambda: self._look(is_all=True).read)
        self._order = take_share(self._store, self._order, lambda: self._look(is_all=True).read)
        if not self._order.files and (rest := lacking(self._whole, self._look(is_all=True).read)):
            return UploadResult(outcome="waiting", reason=generation.missing_words(rest, seen.read))
        try:
            with open_origin(self._order, self._root, self._control, self._store) as origin:
                return self._carry(origin, seen)
        except CommitConflict as error:
            return UploadResult(outcome="conflict", reason=error.message)
        except CannotBeMade as error:
            return UploadResult(outcome="refused", reason=error.message, hint=error.hint)

    def _look(
        self, ours: KnownManifest | None = None, *, is_all: bool = False, commit: CommitView | None = None
    ) -> GenerationSnapshot:
        node, cache = None if is_all else self._order.manifest.node, self._attached.manifests
        return read_snapshot(self._store, self._where, cache, node=node, ours=ours, commit=commit)

    def _carry(self, origin: Origin, seen: GenerationSnapshot) -> UploadResult:
        self._order = origin.order
        sent = {file.key for file in self._order.files}
        left = [file.key for file in self._whole.files if file.key not in sent]
        is_doubtful = bool(left) and holds_lease(self._store, self._order.manifest)
        listed = ManifestIndex(self._store, self._order.manifest, seen, self._attached.manifests)
        elsewhere = HeldObjects(self._attached, self._order.manifest)
        carried = Transfer(self._store, origin, self._root, listed, self._control, elsewhere).run()
        # a manifest speaks of one save, so nothing may have changed while the last file was sent (P4)
        origin.recheck()
        # hours went by: another job may have taken the remote over, another disk may be mounted there (P2)
        still_ours(self._store, self._identity)
        # another save may have been listed meanwhile: ours beside it would spoil the generation for both
        seen = self._look()
        reason = self._conflict(seen)
        if reason is not None:
            return UploadResult(outcome="conflict", reason=reason)
        # what an earlier attempt of ours replaced may be what another node has listed since (docs/adr/0083)
        reason = replaced_object(self._store, left, self._look(is_all=True).read) if is_doubtful else None
        if reason is not None:
            return UploadResult(outcome="conflict", reason=reason)
        ours = self._put_manifest(carried.files, seen.read)
        return self._commit(ours, carried)

    def _conflict(self, seen: GenerationSnapshot) -> str | None:
        ours = self._order.manifest.model_copy(update={"files": self._expected_files()})
        spread_seconds = self._order.save_spread_seconds
        read = generation.conflict(ours, seen.read, save_spread_seconds=spread_seconds)
        mark = mark_of_manifest(ours)
        return read or named_conflict(mark, seen.named, save_spread_seconds=spread_seconds)

    def _expected_files(self) -> tuple[ManifestFile, ...]:
        """Return the files as the manifest will list them, as far as comparing saves needs them."""
        return tuple(manifest_entry(f, f.bytes, "", f.fingerprint, "none") for f in self._order.files)

    # --- a COMMIT is there already ----------------------------------------------------------------------

    def _beside(
        self, commit: CommitView, listed: tuple[KnownManifest, ...], carried: Carried | None = None
    ) -> UploadResult:
        """Return the result where the generation is committed: with our manifest, without it, or disputed."""
        self._store.flush_name(commit.key)
        refs = {ref.sha256 for ref in commit.commit.manifests}
        members = [known for known in listed if known.sha256 in refs]
        mine = next(iter(self._own(members)), None)
        if commit.disputed:
            return UploadResult(outcome="conflict", reason=f"{commit.key} is disputed", commit=commit)
        if mine is None or self._whole.takeover_seconds is not None:  # all of them; a listing may be late
            members = [k for k in self._look(is_all=True, commit=commit).read if k.sha256 in refs]
            mine = next(iter(self._own(members)), None)
        if mine is None or self._whole.takeover_seconds is not None:
            found = as_others_committed(self._whole, commit, members)
            if mine is None or found.outcome != "committed":
                return found
            return self._joined(commit, mine, carried).model_copy(update={"unlisted": found.unlisted})
        if not self._lists_our_files(mine):
            reason = f"{commit.key} is committed with another save of this node"
            return UploadResult(outcome="conflict", reason=reason, commit=commit)
        return self._joined(commit, mine, None)

    def _joined(self, commit: CommitView, mine: KnownManifest, carried: Carried | None) -> UploadResult:
        """Finish where our manifest is in the COMMIT; dispute it if files were written again meanwhile."""
        if len(commit.commit.manifests) > 1:
            rewritten = self._rewritten()
            if rewritten is not None:
                self._dispute(commit, rewritten)
                return UploadResult(outcome="conflict", reason=rewritten, commit=None)
        point(self._store, self._attached.documents)
        return UploadResult(
            outcome="committed",
            commit=commit,
            manifest_key=mine.key,
            manifest_sha256=mine.sha256,
            unlisted=left_out(self._whole, mine.manifest),
            bytes_sent=carried.bytes_sent if carried else 0,
            bytes_skipped=carried.bytes_skipped if carried else sum(f.bytes for f in self._order.files),
            bytes_copied=carried.bytes_copied if carried else 0,
        )

    def _rewritten(self) -> str | None:
        """Return a file that has another identity now; one that is gone was deleted, not saved again."""
        reasons = (changed(self._root, f.source, f.identity, f.path) for f in self._order.files)
        return next((reason for reason in reasons if reason and not reason.endswith("vanished")), None)

    def _dispute(self, commit: CommitView, reason: str) -> None:
        tag, generation, form = self._where
        dispute = Dispute(
            tag=tag,
            generation=generation,
            form=form,
            commit_sha256=commit.sha256,
            node=self._order.manifest.node,
            reason=reason,
            at=now_utc(),
        )
        self._store.put_if_absent(side_key("disputes", stem(*self._where)), to_bytes(dispute))
        point(self._store, self._attached.documents)

    # --- manifest and COMMIT ----------------------------------------------------------------------------

    def _own(self, listed: Iterable[KnownManifest]) -> list[KnownManifest]:
        return [known for known in listed if known.manifest.node_id == self._order.manifest.node_id]

    def _lists_our_files(self, known: KnownManifest) -> bool:
        """Whether a manifest lists our files; of a derived form the source counts, as versions lay it out
        differently.
        """
        if self._order.manifest.source is not None and known.manifest.source is not None:
            return known.manifest.source.fingerprints == self._order.manifest.source.fingerprints
        rows = {(file.path, file.bytes, file.fingerprint) for file in known.manifest.files}
        taken = {(f.path, f.tensor_fingerprint) for f in known.manifest.files if f.replica_of is not None}
        taken |= set(known.manifest.replicas)
        return all(
            (file.path, file.bytes, file.fingerprint) in rows
            or (file.path, file.tensor_fingerprint or "") in taken
            for file in self._order.files
            if file.identity is not None
        )

    def _put_manifest(
        self, carried: tuple[ManifestFile, ...], listed: tuple[KnownManifest, ...]
    ) -> KnownManifest:
        """Create the node manifest; an earlier one that says the same is used again."""
        own = sorted(self._own(listed), key=lambda known: known.manifest.revision)
        manifest = self._order.manifest.model_copy(update={"files": carried})
        if own:
            last = own[-1]
            same = {"revision": last.manifest.revision, "attempt": last.manifest.attempt}
            if manifest.model_copy(update=same) == last.manifest:
                self._store.flush_name(last.key)
                return last
            manifest = manifest.model_copy(update={"revision": last.manifest.revision + 1})
        return put_manifest(self._store, manifest)

    def _commit(self, ours: KnownManifest, carried: Carried) -> UploadResult:
        release_lease(self._store, ours.manifest)
        seen = self._look(ours)
        if seen.named:
            commit = read_commit(self._store, self._where)
            if commit is not None:
                return self._ended(commit, ours, carried)
            read = (ours.manifest, *(known.manifest for known in seen.read))
            return waiting((seen.words, ""), ours, carried, absent_by_names(seen.named, read))
        listed = seen.read
        members = self._members(ours, listed)
        reason = generation.contradiction(members, save_spread_seconds=self._order.save_spread_seconds)
        if all(known.sha256 != ours.sha256 for known in members):
            # a request of a daemon that died may arrive late; its manifest is of objects that ours replaced
            reason = f"another manifest of {ours.manifest.node} came between"
        if reason is not None:
            return UploadResult(outcome="conflict", reason=reason)
        missing = generation.missing(members, self._where[2]) or lacking(self._whole, members)
        existing = read_commit(self._store, self._where)
        waits = (
            (generation.missing_words(missing, members), "")
            if missing
            else pending_replacement(self._store, ours.manifest, listed)
        )
        if waits is not None and existing is None:
            return waiting(waits, ours, carried, generation.absent(members) if missing else ())
        if existing is None:
            # two that began at once saw nobody: what the other listed since must not join ours
            one_writer(self._attached, self._order)
        return self._ended(existing or self._create(members), ours, carried)

    def _ended(self, commit: CommitView, ours: KnownManifest, carried: Carried) -> UploadResult:
        is_ours = any(ref.sha256 == ours.sha256 for ref in commit.commit.manifests)
        if is_ours and not commit.disputed and self._whole.takeover_seconds is None:
            return self._joined(commit, ours, carried)
        return self._beside(commit, self._look(ours).read, carried)

    def _members(self, ours: KnownManifest, listed: tuple[KnownManifest, ...]) -> tuple[KnownManifest, ...]:
        """Return the manifests that a COMMIT would list; a derived form is whole in one manifest."""
        if self._where[2] != "zero":
            return (ours,)
        return generation.newest_revisions({known.key: known for known in (*listed, ours)}.values())

    def _create(self, members: tuple[KnownManifest, ...]) -> CommitView:
        """Create COMMIT, or find that another node did; either way what is read back counts (P3).

        Raises:
            RemoteError: it is not there although it was created, or holds other bytes.
        """
        document = generation.build_commit(
            members,
            committed_by=self._order.manifest.node,
            committed_at=now_utc(),
            config_digest=self._order.manifest.config_digest,
        )
        data = to_bytes(document)
        key = commit_key(*self._where)
        created = self._store.put_if_absent(key, data)
        found = read_commit(self._store, self._where)
        if found is None or (created and found.sha256 != sha256_of(data)):
            msg = f"{self._store.url} does not give back {key} as it was created"
            raise RemoteError(
                msg, hint="the store lies or another writer ignores create-only; see `ckptd check`"
            )
        return found


def one_writer(attached: AttachedRemote, order: UploadRequest) -> None:
    """Refuse a second writing node on a store that enforces no create-only write."""
    if attached.abilities.create_only:
        return
    node = order.manifest.node
    for info in attached.store.list(f"{ROOT}/nodes/"):
        other = node_in(info.key)
        if other != node:
            msg = f"{attached.store.url} enforces no create-only write and node {other} writes there too"
            cure = f'if this is that node under another name: node_name = "{other}" in the job file'
            raise RefusedError(msg, hint=f"one node per such store, nothing is committed by this one; {cure}")


def put_manifest(store: Store, manifest: NodeManifest) -> KnownManifest:
    """Create a node manifest under the name that its digest gives it.

    Raises:
        RemoteError: other bytes lie there.
    """
    data = to_bytes(manifest)
    sha256 = sha256_of(data)
    key = manifest_key(manifest, sha256)
    if not store.put_if_absent(key, data) and store.get(key) != data:
        msg = f"{store.url} holds other bytes under {key}"
        raise RemoteError(msg, hint="something else writes there; see `ckptd check`")
    return KnownManifest(key=key, sha256=sha256, manifest=manifest)
