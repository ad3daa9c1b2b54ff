"""Two remotes of a job that are one directory: the second is not attached, and holds nothing (P1, P2)."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.config.loader import load_job
from ckptd.config.schema import DaemonConfig
from ckptd.daemon.uploads.attachment import AWAY_NEXT_STEP, on_attached
from ckptd.errors import ConfigError
from ckptd.maintenance.check import check_job
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.attach import NEXT_STEP, attach
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.open import open_store
from tests.stores.scene import Node
from tests.unit.daemon.state.test_daemon_links import IDENTITY, Line, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptd.daemon.state.state import JobState
    from ckptd.storage.child.slots import RemoteProcess

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mounts)")


def answer(place: str | None, remote_id: str = "r") -> m.Attached:
    """What a child says of a remote."""
    return m.Attached(
        identity=IDENTITY.model_copy(update={"remote_id": remote_id}),
        abilities=Abilities(create_only=True, checksum=None, resumable=True),
        place=place,
    )


class Two:
    """A job with the remotes `nas` and `b`, in this order, neither attached."""

    def __init__(self, tmp_path: Path) -> None:
        self.journal = Journal(tmp_path / "journal.db")
        self.scenes = {name: Scene(tmp_path / name, name) for name in ("nas", "b")}
        self.sessions = {name: scene.session for name, scene in self.scenes.items()}
        state = cast("JobState", SimpleNamespace(journal=self.journal))
        for name, session in self.sessions.items():
            session.attached = session.observation = None
            session.settings = session.settings.model_copy(update={"remote_id": None, "job_id": None})
            session._client = cast("RemoteProcess", Line())
            session._on_attached = on_attached(
                name,
                self.sessions,
                state,
                is_shared=False,
                learn_job_id=lambda _: None,
                wake=lambda: None,
            )

    def hears(self, name: str, place: str | None, remote_id: str = "r") -> bool:
        """The remote answers; whether it is attached then."""
        self.sessions[name]._attached(answer(place, remote_id))
        return self.sessions[name].attached is not None

    def problem(self, name: str) -> Any:
        return next(iter(self.scenes[name].problems.all()), None)

    def again(self) -> None:
        """The daemon starts again."""
        for session in self.sessions.values():
            session.attached = session.observation = None


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    one = Two(tmp_path)
    yield one
    one.journal.close()


def test_of_two_urls_of_one_bucket_the_second_is_not_attached(two: Two) -> None:
    for name, url in (("nas", "s3://b/p"), ("b", "s3://b/p/")):
        two.sessions[name].settings = two.sessions[name].settings.model_copy(update={"url": url})
    assert two.hears("nas", "object:17")
    assert not two.hears("b", "object:17")
    assert "same bucket and prefix as remote nas" in two.problem("b").text
    two.again()
    assert two.hears("b", "object:17"), "the first may be a copy, and is asked for nothing meanwhile"
    assert two.hears("nas", "object:17")
    assert two.sessions["b"].attached is None
    assert two.hears("b", "object:18"), "a copy of the bucket"


def test_of_two_urls_of_one_sftp_directory_the_second_is_not_attached(two: Two) -> None:
    for name, url in (("nas", "sftp://h/p"), ("b", "sftp://alias/p")):
        two.sessions[name].settings = two.sessions[name].settings.model_copy(update={"url": url})
    assert two.hears("nas", "sftp:fe01:17")
    assert not two.hears("b", "sftp:fe01:17")
    assert "same directory as remote nas" in two.problem("b").text
    assert two.hears("b", "sftp:fe02:17"), "a copy on another disk that kept its times"


def test_the_second_of_two_that_are_one_is_not_attached(two: Two) -> None:
    assert two.hears("nas", "1:7")
    assert not two.hears("b", "1:7")
    said = two.problem("b")
    assert (said.code, said.next_step) == ("remote-not-ours", NEXT_STEP)
    assert "same directory as remote nas" in said.text
    assert two.journal.meta("remote_id:b") is None, "that identity is nas's"
    assert two.sessions["b"].settings.remote_id is None
    assert two.sessions["b"].is_duplicate, "so that a new journal does not wait for what nas told it"
    assert two.hears("b", "2:9", "another"), "the right share was mounted"
    assert not two.sessions["b"].is_duplicate


def test_the_later_one_goes_though_it_answered_first(two: Two) -> None:
    assert two.hears("b", "1:7")
    assert two.hears("nas", "1:7")
    assert two.sessions["b"].attached is None
    assert two.problem("nas") is None
    assert "same directory as remote nas" in two.problem("b").text


@pytest.mark.parametrize("there", ["1:8", "2:7", None])
def test_a_copy_with_the_same_identity_is_another_remote(two: Two, there: str | None) -> None:
    assert two.hears("nas", "1:7")
    assert two.hears("b", there)
    assert two.sessions["nas"].attached is not None


def test_one_directory_of_two_jobs_identities_is_no_matter_of_places(two: Two) -> None:
    assert two.hears("nas", "1:7")
    assert two.hears("b", "1:7", "another"), "a mount that changed in between: the identity tells"


def test_what_may_be_one_waits_for_the_first_to_tell(two: Two) -> None:
    """After a start: b alone would be thinned by its own limit, and nas with it."""
    two.journal.set_meta("remote_id:nas", "r")  # by an earlier release
    two.journal.set_meta("remote_id:b", "r")
    assert not two.hears("b", "1:7")
    said = two.problem("b")
    assert (said.code, said.next_step) == ("remote-unreachable", AWAY_NEXT_STEP)
    assert two.hears("nas", "1:9")
    assert two.hears("b", "1:7"), "they are two"
    two.again()
    assert two.hears("b", "1:7"), "which is known by now, though nas is away"


def test_a_device_that_was_numbered_anew_proves_nothing(two: Two) -> None:
    assert two.hears("nas", "1:7")
    two.again()
    assert not two.hears("b", "5:7")
    assert two.hears("nas", "5:7")
    assert not two.hears("b", "5:7")


def test_a_copy_at_the_root_of_a_mount_goes_on_without_the_original(two: Two) -> None:
    """All roots of one kind of file system have one inode number: the copy was refused at each start."""
    assert two.hears("nas", "41:2.77")
    assert two.hears("b", "42:2.99")
    two.again()
    assert two.hears("b", "51:2.99")


def test_no_other_kind_of_store_waits(two: Two) -> None:
    two.journal.set_meta("remote_id:nas", "r")
    nas = two.sessions["nas"]
    nas.settings = nas.settings.model_copy(update={"url": "s3://bucket/run"})
    assert two.hears("b", "1:7")
    assert two.hears("nas", None)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A bind mount of `nas`."""
    (tmp_path / "nas").mkdir()
    (tmp_path / "again").mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "nas", tmp_path / "again"], check=True)
    yield tmp_path / "again"
    subprocess.run(["umount", tmp_path / "again"], check=True)


@pytest.mark.root
@ROOT_ONLY
def test_a_bind_mount_shows_one_place_and_check_refuses_it(tmp_path: Path, mounted: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "nas" / "run").mkdir()
    node = Node(tmp_path / "save")
    places = []
    for url in (tmp_path / "nas" / "run", mounted / "run"):
        settings = node.settings(url)
        places.append(attach(open_store(settings.url), settings).place)
    assert places[0] == places[1] is not None
    path = tmp_path / "job.toml"
    remotes = "".join(
        f'[[remote]]\nname = "{name}"\nurl = "{url}"\nsame_filesystem = true\n'
        for name, url in (("nas", tmp_path / "nas" / "run"), ("b", mounted / "run"))
    )
    path.write_text(f'save_dir = "{tmp_path}/save"\n{remotes}')
    found = [f for f in check_job(load_job(path), DaemonConfig(), os.environ) if f.verdict == "fail"]
    assert [(f.what, f.exit_code) for f in found] == [("remote b", ConfigError.exit_code)]
    assert "same directory as remote nas" in found[0].text
