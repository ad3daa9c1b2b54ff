"""Which order a save is given when it is sealed, and which it has once it is committed (§3 *Order*, P9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.model.listing import FolderListing, ListedFile, SaveDirListing
from ckptd.core.model.manifest import Commit, ManifestRef
from ckptd.core.model.records import ZERO, UploadRecord, UploadState
from ckptd.core.model.save import Order
from ckptd.daemon.intake.initial_scan import PreexistingSaves
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.daemon.intake.ordering import Ordering
from ckptd.daemon.state.remote_sync import adopt_commits
from ckptd.storage.journal.journal import Journal
from ckptd.storage.journal.schema import FOUND
from ckptd.storage.remote.messages import CommitView, Observation
from tests.support.core_views import sealed
from tests.support.states import ONE_RUN, job_state

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Remembered(KnownSaves):
    """A remote that knows no save of these, and a higher order."""

    precedes: bool = False
    copied: Order | None = None

    def known_order(self, tag: str, fingerprints: tuple[tuple[str, str], ...]) -> Order | None:
        return None

    def original(
        self, tag: str, fingerprints: tuple[tuple[str, str], ...], shards: frozenset[tuple[str, str]]
    ) -> Order | None:
        return self.copied

    def highest(self) -> Order | None:
        return Order(2, 20, 1)

    def orders_of(self, tag: str) -> list[Order]:
        return []

    def may_precede(self, written_ns: int, order: Order) -> bool:
        return self.precedes


@dataclass(frozen=True)
class Link:
    """What adopting and sealing ask of one."""

    name: str
    observation: Observation | None

    @property
    def tag_views(self) -> dict[str, Any]:
        return {}

    def seen(self, tag: str) -> tuple[list[Any], list[Any]]:
        return [], []


def folder(step: int, written_ns: int) -> FolderListing:
    identity = FileIdentity(dev=1, ino=step, size_bytes=1, mtime_ns=written_ns, ctime_ns=written_ns)
    shard = ListedFile(path="zero_pp_rank_0_mp_rank_00_optim_states.pt", identity=identity)
    return FolderListing(tag=f"s{step}", folder=FolderIdentity(dev=1, ino=100 + step), files=(shard,))


def ordered(path: Path, *listed: FolderListing, step: int) -> Order:
    """The order that a process of its own gives what lies there."""
    state = job_state(Journal(path))
    state.load()
    ordering = Ordering(state, Remembered(), lambda _: False)
    ordering.note_changes(SaveDirListing(device=1, folders=listed), 0.0)
    one = next(f for f in listed if f.tag == f"s{step}")
    order = ordering.order_of(one, step, (), is_new_tag=True)
    state.journal.close()
    return order


def test_what_was_found_is_old_for_every_process(tmp_path: Path) -> None:
    """Not for the one alone that began the journal; what was saved since may be a rewind."""
    path = tmp_path / "journal.db"
    assert ordered(path, folder(5, 1), step=5) == Order(2, 5, 0)
    assert ordered(path, folder(5, 1), step=5) == Order(2, 5, 0)
    assert ordered(path, folder(5, 1), folder(7, 2), step=7) == Order(3, 7, 1)
    assert ordered(path, folder(5, 3), step=5) == Order(3, 5, 1)


@pytest.mark.parametrize("is_found", [True, False])
def test_what_a_new_journal_finds_is_old_without_doubt(tmp_path: Path, *, is_found: bool) -> None:
    """Another node committed more: of what lay here before, nothing is in doubt, so `existing` sends one."""
    state = job_state(Journal(tmp_path / "journal.db"))
    earlier = state.journal.add_save(sealed(4, 1, 0), found_first=True, adopted=False, seen_at=0.0)
    state.load()
    one = folder(5, 1)
    if not is_found:  # the journal is an old one
        state.journal.set_meta(FOUND, "{}")
    ordering = Ordering(state, Remembered(True), lambda _: False)
    ordering.note_changes(SaveDirListing(device=1, folders=(one,)), 0.0)
    order = ordering.order_of(one, 5, (), is_new_tag=True)
    assert ordering.rivals(one, order) == (() if is_found else (earlier,))
    state.journal.close()


@pytest.mark.parametrize(
    ("own", "step", "precedes", "first_seen_ns", "wanted"),
    [
        (Order(1, 4, 1), 5, True, 1, Order(1, 5, 2)),
        (Order(2, 8, 1), 5, True, 1, Order(2, 5, 0)),  # sent back here, and then the other node went on
        (Order(1, 22, 1), 25, True, 1, Order(1, 25, 2)),  # that one was sent back
        (None, 5, True, 1, Order(2, 5, 0)),
        (Order(1, 4, 1), 5, False, 1, Order(3, 5, 1)),  # all clocks say that it is later
        (Order(1, 4, 1), 5, True, 2, Order(3, 5, 1)),  # seen to change: it is saved here, now
        (Order(2, 20, 1), 5, True, 1, Order(3, 5, 1)),  # made here
        (Order(2, 4, 1), 25, True, 1, Order(2, 25, 2)),
    ],
)
def test_what_lay_here_while_another_node_went_on_is_no_rewind(
    tmp_path: Path, own: Order | None, step: int, precedes: bool, first_seen_ns: int, wanted: Order
) -> None:
    """It has the order that it would have had in time, as long as no more than that is known of it."""
    state = job_state(Journal(tmp_path / "journal.db"))
    if own is not None:
        mine = sealed(own.step, own.branch, own.save_seq)
        state.journal.add_save(mine, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    state.journal.set_meta(FOUND, "{}")
    ordering = Ordering(state, Remembered(precedes), lambda _: False)
    ordering.note_changes(SaveDirListing(device=1, folders=(folder(step, first_seen_ns),)), 0.0)
    one = folder(step, 1)
    ordering.note_changes(SaveDirListing(device=1, folders=(one,)), 5.0)
    assert ordering.order_of(one, step, (), is_new_tag=True) == wanted
    state.journal.close()


@pytest.mark.parametrize(("apart_seconds", "wanted"), [(-60, (1, 5, 2)), (60, (1, 5, 2)), (62, (3, 5, 1))])
def test_a_run_that_was_sent_back_here_is_told_by_its_times(
    tmp_path: Path, apart_seconds: int, wanted: tuple[int, int, int]
) -> None:
    """Later than the other node's save by more than their clocks may differ: `save_spread`, 60 s."""
    state = job_state(Journal(tmp_path / "journal.db"))
    state.journal.add_save(sealed(4, 1, 1), found_first=False, adopted=True, seen_at=0.0)
    state.journal.set_meta(FOUND, "{}")
    state.load()
    key = "_ckptd/nodes/s20~g1~zero/b~d0.n1of1.m00000000.t990_1000~000000000000.json"
    reference = ManifestRef(key=key, sha256="0" * 64)
    commit = Commit.model_construct(tag="a", branch=2, step=20, save_seq=1, manifests=(reference,))
    view = CommitView.model_construct(key="k", sha256="d", commit=commit, disputed=False)
    link = Link("nas", Observation.model_construct(commits=(view,)))
    links = cast("Any", {"nas": link})
    known_saves = KnownSaves(
        state,
        tmp_path,
        links,
        "a",
        PreexistingSaves(frozenset(), frozenset()),
        60.0,
        {},
        lambda: None,
        ONE_RUN,
    )
    ordering = Ordering(state, known_saves, lambda _: False)
    one = folder(5, (1000 + apart_seconds) * 10**9)
    ordering.note_changes(SaveDirListing(device=1, folders=(one,)), 0.0)
    assert ordering.order_of(one, 5, (), is_new_tag=True) == wanted
    state.journal.close()


