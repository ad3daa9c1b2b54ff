"""The planner: what may go, what is uploaded and converted first; each protection of P1 and P5 by itself."""

from __future__ import annotations

import cProfile
from dataclasses import replace
from typing import Any

import pytest

from ckptd.base.identity import FileIdentity
from ckptd.core.completeness.order import next_order
from ckptd.core.model.listing import ListedFile
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.model.save import Order
from ckptd.core.policy.actions import (
    CancelUpload,
    ConfirmCommits,
    Convert,
    DeleteLocal,
    DeleteRemote,
    Describe,
    DropDerived,
    Hold,
    PointUniversal,
    ReleaseHold,
    Upload,
    UploadEarly,
    UploadLateFiles,
)
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.core.policy.safety import is_to_upload
from ckptd.core.policy.uploads import EARLY
from ckptd.core.policy.view import Disk, Drain, GenerationAnswer, JobView, LeaseStatus, RemoteView, SaveView
from tests.support.core_views import (
    NAS,
    committed_record,
    confirmation,
    job_view,
    remote_commit,
    save_view,
    sealed,
)


def pruned(view: JobView) -> list[str]:
    return [a.permit.tag for a in plan(view).actions if isinstance(a, DeleteLocal)]


def of(view: JobView, kind: type[Any]) -> list[Any]:
    return [a for a in plan(view).actions if isinstance(a, kind)]


def three() -> list[SaveView]:
    return [save_view(n, sealed(n)) for n in (1, 2, 3)]


def test_prunes_the_older_ones_with_a_permit_that_names_everything() -> None:
    """With a limit of one, the two older committed saves go, oldest first, each with its COMMIT and files."""
    actions = of(job_view(three()), DeleteLocal)
    assert [a.permit.tag for a in actions] == ["s1b1", "s2b1"]
    assert all(a.permit.commits and a.permit.files and a.permit.issued_at_seconds == 100.0 for a in actions)


def test_no_permit_without_a_fresh_confirmation() -> None:
    """Without an answer, with an old one, or with one for another COMMIT, it asks and deletes nothing."""
    saves = three()
    stale = {s.id: confirmation(s.save, at_seconds=50.0) for s in saves}
    other = {s.id: confirmation(saves[2].save) for s in saves}
    for confirmations in ({}, stale, other):
        view = job_view(saves, confirmations=confirmations)
        assert pruned(view) == []
        assert {a.save_id for a in of(view, ConfirmCommits)} == {1, 2}


def _first(saves: list[SaveView], **changes: Any) -> list[SaveView]:
    return [replace(saves[0], **changes), *saves[1:]]


@pytest.mark.parametrize(
    "change",
    [
        {"is_adopted": False},
        {"is_intact": False},
        {"is_busy": True},
        {"is_pinned": True},
        {"has_unlisted": ("notes.txt",)},
        {"uploads": {}},
    ],
)
def test_each_protection_of_a_save_keeps_it(change: dict[str, Any]) -> None:
    """P5: not adopted, changed, being read, pinned, holding other files, uncommitted: it stays."""
    view = job_view(_first(three(), **change))
    assert pruned(view) == ["s2b1"]
    assert plan(view).local_verdicts[1].keeps


@pytest.mark.parametrize(
    "change",
    [
        {"is_first_scan": True},
        {"is_save_in_flight": True},
        {"may_delete": False},
        {"deletions_left": 0},
        {"is_paused": True},
        {"local_retention": RetentionPolicy()},
    ],
)
def test_each_condition_of_the_job_stops_deleting(change: dict[str, Any]) -> None:
    """First scan, a save in flight, no rights, the hourly limit, pause, no retention key: nothing goes."""
    assert pruned(job_view(three(), **change)) == []


def test_without_a_required_remote_nothing_goes() -> None:
    """P1: there must be at least one required remote."""
    view = job_view(three())
    assert pruned(replace(view, remotes=tuple(replace(r, is_required=False) for r in view.remotes))) == []
    assert pruned(replace(view, remotes=())) == []


def test_every_required_remote_counts() -> None:
    """Committed on one of two required remotes is not committed."""
    view = job_view(three())
    second = replace(view.remotes[0], name="second")
    assert pruned(replace(view, remotes=(*view.remotes, second))) == []


