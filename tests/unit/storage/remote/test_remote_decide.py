"""The pure decisions behind a remote: generations, coverage, pointers (docs/design.md §3, §5)."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model import generation
from ckptd.core.model.generation import (
    AlreadyCommitted,
    GenerationRetired,
    JoinGeneration,
    KnownManifest,
    Pointers,
    SeenCommit,
    SeenManifest,
    choose_generation,
)
from ckptd.core.model.layouts import Grid, Role, ShardKey
from ckptd.core.model.manifest import (
    Checksums,
    DerivedSource,
    ManifestFile,
    NodeManifest,
    Tombstone,
    sha256_of,
    to_bytes,
)
from ckptd.core.model.save import Best, SaveWindow, agree, differs, mark_of_save
from tests.stores.scene import JOB_ID, MODEL, OPTIM, Node

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.model.generation import GenerationChoice
    from ckptd.core.model.save import SealedSave


@pytest.fixture
def save(tmp_path: Path) -> SealedSave:
    node = Node(tmp_path / "save")
    node.write_all()
    return node.sealed()


def manifest_of(save: SealedSave, generation: int = 1, **more: object) -> NodeManifest:
    return NodeManifest(
        job_id=JOB_ID,
        tag=save.tag,
        generation=generation,
        form="zero",
        folder=save.tag,
        node="n0",
        node_id="id-n0",
        ckptd_version="0",
        config_digest="c",
        branch=save.branch,
        step=save.step,
        save_seq=save.save_seq,
        save_window=save.window,
        grid=save.grid,
        files=tuple(
            ManifestFile(
                path=f.path,
                key=f"{save.tag}/{f.path}",
                bytes=f.identity.size_bytes,
                role=f.role,
                shard=f.shard,
                checksums=Checksums(crc64nvme="0" * 16),
                fingerprint=f.fingerprint,
                proof="read-back",
            )
            for f in save.files
        ),
    ).model_copy(update=more)


def known(manifest: NodeManifest) -> KnownManifest:
    digest = sha256_of(to_bytes(manifest))
    return KnownManifest(key=f"{manifest.node}~{digest[:12]}", sha256=digest, manifest=manifest)


def seen(manifest: NodeManifest, *, committed: bool) -> SeenManifest:
    return SeenManifest(
        generation=manifest.generation, form=manifest.form, manifest=manifest, committed=committed
    )


def commit(generation: int, *, disputed: bool = False, form: str = "zero") -> SeenCommit:
    return SeenCommit(generation=generation, form=form, key=f"g{generation}", sha256="s", disputed=disputed)


def choose(
    save: SealedSave,
    manifests: list[SeenManifest] | None = None,
    commits: list[SeenCommit] | None = None,
    tombstones: list[Tombstone] | None = None,
    unreadable: tuple[int, ...] = (),
) -> GenerationChoice:
    return choose_generation(
        save,
        JOB_ID,
        manifests=manifests or [],
        commits=commits or [],
        tombstones=tombstones or [],
        save_spread_seconds=60,
        unreadable=unreadable,
    )


def other(save: SealedSave, generation: int = 1, **more: object) -> NodeManifest:
    """A manifest of another save of the tag."""
    window = SaveWindow(first=10**15, last=10**15)
    return manifest_of(save, generation, save_window=window, **more)


class TestGeneration:
    def test_nothing_known_is_the_first(self, save: SealedSave) -> None:
        assert choose(save) == JoinGeneration(generation=1)

    def test_one_whose_commit_cannot_be_read_is_taken(self, save: SealedSave) -> None:
        """By whom nobody knows; the manifests there may be this very save's."""
        mine = [seen(manifest_of(save, 1), committed=False)]
        assert choose(save, unreadable=(1,)) == JoinGeneration(generation=2)
        assert choose(save, mine, unreadable=(1,)) == JoinGeneration(generation=2)
        assert choose(save, mine, unreadable=(3,)) == JoinGeneration(generation=1)
        assert choose(save, mine, unreadable=(1, 2)) == JoinGeneration(generation=3)

    def test_an_uncommitted_one_of_this_save_is_joined(self, save: SealedSave) -> None:
        assert choose(save, [seen(manifest_of(save, 3), committed=False)]) == JoinGeneration(generation=3)

    def test_one_that_holds_another_save_is_not(self, save: SealedSave) -> None:
        assert choose(save, [seen(other(save), committed=False)]) == JoinGeneration(generation=2)
        foreign = manifest_of(save, job_id="x")
        assert choose(save, [seen(foreign, committed=False)]) == JoinGeneration(generation=2)

    def test_an_open_one_of_this_save_is_joined_whatever_came_after_it(self, save: SealedSave) -> None:
        """Opening one more each time, two nodes with two saves passed each other for ever."""
        mine, foreign = manifest_of(save, 1), other(save).model_copy(update={"generation": 2})
        assert choose(save, [seen(mine, committed=False), seen(foreign, committed=False)]) == JoinGeneration(
            generation=1
        )
        newer = manifest_of(save, 3)
        both = [seen(mine, committed=False), seen(newer, committed=False)]
        assert choose(save, [*both, seen(foreign, committed=False)]) == JoinGeneration(generation=3), (
            "all meet in one"
        )

    def test_committed_with_our_bytes_is_already_there(self, save: SealedSave) -> None:
        mine = seen(manifest_of(save), committed=True)
        assert choose(save, [mine], [commit(1)]) == AlreadyCommitted(
            generation=1, commit_key="g1", commit_sha256="s", unlisted=()
        )

    def test_a_side_file_written_later_does_not_send_it_all_again(self, save: SealedSave) -> None:
        files = [f for f in manifest_of(save).files if f.role is not Role.SIDE]
        mine = seen(manifest_of(save, files=tuple(files)), committed=True)
        answer = choose(save, [mine], [commit(1)])
        assert isinstance(answer, AlreadyCommitted)
        assert answer.unlisted == ("zero_to_fp32.py",)

    def test_a_side_file_without_tensors_is_told_by_its_content(self, save: SealedSave) -> None:
        """Archives of no storage have one tensor fingerprint, whatever their pickles say."""
        side = next(f for f in manifest_of(save).files if f.role is Role.SIDE)
        update = {"fingerprint": "another", "tensor_fingerprint": "none", "replica_of": "n0"}
        files = [f.model_copy(update=update) if f == side else f for f in manifest_of(save).files]
        mine = seen(manifest_of(save, files=tuple(files)), committed=True)
        twin = [
            f.model_copy(update={"tensor_fingerprint": "none"}) if f.path == side.path else f
            for f in save.files
        ]
        answer = choose(save.model_copy(update={"files": tuple(twin)}), [mine], [commit(1)])
        assert isinstance(answer, AlreadyCommitted)
        assert answer.unlisted == (side.path,)

    def test_committed_with_other_bytes_opens_the_next(self, save: SealedSave) -> None:
        assert choose(save, [seen(other(save, files=()), committed=True)], [commit(1)]) == JoinGeneration(
            generation=2
        )

    def test_a_listing_that_no_commit_quotes_does_not_count(self, save: SealedSave) -> None:
        assert choose(save, [seen(manifest_of(save), committed=False)], [commit(1)]) == JoinGeneration(
            generation=2
        )

    def test_a_disputed_commit_does_not_exist_but_its_number_is_used_up(self, save: SealedSave) -> None:
        mine = seen(manifest_of(save), committed=True)
        assert choose(save, [mine], [commit(1, disputed=True)]) == JoinGeneration(generation=2)

    def test_what_was_retired_is_never_sent_again(self, save: SealedSave) -> None:
        stone = Tombstone(
            tag=save.tag,
            generation=4,
            form="zero",
            branch=0,
            step=5,
            save_seq=0,
            reason="keep_last",
            commit_sha256="s",
            fingerprints=save.fingerprints,
        )
        assert choose(save, tombstones=[stone]) == GenerationRetired(generation=4)
        foreign = stone.model_copy(update={"fingerprints": (("x", "y"),)})
        assert choose(save, tombstones=[foreign]) == JoinGeneration(generation=5)

    def test_derived_forms_do_not_count(self, save: SealedSave) -> None:
        derived = manifest_of(save, 5, form="universal")
        assert choose(save, [seen(derived, committed=True)], [commit(5, form="universal")]) == JoinGeneration(
            generation=1
        )


