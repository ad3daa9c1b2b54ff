"""Restore a committed checkpoint into another directory, which DeepSpeed loads there (`ckptd restore`).

Looks at the remotes alone, and goes through the loop of `recovery.py` in DIR.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.owned_dirs import lock, path_of
from ckptd.config.commands import command_for
from ckptd.core.model.generation import order_of
from ckptd.core.model.records import UNIVERSAL, WEIGHTS, ZERO
from ckptd.errors import (
    CkptdError,
    DamagedError,
    LockHeld,
    NotFoundError,
    NothingCommitted,
    NotPermitted,
    RefusedError,
    TargetExists,
    from_os_error,
)
from ckptd.recover.execute import drop_leftovers, one_at_a_time
from ckptd.recover.plan import Planner, RecoveryOptions
from ckptd.recover.recovery import Recovered, Recovery, reserve_bytes
from ckptd.recover.select.choose import Candidate, Candidates, SavesWanted, committed_saves, committed_weights
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.inventory import forms_alone
from ckptd.recover.select.runs import RemoteRuns, held_by
from ckptd.storage.local.scan import has_open_writer
from ckptd.storage.stores.open import directory_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.core.model.save import Order
    from ckptd.recover.plan import RecoveryPlan
    from ckptd.recover.select.sources import Where


_NEAREST = 5


class Restore(Recovery):
    """One call of `restore`."""

    def __init__(
        self,
        where: Where,
        directory: Path,
        options: RecoveryOptions,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        place = Path(os.path.realpath(directory))
        super().__init__(place, where, options, say, on_progress, is_bound=options.tag is not None)
        self._where = where

    def run(self) -> Recovered:
        """Restore into DIR.

        Raises:
            NothingCommitted: no remote holds a commit (4). NotFoundError: no such tag or rank (66).
            DamagedError: the tag asked for, or everything, is damaged (65). TargetExists: DIR holds
                another content under that tag (73). LockHeld: a daemon watches DIR (75).
            RemoteUnreachable, RemoteNotOurs, RefusedError, NoSpaceError, NotPermitted: as they say.
        """
        try:
            with self._sources.saying_absent():
                return self._run()
        except OSError as error:
            # the name is relative to DIR, which no one sees in it
            name = error.filename if isinstance(error.filename, str) else "."
            raise _of_dir(error, str(self._dir / name)) from error

    def _run(self) -> Recovered:
        self._check_directory()
        self._sources.read_remotes()
        self._choose_run()
        candidate = self._select()
        self._plan(candidate)  # a wish that cannot be had is refused before DIR is made
        with self._opened() as self._fd:
            return self._recover(candidate)

    # --- where to --------------------------------------------------------------------------------------

    def _check_directory(self) -> None:
        """Refuse what is somebody's place: a job's save_dir, a remote, a path that cannot be a directory."""
        job = self._where.job
        if job is not None and Path(os.path.realpath(job.save_dir)) == self._dir:
            msg = f"{self._dir} is the save_dir of job {job.name}"
            raise RefusedError(msg, hint=f"`{command_for(job, 'resume')}` makes it resumable in place")
        if job is not None and Path(os.path.realpath(job.save_dir)) in self._dir.parents:
            msg = f"{self._dir} lies inside the save_dir of job {job.name}"
            raise RefusedError(msg, hint="what lies there is taken for checkpoints; choose another directory")
        remotes = [directory_path(remote.url) for remote in self._where.remotes]
        # by spelling: a remote that hangs is not touched here; the links of DIR itself are resolved
        for root in (Path(os.path.normpath(path)) for path in remotes if path is not None):
            if root == self._dir or root in self._dir.parents or self._dir in root.parents:
                msg = f"{self._dir} and the remote {root} lie one inside the other"
                raise RefusedError(msg, hint="choose a directory outside the remote")
        for root in (self._dir, *self._dir.parents):
            if (root / "_ckptd" / "remote.json").exists():
                msg = f"{self._dir} {'is' if root == self._dir else f'lies inside {root},'} a remote of ckptd"
                raise RefusedError(msg, hint="choose another directory")
        if not self._dir.parent.is_dir():
            msg = f"{self._dir.parent} does not exist"
            raise NotFoundError(msg, hint="is the disk mounted? DIR itself is made, its parent must exist")
        if self._dir.exists() and not self._dir.is_dir():
            msg = f"{self._dir} is not a directory"
            raise TargetExists(msg)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """DIR, made where it is absent, with a shared lock on it; None in a dry run without one.

        The daemon of a save_dir holds that lock exclusively (P10), other restores may share it.
        """
        try:
            if not self._options.dry_run:
                self._dir.mkdir(exist_ok=True)
            fd = os.open(self._dir, files.DIR_FLAGS)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise _of_dir(error, f"opening {self._dir}") from error
        try:
            try:
                lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"{self._dir} is watched by a daemon"
                raise LockHeld(
                    msg, hint="choose another directory, or `ckptd resume` once it is stopped"
                ) from error
            if self._options.dry_run:
                yield fd
            else:
                with one_at_a_time(fd):
                    yield fd
        finally:
            os.close(fd)

    # --- which -----------------------------------------------------------------------------------------

    def _choose_run(self) -> None:
        """Leave out what other runs committed, and say which run it is where there are several.

        Raises:
            NotFoundError, UsageError: as `RemoteRuns.named`.
        """
        runs = RemoteRuns(self._sources.remotes)
        job = self._where.job
        is_alone = self._options.nodes.count == 1  # several nodes have to take one
        held = held_by(job.save_dir) if job is not None and is_alone else None
        run_id = runs.named(self._options.run) if self._options.run else held or runs.newest_committed()
        if run_id is None:
            return
        self._sources.take(runs, run_id)
        if others := runs.said_of_others(run_id):
            self._say(f"{runs.words(run_id)}; {others}")

    def _choose(self) -> Candidates:
        choice, options = Candidates(), self._options
        remotes, damaged = self._sources.remotes, frozenset(self._sources.damaged)
        if options.form in WEIGHTS:
            found = committed_weights(remotes, options.form, options.tag, damaged, choice.lost)
        else:
            found = committed_saves(remotes, Nodes(), damaged, choice, self._wanted(), model=options.tag)
        choice.candidates = found
        return choice

    def _pick(self, choice: Candidates) -> Candidate:
        tag, newest, found = self._options.tag, self._newest_of_tag(), choice.candidates
        fit = [c for c in found if c.tag == tag and c.order == newest] if tag else found
        if tag is None and self._options.form == ZERO:
            fit = [c for c in found if not c.is_universal_alone]
        if not fit:
            raise self._nothing(newest)
        return max(fit, key=lambda c: c.order)

    def _wanted(self) -> SavesWanted:
        """All of the tag asked for, else the newest that has the form."""
        if self._options.tag is not None:
            return SavesWanted(most=0, tags=frozenset({self._options.tag}))
        is_zero = self._options.form == ZERO
        return SavesWanted(most=1, is_usable=lambda c: not (is_zero and c.is_universal_alone))

    def _newest_of_tag(self) -> Order | None:
        """Order of the newest generation of the tag asked for, damaged or not; None: there is none."""
        return max(
            (
                order_of(view.commit)
                for remote in self._sources.remotes
                for view in remote.commits
                if view.commit.tag == self._options.tag and self._is_wanted_form(view.commit.form)
            ),
            default=None,
        )

    def _is_wanted_form(self, form: str) -> bool:
        wanted = self._options.form
        return form == wanted or (form in (ZERO, UNIVERSAL) and wanted not in WEIGHTS)

    def _nothing(self, wanted: Order | None) -> CkptdError:
        """Return why there is nothing to restore."""
        tag, sources = self._options.tag, self._sources
        there = {
            v.commit.tag
            for r in sources.remotes
            for v in r.commits
            if self._is_wanted_form(v.commit.form) and (tag is not None or not v.commit.grid.is_model_only)
        }
        if tag is not None and wanted is not None:
            msg = f"{tag} is damaged in every remote that answers"
            return DamagedError(msg, hint="see the lines above; without TAG the newest good one is taken")
        if sources.absent:
            return sources.absent[0]
        where = ", ".join(remote.url for remote in sources.remotes)
        weights = sorted(forms_alone(sources.remotes).get(tag or "", ()))
        if weights:
            msg = f"of {tag} only weights are left in {where}: nothing to resume from"
            return NotFoundError(msg, hint=f"they are had by --form {weights[0]}")
        if tag is not None and (other := sources.said_of_tag(tag)):
            return NotFoundError(f"{where} holds no {tag!r} of this run", hint=other)
        if tag is not None and there:
            near = difflib.get_close_matches(tag, sorted(there), n=_NEAREST, cutoff=0.0)
            msg = f"{where} holds no committed checkpoint {tag!r}"
            return NotFoundError(msg, hint=f"nearest: {', '.join(near)}; `ckptd list` shows all")
        if there or any(remote.observation.damaged for remote in sources.remotes):
            msg = f"every checkpoint in {where} is damaged"
            return DamagedError(msg, hint="see the lines above, and `ckptd verify`")
        what = "checkpoint" if self._options.form not in WEIGHTS else self._options.form
        msg = f"{where} holds no committed {what}"
        if what != "checkpoint":
            hint = f"a remote holds it once its forms list it: {what}; or `ckptd convert`"
            return NotFoundError(msg, hint=hint)
        return NothingCommitted(msg)

    # --- doing -----------------------------------------------------------------------------------------

    def _plan(self, candidate: Candidate) -> RecoveryPlan:
        return Planner(candidate, self._options, self._dir, self._fd).plan()

    def _begin(self, fd: int, plan: RecoveryPlan) -> int:
        """Refuse a folder that is being written; keep room where DIR shares its disk with the job's save_dir.

        Raises:
            RefusedError: somebody writes there (65).
        """
        if has_open_writer(str(self._dir), plan.candidate.tag):
            msg = f"{path_of(self._dir, plan.path)} is being written right now"
            raise RefusedError(msg, hint="is a trainer running there? choose another directory")
        job = self._where.job
        if job is None or not job.save_dir.exists() or os.stat(job.save_dir).st_dev != os.fstat(fd).st_dev:
            return 0
        return reserve_bytes(fd, job, [copy.bytes for copy in plan.candidate.copies])

    def _is_there(self, fd: int, plan: RecoveryPlan) -> bool:
        drop_leftovers(fd, plan.candidate.tag)
        return True


def _of_dir(error: OSError, what: str) -> CkptdError:
    """Return an error of DIR in our words: whoever calls may choose another one."""
    found = from_os_error(error, what)
    if isinstance(found, NotPermitted) and error.errno != errno.EROFS:
        found.hint = f"user {os.geteuid()}, as whom this runs, may not: name another directory with --to"
    return found
