"""Execute a plan's actions: pass each to its executor, and clean up what dead attempts left in remotes (§3,
§5).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.policy import actions as a
from ckptd.errors import from_os_error
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptd.daemon.actions.healing import Healer
    from ckptd.daemon.actions.local import LocalActions
    from ckptd.daemon.resources.limits import HostLimits
    from ckptd.daemon.uploads.scrub import Scrubber
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.daemon.uploads.uploads import UploadManager
    from ckptd.storage.journal.journal import Journal


class PlanExecutor:
    """Starts the actions of one job's plan; every method is called in the deciding thread."""

    def __init__(
        self,
        sessions: Mapping[str, RemoteSession],
        uploads: UploadManager,
        local_actions: LocalActions,
        journal: Journal,
        limits: HostLimits,
        wake: Callable[[], None],
        scrubber: Scrubber,
        healer: Healer,
    ) -> None:
        self._sessions = sessions
        self._uploads = uploads
        self._local_actions = local_actions
        self._journal = journal
        self._limits = limits
        self._wake = wake
        self.scrubber = scrubber
        self._healer = healer

    def execute(self, plan: a.Plan, save_dir_fd: int, reserve_bytes: int) -> None:
        """Start what may start now; what has to wait in line is planned again when its turn comes."""
        places = [self, *self._sessions.values()]
        self._limits.begin_turn(places)
        for action in plan.actions:
            try:
                if self._may_start(action):
                    self._start(action, save_dir_fd, reserve_bytes)
            except OSError as error:
                what = f"{type(action).__name__} of {getattr(action, 'tag', None) or 'a save'}"
                self._local_actions.refused(what, from_os_error(error, what))
        self._limits.end_turn(places)

    def scrub(self, save_dir_fd: int, *, is_wanted: bool = True) -> bool:
        """Go on with the slow reading and with repairs, or end them; return whether the reading found
        anything, or the trash waits.
        """
        is_wanted = is_wanted and not self._limits.child_slots.is_crowded
        has_news = self.scrubber.turn(is_wanted=is_wanted)
        self._healer.turn(save_dir_fd, is_wanted=is_wanted)
        return has_news | (self._local_actions.deleter.seconds_to_tidy == 0)

    def _may_start(self, action: a.Action) -> bool:
        """Uploads and conversions are counted over all jobs (P11, P12)."""
        if (
            isinstance(action, a.Upload | a.UploadLateFiles | a.UploadEarly | a.DeleteRemote)
            and self._sessions[action.remote].is_transferring
        ):
            return False
        if isinstance(action, a.Upload | a.UploadLateFiles | a.UploadEarly):
            is_streamed = isinstance(action, a.Upload) and action.is_streamed
            if is_streamed and not self._limits.conversions.may_start(self, self._wake):
                return False
            session = self._sessions[action.remote]
            may_start = self._limits.uploads.may_start(session, self._wake)
            if may_start:
                self._limits.share(starting=session)
            elif isinstance(action, a.UploadEarly):  # nobody waits behind what may as well come later
                self._limits.uploads.leave([session])
            else:
                self._limits.cancel_early()
            return may_start
        if isinstance(action, a.Convert):
            return self._limits.conversions.may_start(self, self._wake)
        return True

    def _start(self, action: a.Action, save_dir_fd: int, reserve_bytes: int) -> None:
        match action:
            case a.Describe():
                self._sessions[action.remote].describe(action.tag, self._wake)
            case a.Upload():
                self._uploads.upload(action, save_dir_fd, self._limits.conversion_bytes())
            case a.UploadLateFiles():
                self._uploads.late.upload(action)
            case a.UploadEarly():
                self._uploads.early.upload(action)
            case a.CancelUpload():
                self._uploads.cancel(action)
            case a.ConfirmCommits():
                self._uploads.confirm(action)
            case a.DeleteRemote():
                self._uploads.deleter.delete(action)
            case _:
                self._start_here(action, save_dir_fd, reserve_bytes)

    def _start_here(self, action: a.ActionHere, save_dir_fd: int, reserve_bytes: int) -> None:
        match action:
            case a.Convert():
                self._local_actions.convert(action, save_dir_fd, reserve_bytes)
            case a.StopConverting():
                self._local_actions.stop_converting(action)
            case a.Hold():
                self._local_actions.hold(action, save_dir_fd)
            case a.ReleaseHold():
                self._local_actions.release_hold(action, save_dir_fd)
            case a.DropDerived():
                self._local_actions.drop_derived(action, save_dir_fd)
            case a.PointUniversal():
                self._local_actions.point_universal(action, save_dir_fd)
            case a.DeleteLocal():
                self._local_actions.deleter.delete(action, save_dir_fd)

    def sweep(self, save_dir_fd: int) -> None:
        """Give up half uploads that no attempt will go on with: only those that our journal knows (§5)."""
        self._local_actions.deleter.tidy(save_dir_fd)
        for session in self._sessions.values():
            if (
                not session.is_ready
                or session.is_transferring
                or session.name not in self._journal.with_leftovers
            ):
                continue
            left = self._journal.leftovers(session.name)
            self._journal.with_leftovers.discard(session.name)
            if left:
                session.request(m.Discard(uploads=tuple(left)), partial(self._swept, session.name, left))

    def _swept(self, remote: str, uploads: list[tuple[str, str]], answer: m.Answer) -> None:
        if isinstance(answer, m.Done):
            self._journal.forget_leftovers(remote, uploads)
        else:
            self._journal.with_leftovers.add(remote)
