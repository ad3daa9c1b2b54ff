"""What becomes of shards that were uploaded before their save was whole: a save's, or deleted in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.records import ZERO, ObjectRow, UploadRecord, UploadState
from ckptd.daemon.uploads.early import EarlyUploader
from ckptd.errors import CkptdError, NotPermitted, RefusedError, RemoteUnreachable
from ckptd.storage.journal.journal import EARLY_ID, Journal
from ckptd.storage.remote import messages as m
from tests.support.core_views import sealed
from tests.support.states import job_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAS = "nas"


class House:
    """A daemon's memory of one remote, and the orders that it gives."""

    def __init__(self, root: Path) -> None:
        self.state = job_state(Journal(root / "journal.db"))
        self.save = sealed(1)
        self.id = self.state.journal.add_save(self.save, found_first=False, adopted=True, seen_at=0.0)
        self.state.load()
        self.key = f"{self.save.tag}/{self.save.files[0].path}"
        self.orders: list[m.DeleteEarly] = []
        self.failed: list[CkptdError] = []
        self.session = SimpleNamespace(
            name=NAS,
            may_transfer=True,
            is_claimed=True,
            settings=SimpleNamespace(node_id="id-n0"),
            start_transfer=self._start,
            note_transfer_failed=self.failed.append,
        )
        config: Any = SimpleNamespace(save_dir=root)
        sessions: Any = {NAS: self.session}
        self.early = EarlyUploader(config, self.state, sessions, lambda: None)

    def _start(self, order: m.DeleteEarly, on_answer: Any) -> None:
        self.orders.append(order)
        self.answer = on_answer

    def sent(self, key: str, *, is_whole: bool = True, token: str = "") -> None:
        row = ObjectRow(key=key, bytes=9, flushed_bytes=9, crc64="0" * 16, proof="none", token=token)
        row = row if is_whole else row.model_copy(update={"proof": None})
        self.state.journal.put_object(EARLY_ID, NAS, ZERO, row)

    def left(self, save_id: int = EARLY_ID) -> list[str]:
        return [row.key for row in self.state.journal.objects(save_id, NAS, ZERO)]

    def settle(self, *, rests: bool = False) -> m.DeleteEarly | None:
        """The order that this turn gives."""
        before = len(self.orders)
        self.early.settle(rests=rests)
        return self.orders[before] if len(self.orders) > before else None


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.state.journal.close()


def failed(error: CkptdError) -> m.Failed:
    return m.Failed(error=type(error).__name__, message=error.message)


def test_a_sealed_save_gets_its_objects_and_half_ones_are_given_up(house: House) -> None:
    """A half upload is never gone on with; the key is the save's, so nothing is deleted there."""
    house.sent(house.key)
    assert house.settle() is None
    assert (house.left(), house.left(house.id)) == ([], [house.key])
    house.sent(house.key, is_whole=False, token="7:upload")
    order = house.settle()
    assert order is not None
    assert (order.uploads, order.objects) == (((house.key, "7:upload"),), ())
    house.answer(m.Done())
    assert house.left() == []


def test_of_a_save_that_is_committed_no_row_stays(house: House) -> None:
    house.state.uploads.put(house.id, UploadRecord(remote=NAS, form=ZERO, state=UploadState.COMMITTED))
    house.sent(house.key)
    house.early.settle(rests=True)
    assert house.left() == house.left(house.id) == []


@pytest.mark.parametrize("state", [State.SAVING, State.UNKNOWN, State.COMPLETE])
def test_what_may_be_sealed_soon_is_waited_for(house: House, state: State) -> None:
    """A save of terabytes is read and flushed for longer than it counts as being written."""
    house.sent("written/a")
    house.state.folders.set_verdict("written", Verdict(state=state))
    assert house.settle() is None
    house.state.folders.set_verdict("written", Verdict(state=State.INCOMPLETE))
    house.state.folders.set_in_flight(["written"])
    assert house.settle() is None
    house.state.folders.set_in_flight([])
    assert house.settle() is not None


@pytest.mark.parametrize("change", [{"may_transfer": False}, {"is_claimed": False}])
def test_uploads_come_before_the_deletion(house: House, change: dict[str, bool]) -> None:
    """It is begun when a turn's uploads have begun, and then no upload cancels it: it has no form."""
    house.sent("gone/a")
    for name, value in change.items():
        setattr(house.session, name, value)
        assert house.settle() is None
        setattr(house.session, name, not value)
    assert house.settle(rests=True) is None
    order = house.settle()
    assert order is not None
    assert order.objects == ("gone/a",)
    house.answer(m.Done())
    assert house.settle() is None
    assert house.left() == []


def test_a_remote_that_fails_is_tried_again_and_a_refusal_is_not(house: House) -> None:
    house.sent("gone/a")
    assert house.settle() is not None
    house.answer(failed(RemoteUnreachable("away")))
    assert len(house.failed) == 1
    for error in (NotPermitted("no right"), RefusedError("another node writes there, too")):
        house.state.journal.with_early.add(NAS)
        assert house.settle() is not None
        house.answer(failed(error))
        assert house.settle() is None
    assert len(house.failed) == 1
    assert house.left() == ["gone/a"]
