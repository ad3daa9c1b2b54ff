"""Documents of a remote that rot or are lost are written again byte for byte; never what does not count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckptd.core.model.decision import Decision, pinned_tags
from ckptd.core.model.manifest import Commit, Tombstone, parse, sha256_of, side_key, stem, to_bytes
from ckptd.core.model.runs import RUNS, Row
from ckptd.core.policy.leases import numbered
from ckptd.errors import NotPermitted, RemoteUnreachable
from ckptd.storage.remote.attach import take_over
from ckptd.storage.remote.documents import ManifestCache, read_commit
from ckptd.storage.remote.kept import (
    KeptDocuments,
    RepairedDocument,
    heal_commits,
    heal_documents,
    heal_identity,
    heal_side_documents,
    keep_documents,
    keep_side_documents,
)
from ckptd.storage.remote.messages import RemoteSettings
from ckptd.storage.remote.observe import is_pinned, read_remote, record
from ckptd.storage.remote.scrub import scrub
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from ckptd.storage.stores.rate_limit import Cancelled, RateLimiter
from tests.support.repair_scene import RepairScene, built, outcomes, scene
from tests.support.restore_scene import TAG
from tests.unit.storage.remote.test_scrub import ground, nothing, piece

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


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"', b"!", 1))


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


# --- side documents --------------------------------------------------------------------------------------

BESIDE = ("pins", "decisions", "runs", "retired", "remote.json")


@dataclass
class Beside:
    """A remote with a document of each kind beside its COMMITs, and a node that keeps them."""

    node: Remembered

    def __post_init__(self) -> None:
        self.store, identity = self.node.store, read_remote(self.node.store).identity
        record(self.store, Decision(kind="pin", tag=TAG, by="a person"), identity)
        record(self.store, Decision(kind="accept", tag=TAG, fingerprints=(("a", "b"),)), identity)
        row = Row(job_id="j", number=1, run_id="r", created_at="", node="n0", node_id="1")
        self.store.put_if_absent(numbered(RUNS, 1), to_bytes(row))
        stone = Tombstone(
            tag="old",
            generation=1,
            form="zero",
            branch=0,
            step=1,
            save_seq=1,
            reason="",
            commit_sha256="0" * 64,
        )
        key = side_key("retired", stem("old", 1, "zero"))
        self.store.put_if_absent(key, to_bytes(stone))
        self.kept = self.node.kept()
        self.kept.keep_side_document(key, to_bytes(stone))
        keep_side_documents(self.kept, self.store, read_remote(self.store))
        self.before = self.node.documents()

    def of(self, kind: str) -> Path:
        """The one document of a kind."""
        root = self.node.scene.nas / "_ckptd" / kind
        return root if root.is_file() else next(root.iterdir())

    def healed(self) -> list[RepairedDocument]:
        """What a pass of another process repairs."""
        return heal_side_documents(self.node.kept(), self.store)


@pytest.fixture
def beside(node: Remembered) -> Beside:
    return Beside(node)


@pytest.mark.parametrize("damage", [cut, empty, spoil])
@pytest.mark.parametrize("kind", [kind for kind in BESIDE if kind != "remote.json"])
def test_a_side_document_is_the_same_bytes_again(
    beside: Beside, kind: str, damage: Callable[[Path], None]
) -> None:
    damage(beside.of(kind))
    (one,) = beside.healed()
    assert one.key == str(beside.of(kind).relative_to(beside.node.scene.nas))
    assert beside.node.documents() == beside.before
    assert not beside.healed()


def test_a_look_heals_what_it_names(beside: Beside) -> None:
    for kind in ("pins", "decisions"):
        cut(beside.of(kind))
    damaged = read_remote(beside.store).damaged
    assert not heal_side_documents(beside.kept, beside.store, damaged[:0])
    assert len(heal_side_documents(beside.kept, beside.store, damaged[:1])) == 1
    assert len(heal_side_documents(beside.kept, beside.store, damaged)) == 1
    assert beside.node.documents() == beside.before


def test_a_side_document_that_somebody_else_wrote_or_removed_stays(beside: Beside) -> None:
    """A row that can be read may be the one that this node never saw; what is gone was removed."""
    beside.of("runs").write_bytes(beside.of("runs").read_bytes().replace(b'"r"', b'"s"'))
    for kind in ("pins", "retired"):
        beside.of(kind).unlink()
    now = beside.node.documents()
    assert not beside.healed()
    assert beside.node.documents() == now


def test_a_pin_that_rots_still_counts(beside: Beside) -> None:
    """Its name says what it is of, whether it cannot be read or is another tag's by now; it is no word that
    another remote gets."""
    path, good = beside.of("pins"), beside.of("pins").read_bytes()
    seen = read_remote(beside.store)
    for data in (good[:-1], good.replace(TAG.encode(), b"another9999")):
        path.write_bytes(data)
        seen = read_remote(beside.store)
        assert not pinned_tags(seen.decisions)
        assert pinned_tags(seen.damaged_pins) == {TAG}
        assert len(seen.damaged) == 1
        assert is_pinned(beside.store, TAG)
    said = record(beside.store, Decision(kind="pin", tag=TAG, by="another"), seen.identity)
    assert (said.by, said.serial) == ("another", 0)


def test_a_pin_whose_name_is_no_text_is_named(beside: Beside) -> None:
    """Readable or not: it counts for nothing, and no look fails."""
    path, good = beside.of("pins"), beside.of("pins").read_bytes()
    strange = Path(os.fsdecode(os.fsencode(path.parent) + b"/pin~a\xff~1.json"))
    for data in (good, b""):
        strange.write_bytes(data)
        seen = read_remote(beside.store)
        assert pinned_tags(seen.decisions) == {TAG}
        assert seen.damaged_pins == ()
        (reason,) = seen.damaged
        assert "pin~a" in seen.model_dump_json()
        heal_side_documents(beside.kept, beside.store, [reason])


def test_a_decision_is_recorded_beside_one_that_rots(beside: Beside) -> None:
    identity = read_remote(beside.store).identity
    for kind in ("pins", "decisions"):
        cut(beside.of(kind))
    assert record(beside.store, Decision(kind="unpin", tag=TAG), identity).serial == 1
    assert record(beside.store, Decision(kind="accept", tag=TAG), identity).serial == 1
    assert not is_pinned(beside.store, TAG)


@pytest.mark.parametrize("damage", [cut, spoil])
def test_an_identity_that_still_names_the_remote_is_written_again(
    beside: Beside, damage: Callable[[Path], None]
) -> None:
    damage(beside.of("remote.json"))
    assert [one.key for one in heal_identity(beside.kept, beside.store)] == ["_ckptd/remote.json"]
    assert beside.node.documents() == beside.before


def test_the_identity_of_another_place_is_not_written(beside: Beside) -> None:
    """One that is gone or says nothing, can be read, is of a share that is mounted there, or of a takeover:
    whichever bit of it turns."""
    path, mine = beside.of("remote.json"), beside.of("remote.json").read_bytes()
    path.unlink()
    assert not heal_identity(beside.kept, beside.store)
    for data in (
        b"",
        mine.replace(b'"created":"', b'"created":"9'),
        mine[:-1].replace(b'"remote_id":"', b'"remote_id":"f'),
    ):
        path.write_bytes(data)
        assert not heal_identity(beside.kept, beside.store)
    path.write_bytes(mine)
    take_over(beside.store, read_remote(beside.store).identity, "another")
    taken = path.read_bytes()
    for bit in range(8 * len(taken)):
        path.write_bytes(bytes(b ^ (1 << bit % 8) if i == bit // 8 else b for i, b in enumerate(taken)))
        assert not heal_identity(beside.kept, beside.store), bit
    for length in range(len(taken)):
        path.write_bytes(taken[:length])
        assert not heal_identity(beside.kept, beside.store), length


def test_what_the_store_refuses_stops_nothing_else(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    put = DirectoryStore.put

    def refusing(store: DirectoryStore, key: str, data: bytes) -> None:
        if "/pins/" in key:
            raise NotPermitted("of the others")
        put(store, key, data)

    monkeypatch.setattr(DirectoryStore, "put", refusing)
    for kind in ("decisions", "pins", "runs"):
        cut(beside.of(kind))
    assert {one.key.split("/")[1] for one in beside.healed()} == {"decisions", "runs"}


def test_a_kept_copy_that_rots_is_kept_anew(beside: Beside) -> None:
    (copy,) = (beside.node.scene.state / "documents").glob("*/pins/*")
    empty(copy)
    assert not beside.healed()
    cut(beside.of("pins"))
    assert len(beside.healed()) == 1


def test_side_documents_are_compared_once_a_day(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside.kept.is_comparison_due()
    beside.kept.note_comparison()
    assert not beside.kept.is_comparison_due()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 86401)
    assert beside.kept.is_comparison_due()


def test_what_a_scrub_wrote_again_is_told_though_it_is_cancelled(node: Remembered) -> None:
    """A save begins while the objects are read: the order ends where it began, and is given again."""
    order = piece(node.scene)
    cut(node.commit)

    def stop() -> None:
        raise Cancelled("a save is written")

    settings = RemoteSettings(
        name="nas",
        url=str(node.scene.nas),
        job="run",
        save_dir=str(node.scene.save_dir),
        same_filesystem=True,
        node="n0",
        node_id="id-n0",
        state_dir=str(node.scene.state),
    )
    attached = replace(ground(node.scene), kept=node.kept())
    told = scrub(attached, order, RateLimiter(), stop, settings)
    assert told.repaired == (f"_ckptd/commits/{STEM}.json",)
    assert (told.next_after, told.bad, told.is_gone) == ("", (), False)
    only = order.model_copy(update={"only": ("one",)})
    cut(node.commit)
    assert scrub(attached, only, RateLimiter(), nothing, settings).repaired
    with pytest.raises(Cancelled):
        scrub(attached, order, RateLimiter(), stop, settings)


def test_the_documents_written_before_the_store_refused_are_told(
    node: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(node.commit)
    cut(node.manifest)
    real = DirectoryStore.put
    written: list[str] = []

    def put(self: DirectoryStore, key: str, data: bytes) -> None:
        if written:
            raise RemoteUnreachable("gone")
        written.append(key)
        real(self, key, data)

    monkeypatch.setattr(DirectoryStore, "put", put)
    assert [one.key for one in heal_documents(node.kept(), node.store, WHERE)] == written


def test_verify_repairs_side_documents(beside: Beside) -> None:
    cut(beside.of("pins"))
    empty(beside.of("retired"))
    assert [row.outcome for row in beside.node.scene.repair(dry_run=True).rows] == ["planned", "planned"]
    done = beside.node.scene.repair()
    assert {outcome for _, outcome, _ in outcomes(done)} == {"repaired"}
    assert done.exit_code() == 0
    assert beside.node.documents() == beside.before
    assert {line["tag"] for line in beside.node.scene.audit()} == {TAG, "old"}
