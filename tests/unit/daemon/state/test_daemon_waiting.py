"""A part of a save that waits for other nodes: it is looked at again, and joins what they did (H1, P10)."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.base.identity import FolderIdentity
from ckptd.config.schema import JobConfig
from ckptd.core.completeness.missing import MissingPart
from ckptd.core.model import generation
from ckptd.core.model.decision import Decision
from ckptd.core.model.generation import KnownManifest, build_commit
from ckptd.core.model.layouts import NamedShard, Role, ShardKey
from ckptd.core.model.listing import FolderListing, SaveDirListing
from ckptd.core.model.manifest import NodeManifest, manifest_key, name_in, sha256_of, to_bytes
from ckptd.core.model.records import ZERO, UploadRecord, UploadState
from ckptd.core.policy.planner import plan
from ckptd.daemon.health.stalls import report_waiting
from ckptd.daemon.intake.decisions import DECISIONS, write_decision
from ckptd.daemon.intake.initial_scan import PreexistingSaves
from ckptd.daemon.intake.known_saves import KnownSaves
from ckptd.daemon.state.remote_sync import is_written_down, open_parts
from ckptd.daemon.state.upload_records import CommitWait, waiting_on
from ckptd.errors import NotPermitted
from ckptd.storage.journal.journal import Journal
from ckptd.storage.remote import messages as m
from tests.model.commit_code import TWO_NODES, order_of, sealed
from tests.support.core_views import job_view, save_view
from tests.support.states import ONE_RUN, job_state
from tests.unit.core.model.test_many_nodes import manifest as part
from tests.unit.daemon.state.test_daemon_links import IDENTITY, Scene

if TYPE_CHECKING:
    from pathlib import Path

ROW, TAG = 1, sealed(TWO_NODES[0], 1).tag


def known(slot: int) -> KnownManifest:
    """What the slot's node lists of save 1 in generation 1."""
    order = order_of(TWO_NODES[slot], 0, 1, 1)
    files = [
        {**file.model_dump(), "checksums": {"crc64nvme": "0"}, "proof": "read-back"} for file in order.files
    ]
    made = NodeManifest.model_validate({**order.manifest.model_dump(), "files": files})
    digest = sha256_of(to_bytes(made))
    return KnownManifest(key=f"{made.node}~{digest[:12]}", sha256=digest, manifest=made)


def view_of(*, disputed: bool = False) -> m.CommitView:
    """The COMMIT over both."""
    commit = generation.build_commit(
        [known(0), known(1)], committed_by="n1", committed_at="then", config_digest="c"
    )
    return m.CommitView(key="k", sha256=sha256_of(to_bytes(commit)), commit=commit, disputed=disputed)


def seen(*, commits: tuple[m.CommitView, ...] = ()) -> m.TagView:
    return m.TagView(
        tag=TAG,
        manifests=tuple(
            m.ManifestView(key=k.key, sha256=k.sha256, manifest=k.manifest, committed=bool(commits))
            for k in (known(0), known(1))
        ),
        commits=commits,
        retired=(),
    )


class Life:
    """A node of two: its part of the save is uploaded; `record` is what its journal says."""

    def __init__(self, tmp_path: Path, record: UploadRecord) -> None:
        self.scene = Scene(tmp_path)
        self.scene.session.settings = self.scene.session.settings.model_copy(update={"job_id": "j" * 32})
        self.state = job_state(Journal(tmp_path / "journal.db"))
        self.state.journal.add_save(sealed(TWO_NODES[0], 1), found_first=False, adopted=True, seen_at=0.0)
        self.state.load()
        self.state.uploads.put(ROW, record)
        self._place = tmp_path
        self.start_again()

    def start_again(self) -> None:
        """With what is in the journal."""
        self.known_saves = KnownSaves(
            self.state,
            self._place,
            {"nas": self.scene.session},
            "n0",
            PreexistingSaves(frozenset(), frozenset()),
            60.0,
            {"nas": (ZERO,)},
            lambda: None,
            ONE_RUN,
        )

    @property
    def record(self) -> UploadRecord:
        return self.state.uploads.record(ROW, "nas", ZERO)

    def observes(self, *commits: m.CommitView) -> None:
        self.scene.session.observation = m.Observation(identity=IDENTITY, commits=commits)
        self.known_saves.choose_generations()

    def lists(self, *whole: tuple[str, int, str]) -> None:
        """No COMMIT yet; of these all parts are listed."""
        self.scene.session.observation = m.Observation(identity=IDENTITY, commits=(), listed_whole=whole)
        self.known_saves.choose_generations()

    def actions(self, now_seconds: float) -> list[str]:
        """What the planner wants."""
        save = save_view(ROW, sealed(TWO_NODES[0], 1), uploads={("nas", ZERO): self.record})
        view = job_view([save], generations=self.state.uploads.generations, now_seconds=now_seconds)
        remote = replace(view.remotes[0], known_tags=frozenset({TAG}))
        view = replace(view, remotes=(remote,), local_forms=())
        return [type(action).__name__ for action in plan(view).actions]


