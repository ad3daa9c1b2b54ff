"""Take stock of what can be resumed from: the folders in save_dir and the COMMITs of each remote.

Neither the daemon's journal nor its status is needed: save_dir may have been emptied a minute ago, the daemon
may run or be dead. Local folders are judged by the daemon's own rules.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from ckptd.base.names import IDENTITY_KEY, ROOT, name_problem, tag_problem
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge, step_of
from ckptd.core.model.layouts import POINTERS, Role
from ckptd.core.model.manifest import side_key, stem
from ckptd.core.model.records import WEIGHTS
from ckptd.core.model.save import Order
from ckptd.core.policy.leases import shares_folder
from ckptd.errors import CkptdError, DamagedError, RemoteNotOurs, StorageError
from ckptd.storage.child.apart import open_apart
from ckptd.storage.local.job_names import named_below
from ckptd.storage.local.scan import scan, written_folders
from ckptd.storage.local.state_dir import own_node_id
from ckptd.storage.remote.documents import stem_of
from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote
from ckptd.storage.stores.access import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.facts import FileFacts
    from ckptd.core.model.listing import FolderListing, SaveDirListing
    from ckptd.core.model.manifest import Commit, ManifestFile, NodeManifest, RemoteIdentity
    from ckptd.recover.select.job import Owner
    from ckptd.storage.remote.messages import CommitView, Observation
    from ckptd.storage.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Hold what this node knows of its saves: its name and id, the daemon's last status; none is needed."""

    orders: Mapping[str, Order] = field(default_factory=dict)
    """Tag → the order that the daemon gave to the folder here."""
    commits: frozenset[str] = frozenset()
    """Digests of COMMITs that the daemon knew as those of saves here."""
    damaged: frozenset[str] = frozenset()
    """Tags of folders here of which the daemon's scrub found a file to be other than committed."""
    refused: frozenset[str] = frozenset()
    """Tags of folders here that the daemon would not send: a byte may be wrong."""
    node: str = ""
    node_id: str | None = None
    """None: not known, and nothing is this node's by its name alone, which another disk may bear too."""
    is_shared: bool = False
    """All nodes have this one save_dir: whatever was committed came from it."""

    def is_own(self, view: CommitView, manifests: Callable[[], Iterable[NodeManifest]]) -> bool:
        """Whether a COMMIT is of a save that lay here; `manifests`: asked where the name alone would tell."""
        if self.is_shared or view.sha256 in self.commits:
            return True
        if self.node_id is None or view.commit.committed_by != self.node:
            return False
        return any(manifest.node_id == self.node_id for manifest in manifests())


