"""Saves that are not committed and that the run still wants: the newest, none that a rewind left behind (P9).

Part of `ckptd status URL`. Numbers of steps begin again after a rewind, so they choose nothing.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from ckptd.core.coverage import newest_revisions
from ckptd.core.manifest import ROOT
from ckptd.core.manifest_names import name_in
from ckptd.core.save import Order
from ckptd.core.view import ZERO
from ckptd.remote.documents import read_generation, stem_of_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.manifest import NodeManifest
    from ckptd.remote.documents import Stem
    from ckptd.remote.store import Store

MOST_OPEN = 3
"""Uncommitted saves that are looked into."""


def newest_uncommitted(
    store: Store, uncommitted: Iterable[Stem], safe: Order | None
) -> tuple[tuple[KnownManifest, ...], ...]:
    """The manifests of each uncommitted save beyond `safe` and of the newest branch, newest save first.

    Those saved last are read, and (branch, step, save_seq) says which of them count: each manifest of a
    thousand nodes is a request.

    Raises:
        RemoteError: the remote stopped answering.
    """
    wanted = {where for where in uncommitted if where[2] == ZERO}
    saved = _saved_at(store, wanted)
    last = sorted(saved, key=lambda where: (saved[where], where), reverse=True)[:MOST_OPEN]
    read = [members for where in last if (members := newest_revisions(read_generation(store, where)))]
    found = sorted(
        ((order_of(lead_of(members)), members) for members in read), reverse=True, key=itemgetter(0)
    )
    return tuple(
        members
        for order, members in found
        if order.branch == found[0][0].branch and (safe is None or order > safe)
    )


def lead_of(members: Iterable[KnownManifest]) -> NodeManifest:
    """The manifest that tells the order of a save: a node that was replaced may not know of a rewind."""
    return max((known.manifest for known in members), key=order_of)


def order_of(manifest: NodeManifest) -> Order:
    """Its place among the saves of the job."""
    return Order(manifest.branch, manifest.step, manifest.save_seq)


def _saved_at(store: Store, wanted: set[Stem]) -> dict[Stem, tuple[int, int]]:
    """When each was saved, unix seconds as names of manifests tell (0: an early release's); when it came, by
    the store's time in ns."""
    found: dict[Stem, tuple[int, int]] = {}
    for info in store.list(f"{ROOT}/nodes/"):
        where = stem_of_key(info.key.rpartition("/")[0] + "/")
        if where is not None and where in wanted:
            name = name_in(info.key)
            saved, came = found.get(where, (0, 0))
            found[where] = max(saved, name.last_seconds if name else 0), max(came, info.mtime_ns)
    return found
