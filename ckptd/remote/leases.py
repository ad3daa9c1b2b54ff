"""Leases of a node that is gone for good: what it was replacing is compared before they lapse (adr/0101).

A lease holds up a COMMIT because objects may have changed under a manifest that lists them (adr/0083). Only
a person knows that its node will not come back; that the objects are what manifests say is found by reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.manifest import Lease, parse
from ckptd.errors import RefusedError
from ckptd.remote.documents import LEASES, read_commits, read_generation, stem_of
from ckptd.remote.observe import still_ours
from ckptd.remote.resend import holds

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.core.manifest import ManifestFile, RemoteIdentity
    from ckptd.remote.documents import Stem
    from ckptd.remote.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease that holds up a COMMIT.

    `wrong`: objects that are not what a manifest lists, with their bytes; `others`: nodes whose leases say
    that they replace objects there too.
    """

    key: str
    where: Stem
    node: str
    wrong: tuple[tuple[str, int], ...]
    others: tuple[str, ...] = ()


def leases_of(store: Store, node: str) -> list[tuple[str, Stem]]:
    """Keys and generations of that node's leases, of generations that are neither committed nor retired.

    Raises:
        DamagedError: a lease cannot be read.
    """
    return [(key, stem_of(lease)) for key, lease in _leases(store) if lease.node == node]


def _leases(store: Store) -> list[tuple[str, Lease]]:
    found = read_commits(store)
    over = {stem_of(view.commit) for view in found.commits} | found.stones.keys()
    leases: list[tuple[str, Lease]] = []
    for info in sorted(store.list(LEASES), key=lambda info: info.key):
        data = store.get(info.key)
        if data is None:
            continue
        lease = parse(Lease, data, info.key)
        if stem_of(lease) not in over:
            leases.append((info.key, lease))
    return leases


def compare(store: Store, key: str, where: Stem, node: str) -> Held:
    """Read every object that a manifest of that generation lists."""
    listed: dict[str, list[ManifestFile]] = {}
    for known in read_generation(store, where):
        for file in known.manifest.files:
            listed.setdefault(file.key, []).append(file)
    wrong = []
    for name, files in sorted(listed.items()):
        # of several listings (revisions, replicas) what lies there must be one; whose, every attempt asks
        if not any(holds(store, name, file) for file in files):
            info = store.stat(name)
            wrong.append((name, info.bytes if info is not None else 0))
    others = (lease.node for _, lease in _leases(store) if stem_of(lease) == where and lease.node != node)
    return Held(key=key, where=where, node=node, wrong=tuple(wrong), others=tuple(sorted(set(others))))


def lapse(store: Store, identity: RemoteIdentity, held: Held, on_done: Callable[[str, int], None]) -> None:
    """Remove the lease, or else the objects that are wrong: whoever lists them sends them again.

    Raises:
        RefusedError: another node is at work on them. RemoteNotOurs: the remote is another than `identity`.
    """
    if held.wrong and held.others:
        msg = (
            f"{held.wrong[0][0]} is not what its manifest lists, and {', '.join(held.others)} replaces there"
        )
        raise RefusedError(msg, hint="call it again when that node is done, or name it too if it is gone")
    still_ours(store, identity)
    for key, size in held.wrong:
        store.delete(key)
        on_done(key, size)
    if not held.wrong:
        store.delete(held.key)
        on_done(held.key, 0)