_DEFAULT = Access()
_MOST_LOOKED = 1000
"""Names in a store that are looked through for remotes below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteInventory:
    """One remote: what it holds that counts (undisputed, not retired; P3)."""

    name: str
    url: str
    store: Store
    observation: Observation
    commits: tuple[CommitView, ...]
    access: Access = _DEFAULT
    suspects: frozenset[str] = frozenset()
    """Digests of COMMITs that a daemon found damaged there: another copy is taken first."""

    def manifests(self, commit: Commit) -> tuple[NodeManifest, ...]:
        """Return the manifests of a COMMIT, digests checked.

        Raises:
            DamagedError: one is gone, another, or not to be believed (P15).
        """
        found = tuple(manifests_of(self.store, commit))
        problem = why_untrusted(self.observation.identity, commit, found)
        if problem is not None:
            raise DamagedError(problem, hint="it was changed in the remote; an older checkpoint is taken")
        return found

    def late(
        self, commit: Commit, manifests: Sequence[NodeManifest]
    ) -> tuple[tuple[ManifestFile, ...], str | None]:
        """Return the late files that SUPPLEMENTs beside a COMMIT list, the last one of a path, and a note.

        The note says why they cannot be believed; late files are worth less than the checkpoint, so they are
        left out then.
        """
        found: dict[str, ManifestFile] = {}
        try:
            supplements = self.supplements(commit)
            # hosts that divide one folder send its late files for each other
            is_shared = bool(supplements) and any(self.store.list(shares_folder(*stem_of(commit))))
            found = {
                file.path: file
                for manifest in supplements
                for file in manifest.files
                if is_shared or not _is_anothers(file.path, manifest, manifests)
            }
            paths = {file.path: file for manifest in manifests for file in manifest.files} | found
            problem = path_problem(paths.values())
        except DamagedError as error:
            problem = error.message
        if problem is not None:
            return (), f"{commit.tag} on {self.name}, without what came after its COMMIT: {problem}"
        return tuple(found.values()), None

    def supplements(self, commit: Commit) -> tuple[NodeManifest, ...]:
        """Return the manifests of the SUPPLEMENTs beside a COMMIT, in order.

        Raises:
            DamagedError: as `manifests`, of one of them.
        """
        mine = (v for v in self.observation.supplements if stem_of(v.commit) == stem_of(commit))
        return tuple(manifest for view in mine for manifest in self.manifests(view.commit))


def _is_anothers(path: str, late: NodeManifest, manifests: Sequence[NodeManifest]) -> bool:
    """Nodes may have files of one name and unlike content: the one in the COMMIT counts, not the last."""
    own = [m for m in manifests if late.node_id == m.node_id or late.node == m.node]
    mine = [file for manifest in own for file in manifest.files if file.path == path]
    if mine:
        return all(file.replica_of is not None for file in mine)
    is_listed = any(file.path == path for manifest in manifests for file in manifest.files)
    return is_listed and len({manifest.node_id for manifest in manifests}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """One checkpoint folder in save_dir with its verdict."""

    listing: FolderListing
    verdict: Verdict
    facts: Mapping[str, FileFacts]
    is_open: bool = False
    """A process that we may see holds one of its files open for writing."""
    unread: StorageError | None = None
    """The disk did not give one of its files: what is not whole now may be whole when it does."""

    @property
    def tag(self) -> str:
        """Name of the folder."""
        return self.listing.tag

    @property
    def is_complete(self) -> bool:
        """A whole save, readable to its end."""
        return self.verdict.state is State.COMPLETE

    @property
    def step(self) -> int | None:
        """Return its step, also where the save is not whole."""
        if self.verdict.step is not None:
            return self.verdict.step
        return step_of(self.tag, self.facts)[0]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint by path."""
        return {path: facts.fingerprint for path, facts in self.facts.items()}


def read_remote_inventory(
    name: str,
    url: str,
    owner: Owner | None,
    access: Access = _DEFAULT,
    *,
    node_id: str = "",
    is_tolerant: bool = False,
) -> RemoteInventory:
    """Read a remote; `owner`: whose it must be (None: anybody's); `is_tolerant`: as `read_remote`.

    `node_id`: of the node that will upload to it: two that send one object must not share its partial file.

    Raises:
        RemoteUnreachable, RemoteNotOurs: it is not there, or not this job's (69).
    """
    store = open_apart(name, url, access, owner=node_id)
    try:
        observation = read_remote(store, is_tolerant=is_tolerant)
    except RemoteNotOurs as error:
        if IDENTITY_KEY not in error.message:
            raise
        hint = named_below([f"{url.rstrip('/')}/{below}" for below in _remotes_below(store)])
        hint = (
            hint or "is it mounted? before the very first start: `ckptd check --init-remote`, or `ckptd run`"
        )
        raise RemoteNotOurs(error.message, hint=hint) from error
    if owner is not None:
        owner.must_own(name, url, observation.identity)
    return RemoteInventory(
        name=name,
        url=url,
        store=store,
        observation=observation,
        commits=live_commits(observation),
        access=access,
    )


