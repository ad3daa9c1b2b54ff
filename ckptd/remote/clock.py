"""What time it is for a store, where it says so: ages of its objects are by that clock, not by a reader's."""

from __future__ import annotations

import contextlib
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.remote.store import Store


def store_now_seconds(store: Store) -> float | None:
    """Unix time as the store's answers carry it (S3: `Date`, whole seconds); None: it tells none."""
    client: Any = getattr(store, "client", None)
    if not hasattr(client, "head_bucket"):
        return None
    found: Any = store
    with contextlib.suppress(CkptdError, ValueError, KeyError, TypeError):
        with found.asking("reading its clock"):
            answer = client.head_bucket(Bucket=found.bucket)
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    return None
