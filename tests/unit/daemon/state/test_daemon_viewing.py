"""What the planner sees of a job: each fact of the daemon's memory that protects something, by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.base import files
from ckptd.base.identity import FolderIdentity
from ckptd.config.loader import job_from_arguments
from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.listing import FolderListing, ListedFile, SaveDirListing
from ckptd.core.model.records import DerivedRecord, SaveState
from ckptd.core.model.save import SaveWindow
from ckptd.core.policy.view import JobView
from ckptd.daemon.job import Job
from ckptd.daemon.state import view_builder
from ckptd.daemon.state.local_saves import LocalSaves
from ckptd.daemon.state.upload_records import Uploads
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import resized, sealed
from tests.support.states import job_state
from tests.unit.daemon.state.test_daemon_waiting import view_of


def test_a_folder_that_a_worker_still_removes_counts_as_pruned() -> None:
    """Its name goes first, the row is ended when all has gone: a turn between them dropped the universal form
    that a ladder leaves in its place."""

    def is_pruned(state: SaveState) -> bool:
        row: Any = SimpleNamespace(
            id=1, save=sealed(1), state=state, adopted=True, found_first=False, held=False, weights={}
        )
        row.derived = DerivedRecord()
        job: Any = SimpleNamespace(existing="all", remotes=())
        nothing: Any = None
        daemon: Any = SimpleNamespace(saves=LocalSaves(nothing), uploads=Uploads(nothing))
        return view_builder._fresh(job, daemon, row, None, frozenset()).is_pruned

    assert [is_pruned(state) for state in ("present", "pruned", "vanished", "superseded")] == [
        True,
        True,
        False,
        False,
    ]


class House:
    """A job with one sealed save, as its daemon has it in memory."""

    def __init__(self, root: Path) -> None:
        self.save_dir = root / "run"
        self.save_dir.mkdir()
        self.config = job_from_arguments(str(self.save_dir), str(root / "nas"), check_paths=False)
        (remote,) = self.config.remotes
        self.state = job_state(Journal(root / "journal.db"))
        self.save = sealed(1)
        self.id = self.state.journal.add_save(self.save, found_first=False, adopted=True, seen_at=0.0)
        self.state.load()
        self.state.is_first_scan = False
        self.link: Any = SimpleNamespace(
            name=remote.name,
            observation=None,
            is_ready=True,
            others=(),
            is_claimed=True,
            is_transferring=False,
            seconds_to_transfer=0.0,
            uploading=None,
            known_tags=frozenset,
            settings=SimpleNamespace(node="n0"),
        )
        self.lists()

    def lists(self, **changes: Any) -> None:
        """The save's folder as the last scan found it."""
        listed = tuple(ListedFile(path=f.path, identity=f.identity) for f in self.save.files)
        folder = FolderListing(tag=self.save.tag, folder=self.save.folder, files=listed)
        self.state.folders.listing = SaveDirListing(device=1, folders=(replace(folder, **changes),))

    def view(self) -> JobView:
        with files.opened_dir(self.save_dir) as fd:
            return view_builder.build_view(
                self.config,
                self.state,
                {self.link.name: self.link},
                fd,
                pins=frozenset(),
                damaged=frozenset(),
                may_delete=True,
                is_paused=False,
                is_spread=False,
                drain=None,
                removal=None,
                lease=None,
            )


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.state.journal.close()


def _reads_it(house: House) -> None:
    house.state.saves.busy[house.id] += 1


def _just_started(house: House) -> None:
    house.state.is_first_scan = True


def _saves(house: House) -> None:
    house.state.folders.in_flight = frozenset({"global_step2"})


def _has_a_link(house: House) -> None:
    house.lists(irregular=("link",))


def _was_written(house: House) -> None:
    (shard,) = house.save.files
    other = replace(shard.identity, ctime_ns=shard.identity.ctime_ns + 1)
    house.lists(files=(ListedFile(path=shard.path, identity=other),))


def _was_swapped(house: House) -> None:
    house.lists(folder=FolderIdentity(dev=1, ino=7))


def _has_a_commit(house: House) -> None:
    house.link.observation = SimpleNamespace(commits=(view_of(),), retiring=())


def _has_a_disputed_one(house: House) -> None:
    house.link.observation = SimpleNamespace(commits=(view_of(disputed=True),), retiring=())


