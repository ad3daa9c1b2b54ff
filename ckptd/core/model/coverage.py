"""Commit by coverage: decide when manifests of one save make a COMMIT, choose the pointers (design.md §5).

Pure: every node that sees the same documents decides the same, so no membership and no leader is needed.
Tests of "one save" only veto; the grid comes from the manifests' proofs, never from the files at hand, since
half a model would else count as whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import Grid, NamedShard, Role, absent_ranks, missing_shards
from ckptd.core.model.manifest import (
    Commit,
    ManifestFile,
    ManifestRef,
    NodeManifest,
    mark_of_manifest,
    name_in,
)
from ckptd.core.model.save import Order, agree, differs
from ckptd.core.model.swapped_tensors import BY_LOCAL_RANK, is_state_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BESIDE = (Role.SIDE, Role.EXTRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownManifest:
    """A node manifest as read from the remote: its key and the SHA-256 of its bytes."""

    key: str
    sha256: str
    manifest: NodeManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointers:
    """Hold the tags that `latest` and `latest_universal` should name; None: no such file."""

    latest: str | None
    latest_universal: str | None


def newest_revisions(manifests: Iterable[KnownManifest]) -> tuple[KnownManifest, ...]:
    """Return the newest revision of each node, sorted by key."""
    newest: dict[str, KnownManifest] = {}
    for known in manifests:
        held = newest.get(known.manifest.node_id)
        if held is None or (held.manifest.revision, held.key) < (known.manifest.revision, known.key):
            newest[known.manifest.node_id] = known
    return tuple(sorted(newest.values(), key=lambda known: known.key))


def conflict(
    ours: NodeManifest, others: Iterable[KnownManifest], *, save_spread_seconds: float
) -> str | None:
    """Why a generation cannot hold `ours` beside what it holds already; None: nothing speaks against it."""
    mark = mark_of_manifest(ours)
    for known in others:
        if known.manifest.job_id != ours.job_id:
            return f"{known.key} is of job {known.manifest.job_id}"
        if ours.form != "zero":
            reason = _other_source(ours, known.manifest)
        else:
            reason = differs(mark, mark_of_manifest(known.manifest), save_spread_seconds=save_spread_seconds)
        if reason is not None:
            return f"{known.manifest.node} uploaded another save: {reason}"
    return None


def _other_source(ours: NodeManifest, other: NodeManifest) -> str | None:
    """Two derived forms of one generation may differ in bytes (layout, alignment), never in their source."""
    if ours.source is None or other.source is None:
        return None
    theirs = dict(other.source.fingerprints)
    return next(
        (f"made from another {p}" for p, mark in ours.source.fingerprints if theirs.get(p, mark) != mark),
        None,
    )


def contradiction(manifests: Sequence[KnownManifest], *, save_spread_seconds: float) -> str | None:
    """Return why manifests cannot be committed together: two saves, or one key with two contents."""
    # of each two only to say which: of a thousand manifests there are half a million pairs
    pairs = [] if _are_of_one(manifests, save_spread_seconds) else enumerate(manifests)
    for index, known in pairs:
        reason = conflict(known.manifest, manifests[:index], save_spread_seconds=save_spread_seconds)
        if reason is not None:
            return reason
    contents: dict[str, str] = {}
    for known in manifests:
        for file in known.manifest.files:
            if contents.setdefault(file.key, file.checksums.crc64nvme) != file.checksums.crc64nvme:
                return f"{file.key} is listed with two contents"
    return _emptied_elsewhere(manifests)


def _emptied_elsewhere(manifests: Sequence[KnownManifest]) -> str | None:
    """Why a folder of swapped tensors, empty on one node, is not that of another with tensors in it."""
    empty = {p: k.manifest.node for k in manifests for p in k.manifest.empty_folders if is_state_folder(p)}
    for known in manifests if empty else ():
        for file in known.manifest.files:
            folder = file.path.rpartition("/")[0]
            if empty.get(folder, known.manifest.node) != known.manifest.node:
                return (
                    f"{folder} is empty on {empty[folder]} and not on {known.manifest.node}: {BY_LOCAL_RANK}"
                )
    return None


def _are_of_one(manifests: Sequence[KnownManifest], save_spread_seconds: float) -> bool:
    """All are ZeRO forms of one job and no two of them differ."""
    kinds = {(known.manifest.job_id, known.manifest.form) for known in manifests}
    marks = [mark_of_manifest(known.manifest) for known in manifests]
    is_one_kind = len(kinds) == 1 and all(form == "zero" for _, form in kinds)
    return is_one_kind and agree(marks, save_spread_seconds=save_spread_seconds)


def merged_grid(manifests: Sequence[KnownManifest]) -> Grid:
    """The grid that the manifests prove together: layers and experts only ever raise the expectation."""
    grids = [known.manifest.grid for known in manifests]
    layers = sorted({layer for grid in grids for layer in grid.layers})
    width = max(len(grid.experts) for grid in grids)
    experts = tuple(max((g.experts[i] for g in grids if i < len(g.experts)), default=0) for i in range(width))
    return grids[0].model_copy(update={"layers": tuple(layers), "experts": experts})


def missing(manifests: Sequence[KnownManifest], form: str) -> tuple[str, ...]:
    """Return shards of the proven grid that no manifest lists; a derived form is whole in one manifest."""
    return missing_shards(merged_grid(manifests), _present(manifests)) if form == "zero" else ()


def absent(manifests: Sequence[KnownManifest]) -> tuple[NamedShard, ...]:
    """Return the missing shards of ranks and the missing model states, as data."""
    return absent_ranks(merged_grid(manifests), _present(manifests))


def _present(manifests: Sequence[KnownManifest]) -> frozenset[NamedShard]:
    return frozenset(
        NamedShard(role=file.role, shard=file.shard)
        for known in manifests
        for file in known.manifest.files
        if file.role not in _BESIDE
    )


def missing_words(missing: tuple[str, ...], members: Iterable[KnownManifest]) -> str:
    """Word which shards a node waits for, and which nodes uploaded their part."""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    there = ", ".join(sorted({known.manifest.node for known in members}))
    return f"waiting for {', '.join(missing[:3])}{more}; so far only {there} uploaded its part"


def objects_of(manifests: Iterable[NodeManifest]) -> dict[str, ManifestFile]:
    """Return the distinct objects that manifests list, by key."""
    return {file.key: file for manifest in manifests for file in manifest.files}


def fingerprints_of(manifests: Iterable[NodeManifest]) -> tuple[tuple[str, str], ...]:
    """Return (path, fingerprint) of every file, sorted: what a tombstone remembers.

    Where a node took another's replica for its own, or left it to it, that of the tensors too: its pickle may
    differ.
    """
    manifests = tuple(manifests)
    files = [file for manifest in manifests for file in manifest.files]
    taken = {(f.path, f.tensor_fingerprint) for f in files if f.replica_of and f.tensor_fingerprint}
    taken |= {left for manifest in manifests for left in manifest.replicas}
    return tuple(sorted({(file.path, file.fingerprint) for file in files} | taken))


def build_commit(
    manifests: Sequence[KnownManifest], *, committed_by: str, committed_at: str, config_digest: str
) -> Commit:
    """The COMMIT over manifests that cover their grid; the highest branch among them counts (§3 *Order*)."""
    members = [known.manifest for known in manifests]
    leader = max(members, key=lambda m: (m.branch, m.save_seq))
    objects = objects_of(members)
    digests = {member.config_digest for member in members}
    by_rank = sorted(members, key=_lowest_rank)
    return Commit(
        job_id=leader.job_id,
        tag=leader.tag,
        generation=leader.generation,
        form=leader.form,
        folder=leader.folder,
        branch=leader.branch,
        step=leader.step,
        save_seq=leader.save_seq,
        run_id=leader.run_id,
        grid=merged_grid(manifests),
        bytes=sum(file.bytes for file in objects.values()),
        files=len(objects),
        manifests=tuple(ManifestRef(key=known.key, sha256=known.sha256) for known in manifests),
        committed_by=committed_by,
        committed_at=committed_at,
        # nodes that disagree on what is kept let nothing go until one COMMIT finds them agreed (H12)
        config_digest=config_digest if digests <= {config_digest} else "",
        best=next((m.best for m in by_rank if m.best is not None), None),
        best_checkpoint=next((m.best_checkpoint for m in by_rank if m.best_checkpoint), None),
    )


def _lowest_rank(manifest: NodeManifest) -> int:
    return min((file.shard.d for file in manifest.files if file.shard.d is not None), default=1 << 30)


def order_of(commit: Commit) -> Order:
    """Return (branch, step, save_seq) of a COMMIT."""
    return Order(commit.branch, commit.step, commit.save_seq)


def is_after(written_ns: int, commit: Commit, save_spread_seconds: float) -> bool:
    """Tell whether that time is later than the save of a COMMIT, however far clocks that agree may differ.

    Its manifests' names tell its save window; older ones do not, and what was committed was saved by then.
    """
    names = [name for ref in commit.manifests if (name := name_in(ref.key)) is not None]
    until = max((name.last_seconds for name in names), default=None)
    until_seconds = commit.committed_at_seconds if until is None else until + 1  # names have whole seconds
    return until_seconds is not None and written_ns > (until_seconds + save_spread_seconds) * 1e9


def choose_pointers(commits: Iterable[Commit]) -> Pointers:
    """Choose the tags for the pointer files from the COMMITs that count: not disputed, not being retired."""
    newest: dict[str, Commit] = {}
    for commit in commits:
        if commit.grid.is_model_only:
            continue
        held = newest.get(commit.form)
        if held is None or (order_of(held), held.generation) < (order_of(commit), commit.generation):
            newest[commit.form] = commit
    zero, universal = newest.get("zero"), newest.get("universal")
    return Pointers(
        latest=zero.folder if zero else None,
        latest_universal=universal.folder if universal else None,
    )
