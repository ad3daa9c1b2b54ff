"""`ckptd gc`: what it removes, and all that it leaves alone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.config.schema import JobConfig
from ckptd.core.model.decision import Decision
from ckptd.core.model.heartbeat import Heartbeat
from ckptd.core.model.manifest import NodeManifest, Tombstone, manifest_key, sha256_of, to_bytes
from ckptd.core.model.records import (
    UNIVERSAL,
    ZERO,
    DerivedRecord,
    DerivedState,
    ObjectRow,
    UploadRecord,
    UploadState,
)
from ckptd.daemon.node_id import node_id_of
from ckptd.errors import CkptdError, NotFoundError, RefusedError, StorageError
from ckptd.maintenance.gc import Collector, sealed_here
from ckptd.maintenance.repair import Unfinished
from ckptd.maintenance.verify import Slice, Verifier, exit_code
from ckptd.observe.audit import Audit
from ckptd.recover.select.inventory import RemoteInventory, read_remote_inventory
from ckptd.storage.journal.journal import EARLY_ID, Journal
from ckptd.storage.remote import garbage
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.repair import staging_key
from ckptd.storage.stores.base import partial_name
from tests.stores.counting import CountingStore
from tests.stores.scene import Node
from tests.support.refusing import refuse
from tests.support.repair_scene import LONG_AGO_NS, RepairScene, bare, built, run_here, scene
from tests.support.restore_scene import TAG

__all__ = ["bare", "built", "scene"]


def collector(scene: RepairScene, *, dry_run: bool = False) -> Collector:
    """One call."""
    scene.state.mkdir(exist_ok=True)
    return Collector(Audit(scene.state / "audit.jsonl"), scene.said.append, dry_run=dry_run)


def inventory(scene: RepairScene) -> RemoteInventory:
    """The remote as it is."""
    return read_remote_inventory("nas", str(scene.nas), None)


def tree(root: Path) -> set[str]:
    """Names of files."""
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def stone(scene: RepairScene, tag: str, step: int, marks: tuple[tuple[str, str], ...] = ()) -> None:
    """A tombstone, as retention leaves it."""
    commit = next(v for v in inventory(scene).observation.commits if v.commit.tag == tag)
    document = Tombstone(
        tag=tag,
        generation=1,
        form="zero",
        branch=1,
        step=step,
        save_seq=1,
        reason="keep_last",
        commit_sha256=commit.sha256,
        fingerprints=marks,
    )
    path = scene.nas / "_ckptd" / "retired" / f"{tag}~g1~zero.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(to_bytes(document))


def test_a_clean_remote_and_strangers_stay(scene: RepairScene) -> None:
    (scene.nas / TAG / "stray.bin").write_bytes(b"12345")
    (scene.nas / "global_step7").mkdir()
    (scene.nas / "global_step7" / "half").write_bytes(b"1")
    before = tree(scene.nas)
    one = collector(scene)
    one.remote(inventory(scene), None)
    assert one.removed == []
    assert tree(scene.nas) == before
    assert "2 objects (6 B)" in scene.said[-1]


def test_a_removal_that_was_cut_short_is_finished(scene: RepairScene) -> None:
    stone(scene, "global_step5", 5)
    shard = scene.shard(1, "global_step5", scene.nas)
    shard.unlink()
    left = {name for name in tree(scene.nas) if "global_step5" not in name}
    dry = collector(scene, dry_run=True)
    before = tree(scene.nas)
    dry.remote(inventory(scene), None)
    assert [(row.where, row.what) for row in dry.removed] == [("nas", "global_step5 (zero)")]
    assert dry.removed[0].bytes > 0
    assert tree(scene.nas) == before
    assert scene.audit() == []
    collector(scene).remote(inventory(scene), None)
    assert tree(scene.nas) == left | {"_ckptd/retired/global_step5~g1~zero.json"}
    assert [line["action"] for line in scene.audit()] == ["gc"]
    again = collector(scene)
    again.remote(inventory(scene), None)
    assert again.removed == []


def test_what_was_retired_and_sent_again_goes(scene: RepairScene) -> None:
    shard = scene.shard(1, "global_step5", scene.nas)
    data = shard.read_bytes()
    stone(scene, "global_step5", 5, ((shard.name, "mark"), ("../out", "mark")))
    collector(scene).remote(inventory(scene), None)
    assert not shard.exists()
    shard.parent.mkdir()
    shard.write_bytes(data)
    (shard.parent / "stranger").write_bytes(b"1")
    one = collector(scene)
    one.remote(inventory(scene), None)
    assert [row.what for row in one.removed] == [f"global_step5/{shard.name}"]
    assert tree(shard.parent) == {"stranger"}


def test_a_replaced_revision_and_its_objects_go(scene: RepairScene) -> None:
    """Only of generations that are committed and not the newest; what any other manifest lists stays."""
    for tag in ("global_step5", TAG):
        lost_revision(scene, tag, "lost")
    before = tree(scene.nas)
    one = collector(scene)
    one.remote(inventory(scene), None)
    gone = before - tree(scene.nas)
    assert len(gone) == 2
    assert "global_step5/lost" in gone
    assert all("global_step5" in name for name in gone)
    assert exit_code([Verifier(inventory(scene), read=Slice()).run()]) == 0


def lost_revision(scene: RepairScene, tag: str, *paths: str) -> None:
    """A replaced revision of the node's manifest, and objects that it alone lists."""
    folder = scene.nas / "_ckptd" / "nodes" / f"{tag}~g1~zero"
    (path,) = folder.iterdir()
    good = NodeManifest.model_validate_json(path.read_bytes())
    lost = [good.files[0].model_copy(update={"key": f"{tag}/{name}", "path": name}) for name in paths]
    old = good.model_copy(update={"revision": 0, "files": (*good.files, *lost)})
    (scene.nas / manifest_key(old, sha256_of(to_bytes(old)))).write_bytes(to_bytes(old))
    for name in paths:
        (scene.nas / tag / name).write_bytes(b"123")