CALM = {
    "is_busy": False,
    "is_first_scan": False,
    "is_save_in_flight": False,
    "is_intact": True,
    "has_unlisted": (),
    "commits": 0,
}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda _: None, {}),
        (_reads_it, {"is_busy": True}),
        (_just_started, {"is_first_scan": True}),
        (_saves, {"is_save_in_flight": True}),
        (_has_a_link, {"has_unlisted": ("link",)}),
        (_was_written, {"is_intact": False}),
        (_was_swapped, {"is_intact": False}),
        (_has_a_commit, {"commits": 1}),
        (_has_a_disputed_one, {}),
    ],
)
def test_each_fact_of_the_daemon_reaches_the_planner(
    house: House, change: Callable[[House], None], seen: dict[str, Any]
) -> None:
    """And no other changes with it."""
    house.view()  # kept views must not hide it
    change(house)
    view = house.view()
    (save,), (remote,) = view.saves, view.remotes
    assert {
        "is_busy": save.is_busy,
        "is_first_scan": view.is_first_scan,
        "is_save_in_flight": view.is_save_in_flight,
        "is_intact": save.is_intact,
        "has_unlisted": save.has_unlisted,
        "commits": len(remote.commits),
    } == CALM | seen


@pytest.mark.parametrize(
    ("rights", "differing", "may_delete"),
    [(True, (), True), (False, (), False), (True, ("b",), False), (False, ("b",), False)],
)
def test_a_node_that_another_is_configured_unlike_may_not_delete(
    house: House, rights: bool, differing: tuple[str, ...], may_delete: bool
) -> None:
    """By its own limits it might let go what the others keep (H12)."""
    assert _planned(house, rights=rights, differing=differing).may_delete is may_delete


@pytest.mark.parametrize(
    ("pins", "damaged"), [((), ()), (("s1b1",), ()), ((), ("s1b1",)), (("s2b1",), ("s1b1",))]
)
def test_what_is_damaged_in_a_remote_is_not_called_pinned(
    house: House, pins: tuple[str, ...], damaged: tuple[str, ...]
) -> None:
    """What lies here may be all that a repair can take it from: it is kept for that, as what it is."""
    view = _planned(house, pins=pins, damaged=damaged)
    assert view.pinned_tags == set(pins)
    assert view.saves[0].is_pinned is ("s1b1" in pins)
    assert view.damaged_tags == set(damaged)


def _planned(
    house: House,
    *,
    rights: bool = True,
    differing: tuple[str, ...] = (),
    pins: tuple[str, ...] = (),
    damaged: tuple[str, ...] = (),
) -> JobView:
    """What the job's own turn plans with."""
    job: Any = SimpleNamespace(
        config=house.config,
        sessions={house.link.name: house.link},
        known_saves=SimpleNamespace(pins=frozenset(pins)),
        deletion_rights=SimpleNamespace(are_held=rights),
        peers=SimpleNamespace(
            differing=lambda: differing, lease_status=None, is_spread=True, damaged=frozenset()
        ),
        state=house.state,
        control=SimpleNamespace(pause=None, drain=None, removal=None, plan=None, may_act=True),
        executor=SimpleNamespace(
            scrubber=SimpleNamespace(damaged=frozenset(("nas", tag, "zero") for tag in damaged)),
            execute=lambda *_: None,
        ),
        supervisor=SimpleNamespace(reserve=SimpleNamespace(keep=lambda *_: None)),
        state_dir=house.save_dir,
    )
    with files.opened_dir(house.save_dir) as fd:
        Job._plan_and_act(job, house.state, fd)
    view: JobView = job.view
    return view


@pytest.mark.parametrize(
    ("sizes", "unsealed", "need"),
    [
        ((), (), 0),
        ((900, 100, 100, 100, 100), (), 990),
        ((900, 100, 100, 100, 100, 100), (), 110),
        ((900, 100, 100, 100), (100,), 990),
        ((900, 100, 100, 100, 100), (100,), 110),
        ((100,), (500,), 550),
    ],
)
def test_the_next_save_is_taken_for_as_large_as_the_largest_of_five(
    tmp_path: Path, sizes: tuple[int, ...], unsealed: tuple[int, ...], need: int
) -> None:
    """And a tenth; what is complete and not sealed yet lies here all the same (P13)."""
    state = job_state(Journal(tmp_path / "journal.db"))
    for step, size in enumerate(sizes, start=1):
        save = resized(sealed(step), size)
        state.journal.add_save(save, found_first=False, adopted=True, seen_at=0.0)
    state.load()
    folders = []
    for step, size in enumerate(unsealed, start=50):
        save = resized(sealed(step), size)
        listed = tuple(ListedFile(path=f.path, identity=f.identity) for f in save.files)
        folders.append(FolderListing(tag=save.tag, folder=save.folder, files=listed))
        window = SaveWindow(first=step, last=step)
        state.folders.verdicts[save.tag] = Verdict(state=State.COMPLETE, window=window, step=step)
    state.folders.listing = SaveDirListing(device=1, folders=tuple(folders))
    assert view_builder.next_save_of(state) == need
    state.journal.close()