def test_the_newest_and_what_is_newer_than_the_newest_committed_stay() -> None:
    """What lies above the newest committed save is not counted and not touched."""
    saves = [save_view(1, sealed(1)), save_view(2, sealed(2)), save_view(3, sealed(3), committed=False)]
    assert pruned(job_view(saves)) == ["s1b1"]


@pytest.mark.parametrize("can_clone", [False, True])
@pytest.mark.parametrize("gone", [frozenset[int](), frozenset({3})])
def test_keep_bytes_counts_no_universal_form_that_goes(can_clone: bool, gone: frozenset[int]) -> None:
    """Of the older universal form it is the same before it is dropped and after: three and one form fit."""
    ready = DerivedRecord(state=DerivedState.READY, bytes=100, is_source_verified=True, is_cloned=can_clone)
    forms = {n: ready if n in {3, 4} - gone else DerivedRecord() for n in (1, 2, 3, 4)}
    saves = [save_view(n, sealed(n), universal=forms[n]) for n in (1, 2, 3, 4)]
    limit = RetentionPolicy(keep_bytes=300 if can_clone else 400)
    disk = Disk(free_bytes=10_000, reserve_bytes=0, can_clone=can_clone)
    view = job_view(saves, local_retention=limit, disk=disk)
    assert pruned(view) == ["s1b1"]
    assert {a.save_id for a in of(view, DropDerived)} == (set() if can_clone else {3} - gone)


def test_the_newest_stays_whatever_the_policy_says() -> None:
    """P5: a policy that names other steps alone takes the rest, and never the newest."""
    policy = RetentionPolicy(keep_steps=(1,))
    assert pruned(job_view(three(), local_retention=policy)) == ["s2b1"]


def test_never_more_deletions_than_the_seat_belt_allows() -> None:
    assert pruned(job_view(three(), deletions_left=1)) == ["s1b1"]


def test_what_latest_names_stays() -> None:
    """P5: the trainer's own pointer protects its checkpoint."""
    assert pruned(job_view(three(), latest="s1b1")) == ["s2b1"]


def test_an_abandoned_branch_waits_until_it_is_passed() -> None:
    """Rewound from 8 to 5: the old 8 stays while the new branch is below it, and goes afterwards."""
    old, new = save_view(1, sealed(8, 1)), save_view(2, sealed(5, 2))
    assert pruned(job_view([old, new])) == []
    passed = save_view(3, sealed(9, 2))
    assert pruned(job_view([old, new, passed])) == ["s8b1", "s5b2"]


def test_remote_retention_counts_by_branch_first_and_keeps_what_is_here() -> None:
    """Derived forms go before zero; a COMMIT whose save is still on this node stays."""
    gone, here = [sealed(n) for n in (1, 2)], save_view(3, sealed(3))
    view = job_view([here])
    commits = [remote_commit(s, form) for s in gone for form in (ZERO, UNIVERSAL)] + [
        remote_commit(here.save)
    ]
    remote = replace(view.remotes[0], commits=tuple(commits), retention=RetentionPolicy(save_total_limit=1))
    (action,) = of(replace(view, remotes=(remote,)), DeleteRemote)
    assert (action.commit.tag, action.commit.form) == ("s1b1", UNIVERSAL)
    two_here = job_view([save_view(1, gone[0]), here])
    remote = replace(two_here.remotes[0], retention=RetentionPolicy(save_total_limit=1))
    assert of(replace(two_here, remotes=(remote,)), DeleteRemote) == []


def test_a_remote_does_one_thing_in_a_turn_and_sends_first() -> None:
    """Else the removal takes the place of the upload, which nothing could cancel any more."""
    gone, here, new = sealed(1), save_view(3, sealed(3)), save_view(4, sealed(4), committed=False)
    commits = (remote_commit(gone), remote_commit(here.save))

    def moves(*saves: SaveView) -> list[type[Any]]:
        view = job_view(list(saves))
        nas = replace(view.remotes[0], commits=commits, retention=RetentionPolicy(save_total_limit=1))
        return [
            type(a)
            for a in plan(replace(view, remotes=(nas,))).actions
            if isinstance(a, Upload | DeleteRemote)
        ]

    assert moves(here, new) == [Upload]
    assert moves(here) == [DeleteRemote]