@pytest.fixture
def waiting(tmp_path: Path) -> Life:
    record = UploadRecord(
        remote="nas", form=ZERO, state=UploadState.WAITING, generation=1, retry_at_seconds=1e9
    )
    return Life(tmp_path, record)


def test_what_waits_is_uploaded_again_and_not_only_described(waiting: Life) -> None:
    """It was described for ever: the answer was not for what waits."""
    assert "Describe" in waiting.actions(2e9)
    waiting.scene.session.tag_views[TAG] = seen()
    waiting.known_saves.choose_generations()
    assert "Upload" in waiting.actions(2e9)


@pytest.mark.parametrize("swaps", [True, False])
def test_a_save_that_two_nodes_swapped_says_why_it_is_never_committed(waiting: Life, swaps: bool) -> None:
    """NVMe offload with node-local storage: both have `rank00`, so the other took a generation of its own."""
    row = waiting.state.saves.rows[ROW] = waiting.state.saves.rows[ROW].model_copy(update={"sealed_at": 0.0})
    if swaps:
        path = "offloaded_tensors/rank00/0_28.tensor.swp"
        file = row.save.files[0].model_copy(update={"path": path, "role": Role.SIDE})
        save = row.save.model_copy(update={"files": (*row.save.files, file)})
        waiting.state.saves.rows[ROW] = row.model_copy(update={"save": save})
    missing = (NamedShard(role=Role.OPTIM, shard=ShardKey(d=1)),)
    other = MissingPart(node="n1", generation=2, last_seconds=0)
    waiting.state.uploads.waiting[ROW, "nas", ZERO] = CommitWait(
        reason="rank 1", missing=missing, parts=(other,)
    )
    job: Any = SimpleNamespace(
        sessions={},
        problems=waiting.state.problems,
        peers=SimpleNamespace(others=()),
        config=JobConfig.model_validate({"name": "run", "save_dir": "/x"}),
    )
    report_waiting(job, waiting.state)
    (problem,) = waiting.state.problems.all()
    assert problem.code == "commit-incomplete"
    assert ("use_node_local_storage" in problem.next_step) is swaps


def test_a_commit_that_another_node_made_ends_the_wait(waiting: Life) -> None:
    waiting.observes()
    assert waiting.actions(0.0) == [], "nothing new: it waits"
    waiting.observes(view_of())
    assert waiting.actions(0.0) == ["Describe"]
    waiting.scene.session.tag_views[TAG] = seen(commits=(view_of(),))
    waiting.known_saves.choose_generations()
    assert (waiting.record.state, waiting.record.commit_sha256) == (UploadState.COMMITTED, view_of().sha256)


def test_what_was_read_of_a_tag_goes_once_another_node_committed_it(waiting: Life) -> None:
    """On all nodes but one each save left 185 kB in memory, for ever."""
    views = waiting.scene.session.tag_views
    views[TAG] = seen()
    waiting.known_saves.choose_generations()
    assert TAG in views, "it is still open"
    views[TAG] = seen(commits=(view_of(),))
    waiting.state.uploads.generations.clear()
    waiting.known_saves.choose_generations()
    assert waiting.record.state is UploadState.COMMITTED
    assert not views


def test_what_was_read_of_a_tag_goes_with_it(waiting: Life) -> None:
    """A folder that was begun, asked about, and went before it was complete."""
    views = waiting.scene.session.tag_views
    views[TAG], views["begun"], views["gone"] = seen(), seen(), seen()
    begun = FolderListing(tag="begun", folder=FolderIdentity(dev=1, ino=2), files=())
    waiting.state.folders.listing = SaveDirListing(device=1, folders=(begun,))
    waiting.known_saves.choose_generations()
    assert views.keys() == {TAG, "begun"}


