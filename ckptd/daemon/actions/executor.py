"""Execute a plan's actions: pass each to its executor, and clean up what dead attempts left in remotes (§3,
§5).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.policy import actions as a
from ckptd.errors import from_os_error
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.daemon.actions.local import LocalActions
    from ckptd.daemon.resources.limits import HostLimits
    from ckptd.daemon.uploads.scrub import Scrubber
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.daemon.uploads.uploads import UploadManager
    from ckptd.storage.journal.journal import Journal

log = logging.getLogger("ckptd.job")


class PlanExecutor:
    """Hands the actions of one job's plan out; every method is called in the deciding thread."""

    def __init__(
        self,
        links: Mapping[str, RemoteSession],
        shipping: UploadManager,
        chores: LocalActions,
        journal: Journal,
        totals: HostLimits,
        wake: Callable[[], None],
        scrubber: Scrubber,
    ) -> None:
        self._links = links
        self._shipping = shipping
        self._chores = chores
        self._journal = journal
        self._totals = totals
        self._wake = wake
        self.scrubber = scrubber

    def carry_out(self, plan: a.Plan, save_dir_fd: int, reserve_bytes: int) -> None:
        """Start what may start now; what has to wait in line is planned again when its turn comes."""
        places = [self, *self._links.values()]
        self._totals.begin_turn(places)
        for action in plan.actions:
            try:
                if self._may_start(action):
                    self._act(action, save_dir_fd, reserve_bytes)
            except OSError as error:
                what = f"{type(action).__name__} of {getattr(action, 'tag', None) or 'a save'}"
                self._chores.refused(what, from_os_error(error, what))
        self._totals.end_turn(places)

    def scrub(self, *, is_wanted: bool = True) -> bool:
        """The slow reading goes on, or makes way; whether it found anything, or the trash waits."""
        is_wanted = is_wanted and not self._totals.places.is_crowded
        return self.scrubber.turn(is_wanted=is_wanted) | (self._chores.pruner.seconds_to_tidy == 0)

    def _may_start(self, action: a.Action) -> bool:
        """Uploads and conversions are counted over all jobs (P11, P12)."""
        if (
            isinstance(action, a.Ship | a.Supplement | a.Retire)
            and self._links[action.remote].is_transferring
        ):
            return False
        if isinstance(action, a.Ship | a.Supplement):
            is_streamed = isinstance(action, a.Ship) and action.is_streamed
            if is_streamed and not self._totals.conversions.may_start(self, self._wake):
                return False
            link = self._links[action.remote]
            may_start = self._totals.uploads.may_start(link, self._wake)
            if may_start:
                self._totals.share(starting=link)
            return may_start
        if isinstance(action, a.Convert):
            return self._totals.conversions.may_start(self, self._wake)
        return True

    def _act(self, action: a.Action, save_dir_fd: int, reserve_bytes: int) -> None:
        match action:
            case a.Describe():
                self._links[action.remote].describe(action.tag, self._wake)
            case a.Ship():
                self._shipping.ship(action, save_dir_fd, self._totals.conversion_bytes())
            case a.Supplement():
                self._shipping.late.ship(action)
            case a.MakeWay():
                self._shipping.make_way(action)
            case a.AskConfirmation():
                self._shipping.confirm(action)
            case a.Retire():
                self._shipping.retiring.retire(action)
            case _:
                self._act_here(action, save_dir_fd, reserve_bytes)

    def _act_here(self, action: a.ActionHere, save_dir_fd: int, reserve_bytes: int) -> None:
        match action:
            case a.Convert():
                self._chores.convert(action, save_dir_fd, reserve_bytes)
            case a.StopConverting():
                self._chores.stop_converting(action)
            case a.Hold():
                self._chores.hold(action, save_dir_fd)
            case a.ReleaseHold():
                self._chores.release_hold(action, save_dir_fd)
            case a.DropDerived():
                self._chores.drop_derived(action, save_dir_fd)
            case a.PointUniversal():
                self._chores.point_universal(action, save_dir_fd)
            case a.Prune():
                self._chores.pruner.prune(action, save_dir_fd)

    def sweep(self, save_dir_fd: int) -> None:
        """Give up half uploads that no attempt will go on with: only those that our journal knows (§5)."""
        self._chores.pruner.tidy(save_dir_fd)
        for link in self._links.values():
            if not link.is_ready or link.is_transferring or link.name not in self._journal.with_leftovers:
                continue
            left = self._journal.leftovers(link.name)
            self._journal.with_leftovers.discard(link.name)
            if left:
                link.order(m.Discard(uploads=tuple(left)), partial(self._swept, link.name, left))

    def _swept(self, remote: str, uploads: list[tuple[str, str]], answer: m.Answer) -> None:
        if isinstance(answer, m.Done):
            self._journal.forget_leftovers(remote, uploads)
        else:
            self._journal.with_leftovers.add(remote)