def test_what_failed_and_is_due_again_does_not_hold_up_what_is_to_go() -> None:
    """A remote that is full refuses the upload until something went: tried first again and again, nothing
    would."""
    gone, here, new = sealed(1), save_view(3, sealed(3)), sealed(4)
    commits = (remote_commit(gone), remote_commit(here.save))
    record = committed_record(new).model_copy(update={"state": UploadState.FAILED, "retry_at_seconds": 50.0})
    view = job_view([here, save_view(4, new, uploads={(NAS, ZERO): record})])
    nas = replace(view.remotes[0], commits=commits, retention=RetentionPolicy(save_total_limit=1))
    moves = [a for a in plan(replace(view, remotes=(nas,))).actions if isinstance(a, Upload | DeleteRemote)]
    assert [type(a) for a in moves] == [DeleteRemote]
    nothing_goes = replace(nas, retention=RetentionPolicy())
    assert [a.save_id for a in of(replace(view, remotes=(nothing_goes,)), Upload)] == [4]


def test_ships_the_newest_first_and_zero_before_universal() -> None:
    """The newest waiting zero form goes; a universal only when no zero waits, and only the newest one's."""
    ready = DerivedRecord(state=DerivedState.READY, is_source_verified=True)
    saves = [save_view(1, sealed(1), universal=ready), save_view(2, sealed(2), committed=False)]
    saves += [save_view(3, sealed(3), committed=False)]
    assert [(a.save_id, a.form) for a in of(job_view(saves), Upload)] == [(3, ZERO)]
    done = [save_view(n, sealed(n), universal=ready) for n in (1, 2, 3)]
    assert [(a.save_id, a.form) for a in of(job_view(done), Upload)] == [(3, UNIVERSAL)]


def test_a_tag_that_the_remote_knows_is_described_first() -> None:
    """Nothing is uploaded under a tag of the remote before its generations are known."""
    save = save_view(1, sealed(1), committed=False)
    view = job_view([save])
    known = replace(view, remotes=(replace(view.remotes[0], known_tags=frozenset({"s1b1"})),))
    assert of(known, Upload) == []
    assert len(of(known, Describe)) == 1


@pytest.mark.parametrize(("existing", "uploaded"), [("newest", [3]), ("all", [3]), ("none", [])])
def test_existing(existing: str, uploaded: list[int]) -> None:
    """Of what was found at the first start: the newest, all (newest first), or none."""
    saves = [
        save_view(n, sealed(n), committed=False, was_found_first=True, is_adopted=False) for n in (1, 2, 3)
    ]
    assert [a.save_id for a in of(job_view(saves, existing=existing), Upload)] == uploaded
    rest = [replace(saves[2], uploads={(NAS, ZERO): committed_record(saves[2].save)}), *saves[:2]]
    again = [a.save_id for a in of(job_view(rest, existing=existing), Upload)]
    assert again == ([2] if existing == "all" else [])


@pytest.mark.parametrize("turn", range(4))
def test_the_newest_found_of_each_kind_is_sent(turn: int) -> None:
    """Whatever the order in which they were sealed: a rewind, models alone, and what came or was adopted."""
    seen = [(1, 1, False), (3, 1, False), (2, 2, False), (9, 1, True), (4, 1, True), (7, 1, False)]
    saves = []
    for number, (step, branch, is_model_only) in enumerate((*seen[turn:], *seen[:turn]), start=1):
        save = sealed(step, branch)
        grid = save.grid.model_copy(update={"dp": 0 if is_model_only else 1})
        found = save_view(number, save.model_copy(update={"grid": grid}), was_found_first=True)
        saves.append(replace(found, is_adopted=(step, branch) == (1, 1)))
    saves += [save_view(10, sealed(20, 3)), replace(saves[0], id=11, was_found_first=False)]
    view = job_view(saves)

    def is_newest(save: SaveView) -> bool:
        kind = [s for s in saves if s.was_found_first and s.is_model_only == save.is_model_only]
        return save.order == max(s.order for s in kind)

    wanted = [s.id for s in saves if not s.was_found_first or s.is_adopted or is_newest(s)]
    assert [s.id for s in saves if is_to_upload(view, s)] == wanted
    assert len(wanted) == 5
    assert all(is_to_upload(replace(view, saves=(s,)), s) for s in saves), "of another view, another one"


