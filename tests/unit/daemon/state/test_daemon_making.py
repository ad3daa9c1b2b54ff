"""What the daemon makes of a form that is made while it is sent: refused, cancelled, planned otherwise."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptd.core.model.manifest import Commit, ManifestRef
from ckptd.core.model.records import (
    UNIVERSAL,
    ZERO,
    Comparison,
    DerivedState,
    ObjectRow,
    UploadRecord,
    UploadState,
)
from ckptd.core.policy.actions import CancelUpload, Upload
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.daemon.health.checks import report_conversions
from ckptd.daemon.health.stalls import report_uploads
from ckptd.daemon.state.local_saves import RunningConversion
from ckptd.daemon.state.remote_sync import learn_forms, notice_lost
from ckptd.daemon.state.upload_records import UploadProgress
from ckptd.daemon.uploads.requests import committed_source, derive_request
from ckptd.daemon.uploads.uploads import UploadManager
from ckptd.storage.child.slots import MAKING, RemoteProcess
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import messages as m
from ckptd.storage.remote.messages import Committed
from tests.support.core_views import committed_record, job_view, key_of, save_view, sealed
from tests.support.states import job_state
from tests.unit.daemon.state.test_daemon_links import Scene

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = (1, "nas", UNIVERSAL)
COMPARED = Comparison(tensors=2, elements=70, not_compared=("1 tensor: another shape",))
ACTION = Upload(save_id=1, remote="nas", form=UNIVERSAL, generation=1, attempt=1, is_streamed=True)


class Life:
    """A save whose universal form is on its way to `nas`."""

    def __init__(self, tmp_path: Path) -> None:
        self.scene = Scene(tmp_path)
        self.session = self.scene.session
        self.state = job_state(Journal(tmp_path / "journal.db"))
        self.state.journal.add_save(sealed(1), found_first=False, adopted=True, seen_at=0.0)
        self.state.load()
        nothing = cast("Any", None)
        values = {"remotes": (), "shared_fs": False, "shared_takeover_seconds": 180.0}
        values |= {"file": None, "save_dir": tmp_path / "run"}
        config = cast("Any", type("Config", (), values))
        self.uploads = UploadManager(config, "", self.state, {"nas": self.session}, nothing, lambda: None)
        record = self.state.uploads.record(*KEY).model_copy(
            update={"state": UploadState.UPLOADING, "generation": 1}
        )
        self.state.uploads.put(1, record)
        self.state.uploads.progress[KEY] = UploadProgress(done_bytes=0, total_bytes=0, started_seconds=0.0)
        self.state.saves.conversion = RunningConversion(save_id=1)
        self.session.uploading, self.session.transfer = UNIVERSAL, 7
        row = ObjectRow(key="a", bytes=5, flushed_bytes=5, crc64="0" * 16, proof="read-back")
        self.state.journal.put_object(*KEY, row)

    def hears(self, answer: m.Answer) -> None:
        self.uploads._on_answer(ACTION, answer)

    def planned(self, plan_sha256: str) -> None:
        self.hears(
            m.Planned(plan_sha256=plan_sha256, layout="strict", files=3, bytes=30, comparison=COMPARED)
        )

    def told(self) -> list[tuple[str, str]]:
        """What a turn says of uploads."""
        problems = self.state.problems
        policy = RetentionPolicy()
        remote = SimpleNamespace(name="nas", forms=(ZERO, UNIVERSAL), required=True, policy=policy)
        job = SimpleNamespace(config=SimpleNamespace(remotes=(remote,)), problems=problems)
        problems.begin_turn()
        report_uploads(cast("Any", job), self.state)
        problems.end_turn()
        return [(p.code, p.about) for p in problems.all()]

    @property
    def objects(self) -> list[str]:
        return [row.key for row in self.state.journal.objects(*KEY)]


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def test_a_form_that_cannot_be_made_is_refused_once(life: Life) -> None:
    """Status says why; no remote is asked for it again."""
    life.hears(m.UploadResult(outcome="refused", reason="it holds two engines", hint="convert each"))
    upload, derived = life.state.uploads.record(*KEY), life.state.saves.rows[1].derived
    assert (upload.state, upload.reason) == (UploadState.REFUSED, "it holds two engines")
    assert (derived.state, derived.hint) == (DerivedState.REFUSED, "convert each")
    assert life.state.saves.conversion is None
    life.state.problems.begin_turn()
    report_conversions(life.state.problems, life.state)
    life.state.problems.end_turn()
    assert [p.code for p in life.state.problems.all()] == ["conversion-refused"]
    view = job_view([save_view(1, sealed(1), universal=derived)], local_forms=())
    assert not [a for a in plan(view).actions if isinstance(a, Upload)]


def test_one_that_damage_holds_up_is_asked_for_again_until_it_is_made(life: Life, tmp_path: Path) -> None:
    """A person is told once, with what to do; it clears when the remote has it."""
    now = time.monotonic()
    damaged = m.UploadResult(outcome="damaged", reason="a shard is damaged", hint="verify --repair")
    since = []
    for _ in range(2):
        life.state.uploads.progress[KEY] = UploadProgress(done_bytes=0, total_bytes=0, started_seconds=0.0)
        life.hears(damaged)
        record = life.state.uploads.record(*KEY)
        assert (record.state, record.reason) == (UploadState.WAITING, "a shard is damaged")
        assert record.retry_at_seconds >= now + 180.0
        assert life.told() == [("source-damaged", "s1b1 → nas")]
        (problem,) = life.state.problems.all()
        assert (problem.code, problem.severity) == ("source-damaged", "attention")
        assert f"verify {tmp_path}/run s1b1 --repair --read-data on the node" in problem.next_step
        since.append(problem.since)
    assert since[0] == since[1]
    assert life.state.saves.rows[1].derived.state is DerivedState.NONE
    life.state.uploads.progress[KEY] = UploadProgress(done_bytes=0, total_bytes=0, started_seconds=0.0)
    life.hears(m.UploadResult(outcome="waiting", reason="n2 makes it"))
    assert life.told() == []


def test_what_made_way_is_no_failure(life: Life) -> None:
    """It waits for nothing, and what it had sent counts."""
    cancelled: list[int] = []
    life.scene.line.cancel = cancelled.append  # type: ignore[attr-defined]
    for _ in range(2):
        life.uploads.cancel(CancelUpload(remote="nas"))
    assert cancelled == [7], "once"
    life.session._open[7] = life.hears
    life.session._dispatch(7, m.Failed(error="SourceChanged", message="the transfer was cancelled"))
    record = life.state.uploads.record(*KEY)
    assert (record.state, record.tries, record.retry_at_seconds) == (UploadState.NEW, 0, 0.0)
    assert (record.generation, life.objects) == (1, ["a"])
    assert life.session.uploading is None


def test_another_failure_waits_and_the_remote_is_not_blamed(life: Life) -> None:
    life.hears(m.Failed(error="BehindError", message="its process ended (-9)"))
    record = life.state.uploads.record(*KEY)
    assert (record.state, record.tries, life.objects) == (UploadState.FAILED, 1, ["a"])
    assert life.session.is_ready
    assert not life.session.seconds_to_transfer
    assert not life.state.problems.all()


def test_a_source_that_changes_whenever_it_is_sent_is_told_and_left_alone_for_longer(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it was sent again within a minute, for ever, and nobody was told."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    waits = []
    for times in range(1, 15):
        life.hears(m.Failed(error="SourceChanged", message="zero/rank_0.pt was written meanwhile"))
        record = life.state.uploads.record(*KEY)
        assert (record.state, record.tries) == (UploadState.FAILED, times)
        waits.append(record.retry_at_seconds - 1000.0)
        assert life.told() == ([("upload-failed", "s1b1 → nas")] if times >= 3 else [])
        life.state.saves.busy[1] += 1
    assert waits[:4] == [2.0, 4.0, 8.0, 16.0]
    assert waits[-1] == 3600.0
    assert "rank_0.pt was written meanwhile" in life.state.problems.all()[0].text
    life.state.uploads.put(
        1, life.state.uploads.record(*KEY).model_copy(update={"state": UploadState.UPLOADING, "reason": None})
    )
    assert life.told() == [("upload-failed", "s1b1 → nas")], "it is tried again just now"
    assert "rank_0.pt was written meanwhile" in life.state.problems.all()[0].text
    life.state.journal.end_save(1, "vanished")
    life.state.reload(1)
    assert life.told() == [], "what is gone is not tried again"


def test_objects_of_another_plan_are_nobodys(life: Life) -> None:
    """The first plan is noted; the same one again changes nothing; another one forgets what was sent."""
    life.planned("1" * 64)
    assert (life.state.uploads.progress[KEY].total_bytes, life.objects) == (30, ["a"])
    life.planned("1" * 64)
    assert life.objects == ["a"]
    life.planned("2" * 64)
    assert life.objects == []
    assert life.state.saves.rows[1].derived.plan_sha256 == "2" * 64
    assert life.state.saves.rows[1].derived.state is DerivedState.NONE


def part(life: Life) -> None:
    """What this node has of a save over several, whose ZeRO form is committed."""
    row = life.state.saves.rows[1]
    life.state.journal.replace_sealed(1, row.save.model_copy(update={"is_part": True}))
    life.state.reload(1)
    life.state.uploads.put(1, committed_record(row.save).model_copy(update={"generation": 2}))


def form_of_another(life: Life, generation: int = 2, *, disputed: bool = False) -> m.CommitView:
    """A COMMIT of the form by another node."""
    save = life.state.saves.rows[1].save
    commit = Commit(
        job_id="j",
        tag=save.tag,
        generation=generation,
        form=UNIVERSAL,
        folder="f",
        branch=save.branch,
        step=save.step,
        save_seq=save.save_seq,
        grid=save.grid,
        bytes=1,
        files=1,
        manifests=(ManifestRef(key="m", sha256="0"),),
        committed_by="n2",
        committed_at="then",
        config_digest="",
    )
    return m.CommitView(key="c", sha256="5", commit=commit, disputed=disputed)


def test_whoever_waits_for_another_node_says_so_and_looks_again(life: Life) -> None:
    """No problem of this node's, and no shards are missing."""
    part(life)
    life.hears(m.UploadResult(outcome="waiting", reason="n2 makes it"))
    record = life.state.uploads.record(*KEY)
    assert (record.state, record.reason) == (UploadState.WAITING, "n2 makes it")
    assert 170 < record.retry_at_seconds - time.monotonic() <= 180
    assert life.state.saves.conversion is None
    assert not life.state.uploads.waiting
    assert not life.state.problems.all()


