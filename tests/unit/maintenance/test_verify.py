"""`ckptd verify`: what it finds, what it only notes, what it costs nothing to know (P18)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.model.manifest import Tombstone, to_bytes
from ckptd.errors import NotFoundError, NothingCommitted, UsageError
from ckptd.maintenance.verify import Slice, VerifiedRemote, Verifier, exit_code, slice_of
from ckptd.recover.select.inventory import read_remote_inventory
from tests.attacks.test_hostile_remotes import rewrite
from tests.support.restore_scene import MODEL, OPTIM, TAG, RestoreScene, scene
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["scene"]


def verified(
    scene: RestoreScene, tag: str | None = None, *, read: Slice | None = None, nas: Path | None = None
) -> VerifiedRemote:
    """One remote, proven."""
    return Verifier(read_remote_inventory("nas", str(nas or scene.nas), None), read=read).run(tag)


def keys(found: VerifiedRemote) -> list[str]:
    """What differs."""
    return [difference.key for row in found.commits for difference in row.differences]


def test_all_is_as_committed(scene: RestoreScene) -> None:
    scene.two()
    scene.commit_universal(TAG, 10)
    for read in (None, Slice()):
        found = verified(scene, read=read)
        assert [(row.tag, row.form, row.verdict) for row in found.commits] == [
            ("global_step5", "zero", "good"),
            (TAG, "zero", "good"),
            (TAG, "universal", "good"),
        ]
        assert found.unlisted == ()
        assert [row.read_bytes for row in found.commits] == [
            row.bytes if read else 0 for row in found.commits
        ]
        assert exit_code([found]) == 0
    shutil.copytree(scene.nas, scene.root / "copied")
    assert verified(scene, read=Slice(), nas=scene.root / "copied").is_good


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_bad_objects(scene: RestoreScene, how: str) -> None:
    scene.two()
    shard = scene.nas / TAG / OPTIM.format(1)
    if how == "gone":
        shard.unlink()
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        scene.flip(shard)
        assert verified(scene).is_good
    found = verified(scene, read=Slice())
    assert keys(found) == [f"{TAG}/{OPTIM.format(1)}"]
    assert [row.verdict for row in found.commits] == ["good", "damaged"]
    assert exit_code([found]) == 65
    assert verified(scene, "global_step5", read=Slice()).is_good
    text = str(found.commits[1].differences[0])
    assert {"gone": "found nothing", "cut": "bytes, found", "flipped": "expected CRC64"}[how] in text


def test_bad_documents(scene: RestoreScene) -> None:
    scene.two()
    folder = scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero"
    (manifest,) = folder.iterdir()
    good = manifest.read_bytes()
    manifest.unlink()
    assert "is gone" in str(verified(scene).commits[1].differences[0])
    manifest.write_bytes(good.replace(b'"step":10', b'"step":11'))
    assert "SHA-256" in str(verified(scene).commits[1].differences[0])
    manifest.write_bytes(good)
    commit = scene.nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json"
    held = commit.read_bytes()
    commit.write_bytes(b"{torn")
    found = verified(scene)
    assert found.problems
    assert exit_code([found]) == 65
    commit.write_bytes(held.replace(b'"files":4', b'"files":5'))
    assert "expected 5 files" in str(verified(scene).commits[1].differences[0])


def test_a_manifest_that_lacks_a_shard_or_leads_out(scene: RestoreScene) -> None:
    scene.two()

    def lose(document: dict[str, Any]) -> None:
        document["files"] = [f for f in document["files"] if "rank_1" not in f["path"]]

    rewrite(scene, TAG, lose)
    assert any("rank 1" in d.expected for d in verified(scene).commits[1].differences)

    def lead_out(document: dict[str, Any]) -> None:
        document["files"][0]["key"] = "../../etc/passwd"

    rewrite(scene, "global_step5", lead_out)
    assert "leads out" in str(verified(scene).commits[0].differences[0])


def test_a_foreign_commit(scene: RestoreScene) -> None:
    scene.two()
    other = RestoreScene(scene.root / "other")
    other.save(99)
    other.commit("global_step99", 99)
    shutil.copytree(other.nas, scene.nas, dirs_exist_ok=True, ignore=shutil.ignore_patterns("remote.json"))
    found = verified(scene)
    assert [row.verdict for row in found.commits] == ["good", "good", "damaged"]
    assert "is of job" in str(found.commits[2].differences[0])
    # a COMMIT under another name
    commits = scene.nas / "_ckptd" / "commits"
    (commits / "global_step99~g1~zero.json").unlink()
    shutil.copy(commits / f"{TAG}~g1~zero.json", commits / f"{TAG}~g2~zero.json")
    assert "another name" in str(verified(scene).commits[-1].differences[0])


def test_disputed_retired_and_unlisted(scene: RestoreScene) -> None:
    scene.two()
    disputes = scene.nas / "_ckptd" / "disputes"
    disputes.mkdir()
    (disputes / f"{TAG}~g1~zero.json").write_text("{}")
    (scene.nas / TAG / "stray.bin").write_bytes(b"12345")
    (scene.nas / "nobodys").mkdir()
    (scene.nas / "nobodys" / "file").write_bytes(b"1")
    found = verified(scene)
    assert [row.verdict for row in found.commits] == ["good", "disputed"]
    assert found.unlisted == (f"{TAG}/stray.bin", "nobodys/file")
    assert found.unlisted_bytes == 6
    assert exit_code([found]) == 0
    stone = Tombstone(
        tag="global_step5",
        generation=1,
        form="zero",
        branch=1,
        step=5,
        save_seq=1,
        reason="keep_last",
        commit_sha256=found.commits[0].commit_sha256,
    )
    retired = scene.nas / "_ckptd" / "retired"
    retired.mkdir(exist_ok=True)
    (retired / "global_step5~g1~zero.json").write_bytes(to_bytes(stone))
    with pytest.raises(NothingCommitted):
        verified(scene)
    done = ckptd("verify", scene.nas)
    assert done.returncode == 4


def test_slices_cover_everything_once(scene: RestoreScene) -> None:
    scene.two()
    scene.flip(scene.nas / TAG / MODEL)
    parts = [verified(scene, read=Slice(number=n, of=3)) for n in (1, 2, 3)]
    total = sum(row.bytes for row in parts[0].commits)
    assert sum(row.read_bytes for part in parts for row in part.commits) == total
    assert [key for part in parts for key in keys(part)] == [f"{TAG}/{MODEL}"]
    assert slice_of("2/7") == Slice(number=2, of=7)
    for wrong in ("0/3", "4/3", "a", "1", "1/", "/3", "-1/3", "1/0", "9" * 40 + "/1"):
        with pytest.raises(UsageError):
            slice_of(wrong)


def test_the_command(scene: RestoreScene) -> None:
    assert ckptd("verify", scene.root / "nowhere").returncode == 69
    scene.ground()
    assert ckptd("verify", scene.nas).returncode == 4
    scene.two()
    with pytest.raises(NotFoundError):
        verified(scene, "global_step6")
    assert ckptd("verify", scene.nas, "global_step6").returncode == 66
    assert ckptd("verify", scene.nas, "--slice", "0/3").returncode == 2
    done = ckptd("verify", scene.nas)
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout
    assert done.stderr == ""
    scene.flip(scene.nas / TAG / MODEL)
    done = ckptd("verify", scene.nas, TAG, "--read-data", "--json")
    assert done.returncode == 65
    (row,) = json.loads(done.stdout)["remotes"][0]["commits"]
    assert (row["verdict"], row["differences"][0]["key"]) == ("damaged", f"{TAG}/{MODEL}")
    assert f"{TAG}/{MODEL}: expected CRC64" in done.stderr