def test_conversion_respects_the_reserve_and_the_trainer() -> None:
    """P13, P11: no conversion below the line, while one runs, or while a save is in flight."""
    open_save = [save_view(1, sealed(1), universal=DerivedRecord())]
    assert len(of(job_view(open_save), Convert)) == 1
    tight = Disk(free_bytes=1050, reserve_bytes=1000, can_clone=False)
    assert of(job_view(open_save, disk=tight), Convert) == []
    assert len(of(job_view(open_save, disk=replace(tight, can_clone=True)), Convert)) == 1
    assert of(job_view(open_save, is_save_in_flight=True), Convert) == []
    assert of(job_view(open_save, is_converting=True), Convert) == []


def test_holds_where_extents_clone_and_lets_go_under_pressure() -> None:
    """P1, P13: uncommitted saves are held; the oldest hold goes under pressure, a committed one at once."""
    clone = Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True)
    waiting = [save_view(n, sealed(n), committed=False) for n in (1, 2)]
    assert {a.save_id for a in of(job_view(waiting, disk=clone), Hold)} == {1, 2}
    held = [replace(s, is_held=True) for s in waiting]
    low = replace(clone, free_bytes=900)
    assert [a.save_id for a in of(job_view(held, disk=low), ReleaseHold)] == [1]
    committed = [save_view(1, sealed(1), is_held=True)]
    assert [a.save_id for a in of(job_view(committed, disk=clone), ReleaseHold)] == [1]


def test_latest_universal_waits_for_a_verified_source() -> None:
    """§4: cloning reads no bytes, so the pointer waits for the upload's CRC pass."""
    ready = DerivedRecord(state=DerivedState.READY)
    unproven = [save_view(1, sealed(1), committed=False, universal=ready)]
    assert of(job_view(unproven), PointUniversal) == []
    proven = [save_view(1, sealed(1), universal=ready)]
    assert [a.tag for a in of(job_view(proven), PointUniversal)] == ["s1b1"]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_form_is_made_that_goes_at_once(limit: int) -> None:
    """Of a save that may go and cannot yet (its remote is away): it was made and dropped without a pause."""
    ready, none = DerivedRecord(state=DerivedState.READY), DerivedRecord()
    view = job_view(
        [save_view(1, sealed(1), universal=none), save_view(2, sealed(2), universal=ready)],
        disk=Disk(free_bytes=10_000, reserve_bytes=1000, can_clone=True),
        local_retention=RetentionPolicy(save_total_limit=limit),
        confirmations={},
    )
    made = [a.save_id for a in of(view, Convert)]
    assert made == ([] if limit == 1 else [1])
    saves = (replace(view.saves[0], universal=ready), view.saves[1])
    assert (of(replace(view, saves=saves), DropDerived) == []) == bool(made)


def test_a_backing_off_ship_is_not_due() -> None:
    """A failed upload waits for its time; other remotes and saves are not held up."""
    save = sealed(2)
    record = committed_record(save).model_copy(
        update={"state": UploadState.FAILED, "retry_at_seconds": 200.0}
    )
    saves = [save_view(1, sealed(1), committed=False), save_view(2, save, uploads={(NAS, ZERO): record})]
    assert [a.save_id for a in of(job_view(saves), Upload)] == [1]


def test_order_of_rewinds_and_resaves() -> None:
    """A lower step starts a branch, an equal one stays, and a newer order is always greater."""
    first = next_order(8, None)
    rewound = next_order(5, first)
    again = next_order(5, rewound)
    assert (first, rewound, again) == (Order(1, 8, 1), Order(2, 5, 1), Order(2, 5, 2))
    assert first < rewound < again


# --- forms that lie nowhere here --------------------------------------------------------------------------


BF16 = "weights-bf16"
FARM = "farm"


def _save(number: int, **changes: Any) -> SaveView:
    return save_view(number, sealed(number), **({"universal": DerivedRecord()} | changes))


def _streaming(*saves: SaveView, forms: tuple[str, ...] = (ZERO, UNIVERSAL, BF16), **changes: Any) -> JobView:
    """Nothing derived is kept here, all of it is wanted there."""
    view = job_view(list(saves), local_forms=(), **changes)
    return replace(view, remotes=tuple(replace(r, forms=forms) for r in view.remotes))


def _uploaded(view: JobView) -> list[tuple[int, str, bool]]:
    return [(s.save_id, s.form, s.is_streamed) for s in of(view, Upload)]