def test_a_disputed_commit_counts_no_more(tmp_path: Path) -> None:
    """Another node's dispute left this one sure of a COMMIT that does not exist."""
    commit = view_of()
    life = Life(
        tmp_path,
        UploadRecord(
            remote="nas",
            form=ZERO,
            state=UploadState.COMMITTED,
            generation=1,
            commit_key=commit.key,
            commit_sha256=commit.sha256,
        ),
    )
    life.observes(commit)
    assert life.record.state is UploadState.COMMITTED
    life.observes(view_of(disputed=True))
    assert (life.record.state, life.record.commit_sha256) == (UploadState.NEW, None)
    assert life.record.reason == f"{commit.key} is disputed"
    life.scene.session.tag_views[TAG] = seen(commits=(view_of(disputed=True),))
    life.known_saves.choose_generations()
    assert [answer.generation for answer in life.state.uploads.generations.values()] == [2]


def test_a_new_journal_without_the_newest_that_a_remote_tells_of_needs_that_remote(waiting: Life) -> None:
    """Nothing as new lies here: were the remote away, a save after a rewind would count as an older one."""
    sessions, [row] = [waiting.scene.session], waiting.state.saves.rows.values()
    assert is_written_down(waiting.state, sessions, None)
    assert is_written_down(waiting.state, sessions, row.save.order)
    assert not is_written_down(waiting.state, sessions, row.save.order._replace(branch=row.save.branch + 1))


def test_what_never_comes_is_asked_for_ever_more_seldom() -> None:
    """A save that one node of a thousand never wrote; as soon as another part comes it is a minute again."""
    waits, before = [], None
    for reason in ("a and b", *["b"] * 7, "b, of another save"):
        before = waiting_on(before, m.UploadResult(outcome="waiting", reason=reason), 60.0)
        waits.append(before.retry_seconds)
    assert waits == [60.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0, 480.0, 60.0]


def test_once_no_part_is_missing_it_is_asked_within_a_minute(waiting: Life) -> None:
    """The node whose part was the last commits, unless it died: the others had waited for eight minutes."""
    key = (ROW, "nas", ZERO)
    waiting.state.uploads.waiting[key] = CommitWait(
        reason="waiting for 1 shard", attempts=9, first_seconds=60.0
    )
    waiting.lists()
    assert waiting.record.retry_at_seconds == 1e9
    waiting.lists((TAG, 2, ZERO), (TAG, 1, "weights"))
    assert waiting.record.retry_at_seconds == 1e9, "another generation, another form"
    waiting.lists((TAG, 1, ZERO))
    soon = waiting.record.retry_at_seconds
    assert time.monotonic() < soon <= time.monotonic() + 60.0
    waiting.lists((TAG, 1, ZERO))
    assert waiting.record.retry_at_seconds == soon, "once: each look would put it off, or ask again"
    # what is asked in vain waits as before, until a part went and came again
    answer = m.UploadResult(outcome="waiting", reason="a node replaces what it found there")
    waiting.state.uploads.waiting[key] = waiting_on(waiting.state.uploads.waiting[key], answer, 60.0)
    waiting.state.uploads.put(ROW, waiting.record.model_copy(update={"retry_at_seconds": 1e9}))
    waiting.lists((TAG, 1, ZERO))
    assert waiting.record.retry_at_seconds == 1e9
    waiting.lists()
    waiting.lists((TAG, 1, ZERO))
    assert waiting.record.retry_at_seconds < 1e9


