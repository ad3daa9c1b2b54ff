"""Files that several nodes have, sent once: `mp_rank_*_model_states.pt` under ZeRO-1/2 (design.md §5; H29).

The holder of data-parallel rank 0 sends them at once. The others leave them to it for a while after their own
shards are verified, and for good once a manifest of the generation lists them with the same tensors: pickles
of replicas may differ, their storages do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.core.coverage import KnownManifest
    from ckptd.core.manifest import ManifestFile
    from ckptd.remote.messages import ShipFile, ShipOrder


def tensors(file: ShipFile | ManifestFile) -> tuple[str, str]:
    """What a replica is recognised by: its path, and the fingerprint of its storages."""
    return file.path, file.tensor_fingerprint or file.fingerprint


def tensors_of(manifests: Iterable[KnownManifest]) -> frozenset[tuple[str, str]]:
    """The same of every file that manifests list."""
    return frozenset(tensors(file) for known in manifests for file in known.manifest.files)


def leave_to_owner(order: ShipOrder, listed: Callable[[], Iterable[KnownManifest]]) -> ShipOrder:
    """The order without the replicas that another node listed, or that are still its business.

    `listed` reads the generation's manifests; it is asked only by who would step in.
    """
    if not any(file.is_replica for file in order.files):
        return order
    others = listed() if order.steps_in else ()
    held = tensors_of(known for known in others if known.manifest.node_id != order.manifest.node_id)
    kept = tuple(
        file for file in order.files if not file.is_replica or (order.steps_in and tensors(file) not in held)
    )
    if len(kept) == len(order.files):
        return order
    left = tuple(sorted(tensors(file) for file in order.files if file not in kept))
    manifest = order.manifest.model_copy(update={"replicas": left})
    return order.model_copy(update={"files": kept, "manifest": manifest})
