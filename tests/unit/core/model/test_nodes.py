"""Parts of a save, replicas, heartbeats and the words about missing ranks (H27, H29)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base.humanize import ranks_in_words
from ckptd.config.commands import node_name
from ckptd.config.loader import load_job
from ckptd.core.completeness.grid import Context, Spread
from ckptd.core.completeness.judge import Memory, State, Verdict, judge
from ckptd.core.completeness.markers import replicas
from ckptd.core.completeness.missing import (
    INCOMPLETE_SECONDS,
    SLOW_SECONDS,
    MissingPart,
    MissingShards,
    UncommittedSave,
    late,
)
from ckptd.core.completeness.peer_evidence import PeerEvidence
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.heartbeat import Heartbeat, NewestSave, SeenNode, heartbeat_key
from ckptd.core.model.layouts import Grid, NamedShard, Role, ShardKey, parse_shard_name
from ckptd.core.model.manifest import Cell, sha256_of, to_bytes
from ckptd.core.model.shard_facts import ShardFacts
from ckptd.errors import ConfigError
from ckptd.recover.select.copies import Nodes
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.memory import MemoryStore
from tests.stores.scene import MODEL, OPTIM, Node, archive
from tests.unit.core.model.test_core_resave import listed

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadResult

QUIET = Context(
    settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=60, spread=Spread()
)
OURS = (OPTIM.format(d=2), OPTIM.format(d=3))


def judged(names: tuple[str, ...], context: Context = QUIET, memory: Memory | None = None) -> Verdict:
    """A folder with some shards of a save of four ranks."""
    facts = {}
    for name in names:
        shard = parse_shard_name(name)
        assert shard is not None
        said = ShardFacts(zero_stage=2, partition_count=(4,), optimizer_step=1)
        if name == MODEL:
            said = ShardFacts(zero_stage=2, dp_world_size=4, mp_world_size=1, global_steps=2)
        facts[name] = FileFacts(
            path=name, bytes=9, archive=Archive.ZIP, fingerprint=name, role=shard.role, facts=said
        )
    return judge(listed(dict.fromkeys(names, 1000)), facts, memory, context)


class TestParts:
    def test_shards_of_other_nodes_are_not_missing_here(self) -> None:
        verdict = judged((MODEL, *OURS))
        assert verdict.state is State.COMPLETE
        assert len(verdict.missing) == 2

    def test_on_one_node_they_are(self) -> None:
        assert judged((MODEL, *OURS), replace(QUIET, spread=None)).state is State.INCOMPLETE

    def test_a_rank_that_saved_here_before_is_waited_for_while_the_save_is_in_flight(self) -> None:
        spread = Spread(usual=frozenset({Cell(2, 0), Cell(3, 0)}))
        context = replace(QUIET, spread=spread, is_in_flight=True)
        assert judged((MODEL, OURS[0]), context).state is State.SAVING
        assert judged((MODEL, *OURS), context).state is State.COMPLETE
        assert judged((MODEL, OURS[0]), replace(context, is_in_flight=False)).state is State.COMPLETE

    def test_model_states_alone_are_no_part(self) -> None:
        assert judged((MODEL,)).state is not State.COMPLETE

    def test_without_model_states_another_nodes_manifest_proves_the_grid_and_the_step(self) -> None:
        assert judged(OURS).state is State.INCOMPLETE
        grid = Grid(dp=4, mm_count=1, zero_stage=2, proof="seen")
        evidence = PeerEvidence(grid=grid, step=2, node="gpu-0")
        verdict = judged(OURS, replace(QUIET, spread=Spread(evidence=(evidence,))))
        assert (verdict.state, verdict.step) == (State.COMPLETE, 2)
        assert verdict.grid is not None and "gpu-0" in verdict.grid.proof
        other = PeerEvidence(grid=grid.model_copy(update={"dp": 8}), step=2, node="gpu-0")
        assert judged(OURS, replace(QUIET, spread=Spread(evidence=(other,)))).state is State.INCOMPLETE

    def test_a_part_grows_without_being_a_torn_save(self) -> None:
        first = {f.path: f.identity for f in listed(dict.fromkeys((MODEL, OURS[0]), 1000)).files}
        grown = judged((MODEL, *OURS), memory=Memory(shards=first, is_part=True))
        assert grown.state is State.COMPLETE
        again = {path: replace(identity, mtime_ns=1) for path, identity in list(first.items())[:1]}
        torn = judged((MODEL, *OURS), memory=Memory(shards=first | again, is_part=True))
        assert torn.state is State.TORN_RESAVE


class TestReplicas:
    """mp_rank_* under ZeRO-1/2: sent by the node of rank 0, by others when it does not come."""

    def node(self, tmp_path: Path, name: str, rank: int, mark: bytes = b"m") -> Node:
        node = Node(tmp_path / name, name=name)
        node.write({MODEL: archive(mark * 3000), OPTIM.format(d=rank): archive(b"%d" % rank * 3000)})
        return node

    def upload(self, node: Node, store: DirectoryStore, *, steps_in: bool = False) -> UploadResult:
        ground = node.attached(store)
        save = node.sealed().model_copy(update={"is_part": True})
        order = node.order(save)
        elsewhere = replicas(save)
        files = tuple(
            f.model_copy(
                update={"is_replica": f.path in elsewhere, "tensor_fingerprint": tensors(f.fingerprint)}
            )
            for f in order.files
        )
        return node.upload(ground, order.model_copy(update={"files": files, "steps_in": steps_in}))

    @pytest.mark.parametrize("first", [0, 1])
    def test_they_are_sent_once_whoever_comes_first(self, tmp_path: Path, first: int) -> None:
        store = DirectoryStore(str(tmp_path / "nas"), owner="t")
        (tmp_path / "nas").mkdir()
        nodes = [self.node(tmp_path, f"n{rank}", rank) for rank in (0, 1)]
        outcomes = [self.upload(nodes[rank], store).outcome for rank in (first, 1 - first)]
        assert outcomes == ["waiting", "committed"]
        sent = [path for path in manifest_paths(tmp_path / "nas") if path == MODEL]
        assert sent == [MODEL]

    def test_another_steps_in(self, tmp_path: Path) -> None:
        store = DirectoryStore(str(tmp_path / "nas"), owner="t")
        (tmp_path / "nas").mkdir()
        late_node = self.node(tmp_path, "n1", 1)
        assert self.upload(late_node, store).outcome == "waiting"
        assert MODEL not in manifest_paths(tmp_path / "nas")
        assert self.upload(late_node, store, steps_in=True).outcome == "waiting"
        assert MODEL in manifest_paths(tmp_path / "nas")

    def test_what_is_left_to_its_owner_still_tells_two_saves_apart(self, tmp_path: Path) -> None:
        """Node 1 leaves its model states unsent; they are of another save, and node 0 must not join it."""
        store = DirectoryStore(str(tmp_path / "nas"), owner="t")
        (tmp_path / "nas").mkdir()
        self.upload(self.node(tmp_path, "n1", 1, mark=b"x"), store)
        result = self.upload(self.node(tmp_path, "n0", 0, mark=b"m"), store)
        assert result.outcome == "conflict"
        assert "holds other tensors" in (result.reason or "")


def tensors(fingerprint: str) -> str:
    """A stand-in that differs with the content."""
    return sha256_of(fingerprint.encode())


def manifest_paths(nas: Path) -> list[str]:
    """Paths listed by all manifests."""
    import json

    found = (nas / "_ckptd" / "nodes").rglob("*.json")
    return [file["path"] for path in found for file in json.loads(path.read_bytes())["files"]]


def beat(
    node: str, *held: int | tuple[int, int], step: int = 5, digest: str = "c", last: int | None = None
) -> Heartbeat:
    """Of ranks alone, as older releases say it, or with the model-parallel rank of each."""
    newest = NewestSave(
        tag=f"global_step{step}", branch=1, step=step, written_seconds_ago=3, last_seconds=last
    )
    cells = tuple(cell for cell in held if isinstance(cell, tuple))
    ranks = tuple(sorted({d for d, _ in cells} | {rank for rank in held if isinstance(rank, int)}))
    return Heartbeat(
        job_id="j", job="job", node=node, node_id=f"id-{node}", config_digest=digest, ckptd_version="1",
        as_of="2026-01-01T00:00:00Z", state="ok", ranks=ranks, shards=cells or None, newest=newest,
    )  # fmt: skip


def shards(*cells: tuple[int, int]) -> tuple[NamedShard, ...]:
    return tuple(NamedShard(role=Role.OPTIM, shard=ShardKey(d=d, mm=mm)) for d, mm in cells)


def lost(
    missing: tuple[NamedShard, ...],
    seen: list[SeenNode],
    age_seconds: float,
    *,
    parts: tuple[MissingPart, ...] = (),
    mm_count: int = 1,
) -> MissingShards | None:
    """Of generation 1 of a save at step 9."""
    save = UncommittedSave(
        missing=missing,
        branch=0,
        step=9,
        generation=1,
        mm_count=mm_count,
        age_seconds=age_seconds,
        parts=parts,
    )
    return late(save, seen)


def words(*arguments: Any, **named: Any) -> str | None:
    found = lost(*arguments, **named)
    return found.text if found is not None else None


class TestWords:
    missing = shards(*((d, 0) for d in range(8, 16)))

    def test_the_node_and_its_age_are_named(self) -> None:
        seen = SeenNode(node="gpu-3", seconds_ago=14 * 60, heartbeat=beat("gpu-3", *range(8, 16)))
        assert words(self.missing, [seen], INCOMPLETE_SECONDS) == (
            "missing ranks 8-15 (last seen on gpu-3, 14 min ago)"
        )

    def test_a_node_that_is_alive_and_has_the_save_is_waited_for(self) -> None:
        alive = SeenNode(node="gpu-3", seconds_ago=20, heartbeat=beat("gpu-3", *range(8, 16), step=9))
        assert words(self.missing, [alive], 10 * SLOW_SECONDS) is None

    def test_one_that_is_alive_without_it_is_given_time(self) -> None:
        alive = SeenNode(node="gpu-3", seconds_ago=20, heartbeat=beat("gpu-3", *range(8, 16), step=5))
        assert words(self.missing, [alive], INCOMPLETE_SECONDS) is None
        assert "last seen on gpu-3" in (words(self.missing, [alive], SLOW_SECONDS) or "")

    def test_several_nodes_and_clocks_that_are_not_the_stores(self) -> None:
        seen = [
            SeenNode(node="a", seconds_ago=900, heartbeat=beat("a", 8, 9)),
            SeenNode(node="b", seconds_ago=7200, heartbeat=beat("b", 10), is_store_time=False),
        ]
        text = words(self.missing, seen, INCOMPLETE_SECONDS) or ""
        assert "ranks 8-9 last seen on a, 15 min ago" in text
        assert "rank 10 last seen on b, 2 h ago by the nodes' own clocks" in text
        assert "ranks 11-15: no node is known to hold them; not heard of: a, 15 min ago" in text

    def test_nothing_is_said_too_early(self) -> None:
        assert words(self.missing, [], INCOMPLETE_SECONDS - 1) is None

    def test_a_dead_pipeline_node_is_named_though_others_have_its_ranks(self) -> None:
        """Two stages of four ranks: the node of ranks 2-3 of stage 1 died, that of stage 0 lives."""
        alive = SeenNode(node="a", seconds_ago=20, heartbeat=beat("a", (2, 0), (3, 0), step=9))
        dead = SeenNode(node="b", seconds_ago=840, heartbeat=beat("b", (2, 1), (3, 1), step=5))
        assert words(shards((2, 1), (3, 1)), [alive, dead], INCOMPLETE_SECONDS, mm_count=2) == (
            "missing ranks 2-3 of mp_rank 1 (last seen on b, 14 min ago)"
        )

    def test_of_an_older_release_only_ranks_are_known(self) -> None:
        """It may hold any stage's; once its part is there, those that are missing are not its own."""
        old = SeenNode(node="a", seconds_ago=20, heartbeat=beat("a", 2, 3, step=9))
        missing = shards((2, 1), (3, 1))
        assert words(missing, [old], 10 * SLOW_SECONDS, mm_count=2) is None
        sent = (MissingPart(node="a", generation=1, last_seconds=100),)
        text = words(missing, [old], 10 * SLOW_SECONDS, mm_count=2, parts=sent) or ""
        assert text.startswith("missing ranks 2-3 of mp_rank 1 (")

    def test_model_states_that_no_node_has_are_named_however_many(self) -> None:
        """Tensor parallel ranks 1-3 of a node that writes those of its local rank 0 alone."""
        holes = tuple(NamedShard(role=Role.MODEL, shard=ShardKey(mm=mm)) for mm in (1, 2, 3))
        alive = SeenNode(node="a", seconds_ago=20, heartbeat=beat("a", (0, 0), step=9))
        for missing in (holes, holes[:1]):
            text = words(missing, [alive], INCOMPLETE_SECONDS, mm_count=4) or ""
            names = [f"mp_rank_{s.shard.mm:02d}_model_states.pt" for s in missing if s.shard.mm]
            assert text == f"no node has sent {', '.join(names)}"
        # with shards of ranks they may be on their way together
        elsewhere = SeenNode(node="b", seconds_ago=20, heartbeat=beat("b", (0, 1), step=9))
        assert words((*holes, *shards((0, 1))), [elsewhere], 10 * SLOW_SECONDS, mm_count=4) is None


