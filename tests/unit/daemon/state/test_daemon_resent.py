"""Two saves of one tag on the way to one folder of a remote: one replaces what the other verified (P2, P4).

The deciding thread's orders, carried out by the code of the remote's child on a real directory.
"""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.base import files
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.actions import Upload
from ckptd.daemon.uploads.requests import hold_name
from ckptd.daemon.uploads.uploads import UploadManager
from ckptd.errors import CkptdError, RemoteError
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.observe import live_commits, manifests_of, read_remote
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.checksums import crc64, to_hex
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.stores.scene import JOB_ID, Node
from tests.support.states import job_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptd.storage.remote.observe import AttachedRemote


class _OneByOne(DirectoryStore):
    """One object after the other, so that every attempt has come as far as it says."""

    lanes = 1


class Resent:
    """A node that holds every save of its one tag, and a link that can be cut after some objects."""

    def __init__(self, tmp_path: Path) -> None:
        self.node = Node(tmp_path / "save", tag="last")
        self.nas = tmp_path / "nas"
        self.nas.mkdir()
        self.ground: AttachedRemote = self.node.attached(
            _OneByOne(str(self.nas), owner="id-n0", window_bytes=1 << 20)
        )
        self.state = job_state(Journal(tmp_path / "journal.db"))
        self.orders: list[tuple[m.UploadRequest, Any]] = []
        settings = self.node.settings(self.nas, job_id=JOB_ID)
        link = SimpleNamespace(
            settings=settings, start_transfer=self._order, observe=lambda: None, note_answer=lambda: None
        )
        link.is_cancelled, link.note_transfer_failed, link.forget_tag = (
            False,
            lambda *_, **__: None,
            lambda _: None,
        )
        values = {"save_dir": self.node.save_dir, "shared_fs": False, "shared_takeover_seconds": 180.0}
        config = cast("Any", SimpleNamespace(**values, save_spread_seconds=60.0, remotes=(), file=None))
        links = cast("Any", {"nas": link})
        self.uploads = UploadManager(config, "", self.state, links, cast("Any", None), lambda: None)

    def _order(self, order: m.UploadRequest, heard: Any, _form: str) -> int:
        self.orders.append((order, heard))
        return len(self.orders)

    def save(self, mark: bytes, step: int) -> int:
        """A save of that tag, held as clones are; its row."""
        shutil.rmtree(self.node.save_dir / self.node.tag, ignore_errors=True)
        self.node.write_all(mark)
        sealed = self.node.sealed(step=step, save_seq=step)
        save_id = self.state.journal.add_save(sealed, found_first=False, adopted=True, seen_at=0.0)
        self.state.journal.set_held(save_id, held=True)
        self.state.load()
        place = self.node.save_dir / "_ckptd" / "hold" / hold_name(self.state.saves.rows[save_id])
        shutil.copytree(self.node.save_dir / self.node.tag, place)
        return save_id

    def upload(self, save_id: int, *, cut_after: int = 99) -> UploadState:
        """One attempt; the link is cut after so many objects, whatever is under way beside them."""
        with files.opened_dir(self.node.save_dir) as fd:
            self.uploads.upload(
                Upload(save_id=save_id, remote="nas", form=ZERO, generation=1, attempt=0), fd, 0
            )
        order, heard = self.orders.pop()
        done, lock = 0, threading.Lock()

        def check() -> None:
            if done >= cut_after:
                raise RemoteError("the network went")

        def noted(what: m.UploadedObject) -> None:
            nonlocal done
            with lock:  # lanes come here at once; one of them may have looked before the cut
                check()
                done += 1
                heard(m.ObjectDone(object=what))

        control = TransferControl(pacer=RateLimiter(), check=check, on_moving=lambda *_: None, on_done=noted)
        try:
            heard(upload_form(self.ground, order, control))
        except CkptdError as error:
            heard(m.Failed(error=type(error).__name__, message=error.message))
        return self.state.uploads.record(save_id, "nas", ZERO).state

    def committed_wrongly(self) -> list[str]:
        """Objects that are not what the COMMIT says of them."""
        (view,) = live_commits(read_remote(self.ground.store))
        return [
            file.key
            for manifest in manifests_of(self.ground.store, view.commit)
            for file in manifest.files
            if to_hex(crc64((self.nas / file.key).read_bytes())) != file.checksums.crc64nvme
        ]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Resent]:
    life = Resent(tmp_path)
    yield life
    life.state.journal.close()


@pytest.mark.parametrize("cuts", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("ends", ["the first", "the second"])
def test_what_was_verified_of_one_is_not_believed_after_the_other(
    life: Resent, cuts: tuple[int, int], ends: str
) -> None:
    """The second replaced objects of the first, of the same size; then one of them goes on."""
    first = life.save(b"1", 5)
    assert life.upload(first, cut_after=cuts[0]) is UploadState.FAILED
    second = life.save(b"2", 6)
    assert life.upload(second, cut_after=cuts[1]) is UploadState.FAILED
    if ends == "the second":
        assert life.upload(first, cut_after=1) is UploadState.FAILED
    assert life.upload(first if ends == "the first" else second) is UploadState.COMMITTED
    assert not life.committed_wrongly()
