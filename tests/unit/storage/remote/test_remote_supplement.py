"""Files that came after a COMMIT: beside it, never in its place; restored, verified, retired with it (P1)."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import sha256_of
from ckptd.core.policy.leases import shares_folder
from ckptd.errors import SourceChanged
from ckptd.maintenance.listing import list_remote
from ckptd.maintenance.repair import HERE
from ckptd.maintenance.verify import Verifier
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.sources import where_of
from ckptd.storage.remote import garbage
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.messages import DeleteCommit, UploadFile, UploadRequest, UploadResult
from ckptd.storage.remote.supplement import supplement
from ckptd.storage.stores.directory import DirectoryStore
from tests.stores.memory import MemoryStore
from tests.stores.scene import MODEL, OPTIM, Node, archive
from tests.support import observing
from tests.support.repair_scene import RepairScene, outcomes
from tests.support.restore_scene import TAG

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.observe import AttachedRemote

X1 = "_ckptd/commits/global_step5~g1~zero~x1.json"


def late(node: Node, name: str, data: bytes) -> UploadFile:
    """A file that somebody put into the checkpoint just now."""
    path = node.save_dir / node.tag / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return UploadFile(
        path=name,
        key=f"{node.tag}/{name}",
        source=f"{node.tag}/{name}",
        identity=files.identity_of(path.stat()),
        bytes=len(data),
        role=Role.SIDE,
        fingerprint=sha256_of(data),
        check_zip_crc=False,
    )


def order_of(node: Node, commit_sha256: str, *rows: UploadFile) -> UploadRequest:
    order = node.order(node.sealed())
    return order.model_copy(update={"files": rows, "supplement_to": commit_sha256})


class Scene:
    """One node, a remote in memory, a committed checkpoint."""

    def __init__(self, root: Path) -> None:
        self.store = MemoryStore()
        self.node = Node(root / "save")
        self.node.write_all()
        self.ground: AttachedRemote = self.node.attached(self.store)
        self.commit = self.node.upload(self.ground, self.node.order(self.node.sealed())).commit
        assert self.commit is not None

    def add(self, *rows: UploadFile) -> UploadResult:
        assert self.commit is not None
        return supplement(self.ground, order_of(self.node, self.commit.sha256, *rows), self.node.control())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_it_lands_in_its_place_beside_a_commit_that_stays_as_it_is(scene: Scene) -> None:
    before = dict(scene.store.objects)
    result = scene.add(late(scene.node, "notes.txt", b"fine"), late(scene.node, "loss.json", b"{}"))
    assert result.outcome == "committed"
    assert [one.key for one in result.supplements] == [X1]
    assert scene.store.objects["global_step5/notes.txt"] == b"fine"
    assert scene.store.objects["global_step5/loss.json"] == b"{}"
    assert {key: scene.store.objects[key] for key in before} == before, "nothing that was there changed"
    again = scene.add(late(scene.node, "notes.txt", b"fine"))
    assert (again.outcome, again.bytes_sent, [one.key for one in again.supplements]) == ("committed", 0, [X1])


def test_another_content_never_goes_over_what_is_committed(scene: Scene) -> None:
    scene.add(late(scene.node, "notes.txt", b"one"))
    result = scene.add(late(scene.node, "notes.txt", b"two"))
    assert [one.key for one in result.supplements] == [X1.replace("x1", "x2")]
    assert scene.store.objects["global_step5/notes.txt"] == b"one"
    beside = [data for key, data in scene.store.objects.items() if "/_late/" in key]
    assert beside == [b"two"]


def test_a_file_that_changes_while_it_is_sent_is_listed_nowhere(scene: Scene) -> None:
    row = late(scene.node, "notes.txt", b"one")
    (scene.node.save_dir / scene.node.tag / "notes.txt").write_bytes(b"longer")
    with pytest.raises(SourceChanged):
        scene.add(row)
    assert X1 not in scene.store.objects


def test_nothing_is_put_beside_another_commit(scene: Scene) -> None:
    result = supplement(
        scene.ground, order_of(scene.node, "0" * 64, late(scene.node, "a", b"1")), scene.node.control()
    )
    assert result.outcome == "conflict"
    assert X1 not in scene.store.objects


def test_two_nodes_put_their_own_beside_one_commit(tmp_path: Path) -> None:
    store = MemoryStore()
    nodes = [Node(tmp_path / name, name) for name in ("a", "b")]
    for rank, node in enumerate(nodes):
        node.write({MODEL: archive(b"m" * 999), OPTIM.format(d=rank): archive(bytes([rank + 48]) * 999)})
    grounds = [node.attached(store) for node in nodes]
    results = [n.upload(g, n.order(n.sealed())) for n, g in zip(nodes, grounds, strict=True)]
    commit = results[-1].commit
    assert commit is not None
    for node, ground in zip(nodes, grounds, strict=True):
        row = late(node, "README.md", node.name.encode())
        done = supplement(ground, order_of(node, commit.sha256, row), node.control())
        assert done.outcome == "committed"
    said = {data for key, data in store.objects.items() if key.endswith("README.md")}
    assert said == {b"a", b"b"}
    assert X1.replace("x1", "x2") in store.objects


def test_what_another_node_has_under_that_name_does_not_take_its_place(tmp_path: Path) -> None:
    """Each has a note of its own: the COMMIT lists the first one's, which counts; the other comes late."""
    (tmp_path / "nas").mkdir()
    nodes = [Node(tmp_path / name, name) for name in ("a", "b")]
    grounds, results = [], []
    for rank, node in enumerate(nodes):
        node.write({MODEL: archive(b"m" * 999), OPTIM.format(d=rank): archive(bytes([rank + 48]) * 999)})
        node.write({"note.txt": f"of {node.name}".encode()})
        store = DirectoryStore(str(tmp_path / "nas"), owner=f"id-{node.name}", window_bytes=1 << 20)
        grounds.append(node.attached(store))
        results.append(node.upload(grounds[rank], node.order(node.sealed())))
    commit = results[1].commit
    assert commit is not None
    assert results[1].unlisted == ("note.txt",)

    def comes_late(rank: int, data: bytes) -> list[str]:
        row = late(nodes[rank], "note.txt", data)
        done = supplement(grounds[rank], order_of(nodes[rank], commit.sha256, row), nodes[rank].control())
        assert done.outcome == "committed"
        inventory = read_remote_inventory("nas", str(tmp_path / "nas"), None)
        files, note = inventory.late(commit.commit, inventory.manifests(commit.commit))
        assert note is None
        return [file.fingerprint for file in files]

    assert comes_late(1, b"of b") == []
    assert comes_late(0, b"of a, again") == [sha256_of(b"of a, again")]
    assert comes_late(1, b"of b, again") == [sha256_of(b"of a, again")]
    # hosts that divide one folder send its late files for each other
    shares = tmp_path / "nas" / shares_folder(commit.commit.tag, 1, "zero")
    shares.mkdir(parents=True)
    (shares / "1.json").write_bytes(b"{}")
    assert comes_late(1, b"of both") == [sha256_of(b"of both")]