class TestTwoAttempts:
    """Nodes that live and have the step, and another save of it."""

    missing = shards((2, 0), (3, 0))

    def seen(self, *, last_seconds: int | None) -> list[SeenNode]:
        """Node b, with a save that ended then."""
        return [
            SeenNode(node="b", seconds_ago=9, heartbeat=beat("b", (2, 0), (3, 0), step=9, last=last_seconds))
        ]

    def test_who_sent_its_save_as_another_sends_nothing_into_this_one(self) -> None:
        parts = (MissingPart(node="b", generation=2, last_seconds=100),)
        found = lost(self.missing, self.seen(last_seconds=100), SLOW_SECONDS, parts=parts)
        assert found is not None and found.apart == ("b",)
        assert found.text == (
            "missing ranks 2-3 (last seen on b, 9 s ago);"
            " node b uploaded another save of this tag, as generation 2"
        )
        assert lost(self.missing, self.seen(last_seconds=100), SLOW_SECONDS - 1, parts=parts) is None

    @pytest.mark.parametrize("generation", [1, 2])
    def test_who_saved_again_since_is_waited_for(self, generation: int) -> None:
        """Its newest save ended later than what it sent: of this tag again, or with a rank that came late."""
        parts = (MissingPart(node="b", generation=generation, last_seconds=100),)
        assert lost(self.missing, self.seen(last_seconds=160), 10 * SLOW_SECONDS, parts=parts) is None

    def test_who_has_sent_all_of_it_is_not_sending(self) -> None:
        parts = (MissingPart(node="b", generation=1, last_seconds=100),)
        found = lost(self.missing, self.seen(last_seconds=100), SLOW_SECONDS, parts=parts)
        assert found is not None and found.apart == ()

    def test_of_many_nodes_some_are_named(self) -> None:
        parts = tuple(MissingPart(node=f"n{n}", generation=3, last_seconds=1) for n in range(9))
        text = words(self.missing, [], SLOW_SECONDS, parts=parts) or ""
        assert text.endswith(
            "; nodes n0, n1, n2 and 6 more uploaded another save of this tag, as generation 3"
        )


