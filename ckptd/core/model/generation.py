"""Choose the generation of its tag for a save, and decide when it is committed (docs/design.md §3, §5).

A generation is bound to one save: a node joins the highest open one that holds manifests of no other save, or
opens the next after all known ones. Not simply the highest: two nodes with two saves would overtake each
other for ever, each opening one more. Pure, and decided anew before each attempt, so that a lost
journal costs one listing and not one uploaded byte.

Every node that sees the same documents decides the same, so no membership and no leader is needed. Tests of
"one save" only veto; the grid comes from the manifests' proofs, never from the files at hand, since half a
model would else count as whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.names import DESCRIPTION
from ckptd.core.model.layouts import LATEST_UNIVERSAL, Grid, NamedShard, Role, absent_ranks, missing_shards
from ckptd.core.model.listing import OURS
from ckptd.core.model.manifest import (
    Commit,
    ManifestFile,
    ManifestRef,
    NodeManifest,
    mark_of_manifest,
    name_in,
    named_conflict,
)
from ckptd.core.model.other_layouts import below
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.model.runs import run_of
from ckptd.core.model.save import Order, agree, differs, mark_of_save
from ckptd.core.model.swap_paths import BY_LOCAL_RANK, is_state_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ckptd.core.model.manifest import ManifestName, Tombstone
    from ckptd.core.model.save import SealedFile, SealedSave


_BESIDE = (Role.SIDE, Role.EXTRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenManifest:
    """A node manifest of the tag; `committed`: a COMMIT lists its digest."""

    generation: int
    form: str
    manifest: NodeManifest
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCommit:
    """A COMMIT of the tag, disputed or not."""

    generation: int
    form: str
    key: str
    sha256: str
    disputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGeneration:
    """Ship the save as this generation."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyCommitted:
    """A COMMIT lists every shard of the save; `unlisted`: files beside the shards that it does not list."""

    generation: int
    commit_key: str
    commit_sha256: str
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRetired:
    """Answer that retention deleted this very save: it is never uploaded again."""

    generation: int


GenerationChoice = JoinGeneration | AlreadyCommitted | GenerationRetired


def choose_generation(
    save: SealedSave,
    job_id: str,
    *,
    manifests: Sequence[SeenManifest],
    commits: Sequence[SeenCommit],
    tombstones: Sequence[Tombstone],
    save_spread_seconds: float,
    named: Sequence[tuple[int, ManifestName]] = (),
    unreadable: Collection[int] = (),
    run_id: str | None = None,
) -> GenerationChoice:
    """Choose the generation of `save`, given all that the remote holds of its tag (form zero counts).

    Generations are numbered over all runs. What another run than `run_id` committed, lists or had removed is
    another save, were it the same bytes (None: there is one run).

    `named`: (generation, name) of manifests that were not read; `unreadable`: generations whose COMMIT or
    tombstone cannot be read. They are taken, by whom nobody knows.
    """
    manifests = [seen for seen in manifests if seen.form == "zero"]
    commits = [seen for seen in commits if seen.form == "zero"]
    tombstones = [stone for stone in tombstones if stone.form == "zero" and stone.tag == save.tag]
    own = [seen for seen in manifests if _is_of_run(seen.manifest, job_id, run_id)]
    already = _already(save, job_id, own, commits)
    if already is not None:
        return already
    for stone in (one for one in tombstones if _is_of_run(one, job_id, run_id)):
        gone = set(stone.fingerprints)
        if gone and all((p, mark) in gone or (p, tensors) in gone for p, mark, tensors in _shards(save)):
            return GenerationRetired(generation=stone.generation)
    taken = {seen.generation for seen in commits} | {stone.generation for stone in tombstones}
    taken |= set(unreadable)
    known = taken | {seen.generation for seen in manifests} | {generation for generation, _ in named}
    if not known:
        return JoinGeneration(generation=1)
    fitting = [
        generation
        for generation in known - taken
        if not _holds_another(
            save,
            job_id,
            [seen.manifest for seen in manifests if seen.generation == generation],
            [name for g, name in named if g == generation],
            save_spread_seconds,
            run_id,
        )
    ]
    return JoinGeneration(generation=max(fitting, default=max(known) + 1))


def _is_of_run(document: NodeManifest | Tombstone, job_id: str, run_id: str | None) -> bool:
    return run_id is None or run_of(document, job_id) == run_id


