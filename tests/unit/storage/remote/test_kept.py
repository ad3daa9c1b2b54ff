"""Documents of a remote that rot or are lost are written again byte for byte; never what does not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.core.model.manifest import Commit, parse, sha256_of, to_bytes
from ckptd.storage.remote.documents import ManifestCache, read_commit
from ckptd.storage.remote.kept import (
    KeptDocuments,
    RepairedDocument,
    heal_commits,
    heal_documents,
    keep_documents,
)
from ckptd.storage.remote.observe import read_remote
from ckptd.storage.stores.open import open_store
from tests.support.repair_scene import RepairScene, built, outcomes, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]

WHERE = (TAG, 1, "zero")
STEM = f"{TAG}~g1~zero"


@dataclass
class Remembered:
    """A node that keeps the documents of its COMMITs."""

    scene: RepairScene

    def __post_init__(self) -> None:
        self.store = open_store(str(self.scene.nas))
        self.commit = self.scene.nas / "_ckptd" / "commits" / f"{STEM}.json"
        (self.manifest,) = (self.scene.nas / "_ckptd" / "nodes" / STEM).iterdir()
        self.keep()
        self.before = self.documents()

    def kept(self) -> KeptDocuments:
        """As a process reads it that begins."""
        return KeptDocuments(self.scene.state, read_remote(self.store).identity.remote_id)

    def keep(self) -> None:
        """As after an upload."""
        self.scene.state.mkdir(exist_ok=True)
        view = read_commit(self.store, WHERE)
        assert view is not None
        keep_documents(self.kept(), self.store, [view], ManifestCache(), "n0")

    def documents(self) -> dict[str, bytes]:
        """Documents of the remote."""
        root = self.scene.nas / "_ckptd"
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def looked(self) -> list[RepairedDocument]:
        """What a look repairs."""
        return heal_commits(self.kept(), self.store, read_remote(self.store))


@pytest.fixture
def node(scene: RepairScene) -> Remembered:
    return Remembered(scene)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


ROTS = [flip, cut, empty, link, Path.unlink]


@pytest.mark.parametrize("rot", ROTS)
def test_a_rotten_or_lost_document_is_the_same_bytes_again(
    node: Remembered, rot: Callable[[Path], None]
) -> None:
    """A look repairs the COMMIT, a reading of its documents its manifests too; a second one nothing."""
    rot(node.commit)
    assert [one.key for one in node.looked()] == [f"_ckptd/commits/{STEM}.json"]
    assert node.documents() == node.before
    rot(node.manifest)
    assert len(heal_documents(node.kept(), node.store, WHERE)) == 1
    assert node.documents() == node.before
    assert heal_documents(node.kept(), node.store, WHERE) == node.looked() == []


def test_every_bit_of_a_commit(node: Remembered) -> None:
    """Of each byte one bit: what comes is what was, or another COMMIT that its manifests prove too, which
    differs in nothing but the time."""
    good, path = node.before[f"commits/{STEM}.json"], node.commit
    was = parse(Commit, good, "").model_dump(exclude={"committed_at", "format"})
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(data)
        if not heal_documents(node.kept(), node.store, WHERE, dry_run=True):
            found = parse(Commit, bytes(data), "").model_dump(exclude={"committed_at", "format"})
            assert found == was, data[max(0, at - 20) : at + 20]
            path.write_bytes(good)
            node.keep()


@pytest.mark.parametrize("kind", ["retired", "disputes"])
@pytest.mark.parametrize("rot", [empty, Path.unlink])
def test_nothing_is_written_under_a_tombstone_or_a_dispute(
    node: Remembered, kind: str, rot: Callable[[Path], None]
) -> None:
    """Were the tombstone itself damaged: its name is enough."""
    stone = node.scene.nas / "_ckptd" / kind / f"{STEM}.json"
    stone.parent.mkdir()
    stone.write_text("")
    rot(node.commit)
    before = node.documents()
    assert heal_documents(node.kept(), node.store, WHERE) == []
    assert node.documents() == before
    assert node.kept().names() == {}


def test_another_commit_is_left_as_it_is_and_kept_from_then_on(node: Remembered) -> None:
    """A COMMIT that was lost and made again by another node differs in its time."""
    other = parse(Commit, node.before[f"commits/{STEM}.json"], "").model_copy(
        update={"committed_at": "2031-01-01T00:00:00+00:00"}
    )
    node.commit.write_bytes(to_bytes(other))
    assert node.looked() == []
    assert node.commit.read_bytes() == to_bytes(other)
    node.keep()
    empty(node.commit)
    assert len(node.looked()) == 1
    assert node.commit.read_bytes() == to_bytes(other)


def test_a_checkpoint_that_a_person_removed_stays_removed(node: Remembered) -> None:
    """Its COMMIT and an object are gone: nothing comes back, now or later."""
    node.commit.unlink()
    node.scene.shard(1, root=node.scene.nas).unlink()
    assert node.looked() == []
    assert not node.commit.exists()
    assert node.kept().names() == {}


def test_what_is_kept_is_proven_itself(node: Remembered) -> None:
    """Rot in what this node kept is never written into a remote, and rot there never kept."""
    (kept,) = (node.scene.state / "documents").rglob("*.json")
    kept.write_bytes(kept.read_bytes().replace(b"global_step10", b"global_step11"))
    empty(node.commit)
    assert node.looked() == []
    assert node.commit.read_bytes() == b""
    node.commit.write_bytes(node.before[f"commits/{STEM}.json"])
    node.keep()
    data = node.before[f"commits/{STEM}.json"]
    node.commit.write_bytes(data.replace(b'"branch":1', b'"branch":9'))
    assert node.commit.read_bytes() != data
    node.keep()
    assert [one.sha256 for one in node.kept().of(WHERE)][-1] == sha256_of(data)
    assert len(node.looked()) == 1
    assert node.documents() == node.before


def test_verify_repairs_documents(node: Remembered) -> None:
    """`--dry-run` says it, the repair does it, with a line in the audit; then nothing is damaged."""
    empty(node.commit)
    node.manifest.unlink()
    planned = node.scene.repair(dry_run=True)
    assert [row.outcome for row in planned.rows] == ["planned", "planned"]
    assert planned.exit_code() == 65
    done = node.scene.repair()
    assert {outcome for _, outcome, _ in outcomes(done)} == {"repaired"}
    assert done.exit_code() == 0
    assert node.documents() == node.before
    assert [line["action"] for line in node.scene.audit()] == ["repair", "repair"]


def test_what_retention_deleted_is_forgotten_without_scrub_too(node: Remembered) -> None:
    """A node that repairs nothing keeps nothing of what is gone, and writes nothing."""
    empty(node.commit)
    before = node.documents()
    heal_commits(node.kept(), node.store, read_remote(node.store), dry_run=True)
    assert node.documents() == before
    assert node.kept().names() == {WHERE: sha256_of(node.before[f"commits/{STEM}.json"])[:8]}
    stone = node.scene.nas / "_ckptd" / "retired" / f"{STEM}.json"
    stone.parent.mkdir()
    stone.write_text("{}")
    heal_commits(node.kept(), node.store, read_remote(node.store), dry_run=True)
    assert node.kept().names() == {}
    assert list((node.scene.state / "documents").rglob("*.json")) == []