def _remotes_below(store: Store) -> list[str]:
    """Return the folders in which remotes lie, as far as the first names in the store tell."""
    with contextlib.suppress(CkptdError):
        keys = [info.key for info in islice(store.list(""), _MOST_LOOKED)]
        return sorted({key.partition(f"/{ROOT}/")[0] for key in keys if f"/{ROOT}/" in key})
    return []


def forms_alone(remotes: Sequence[RemoteInventory]) -> dict[str, set[str]]:
    """Return the tags of which nothing is left but weights, with the forms of those: no resume points
    (adr/0094).
    """
    forms: dict[str, set[str]] = {}
    for remote in remotes:
        for view in remote.commits:
            forms.setdefault(view.commit.tag, set()).add(view.commit.form)
    return {tag: held for tag, held in forms.items() if held <= set(WEIGHTS)}


def is_gone(store: Store, view: CommitView) -> bool:
    """Whether a COMMIT that was seen has been retired since, or is being retired."""
    stone = side_key("retired", stem(*stem_of(view.commit)))
    return store.get(view.key) is None or store.get(stone) is not None


def scan_local(
    save_dir: Path, save_dir_fd: int, job: JobConfig, remotes: Sequence[RemoteInventory]
) -> tuple[SaveDirListing, tuple[LocalCheckpoint, ...]]:
    """Scan save_dir, inspect every file in restricted children, judge every folder."""
    listing = scan(save_dir_fd, declared=job.declared)
    accepted = frozenset(
        decision.fingerprints
        for remote in remotes
        for decision in remote.observation.decisions
        if decision.kind == "accept"
    )
    grids = frozenset(
        (view.commit.grid.dp, view.commit.grid.mm_count, view.commit.grid.zero_stage)
        for remote in remotes
        for view in remote.commits
    )
    found: list[LocalCheckpoint] = []
    for folder in listing.folders:
        newest_ns = max((f.identity.mtime_ns for f in folder.files), default=0)
        context = Context(
            settle_seconds=job.settle_seconds,
            quiet_seconds=max(job.settle_seconds, time.time() - newest_ns / 1e9),
            save_spread_seconds=job.save_spread_seconds,
            accepted=accepted,
            known_grids=grids,
            is_to_send=False,
        )
        rows, unread = _read(save_dir / folder.place, [f.path for f in folder.files], folder.manifest)
        facts = {row.path: row for row in rows}
        found.append(
            LocalCheckpoint(
                listing=folder,
                verdict=judge(folder, facts, None, context),
                facts=facts,
                is_open=False,
                unread=unread,
            )
        )
    written = written_folders(str(save_dir)) if found else frozenset()
    return listing, tuple(replace(one, is_open=one.listing.tag in written) for one in found)


def _read(folder: Path, paths: Sequence[str], manifest: str) -> tuple[list[FileFacts], StorageError | None]:
    # what looks at a remote alone loads no conversions
    from ckptd.conversion.engine.inspect import inspect_files

    try:
        return inspect_files(folder, paths, manifest=manifest, is_final=False), None
    except StorageError as error:
        return inspect_files(folder, paths, manifest=manifest), error


