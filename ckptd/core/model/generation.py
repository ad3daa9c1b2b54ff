"""Choose the generation of its tag that a save belongs to (docs/design.md §3 *Generations*).

A generation is bound to one save: a node joins the highest open one that holds manifests of no other save, or
opens the next after all known ones. Not simply the highest: two nodes with two saves would overtake each
other for ever, each opening one more. Pure, and decided anew before each attempt, so that a lost
journal costs one listing and not one uploaded byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import mark_of_manifest, named_conflict
from ckptd.core.model.runs import run_of
from ckptd.core.model.save import differs, mark_of_save

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckptd.core.model.manifest import ManifestName, NodeManifest, Tombstone
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
