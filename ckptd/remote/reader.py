"""Read-only view of a remote for commands that run without the daemon: list, resume, restore, verify.

Writes nothing, initialises nothing; a remote that is not there raises, a remote without commits is an answer.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptd.core.coverage import order_of
from ckptd.core.manifest import ROOT, Commit, Tombstone
from ckptd.errors import CkptdError, DamagedError, NotPermitted, StorageError
from ckptd.remote import observe
from ckptd.remote.documents import DocumentCache, manifests_of_commit, stem_of

if TYPE_CHECKING:
    from ckptd.core.manifest import NodeManifest, RemoteIdentity
    from ckptd.remote.messages import CommitView, Observation
    from ckptd.remote.store import ObjectInfo, Store


UNREADABLE = (DamagedError, NotPermitted, StorageError)
"""What one document may fail with where the others are still wanted (`verify`)."""


def read_remote(
    store: Store, identity: RemoteIdentity | None = None, *, is_tolerant: bool = False
) -> Observation:
    """What the remote holds now; `is_tolerant`: also where rights or the disk forbid reading one document.

    Raises:
        RemoteNotOurs: it has no `remote.json` ("not mounted?"), or another than `identity`.
        RemoteUnreachable: it is not there.
    """
    skip: tuple[type[CkptdError], ...] = UNREADABLE if is_tolerant else (DamagedError,)
    found = observe.still_ours(store, identity)  # an unmounted place is named as such before it is listed
    return observe.observe(store, found, cache=_fetched(store), skip=skip)


def _fetched(store: Store) -> DocumentCache:
    """COMMITs and tombstones, many at a time: each costs a round trip. What fails is read again, in turn."""
    cache = DocumentCache()

    def fetch(info: ObjectInfo, kind: type[Commit] | type[Tombstone]) -> None:
        with contextlib.suppress(CkptdError):
            cache.get(store, info, kind)

    if store.lanes > 1:
        kinds: tuple[tuple[str, type[Commit] | type[Tombstone]], ...]
        kinds = ((f"{ROOT}/retired/", Tombstone), (f"{ROOT}/commits/", Commit))
        with ThreadPoolExecutor(store.lanes, thread_name_prefix="documents") as pool:
            for prefix, kind in kinds:
                for info in list(store.list(prefix)):
                    pool.submit(fetch, info, kind)
    return cache


def live_commits(observation: Observation) -> tuple[CommitView, ...]:
    """COMMITs that exist for consumers (undisputed, not being retired), oldest first (P3, P9)."""
    gone = {(stone.tag, stone.generation, stone.form) for stone in observation.retired}
    live = [v for v in observation.commits if not v.disputed and stem_of(v.commit) not in gone]
    return tuple(sorted(live, key=lambda view: (order_of(view.commit), view.commit.generation)))


def manifests_of(store: Store, commit: Commit | CommitView) -> list[NodeManifest]:
    """The manifests that a COMMIT rests on, digests checked.

    Raises:
        DamagedError: one is absent or another than the COMMIT quotes.
    """
    document = commit if isinstance(commit, Commit) else commit.commit
    return [known.manifest for known in manifests_of_commit(store, document)]