def choose_derived(
    save: SealedSave,
    form: str,
    *,
    manifests: Sequence[SeenManifest],
    commits: Sequence[SeenCommit],
    tombstones: Sequence[Tombstone],
    unreadable: Collection[int] = (),
    job_id: str = "",
    run_id: str | None = None,
) -> GenerationChoice:
    """Choose the generation of a derived form in a remote that takes no ZeRO form.

    All forms of a save share one generation there as well: the source recorded in each form tells which save
    it belongs to. A tombstone of such a form knows its order alone.
    """
    stones = [stone for stone in tombstones if stone.tag == save.tag]
    live = {seen.generation: seen for seen in commits if seen.form == form and not seen.disputed}
    mine = [_is_of(save, m.manifest) and _is_of_run(m.manifest, job_id, run_id) for m in manifests]
    ours = [seen for seen, is_mine in zip(manifests, mine, strict=True) if is_mine]
    for seen in ours:
        if seen.form == form and seen.committed and seen.generation in live:
            commit = live[seen.generation]
            return AlreadyCommitted(
                generation=commit.generation, commit_key=commit.key, commit_sha256=commit.sha256
            )
    for stone in stones:
        is_same = (stone.branch, stone.step, stone.save_seq) == (save.branch, save.step, save.save_seq)
        if is_same and stone.form == form and _is_of_run(stone, job_id, run_id):
            return GenerationRetired(generation=stone.generation)
    taken = {seen.generation for seen in commits if seen.form == form}
    taken |= {stone.generation for stone in stones if stone.form == form}
    taken |= set(unreadable)
    others = {seen.generation for seen, is_mine in zip(manifests, mine, strict=True) if not is_mine}
    fitting = {seen.generation for seen in ours} - taken - others
    known = {seen.generation for seen in manifests} | {seen.generation for seen in commits}
    known |= {stone.generation for stone in stones} | taken
    return JoinGeneration(generation=max(fitting, default=max(known, default=0) + 1))


def _is_of(save: SealedSave, manifest: NodeManifest) -> bool:
    return manifest.source is not None and manifest.source.fingerprints == save.fingerprints


def _already(
    save: SealedSave, job_id: str, manifests: Sequence[SeenManifest], commits: Sequence[SeenCommit]
) -> AlreadyCommitted | None:
    for commit in sorted(commits, key=lambda seen: -seen.generation):
        if commit.disputed:
            continue
        listed = [
            file
            for seen in manifests
            if seen.generation == commit.generation and seen.committed and seen.manifest.job_id == job_id
            for file in seen.manifest.files
        ]
        rows = {(file.path, file.bytes, file.fingerprint) for file in listed}
        taken = {(file.path, file.tensor_fingerprint) for file in listed if file.replica_of is not None}
        # what our own committed manifest left to its owner: the COMMIT holds it, with those tensors
        taken |= {
            left
            for seen in manifests
            if seen.generation == commit.generation and seen.committed and seen.manifest.job_id == job_id
            for left in seen.manifest.replicas
        }
        absent = [
            file
            for file in save.files
            if _row(file) not in rows
            and (file.role in _BESIDE or (file.path, file.tensor_fingerprint or "") not in taken)
        ]
        shards = [file for file in save.files if file.role not in _BESIDE]
        if shards and not any(file.role not in _BESIDE for file in absent):
            return AlreadyCommitted(
                generation=commit.generation,
                commit_key=commit.key,
                commit_sha256=commit.sha256,
                unlisted=tuple(file.path for file in absent),
            )
    return None


def _row(file: SealedFile) -> tuple[str, int, str]:
    return file.path, file.identity.size_bytes, file.fingerprint


def _shards(save: SealedSave) -> list[tuple[str, str, str]]:
    """Return (path, fingerprint, tensor fingerprint) of the shards; of a model alone, of all."""
    rows = [file for file in save.files if file.role not in _BESIDE] or save.files
    return [(file.path, file.fingerprint, file.tensor_fingerprint or file.fingerprint) for file in rows]


def _holds_another(
    save: SealedSave,
    job_id: str,
    held: Sequence[NodeManifest],
    named: Sequence[ManifestName],
    save_spread_seconds: float,
    run_id: str | None,
) -> bool:
    mark = mark_of_save(save)
    if named_conflict(mark, named, save_spread_seconds=save_spread_seconds) is not None:
        return True
    return any(
        manifest.job_id != job_id
        or not _is_of_run(manifest, job_id, run_id)
        or differs(mark, mark_of_manifest(manifest), save_spread_seconds=save_spread_seconds) is not None
        for manifest in held
    )


# --- Coverage: when manifests of one save make a COMMIT -----------------------------------------------


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
    """Return why a generation cannot hold `ours` beside what it holds already; None: it can."""
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
    """Return why a folder of swapped tensors, empty on one node, differs from another node's with tensors in
    it."""
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
    stages = max(len(grid.stage_experts) for grid in grids)
    of_stages = tuple(
        max((g.stage_experts[i] for g in grids if i < len(g.stage_experts)), key=len) for i in range(stages)
    )
    more = {"stage_experts": of_stages, "experts_split": any(g.experts_split for g in grids)}
    return grids[0].model_copy(update={"layers": tuple(layers), "experts": experts, **more})


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


def files_here(tag: str, form: str, listed: Iterable[ManifestFile]) -> dict[str, ManifestFile]:
    """Return path below save_dir → file, of those that lie in the form's own folder on a node that has it.

    What lies in save_dir itself belongs to no checkpoint alone, and the pointer beside a universal form lies
    in its remote only.
    """
    found = [file for file in listed if file.role is not Role.EXTRA]
    if form == ZERO:
        return {below(tag, file.path): file for file in found}
    heads = [f.path.removesuffix(DESCRIPTION) for f in found if f.path.rpartition("/")[2] == DESCRIPTION]
    if form != UNIVERSAL or len(heads) != 1:
        return {}
    mine = (file for file in found if file.path.startswith(heads[0]) and file.path != LATEST_UNIVERSAL)
    return {f"{OURS}/derived/{form}/{tag}/{file.path.removeprefix(heads[0])}": file for file in mine}


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
