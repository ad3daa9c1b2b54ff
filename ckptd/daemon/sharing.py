"""Another host works on the same directory: one of the two stands by, both say so (P10, H36, adr/0105).

flock keeps daemons of one host apart, not those of two hosts over one network file system. What gives the
other away is its manifest of a save that was written while we watched, with the very mtimes of our files. A
directory that moved from host to host shows none; what was restored has an older mtime than ctime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.view import ZERO

if TYPE_CHECKING:
    from ckptd.core.save import SealedSave
    from ckptd.daemon.job import Job
    from ckptd.daemon.links import RemoteLink
    from ckptd.daemon.state import JobState
    from ckptd.remote.messages import TagView

_WRITTEN_NS = 2_000_000_000
"""A file whose times lie further apart was put there with the times of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A host that ships the files that lie here."""

    node: str
    tag: str
    stands_by: bool
    """We do: of two, the one with the lower node id goes on."""


def look_for_sharer(state: JobState, link: RemoteLink, tags_at_start: frozenset[str]) -> None:
    """Whether a remote tells of another host that ships what lies here."""
    if state.sharer is not None or state.is_shared:
        return
    for row in state.rows.values():
        view = link.tag_views.get(row.save.tag)
        if view is None or row.state != "present" or row.save.tag in tags_at_start:
            continue
        state.sharer = sharer_in(row.save, view, link.settings.node, link.settings.node_id)
        if state.sharer is not None:
            return


def sharer_in(save: SealedSave, view: TagView, node: str, node_id: str) -> Sharer | None:
    """The host whose manifests list files of this save with their very times."""
    ours = {
        (f.path, f.identity.size_bytes, f.identity.mtime_ns, f.fingerprint)
        for f in save.files
        if f.identity.ctime_ns - f.identity.mtime_ns < _WRITTEN_NS
    }
    for seen in view.manifests:
        other = seen.manifest
        if other.form != ZERO or other.node == node or other.node_id == node_id:
            continue
        if any((f.path, f.bytes, f.mtime_ns, f.fingerprint) in ours for f in other.files):
            return Sharer(node=other.node, tag=save.tag, stands_by=other.node_id < node_id)
    return None


def see_sharer(job: Job, state: JobState) -> None:
    """Until a restart: nothing here tells that the other is gone."""
    found = state.sharer
    if found is None:
        return
    text = (
        f"{found.node} ships the files of {job.config.save_dir} too ({found.tag}): one directory, two hosts"
    )
    what = "; this one stands by: it sends, converts and deletes nothing" if found.stands_by else ""
    cure = "run ckptd on one of the hosts that see this directory, then restart it there"
    job.problems.see("save-dir-shared", str(job.config.save_dir), text + what, cure)
