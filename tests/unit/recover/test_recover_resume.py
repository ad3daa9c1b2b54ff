"""`ckptd resume`: which checkpoint, from where, what goes aside, what the exit codes promise (H54)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.model.layouts import Grid
from ckptd.core.model.listing import OURS
from ckptd.core.model.save import Order
from ckptd.errors import (
    ConfigError,
    DamagedError,
    NoSpaceError,
    NotFoundError,
    NothingCommitted,
    RefusedError,
    RemoteNotOurs,
    RemoteUnreachable,
    StorageError,
)
from ckptd.recover.select.copies import Nodes
from tests.support.recover_scene import EXTRA, Scene, scene
from tests.support.refusing import refuse
from tests.support.synthetic import write_stage12

__all__ = ["scene"]


def test_in_place(scene: Scene) -> None:
    scene.save(5)
    scene.save(10)
    scene.commit("global_step5", 5)
    before = scene.tree()
    done = scene.resume()
    assert done.path == scene.save_dir / "global_step10"
    assert scene.tree() == before
    assert done.plan.steps == ()
    assert "step 10" in done.advice[0]


def test_a_torn_newer_one_goes_aside(scene: Scene) -> None:
    scene.save(5)
    torn = scene.tear(10)
    assert scene.pointer() == torn
    done = scene.resume(remote=False)
    assert done.path.name == "global_step5"
    assert scene.pointer() == "global_step5"
    assert scene.aside() == ["global_step10.1"]
    assert not (scene.save_dir / torn).exists()
    again = scene.tree()
    assert scene.resume(remote=False).path == done.path
    assert scene.tree() == again
    scene.tear(10)
    scene.resume(remote=False)
    assert scene.aside() == ["global_step10.1", "global_step10.2"]


def test_a_missing_shard_is_torn(scene: Scene) -> None:
    scene.save(5)
    scene.save(10)
    (scene.save_dir / "global_step10" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert scene.resume(remote=False).path.name == "global_step5"
    assert "rank 1" in "\n".join(scene.said)


def test_what_the_disk_does_not_give_may_be_the_newest(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: an I/O error of the newest ends with 74, not with an older one; of an older one it is nothing."""
    scene.save(10)
    scene.commit("global_step10", 10)
    scene.save(15)
    before = scene.tree()
    shard = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for remote in (True, False):
        with monkeypatch.context() as patch:
            refuse(patch, shard)
            with pytest.raises(StorageError, match="cannot be read") as raised:
                scene.resume(remote=remote)
        assert raised.value.exit_code == 74
        assert scene.tree() == before
    assert scene.resume().path.name == "global_step15"
    scene.dp = 3
    scene.save(5)
    with monkeypatch.context() as patch:
        refuse(patch, "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
        assert scene.resume().path.name == "global_step15"


def test_older_torn_ones_stay(scene: Scene) -> None:
    scene.tear(5)
    scene.save(10)
    scene.resume(remote=False)
    assert scene.aside() == []
    assert (scene.save_dir / "global_step5").exists()


def test_a_replaced_node(scene: Scene) -> None:
    for step in (5, 10):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    lost = scene.shards("global_step10")
    times = {p.name: p.stat().st_mtime_ns for p in (scene.save_dir / "global_step10").iterdir()}
    scene.lose_node()
    done = scene.resume()
    assert done.path == scene.save_dir / "global_step10"
    assert scene.shards("global_step10") == lost
    assert {p.name: p.stat().st_mtime_ns for p in done.path.iterdir()} == times
    assert scene.pointer() == "global_step10"
    assert (scene.save_dir / EXTRA).read_text() == "{}"
    assert not list(scene.staging.iterdir())
    assert scene.resume().plan.steps == ()


def test_the_committed_one_is_newer_than_the_local(scene: Scene) -> None:
    for step in (5, 10):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    (scene.save_dir / "global_step10").rename(scene.root / "gone")
    assert scene.resume().path.name == "global_step10"
    assert (scene.save_dir / "global_step5").exists()


def test_a_local_one_that_no_remote_has(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.save(10)
    assert scene.resume().path.name == "global_step10"
    scene.lose_node()
    assert scene.resume().path.name == "global_step5"


def test_order_is_branch_then_step(scene: Scene) -> None:
    """After a rewind the newest is the lower step of the newer branch (P9)."""
    scene.save(100)
    scene.commit("global_step100", 100)
    scene.save(60)
    scene.commit("global_step60", 60, branch=2)
    assert scene.resume().path.name == "global_step60"
    scene.lose_node()
    assert scene.resume().path.name == "global_step60"


def test_what_latest_names_is_said_where_another_counts_as_newer(scene: Scene) -> None:
    """Rewound while nobody watched, or a crash right before `latest` was written: nothing tells which."""
    for step in (100, 40):
        scene.save(step)
    assert scene.resume(dry_run=True, remote=False).path.name == "global_step100"
    (said,) = [line for line in scene.said if "latest names" in line]
    assert said.startswith("latest names global_step40, which is whole here too")
    assert "`--tag global_step40`" in said
    scene.commit("global_step40", 40, branch=2)
    scene.commit("global_step100", 100)
    (scene.save_dir / "latest").write_text("global_step100")
    assert scene.resume().path.name == "global_step40"
    assert not any("latest names" in line for line in scene.said), "a branch tells which is newer"


def test_no_clock_decides(scene: Scene) -> None:
    import os

    for step, at in ((10, 2_000_000_000), (20, 1_000_000_000)):
        tag = scene.save(step)
        for path in (scene.save_dir / tag).iterdir():
            os.utime(path, (at, at))
    assert scene.resume(remote=False).path.name == "global_step20"


def test_the_daemons_status_tells_of_a_rewind(scene: Scene) -> None:
    scene.save(100)
    scene.commit("global_step100", 100)
    scene.save(60)
    assert scene.resume().path.name == "global_step100"
    rows = [
        {"tag": "global_step60", "branch": 2, "step": 60, "local": {"present": True}},
        {"tag": "global_step100", "branch": 1, "step": 100, "local": {"present": True}},
        {"tag": "global_step60", "branch": 1, "step": 60, "local": {"present": False}},
        {"tag": "global_step70", "branch": None, "step": None, "local": {"present": True}},
    ]
    status = {"jobs": [{"save_dir": str(scene.save_dir), "checkpoints": rows}]}
    (scene.root / "status.json").write_text(json.dumps(status))
    assert scene.resume(state_dir=scene.root).path.name == "global_step60"
    (scene.root / "status.json").write_text("{torn")
    assert scene.resume(state_dir=scene.root).path.name == "global_step100"


def test_a_tag_that_was_saved_again_is_the_newest(scene: Scene) -> None:
    for step in (60, 100):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    scene.save(60, salt="again")
    here = scene.known_node()
    assert scene.resume(node_name=scene.node, state_dir=here).path.name == "global_step60"


def test_a_tag_that_another_node_committed_is_no_rewind(scene: Scene) -> None:
    """The job went on elsewhere, under the same names: what was left here unsent is not the newest (P9)."""
    scene.save(40)
    scene.commit("global_step40", 40)
    scene.save(50, salt="here")
    left = scene.shards("global_step50")
    other = Scene(scene.root / "other", node="n1")
    (other.root / "nas").rmdir()
    (other.root / "nas").symlink_to(scene.root / "nas")
    for step in (50, 90):
        other.save(step, salt="there")
        other.commit(f"global_step{step}", step)
    rows = [{"tag": "global_step50", "branch": 1, "step": 50, "local": {"present": True}}]
    status = {"jobs": [{"save_dir": str(scene.save_dir), "checkpoints": rows}]}
    (scene.root / "status.json").write_text(json.dumps(status))
    for state_dir in (scene.root, None):
        done = scene.resume(state_dir=state_dir, node_name=scene.node, dry_run=True)
        assert done.path.name == "global_step90"
        said = "global_step50 here is newer than global_step90 (step 90) of n1: that one comes first (`--tag "
        assert any(said in line for line in scene.said), scene.said
    assert scene.resume(node_name=scene.node).path.name == "global_step90"
    assert scene.shards("global_step50") == left
    named = scene.resume(node_name=scene.node, tag="global_step50")
    assert (named.path.name, named.plan.fetches) == ("global_step50", ())
    assert scene.shards("global_step50") == left


def test_a_tag_for_all_saves_that_another_node_took_on_is_no_rewind(scene: Scene) -> None:
    scene.save(50, "last", salt="here")
    left = scene.shards("last")
    other = Scene(scene.root / "other", node="n1")
    (other.root / "nas").rmdir()
    (other.root / "nas").symlink_to(scene.root / "nas")
    other.save(90, "last", salt="there")
    other.commit("last", 90)
    done = scene.resume(node_name=scene.node)
    assert done.plan.candidate.order.step == 90
    assert scene.shards("last") == other.shards("last")
    aside = scene.save_dir / OURS / "aside" / scene.aside()[0]
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == left
    scene.save(100, "last", salt="on")  # further than all that is known: no rewind is in question
    assert scene.resume(node_name=scene.node).plan.candidate.order == Order(1, 100, 2)


@pytest.mark.parametrize("above", ["known", "of another node"])
def test_the_daemons_status_tells_that_a_tag_was_saved_again(scene: Scene, above: str) -> None:
    """Under another host's name, as a pod has: this save_dir held what was committed, and holds other now."""
    rows = []
    for step in (60, 100):
        scene.save(step)
        commit = scene.commit(f"global_step{step}", step).commit
        assert commit is not None
        form = {"zero": {"commit_sha256": commit.sha256}}
        place = {"local": {"present": True}, "remotes": {"nas": form}}
        rows.append({"tag": f"global_step{step}", "branch": 1, "step": step, **place})
    scene.save(60, salt="again")
    kept = rows if above == "known" else rows[:1]
    status = {"jobs": [{"save_dir": str(scene.save_dir), "checkpoints": kept}]}
    (scene.root / "status.json").write_text(json.dumps(status))
    done = scene.resume(state_dir=scene.root, node_name="pod-2")
    assert done.path.name == ("global_step60" if above == "known" else "global_step100")


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_a_note_makes_no_older_one_the_newest(scene: Scene, what: str) -> None:
    """What lies beside the shards tells no saves apart (docs/internals/completeness.md)."""
    for step in (60, 100):
        scene.save(step)
        (scene.save_dir / f"global_step{step}" / "notes.txt").write_text("fine")
        scene.commit(f"global_step{step}", step)
    for step in (60, 100):
        note = scene.save_dir / f"global_step{step}" / "notes.txt"
        note.write_text("better") if what == "changed" else note.unlink()
        before = scene.tree()
        assert scene.resume().path.name == "global_step100"
        assert scene.tree() == before, "the folder here is that save: nothing is fetched again"


def test_a_foreign_folder_under_the_tag_goes_aside(scene: Scene) -> None:
    scene.save(10)
    scene.commit("global_step10", 10)
    good = scene.shards("global_step10")
    scene.lose_node()
    (scene.save_dir / "global_step10" / "wandb").mkdir(parents=True)
    (scene.save_dir / "global_step10" / "wandb" / "log").write_text("mine")
    scene.resume()
    assert scene.shards("global_step10") == good
    assert (scene.save_dir / OURS / "aside" / "global_step10.1" / "wandb" / "log").read_text() == "mine"


def test_dry_run_changes_nothing(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.tear(10)
    before = scene.tree()
    done = scene.resume(dry_run=True, world_size=4)
    assert done.path == scene.save_dir / OURS / "derived/universal/global_step5"
    assert scene.tree() == before
    assert any(line.startswith("would move global_step10 aside") for line in scene.said)
    scene.lose_node()
    assert scene.resume(dry_run=True).path == scene.save_dir / "global_step5"
    assert not scene.save_dir.exists()


def test_damaged_copies_fall_back(scene: Scene) -> None:
    for step in (5, 10):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    scene.lose_node()
    victim = scene.nas / "global_step10" / "mp_rank_00_model_states.pt"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert scene.resume().path.name == "global_step5"
    text = "\n".join(scene.said)
    assert "mp_rank_00_model_states.pt" in text
    assert "CRC64" in text
    assert not (scene.save_dir / "global_step10").exists()
    assert not list(scene.staging.iterdir())
    victim.unlink()
    (scene.save_dir / "global_step5").rename(scene.root / "x")
    assert scene.resume().path.name == "global_step5"
    assert "is gone" in "\n".join(scene.said)
    (scene.save_dir / "global_step5").rename(scene.root / "y")
    for path in (scene.nas / "_ckptd" / "nodes").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(b'"step":5', b'"step":6'))
    with pytest.raises(DamagedError):
        scene.resume()


def test_a_copy_that_grew_is_damaged(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.lose_node()
    with (scene.nas / "global_step5" / "mp_rank_00_model_states.pt").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DamagedError):
        scene.resume()


def test_start_fresh_is_said_only_when_it_is_sure(scene: Scene) -> None:
    scene.ground()
    with pytest.raises(NothingCommitted) as caught:
        scene.resume()
    assert caught.value.exit_code == 4
    assert not (scene.save_dir / OURS).exists(), "the trainer may be one that dies of a folder of ours"
    torn = scene.tear(5)
    with pytest.raises(NothingCommitted):
        scene.resume(dry_run=True)
    assert scene.pointer() == torn
    with pytest.raises(NothingCommitted):
        scene.resume()
    assert scene.pointer() is None
    assert scene.aside() == ["global_step5.1", "latest.1"]


def test_never_fresh_without_the_remote(scene: Scene) -> None:
    with pytest.raises(RemoteUnreachable):
        scene.resume()
    scene.nas.mkdir()
    with pytest.raises(RemoteNotOurs) as caught:
        scene.resume()
    assert caught.value.exit_code == 69
    assert "init-remote" in caught.value.hint
    scene.save(5)
    with pytest.raises(RemoteNotOurs):
        scene.resume()
    assert scene.resume(remote=False).path.name == "global_step5"


def test_the_remote_is_away_and_the_daemon_knew(scene: Scene) -> None:
    scene.save(5)
    rows = [{"tag": "global_step5", "branch": 1, "step": 5, "local": {"present": True}}]
    status = {"jobs": [{"save_dir": str(scene.save_dir), "checkpoints": rows}]}
    (scene.root / "status.json").write_text(json.dumps(status))
    assert scene.resume(state_dir=scene.root).path.name == "global_step5"
    rows.append({"tag": "global_step9", "branch": 1, "step": 9, "local": {"present": True}})
    (scene.root / "status.json").write_text(json.dumps(status))
    with pytest.raises(RemoteUnreachable):
        scene.resume(state_dir=scene.root)


def test_another_jobs_remote(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    with pytest.raises(RemoteNotOurs) as caught:
        scene.resume(name="other")
    assert "job run" in caught.value.message


def test_nothing_at_all(scene: Scene) -> None:
    with pytest.raises(NotFoundError):
        scene.resume(remote=False)


def test_save_dir_without_its_parent(scene: Scene) -> None:
    (scene.root / "nvme").rename(scene.root / "unmounted")
    with pytest.raises(ConfigError):
        scene.resume()


def test_no_room(scene: Scene) -> None:
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.lose_node()
    with pytest.raises(NoSpaceError) as caught:
        scene.resume(local={"min_free": "100%"})
    assert caught.value.exit_code == 74
    assert not (scene.save_dir / "latest").exists()


def test_a_running_trainer_is_left_alone(scene: Scene) -> None:
    tag = scene.tear(5)
    with (scene.save_dir / tag / "mp_rank_00_model_states.pt").open("r+b"), pytest.raises(RefusedError):
        scene.resume(remote=False)
    assert (scene.save_dir / tag).exists()


def test_a_suspect_one_is_not_thrown_away(scene: Scene) -> None:
    import os

    scene.ground()
    tag = scene.save(5)
    os.utime(scene.save_dir / tag / "mp_rank_00_model_states.pt", (1_000_000_000, 1_000_000_000))
    with pytest.raises(RefusedError) as caught:
        scene.resume()
    assert "suspect" in caught.value.message
    assert (scene.save_dir / tag).exists()


def test_several_nodes_choose_what_is_committed(scene: Scene) -> None:
    """With --nnodes only COMMITs count, and each node gets its own shards and the shared files."""
    scene.save(5)
    shards = scene.shards("global_step5")
    optim = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    scene.commit("global_step5", 5, only=lambda name: name != optim.format(1))
    scene.node = "n1"
    scene.commit("global_step5", 5, only=lambda name: name == optim.format(1))
    scene.save(10)
    assert scene.resume().path.name == "global_step10"
    for rank in (0, 1):
        scene.lose_node()
        done = scene.resume(nodes=Nodes(count=2, rank=rank))
        assert done.path.name == "global_step5"
        mine = {"mp_rank_00_model_states.pt", optim.format(rank)}
        assert scene.shards("global_step5") == {name: shards[name] for name in mine}
        assert scene.resume(nodes=Nodes(count=2, rank=rank)).plan.steps == ()
    scene.lose_node()
    assert scene.resume().path.name == "global_step5"
    assert scene.shards("global_step5") == shards


def test_nodes_of_a_pipeline_get_their_own_shards(tmp_path: Path) -> None:
    """Two stages, a node each: both have data-parallel ranks 0 and 1, and gpu-10 sorts before gpu-9."""
    grid = Grid(dp=2, mm_count=2, tp=1, pp=2, zero_stage=2)

    def of_stage(model: dict[str, Any]) -> None:
        model["mp_world_size"] = 2
        model["checkpoint_parallel_dimensions"] = {"pp_degree": 2, "tp_degree": 1}

    machines = [Scene(tmp_path / name, node=name, grid=grid) for name in ("gpu-9", "gpu-10")]
    (tmp_path / "gpu-10" / "nas").rmdir()
    (tmp_path / "gpu-10" / "nas").symlink_to(tmp_path / "gpu-9" / "nas")
    held = []
    for stage, machine in enumerate(machines):
        folder = machine.save_dir / "global_step5"
        write_stage12(folder, [{f"s{stage}.weight": (8, 4)}], 2, step=5, change_model=of_stage)
        for path in list(folder.iterdir()):
            path.rename(folder / path.name.replace("mp_rank_00", f"mp_rank_{stage:02d}"))
        (machine.save_dir / EXTRA).write_text("{}")
        held.append(machine.shards("global_step5"))
    assert [machine.commit("global_step5", 5).outcome for machine in machines] == ["waiting", "committed"]
    for rank, machine in enumerate(machines):
        wish: dict[str, Any] = {"nodes": Nodes(count=2, rank=rank), "world_size": 4}
        models = {n: d for part in held for n, d in part.items() if "optim" not in n}
        for moved in (1, 0):
            assert machine.resume(**wish).path.name == "global_step5"
            # without the other stage's model states DeepSpeed does not load a folder
            assert len(machine.aside()) == moved
            assert machine.shards("global_step5") == held[rank] | models
            assert machine.resume(**wish).plan.steps == ()
            machine.lose_node()


def test_of_several_nodes_none_takes_what_no_commit_holds(scene: Scene) -> None:
    """The others may not have it: they would go on from two checkpoints (P6)."""
    scene.save(5)
    scene.commit("global_step5", 5)
    scene.save(10)
    assert scene.resume(nodes=Nodes(count=2, rank=0)).path.name == "global_step5"


def test_a_symlinked_save_dir_is_refused(scene: Scene) -> None:
    scene.lose_node()
    target = scene.root / "elsewhere"
    target.mkdir()
    scene.save_dir.symlink_to(target)
    with pytest.raises(ConfigError):
        scene.resume()
    assert not list(Path(target).iterdir())
