"""Commit files that appeared in a folder after its COMMIT, by a SUPPLEMENT beside it (docs/adr/0102).

A trainer writes its README late, a user drops the result of an evaluation: what no COMMIT lists would keep
the folder on the node for ever. Objects → verification → manifest → SUPPLEMENT k, created once; the COMMIT
stays as it is. Readers that know no supplements lack these files and nothing else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.core.model.generation import KnownManifest, build_commit
from ckptd.core.model.layouts import place_of
from ckptd.core.model.manifest import (
    commit_key,
    sha256_of,
    side_key,
    stem,
    to_bytes,
)
from ckptd.core.model.records import SupplementRecord
from ckptd.errors import RemoteError
from ckptd.storage.remote.commit import one_writer, open_root, put_manifest
from ckptd.storage.remote.documents import (
    manifests_of_commit,
    now_utc,
    number_of,
    read_commit,
    read_generation,
    read_snapshot,
    read_supplements,
    stem_of,
)
from ckptd.storage.remote.held_objects import HeldObjects
from ckptd.storage.remote.manifest_index import (
    ManifestIndex,
    release_lease,
)
from ckptd.storage.remote.messages import CommitView, UploadResult
from ckptd.storage.remote.observe import AttachedRemote, still_ours
from ckptd.storage.remote.transfer import Transfer, sealed

if TYPE_CHECKING:
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import UploadFile, UploadRequest
    from ckptd.storage.remote.transfer import TransferControl

_TRIES = 100


def supplement(attached: AttachedRemote, order: UploadRequest, control: TransferControl) -> UploadResult:
    """Upload files beside the COMMIT that `order.supplement_to` quotes, and create a SUPPLEMENT over them.

    Outcomes: committed (what lies there already is not sent again); conflict: that COMMIT does not count.

    Raises:
        SourceChanged, VerifyError, CommitConflict: see `Transfer.run`; nothing of the order counts.
        RefusedError: another node writes to a store without create-only writes (P10).
        RemoteError: as the store.
    """
    still_ours(attached.store, attached.identity)
    one_writer(attached, order)
    root = open_root(order.root)
    try:
        return _Supplementing(attached, order, control, root).run()
    finally:
        os.close(root)


class _Supplementing:
    def __init__(
        self, attached: AttachedRemote, order: UploadRequest, control: TransferControl, root: int
    ) -> None:
        self._attached = attached
        self._store = attached.store
        self._order = order
        self._control = control
        self._root = root
        self._where: Stem = stem_of(order.manifest)

    def run(self) -> UploadResult:
        base = self._base()
        if base is None:
            return self._no_base()
        before = self._listing(base)
        held = {row for view in before for row in view.files}
        absent = [file for file in self._order.files if _row(file) not in held]
        if not absent:
            return self._result(base, before, 0, sum(file.bytes for file in self._order.files))
        seen = read_snapshot(self._store, self._where, self._attached.manifests, node=None)
        listed = seen.read
        order = self._order.model_copy(update={"files": tuple(self._placed(f, base, listed) for f in absent)})
        with sealed(order, self._root, self._control, self._store) as origin:
            known = ManifestIndex(self._store, order.manifest, seen, self._attached.manifests)
            elsewhere = HeldObjects(self._attached, order.manifest)
            carried = Transfer(self._store, origin, self._root, known, self._control, elsewhere).run()
            # what is listed is what the files hold now (P4)
            origin.recheck()
        still_ours(self._store, self._attached.identity)
        ours = self._put_manifest(carried.files)
        release_lease(self._store, ours.manifest)
        if self._base() is None:
            return self._no_base()
        # what was created counts, whatever a list shows of it
        made = self._create(ours)
        return self._result(base, [*before, made], carried.bytes_sent, carried.bytes_skipped)

    def _base(self) -> CommitView | None:
        """Return the COMMIT, if it counts and is the one that is meant."""
        commit = read_commit(self._store, self._where)
        if commit is None or commit.disputed or commit.sha256 != self._order.supplement_to:
            return None
        is_retired = self._store.get(side_key("retired", stem(*self._where))) is not None
        return None if is_retired else commit

    def _no_base(self) -> UploadResult:
        return UploadResult(outcome="conflict", reason=f"the COMMIT of {self._where[0]} is another one now")

    def _listing(self, base: CommitView) -> list[SupplementRecord]:
        """Return the COMMIT and its SUPPLEMENTs, each with what it lists."""
        views = []
        for view in (base, *read_supplements(self._store, self._where)):
            self._store.flush_name(view.key)
            rows = {
                (file.path, file.bytes, file.fingerprint)
                for known in manifests_of_commit(self._store, view.commit)
                for file in known.manifest.files
            }
            views.append(SupplementRecord(key=view.key, sha256=view.sha256, files=tuple(sorted(rows))))
        return views

    def _result(
        self, base: CommitView, views: list[SupplementRecord], sent: int, skipped: int
    ) -> UploadResult:
        wanted = {_row(file) for file in self._order.files}
        return UploadResult(
            outcome="committed",
            commit=base,
            bytes_sent=sent,
            bytes_skipped=skipped,
            supplements=tuple(view for view in views if wanted & set(view.files)),
        )

    def _placed(self, file: UploadFile, base: CommitView, listed: tuple[KnownManifest, ...]) -> UploadFile:
        """Return the file under its own path in the folder, or under another key where that path may be
        taken.

        Another content or another node's file may have the path.
        """
        ours = [k.sha256 for k in listed if k.manifest.node_id == self._order.manifest.node_id]
        is_ours_alone = all(ref.sha256 in ours for ref in base.commit.manifests)
        taken = {entry.key for known in listed for entry in known.manifest.files}
        folder, is_taken = base.commit.folder, True
        if is_ours_alone and f"{folder}/{file.path}" not in taken:
            # a list may be out of date: what lies there may be listed, and is never replaced
            held = self._store.stat(f"{folder}/{file.path}")
            is_taken = held is not None and not held.bytes == file.bytes == 0
        key = place_of(folder, file.path, file.fingerprint, file.bytes, is_taken=is_taken)
        return file.model_copy(update={"key": key})

    def _put_manifest(self, carried: tuple[ManifestFile, ...]) -> KnownManifest:
        """Create the manifest of the files alone, and find it there.

        Raises:
            RemoteError: it is not there although it was created, or other bytes are.
        """
        own = [
            known.manifest.revision
            for known in read_generation(self._store, self._where)
            if known.manifest.node_id == self._order.manifest.node_id
        ]
        update = {"files": carried, "revision": max(own, default=0) + 1}
        made = put_manifest(self._store, self._order.manifest.model_copy(update=update))
        self._put(made.key, to_bytes(made.manifest))
        return made

    def _put(self, key: str, data: bytes) -> bool:
        """Create it; True when it is there with these bytes."""
        self._store.put_if_absent(key, data)
        found = self._store.get(key)
        if found is None:
            msg = f"{self._store.url} does not give back {key} as it was created"
            raise RemoteError(msg, hint="the store lies or another writer removes there; see `ckptd check`")
        return found == data

    def _create(self, ours: KnownManifest) -> SupplementRecord:
        """Create SUPPLEMENT k, the first that nobody has, and read it back."""
        document = build_commit(
            (ours,),
            committed_by=self._order.manifest.node,
            committed_at=now_utc(),
            config_digest=self._order.manifest.config_digest,
        )
        data = to_bytes(document)
        last = max((number_of(view) for view in read_supplements(self._store, self._where)), default=0)
        for number in range(last + 1, last + 1 + _TRIES):
            key = commit_key(*self._where, number)
            if self._put(key, data):
                rows = {(file.path, file.bytes, file.fingerprint) for file in ours.manifest.files}
                return SupplementRecord(key=key, sha256=sha256_of(data), files=tuple(sorted(rows)))
        msg = f"{self._store.url} changes faster than a supplement of {self._where[0]} can be put there"
        raise RemoteError(msg, hint="something else writes there; see `ckptd check`")


def _row(file: UploadFile) -> tuple[str, int, str]:
    return file.path, file.bytes, file.fingerprint