@pytest.mark.parametrize(
    ("copied", "step", "wanted"),
    [
        (Order(1, 5, 1), 5, Order(1, 5, 0)),
        (Order(2, 20, 1), 2, Order(2, 2, 0)),  # its shards have no step, and its new name another number
        (Order(1, 30, 1), 30, Order(1, 30, 0)),  # of the branch that was left
        (Order(2, 20, 1), 20, Order(2, 20, 2)),  # one state under two names, as trainers save it
        (Order(2, 20, 1), 30, Order(2, 30, 2)),  # nothing was learned since
        (None, 5, Order(3, 5, 1)),
    ],
)
def test_a_copy_of_an_older_save_is_no_rewind(
    tmp_path: Path, copied: Order | None, step: int, wanted: Order
) -> None:
    """It stays until the next save, like all of which the order is a guess."""
    state = job_state(Journal(tmp_path / "journal.db"))
    for known in (Order(1, 1, 1), Order(2, 20, 1)):
        mine = sealed(known.step, known.branch, known.save_seq)
        state.journal.add_save(mine, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    one = folder(step, 1)
    ordering = Ordering(state, Remembered(copied=copied), lambda _: False)
    ordering.note_changes(SaveDirListing(device=1, folders=()), 0.0)
    ordering.note_changes(SaveDirListing(device=1, folders=(one,)), 5.0)
    order = ordering.order_of(one, step, (), is_new_tag=True)
    assert order == wanted
    is_guess = copied is not None and order < Order(2, 20, 1)
    assert ordering.rivals(one, order) == (tuple(state.saves.rows) if is_guess else ())
    state.journal.close()


def observed(order: Order, record: UploadRecord) -> Observation:
    commit = Commit.model_construct(branch=order.branch, step=order.step, save_seq=order.save_seq)
    view = CommitView.model_construct(
        key=record.commit_key, sha256=record.commit_sha256, commit=commit, disputed=False
    )
    return Observation.model_construct(commits=(view,))


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ((Order(5, 90, 7),), Order(5, 90, 7)),
        ((Order(9, 90, 7),), Order(9, 90, 7)),
        ((Order(5, 90, 7), Order(6, 90, 7)), Order(6, 90, 7)),
        ((Order(5, 90, 7), None), Order(7, 90, 1)),
        ((Order(8, 90, 7), None), Order(8, 90, 7)),
        ((None,), Order(7, 90, 1)),
    ],
)
def test_a_committed_save_has_the_order_of_its_commit(
    tmp_path: Path, told: tuple[Order | None, ...], wanted: Order
) -> None:
    """Higher or lower than the one it was sealed with; of several the highest, once all are known."""
    state = job_state(Journal(tmp_path / "journal.db"))
    mine = sealed(90, 7, 1)
    save_id = state.journal.add_save(mine, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    links = []
    for number, order in enumerate(told):
        record = UploadRecord(
            remote=f"r{number}", form=ZERO, state=UploadState.COMMITTED, commit_key="k", commit_sha256="d"
        )
        state.uploads.put(save_id, record)
        links.append(Link(record.remote, observed(order, record) if order is not None else None))
    adopt_commits(state, cast("Any", links))
    assert state.saves.rows[save_id].save.order == wanted
    state.load()
    assert state.saves.rows[save_id].save.order == wanted
    state.journal.close()