@pytest.mark.parametrize(
    ("state", "is_begun", "heard"),
    [
        (UploadState.WAITING, False, True),
        (UploadState.WAITING, True, False),
        (UploadState.NEW, False, True),
        (UploadState.NEW, True, False),
        (UploadState.FAILED, False, True),
        (UploadState.UPLOADING, False, False),
        (UploadState.REFUSED, False, False),
    ],
)
def test_a_form_that_another_node_committed_is_heard_of(
    life: Life, state: UploadState, is_begun: bool, heard: bool
) -> None:
    """What was begun here is ended by its own order, which sweeps what it had sent."""
    part(life)
    wrong = {"reason": "a shard is damaged", "hint": "verify --repair", "is_damaged": True}
    record = life.state.uploads.record(*KEY).model_copy(update=wrong | {"state": state})
    life.state.uploads.put(1, record)
    if is_begun:
        life.planned("1" * 64)
    for other in (form_of_another(life, 1), form_of_another(life, disputed=True)):
        learn_forms(life.state, "nas", (ZERO, UNIVERSAL), (other,))
        assert life.state.uploads.record(*KEY) == record
    learn_forms(life.state, "nas", (ZERO, UNIVERSAL), (form_of_another(life),))
    found = life.state.uploads.record(*KEY)
    assert (found.state is UploadState.COMMITTED, found.commit_sha256 == "5") == (heard, heard)
    assert not heard or (found.is_damaged, found.hint, found.reason) == (False, "", None)