def list_it(scene: RepairScene, key: str) -> None:
    """Another node lists an object: in a generation of its own that nobody has committed."""
    (path,) = (scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()
    good = NodeManifest.model_validate_json(path.read_bytes())
    entry = good.files[0].model_copy(update={"key": key, "path": key.rpartition("/")[2]})
    new = good.model_copy(update={"generation": 2, "node": "n9", "node_id": "i9", "files": (entry,)})
    target = scene.nas / manifest_key(new, sha256_of(to_bytes(new)))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(to_bytes(new))


@pytest.mark.parametrize("when", ["before the first", "between two"])
def test_what_is_listed_meanwhile_stays(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """P3: between looking and removing, and between two removals, another node may list an object."""
    monkeypatch.setattr(garbage, "_AT_A_TIME", 1)
    lost_revision(scene, "global_step5", "lost", "other", "third")
    here = inventory(scene)
    found = garbage.find(here.store, here.observation.identity)
    gone: list[str] = []
    last = found.objects[2].key
    if when == "before the first":
        list_it(scene, last)

    def removed(one: garbage.Garbage) -> None:
        gone.append(one.key)
        if when == "between two" and len(gone) == 1:
            list_it(scene, last)

    garbage.carry_out(here.store, here.observation.identity, found, removed)
    assert last in {"global_step5/lost", "global_step5/other", "global_step5/third"}
    assert (scene.nas / last).exists()
    assert last not in gone
    assert len(gone) == len(found.objects) - 1
    assert not [key for key in gone if (scene.nas / key).exists()]


def test_a_spare_stays_until_its_object_is_right(scene: RepairScene) -> None:
    """A repair on another node may be between removing the bad object and sending the good one."""
    shard = scene.shard(1, root=scene.nas)
    here = inventory(scene)
    view = next(v for v in here.observation.commits if v.commit.tag == TAG)
    manifest = next(iter(here.manifests(view.commit)))
    file = next(f for f in manifest.files if f.key.endswith(shard.name))
    spare = scene.nas / staging_key(file)
    spare.parent.mkdir()
    spare.write_bytes(shard.read_bytes())
    (spare.parent / "nobodys").write_bytes(b"1")
    for is_flipped in (True, False):
        if is_flipped:
            scene.flip(shard)
        else:
            shard.unlink()
        one = collector(scene)
        one.remote(inventory(scene), None)
        assert spare.exists()
        assert any("1 spare objects stay" in line for line in scene.said)
    assert not (spare.parent / "nobodys").exists()
    shard.write_bytes(spare.read_bytes())
    one = collector(scene)
    one.remote(inventory(scene), None)
    assert not spare.exists()


def test_not_while_a_repair_is_at_work(scene: RepairScene, capsys: pytest.CaptureFixture[str]) -> None:
    """Its uploads are noted in the state directory, and look like those of a killed one."""
    job = scene.root / "run.toml"
    job.write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        "same_filesystem = true\n"
    )
    state = scene.save_dir / "_ckptd" / "state"
    state.mkdir(parents=True, exist_ok=True)
    notes = Unfinished(state)
    notes.note("nas", f"{TAG}/x", "1:id")
    for command in (["gc", job], ["verify", job, "--repair"]):
        with notes.alone():
            done = run_here(capsys, *command)
        assert (done.returncode, "is at work" in done.stderr) == (75, True), done.stderr
        assert Unfinished(state).of("nas") != []
    assert run_here(capsys, "gc", job).returncode == 0
    assert Unfinished(state).of("nas") == []


def test_leases_of_generations_that_are_over(scene: RepairScene) -> None:
    for where in (f"{TAG}~g1~zero", f"{TAG}~g2~zero"):
        (scene.nas / "_ckptd" / "leases" / where).mkdir(parents=True)
        (scene.nas / "_ckptd" / "leases" / where / "n1~x.json").write_text("{}")
    one = collector(scene)
    one.remote(inventory(scene), None)
    assert [row.what for row in one.removed] == [f"_ckptd/leases/{TAG}~g1~zero/n1~x.json"]
    assert (scene.nas / "_ckptd" / "leases" / f"{TAG}~g2~zero" / "n1~x.json").exists()


def test_nothing_goes_where_a_document_cannot_be_read(scene: RepairScene) -> None:
    stone(scene, "global_step5", 5)
    (path,) = (scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()
    path.write_bytes(b"{torn")
    before = tree(scene.nas)
    with pytest.raises(RefusedError, match="nothing in"):
        collector(scene).remote(inventory(scene), None)
    assert tree(scene.nas) == before


def test_only_noted_uploads_are_given_up(scene: RepairScene) -> None:
    """The partial file of a repair's own key; another node's stays."""
    scene.state.mkdir()
    notes = Unfinished(scene.state)
    notes.note("nas", f"{TAG}/x", "1:id")
    notes.note("other", f"{TAG}/y", "1:id")
    one = collector(scene)
    one.remote(inventory(scene), Unfinished(scene.state))
    assert [row.what for row in one.removed] == [f"an upload of {TAG}/x"]
    assert Unfinished(scene.state).of("nas") == []
    assert len(Unfinished(scene.state).of("other")) == 1


def test_our_own_leftovers_on_the_node(scene: RepairScene) -> None:
    ours = scene.save_dir / "_ckptd"
    for name in (
        "trash/ours.abc",
        "trash/global_step1.ff",
        "staging/resume.zero.ab",
        "staging/mine",
        "aside/a.1",
    ):
        (ours / name).mkdir(parents=True)
        (ours / name / "file").write_bytes(b"1234")
    job = scene.job_with(scene.nas)
    dry = collector(scene, dry_run=True)
    dry.node(job, [], None)
    dry.aside(job)
    assert [row.bytes for row in dry.removed] == [4, 4, 4]
    assert len(tree(ours)) == 5
    one = collector(scene)
    one.node(job, [], None)
    assert tree(ours) == {"trash/global_step1.ff/file", "staging/mine/file", "aside/a.1/file"}
    one.aside(job)
    assert "aside/a.1/file" not in tree(ours)
    assert len(scene.audit()) == 3


def refused(scene: RepairScene, job: JobConfig, tag: str, pins: frozenset[str] = frozenset()) -> str:
    """Why it is not removed."""
    before = tree(scene.save_dir)
    with pytest.raises(CkptdError) as raised:
        collector(scene).incomplete(job, tag, pins)
    assert tree(scene.save_dir) - {"_ckptd"} == before
    return raised.value.message


def test_an_incomplete_checkpoint(scene: RepairScene) -> None:
    job = scene.job_with(scene.nas)
    tag = "global_step15"
    scene.save(15)
    (scene.save_dir / tag / scene.shard(1).name).unlink()
    assert "changed less than" in refused(scene, job, tag)
    os.utime(scene.save_dir / tag, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert "is pinned" in refused(scene, job, tag, frozenset({tag}))
    assert "is complete" in refused(scene, job, TAG)
    assert "there is no folder" in refused(scene, job, "global_step99")
    with pytest.raises(RefusedError):
        collector(scene).incomplete(job, "../nas", frozenset())
    (scene.save_dir / "notes").mkdir()
    assert "no checkpoint" in refused(scene, job, "notes")
    with pytest.raises(NotFoundError):
        collector(scene).incomplete(job, "global_step99", frozenset())
    others = {name for name in tree(scene.save_dir) if not name.startswith(f"{tag}/")}
    dry = collector(scene, dry_run=True)
    dry.incomplete(job, tag, frozenset())
    assert (scene.save_dir / tag).is_dir()
    one = collector(scene)
    one.incomplete(job, tag, frozenset())
    assert tree(scene.save_dir) == others
    assert one.removed == dry.removed
    assert "was never" in one.removed[0].why or "missing" in one.removed[0].why
    (line,) = scene.audit()
    assert (line["action"], line["tag"]) == ("gc", tag)


def test_what_the_disk_does_not_give_now_stays(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, but for an I/O error while it was looked at: 74, and every byte is where it was."""
    job = scene.job_with(scene.nas)
    scene.save(15)
    refuse(monkeypatch, scene.shard(1).name)
    os.utime(scene.save_dir / "global_step15", ns=(LONG_AGO_NS, LONG_AGO_NS))
    before = tree(scene.save_dir)
    with pytest.raises(StorageError, match="cannot be read") as raised:
        collector(scene).incomplete(job, "global_step15", frozenset())
    assert raised.value.exit_code == 74
    assert tree(scene.save_dir) - {"_ckptd"} == before


def test_a_damaged_checkpoint(scene: RepairScene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real shard in which one bit turned, and the real command; the whole one beside it stays."""
    job = tmp_path / "run.toml"
    job.write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        "same_filesystem = true\n"
    )
    tag = scene.save(15)
    shard = scene.shard(1, tag)
    data = shard.read_bytes()
    others = {name for name in tree(scene.save_dir) if not name.startswith(f"{tag}/")}

    def gc(*more: str) -> tuple[int, str]:
        scene.quiet()
        done = run_here(capsys, "gc", job, "--incomplete", tag, *more)
        return done.returncode, done.stdout + done.stderr

    code, text = gc()
    assert (code, "is complete, and no byte is known to be wrong" in text) == (65, True), text
    scene.flip(shard, at=len(data) // 2)
    code, text = gc("--dry-run")
    assert code == 0, text
    assert f"damaged: {tag}/{shard.name}: record" in text
    assert shard.exists()
    shard.write_bytes(data)
    os.utime(shard, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert gc()[0] == 65, "mended meanwhile: proven again, not believed"
    # clones of it would keep its bytes on the disk; one that is right may be the last good copy
    ours = scene.save_dir / "_ckptd" / "hold"
    shutil.copytree(scene.save_dir / tag, ours / f"{tag}.8")
    scene.flip(shard, at=len(data) // 2)
    shutil.copytree(scene.save_dir / tag, ours / f"{tag}.7")
    (ours / f"{tag}.7.json").write_text("{}")
    assert gc()[0] == 0
    assert [path.name for path in ours.iterdir()] == [f"{tag}.8"]
    assert {name for name in tree(scene.save_dir) if not name.startswith("_ckptd/")} == others
    lines = (scene.save_dir / "_ckptd" / "state" / "audit.jsonl").read_text().splitlines()
    assert [(line["action"], line["tag"]) for line in map(json.loads, lines)] == [("gc", tag), ("gc", "")]


def test_the_command(scene: RepairScene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remote by URL, and a job with a pin that only the remote knows."""
    stone(scene, "global_step5", 5)
    done = run_here(capsys, "gc", scene.nas, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would remove" in done.stdout
    assert run_here(capsys, "gc", scene.nas, "--aside").returncode == 2
    job = tmp_path / "run.toml"
    job.write_text(
        f'save_dir = "{scene.save_dir}"\n[[remote]]\nname = "nas"\nurl = "{scene.nas}"\n'
        "same_filesystem = true\n"
    )
    pins = scene.nas / "_ckptd" / "pins"
    pins.mkdir()
    pin = Decision(kind="pin", tag="global_step15", serial=1)
    (pins / "pin~global_step15~1.json").write_bytes(to_bytes(pin))
    scene.save(15)
    (scene.save_dir / "global_step15" / scene.shard(1).name).unlink()
    os.utime(scene.save_dir / "global_step15", ns=(LONG_AGO_NS, LONG_AGO_NS))
    done = run_here(capsys, "gc", job, "--incomplete", "global_step15")
    assert (done.returncode, "is pinned" in done.stderr) == (65, True), done.stderr
    done = run_here(capsys, "gc", job)
    assert done.returncode == 0, done.stderr
    assert not (scene.nas / "global_step5").exists()
    lines = (scene.save_dir / "_ckptd" / "state" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == ["gc"]


def test_every_manifest_is_read_once(tmp_path: Path) -> None:
    """Also where training goes on and lists more between any two objects that go; what it lists stays."""
    node, store = Node(tmp_path / "save"), CountingStore()
    ground = node.attached(store)
    for step in range(1, 7):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        node.upload(ground, node.order(node.sealed(step=step)))
    marks = tuple((f"shard{number:03}", "mark") for number in range(250))
    document = Tombstone(
        tag="old",
        generation=1,
        form="zero",
        branch=1,
        step=0,
        save_seq=1,
        reason="keep_last",
        commit_sha256="0" * 64,
        fingerprints=marks,
    )
    store.put("_ckptd/retired/old~g1~zero.json", to_bytes(document))
    for name, _ in marks:
        store.put(f"old/{name}", b"1")
    store.count()
    identity = ground.identity
    found = garbage.find(store, identity)
    wanted = "old/shard249"

    def gone(one: garbage.Garbage) -> None:
        if int(one.key[-3:]) % 50:
            return
        node.tag = f"global_step{100 + int(one.key[-3:])}"
        node.write_all(one.key.encode(), size=20)
        order = node.order(node.sealed(step=100))
        first = order.files[0].model_copy(update={"key": wanted}) if one.key[-3:] == "050" else order.files[0]
        node.upload(ground, order.model_copy(update={"files": (first, *order.files[1:])}))

    garbage.carry_out(store, identity, found, gone)
    assert [key for key in store.objects if key.startswith("old/")] == [wanted]
    read = {
        key: count for key, count in store.gets.items() if "/nodes/global_step" in key and "step1~" in key
    }
    assert set(read.values()) == {1}


def test_a_nodes_part_of_a_save_is_not_incomplete(scene: RepairScene) -> None:
    """The daemon sealed it: other nodes have the rest. Once it is not what was sealed, it may go."""
    job = scene.job_with(scene.nas)
    tag = "global_step15"
    scene.save(15)
    (scene.save_dir / tag / scene.shard(1).name).unlink()
    os.utime(scene.save_dir / tag, ns=(LONG_AGO_NS, LONG_AGO_NS))
    sealed = [Node(scene.save_dir, tag=tag).sealed(step=15)]
    with pytest.raises(RefusedError, match="is what this node wrote of a save"):
        collector(scene).incomplete(job, tag, frozenset(), sealed)
    state_dir = scene.root / "node"
    state_dir.mkdir()
    assert sealed_here(state_dir, tag) == []
    journal = Journal(state_dir / "journal.db")
    journal.add_save(sealed[0], found_first=False, adopted=True, seen_at=0.0)
    assert sealed_here(state_dir, tag) == sealed
    assert sealed_here(state_dir, "another") == []
    journal.close()
    collector(scene).incomplete(job, tag, frozenset())
    assert not (scene.save_dir / tag).exists()


def journal_of(scene: RepairScene, tag: str = "global_step7") -> tuple[Journal, int]:
    """A node's journal that knows one save, and its id."""
    scene.known_node()
    node = Node(scene.root / "other", tag=tag)
    node.write_all()
    journal = Journal(scene.state / "journal.db")
    return journal, journal.add_save(node.sealed(step=7), found_first=False, adopted=True, seen_at=0.0)


def sent(journal: Journal, save_id: int, key: str, size: int, *, is_whole: bool, form: str = "zero") -> None:
    """An object as the daemon notes it."""
    row = ObjectRow(
        key=key,
        bytes=size,
        flushed_bytes=size,
        crc64="0" * 16,
        proof="read-back" if is_whole else None,
        token="",
    )
    journal.put_object(save_id, "nas", form, row)


def lies_there(scene: RepairScene, key: str, data: bytes) -> Path:
    """An object that nobody lists."""
    path = scene.nas / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def gc(scene: RepairScene, *, dry_run: bool = False) -> Collector:
    """The remote, then the node."""
    one = collector(scene, dry_run=dry_run)
    seen = inventory(scene)
    one.remote(seen, None, scene.state)
    one.node(scene.job_with(scene.nas), [seen], scene.state)
    return one


def test_what_our_killed_upload_left_is_known_by_the_journal(scene: RepairScene) -> None:
    """Whole objects stay while the daemon can go on, and go with what they copy; strangers never."""
    journal, save_id = journal_of(scene)
    ours, strange = (lies_there(scene, f"global_step7/{name}", b"12345") for name in ("ours", "strange"))
    resized = lies_there(scene, "global_step7/resized", b"123")
    for path in (ours, resized):
        sent(journal, save_id, f"global_step7/{path.name}", 5, is_whole=True)
    assert gc(scene).removed == []
    assert any(
        "1 object (5 B) are of this node's uploads that are not finished" in line for line in scene.said
    )
    assert any("2 objects (8 B) are in no manifest" in line for line in scene.said)
    journal.end_save(save_id, "vanished")
    journal.set_held(save_id, held=True)
    assert gc(scene).removed == [], "its hold is uploaded"
    journal.set_held(save_id, held=False)
    dry = gc(scene, dry_run=True)
    assert [(row.what, row.bytes) for row in dry.removed] == [("global_step7/ours", 5)]
    assert ours.exists()
    assert gc(scene).removed == dry.removed
    assert (ours.exists(), strange.exists(), resized.exists()) == (False, True, True)
    journal.close()


def test_what_was_sent_before_its_save_was_whole_is_known_by_the_journal(scene: RepairScene) -> None:
    """Its trainer died, and so did the daemon before it took it back."""
    journal, _ = journal_of(scene)
    early = lies_there(scene, "global_step8/early", b"12345")
    sent(journal, EARLY_ID, "global_step8/early", 5, is_whole=True)
    assert [(row.what, row.bytes) for row in gc(scene).removed] == [("global_step8/early", 5)]
    assert not early.exists()
    journal.close()


def test_a_form_that_was_given_up_half_way_goes_with_its_checkpoint(scene: RepairScene) -> None:
    """A newer one's replaced it before it was whole there; of the remote's ZeRO form it may be made again."""
    journal, save_id = journal_of(scene)
    part = lies_there(scene, "global_step7_universal/ckptd.json", b"12345")
    sent(journal, save_id, "global_step7_universal/ckptd.json", 5, is_whole=True, form=UNIVERSAL)
    journal.end_save(save_id, "pruned")
    zero = UploadRecord(remote="nas", form=ZERO, state=UploadState.COMMITTED)
    journal.put_upload(save_id, zero)
    assert gc(scene).removed == [], "made of what the remote holds"
    journal.put_upload(save_id, zero.model_copy(update={"state": UploadState.DELETED}))
    journal.set_derived(save_id, DerivedRecord(state=DerivedState.READY))
    assert gc(scene).removed == [], "made, and here"
    journal.set_derived(save_id, DerivedRecord())
    assert [row.what for row in gc(scene).removed] == ["global_step7_universal/ckptd.json"]
    assert not part.exists()
    journal.close()


def test_what_we_sent_in_vain_stays_where_another_node_may_count_on_it(scene: RepairScene) -> None:
    """P3: it takes what lies there for its own, and lists it a moment later."""
    journal, save_id = journal_of(scene)
    ours = lies_there(scene, "global_step7/ours", b"12345")
    sent(journal, save_id, "global_step7/ours", 5, is_whole=True)
    journal.end_save(save_id, "vanished")
    beat = Heartbeat(
        job_id="j",
        job="run",
        node="n9",
        node_id="id-n9",
        config_digest="",
        ckptd_version="",
        as_of="2020-01-01T00:00:00+00:00",
        state="ok",
    )
    Heartbeats(inventory(scene).store).put(beat)
    assert gc(scene).removed == []
    assert ours.exists()
    assert any("node n9 writes to" in line for line in scene.said)
    journal.close()


def test_our_half_object_in_a_directory_goes(scene: RepairScene) -> None:
    """Its name bears the node's id: whoever looked without it found nothing, and said it was removed."""
    journal, save_id = journal_of(scene)
    half = {}
    for owner in ("id-n0", "id-n9"):
        half[owner] = lies_there(scene, f"global_step7/{partial_name(owner, 'global_step7/x')}", b"123")
    sent(journal, save_id, "global_step7/x", 9, is_whole=False)
    journal.end_save(save_id, "vanished")
    assert [(row.what, row.bytes) for row in gc(scene).removed] == [("an upload of global_step7/x", 3)]
    assert (half["id-n0"].exists(), half["id-n9"].exists()) == (False, True)
    journal.close()


def test_in_a_copy_nothing_of_the_originals_uploads_goes(
    scene: RepairScene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node id and journal came along: what the original has under way was taken for the copy's own."""
    journal, save_id = journal_of(scene)
    whole = lies_there(scene, "global_step7/ours", b"12345")
    sent(journal, save_id, "global_step7/ours", 5, is_whole=True)
    half = lies_there(scene, f"global_step7/{partial_name('id-n0', 'global_step7/x')}", b"123")
    sent(journal, save_id, "global_step7/x", 9, is_whole=False)
    journal.end_save(save_id, "vanished")
    journal.close()
    state = scene.save_dir / "_ckptd" / "state"
    shutil.copytree(scene.state, state)
    assert node_id_of(state, scene.save_dir.stat().st_ino) == "id-n0"
    Unfinished(state).note("nas", "global_step5/x", "an-upload")
    copy = tmp_path / "copy" / scene.save_dir.name
    shutil.copytree(scene.save_dir, copy, symlinks=True)

    def gc_of(save_dir: Path) -> str:
        job = tmp_path / "run.toml"
        remote = f'[[remote]]\nname = "nas"\nurl = "{scene.nas}"\nsame_filesystem = true\n'
        job.write_text(f'save_dir = "{save_dir}"\n{remote}')
        done = run_here(capsys, "gc", job)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    said = " ".join(gc_of(copy).split())
    assert "came with a copy of another save_dir" in said
    assert "this node did not send them" in said
    assert (whole.exists(), half.exists()) == (True, True)
    gc_of(scene.save_dir)
    assert (whole.exists(), half.exists()) == (False, False)


def test_trash_is_counted_before_any_of_it_goes(scene: RepairScene) -> None:
    """Every name with its bytes, also of files that could be no checkpoint's; half removals are said."""
    trash = scene.save_dir / "_ckptd" / "trash"
    for name in ("ours.a", "ours.b"):
        (trash / name / "deep").mkdir(parents=True)
        (trash / name / "file").write_bytes(b"1234")
        (trash / name / "deep" / ".ckptd-tmp-0").write_bytes(b"123456")
    (trash / "global_step1.0123abcd").mkdir()
    (trash / "global_step1.0123abcd" / "file").write_bytes(b"12345")
    for dry_run in (True, False):
        one = collector(scene, dry_run=dry_run)
        one.node(scene.job_with(scene.nas), [], None)
        assert [(row.what, row.bytes) for row in one.removed] == [
            ("_ckptd/trash/ours.a", 10),
            ("_ckptd/trash/ours.b", 10),
        ]
        assert "global_step1.0123abcd (5 B)" in scene.said[-1]
    assert tree(trash) == {"global_step1.0123abcd/file"}


def test_half_conversions(scene: RepairScene) -> None:
    """Of what is gone, or has its form by now; one that may go on, or is at work, stays."""
    ours = scene.save_dir / "_ckptd"
    places = [ours / "staging" / f".{tag}.ckptd-partial" for tag in (TAG, "gone", "global_step5", "busy")]
    for place in places:
        place.mkdir(parents=True)
        (place / "plan.jsonl").write_bytes(b"12")
    (ours / "derived" / "universal" / "global_step5").mkdir(parents=True)
    with files.opened_dir(places[-1]) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        one = collector(scene)
        one.node(scene.job_with(scene.nas), [], None)
    assert [place.exists() for place in places] == [True, False, False, True]
    assert [row.bytes for row in one.removed] == [2, 2]
