"""Remote retention, decisions and pointers, in memory: cut anywhere and repeated (P5, P6, H16, H17)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.decision import Decision
from ckptd.core.model.manifest import (
    Dispute,
    ManifestRef,
    NodeManifest,
    Tombstone,
    commit_key,
    manifest_key,
    parse,
    sha256_of,
    side_key,
    stem,
    to_bytes,
)
from ckptd.errors import CommitConflict, NotFoundError, RefusedError
from ckptd.storage.remote import observe
from ckptd.storage.remote.attach import attach
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.stores.base import Abilities
from tests.stores.counting import CountingStore
from tests.stores.memory import MemoryStore
from tests.stores.scene import JOB_ID, Node
from tests.support import observing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd.storage.remote.messages import CommitView
    from ckptd.storage.stores.base import ObjectInfo


class Killed(BaseException):
    """As kill -9: nothing may catch it."""


class Dying(MemoryStore):
    """Dies before the n-th change of the store."""

    def __init__(self, objects: dict[str, bytes], changes: int) -> None:
        super().__init__(objects=objects)
        self.left = changes

    def _change(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def put(self, key: str, data: bytes) -> None:
        self._change()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._change()
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._change()
        super().delete(key)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def commit_three(
    tmp_path: Path, store: MemoryStore, best: str | None = None
) -> tuple[AttachedRemote, list[CommitView]]:
    node = Node(tmp_path / "save")
    views = []
    ground = node.attached(store)
    for step in (10, 20, 30):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        order = node.order(node.sealed(step=step))
        named = order.manifest.model_copy(update={"best_checkpoint": best})
        result = node.upload(ground, order.model_copy(update={"manifest": named}))
        assert result.commit is not None
        views.append(result.commit)
    return ground, views


def order_for(view: CommitView) -> DeleteCommit:
    c = view.commit
    return DeleteCommit(
        tag=c.tag, generation=c.generation, form=c.form, reason="keep_last = 2", commit_sha256=view.sha256
    )


def test_a_retired_checkpoint_is_gone_but_for_its_tombstone(tmp_path: Path, store: MemoryStore) -> None:
    ground, views = commit_three(tmp_path, store)
    delete_commit(ground, order_for(views[0]), lambda: None)
    left = [key for key in store.objects if "global_step10" in key]
    assert left == ["_ckptd/retired/global_step10~g1~zero.json"]
    stone = parse(Tombstone, store.objects[left[0]], "")
    assert len(stone.fingerprints) == 4
    seen = observing.observe(store)
    assert (len(seen.commits), seen.retiring, seen.latest) == (2, (), "global_step30")
    delete_commit(ground, order_for(views[0]), lambda: None)


def test_killed_between_any_two_changes_and_repeated(tmp_path: Path, store: MemoryStore) -> None:
    ground, views = commit_three(tmp_path, store)
    before = dict(store.objects)
    finished = MemoryStore(objects=dict(before))
    delete_commit(
        AttachedRemote(store=finished, abilities=ground.abilities, identity=ground.identity),
        order_for(views[0]),
        lambda: None,
    )
    for changes in itertools.count():
        dying = Dying(dict(before), changes)
        cut = AttachedRemote(store=dying, abilities=ground.abilities, identity=ground.identity)
        try:
            delete_commit(cut, order_for(views[0]), lambda: None)
        except Killed:
            pass
        else:
            assert changes > 6
            break
        after = MemoryStore(objects=dying.objects)
        seen = observing.observe(after)
        committed = {view.commit.tag for view in seen.commits}
        whole = all(key in after.objects for key in before if key.startswith("global_step10/"))
        assert whole or "global_step10" not in committed
        if seen.retired_tags and after.objects != finished.objects:
            assert seen.retiring == (("global_step10", 1, "zero"),)
        delete_commit(
            AttachedRemote(store=after, abilities=ground.abilities, identity=ground.identity),
            order_for(views[0]),
            lambda: None,
        )
        assert after.objects == finished.objects


def test_objects_that_another_manifest_lists_stay(tmp_path: Path, store: MemoryStore) -> None:
    node = Node(tmp_path / "save")
    node.tag = "global_step10"
    node.write_all(size=20)
    ground = node.attached(store)
    zero = node.upload(ground, node.order(node.sealed(step=10)))
    order = node.order(node.sealed(step=10), form="universal")
    shared = [f.model_copy(update={"key": f"global_step10/{f.path}"}) for f in order.files]
    universal = node.upload(ground, order.model_copy(update={"files": tuple(shared)}))
    assert universal.outcome == "committed"
    node.tag = "global_step20"
    node.write_all(size=20)
    node.upload(ground, node.order(node.sealed(step=20)))
    assert zero.commit is not None
    delete_commit(ground, order_for(zero.commit), lambda: None)
    assert all(file.key in store.objects for file in shared)
    assert [view.commit.form for view in observing.observe(store).commits] == ["universal", "zero"]


def test_what_may_not_go_stays(tmp_path: Path, store: MemoryStore) -> None:
    ground, views = commit_three(tmp_path, store)
    before = dict(store.objects)
    with pytest.raises(RefusedError, match="newest"):
        delete_commit(ground, order_for(views[2]), lambda: None)
    wrong = order_for(views[0]).model_copy(update={"commit_sha256": "0" * 64})
    with pytest.raises(CommitConflict):
        delete_commit(ground, wrong, lambda: None)
    absent = order_for(views[0]).model_copy(update={"generation": 7})
    with pytest.raises(NotFoundError):
        delete_commit(ground, absent, lambda: None)
    assert store.objects == before
    observing.record(store, Decision(kind="pin", tag="global_step10"))
    with pytest.raises(RefusedError, match="pinned"):
        delete_commit(ground, order_for(views[0]), lambda: None)
    observing.record(store, Decision(kind="unpin", tag="global_step10"))
    delete_commit(ground, order_for(views[0]), lambda: None)


def test_the_best_stays_as_the_newest_commit_has_it(tmp_path: Path, store: MemoryStore) -> None:
    """Whatever was planned from an older look: the word may have come since."""
    ground, views = commit_three(tmp_path, store, best="global_step10")
    with pytest.raises(RefusedError, match="best"):
        delete_commit(ground, order_for(views[0]), lambda: None)
    delete_commit(ground, order_for(views[1]), lambda: None)


class Pinning(MemoryStore):
    """Another node pins a checkpoint while COMMITs are read for its removal."""

    is_awaited = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.is_awaited and prefix == "_ckptd/":
            self.is_awaited = False
            observing.record(self, Decision(kind="pin", tag="global_step10"))
        return super().list(prefix)


def test_a_pin_that_comes_while_commits_are_read_counts(tmp_path: Path) -> None:
    store = Pinning()
    ground, views = commit_three(tmp_path, store)
    store.is_awaited = True
    with pytest.raises(RefusedError, match="pinned"):
        delete_commit(ground, order_for(views[0]), lambda: None)
    assert not store.is_awaited


def test_a_damaged_manifest_stops_retention(tmp_path: Path, store: MemoryStore) -> None:
    ground, views = commit_three(tmp_path, store)
    key = views[1].commit.manifests[0].key
    store.objects[key] = store.objects[key].replace(b"global", b"glabol")
    beside = views[0].commit.manifests[0].key.replace("~zero/", "~universal/")
    store.objects[beside] = b"{}"
    before = dict(store.objects)
    for view in views[:2]:
        with pytest.raises(RefusedError, match="nothing"):
            delete_commit(ground, order_for(view), lambda: None)
    assert store.objects == before
    del store.objects[beside]
    delete_commit(ground, order_for(views[0]), lambda: None)
    assert key in store.objects


def test_a_pointer_that_was_left_behind_never_names_what_is_being_deleted(tmp_path: Path) -> None:
    """Life 20000134: the node died between a newer COMMIT and the pointer (P6), whenever it dies next."""
    whole = MemoryStore()
    _, views = commit_three(tmp_path, whole)
    whole.objects["latest"] = views[0].commit.folder.encode()
    is_finished, most = False, 0
    while not is_finished:
        store = Dying(dict(whole.objects), most)
        ground = Node(tmp_path / "save").attached(store)
        try:
            delete_commit(ground, order_for(views[0]), lambda: None)
            is_finished = True
        except Killed:
            most += 1
        name = stem(store.objects["latest"].decode(), 1, "zero")
        assert f"_ckptd/commits/{name}.json" in store.objects, most
        assert side_key("retired", name) not in store.objects, most
    assert most > 5


def test_pointers_follow_branch_and_step_not_the_step_alone(tmp_path: Path, store: MemoryStore) -> None:
    node = Node(tmp_path / "save")
    ground = node.attached(store)
    for tag, branch, step in (("global_step100", 0, 100), ("global_step60", 1, 60)):
        node.tag = tag
        node.write_all(tag.encode(), size=20)
        node.upload(ground, node.order(node.sealed(step=step, branch=branch)))
    assert store.objects["latest"] == b"global_step60"
    store.objects["latest"] = b"nonsense"
    observe.point(store)
    assert store.objects["latest"] == b"global_step60"


def test_decisions_survive_as_the_newest_of_their_subject(store: MemoryStore) -> None:
    attach(store, Node(Path("/nowhere")).settings(store.url, job_id=JOB_ID))
    for kind in ("pin", "unpin", "pin"):
        observing.record(store, Decision.model_validate({"kind": kind, "tag": "a/b ~c"}))
    again = observing.record(store, Decision(kind="pin", tag="a/b ~c", serial=0, at="later"))
    assert again.serial == 2
    seen = observing.observe(store).decisions
    assert [(d.kind, d.serial) for d in seen] == [("pin", 0), ("unpin", 1), ("pin", 2)]
    assert observe.is_pinned(store, "a/b ~c")
    assert not observe.is_pinned(store, "other")
    observing.record(store, Decision(kind="first-start", tag="*", tags=("x", "y")))
    assert "_ckptd/decisions/first-start~%2A~0.json" in store.objects
    said = Decision(kind="adopt", tag="*", at="2026-01-01T00:00:00+00:00", serial=3)
    observing.record(store, said)
    later = observing.record(store, said.model_copy(update={"at": "2026-01-02T00:00:00+00:00"}))
    assert (later.serial, later.at[:10]) == (4, "2026-01-02"), "it means the first starts since"


def test_confirm_names_what_is_wrong(tmp_path: Path, store: MemoryStore) -> None:
    _, views = commit_three(tmp_path, store)
    good = (views[0].key, views[0].sha256)
    assert observing.confirm(store, (good,)).ok
    assert not observing.confirm(store, ()).ok
    assert not observing.confirm(store, (good, (views[0].key, "0" * 64))).ok
    store.objects["_ckptd/retired/global_step10~g1~zero.json"] = b"{}"
    assert "is being deleted" in (observing.confirm(store, (good,)).reason or "")
    del store.objects[views[1].key]
    assert "gone" in (observing.confirm(store, ((views[1].key, views[1].sha256),)).reason or "")


def test_describe_tells_committed_manifests(tmp_path: Path, store: MemoryStore) -> None:
    commit_three(tmp_path, store)
    view = observing.describe(store, "global_step20")
    assert [m.committed for m in view.manifests] == [True]
    assert [c.commit.tag for c in view.commits] == ["global_step20"]
    assert observing.describe(store, "global_step2").manifests == ()


def test_a_newer_format_stops_everything(tmp_path: Path, store: MemoryStore) -> None:
    ground, views = commit_three(tmp_path, store)
    key = views[1].key
    store.objects[key] = store.objects[key].replace(b'"format":"1.0"', b'"format":"2.0"')
    with pytest.raises(RefusedError, match=r"2\.0"):
        observing.observe(store)
    with pytest.raises(RefusedError):
        delete_commit(ground, order_for(views[0]), lambda: None)
    store.objects[key] = b"{half"
    assert observing.observe(store).damaged != ()


def test_a_commit_that_was_counted_and_is_disputed_meanwhile_saves_the_one_before(
    tmp_path: Path, store: MemoryStore
) -> None:
    """Deciding and removing lie minutes apart where manifests are many (fleet 50001, 64 x 50)."""
    ground, (first, second, third) = commit_three(tmp_path, store)
    order = order_for(first).model_copy(update={"counted": (second.sha256, third.sha256)})
    c = third.commit
    dispute = Dispute(
        tag=c.tag,
        generation=c.generation,
        form=c.form,
        commit_sha256=third.sha256,
        node="n1",
        reason="written again",
        at="then",
    )
    key = side_key("disputes", stem(c.tag, c.generation, c.form))
    store.put(key, to_bytes(dispute))
    before = dict(store.objects)
    with pytest.raises(CommitConflict, match=third.key):
        delete_commit(ground, order, lambda: None)
    assert store.objects == before
    store.delete(key)
    delete_commit(ground, order, lambda: None)
    assert first.key not in store.objects


def test_a_removal_reads_what_may_lie_in_its_folder(tmp_path: Path) -> None:
    """Of a remote with hundreds of checkpoints a removal reads no other's manifests, and no COMMIT twice."""
    store = CountingStore()
    _, views = commit_three(tmp_path, store)
    for number in range(200):
        copy_commit(store, views[1], f"kept_step{number}")
    ground = attached(store)
    store.count()
    observing.observe(store, cache=ground.documents)
    store.count()
    delete_commit(ground, order_for(views[0]), lambda: None)
    assert not [key for key in store.gets if "kept_step" in key]
    assert store.count() < 20
    assert not [key for key in store.objects if key.startswith("global_step10/")]


