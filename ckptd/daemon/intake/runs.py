"""Determine which run a job's save_dir holds, and whether it may continue that run in each remote (adr/0185).

The run is settled before anything is sealed, for order is of one run; it is claimed in a remote before
anything is uploaded there.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.config.commands import command_for, user_name
from ckptd.core.completeness.judge import State
from ckptd.core.completeness.sealing import same_files
from ckptd.core.model.heartbeat import DEAD_SECONDS
from ckptd.core.model.manifest import cells_of
from ckptd.core.model.records import ZERO, DerivedState, UploadState
from ckptd.core.model.runs import Claim, Part, Place, RunFile, RunSeen, run_of, short
from ckptd.daemon.state.remote_sync import committed_shards
from ckptd.daemon.uploads.peers import takes_beats
from ckptd.storage.local.run_file import copied_run, host_name, read_run, run_file, write_run
from ckptd.storage.remote import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.completeness.judge import Verdict
    from ckptd.core.model.heartbeat import Heartbeat, SeenNode
    from ckptd.core.model.listing import FolderListing
    from ckptd.core.model.records import SaveRow
    from ckptd.core.model.runs import How
    from ckptd.core.model.save import Order
    from ckptd.daemon.state.problems import Problems
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession

log = logging.getLogger("ckptd.runs")

ASK_AGAIN_SECONDS = 10.0
_UNDECIDED = (State.UNKNOWN, State.COMPLETE)
_OPEN = (UploadState.NEW, UploadState.FAILED, UploadState.WAITING, UploadState.UPLOADING)

Ready = list[tuple["FolderListing", "Verdict"]]


class JobRuns:
    """One job's; every method is called in the deciding thread."""

    def __init__(
        self,
        config: JobConfig,
        state: JobState,
        sessions: Mapping[str, RemoteSession],
        save_dir_fd: int,
        node: tuple[str, str],
        heartbeat: Callable[[], Heartbeat],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._heartbeat = heartbeat
        self._state = state
        self._sessions = sessions
        self._fd = save_dir_fd
        self._save_dir = str(config.save_dir)
        self._wake = wake
        self.place = Place(
            node=node[0], node_id=node[1], host=host_name(), user=user_name(), save_dir=self._save_dir
        )
        self._file: RunFile | None = None
        self._asked_at: dict[str, float] = {}
        self._is_asking: set[str] = set()
        self.sharers: dict[str, tuple[SeenNode, ...]] = {}
        """Remote → other places that were heard of there, of whatever run."""
        self._copied = copied_run(self._fd, self._save_dir)
        self.refresh()

    @property
    def run_id(self) -> str | None:
        """The run that save_dir holds; None: nobody knows yet."""
        return self._file.run_id if self._file is not None else None

    def refresh(self) -> None:
        """Read what stands in save_dir: `resume` writes it too, and it goes when the directory is emptied."""
        found = read_run(self._fd, self._save_dir)
        if found != self._file:
            self._bind(found)

    def _bind(self, found: RunFile | None) -> None:
        self._file = found
        self._state.set_run(self.run_id)
        for session in self._sessions.values():
            session.bind(self.run_id or "")
            session.set_claim(is_claimed=self._is_accepted(session))

    def _write(self, found: RunFile) -> None:
        """Write run.json. In memory it counts at once; a disk that takes nothing now is tried at the next
        change."""
        try:
            write_run(self._fd, found)
        except OSError as error:
            log.warning("%s: run.json cannot be written: %s", self._save_dir, os.strerror(error.errno or 0))
        self._bind(found)

    # --- which run -------------------------------------------------------------------------------------

    def is_settled(self, ready: Ready, *, has_heard_all: bool) -> bool:
        """Tell whether it is known of which run these saves are, which nobody sealed yet; else it is found
        out.

        A directory without a word is of the run whose committed checkpoint lies in it, byte by byte; else a
        run begins. So it is where nothing was left that a training could have loaded, and it begins anew: of
        runs that lie there again only its own and those that were saved in this directory are gone on with.
        """
        if not ready:
            return self._file is not None
        if self._file is not None and not self._is_bare(ready):
            return True
        if not has_heard_all:
            return False
        if self._file is not None and not self._is_below(ready):
            return True
        if not self._has_asked(ready):
            return False
        known = self._recognised(ready)
        left = self.run_id
        if known is None or (left is not None and known != left and not self._was_saved_here(known)):
            self._begin(secrets.token_hex(16), "begun", left=left)
        elif known != left:
            self._begin(known, "recognised")
        return True

    def _was_saved_here(self, run_id: str) -> bool:
        """Tell whether a remote names this directory as a place of that run: another directory's run is not
        gone on with for a copy of its checkpoint, since this job's limits would delete what it committed.
        """
        seen = [session.seen_all for session in self._sessions.values() if session.seen_all is not None]
        return any(
            row.run_id == run_id and row.save_dir == self._save_dir for one in seen for row in one.rows
        )

    def _begin(self, run_id: str, how: How, left: str | None = None) -> None:
        log.debug("%s: run %s, %s", self._save_dir, short(run_id), how)
        name = "" if self._config.shared_fs else self._save_dir
        self._write(run_file(self._fd, name, run_id, how, left=left))

    def _is_bare(self, ready: Ready) -> bool:
        """Tell whether nothing is left here of what the run saved but what is to be sealed now."""
        state, file = self._state, self._file
        if file is None or not file.accepted:  # it has just begun, or was resumed since
            return False
        new = {folder.tag for folder, _ in ready}
        rows = state.saves.rows.values()
        if any(row.held or row.derived.state is DerivedState.READY for row in rows):
            return False
        return not any(v.state in _UNDECIDED and tag not in new for tag, v in state.folders.verdicts.items())

    def _is_below(self, ready: Ready) -> bool:
        """Tell whether what is saved now is no continuation of the run.

        A trainer that removes its last checkpoint before it saves the next goes on above it; one that saves
        its last step again stays at it.
        """
        seen = [session.observation for session in self._sessions.values() if session.observation is not None]
        steps = [view.commit.step for one in seen for view in one.commits]
        return bool(steps) and all((verdict.step or 0) < max(steps) for _, verdict in ready)

    def _has_asked(self, ready: Ready) -> bool:
        """Tell whether remotes told of the tags that lie here, and all that lies here was judged."""
        tags = {folder.tag for folder, _ in ready}
        listing = self._state.folders.listing
        for session in self._sessions.values():
            known = session.known_tags()
            for folder in listing.folders if listing is not None else ():
                verdict = self._state.folders.verdicts.get(folder.tag)
                is_open = verdict is None or verdict.state in _UNDECIDED
                if folder.tag in known - tags and is_open and self._sealed(folder) is None:
                    return False
            unasked = [tag for tag in tags & known if tag not in session.tag_views]
            for tag in unasked if session.is_ready else ():
                session.describe(tag, self._wake)
            if unasked and session.is_ready:
                return False
        return True

    def _recognised(self, ready: Ready) -> str | None:
        """The run that committed what lies here: the newest of it counts."""
        found: list[tuple[Order, str]] = []
        listing = self._state.folders.listing
        for folder in listing.folders if listing is not None else ():
            if (row := self._sealed(folder)) is None:
                continue
            for session in self._sessions.values():
                proof = self._state.uploads.record(row.id, session.name, ZERO).commit_sha256
                commits = session.seen_all.commits if session.seen_all is not None else ()
                found += [
                    (row.save.order, run_of(v.commit, v.commit.job_id)) for v in commits if v.sha256 == proof
                ]
        for folder, _ in ready:
            facts = self._state.folders.facts.get(folder.tag, {})
            held = {(f.path, facts[f.path].fingerprint) for f in folder.own if f.path in facts}
            for session in self._sessions.values():
                for shards, order, run_id in committed_shards(session, folder.tag):
                    if shards and shards <= held:
                        found.append((order, run_id))
        return max(found)[1] if found else None

    def _sealed(self, folder: FolderListing) -> SaveRow | None:
        """Return the save that a folder is, unless another came in its place while no daemon looked."""
        row = self._state.saves.of_tag(folder.tag)
        return row if row is not None and same_files(row.save, folder) else None

    # --- the claim -------------------------------------------------------------------------------------

    def turn(self, *, has_heard_all: bool) -> None:
        """Claim the run where something is to be sent; a release before this one left no word of it."""
        self.refresh()
        if self._file is None and has_heard_all and (known := self._recognised([])) is not None:
            self._begin(known, "recognised")
        if self._file is None:
            return
        for name, session in self._sessions.items():
            if session.observation is None or session.settings.job_id is None or not session.is_ready:
                continue
            session.set_claim(is_claimed=session.is_claimed and self._is_accepted(session))
            is_due = time.monotonic() - self._asked_at.get(name, -ASK_AGAIN_SECONDS) >= ASK_AGAIN_SECONDS
            if (session.others or not session.is_claimed) and is_due and self._wants(name):
                self._ask(name, session)

    def _is_accepted(self, session: RemoteSession) -> bool:
        seen, file = session.seen_all, self._file
        if seen is None or file is None:
            return session.is_claimed and file is not None
        newest = seen.rows[-1].number if seen.rows else 0
        accepted = file.is_accepted(seen.identity.remote_id)
        return accepted > 0 and accepted >= newest

    def _wants(self, name: str) -> bool:
        """Tell whether something is to be uploaded to a remote."""
        forms = next(remote.forms for remote in self._config.remotes if remote.name == name)
        here = [row for row in self._state.saves.rows.values() if row.state == "present" or row.held]
        return any(
            self._state.uploads.record(row.id, name, form).state in _OPEN for row in here for form in forms
        )

    def _ask(self, name: str, session: RemoteSession) -> None:
        if name in self._is_asking or self._file is None:
            return
        remote_id = session.settings.remote_id or ""
        self._asked_at[name] = time.monotonic()
        self._is_asking.add(name)
        beat = self._heartbeat() if takes_beats(session) else None
        order = m.ClaimRun(claim=self._claim(remote_id), heartbeat=beat)
        session.request(order, lambda answer: self._heard(name, session, answer))

    def _claim(self, remote_id: str) -> Claim:
        file = self._file
        assert file is not None
        return Claim(
            **self.place.model_dump(),
            **self._part().model_dump(),
            run_id=file.run_id,
            is_new=file.how == "begun" and not file.accepted,
            left=file.left,
            was_resumed=file.how == "resumed",
            knows=file.knows(remote_id),
            accepted=file.is_accepted(remote_id),
        )

    def _part(self) -> Part:
        """Describe the share of its newest save that this node holds."""
        rows = [row for row in self._state.saves.rows.values() if row.state == "present" or row.held]
        newest = max(rows, key=lambda row: row.save.order, default=None)
        is_shared = self._config.shared_fs
        if newest is None or not newest.save.is_part:
            return Part(is_shared=is_shared)
        grid = newest.save.grid
        return Part(
            is_whole=False,
            shards=tuple(sorted((cell.d, cell.mm) for cell in cells_of(newest.save.files))),
            grid=(grid.dp, grid.mm_count, grid.zero_stage),
            is_shared=is_shared,
        )

    def _heard(self, name: str, session: RemoteSession, answer: m.Answer) -> None:
        self._is_asking.discard(name)
        self._wake()
        if isinstance(answer, m.Failed):
            session.note_error(answer.raised)
        elif isinstance(answer, m.Claimed) and self._file is not None:
            self._answered(name, session, answer.run)

    def _answered(self, name: str, session: RemoteSession, seen: RunSeen) -> None:
        assert self._file is not None
        session.set_claim(is_claimed=session.is_claimed and not seen.others, others=seen.others)
        if seen.others:
            log.error("%s: %s saves to it too; nothing is sent there", name, seen.others[0].words)
            return
        before = self._file
        after = before.accepting(session.settings.remote_id or "", seen.number, seen.run_id)
        self._write(after)
        session.set_claim(is_claimed=True)
        session.observe()
        if after.run_id != before.run_id:
            log.debug("%s: run %s, as %s has it", self._save_dir, short(after.run_id), name)

    # --- what is said ----------------------------------------------------------------------------------

    def see_problems(self, see: Problems) -> None:
        """Report each turn other jobs that save to a remote, and what other runs left there."""
        self._see_copied(see)
        for name, session in self._sessions.items():
            if session.others:
                self._see_shared(see, name, [other.words for other in session.others], is_refused=True)
            elif others := self._other_runs(name):
                self._see_shared(see, name, others, is_refused=False)
            if self._are_siblings(name, session):
                # at the first start here that was not known of the others
                see.clear("name-shared", name)
            self._see_left(see, name, session)

    def _see_copied(self, see: Problems) -> None:
        """A note, until this daemon ends."""
        if self._copied is None or self._file is None:
            return
        is_same = self.run_id == self._copied
        what = "it goes on with that run here" if is_same else "what is saved here is a run of its own"
        text = f"{self._save_dir} was copied or moved from where run {short(self._copied)} was saved: {what}"
        step = 'where the other one is saved on, this one needs name = "…" and a url of its own'
        see.see("run-copied", self._save_dir, text, step)

    def _are_siblings(self, name: str, session: RemoteSession) -> bool:
        """Tell whether all who live there besides this place are of its run, which it may go on with."""
        beats = [seen.heartbeat for seen in self.sharers.get(name, ()) if not seen.is_dead]
        runs = {beat.run_id for beat in beats if beat is not None}
        return session.is_claimed and len(beats) > 0 and None not in beats and runs == {self.run_id}

    def _see_shared(self, see: Problems, name: str, others: Sequence[str], *, is_refused: bool) -> None:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        what = "nothing of this one is sent there" if is_refused else "nothing of that one is sent there"
        text = f"{others[0]}{more} saves another run to {name} under the name {self._config.name}: {what}"
        step = 'name one of the two runs apart: name = "…" in its job file, and a url of its own'
        if is_refused and not self._part().is_whole:
            resume = command_for(self._config, "resume")
            minutes = f"{DEAD_SECONDS / 60:.0f} min"
            step += (
                f"; a node that replaces a dead one of this run: {resume}, or wait {minutes} after its end"
            )
        see.see("run-shared", name, text, step, severity="attention" if is_refused else "note")

    def _other_runs(self, name: str) -> list[str]:
        """Places of other runs that live there."""
        ours = (self.place.host, self.place.save_dir)
        return [
            f"{beat.user}@{beat.host}:{beat.save_dir}"
            for seen in self.sharers.get(name, ())
            if (beat := seen.heartbeat) is not None
            and not seen.is_dead
            and beat.save_dir
            and (beat.host, beat.save_dir) != ours
            and beat.newest is not None
            and self.run_id is not None
            and beat.run_id not in (None, self.run_id)
        ]

    def _see_left(self, see: Problems, name: str, session: RemoteSession) -> None:
        """A note: no limit of this run removes what another left."""
        seen = session.seen_all
        if seen is None or self.run_id is None:
            return
        left: dict[str, list[int]] = {}
        for view in seen.commits:
            run_id = run_of(view.commit, view.commit.job_id)
            if run_id != self.run_id and not view.disputed:
                left.setdefault(run_id, []).append(view.commit.bytes)
        living = {
            seen.heartbeat.run_id
            for seen in self.sharers.get(name, ())
            if seen.heartbeat is not None and not seen.is_dead
        }
        dead = {run_id: sizes for run_id, sizes in left.items() if run_id not in living}
        if not dead:
            return
        run_id = next(iter(sorted(dead)))
        count, size = sum(map(len, dead.values())), sum(map(sum, dead.values()))
        runs = "an earlier run" if len(dead) == 1 else f"{len(dead)} earlier runs"
        text = f"{name} holds {count} commits ({size_of(size)}) of {runs}: no limit of this run removes them"
        step = f"{command_for(self._config, 'gc', '--run', short(run_id))} removes one run's; list shows them"
        see.see("run-left", name, text, step)