@pytest.mark.parametrize(
    ("zero", "form", "stone", "found"),
    [
        (True, True, False, UploadState.COMMITTED),
        (True, False, False, UploadState.NEW),
        (True, False, True, UploadState.DELETED),
        (False, False, False, UploadState.COMMITTED),
    ],
)
def test_a_form_whose_commit_is_gone_is_sent_again(
    life: Life, *, zero: bool, form: bool, stone: bool, found: UploadState
) -> None:
    """Unless retention let it go; without its ZeRO form that one is looked for first."""
    save, seen = life.state.saves.rows[1].save, life.session.observation
    assert seen is not None
    for one in (ZERO, UNIVERSAL):
        life.state.uploads.put(1, committed_record(save, form=one))
    there = [one for one, is_there in ((ZERO, zero), (UNIVERSAL, form)) if is_there]
    view = form_of_another(life)
    commits = tuple(
        view.model_copy(update={"key": key_of(save, one), "sha256": f"sha-{save.tag}-{one}"}) for one in there
    )
    stones = ((save.tag, 1, UNIVERSAL),) if stone else ()
    life.session.observation = seen.model_copy(update={"commits": commits, "retired_beside": stones})
    notice_lost(life.state, life.session, (ZERO, UNIVERSAL))
    assert life.state.uploads.record(*KEY).state is found
    assert (life.state.uploads.record(1, "nas", ZERO).state is UploadState.COMMITTED) is zero
    # what is looked for meanwhile is let be once its tombstone is seen
    life.session.observation = life.session.observation.model_copy(
        update={"retired_beside": ((save.tag, 1, UNIVERSAL),)}
    )
    notice_lost(life.state, life.session, (ZERO, UNIVERSAL))
    assert life.state.uploads.record(*KEY).state is UploadState.DELETED