def test_what_a_remote_refuses_to_let_go_is_asked_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute at first, for rights that are wrong for a moment; every hour in the end."""
    now = [1000.0]
    monkeypatch.setattr("ckptd.daemon.state.deletions.time.monotonic", lambda: now[0])
    state = job_state(Journal(tmp_path / "journal.db"))
    pauses = []
    error = NotPermitted("it may not be removed")
    for _ in range(8):
        state.deletions.note_refused("nas", "sha", "s1b1 of nas", error)
        begun = now[0]
        while ("nas", "sha") in state.deletions.refused_lately():
            now[0] += 30.0
        pauses.append((now[0] - begun) / 60)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    for _ in range(2000):  # a quarter of a year of hours
        state.deletions.note_refused("nas", "sha", "s1b1 of nas", error)
    assert state.deletions.refused_lately() == {("nas", "sha")}


def test_parts_of_others_are_those_of_open_generations() -> None:
    """Read or by their names; a generation with a COMMIT takes no part any more, disputed or not."""
    sha = "ab" * 32
    read = [part("a", (0,), generation=g) for g in (1, 2, 3)]
    views = tuple(
        m.ManifestView(key=manifest_key(p, sha), sha256=sha, manifest=p, committed=False) for p in read
    )
    name = name_in(manifest_key(part("b", (1,), generation=3), sha))
    assert name is not None
    commits = tuple(
        m.CommitView(
            key=f"k{p.generation}",
            sha256=sha,
            commit=build_commit(
                [KnownManifest(key=manifest_key(p, sha), sha256=sha, manifest=p)],
                committed_by="a",
                committed_at="then",
                config_digest="c",
            ),
            disputed=p.generation == 2,
        )
        for p in read[:2]
    )
    named = (m.NamedManifest(generation=3, form=ZERO, name=name),)
    view = m.TagView(tag="s", manifests=views, commits=commits, retired=(), named=named)
    found = [(p.node, p.generation, p.last_seconds) for p in open_parts(view)]
    assert found == [("a", 3, 1003), ("b", 3, 1003)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_another_nodes_pin_holds_while_the_remote_is_away(
    waiting: Life, tmp_path: Path, is_restarted: bool
) -> None:
    """It lies in the remote alone: `unuploaded = "delete"` removed that checkpoint once that was away."""

    def word(kind: Any, serial: int, tag: str = TAG) -> Decision:
        return Decision(kind=kind, tag=tag, by="another", serial=serial)

    def pins(*decisions: Decision | None) -> set[str]:
        """As the remote shows them; None: it is away."""
        seen = m.Observation(identity=IDENTITY, commits=(), decisions=tuple(d for d in decisions if d))
        waiting.scene.session.observation = None if None in decisions else seen
        if is_restarted:
            waiting.start_again()
        waiting.known_saves.refresh()
        pinned = waiting.known_saves.pins
        assert all(waiting.known_saves.is_pinned(tag) == (tag in pinned) for tag in (TAG, "other"))
        return set(pinned)

    assert pins(None) == set()
    assert pins(word("pin", 5), word("adopt", 6, "*")) == {TAG}
    assert pins(None) == {TAG}
    assert [d.kind for d in waiting.state.journal.decisions()] == ["pin"], "nothing that lets anything go"
    assert pins(word("pin", 5), word("unpin", 7)) == set()
    assert pins(None) == set()
    assert pins(word("pin", 2)) == {TAG}, "a remote that was made anew may count from lower serials"
    assert pins(word("pin", 9, "other")) == {"other"}
    write_decision(tmp_path, word("pin", 5))
    assert pins(None) == {TAG, "other"}, "what the journal alone has ends no pin"
    assert waiting.state.deletions.observed == {"nas"}


def test_a_pin_that_the_folders_time_does_not_tell_is_known_by_the_next_turn(
    waiting: Life, tmp_path: Path
) -> None:
    """Life 846536: the prune saw the pin and stayed, the plan did not, and both for ever."""
    write_decision(tmp_path, Decision(kind="pin", tag="other", by="a person", serial=1))
    folder = tmp_path / DECISIONS
    os.utime(folder, (1e9, 1e9))
    waiting.known_saves.refresh()
    write_decision(tmp_path, Decision(kind="pin", tag=TAG, by="a person", serial=2))
    os.utime(folder, (1e9, 1e9))
    waiting.known_saves.refresh()
    assert TAG not in waiting.known_saves.pins
    assert waiting.known_saves.is_pinned(TAG)
    waiting.known_saves.refresh()
    assert TAG in waiting.known_saves.pins


def test_what_may_not_be_read_of_a_tag_is_asked_for_ever_more_seldom(waiting: Life) -> None:
    """A manifest that another user owns: it was read twenty times a second."""
    life = waiting
    commit = view_of()
    life.state.saves.rows.clear()
    life.scene.session.observation = m.Observation(identity=IDENTITY, commits=(commit,))
    asked = len(life.scene.line.orders)
    for _ in range(20):
        assert not life.known_saves.may_seal(TAG)
        if len(life.scene.line.orders) > asked:
            asked = len(life.scene.line.orders)
            assert isinstance(life.scene.asked, m.DescribeTag)
            life.scene.answer(m.Failed(error="NotPermitted", message="it may not be read", hint=""))
            assert life.scene.session.seconds_to_wake > 0
    assert asked == len(life.scene.line.orders)
    assert sum(isinstance(order, m.DescribeTag) for order in life.scene.line.orders) == 1
    life.scene.session.note_answer()
    assert not life.known_saves.may_seal(TAG)
    assert sum(isinstance(order, m.DescribeTag) for order in life.scene.line.orders) == 1, (
        "the tag has its own"
    )