def _with_form(save: SaveView, form: str, state: UploadState = UploadState.COMMITTED) -> SaveView:
    record = committed_record(save.save, form=form).model_copy(update={"state": state})
    return replace(save, uploads={**save.uploads, (NAS, form): record})


def test_forms_that_are_not_kept_here_are_streamed_and_never_made() -> None:
    """Universal before weights, of the newest whose ZeRO form is committed there, one at a time."""
    first, second = _save(1), _save(2)
    view = _streaming(first, second)
    assert _uploaded(view) == [(2, UNIVERSAL, True)]
    assert of(view, Convert) == []
    assert _uploaded(_streaming(first, _with_form(second, UNIVERSAL))) == [(2, BF16, True)]
    waiting = _save(2, committed=False)
    assert _uploaded(_streaming(first, waiting)) == [(2, ZERO, False)]
    assert _uploaded(_streaming(first, second, is_save_in_flight=True)) == []
    assert _uploaded(_streaming(first, second, is_converting=True)) == []
    assert _uploaded(_streaming(replace(second, is_intact=False))) == []
    for state in (UploadState.COMMITTED, UploadState.DELETED, UploadState.REFUSED):
        done = _with_form(_with_form(second, UNIVERSAL, state), BF16, state)
        assert _uploaded(_streaming(first, done)) == []


def test_what_is_kept_here_is_sent_from_here() -> None:
    save = _save(1, universal=DerivedRecord(state=DerivedState.READY))
    assert _uploaded(replace(_streaming(save), local_forms=(UNIVERSAL,))) == [(1, UNIVERSAL, False)]
    assert _uploaded(_streaming(save)) == [(1, UNIVERSAL, False)], "it lies here still"
    view = replace(_streaming(_save(1)), local_forms=(UNIVERSAL,))
    assert (_uploaded(view), of(view, Convert)) == ([(1, BF16, True)], [Convert(save_id=1)])


def test_a_form_that_was_refused_is_not_tried_on_any_remote() -> None:
    refused = DerivedRecord(state=DerivedState.REFUSED)
    assert _uploaded(_streaming(_save(1, universal=refused, weights={BF16: refused}))) == []


def test_what_was_begun_is_finished_before_a_newer_one_is_begun() -> None:
    """Else a link that is slower than saving would carry one beginning after the other."""
    first, second = _with_form(_save(1), UNIVERSAL, UploadState.NEW), _save(2)
    assert _uploaded(_streaming(first, second)) == [(1, UNIVERSAL, True)]
    assert _uploaded(_streaming(replace(first, is_intact=False), second)) == [(2, UNIVERSAL, True)]
    assert _uploaded(_streaming(_with_form(first, UNIVERSAL), second)) == [(2, UNIVERSAL, True)]


def test_a_derived_form_makes_way_for_a_zero_form() -> None:
    done, waiting = _save(1), _save(2, committed=False)

    def busy_with(form: str | None, *saves: SaveView) -> JobView:
        view = _streaming(*saves)
        return replace(view, remotes=tuple(replace(r, is_busy=True, uploading=form) for r in view.remotes))

    assert of(busy_with(UNIVERSAL, done, waiting), CancelUpload) == [CancelUpload(remote=NAS)]
    for view in (busy_with(ZERO, done, waiting), busy_with(None, done, waiting), busy_with(UNIVERSAL, done)):
        assert of(view, CancelUpload) == of(view, Upload) == []


def _shard(size_bytes: int, mtime_ns: int = 1) -> ListedFile:
    identity = FileIdentity(dev=1, ino=7, size_bytes=size_bytes, mtime_ns=mtime_ns, ctime_ns=mtime_ns)
    return ListedFile(path=f"zero_pp_rank_{size_bytes}_mp_rank_00_optim_states.pt", identity=identity)


SMALL, LARGE = _shard(10), _shard(20)


def _while_one_is_written(*saves: SaveView, remote: dict[str, Any] | None = None, **changes: Any) -> JobView:
    view = job_view(list(saves), **{"at_rest": {"new": (SMALL, LARGE)}, "is_save_in_flight": True, **changes})
    return replace(view, remotes=tuple(replace(r, **(remote or {})) for r in view.remotes))


