"""What becomes of a forecast: alarms of a job, from the slowest required remote (docs/design.md P17)."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.base.retry import BackedOff
from ckptd.config.schema import LocalConfig
from ckptd.core.completeness.judge import State, Verdict
from ckptd.core.model.listing import FolderListing, ListedFile, SaveDirListing
from ckptd.core.model.records import ZERO
from ckptd.core.model.save import Order, SaveWindow
from ckptd.core.policy.retention import Ephemeral, RetentionPolicy
from ckptd.core.policy.view import Disk
from ckptd.daemon.health.capacity import link_speed, outlook, see_outlook
from ckptd.daemon.resources.disk_yield import DiskYield
from ckptd.daemon.state.problems import Problems
from ckptd.daemon.state.state import JobState
from ckptd.daemon.state.upload_records import UploadProgress, Uploads
from ckptd.daemon.state.view_builder import disk_of, next_save_of
from ckptd.storage.journal.journal import Journal
from tests.support.core_views import job_view, resized, save_view, sealed
from tests.support.states import job_state

GB = 10**9


def scene(
    *,
    free_gb: int = 5000,
    speeds: dict[str, float],
    ago: float = 0.0,
    is_away: bool = False,
    unuploaded: str = "keep",
    limit: int | None = 6,
    every_steps: int | None = None,
    waiting: int = 0,
) -> Any:
    """A job that saves 60 GB and 500 steps every ten minutes, and its state.

    The newest `waiting` are not committed; of the oldest of these 54 GB are sent.
    """
    last = time.time() - ago
    saves = [
        SimpleNamespace(
            save=SimpleNamespace(
                window=SimpleNamespace(
                    first=int((last - 600.0 * n) * 1e9), last=int((last - 600.0 * n) * 1e9)
                ),
                total_bytes=60 * GB,
                step=9000 - 500 * n,
                tag=f"global_step{9000 - 500 * n}",
            ),
            seen_at=last - 600.0 * n,
            state="present",
            ended_at=None,
        )
        for n in range(6)
    ]
    remotes = [
        SimpleNamespace(name="nas", required=True, forms=("zero",)),
        SimpleNamespace(name="s3", required=False, forms=("zero",)),
    ]
    policy = RetentionPolicy(save_total_limit=limit, keep_every_steps=every_steps)
    here = [save_view(n, resized(sealed(9000 - 500 * n), 60 * GB), committed=n >= waiting) for n in range(6)]
    disk = Disk(free_bytes=free_gb * GB, reserve_bytes=66 * GB, can_clone=False)
    view = job_view(here, local_retention=policy, unuploaded=unuploaded, disk=disk)
    if waiting:
        view = replace(
            view, remotes=(replace(view.remotes[0], uploading=ZERO, uploading_save_id=waiting - 1),)
        )
    moving = UploadProgress(done_bytes=54 * GB, total_bytes=60 * GB, started_seconds=time.monotonic())
    job = SimpleNamespace(
        view=view,
        config=SimpleNamespace(
            remotes=remotes,
            local=SimpleNamespace(policy=policy),
            unuploaded=unuploaded,
            settle_seconds=10.0,
        ),
        sessions={
            r.name: SimpleNamespace(is_away=is_away, backed_off=None, idle_seconds=0.0) for r in remotes
        },
        disk_yield=SimpleNamespace(jobs_beside=lambda job: []),
        problems=Problems(),
    )
    state = SimpleNamespace(
        saves=SimpleNamespace(rows=dict(enumerate(saves))),
        folders=SimpleNamespace(listing=None, in_flight=frozenset()),
        other_host=None,
        uploads=Uploads(cast("Any", None)),
    )
    state.uploads.speeds.update(speeds)
    if waiting:
        state.uploads.progress[waiting - 1, "nas", ZERO] = moving
    return job, state


def alarms(job: Any, state: Any) -> dict[str, str]:
    see_outlook(job, state)
    return {p.code: f"{p.text}; {p.next_step}" for p in job.problems.all()}


def test_a_slow_required_remote_is_named_with_the_interval_it_could_carry() -> None:
    """100 MB/s are made and 30 MB/s carried: 500 steps become 1,700."""
    found = alarms(*scene(free_gb=3000, speeds={"nas": 30e6, "s3": 1e9}))
    assert found == {
        "link-slow": "production 100 MB/s, link 30 MB/s: uploads fall behind, disk full in 11h50m; "
        'save every 1,700 steps, or make the link faster; or set unuploaded = "thin": then not every save '
        "is uploaded"
    }


@pytest.mark.parametrize(("saves", "is_told"), [(4, False), (5, True)])
def test_a_slow_link_is_said_after_five_saves(saves: int, is_told: bool) -> None:
    """The first ones of a run lie closer together, or come with the data set's upload: no rate yet."""
    job, state = scene(free_gb=3000, speeds={"nas": 30e6, "s3": 1e9})
    state.saves.rows = dict(list(state.saves.rows.items())[:saves])
    assert ("link-slow" in alarms(job, state)) is is_told