class TestCoverage:
    def halves(self, save: SealedSave) -> tuple[NodeManifest, NodeManifest]:
        whole = manifest_of(save)
        first = [f for f in whole.files if f.path != OPTIM.format(d=1)]
        second = [f for f in whole.files if f.path == OPTIM.format(d=1)]
        return (
            whole.model_copy(update={"files": tuple(first)}),
            whole.model_copy(update={"files": tuple(second), "node": "n1", "node_id": "id-n1"}),
        )

    def test_the_union_covers_or_names_what_is_missing(self, save: SealedSave) -> None:
        first, second = self.halves(save)
        assert generation.missing([known(first), known(second)], "zero") == ()
        (words,) = generation.missing([known(first)], "zero")
        assert OPTIM.format(d=1).removeprefix("bf16_") in words
        assert len(generation.missing([known(second)], "zero")) == 2

    def test_layers_and_experts_only_raise_the_expectation(self, save: SealedSave) -> None:
        first, second = self.halves(save)
        few = save.grid.model_copy(update={"layers": (0,), "experts": (1,)})
        more = save.grid.model_copy(update={"layers": (0, 1), "experts": (2, 1)})
        both = [
            known(first.model_copy(update={"grid": few})),
            known(second.model_copy(update={"grid": more})),
        ]
        assert generation.merged_grid(both).layers == (0, 1)
        assert generation.merged_grid(both).experts == (2, 1)
        assert any("layer_01" in words for words in generation.missing(both, "zero"))

    def test_a_derived_form_is_whole_in_one_manifest(self, save: SealedSave) -> None:
        assert generation.missing([known(self.halves(save)[1])], "universal") == ()

    def test_the_newest_revision_of_each_node_counts(self, save: SealedSave) -> None:
        first, second = self.halves(save)
        later = known(first.model_copy(update={"revision": 2}))
        found = generation.newest_revisions([known(first), later, known(second)])
        assert set(found) == {later, known(second)}

    @pytest.mark.parametrize(
        "more",
        [
            {"step": 6},
            {"job_id": "x"},
            {"grid": Grid(dp=4, mm_count=1, zero_stage=2)},
            {"save_window": SaveWindow(first=10**15, last=10**15)},
        ],
    )
    def test_two_saves_are_never_committed_together(self, save: SealedSave, more: dict[str, object]) -> None:
        first, second = self.halves(save)
        pair = [known(first), known(second.model_copy(update=more))]
        assert generation.contradiction(pair, save_spread_seconds=60) is not None
        assert generation.contradiction([known(first), known(second)], save_spread_seconds=60) is None

    def test_all_agree_where_no_two_differ(self, save: SealedSave) -> None:
        """One pass over many manifests says what all pairs of them say."""
        chance, found = Random(7), set()
        mark = mark_of_save(save)
        for _ in range(400):
            marks = []
            for _ in range(chance.randint(1, 4)):
                at = chance.choice([0, 0, 30, 61, 90]) * 10**9
                tensors = [(p, chance.choice("aaaaaaab")) for p in chance.sample("pqr", chance.randint(0, 3))]
                update = {
                    "run_id": chance.choice([None, "r", "r", "s"] if chance.random() < 0.3 else [None, "r"]),
                    "step": 5 if chance.random() < 0.95 else 6,
                    "window": SaveWindow(first=at, last=at + chance.choice([0, 10**9])),
                    "tensors": tuple(sorted(tensors)),
                }
                marks.append(mark.model_copy(update=update))
            pairs = itertools.permutations(marks, 2)
            expected = all(differs(a, b, save_spread_seconds=60) is None for a, b in pairs)
            assert agree(marks, save_spread_seconds=60) is expected
            found.add((expected, len(marks)))
        assert len(found) == 7

    def test_one_key_with_two_contents_is_a_contradiction(self, save: SealedSave) -> None:
        first, _ = self.halves(save)
        changed = tuple(
            f.model_copy(update={"checksums": Checksums(crc64nvme="1" * 16)}) if f.path == MODEL else f
            for f in first.files
        )
        second = first.model_copy(update={"files": changed, "node": "n1", "node_id": "id-n1"})
        reason = generation.contradiction([known(first), known(second)], save_spread_seconds=60)
        assert reason is not None
        assert "two contents" in reason

    def test_derived_forms_differ_in_bytes_but_not_in_source(self, save: SealedSave) -> None:
        def made(marks: str, alignment: int) -> NodeManifest:
            source = DerivedSource(
                generation=1,
                fingerprints=(("shard", marks),),
                plan_sha256="p",
                layout="strict",
                alignment=alignment,
            )
            return manifest_of(save, form="universal", source=source)

        assert generation.conflict(made("a", 64), [known(made("a", 4096))], save_spread_seconds=60) is None
        assert generation.conflict(made("a", 64), [known(made("b", 64))], save_spread_seconds=60) is not None

    def test_commit_takes_the_highest_branch_and_rank_0_s_best(self, save: SealedSave) -> None:
        first, second = self.halves(save)
        best = Best(metric="loss", value=1.0)
        wrong = Best(metric="loss", value=9.0)
        members = (
            known(first.model_copy(update={"best": best, "best_checkpoint": "step1"})),
            known(second.model_copy(update={"branch": 2, "save_seq": 7, "best": wrong})),
        )
        document = generation.build_commit(members, committed_by="n1", committed_at="now", config_digest="c")
        assert (document.branch, document.save_seq, document.best) == (2, 7, best)
        assert document.best_checkpoint == "step1"
        assert (document.files, len(document.manifests)) == (4, 2)
        assert document.bytes == sum(f.identity.size_bytes for f in save.files)

    def test_pointers_name_the_newest_in_branch_and_step(self, save: SealedSave) -> None:
        def of(branch: int, step: int, form: str, folder: str) -> NodeManifest:
            return manifest_of(save, branch=branch, step=step, form=form, folder=folder)

        rows = [of(0, 100, "zero", "a"), of(1, 60, "zero", "b"), of(0, 100, "universal", "a_universal")]
        commits = [
            generation.build_commit([known(row)], committed_by="", committed_at="", config_digest="")
            for row in rows
        ]
        assert generation.choose_pointers(commits) == Pointers(latest="b", latest_universal="a_universal")
        assert generation.choose_pointers([]) == Pointers(latest=None, latest_universal=None)


def test_a_shard_key_is_what_its_name_says(save: SealedSave) -> None:
    shards = {f.path: f.shard for f in save.files if f.role is Role.OPTIM}
    assert shards[OPTIM.format(d=1)] == ShardKey(d=1, mm=0)
