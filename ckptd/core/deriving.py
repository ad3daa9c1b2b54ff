"""Which derived forms are made, which stay on the node, and what `latest_universal` names (design.md §4, P9).

Apart from planner.py, which decides what is shipped and deleted: derived forms can be made again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.actions import Action, Convert, DropDerived, PointUniversal
from ckptd.core.ladder import Fate
from ckptd.core.listing import OURS
from ckptd.core.save import Order
from ckptd.core.view import UNIVERSAL, WEIGHTS, ZERO, DerivedState, ShipState

if TYPE_CHECKING:
    from ckptd.core.keeping import LocalFates
    from ckptd.core.view import DerivedRecord, JobView, RemoteView, SaveView

MAX_CONVERSION_TRIES = 3
_SETTLED = (ShipState.COMMITTED, ShipState.RETIRED, ShipState.REFUSED)


def is_open(record: DerivedRecord, now_seconds: float) -> bool:
    """A form that is to be made, or tried again."""
    if record.state is DerivedState.FAILED:
        return record.tries < MAX_CONVERSION_TRIES and now_seconds >= record.retry_at_seconds
    return record.state is DerivedState.NONE


def make_weights(view: JobView) -> list[Action]:
    """Of the newest whole save, once its ZeRO form is committed where the weights go; one at a time.

    Of older ones too where a ladder will leave them in that form alone.
    """
    whole = sorted(
        (s for s in view.saves if s.is_intact and not s.is_model_only),
        key=lambda s: s.save.order,
        reverse=True,
    )
    for form in WEIGHTS:
        is_rung = any(remote.retention.has_rung(form) for remote in view.remotes)
        for save in whole if is_rung else whole[:1]:
            is_due = is_open(save.derived(form), view.now_seconds) and _is_wanted(view, save, form)
            if is_due and not save.is_busy:
                # fp32 masters are a third of what a save holds, or less
                fits = view.disk.free_bytes - save.save.total_bytes // 2 >= view.disk.reserve_bytes
                return [Convert(save_id=save.id, form=form)] if fits else []
    return []


def drop_weights(view: JobView) -> list[Action]:
    """What every remote that takes it has, or takes no more, needs no place here."""
    return [
        DropDerived(save_id=save.id, form=form, reason="shipped")
        for save in view.saves
        for form, record in save.weights.items()
        if record.state is DerivedState.READY and not save.is_busy and not _is_wanted(view, save, form)
    ]


def _is_wanted(view: JobView, save: SaveView, form: str) -> bool:
    return any(form in remote.forms and _lacks(remote, save, form) for remote in view.remotes)


def _lacks(remote: RemoteView, save: SaveView, form: str) -> bool:
    is_there = save.ship(remote.name, ZERO).state is ShipState.COMMITTED
    return is_there and save.ship(remote.name, form).state not in _SETTLED


def keep_derived(view: JobView, local: LocalFates) -> list[Action]:
    """Point `latest_universal` at the newest proven universal form, then drop what is no longer kept."""
    ready = sorted(
        (s for s in view.saves if s.universal.state is DerivedState.READY), key=lambda s: s.save.order
    )
    here = {s.save.tag for s in view.saves if s.is_present}
    valid = [s for s in ready if s.is_intact or s.save.tag not in here]
    proven = [s for s in valid if s.universal.is_source_verified or _is_shipped_anywhere(s)]
    actions: list[Action] = []
    # other trainers' loaders look beside the shards, into folders that are theirs: no pointer of ours (P11)
    pointed = [s for s in proven if s.save.writer.trainer == "deepspeed"]
    target = pointed[-1].save.tag if pointed else None
    wanted = f"{OURS}/derived/{UNIVERSAL}/{target}" if target else None
    is_ours = view.latest_universal is None or view.latest_universal.startswith(f"{OURS}/")
    if is_ours and view.latest_universal != wanted and not _is_restored(view, proven):
        actions.append(PointUniversal(tag=target))
    for save in ready:
        is_replaced = not save.is_present and save.save.tag in here
        reason = "its tag was saved again" if is_replaced else _why_drop(view, save, proven, local)
        if reason and not save.is_busy and save.save.tag != target:
            actions.append(DropDerived(save_id=save.id, reason=reason))
    return actions


def _is_restored(view: JobView, proven: list[SaveView]) -> bool:
    """`latest_universal` names a form that `resume` fetched, newer than all that this node holds (H54, P9).

    Its save is not on the node, so its order is its COMMIT's; before the remotes were asked it is kept.
    """
    tag = (view.latest_universal or "").rpartition("/")[2]
    if not tag or any(s.save.tag == tag and s.is_present for s in view.saves):
        return False
    commits = [c for remote in view.remotes for c in remote.commits if c.tag == tag]
    orders = [Order(c.branch, c.step, c.save_seq) for c in commits]
    if not orders:
        return not all(remote.is_attached for remote in view.remotes)
    return not proven or max(orders) > proven[-1].save.order


def _is_shipped_anywhere(save: SaveView) -> bool:
    """The upload checked the source's zip CRCs in passing (§4)."""
    return any(r.state is ShipState.COMMITTED and r.form == ZERO for r in save.ships.values())


def _why_drop(view: JobView, save: SaveView, proven: list[SaveView], local: LocalFates) -> str | None:
    if save.is_present and not save.is_intact:
        return "its source was saved again"
    rung = local.universal.get(save.id) or Fate()
    if rung.keeps or _is_rung_of_a_remote(view, save):
        return None
    if not save.is_present:
        return rung.goes or "its source is gone"
    is_newest = bool(proven) and proven[-1].id == save.id
    if is_newest or not proven or save.save.order > proven[-1].save.order:
        return None
    if UNIVERSAL not in view.local_forms:
        return "not kept on this node"
    if not view.disk.can_clone:
        return "a newer one is ready"
    return None if local.zero[save.id].keeps else "its source may go"


def _is_rung_of_a_remote(view: JobView, save: SaveView) -> bool:
    """A remote will be left with this form alone, and has not got it yet."""
    for remote in view.remotes:
        if UNIVERSAL not in remote.forms or not remote.retention.has_rung(UNIVERSAL):
            continue
        zero = save.ship(remote.name, ZERO).state
        may_come = save.is_intact and zero not in (ShipState.RETIRED, ShipState.REFUSED)
        if (zero is ShipState.COMMITTED or may_come) and save.ship(
            remote.name, UNIVERSAL
        ).state not in _SETTLED:
            return True
    return False