def test_a_slow_link_is_said_where_the_trainer_rotates() -> None:
    """No retention key here: nothing that ckptd could let go sooner, and still not every save arrives."""
    found = alarms(*scene(speeds={"nas": 30e6}, limit=None))
    assert found == {
        "link-slow": "production 100 MB/s, link 30 MB/s: uploads fall behind, disk full in 13h53m; "
        "save every 1,700 steps, or make the link faster"
    }


def test_a_disk_that_nothing_leaves_waits_for_no_link() -> None:
    """Without a retention key no speed matters; with one a first upload is no reason for an alarm."""
    assert set(alarms(*scene(free_gb=100, speeds={}, limit=None))) == {"disk-full-soon"}
    assert alarms(*scene(free_gb=100, speeds={})) == {}


def test_what_keep_every_steps_keeps_is_named() -> None:
    found = alarms(*scene(free_gb=100, speeds={"nas": 1e9}, every_steps=500))
    assert found == {
        "disk-full-soon": "disk full in 1 saves / 16m40s at this pace; "
        "raise keep_every_steps in [local], or free space"
    }


@pytest.mark.parametrize("how", ["thin", "delete"])
def test_an_opt_out_spares_a_disk_that_has_the_room_it_needs(how: str) -> None:
    """It is still said that not every save arrives, and what would change that."""
    # 200 GB come while 60 GB are sent
    found = alarms(*scene(free_gb=500, speeds={"nas": 30e6}, unuploaded=how))
    assert set(found) == {"link-slow"}
    assert f'not every save is uploaded (unuploaded = "{how}")' in found["link-slow"]
    assert "disk full" not in found["link-slow"]
    away = alarms(*scene(free_gb=100, speeds={"nas": 30e6}, unuploaded=how, is_away=True))
    assert ("disk-full-soon" in away) is (how == "thin"), "thin needs a newer one that is committed"


def test_thin_is_no_cure_where_one_upload_outlasts_the_room() -> None:
    """Nothing goes before a newer one is committed: 100 GB are full before 60 GB are sent."""
    thinned = alarms(*scene(free_gb=100, speeds={"nas": 30e6}, unuploaded="thin"))
    assert "disk full in 16m" in thinned["link-slow"]
    assert "disk full in 1 saves" in thinned["disk-full-soon"]
    kept = alarms(*scene(free_gb=100, speeds={"nas": 30e6}))
    for found in (*thinned.values(), *kept.values()):
        assert 'unuploaded = "thin" is not enough here' in found
        assert "set unuploaded" not in found
    deleted = alarms(*scene(free_gb=100, speeds={"nas": 30e6}, unuploaded="delete"))
    assert set(deleted) == {"link-slow"}