@pytest.mark.parametrize(
    ("error", "found", "problems"),
    [
        ("DamagedError", UploadState.REFUSED, {"source-damaged"}),
        ("DocumentDamaged", UploadState.FAILED, set[str]()),
        ("VerifyError", UploadState.FAILED, set[str]()),
    ],
)
def test_only_damage_of_what_lies_here_refuses_a_save(
    life: Life, error: str, found: UploadState, problems: set[str]
) -> None:
    """A document of the remote is read again, and whether the remote is there is asked at once."""
    life.session.tag_views["s1b1"] = m.TagView(tag="s1b1", manifests=(), commits=(), retired=())
    life.hears(m.Failed(error=error, message="it is cut"))
    assert life.state.uploads.record(*KEY).state is found
    assert {code for code, _ in life.told()} == problems
    is_document = error == "DocumentDamaged"
    assert isinstance(life.scene.asked, m.Observe)
    assert ("s1b1" in life.session.tag_views) is not is_document
    assert life.session.attached is not None


def test_of_a_save_that_is_whole_here_nothing_is_heard(life: Life) -> None:
    life.state.uploads.put(1, committed_record(life.state.saves.rows[1].save))
    life.state.uploads.put(1, UploadRecord(remote="nas", form=UNIVERSAL))
    learn_forms(life.state, "nas", (ZERO, UNIVERSAL), (form_of_another(life, 1),))
    assert life.state.uploads.record(*KEY).state is UploadState.NEW


def test_an_order_names_the_commit_where_the_save_is_not_whole_here(life: Life) -> None:
    row, zero = life.state.saves.rows[1], committed_record(life.state.saves.rows[1].save)
    assert committed_source(row, zero, 30.0) is None
    making = derive_request(row, ACTION, None, "/s", 1, compare_masters=True)
    assert (making.zero, len(making.sealed)) == (None, 1)
    part(life)
    row = life.state.saves.rows[1]
    source = committed_source(row, zero, 30.0)
    assert source == Committed(sha256=zero.commit_sha256 or "", takeover_seconds=30.0)
    making = derive_request(row, ACTION, source, "/s", 1, compare_masters=True)
    assert (making.zero, making.sealed) == (source, ())


class Client:
    """In the place of a remote's child."""

    made: tuple[Client, ...] = ()

    def __init__(
        self, settings: m.RemoteSettings, on_answer: Callable[[int, m.Answer], None], **more: Any
    ) -> None:
        self.making = more["making"]
        self.on_answer = on_answer
        self.said: list[object] = []
        self.open_orders: tuple[int, ...] = ()
        Client.made = (*Client.made, self)

    def new_id(self) -> int:
        return len(Client.made)

    def submit(self, order: m.Request, order_id: int) -> int:
        self.open_orders = (order_id,)
        return order_id

    def pace(self, *how: object) -> None:
        self.said.append(how)

    def cancel(self, order_id: int) -> None:
        self.said.append(order_id)

    def end_idle(self) -> bool:
        self.said.append("ended" if not self.open_orders else "busy")
        return not self.open_orders


def test_the_memory_of_a_form_goes_with_the_process_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One process for everything; after a form it ends as soon as nothing else is open, and only then."""
    monkeypatch.setattr("ckptd.storage.child.slots.RemoteClient", Client)
    monkeypatch.setattr(Client, "made", ())
    settings = m.RemoteSettings(name="nas", url="/x", job="j", save_dir="/s", node="n", node_id="i")
    process = RemoteProcess(settings, lambda *_: None)
    (client,) = Client.made
    assert client.making == MAKING
    process.submit(m.Point())
    client.open_orders = ()
    process.ended()
    assert client.said == [], "no form was made"
    making = m.DeriveRequest(folders=("t",), sealed=(), staging="/s", memory_bytes=1)
    process.submit(m.UploadRequest.model_construct(root="/s", files=(), making=making))
    process.ended()
    assert client.said == ["busy"], "the form's order is open, or another one"
    client.open_orders = ()
    process.ended()
    process.ended()
    assert client.said == ["busy", "ended"]
    zero = Committed(sha256="0", takeover_seconds=1.0)
    afar = m.UploadRequest.model_construct(
        root="/s", files=(), making=making.model_copy(update={"zero": zero})
    )
    process.submit(afar)
    client.open_orders = ()
    process.ended()
    assert client.said == ["busy", "ended"], "another node makes it: nothing was loaded"
    client.on_answer(1, m.Planned(plan_sha256="0", layout="", files=1, bytes=1, comparison=COMPARED))
    process.ended()
    assert client.said == ["busy", "ended", "ended"]
