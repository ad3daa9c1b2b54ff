"""Decide which derived forms are made, which stay on the node, what `latest_universal` names (design.md §4).

Uploads and deletions of saves are decided in `ckptd.core.policy.planner`; derived forms can be made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.model.listing import OURS
from ckptd.core.model.records import SETTLED, UNIVERSAL, ZERO, DerivedState, UploadState
from ckptd.core.model.save import Order
from ckptd.core.policy.actions import Action, DropDerived, PointUniversal
from ckptd.core.policy.leases import is_derived_remotely
from ckptd.core.policy.retention import LocalVerdicts, RetentionVerdict

if TYPE_CHECKING:
    from ckptd.core.model.records import DerivedRecord
    from ckptd.core.policy.view import JobView, RemoteView, SaveView

MAX_CONVERSION_TRIES = 3
PRESSURE = "disk pressure"


def is_open(record: DerivedRecord, now_seconds: float) -> bool:
    """Tell whether a form is to be made, or tried again."""
    if record.state is DerivedState.FAILED:
        return record.tries < MAX_CONVERSION_TRIES and now_seconds >= record.retry_at_seconds
    return record.state is DerivedState.NONE


def to_derive(view: JobView, remote: RemoteView, form: str) -> list[SaveView]:
    """Saves whose derived form that remote is to get, by preference: the newest one whose ZeRO form is
    committed, whole here or there; older ones too where a ladder will leave them in that form alone.

    Those that were begun and can be gone on with come first: on a slow link none would be finished, and what
    was sent of them would lie there for nothing.
    """
    ready = sorted(
        (s for s in view.saves if _has_source(view, s, remote)),
        key=lambda s: s.order,
        reverse=True,
    )
    begun = [s for s in ready if _is_begun(view, s, remote, form)]
    first = {s.id for s in begun}
    policy = remote.retention
    # what is ephemeral goes whole, so that no lesser form of it is ever what is left
    older = [s for s in ready[1:] if policy.has_rung(form) and not policy.is_ephemeral(s.order.step)]
    wanted = [*ready[:1], *older]
    return begun + [s for s in wanted if s.id not in first]


def _is_begun(view: JobView, save: SaveView, remote: RemoteView, form: str) -> bool:
    record = save.upload(remote.name, form)
    if record.generation is None or record.state not in (
        UploadState.NEW,
        UploadState.UPLOADING,
        UploadState.FAILED,
    ):
        return False
    is_here = save.derived(form).state is DerivedState.READY
    return is_here or is_converted_on_the_fly(view, save, form, is_now=False)


def next_to_evict(view: JobView, local: LocalVerdicts) -> SaveView | None:
    """Return the save whose universal form is deleted next; None: no disk pressure, or none is left.

    All of them are deleted before any hold: one a turn, clones (which free little) last, else oldest first.
    Never evict a form that tiered retention kept in place of its ZeRO form, or is about to. Forms that a
    later tier will keep are evicted last, newest first: an older save's ZeRO form is deleted sooner and frees
    more space (ADR 0094).
    """
    if not view.disk.is_short:
        return None
    ready = (s for s in view.saves if s.universal.state is DerivedState.READY and not s.is_busy)
    deletable = [s for s in ready if not _is_all_that_is_left(view, s, local)]
    spare = [s for s in deletable if not _will_be_left(view, s)]
    if spare or not deletable:
        return min(spare, key=lambda s: (_is_clone(s), s.order), default=None)
    return min(deletable, key=lambda s: (_is_clone(s), *(-part for part in s.order)))


def _is_clone(save: SaveView) -> bool:
    return save.universal.is_cloned and save.is_intact


def _is_all_that_is_left(view: JobView, save: SaveView, local: LocalVerdicts) -> bool:
    rung = local.universal.get(save.id) or RetentionVerdict()
    # a ZeRO form that nothing keeps may go in this very turn, on the strength of this one
    is_stepping_down = not save.is_intact or not local.zero[save.id].keeps
    return is_stepping_down and (bool(rung.keeps) or _is_rung_of_a_remote(view, save))


def _will_be_left(view: JobView, save: SaveView) -> bool:
    """Tell whether a local tier will keep the universal form in place of the ZeRO form."""
    policy = view.local_retention
    climbs = policy.has_rung(UNIVERSAL) and not policy.is_ephemeral(save.save.step)
    stays = save.is_pinned or save.save.tag in view.damaged_tags
    return climbs and save.is_intact and save.is_self_contained and not stays


def kept_until_converted(save: SaveView, verdict: RetentionVerdict | None) -> bool:
    """Tell whether a save stays whole here only because its universal form, which can be made, is missing."""
    is_awaited = verdict is not None and verdict.awaits == UNIVERSAL
    return is_awaited and save.is_self_contained and save.is_convertible and save.is_intact


def _has_source(view: JobView, save: SaveView, remote: RemoteView) -> bool:
    """Committed there; for a remote that takes no ZeRO form, on every required one, and whole here."""
    if not (save.is_convertible or (is_derived_remotely(save) and ZERO in remote.forms)):
        return False
    names = [remote.name] if ZERO in remote.forms else [r.name for r in view.remotes if r.is_required]
    return all(save.upload(name, ZERO).state is UploadState.COMMITTED for name in names)


def is_converted_on_the_fly(view: JobView, save: SaveView, form: str, *, is_now: bool = True) -> bool:
    """Tell whether a form that is not kept here can be made while it is uploaded; `is_now`: may begin.

    Of the shards here, or, of a save that no node has whole, of what the remote holds (adr/0118).
    """
    if not is_derived_remotely(save) and (form in view.local_forms or not save.is_intact):
        return False
    # its plan lies on this disk
    may_begin = not view.is_converting and not view.is_save_in_flight and not view.disk.is_full
    return is_open(save.derived(form), view.now_seconds) and (may_begin or not is_now)


def keep_derived(view: JobView, local: LocalVerdicts) -> list[Action]:
    """Point `latest_universal` at the newest proven universal form, then drop what is no longer kept."""
    ready, here = _ready(view)
    short = next_to_evict(view, local)
    proven = [s for s in _proven(ready, here) if s is not short]
    actions: list[Action] = []
    # other trainers' loaders look beside the shards, in folders of theirs: ckptd writes no pointer there
    pointed = [s for s in proven if s.save.writer.trainer == "deepspeed"]
    target = pointed[-1].save.tag if pointed else None
    wanted = f"{OURS}/derived/{UNIVERSAL}/{target}" if target else None
    is_ours = view.latest_universal is None or view.latest_universal.startswith(f"{OURS}/")
    if is_ours and view.latest_universal != wanted and not _is_restored(view, proven):
        actions.append(PointUniversal(tag=target))
    for save in ready:
        is_replaced = not save.is_present and save.save.tag in here
        reason = "its tag was saved again" if is_replaced else _why_drop(view, save, proven, local)
        if save is short:
            reason = PRESSURE
        if reason and not save.is_busy and save.save.tag != target:
            actions.append(DropDerived(save_id=save.id, reason=reason))
    return actions


def worth_creating(view: JobView, local: LocalVerdicts, saves: list[SaveView]) -> list[SaveView]:
    """Return those of `saves` whose derived form would not be deleted again at the next turn."""
    proven = _proven(*_ready(view))
    return [s for s in saves if _why_drop(view, s, proven, local) is None]


def not_to_stay(view: JobView) -> frozenset[int]:
    """Return the saves whose universal form is dropped even if retention keeps them as they are."""
    ready, here = _ready(view)
    proven = _proven(ready, here)
    kept = {save.id: RetentionVerdict(keeps=("as it is",)) for save in view.saves}
    rungs = kept if view.local_retention.has_rung(UNIVERSAL) else {}
    stays = LocalVerdicts(zero=kept, universal=rungs, forbidden={})
    return frozenset(s.id for s in ready if _why_drop(view, s, proven, stays) is not None)


def _ready(view: JobView) -> tuple[list[SaveView], set[str]]:
    """Return the saves whose universal form is here, oldest first, and the tags that are."""
    ready = sorted((s for s in view.saves if s.universal.state is DerivedState.READY), key=lambda s: s.order)
    return ready, {s.save.tag for s in view.saves if s.is_present}


def _proven(ready: list[SaveView], here: set[str]) -> list[SaveView]:
    valid = (s for s in ready if s.is_intact or s.save.tag not in here)
    return [s for s in valid if s.universal.is_source_verified or _is_uploaded_anywhere(s)]


def _is_restored(view: JobView, proven: list[SaveView]) -> bool:
    """Tell whether `latest_universal` names a form that `resume` fetched, newer than all on this node.

    Its save is not on the node, so its order is its COMMIT's; before the remotes were asked it is kept.
    """
    tag = (view.latest_universal or "").rpartition("/")[2]
    made_here = (s for s in view.saves if s.is_present or s.universal.state is DerivedState.READY)
    if not tag or any(s.save.tag == tag for s in made_here):
        return False
    commits = [c for remote in view.remotes for c in remote.commits if c.tag == tag]
    orders = [Order(c.branch, c.step, c.save_seq) for c in commits]
    if not orders:
        return not all(remote.is_attached for remote in view.remotes)
    return not proven or max(orders) > proven[-1].order


def _is_uploaded_anywhere(save: SaveView) -> bool:
    """Tell whether any remote committed the ZeRO form: its upload checked the source's zip CRCs."""
    return any(r.state is UploadState.COMMITTED and r.form == ZERO for r in save.uploads.values())


