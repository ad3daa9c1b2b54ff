"""Which directory may become a remote, and whose it is (P2, H5, H6)."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from ckptd.core.model.manifest import RemoteIdentity, parse
from ckptd.errors import CkptdError, ConfigError, NoSpaceError, RemoteNotOurs, RemoteUnreachable
from ckptd.storage.remote.attach import attach
from ckptd.storage.stores.open import directory_path, open_store
from tests.stores.scene import Node

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.messages import Attached

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mounts)")


def do(node: Node, url: Path, **more: object) -> Attached:
    settings = node.settings(url, **more)
    return attach(open_store(settings.url), settings)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "save").mkdir()
    return Node(tmp_path / "save")


def test_the_first_daemon_creates_the_identity_and_the_second_takes_it(node: Node, tmp_path: Path) -> None:
    first = do(node, tmp_path / "nas")
    assert first.initialised
    assert first.abilities.create_only
    again = do(node, tmp_path / "nas")
    assert not again.initialised
    assert again.identity == first.identity
    stored = parse(RemoteIdentity, (tmp_path / "nas/_ckptd/remote.json").read_bytes(), "")
    assert (stored.job, stored.job_id) == ("job", first.identity.job_id)
    known = {"remote_id": stored.remote_id, "job_id": stored.job_id, "may_initialise": False}
    assert do(node, tmp_path / "nas", **known).identity == stored


def test_a_known_job_brings_its_id_to_a_new_remote(node: Node, tmp_path: Path) -> None:
    assert do(node, tmp_path / "nas", job_id="mine").identity.job_id == "mine"


@pytest.mark.parametrize(
    "more", [{"job": "other"}, {"job_id": "another-id"}, {"job": "job", "remote_id": "another-remote"}]
)
def test_another_job_s_remote_is_refused_and_its_owner_named(
    node: Node, tmp_path: Path, more: dict[str, object]
) -> None:
    do(node, tmp_path / "nas", job_id="first")
    if "remote_id" in more:
        more = {**more, "job_id": "first"}
    with pytest.raises(RemoteNotOurs, match=r"job job \(first\)"):
        do(node, tmp_path / "nas", **more)


def test_not_mounted_is_never_initialised(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    with pytest.raises(RemoteNotOurs, match="though it had one before") as caught:
        do(node, tmp_path / "nas", remote_id="r", job_id="j")
    assert "mounted" in caught.value.hint
    assert list((tmp_path / "nas").iterdir()) == []
    with pytest.raises(RemoteUnreachable):
        do(node, tmp_path / "gone", remote_id="r", job_id="j")
    with pytest.raises(RemoteUnreachable, match=f"its parent {tmp_path / 'no'} does not exist") as absent:
        do(node, tmp_path / "no" / "parent")
    assert f"`mkdir -p {tmp_path / 'no'}`" in absent.value.hint
    with pytest.raises(RemoteNotOurs, match="is not there"):
        do(node, tmp_path / "gone", may_initialise=False)
    with pytest.raises(RemoteNotOurs):
        do(node, tmp_path / "nas", may_initialise=False)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("place", ["nas", "gone", "no/parent"])
def test_a_changed_url_is_named(node: Node, tmp_path: Path, place: str) -> None:
    """The new place never was a remote: it is the job that changed."""
    (tmp_path / "nas").mkdir()
    before = str(tmp_path / "before")
    with pytest.raises(CkptdError, match=f"knows its remote nas at {before}, its url was changed") as caught:
        do(node, tmp_path / place, remote_id="r", job_id="j", known_url=before)
    assert "name" in caught.value.hint
    assert "had one before" not in caught.value.message


def test_the_disk_of_save_dir_is_no_remote(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    for url in (tmp_path / "nas", tmp_path / "new"):
        with pytest.raises(RemoteNotOurs, match="same file system as save_dir"):
            do(node, url, same_filesystem=False)
    assert list((tmp_path / "nas").iterdir()) == []
    assert not (tmp_path / "new").exists()


def test_commits_without_an_identity_are_not_taken_over(node: Node, tmp_path: Path) -> None:
    (tmp_path / "nas/_ckptd/commits").mkdir(parents=True)
    (tmp_path / "nas/_ckptd/commits/t~g1~zero.json").write_bytes(b"{}")
    with pytest.raises(RemoteNotOurs, match="commits but no"):
        do(node, tmp_path / "nas")


@ROOT_ONLY
@pytest.mark.root
def test_a_file_system_of_its_own_becomes_a_remote(node: Node, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path / "mount")], check=True)
    try:
        # the root's last component is made, its parent proves that the share is mounted
        assert do(node, tmp_path / "mount/job", same_filesystem=False).initialised
        known = do(node, tmp_path / "mount/job", same_filesystem=False).identity
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "mount")], check=True)
    with pytest.raises(CkptdError, match="not there"):
        do(node, tmp_path / "mount/job", remote_id=known.remote_id, job_id=known.job_id)
    with pytest.raises(RemoteNotOurs, match="same file system"):
        do(node, tmp_path / "mount/job", same_filesystem=False)
    assert list((tmp_path / "mount").iterdir()) == []


def test_urls(tmp_path: Path) -> None:
    assert directory_path(f"file://{tmp_path}") == tmp_path
    for url in ("ftp://bucket/x", "nothing://host/x", "relative/path"):
        with pytest.raises(ConfigError, match=url):
            open_store(url)


@ROOT_ONLY
@pytest.mark.root
def test_a_full_remote_is_attached_with_what_it_was_seen_to_do(node: Node, tmp_path: Path) -> None:
    """Nothing can be tried there: retention has to be able to make room; never of a remote not yet known."""
    point = tmp_path / "nas"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(point)], check=True)
    try:
        first = do(node, point)
        with pytest.raises(OSError, match="No space"):
            (point / "filler").write_bytes(b"x" * (2 << 20))
        known = {"job_id": first.identity.job_id, "remote_id": first.identity.remote_id}
        with pytest.raises(NoSpaceError):
            do(node, point, **known)
        with pytest.raises(NoSpaceError):
            do(node, point, job_id=first.identity.job_id, abilities=first.abilities)
        with pytest.raises(RemoteNotOurs):
            do(node, point, **known | {"remote_id": "another"}, abilities=first.abilities)
        again = do(node, point, **known, abilities=first.abilities)
        assert (again.identity, again.abilities) == (first.identity, first.abilities)
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_symlink_into_a_local_directory_is_found_where_the_remote_is_attached(
    node: Node, tmp_path: Path
) -> None:
    """The configuration compares spellings alone; nothing is written there, nor inside another remote."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "save")
    state = tmp_path / "state"
    state.mkdir()
    for url, more in (
        (link / "nas", {}),
        (link, {}),
        (tmp_path, {}),
        (state / "nas", {"apart_from": (str(state),)}),
    ):
        with pytest.raises(RemoteNotOurs, match="lies there too"):
            do(node, url, **more)
    assert list((tmp_path / "save").iterdir()) == []
    assert list(state.iterdir()) == []
    do(node, tmp_path / "nas")
    inner = tmp_path / "inner"
    inner.symlink_to(tmp_path / "nas")
    with pytest.raises(RemoteNotOurs, match=f"lies inside the remote {tmp_path / 'nas'}"):
        do(node, inner / "second")
    assert not (tmp_path / "nas" / "second").exists()
