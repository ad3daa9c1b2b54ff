"""A remote becomes another job's: the job id stays, so that COMMITs stay valid; the remote id is new.

Daemons that knew the remote by its old id find it "another one" and stop writing.
"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.errors import RemoteNotOurs
from ckptd.remote.documents import IDENTITY_KEY, read_identity

if TYPE_CHECKING:
    from ckptd.core.manifest import RemoteIdentity
    from ckptd.remote.store import Store


def identity_of(store: Store) -> RemoteIdentity:
    """Whose a remote is.

    Raises:
        RemoteNotOurs: it has no identity.
    """
    found = read_identity(store)
    if found is None:
        msg = f"{store.url} has no {IDENTITY_KEY}"
        hint = "is it mounted? nothing is there to be taken over: a remote of another name in the job file "
        raise RemoteNotOurs(msg, hint=hint + "begins anew there, with `ckptd check --init-remote`")
    return found


def take_over(store: Store, found: RemoteIdentity, job: str) -> RemoteIdentity:
    """Write `job` into remote.json, with a new remote id; returns what stands there then.

    Raises:
        RemoteNotOurs: somebody else wrote it at the same moment.
    """
    wanted = found.model_copy(update={"job": job, "remote_id": secrets.token_hex(16)})
    at = datetime.now(UTC).isoformat(timespec="seconds")
    before = {"job": found.job, "remote_id": found.remote_id, "at": at}
    document = {**wanted.model_dump(mode="json"), "taken_from": before}
    store.put(IDENTITY_KEY, json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    now = identity_of(store)
    if now != wanted:
        msg = f"{store.url} was taken over by job {now.job} at the same moment"
        raise RemoteNotOurs(msg, hint="agree on who it belongs to, then call it again")
    return now