def _why_drop(view: JobView, save: SaveView, proven: list[SaveView], local: LocalVerdicts) -> str | None:
    if save.is_present and not save.is_intact:
        return "its source was saved again"
    rung = local.universal.get(save.id) or RetentionVerdict()
    if rung.keeps or _is_rung_of_a_remote(view, save) or _is_half_sent(view, save):
        return None
    if not save.is_present:
        return rung.goes or "its source is gone"
    is_newest = bool(proven) and proven[-1].id == save.id
    if is_newest or not proven or save.order > proven[-1].order:
        return None
    if UNIVERSAL not in view.local_forms:
        return "not kept on this node"
    if not view.disk.can_clone:
        return "a newer one is ready"
    return None if local.zero[save.id].keeps else "its source may be deleted"


def _is_half_sent(view: JobView, save: SaveView) -> bool:
    """Tell whether a remote has a part of the form, which nobody would ever delete: it gets the rest."""
    takers = (remote for remote in view.remotes if UNIVERSAL in remote.forms)
    return any(_has_source(view, save, r) and _is_begun(view, save, r, UNIVERSAL) for r in takers)


def _is_rung_of_a_remote(view: JobView, save: SaveView) -> bool:
    """Tell whether a remote's tier will keep this form alone, and the remote lacks it yet."""
    for remote in view.remotes:
        if UNIVERSAL not in remote.forms or not remote.retention.has_rung(UNIVERSAL):
            continue
        if remote.retention.is_ephemeral(save.save.step):
            continue
        zero = save.upload(remote.name, ZERO).state
        may_come = save.is_intact and zero not in (UploadState.DELETED, UploadState.REFUSED)
        if (zero is UploadState.COMMITTED or may_come) and save.upload(
            remote.name, UNIVERSAL
        ).state not in SETTLED:
            return True
    return False