def test_a_limit_that_is_more_than_the_disk_holds() -> None:
    """Whatever the link and the opt-out: what the limit keeps fills it."""
    for how in ("keep", "delete"):
        found = alarms(*scene(free_gb=100, speeds={"nas": 1e9}, limit=100, unuploaded=how))
        assert "lower save_total_limit" in found["disk-full-soon"]
    # six of 60 GB are here; the seventh stays too, and the eighth needs its room before one goes
    found = alarms(*scene(free_gb=110, speeds={"nas": 1e9}, limit=7))
    assert "disk full in 1 saves" in found["disk-full-soon"]
    assert alarms(*scene(free_gb=130, speeds={"nas": 1e9}, limit=7)) == {}


@pytest.mark.parametrize(
    ("how", "speed", "limit"), [("keep", 30e6, 6), ("thin", 30e6, 6), ("keep", 1e9, 9), ("delete", 1e9, 9)]
)
def test_what_was_found_at_the_first_start_is_to_be_adopted_first(how: str, speed: float, limit: int) -> None:
    """Neither a limit nor an opt-out lets it go: nothing that would not help is recommended meanwhile."""
    job, state = scene(free_gb=100, speeds={"nas": speed}, unuploaded=how, limit=limit)
    found = [replace(save_view(20 + n, sealed(n)), is_adopted=False, was_found_first=True) for n in (1, 2)]
    first = "`ckptd accept --existing` has the 2 that were there before ckptd uploaded and rotated; "
    assert all(first not in text for text in alarms(job, state).values())
    job.problems = Problems()
    job.view = replace(job.view, saves=(*job.view.saves, *found))
    said = alarms(job, state)
    assert "disk-full-soon" in said
    for text in said.values():
        assert f"; {first}" in text
        assert '"thin" is' not in text
        assert 'set unuploaded = "thin"' not in text
        assert "lower save_total_limit" not in text
    without, state = scene(free_gb=100, speeds={"nas": speed}, limit=None)
    without.view = replace(without.view, saves=tuple(found))
    assert all(first not in text for text in alarms(without, state).values()), "no key, nothing is rotated"


def test_what_is_written_of_the_next_save_is_its_room() -> None:
    """Of six committed ones six stay: there is room for the next while 45 of its 60 GB are written."""
    job, state = scene(free_gb=20, speeds={"nas": 1e9})
    assert "lower save_total_limit" in alarms(job, state)["disk-full-soon"]
    state.folders.in_flight, state.folders.verdicts = frozenset({"global_step9500"}), {}
    folder = SimpleNamespace(tag="global_step9500", total_bytes=45 * GB)
    state.folders.listing = SimpleNamespace(folders=[folder])
    job.problems = Problems()
    assert alarms(job, state) == {}
    state.folders.listing = SimpleNamespace(
        folders=[SimpleNamespace(tag="global_step9500", total_bytes=5 * GB)]
    )
    assert "disk full in 0 saves" in alarms(job, state)["disk-full-soon"]


def never_sealed(root: Path, *, count: int = 5) -> JobState:
    """Saves of 60 GB every ten minutes that no row knows, a fragment, and one that is being written."""
    now = time.time()
    state = job_state(Journal(root / "journal.db"))
    folders = []
    for n in range(count):
        at = int((now - 600.0 * (count - 1 - n)) * 1e9)
        file = FileIdentity(dev=1, ino=n, size_bytes=60 * GB, mtime_ns=at, ctime_ns=at)
        folder = FolderIdentity(dev=1, ino=100 + n)
        listed = (ListedFile(path="s_optim_states.pt", identity=file),)
        folders.append(FolderListing(tag=f"global_step{500 * n}", folder=folder, files=listed))
        window = SaveWindow(first=at, last=at)
        state.folders.verdicts[folders[-1].tag] = Verdict(state=State.COMPLETE, step=500 * n, window=window)
    for tag, kind in (("torn", State.TORN_RESAVE), ("begun", State.SAVING)):
        folders.append(replace_listing(folders[0], tag))
        state.folders.verdicts[tag] = Verdict(state=kind)
    state.folders.listing = SaveDirListing(device=1, folders=tuple(folders))
    state.folders.in_flight = frozenset({"begun"})
    return state


