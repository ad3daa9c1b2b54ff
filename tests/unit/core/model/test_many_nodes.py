"""What nodes of one job decide alike: names of manifests, whose turn it is, configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.model.generation import (
    AlreadyCommitted,
    GenerationRetired,
    KnownManifest,
    SeenCommit,
    SeenManifest,
    build_commit,
    choose_generation,
    fingerprints_of,
)
from ckptd.core.model.layouts import Grid, Role, ShardKey
from ckptd.core.model.manifest import (
    Checksums,
    ManifestFile,
    NodeManifest,
    Tombstone,
    absent_by_names,
    commit_key,
    manifest_key,
    mark_of_manifest,
    may_cover,
    name_in,
    named_conflict,
    node_in,
)
from ckptd.core.model.save import SaveWindow, SealedSave
from ckptd.core.policy.actions import DeleteLocal, DeleteRemote
from ckptd.core.policy.planner import plan
from ckptd.core.policy.remote import TURN_SECONDS, is_elected_deleter
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.view import JobView, RemoteCommit
from tests.support.core_views import NAS, job_view, save_view, sealed

SHA = "ab" * 32
MODEL = "mp_rank_00_model_states.pt"


def manifest(node: str, ranks: tuple[int, ...], **changes: Any) -> NodeManifest:
    """Of a grid of four ranks."""
    files = tuple(
        ManifestFile(
            path=f"{d}",
            key=f"s/{d}",
            bytes=1,
            role=Role.OPTIM,
            shard=ShardKey(d=d, mm=0),
            checksums=Checksums(crc64nvme="0"),
            fingerprint=f"f{d}",
            proof="read-back",
        )
        for d in ranks
    )
    made = NodeManifest(
        job_id="j",
        tag="s",
        generation=1,
        form="zero",
        folder="s",
        node=node,
        node_id=f"id-{node}",
        ckptd_version="0",
        config_digest="c",
        branch=1,
        step=5,
        save_seq=1,
        save_window=SaveWindow(first=1000 * 10**9, last=1003 * 10**9),
        grid=Grid(dp=4, mm_count=1, zero_stage=2),
        files=files,
    )
    return made.model_copy(update=changes)


# --- names -------------------------------------------------------------------------------------------------


def test_a_name_says_what_a_manifest_lists() -> None:
    key = manifest_key(manifest("node~7", (2, 1)), SHA)
    name = name_in(key)
    assert name is not None
    assert (name.node, name.low, name.have, name.want) == ("node~7", 1, 2, 4)
    assert (name.first_seconds, name.last_seconds) == (1000, 1003)
    assert node_in(key) == "node~7"
    # what other releases rest on: the node comes first, the digest last
    assert key.rpartition("/")[2].split("~")[0] == "node%7E7"
    assert key.endswith(f"~{SHA[:12]}.json")


def test_names_without_words_are_no_names() -> None:
    derived = manifest("n", (0,), form="universal")
    assert name_in(manifest_key(derived, SHA)) is None
    assert node_in(manifest_key(derived, SHA)) == "n"
    for key in ("_ckptd/nodes/s~g1~zero/n~abcdefabcdef.json", "n~d0.n1of2~abc.json", "n", ""):
        assert name_in(key) is None
    assert name_in(f"n~d{'9' * 40}.n1of2.m00000000.t1_2~abc.json") is None


def test_what_may_cover_the_grid_is_worth_reading() -> None:
    def names(*parts: tuple[str, tuple[int, ...]], **changes: Any) -> list[Any]:
        return [name_in(manifest_key(manifest(node, ranks, **changes), SHA)) for node, ranks in parts]

    assert not may_cover(names(("a", (0,)), ("b", (1, 2))))
    assert may_cover(names(("a", (0,)), ("b", (1, 2, 3))))
    # a node counts with the most that any of its manifests lists; two saves never add up
    assert not may_cover(names(("a", (0,)), ("a", (0, 1)), ("b", (2,))))
    assert not may_cover([*names(("a", (0, 1))), *names(("b", (2, 3)), step=6)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"step": 6}, "another save"),
        ({"grid": Grid(dp=8, mm_count=1, zero_stage=2)}, "another save"),
        ({"save_window": SaveWindow(first=1063 * 10**9, last=1063 * 10**9)}, None),
        ({"save_window": SaveWindow(first=1065 * 10**9, last=1065 * 10**9)}, "62 s apart"),
        ({"save_window": SaveWindow(first=0, last=900 * 10**9)}, "100 s apart"),
    ],
)
def test_a_name_vetoes_another_save(changes: dict[str, Any], words: str | None) -> None:
    name = name_in(manifest_key(manifest("b", (1,), **changes), SHA))
    assert name is not None
    found = named_conflict(mark_of_manifest(manifest("a", (0,))), [name], save_spread_seconds=60)
    assert (found is None) if words is None else (found is not None and words in found)


PIPELINE = Grid(dp=10, mm_count=2, tp=1, pp=2, zero_stage=1)


def stage_part(node: str, cells: tuple[tuple[int, int], ...], grid: Grid = PIPELINE) -> NodeManifest:
    """A node of a pipeline of two stages of ten ranks."""
    made = manifest(node, tuple(d for d, _ in cells), grid=grid)
    rows = zip(made.files, cells, strict=True)
    files = tuple(f.model_copy(update={"shard": ShardKey(d=d, mm=mm)}) for f, (d, mm) in rows)
    return made.model_copy(update={"files": files})


def of_pipeline(grid: Grid = PIPELINE) -> list[NodeManifest]:
    """Ten nodes of two ranks each."""
    return [
        stage_part(f"s{stage}n{n}", ((2 * n, stage), (2 * n + 1, stage)), grid)
        for stage in (0, 1)
        for n in range(5)
    ]


def absent(ours: NodeManifest, others: list[NodeManifest]) -> list[tuple[int | None, int | None]]:
    """What lacks as the names of others tell."""
    names = [name for m in others if (name := name_in(manifest_key(m, SHA))) is not None]
    assert len(names) == len(others), "a name that tells nothing is never counted (may_cover)"
    return [(s.shard.d, s.shard.mm) for s in absent_by_names(names, [ours])]


def test_names_tell_which_stage_of_a_pipeline_is_missing() -> None:
    """They count ranks of the run: several nodes have the same data-parallel ranks."""
    first, *rest = of_pipeline()
    assert absent(first, rest[:-1]) == [(8, 1), (9, 1)]
    assert absent(first, rest) == []
    assert absent(rest[-1], rest[:-1]) == [(0, 0), (1, 0)]
    # as what it leaves to its owner is: most likely with rank 0
    names = [name_in(manifest_key(m, SHA)) for m in (first, *rest)]
    assert [name.low for name in names if name] == list(range(0, 20, 2))


def test_names_that_do_not_tell_name_nobody() -> None:
    """Of a grid whose degrees are not known, and of ranks that do not follow each other."""
    unknown = of_pipeline(PIPELINE.model_copy(update={"tp": None, "pp": None}))
    assert absent(unknown[0], unknown[1:-1]) == []
    first, *rest = of_pipeline()
    assert absent(first, [*rest[:-2], stage_part("odd", ((6, 1), (8, 1)))]) == []
    # whatever somebody puts there
    huge = "_ckptd/nodes/s~g1~zero/n~d999999999999.n999999999999of20.m00000000.t1_2~abcdefabcdef.json"
    name = name_in(huge)
    assert name is not None and absent_by_names([name], [first]) == ()


# --- replicas with another pickle --------------------------------------------------------------------------


def with_replica(save: SealedSave) -> tuple[SealedSave, NodeManifest]:
    """A save whose model states another node sent, and the manifest that says so."""
    shard = save.files[0]
    ours = shard.model_copy(
        update={"path": MODEL, "role": Role.MODEL, "fingerprint": "our pickle", "tensor_fingerprint": "same"}
    )
    rows = tuple(
        ManifestFile(
            path=file.path,
            key=f"t/{file.path}",
            bytes=file.identity.size_bytes,
            role=file.role,
            checksums=Checksums(crc64nvme="0"),
            fingerprint=file.fingerprint if file is shard else "their pickle",
            tensor_fingerprint=file.tensor_fingerprint,
            replica_of=None if file is shard else "n0",
            proof="read-back",
        )
        for file in (shard, ours)
    )
    return save.model_copy(update={"files": (shard, ours)}), manifest("n1", (), tag=save.tag, files=rows)


def test_a_replica_that_was_taken_over_is_committed_already() -> None:
    """It once was uploaded again as a generation that nobody else joined."""
    save, listed = with_replica(sealed(5))
    seen = SeenManifest(generation=1, form="zero", manifest=listed, committed=True)
    made = SeenCommit(generation=1, form="zero", key=commit_key(save.tag, 1, "zero"), sha256="c")
    found = choose_generation(
        save, "j", manifests=[seen], commits=[made], tombstones=(), save_spread_seconds=60
    )
    assert isinstance(found, AlreadyCommitted)
    # tensors alone are not enough where no node took another's for its own: it may have been saved again
    own = listed.model_copy(
        update={"files": tuple(f.model_copy(update={"replica_of": None}) for f in listed.files)}
    )
    again = replace(seen, manifest=own)
    found = choose_generation(
        save, "j", manifests=[again], commits=[made], tombstones=(), save_spread_seconds=60
    )
    assert not isinstance(found, AlreadyCommitted)


def test_and_known_by_its_tombstone() -> None:
    save, listed = with_replica(sealed(5))
    stone = Tombstone(
        tag=save.tag,
        generation=1,
        form="zero",
        branch=1,
        step=5,
        save_seq=1,
        reason="",
        commit_sha256="c",
        fingerprints=fingerprints_of([listed]),
    )
    found = choose_generation(save, "j", manifests=(), commits=(), tombstones=[stone], save_spread_seconds=60)
    assert isinstance(found, GenerationRetired)


# --- configurations and turns ------------------------------------------------------------------------------


def several(view: JobView, digest: str) -> JobView:
    """All COMMITs are of two nodes that had this configuration."""
    commits = tuple(
        replace(c, config_digest=digest, nodes=frozenset({"a", "b"})) for c in view.remotes[0].commits
    )
    remote = replace(view.remotes[0], commits=commits, retention=RetentionPolicy(save_total_limit=1))
    return replace(view, remotes=(remote,), config_digest="ours")


def kinds(view: JobView) -> set[type]:
    return {type(action) for action in plan(view).actions}


def test_nodes_that_are_configured_differently_delete_nothing() -> None:
    gone = save_view(9, sealed(1), is_present=False)
    view = job_view([save_view(1, sealed(5)), save_view(2, sealed(6)), save_view(3, sealed(7)), gone])
    assert {DeleteLocal, DeleteRemote} <= kinds(several(view, "ours"))
    assert not {DeleteLocal, DeleteRemote} & kinds(several(view, "theirs"))
    assert not {DeleteLocal, DeleteRemote} & kinds(several(view, ""))


def test_a_commit_of_nodes_that_disagree_says_so() -> None:
    def known(node: str, digest: str) -> KnownManifest:
        made = manifest(node, (0,), config_digest=digest)
        return KnownManifest(key=manifest_key(made, SHA), sha256=SHA, manifest=made)

    def digest(*members: KnownManifest) -> str:
        made = build_commit(members, committed_by="a", committed_at="then", config_digest="c")
        return made.config_digest

    assert digest(known("a", "c"), known("b", "c")) == "c"
    assert digest(known("a", "c"), known("b", "other")) == ""


def test_one_node_at_a_time_lets_a_commit_go() -> None:
    nodes = frozenset(f"n{i}" for i in range(8))
    commit = replace(job_view([save_view(1, sealed(5))]).remotes[0].commits[0], nodes=nodes)

    def willing(commit: RemoteCommit, waited_seconds: float) -> set[str]:
        found = set()
        for node in [*nodes, "x"]:
            view = replace(
                job_view([]), node=node, due_since_seconds={(NAS, commit.key): 100.0 - waited_seconds}
            )
            found |= {node} if is_elected_deleter(view, NAS, commit) else set()
        return found

    # what the others let go of their disks needs that COMMIT still
    assert willing(commit, TURN_SECONDS - 1) == set()
    # who holds nothing of it is drawn among them, and may stand before anybody
    assert 1 <= len(willing(commit, 2 * TURN_SECONDS)) <= 3
    assert willing(commit, 10 * TURN_SECONDS) == {*nodes, "x"}
    drawn = {min(willing(replace(commit, sha256=f"{i}"), 4 * TURN_SECONDS)) for i in range(40)}
    assert len(drawn) > 2, "the same node every time"
    # of one node alone there is nobody to wait for
    assert is_elected_deleter(replace(job_view([]), node="x"), NAS, replace(commit, nodes=frozenset({"n0"})))