def test_the_largest_shard_at_rest_is_uploaded_early_and_each_once() -> None:
    assert of(_while_one_is_written(), UploadEarly) == [UploadEarly(remote=NAS, tag="new", file=LARGE)]
    again = _while_one_is_written(remote={"not_early": frozenset({("new", LARGE)})})
    assert [one.file for one in of(again, UploadEarly)] == [SMALL]
    done = frozenset({("new", LARGE), ("new", SMALL)})
    assert of(_while_one_is_written(remote={"not_early": done}), UploadEarly) == []


@pytest.mark.parametrize(
    "remote",
    [
        {"is_busy": True},
        {"is_attached": False},
        {"forms": ("weights-bf16",)},
        {"known_tags": frozenset({"new"})},
    ],
)
def test_nothing_is_uploaded_early_to_a_remote_that_is_at_work_or_knows_the_tag(
    remote: dict[str, Any],
) -> None:
    assert of(_while_one_is_written(remote=remote), UploadEarly) == []


@pytest.mark.parametrize(
    "change", [{"is_paused": True}, {"is_spread": True}, {"lease": LeaseStatus(holds_lease=True)}]
)
def test_nothing_is_uploaded_early_while_paused_nor_beside_other_nodes(change: dict[str, Any]) -> None:
    assert of(_while_one_is_written(**change), UploadEarly) == []


def test_whatever_is_due_comes_before_a_shard_of_a_save_that_is_written() -> None:
    """An upload, and the question that precedes one; on another remote it may go all the same."""
    waiting = _save(1, committed=False)
    for known in (frozenset[str](), frozenset({waiting.save.tag})):
        view = _while_one_is_written(waiting, remote={"known_tags": known})
        assert len(of(view, Upload)) + len(of(view, Describe)) == 1
        assert of(view, UploadEarly) == []
        other = replace(view.remotes[0], name="other", is_busy=False, forms=(ZERO,), known_tags=frozenset())
        done = {(name, ZERO): committed_record(waiting.save, name) for name in ("other",)}
        both = replace(view, remotes=(*view.remotes, other), saves=(replace(waiting, uploads=done),))
        assert [one.remote for one in of(both, UploadEarly)] == ["other"]


def test_an_early_upload_makes_way_unless_it_is_of_the_very_file_that_waits() -> None:
    waiting = _save(1, committed=False)
    (sealed_file,) = waiting.save.files
    same = ListedFile(path=sealed_file.path, identity=sealed_file.identity)
    rewritten = ListedFile(path=same.path, identity=replace(same.identity, mtime_ns=99))
    for tag, file, makes_way in (
        (waiting.save.tag, same, False),
        (waiting.save.tag, rewritten, True),
        (waiting.save.tag, LARGE, True),
        ("another", same, True),
    ):
        busy = {"is_busy": True, "uploading": EARLY, "uploading_early": (tag, file)}
        view = _while_one_is_written(waiting, remote=busy)
        for now in (view, replace(view, drain=Drain(seconds_left=100.0, speeds={NAS: 1e9}))):
            assert [one.remote for one in of(now, CancelUpload)] == [NAS] * makes_way
            assert of(now, Upload) == of(now, UploadEarly) == []


def _with_farm(*saves: SaveView, **changes: Any) -> JobView:
    """Beside the required remote one that takes weights and nothing else."""
    view = _streaming(*saves, forms=(ZERO,))
    there: dict[str, Any] = {"is_required": False, "forms": (BF16,), "commits": ()} | changes
    return replace(view, remotes=(*view.remotes, replace(view.remotes[0], name=FARM, **there)))


def test_a_remote_without_zero_gets_its_forms_once_the_required_ones_have_theirs() -> None:
    """Its generations are its own: a tag that it knows is described before anything is sent."""
    save = _save(1)
    assert of(_with_farm(save), Upload) == [
        Upload(save_id=1, remote=FARM, form=BF16, generation=1, attempt=1, is_streamed=True)
    ]
    assert _uploaded(_with_farm(_save(1, committed=False))) == [(1, ZERO, False)]
    known = _with_farm(save, known_tags=frozenset({save.save.tag}))
    assert of(known, Describe) == [Describe(remote=FARM, tag=save.save.tag, save_id=1, form=BF16)]
    answered = replace(known, generations={(1, FARM, BF16): GenerationAnswer(generation=3)})
    assert [(s.generation, s.form) for s in of(answered, Upload)] == [(3, BF16)]