def replace_listing(folder: FolderListing, tag: str) -> FolderListing:
    return FolderListing(tag=tag, folder=folder.folder, files=folder.files)


def test_a_disk_fills_though_nothing_was_ever_sealed(tmp_path: Path) -> None:
    """A remote that never attached: what lies here complete is forecast, from the second save on.

    Three more fit: the one that is written just now, which has its room, is one of them.
    """
    for count, full in ((1, None), (2, 3), (5, 3)):
        root = tmp_path / str(count)
        root.mkdir()
        state = never_sealed(root, count=count)
        job, _ = scene(free_gb=130, speeds={}, is_away=True)
        job.view = replace(job.view, saves=())
        told = outlook(job, state)
        assert told.full_in_saves == full
        assert next_save_of(state) == 66 * GB
        assert ("disk-full-soon" in alarms(job, state)) is (full is not None)
        if full is not None:
            assert told.production_bytes_per_second == pytest.approx(0.1 * GB)
        silent = tuple(replace(remote, was_heard=False) for remote in job.view.remotes)
        job.view = replace(job.view, remotes=silent, unuploaded="delete")
        assert outlook(job, state).full_in_saves == full, "nothing goes before it was asked for pins"


def test_what_is_sealed_in_a_moment_takes_its_place(tmp_path: Path) -> None:
    """Between its last shard and its row a save is neither gone nor yet to come."""
    state = never_sealed(tmp_path, count=2)
    state.folders.in_flight = frozenset()
    job, _ = scene(free_gb=130, speeds={"nas": 1e9}, limit=3)
    job.view = replace(job.view, saves=())
    assert outlook(job, state).full_in_saves is None, "two are here, one more stays, and then one comes"
    job, _ = scene(free_gb=110, speeds={"nas": 1e9}, limit=3)
    job.view = replace(job.view, saves=())
    assert outlook(job, state).is_limit_too_high