def test_what_a_strange_commit_lists_stays(tmp_path: Path) -> None:
    """A COMMIT of another tag over our folder, a form of the same save, a later generation's manifest."""
    store = CountingStore()
    _, views = commit_three(tmp_path, store)
    ours = [key for key in store.objects if key.startswith("global_step10/")]
    copy_commit(store, views[0], "strange")
    delete_commit(attached(store), order_for(views[0]), lambda: None)
    assert all(key in store.objects for key in ours)


def test_keys_in_strange_folders_are_looked_for_everywhere(tmp_path: Path) -> None:
    store = CountingStore()
    _, views = commit_three(tmp_path, store)
    manifest = next(key for key in store.objects if key.startswith("_ckptd/nodes/global_step30"))
    copy_commit(store, views[2], "other_step5", folder="other_step5")
    delete_commit(attached(store), order_for(found(store, "other_step5")), lambda: None)
    assert manifest in store.objects
    assert [key for key in store.objects if key.startswith("global_step30/")]


def attached(store: MemoryStore) -> AttachedRemote:
    """A process that was just started."""
    abilities = Abilities(create_only=True, checksum=None, resumable=True)
    return AttachedRemote(store=store, abilities=abilities, identity=observe.require_identity(store))


def copy_commit(store: MemoryStore, view: CommitView, tag: str, folder: str | None = None) -> None:
    """The same COMMIT and manifests under another tag, naming the same objects."""
    refs = []
    for ref in view.commit.manifests:
        known = parse(NodeManifest, store.objects[ref.key], ref.key)
        update = {"tag": tag, "folder": folder or view.commit.folder, "step": 5}
        manifest = known.model_copy(update=update)
        data = to_bytes(manifest)
        key = manifest_key(manifest, sha256_of(data))
        store.objects[key] = data
        refs.append(ManifestRef(key=key, sha256=sha256_of(data)))
    update = {"tag": tag, "manifests": tuple(refs), "folder": folder or view.commit.folder, "step": 5}
    store.objects[commit_key(tag, 1, "zero")] = to_bytes(view.commit.model_copy(update=update))


def found(store: MemoryStore, tag: str) -> CommitView:
    """Its COMMIT."""
    return next(view for view in observing.observe(store).commits if view.commit.tag == tag)
