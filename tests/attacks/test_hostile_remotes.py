"""A remote that somebody else wrote: names that lead out, links in the way, another job's COMMIT (P15)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.core.model.manifest import sha256_of
from ckptd.errors import DamagedError, TargetExists
from tests.support.recover_scene import Scene
from tests.support.restore_scene import MODEL, TAG, RestoreScene, scene

__all__ = ["scene"]
Change = Callable[[dict[str, Any]], None]


def rewrite(scene: Scene, tag: str, change: Change, *, commit: Change = lambda document: None) -> None:
    """Change the manifest of a checkpoint and make its COMMIT agree, as an attacker who may write would."""
    folder = scene.nas / "_ckptd" / "nodes" / f"{tag}~g1~zero"
    (path,) = folder.iterdir()
    document = json.loads(path.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    digest = sha256_of(data)
    name = f"{path.name.rsplit('~', 1)[0]}~{digest[:12]}.json"
    path.unlink()
    (folder / name).write_bytes(data)
    where = scene.nas / "_ckptd" / "commits" / f"{tag}~g1~zero.json"
    held = json.loads(where.read_bytes())
    held["manifests"] = [{"key": str((folder / name).relative_to(scene.nas)), "sha256": digest}]
    commit(held)
    where.write_text(json.dumps(held))


NAMES = [
    "../../out.pt",
    "/etc/out.pt",
    "a/../../out.pt",
    "",
    ".",
    "a//b",
    "x\0y",
    "esc\x1b[2J",
    "line\nbreak",
    "\ud800",
    "n" * 300,
    ".ckptd-tmp-x",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("field", ["path", "key"])
def test_a_name_that_may_not_be(scene: RestoreScene, name: str, field: str) -> None:
    scene.two()
    (scene.root / "out.pt").write_text("mine")

    def change(document: dict[str, Any]) -> None:
        document["files"][0][field] = name

    rewrite(scene, TAG, change)
    assert scene.restore().path.name == "global_step5"
    assert "\x1b" not in "\n".join(scene.said)
    with pytest.raises(DamagedError):
        scene.restore(TAG)
    assert (scene.root / "out.pt").read_text() == "mine"
    assert sorted(p.name for p in scene.dir.iterdir()) == [
        "_ckptd",
        "global_step5",
        "latest",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("tag", ["../out", "latest", "_ckptd", "a\nb", ".."])
def test_a_tag_that_may_not_be(scene: RestoreScene, tag: str) -> None:
    scene.two()

    def change(document: dict[str, Any]) -> None:
        document["tag"] = tag

    rewrite(scene, TAG, change, commit=change)
    assert scene.restore().path.name == "global_step5"


@pytest.mark.parametrize("size", [-1, 1 << 70])
def test_a_size_that_cannot_be(scene: RestoreScene, size: int) -> None:
    scene.two()

    def change(document: dict[str, Any]) -> None:
        document["files"][0]["bytes"] = document["files"][0]["mtime_ns"] = size

    rewrite(scene, TAG, change)
    assert scene.restore().path.name == "global_step5"


def test_extras_stay_in_dir_under_harmless_names(scene: RestoreScene) -> None:
    scene.two()
    for name in ("_extra/latest", "_extra/_ckptd", "_extra/.ckptd-x"):

        def change(document: dict[str, Any], name: str = name) -> None:
            document["files"][-1]["path"] = name

        rewrite(scene, TAG, change)
        scene.restore()
        assert scene.named() in (TAG, "global_step5")
        assert (scene.dir / "_ckptd").is_dir()


def test_another_jobs_commit(scene: RestoreScene) -> None:
    scene.two()
    other = RestoreScene(scene.root / "other")
    other.save(99)
    other.commit("global_step99", 99)
    shutil.copytree(other.nas, scene.nas, dirs_exist_ok=True, ignore=shutil.ignore_patterns("remote.json"))
    assert scene.restore().path.name == TAG
    assert "is of job" in "\n".join(scene.said)
    assert scene.resume().path.name == TAG


@pytest.mark.parametrize("where", [TAG, "_ckptd", "_ckptd/staging"])
def test_a_link_in_the_way(scene: RestoreScene, where: str) -> None:
    from ckptd.errors import CkptdError

    scene.two()
    outside = scene.root / "outside"
    outside.mkdir()
    link = scene.dir / where
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(CkptdError) as caught:
        scene.restore()
    assert caught.value.exit_code in (65, 73)
    assert not list(outside.iterdir())
    assert scene.named() is None


def test_links_inside_a_folder_and_for_a_pointer(scene: RestoreScene) -> None:
    scene.two()
    scene.restore()
    outside = scene.root / "outside.pt"
    outside.write_text("mine")
    (scene.dir / TAG / MODEL).unlink()
    (scene.dir / TAG / MODEL).symlink_to(outside)
    (scene.dir / "latest").unlink()
    (scene.dir / "latest").symlink_to(outside)
    scene.restore()
    assert outside.read_text() == "mine"
    assert scene.got(TAG) == scene.shards(TAG)
    assert scene.named() == TAG
    assert not (scene.dir / "latest").is_symlink()


def test_a_link_in_the_remote_is_not_followed(scene: RestoreScene) -> None:
    scene.two()
    secret = scene.root / "secret"
    target = scene.nas / TAG / MODEL
    shutil.move(target, secret)
    os.symlink(secret, target)
    assert scene.restore().path.name == "global_step5"


def test_a_name_that_is_file_and_folder(scene: RestoreScene) -> None:
    from ckptd.errors import CkptdError

    scene.two()

    def change(document: dict[str, Any]) -> None:
        document["files"][1]["path"] = document["files"][0]["path"] + "/x"

    rewrite(scene, TAG, change)
    with pytest.raises(CkptdError):
        scene.restore(TAG)
    assert scene.named() is None
    (scene.dir / TAG).mkdir(parents=True, exist_ok=True)
    (scene.dir / TAG / MODEL).mkdir()
    with pytest.raises((TargetExists, CkptdError)):
        scene.restore(TAG)


def test_nothing_that_a_terminal_obeys_is_printed(scene: RestoreScene) -> None:
    from tests.unit.recover.test_recover_commands import ckptd

    scene.two()

    def change(document: dict[str, Any]) -> None:
        document["tag"] = "evil\x1b[2Jtag"

    rewrite(scene, TAG, change, commit=change)
    for verb in (
        ("verify", scene.nas),
        ("restore", scene.nas, "--to", scene.dir),
        ("restore", scene.nas, "x", "--to", scene.dir),
    ):
        done = ckptd(*verb)
        assert "evil" in done.stderr
        assert "\x1b" not in done.stdout + done.stderr