def test_runs_of_ranks() -> None:
    assert ranks_in_words([3, 1, 2, 9, 2]) == "1-3, 9"


class TestHeartbeats:
    def test_ages_are_by_the_stores_times_whatever_the_nodes_clocks_say(self, tmp_path: Path) -> None:
        store = DirectoryStore(str(tmp_path), owner="t")
        ours = Heartbeats(store)
        for node in ("a", "b"):
            store.put(
                heartbeat_key(node), to_bytes(beat(node).model_copy(update={"as_of": "2099-01-01T00:00:00Z"}))
            )
        ours.put(beat("me"))
        path = tmp_path / heartbeat_key("b")
        now = (tmp_path / heartbeat_key("me")).stat().st_mtime
        os.utime(path, (now - 840, now - 840))
        a, b = ours.others("me")
        assert a.seconds_ago is not None and a.seconds_ago < 60 and not a.is_dead
        assert b.seconds_ago is not None and 800 < b.seconds_ago < 1400 and b.is_dead
        assert a.is_store_time and b.is_store_time

    def test_a_store_without_times_says_so(self) -> None:
        store = MemoryStore()
        store.put(heartbeat_key("a"), to_bytes(beat("a")))
        (found,) = Heartbeats(store).others("me")
        assert not found.is_store_time
        assert found.seconds_ago is not None and found.seconds_ago > 86_400

    def test_what_is_no_heartbeat_is_a_node_without_one(self, tmp_path: Path) -> None:
        store = DirectoryStore(str(tmp_path), owner="t")
        store.put(heartbeat_key("a"), b"{")
        store.put("_ckptd/heartbeats/deep/x.json", b"{}")
        (found,) = Heartbeats(store).others("me")
        assert (found.node, found.heartbeat) == ("a", None)

    def test_what_did_not_change_is_not_read_again(self, tmp_path: Path) -> None:
        store = DirectoryStore(str(tmp_path), owner="t")
        store.put(heartbeat_key("a"), to_bytes(beat("a")))
        ours = Heartbeats(store)
        ours.others("me", reads_all=True)
        reads: list[str] = []
        get = store.get

        def counted(key: str) -> bytes | None:
            reads.append(key)
            return get(key)

        store.get = counted  # type: ignore[method-assign]
        ours.others("me", reads_all=True)
        assert reads == []
        store.put(heartbeat_key("a"), to_bytes(beat("a", 1)))
        assert ours.others("me", reads_all=True)[0].heartbeat == beat("a", 1)


