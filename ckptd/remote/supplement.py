"""Files that appeared in a folder after its COMMIT, committed beside it (docs/design.md P1, docs/adr/0102).

A trainer writes its README late, a user drops the result of an evaluation: what no COMMIT lists would keep
the folder on the node for ever. Objects → verification → manifest → SUPPLEMENT k, created once; the COMMIT
stays as it is. Readers that know no supplements lack these files and nothing else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.core.coverage import KnownManifest, build_commit
from ckptd.core.manifest import commit_key, manifest_key, sha256_of, side_key, stem, to_bytes
from ckptd.core.trainers import place_of
from ckptd.errors import RemoteError
from ckptd.remote.commit import now_utc, one_writer, open_root
from ckptd.remote.documents import (
    manifests_of_commit,
    number_of,
    read_commit,
    read_generation,
    read_supplements,
    stem_of,
)
from ckptd.remote.listed import Listed, withdraw
from ckptd.remote.look import look
from ckptd.remote.messages import ShipResult, SupplementView
from ckptd.remote.observe import still_ours
from ckptd.remote.origin import sealed
from ckptd.remote.store import settled
from ckptd.remote.transfer import Transfer

if TYPE_CHECKING:
    from ckptd.core.manifest import ManifestFile, NodeManifest
    from ckptd.remote.commit import Ground
    from ckptd.remote.documents import Stem
    from ckptd.remote.messages import CommitView, ShipFile, ShipOrder
    from ckptd.remote.transfer import Control

_TRIES = 100


def supplement(ground: Ground, order: ShipOrder, control: Control) -> ShipResult:
    """Ship files beside the COMMIT that `order.supplement_to` quotes, and create a SUPPLEMENT over them.

    Outcomes: committed (what lies there already is not sent again); conflict: that COMMIT does not count.

    Raises:
        SourceChanged, VerifyError, CommitConflict: see `Transfer.run`; nothing of the order counts.
        RefusedError: another node writes to a store without create-only writes (P10).
        RemoteError: as the store.
    """
    still_ours(ground.store, ground.identity)
    one_writer(ground, order)
    root = open_root(order.root)
    try:
        return _Supplementing(ground, order, control, root).run()
    finally:
        os.close(root)


class _Supplementing:
    def __init__(self, ground: Ground, order: ShipOrder, control: Control, root: int) -> None:
        self._ground = ground
        self._store = ground.store
        self._order = order
        self._control = control
        self._root = root
        self._where: Stem = stem_of(order.manifest)

    def run(self) -> ShipResult:
        base = self._base()
        if base is None:
            return self._no_base()
        before = self._listing(base)
        held = {row for view in before for row in view.files}
        absent = [file for file in self._order.files if _row(file) not in held]
        if not absent:
            return self._result(base, before, 0, sum(file.bytes for file in self._order.files))
        seen = look(self._store, self._where, self._ground.manifests, node=None)
        listed = seen.read
        order = self._order.model_copy(update={"files": tuple(self._placed(f, base, listed) for f in absent)})
        with sealed(order, self._root, self._control, self._store) as origin:
            known = Listed(self._store, order.manifest, seen, self._ground.manifests)
            carried = Transfer(self._store, origin, self._root, known, self._control).run()
            # P4: what is listed is what the files hold now
            origin.recheck()
        still_ours(self._store, self._ground.identity)
        ours = self._put_manifest(carried.files)
        withdraw(self._store, ours.manifest)
        if self._base() is None:
            return self._no_base()
        # what was created counts, whatever a list shows of it
        made = self._create(ours)
        return self._result(base, [*before, made], carried.bytes_sent, carried.bytes_skipped)

    def _base(self) -> CommitView | None:
        """The COMMIT, if it counts and is the one that is meant."""
        commit = read_commit(self._store, self._where)
        if commit is None or commit.disputed or commit.sha256 != self._order.supplement_to:
            return None
        is_retired = self._store.get(side_key("retired", stem(*self._where))) is not None
        return None if is_retired else commit

    def _no_base(self) -> ShipResult:
        return ShipResult(outcome="conflict", reason=f"the COMMIT of {self._where[0]} is another one now")

    def _listing(self, base: CommitView) -> list[SupplementView]:
        """The COMMIT and its SUPPLEMENTs, each with what it lists."""
        views = []
        for view in (base, *read_supplements(self._store, self._where)):
            settled(self._store, view.key)
            rows = {
                (file.path, file.bytes, file.fingerprint)
                for known in manifests_of_commit(self._store, view.commit)
                for file in known.manifest.files
            }
            views.append(SupplementView(key=view.key, sha256=view.sha256, files=tuple(sorted(rows))))
        return views

    def _result(self, base: CommitView, views: list[SupplementView], sent: int, skipped: int) -> ShipResult:
        wanted = {_row(file) for file in self._order.files}
        return ShipResult(
            outcome="committed",
            commit=base,
            bytes_sent=sent,
            bytes_skipped=skipped,
            supplements=tuple(view for view in views if wanted & set(view.files)),
        )

    def _placed(self, file: ShipFile, base: CommitView, listed: tuple[KnownManifest, ...]) -> ShipFile:
        """Its own place in the folder, unless another content or another node may take that."""
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
        own = [
            known.manifest.revision
            for known in read_generation(self._store, self._where)
            if known.manifest.node_id == self._order.manifest.node_id
        ]
        update = {"files": carried, "revision": max(own, default=0) + 1}
        manifest: NodeManifest = self._order.manifest.model_copy(update=update)
        data = to_bytes(manifest)
        key = manifest_key(manifest, sha256_of(data))
        self._put(key, data)
        return KnownManifest(key=key, sha256=sha256_of(data), manifest=manifest)

    def _put(self, key: str, data: bytes) -> bool:
        """Create it; True when it is there with these bytes."""
        self._store.put_if_absent(key, data)
        found = self._store.get(key)
        if found is None:
            msg = f"{self._store.url} does not give back {key} as it was created"
            raise RemoteError(msg, hint="the store lies or another writer removes there; see `ckptd check`")
        return found == data

    def _create(self, ours: KnownManifest) -> SupplementView:
        """SUPPLEMENT k, the first that nobody has; read back."""
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
                return SupplementView(key=key, sha256=sha256_of(data), files=tuple(sorted(rows)))
        msg = f"{self._store.url} changes faster than a supplement of {self._where[0]} can be put there"
        raise RemoteError(msg, hint="something else writes there; see `ckptd check`")


def _row(file: ShipFile) -> tuple[str, int, str]:
    return file.path, file.bytes, file.fingerprint
