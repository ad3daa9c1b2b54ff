"""A ladder's step in a remote: the fuller form goes only while the other is whole, cut anywhere (P5, P7)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.core.model.manifest import Dispute, side_key, stem, to_bytes
from ckptd.errors import RefusedError
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.messages import CommitView, DeleteCommit
from ckptd.storage.remote.observe import AttachedRemote
from tests.stores.memory import MemoryStore
from tests.stores.scene import Node
from tests.support import observing as observe
from tests.unit.storage.remote.test_remote_deletion import Dying, Killed

FOLDER = "global_step10_universal"


@dataclass
class Ladder:
    """global_step10 with both forms, global_step20 with its ZeRO form."""

    ground: AttachedRemote
    store: MemoryStore
    zero: CommitView
    universal: CommitView
    newest: CommitView

    def step(self, *, store: MemoryStore | None = None, gone: CommitView | None = None) -> None:
        """What the daemon orders: ZeRO goes, universal stays."""
        view, commit = gone or self.zero, (gone or self.zero).commit
        order = DeleteCommit(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            reason="ladder: universal after 2 newer",
            commit_sha256=view.sha256,
            instead=None if gone else (self.universal.commit.form, self.universal.sha256),
        )
        ground = AttachedRemote(
            store=store or self.store, abilities=self.ground.abilities, identity=self.ground.identity
        )
        delete_commit(ground, order, lambda: None)


@pytest.fixture
def ladder(tmp_path: Path) -> Ladder:
    store, node = MemoryStore(), Node(tmp_path / "save")
    ground, views = node.attached(store), []
    for step, forms in ((10, ("zero", "universal")), (20, ("zero",))):
        node.tag = f"global_step{step}"
        node.write_all(str(step).encode(), size=20)
        for form in forms:
            result = node.upload(ground, node.order(node.sealed(step=step), form=form))
            assert result.commit is not None
            views.append(result.commit)
    return Ladder(ground, store, *views)


def forms_of(store: MemoryStore, tag: str) -> list[str]:
    """Committed forms of a tag that count."""
    return sorted(v.commit.form for v in observe.observe(store).commits if v.commit.tag == tag)


def test_what_stays_is_untouched(ladder: Ladder) -> None:
    """The ZeRO form's objects and COMMIT go, a tombstone says why; the universal form is as it was."""
    before = {k: v for k, v in ladder.store.objects.items() if "universal" in k}
    ladder.step()
    assert forms_of(ladder.store, "global_step10") == ["universal"]
    assert not [key for key in ladder.store.objects if key.startswith("global_step10/")]
    assert {k: v for k, v in ladder.store.objects.items() if "universal" in k} == before
    seen = observe.observe(ladder.store)
    assert (seen.latest, seen.latest_universal) == ("global_step20", FOLDER)
    assert [(s.form, s.reason) for s in observe.describe(ladder.store, "global_step10").retired] == [
        ("zero", "ladder: universal after 2 newer")
    ]


def test_killed_between_any_two_changes(ladder: Ladder) -> None:
    """At every instant one whole form counts; repeated, it ends in the same place."""
    before, finished = dict(ladder.store.objects), MemoryStore(objects=dict(ladder.store.objects))
    ladder.step(store=finished)
    for changes in itertools.count():
        dying = Dying(dict(before), changes)
        try:
            ladder.step(store=dying)
        except Killed:
            pass
        else:
            assert changes > 5
            break
        after = MemoryStore(objects=dying.objects)
        seen = observe.observe(after)
        gone = {(s.tag, s.form) for s in observe.describe(after, "global_step10").retired}
        counted = {v.commit.form for v in seen.commits if v.commit.tag == "global_step10"} - {
            form for tag, form in gone if tag == "global_step10"
        }
        whole = all(key in after.objects for key in before if key.startswith("global_step10/"))
        assert counted == ({"universal", "zero"} if whole and not gone else {"universal"})
        assert all(after.objects[key] == data for key, data in before.items() if key.startswith(FOLDER))
        ladder.step(store=after)
        assert after.objects == finished.objects


@pytest.mark.parametrize("what", ["object", "size", "manifest", "commit", "tombstone", "dispute", "digest"])
def test_nothing_goes_while_the_other_form_is_not_whole(ladder: Ladder, what: str) -> None:
    """Looked at afresh in the store, whatever the daemon believed."""
    store, commit = ladder.store, ladder.universal.commit
    name = next(key for key in store.objects if key.startswith(f"{FOLDER}/"))
    where = stem(commit.tag, commit.generation, commit.form)
    if what == "object":
        del store.objects[name]
    elif what == "size":
        store.objects[name] += b"!"
    elif what == "manifest":
        del store.objects[commit.manifests[0].key]
    elif what == "commit":
        del store.objects[ladder.universal.key]
    elif what == "tombstone":
        store.objects[side_key("retired", where)] = b"{}"
    elif what == "dispute":
        dispute = Dispute(
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            commit_sha256=ladder.universal.sha256,
            node="n1",
            reason="changed",
            at="now",
        )
        store.objects[side_key("disputes", where)] = to_bytes(dispute)
    else:
        ladder.universal = ladder.universal.model_copy(update={"sha256": "0" * 64})
    before = dict(store.objects)
    with pytest.raises(RefusedError, match="global_step10 stays as it is"):
        ladder.step()
    assert store.objects == before


def test_the_last_form_of_the_newest_stays(ladder: Ladder) -> None:
    """Whatever a plan says: a universal form that is all that is left of the newest is not let go."""
    ladder.step()
    for key in [k for k in ladder.store.objects if "global_step20" in k and k != "latest"]:
        del ladder.store.objects[key]
    with pytest.raises(RefusedError, match="newest"):
        ladder.step(gone=ladder.universal)
    assert forms_of(ladder.store, "global_step10") == ["universal"]


def test_the_last_form_of_an_older_one_goes(ladder: Ladder) -> None:
    """The rung that says gone."""
    ladder.step()
    ladder.step(gone=ladder.universal)
    assert not [
        k for k in ladder.store.objects if k.startswith(("global_step10", "_ckptd/nodes/global_step10"))
    ]
    assert observe.observe(ladder.store).latest_universal is None