class TestResumeRanks:
    @pytest.mark.parametrize(
        ("nodes", "wanted"),
        [
            (Nodes(count=2, rank=1, world_size=4), range(2, 4)),
            (Nodes(count=4, rank=0), range(1)),
            (Nodes(count=2, rank=1, world_size=8), None),
            (Nodes(count=3, rank=1, world_size=4), None),
            (Nodes(), None),
        ],
    )
    def test_which_ranks_run_on_a_node(self, nodes: Nodes, wanted: range | None) -> None:
        assert nodes.ranks(4) == wanted


class TestOneJobFile:
    text = (
        'save_dir = "/tmp/{hostname}/{SLURM_JOB_ID}"\nnode_name = "{node_name}"\n'
        '[[remote]]\nname = "nas"\nurl = "/mnt/nas/{SLURM_JOB_NAME}"\n'
    )

    def test_it_is_filled_in_on_each_node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (
            ("SLURM_JOB_ID", "42"),
            ("SLURM_JOB_NAME", "llama"),
            ("SLURMD_NODENAME", "gpu-7"),
        ):
            monkeypatch.setenv(name, value)
        path = tmp_path / "run.toml"
        path.write_text(self.text)
        job = load_job(path, check_paths=False)
        assert str(job.save_dir) == f"/tmp/{os.uname().nodename}/42"
        assert (job.node_name, job.remotes[0].url) == ("gpu-7", "/mnt/nas/llama")

    def test_what_is_not_set_or_means_nothing_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        path = tmp_path / "run.toml"
        path.write_text(self.text)
        with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set here"):
            load_job(path, check_paths=False)
        path.write_text(self.text.replace("{SLURM_JOB_ID}", "{hostnam}"))
        with pytest.raises(ConfigError, match="hostnam") as refused:
            load_job(path, check_paths=False)
        assert "{hostname}" in refused.value.hint

    def test_a_node_is_called_as_slurm_calls_it(self) -> None:
        assert node_name({"SLURMD_NODENAME": "gpu-7"}) == "gpu-7"
        assert node_name({}) == os.uname().nodename