def read_node_memory(job: JobConfig, state_dir: Path | None, node: str) -> NodeMemory:
    """Read what this node knows of its saves: its name, its id and the daemon's last status, never needed."""
    if state_dir is None:
        return NodeMemory(node=node, is_shared=job.shared_fs)
    known = NodeMemory(node=node, node_id=own_node_id(state_dir, job.save_dir), is_shared=job.shared_fs)
    try:
        status = json.loads((state_dir / "status.json").read_bytes())
        rows = [
            row
            for one in status["jobs"]
            if one["save_dir"] == str(job.save_dir)
            for row in one["checkpoints"]
        ]
        here = (row for row in rows if isinstance(row.get("branch"), int) and row["local"]["present"])
        orders = {
            # of saves of one step that are known in another way, those come first
            str(row["tag"]): Order(row["branch"], row["step"], 0)
            for row in here
            if row["step"] is not None
        }
        # a tag that no remote takes says nothing of the bytes
        refused = frozenset(
            tag for row in rows if row.get("state") == "refused" and not tag_problem(tag := str(row["tag"]))
        )
        damaged = frozenset(
            tag for row in rows if row["local"].get("damaged") and not tag_problem(tag := str(row["tag"]))
        )
        forms = [form for row in rows for by in row.get("remotes", {}).values() for form in by.values()]
        commits = frozenset(str(form["commit_sha256"]) for form in forms if form.get("commit_sha256"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CkptdError):
        return known
    return replace(known, orders=orders, commits=commits, refused=refused, damaged=damaged)


# --- whether documents may be believed -------------------------------------------------------------------
# Before a byte or a name of them is used. A remote is written by others: a COMMIT copied from another job, a
# manifest with `../` or a control character in a path is damage like a flipped bit; the checkpoint is named
# and not offered.

_INT64 = 1 << 63


def why_untrusted(identity: RemoteIdentity, commit: Commit, manifests: Iterable[NodeManifest]) -> str | None:
    """Return why a COMMIT and its manifests cannot be this remote's own; None when nothing speaks against
    them.
    """
    if commit.job_id != identity.job_id:
        return f"the COMMIT is of job {commit.job_id!r}, this remote is {identity.job_id!r}'s"
    problem = tag_problem(commit.tag) or name_problem(commit.tag)
    if problem is not None or commit.tag in POINTERS:
        return f"tag {commit.tag!r} {problem or 'is the name of a pointer'}"
    members = tuple(manifests)
    for manifest in members:
        if manifest.job_id != commit.job_id:
            return f"the manifest of {manifest.node!r} is of job {manifest.job_id!r}"
        theirs = (manifest.tag, manifest.generation, manifest.form)
        if theirs != (commit.tag, commit.generation, commit.form):
            return f"the manifest of {manifest.node!r} speaks of {theirs[0]!r} ({theirs[2]}, g{theirs[1]})"
        for file in manifest.files:
            problem = _file_problem(file)
            if problem is not None:
                return problem
        for path in manifest.empty_folders:
            problem = name_problem(path)
            if problem is not None:
                return f"folder {path!r} {problem}"
    paths = {file.path for manifest in members for file in manifest.files}
    taken = sorted(path for manifest in members for path in manifest.empty_folders if _is_in(path, paths))
    if taken:
        return f"path {taken[0]!r} is listed as a file and as a folder"
    return path_problem(file for manifest in members for file in manifest.files)


def path_problem(listed: Iterable[ManifestFile]) -> str | None:
    """Two contents for one path, or a file where another one's folder must be."""
    found: dict[str, tuple[str, int, str]] = {}
    folders: set[str] = set()
    for file in listed:
        if file.role is Role.EXTRA:
            continue
        content = (file.key, file.bytes, file.checksums.crc64nvme)
        if found.setdefault(file.path, content) != content:
            return f"path {file.path!r} is listed with two contents"
        parts = file.path.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = sorted(folders & found.keys())
    return f"path {both[0]!r} is listed as a file and as a folder" if both else None


def _is_in(path: str, files: Set[str]) -> bool:
    """Whether a folder, or one above it, has the path of a file."""
    parts = path.split("/")
    return any("/".join(parts[:count]) in files for count in range(1, len(parts) + 1))


def _file_problem(file: ManifestFile) -> str | None:
    for what, name in (("path", file.path), ("key", file.key)):
        problem = name_problem(name)
        if problem is not None:
            return f"{what} {name!r} {problem}"
    if file.key.split("/")[0] == ROOT:
        return f"key {file.key!r} lies among the documents of ckptd"
    if not (0 <= file.bytes < _INT64 and 0 <= file.mtime_ns < _INT64):
        return f"size or time of {file.path!r} cannot be"
    return None