def test_it_is_retired_with_its_commit_and_gc_counts_it_as_needed(scene: Scene) -> None:
    newer = replace(scene.node, tag="global_step6")
    newer.write_all()
    newer.upload(scene.ground, newer.order(newer.sealed(step=6), generation=1))
    scene.add(late(scene.node, "notes.txt", b"one"))
    found = garbage.find(scene.store, scene.ground.identity)
    assert (found.objects, found.unlisted) == ((), {})
    assert scene.commit is not None
    assert observing.confirm(scene.store, ((X1, sha256_of(scene.store.objects[X1])),)).ok
    gone = DeleteCommit(
        tag="global_step5", generation=1, form="zero", reason="r", commit_sha256=scene.commit.sha256
    )
    delete_commit(scene.ground, gone, lambda: None)
    assert not [key for key in scene.store.objects if "global_step5" in key and "/retired/" not in key]
    assert not observing.confirm(scene.store, ((X1, "0"),)).ok


# --- reading it again -----------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> RepairScene:
    """Two checkpoints; notes.txt was written into the newer one after its COMMIT, and then again."""
    scene = RepairScene(tmp_path)
    scene.two()
    view = read_remote_inventory("nas", str(scene.nas), None).commits[-1]
    node = Node(scene.save_dir, dp=2, tag=TAG)
    for text in (b"one", b"two"):
        row = late(node, "notes.txt", text)
        order = order_of(node, view.sha256, row)
        manifest = order.manifest.model_copy(update={"job_id": view.commit.job_id, "folder": TAG})
        done = supplement(scene.ground(), order.model_copy(update={"manifest": manifest}), node.control())
        assert done.outcome == "committed", done.reason
    return scene