def test_the_first_upload_tells_its_speed_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first day has none that ended; ten seconds of a ZeRO form to a required one do."""
    job, state = scene(speeds={})
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 20.0)
    moving = SimpleNamespace(started_seconds=began, done_bytes=600 * 10**6, start_bytes=0)
    state.uploads.progress = {(1, "s3", "zero"): moving, (1, "nas", "universal"): moving}
    assert link_speed(job, state) is None
    state.uploads.progress = {(1, "nas", "zero"): moving}
    assert link_speed(job, state) == pytest.approx(30e6, rel=0.01)
    assert "link 30 MB/s" in alarms(job, state)["link-slow"]
    state.uploads.progress = {
        (1, "nas", "zero"): SimpleNamespace(**vars(moving) | {"started_seconds": began + 15})
    }
    assert link_speed(job, state) is None


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        (
            {"free_gb": 50, "speeds": {"nas": 60e6}, "waiting": 4, "limit": 2},
            'unuploaded = "thin" deletes',
        ),
        ({}, 'unuploaded = "thin" is not enough here'),
        ({"limit": None}, "set save_total_limit in [local]"),
        ({"unuploaded": "thin", "is_away": True}, "make the link faster"),
    ],
)
def test_a_disk_that_will_be_full_names_the_cure_that_this_job_has(
    changes: dict[str, Any], cure: str
) -> None:
    settings: dict[str, Any] = {"free_gb": 100, "speeds": {"nas": 30e6}}
    found = alarms(*scene(**settings | changes))["disk-full-soon"]
    assert cure in found
    assert ("unuploaded" in found) is (changes.get("limit", 6) is not None)


def test_a_slow_optional_remote_alarms_nobody() -> None:
    job, state = scene(speeds={"nas": 1e9, "s3": 1e6})
    assert link_speed(job, state) == 1e9
    assert alarms(job, state) == {}


@pytest.mark.parametrize(("free_gb", "expected"), [(100, True), (5000, False)])
def test_the_disk_that_will_be_full_is_said_while_the_remote_is_away(free_gb: int, expected: bool) -> None:
    found = alarms(*scene(free_gb=free_gb, speeds={"nas": 1e9}, is_away=True))
    assert ("disk-full-soon" in found) is expected
    assert not expected or "full in 1 saves" in found["disk-full-soon"]


def test_before_the_first_upload_a_small_disk_is_no_alarm() -> None:
    assert alarms(*scene(free_gb=100, speeds={})) == {}


@pytest.mark.parametrize("how", ["keep", "thin"])
def test_after_a_restart_an_unknown_link_fills_no_disk(how: str) -> None:
    """Neither an alarm nor in what status, its JSON and the metrics say; what fills in any case is said."""
    job, state = scene(free_gb=100, speeds={}, unuploaded=how)
    told = outlook(job, state)
    assert (told.full_in_saves, told.full_in_seconds) == (None, None)
    assert told.production_bytes_per_second == pytest.approx(0.1 * GB)
    slow = {"nas": 30e6}
    assert outlook(*scene(free_gb=100, speeds=slow, unuploaded=how)).full_in_saves is not None
    assert outlook(*scene(free_gb=100, speeds={}, unuploaded=how, is_away=True)).full_in_saves == 1
    job, state = scene(free_gb=100, speeds={}, unuploaded=how)
    job.sessions["nas"].backed_off = BackedOff(until=0.0, failures=6, reason="no space left there")
    assert outlook(job, state).full_in_saves == 1
    found = alarms(*scene(free_gb=50, speeds={}, unuploaded=how))
    assert "lower save_total_limit" in found["disk-full-soon"]


def test_a_save_that_does_not_come_is_said_unless_one_is_under_way() -> None:
    job, state = scene(speeds={"nas": 1e9}, ago=3000.0)
    assert "usually every 10m" in alarms(job, state)["save-overdue"]
    job, state = scene(speeds={"nas": 1e9}, ago=3000.0)
    state.folders.in_flight = frozenset({"global_step9500"})
    assert alarms(job, state) == {}


def test_jobs_on_one_disk_know_of_each_other() -> None:
    """Two that nothing leaves: half as many saves fit, and it is said why."""
    mine, state = scene(free_gb=330, speeds={}, limit=None)
    assert outlook(mine, state).full_in_saves == 5
    other, other_state = scene(free_gb=330, speeds={}, limit=None)
    other.state = other_state
    mine.disk_yield = SimpleNamespace(jobs_beside=lambda job: [other])
    assert outlook(mine, state).full_in_saves == 2
    assert "and that of 1 other job on this disk" in alarms(mine, state)["disk-full-soon"]
    rotated, rotated_state = scene(free_gb=330, speeds={"nas": 1e9}, limit=6)
    rotated.state = rotated_state
    mine.disk_yield = SimpleNamespace(jobs_beside=lambda job: [rotated])
    assert outlook(mine, state).full_in_saves == 4, "it has its room, and needs that of the save that comes"
    ended, ended_state = scene(free_gb=330, speeds={}, limit=None, ago=7 * 86400.0)
    ended.state = ended_state
    mine.disk_yield = SimpleNamespace(jobs_beside=lambda job: [ended])
    assert outlook(mine, state).full_in_saves == 5, "a run that is over takes nothing more"
    unknown = SimpleNamespace(state=None, view=None)
    mine.disk_yield = SimpleNamespace(jobs_beside=lambda job: [unknown])
    assert outlook(mine, state).full_in_saves == 5


def test_the_way_knows_who_is_beside_whom() -> None:
    way = DiskYield()
    for job, device in (("a", 1), ("b", 1), ("c", 2)):
        way.join(job, device, lambda: None)
    assert (way.jobs_beside("a"), way.jobs_beside("c"), way.jobs_beside("d")) == (["b"], [], [])


def test_a_disk_without_inodes_is_short() -> None:
    """However many bytes are free; a file system without such a limit (btrfs) has none."""
    for free_files, is_short in ((4, True), (5, False), (None, False)):
        job, state = scene(free_gb=5000, speeds={"nas": 1e9})
        disk = replace(job.view.disk, free_files=free_files, reserve_files=5)
        job.view = replace(job.view, disk=disk)
        assert (outlook(job, state).full_in_saves == 0) is is_short
        found = alarms(job, state)
        assert ("disk-full-soon" in found) is is_short
        assert not is_short or "4 inodes free, the next save needs 5; remove small" in found["disk-full-soon"]


def test_inodes_are_asked_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "j").mkdir()
    state = never_sealed(tmp_path / "j", count=2)
    job: Any = SimpleNamespace(local=LocalConfig())
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        seen = os.fstatvfs(fd)
        assert disk_of(job, state, fd).reserve_files == 2, "a shard and its folder"
        for total, expected in ((100, 7), (0, None)):
            fields = {name: getattr(seen, name) for name in dir(seen) if name.startswith("f_")}
            fake = SimpleNamespace(**fields | {"f_files": total, "f_favail": 7})
            monkeypatch.setattr(os, "fstatvfs", lambda fd, fake=fake: fake)
            assert disk_of(job, state, fd).free_files == expected
    finally:
        os.close(fd)


def test_a_paused_job_fills_its_disk() -> None:
    """Nothing is sent and nothing removed: said with what ends it."""
    job, state = scene(free_gb=130, speeds={"nas": 1e9})
    assert alarms(job, state) == {}
    job.view = replace(job.view, is_paused=True)
    assert "`ckptd pause --off`" in alarms(job, state)["disk-full-soon"]
    job.problems, state.other_host = Problems(), SimpleNamespace(stands_by=True)
    assert alarms(job, state) == {}, "another host lets go what is due"


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"keep_within_seconds": 86_400.0, "save_total_limit": 2}, "shorten keep_within in [local]"),
        ({"keep_every_seconds": 60.0, "save_total_limit": 2}, "raise keep_every in [local]"),
        ({"ephemeral": Ephemeral(every_steps=1000, keep=1)}, "set save_total_limit in [local]"),
    ],
)
def test_the_key_that_fills_a_disk_is_named(changes: dict[str, Any], cure: str) -> None:
    job, state = scene(free_gb=70, speeds={"nas": 1e9})
    policy = RetentionPolicy(**changes)
    job.view = replace(job.view, local_retention=policy, saves=job.view.saves[:2])
    job.config.local.policy = policy
    assert cure in alarms(job, state)["disk-full-soon"]


def test_a_trainer_that_rotates_is_not_told_to_set_a_limit() -> None:
    """The disk never fills, though nothing of ours rotates."""
    job, state = scene(free_gb=130, speeds={"nas": 1e9}, limit=None)
    assert "set save_total_limit" in alarms(job, state)["disk-full-soon"]
    job, state = scene(free_gb=130, speeds={"nas": 1e9}, limit=None)
    rows = sorted(state.saves.rows.values(), key=lambda row: row.save.step)
    for n, row in enumerate(rows):
        row.save.order = Order(1, row.save.step, n)
        if n < 4:
            row.state, row.ended_at = "vanished", rows[n + 2].seen_at + 1
    state.saves.rows = dict(enumerate(rows))
    job.view = replace(job.view, saves=job.view.saves[:2])
    assert alarms(job, state) == {}


def test_a_link_on_which_nothing_moves_is_not_called_slow() -> None:
    """ "make the link faster" would be the wrong advice for a NAS that hangs; transfer-stalled says it."""
    job, state = scene(speeds={"nas": 30e6})
    assert "link-slow" in alarms(job, state)
    job.problems = Problems()
    job.sessions["s3"].idle_seconds = 60.0
    assert "link-slow" in alarms(job, state), "not required"
    job.problems = Problems()
    job.sessions["nas"].idle_seconds = 10.0
    assert "link-slow" not in alarms(job, state)
