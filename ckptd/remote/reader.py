"""Read-only view of a remote for commands that run without the daemon: list, resume, restore, verify.

Writes nothing, initialises nothing; a remote that is not there raises, a remote without commits is an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.coverage import order_of
from ckptd.core.manifest import Commit
from ckptd.errors import CkptdError, DamagedError, NotPermitted, StorageError
from ckptd.remote import observe
from ckptd.remote.documents import manifests_of_commit, stem_of

if TYPE_CHECKING:
    from ckptd.core.manifest import NodeManifest, RemoteIdentity
    from ckptd.remote.messages import CommitView, Observation
    from ckptd.remote.store import Store


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
    return observe.observe(store, identity, skip=skip)


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
