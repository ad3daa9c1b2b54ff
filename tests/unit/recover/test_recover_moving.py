"""A remote that goes on living while it is read: retention retires, the trainer commits (P3, P18)."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from ckptd.errors import CkptdError, DamagedError, NotFoundError, NotPermitted, RefusedError
from ckptd.maintenance.verify import Slice, Verifier, exit_code
from ckptd.recover.plan import RecoveryOptions
from ckptd.recover.restore import Restore
from ckptd.recover.resume import Resume
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.sources import where_of
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.stores.base import DOCUMENT_LIMIT_BYTES
from ckptd.storage.stores.open import open_store
from tests.attacks.test_hostile_remotes import rewrite
from tests.support.restore_scene import MODEL, OPTIM, TAG, RestoreScene, scene
from tests.unit.recover.test_recover_commands import ckptd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

__all__ = ["scene"]


def retired(scene: RestoreScene, *tags: str) -> None:
    """As the daemon retires."""
    ground = scene.ground()
    for view in read_remote_inventory("nas", str(scene.nas), None).commits:
        c = view.commit
        if c.tag in tags:
            order = DeleteCommit(
                tag=c.tag, generation=c.generation, form=c.form, reason="keep_last", commit_sha256=view.sha256
            )
            delete_commit(ground, order, lambda: None)


def restored(scene: RestoreScene, when: str, then: Callable[[], None], tag: str | None = None) -> Path:
    """`restore`; the first time that it says `when`, something happens in the remote."""
    happened: list[str] = []

    def say(line: str) -> None:
        scene.said.append(line)
        if line.startswith(when) and not happened:
            happened.append(line)
            then()

    path = Restore(where_of(str(scene.nas), {}), scene.dir, RecoveryOptions(tag=tag), say).run().path
    assert happened
    return path


def later(scene: RestoreScene) -> None:
    """Training goes on: two newer commits, and all that were seen are retired."""
    for step in (15, 20):
        scene.save(step)
        scene.commit(f"global_step{step}", step)
    retired(scene, "global_step5", TAG)


def test_what_is_retired_under_a_restore_is_replaced_by_the_newest(scene: RestoreScene) -> None:
    """Not by an older one of the first look, nor by 'everything is damaged'."""
    scene.two()
    assert restored(scene, "will fetch", lambda: later(scene)) == scene.dir / "global_step20"
    assert scene.got("global_step20") == scene.shards("global_step20")
    assert not (scene.dir / TAG).exists()
    assert scene.named() == "global_step20"


def test_resume_looks_again_too(scene: RestoreScene) -> None:
    scene.two()
    shutil.rmtree(scene.save_dir)

    def say(line: str) -> None:
        scene.said.append(line)
        if line.startswith(f"will fetch {TAG}"):
            later(scene)
            for tag in ("global_step15", "global_step20"):
                shutil.rmtree(scene.save_dir / tag)

    done = Resume(scene.job(), RecoveryOptions(), say).run()
    assert done.path == scene.save_dir / "global_step20"
    assert scene.pointer() == "global_step20"


def test_a_tag_that_is_retired_under_a_restore_is_not_there(scene: RestoreScene) -> None:
    """66, as if it had been gone before; it was never damaged."""
    scene.two()
    with pytest.raises(NotFoundError, match=TAG):
        restored(scene, "will fetch", lambda: later(scene), TAG)
    assert not (scene.dir / TAG).exists()


def test_what_is_retired_under_a_verify_is_no_damage(scene: RestoreScene) -> None:
    scene.two()
    inventory = read_remote_inventory("nas", str(scene.nas), None)
    later(scene)
    found = Verifier(inventory, read=Slice()).run()
    assert [row.verdict for row in found.commits] == ["retired", "retired"]
    assert exit_code([found]) == 0


@pytest.mark.parametrize("name", ["save_dir", "save_dir/inner", f"save_dir/{TAG}", "save_dir/_ckptd/staging"])
def test_nothing_is_restored_into_a_watched_directory(scene: RestoreScene, name: str) -> None:
    scene.two()
    to = scene.save_dir / name.partition("/")[2] if "/" in name else scene.save_dir
    to.parent.mkdir(exist_ok=True, parents=True)
    before = scene.tree()
    with pytest.raises(RefusedError):
        Restore(where_of(str(job_file(scene)), {}), to, RecoveryOptions(), scene.said.append).run()
    assert scene.tree() == before


def job_file(scene: RestoreScene) -> Path:
    path = scene.root / "run.toml"
    path.write_text(
        f'save_dir = "{scene.save_dir}"\n[local]\nsave_total_limit = 2\n'
        f'[[remote]]\nname = "nas"\nurl = "{scene.nas}"\nsame_filesystem = true\n'
    )
    return path


def test_nothing_is_restored_into_another_remote(scene: RestoreScene) -> None:
    scene.two()
    other = scene.root / "other"
    (other / "_ckptd").mkdir(parents=True)
    (other / "_ckptd" / "remote.json").write_bytes((scene.nas / "_ckptd" / "remote.json").read_bytes())
    for to in (other, other / "inner"):
        with pytest.raises(RefusedError, match="remote"):
            scene.restore(to=to)


@pytest.mark.parametrize(
    "other", [f"{OPTIM.format(0)}/x", MODEL], ids=["a file that is a folder too", "one path, two contents"]
)
def test_paths_that_contradict_each_other_are_damage(scene: RestoreScene, other: str) -> None:
    """Two objects for one path: whichever came last would win."""
    scene.two()

    def change(document: dict[str, Any]) -> None:
        one = next(f for f in document["files"] if "optim" in f["path"] and "rank_0_" in f["path"])
        document["files"].append(one | {"path": other, "role": "side", "shard": None})

    rewrite(scene, TAG, change)
    try:
        assert scene.restore().path == scene.dir / "global_step5"
    except DamagedError:
        pytest.fail("the one before was good")
    assert "damaged" in "\n".join(scene.said)


def test_an_unset_variable_is_not_this_directory(scene: RestoreScene) -> None:
    scene.two()
    for to in ("", " "):
        done = ckptd("restore", scene.nas, "--to", to)
        assert (done.returncode, done.stdout) == (2, "")
        assert "the directory to restore to is empty" in done.stderr


def test_a_directory_without_rights_is_named(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """77, and the sentence says which directory."""
    # the user that this process becomes may not run this Python, so the remote is read by the process itself
    monkeypatch.setattr(
        "ckptd.recover.select.inventory.open_apart",
        lambda name, url, access, owner="": open_store(url, access=access),
    )
    scene.two()
    scene.dir.mkdir()
    (scene.dir / "_ckptd").touch()
    with pytest.raises(CkptdError, match=str(scene.dir)):
        scene.restore()
    (scene.dir / "_ckptd").unlink()
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    for folder in (scene.dir, *scene.dir.parents)[:-1]:
        if folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        for to in (scene.dir, scene.dir / "new"):
            with pytest.raises(NotPermitted, match=str(to)):
                scene.restore(to=to)
    finally:
        os.seteuid(0)
    assert list(scene.dir.iterdir()) == []


DOCUMENTS = [
    f"_ckptd/commits/{TAG}~g1~zero.json",
    "_ckptd/commits/global_step15~g1~zero.json",
    "_ckptd/retired/global_step15~g1~zero.json",
    "_ckptd/decisions/x.json",
    "latest",
    "manifest",
]


@pytest.mark.parametrize("how", ["huge", "link", "folder"])
@pytest.mark.parametrize("where", DOCUMENTS)
def test_one_bad_document_does_not_keep_the_others_from_being_restored(
    scene: RestoreScene, where: str, how: str
) -> None:
    scene.two()
    path = scene.nas / where
    if where == "manifest":
        (path,) = (scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero").iterdir()
    path.parent.mkdir(exist_ok=True)
    if how == "huge":
        with path.open("ab") as stream:
            stream.truncate(DOCUMENT_LIMIT_BYTES + 1)
    else:
        path.unlink(missing_ok=True)
        path.symlink_to("/etc/hostname") if how == "link" else path.mkdir()
    is_hit = where in (DOCUMENTS[0], "manifest")
    assert scene.restore().path == scene.dir / ("global_step5" if is_hit else TAG)
    if (where, how) != ("latest", "folder"):
        # and the node goes on: commits are made, pointers are put right
        scene.save(20)
        scene.commit("global_step20", 20)
        assert (scene.nas / "latest").read_text() == "global_step20"
