"""Place a complete local folder that no COMMIT holds in the order of all saves.

Pure. A rewind is never guessed. A tag whose COMMIT has other content was saved again here, later, only if
that COMMIT and all above it are this node's own: the job may have gone on elsewhere under the same names
(docs/adr/0030).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.completeness.order import next_order, rebuilt_order
from ckptd.core.model.generation import order_of
from ckptd.core.model.save import Order
from ckptd.recover.select.inventory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.remote.messages import CommitView


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOrder:
    """The order of a folder; `doubt`: why one that may be the newest does not count as it."""

    order: Order
    doubt: str | None = None


def local_order_of(
    tag: str,
    step: int,
    known: Sequence[Order],
    remotes: Sequence[RemoteInventory],
    memory: NodeMemory,
    is_own: Callable[[RemoteInventory, CommitView], bool],
) -> LocalOrder:
    """Return the place of a complete folder here at `step` in the order of saves.

    Use the order in the daemon's status if it is for this content. Otherwise place the save after every known
    save if the tag was saved again here or no rewind is possible, else before anything committed later.

    `known`: every order known by now; `is_own`: whether a COMMIT is of a save from here.
    """
    highest = max(known, default=None)
    views = [view for remote in remotes for view in remote.commits]
    same_tag = [view for view in views if view.commit.tag == tag]
    newest = max((order_of(view.commit) for view in same_tag), default=Order(0, 0, 0))
    hint = memory.orders.get(tag)
    if hint is not None and hint.step == step and hint > newest:
        return LocalOrder(order=hint)
    if not same_tag or highest is None:
        return LocalOrder(order=Order(highest.branch if highest else 1, step, 0))
    later = [(remote, v) for remote in remotes for v in remote.commits if order_of(v.commit) >= newest]
    if step >= highest.step or all(is_own(remote, view) for remote, view in later):
        return LocalOrder(order=next_order(step, highest))
    return _doubtful(tag, step, highest, [view for _, view in later])


def _doubtful(tag: str, step: int, highest: Order, later: Sequence[CommitView]) -> LocalOrder:
    """`later`: the newest COMMIT of the tag, and all above it."""
    top = max(later, key=lambda view: order_of(view.commit)).commit
    said = f"nothing proves that {tag} here is newer than {top.tag} (step {top.step}) of {top.committed_by}"
    same = [order_of(v.commit) for v in later if v.commit.tag == tag and v.commit.step == step]
    if not same:
        return LocalOrder(order=rebuilt_order(step, highest), doubt=f"{said}: that one comes first")
    # before its own COMMIT, so that whoever asks for the tag gets what lies here
    order = Order(max(same).branch, step, max(same).save_seq + 1)
    return LocalOrder(order=order, doubt=f"{said}: that one comes first (`--tag {tag}` takes what is here)")