def test_restore_brings_the_last_of_it_back(stored: RepairScene) -> None:
    stored.restore()
    assert (stored.dir / TAG / "notes.txt").read_bytes() == b"two"


def test_verify_proves_it(stored: RepairScene) -> None:
    verified = Verifier(read_remote_inventory("nas", str(stored.nas), None)).run()
    assert [row.verdict for row in verified.commits] == ["good", "good"]
    assert verified.unlisted == ()
    (late_one,) = (stored.nas / TAG / "_late").rglob("notes.txt")
    os.truncate(late_one, 1)
    row = Verifier(read_remote_inventory("nas", str(stored.nas), None)).run(TAG).commits[0]
    assert row.verdict == "damaged"
    assert [one.key for one in row.differences] == [str(late_one.relative_to(stored.nas))]


def test_what_came_late_is_worth_less_than_the_checkpoint(stored: RepairScene) -> None:
    """A note whose manifest is gone: the checkpoint is restored without it, and that is said."""
    for path in (stored.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir():
        if b"notes.txt" in path.read_bytes():
            path.unlink()
    stored.restore()
    assert not (stored.dir / TAG / "notes.txt").exists()
    assert (stored.dir / TAG / MODEL).exists()


def test_list_counts_it_apart_from_what_the_commit_holds(stored: RepairScene) -> None:
    older, newer = list_remote(
        read_remote_inventory("nas", str(stored.nas), None), datetime.now(UTC)
    ).checkpoints
    (form,) = newer.forms
    assert (form.files, form.late_files, form.late_bytes) == (older.forms[0].files, 2, 6)
    assert older.forms[0].late_files == 0


def test_a_remote_that_was_copied_elsewhere_still_gives_it_back(stored: RepairScene) -> None:
    """Keys are relative to the root: a copy of all objects under another root is read as the first one is."""
    stored.mirror()
    shutil.rmtree(stored.nas)
    stored.lose_node()
    stored.restore(where=where_of(str(stored.nas2), {}))
    assert (stored.dir / TAG / "notes.txt").read_bytes() == b"two"
    assert (stored.dir / TAG / MODEL).exists()


@pytest.mark.parametrize("source", [HERE, "nas2"])
def test_a_late_object_is_repaired_from_intact_bytes(stored: RepairScene, source: str) -> None:
    """The last one from the node, any of them from another remote."""
    stored.mirror()
    stored.quiet()
    (late_one,) = (stored.nas / TAG / "_late").rglob("notes.txt")
    bad = [late_one, *([stored.nas / TAG / "notes.txt"] if source != HERE else [])]
    for path in bad:
        stored.flip(path, at=-1)
    if source != HERE:
        stored.lose_node()
    done = stored.repair()
    assert outcomes(done) == [("nas", "repaired", source)] * len(bad)
    assert done.exit_code() == 0
    assert late_one.read_bytes() == b"two"
    assert (stored.nas / TAG / "notes.txt").read_bytes() == b"one"
    assert stored.repair().rows == []


def test_what_came_late_is_not_put_back_here(stored: RepairScene) -> None:
    """Who dropped a note may take it away: `verify --repair` mends the save, not the notes beside it."""
    stored.mirror()
    stored.quiet()
    (stored.save_dir / TAG / "notes.txt").unlink()
    stored.quiet()
    done = stored.repair()
    assert (done.rows, done.exit_code()) == ([], 0)