def test_a_remote_without_zero_keeps_as_many_of_each_form_as_it_says() -> None:
    saves = [sealed(step) for step in (1, 2, 3)]
    commits = tuple(remote_commit(s, form=form) for s in saves for form in (UNIVERSAL, BF16))
    limit = RetentionPolicy(save_total_limit=2)
    gone = of(_with_farm(forms=(UNIVERSAL, BF16), commits=commits, retention=limit), DeleteRemote)
    assert [(a.remote, a.commit.step) for a in gone] == [(FARM, 1)]
    left = tuple(c for c in commits if c.step > 1)
    assert of(_with_farm(forms=(UNIVERSAL, BF16), commits=left, retention=limit), DeleteRemote) == []


def test_what_remote_retention_let_go_is_not_held_again() -> None:
    """Held and let go in turn, it would keep the disk busy for ever."""
    save = sealed(1)
    record = committed_record(save).model_copy(update={"state": UploadState.DELETED})
    views = [save_view(1, save, uploads={(NAS, ZERO): record}), save_view(2, sealed(2))]
    disk = Disk(free_bytes=10_000, reserve_bytes=1, can_clone=True)
    assert of(job_view(views, disk=disk), Hold) == []


def test_nothing_is_retired_that_lies_here_and_is_not_known_yet() -> None:
    """As after the loss of the journal: its local copy could never go again."""
    old, new = sealed(1), sealed(2)
    remote = RemoteView(
        name=NAS,
        is_required=True,
        forms=(ZERO,),
        is_attached=True,
        is_busy=False,
        commits=(remote_commit(old), remote_commit(new)),
        known_tags=frozenset({old.tag, new.tag}),
        retention=RetentionPolicy(save_total_limit=1),
    )
    view = job_view([save_view(2, new)], remotes=(remote,))
    assert [a.commit.tag for a in of(view, DeleteRemote)] == [old.tag]
    assert of(replace(view, unsealed_tags=frozenset({old.tag})), DeleteRemote) == []


@pytest.mark.parametrize("state", UploadState)
def test_what_may_be_a_save_that_lies_here_is_not_retired_before_that_is_known(state: UploadState) -> None:
    """A note written over makes another save of the same shards: retired, it would never be sent again."""
    old, new = sealed(1), sealed(2)
    record = UploadRecord(remote=NAS, form=ZERO, state=state, retry_at_seconds=1e9)
    again = save_view(3, old.model_copy(update={"save_seq": 3}), uploads={(NAS, ZERO): record})
    view = job_view([again, save_view(2, new)])
    commits = (remote_commit(old), remote_commit(new))
    nas = replace(view.remotes[0], commits=commits, retention=RetentionPolicy(save_total_limit=1))
    retired = [a.commit.tag for a in of(replace(view, remotes=(nas,)), DeleteRemote)]
    is_settled = state in (UploadState.COMMITTED, UploadState.DELETED, UploadState.REFUSED)
    assert retired == ([old.tag] if is_settled else [])


@pytest.mark.parametrize("more", [{}, {"was_found_first": True, "is_adopted": False}])
def test_a_plan_costs_as_much_for_each_of_many_checkpoints(more: dict[str, Any]) -> None:
    """Calls grow in step with the number of checkpoints, not with its square."""

    def cost(count: int) -> int:
        view = job_view(
            [save_view(n, sealed(n), committed=not more or n == count, **more) for n in range(1, count + 1)]
        )
        profile = cProfile.Profile()
        profile.runcall(plan, view)
        return sum(entry.callcount for entry in profile.getstats())

    assert cost(400) < 3 * cost(200)


def test_late_files_that_a_remote_does_not_take_hold_nothing_up() -> None:
    """They come before derived forms: one that failed for good kept those from that remote for ever."""
    ready = DerivedRecord(state=DerivedState.READY)
    save = save_view(1, sealed(1), universal=ready, lacking={NAS: sealed(9).files})
    assert [a.remote for a in of(job_view([save]), UploadLateFiles)] == [NAS]
    waits = job_view([save], not_to_upload_late=frozenset({(1, NAS)}))
    assert not of(waits, UploadLateFiles)
    assert [a.form for a in of(waits, Upload)] == [UNIVERSAL]
