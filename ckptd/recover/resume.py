"""Make save_dir resumable in place (`ckptd resume`; docs/contract.md *Commands*).

Looks, chooses, plans, executes; when a remote's copy turns out to be damaged it says so and goes on with the
next best (of several nodes: with another copy of the same save, `pinned.py`). Idempotent, safe beside a
running daemon, and needs neither its journal nor its status.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ckptd.base import files
from ckptd.base.owned_dirs import make_beside, path_of
from ckptd.config.commands import command_for, this_node, typed
from ckptd.config.loader import check_job_paths
from ckptd.core.completeness.judge import State
from ckptd.core.model import unprotected
from ckptd.core.model.listing import SaveDirListing
from ckptd.core.model.runs import short
from ckptd.core.model.unprotected import warn_unprotected
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NothingCommitted,
    RefusedError,
    StorageError,
    from_os_error,
)
from ckptd.recover.advice import (
    advice,
    derived_accelerate,
    derived_universals,
    model_facts,
    put_in_universals,
)
from ckptd.recover.execute import Execution, one_at_a_time, write_resume_marker
from ckptd.recover.files import damage_in
from ckptd.recover.pinned import PinnedSelection
from ckptd.recover.plan import ResumePlan, make_plan
from ckptd.recover.select.choose import NEWEST_READ, Candidate, Choice, choose
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.inventory import LocalCheckpoint, forms_alone, read_node_memory, scan_local
from ckptd.recover.select.job import owner_of
from ckptd.recover.select.runs import Runs, bind, choose_run, elsewhere, known_rows, wait_until_silent
from ckptd.recover.select.sources import Sources, named
from ckptd.recover.select.steps import Convert, MoveAside, Step
from ckptd.storage.local.run_file import host_name, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.recover.select.inventory import NodeMemory, RemoteInventory
    from ckptd.recover.select.runs import Chosen

NEXT_SAVE_FACTOR = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """Hold the launch script's options; sizes in bytes.

    `state_dir`: where the daemon's status may lie.
    """

    world_size: int | None = None
    nodes: Nodes = field(default_factory=Nodes)
    dry_run: bool = False
    state_dir: Path | None = None
    memory_budget_bytes: int = 512 << 20
    remote: str | None = None
    """Only this one of the job's remotes."""
    tag: str | None = None
    """Only this one; None: the newest."""
    run: str | None = None
    """Of this run, named by the beginning of its id; None: of the one that save_dir holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The path to resume from, the plan that was executed, and what the trainer needs to know."""

    path: Path
    plan: ResumePlan
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    listing: SaveDirListing
    local: tuple[LocalCheckpoint, ...]
    derived: dict[str, dict[str, str] | None]
    memory: NodeMemory
    loadable: dict[str, dict[str, str] | None] = field(default_factory=dict)
    put_in: dict[str, dict[str, str] | None] = field(default_factory=dict)


def reserve_bytes(fd: int, job: JobConfig, sizes_bytes: Iterable[int]) -> int:
    """Return what must stay free on the disk of `fd`: the next save × 1.1 and min_free."""
    status = os.fstatvfs(fd)
    next_save = int(max(sizes_bytes, default=0) * NEXT_SAVE_FACTOR)
    return job.local.min_free.of(status.f_blocks * status.f_frsize) + next_save


class Resume:
    """One call of `resume` for one job. `say(line)`: for stderr; `on_progress(what, done, total)`: bytes."""

    def __init__(
        self,
        job: JobConfig,
        options: ResumeOptions,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._job = job
        self._options = options
        self._say = say
        self._on_progress = on_progress
        self._damaged_here: set[str] = set()
        self._proven: set[str] = set()
        self._sources = Sources(say=say)
        self._execution: Execution | None = None
        self._chosen: Chosen | None = None
        self._one = PinnedSelection(
            job=job,
            nodes=options.nodes,
            world_size=options.world_size,
            tag=options.tag,
            remote=options.remote,
        )

    def run(self) -> Resumed:
        """Make save_dir resumable.

        Raises:
            NothingCommitted: the remote is there and ours, it holds nothing of this run and neither does
                save_dir (4). LockHeld: another place that lives goes on with the run (75).
            NotFoundError: no remote is known and save_dir holds nothing, or no save has the tag (66).
            RemoteUnreachable, RemoteNotOurs: no remote answers or is this job's, and nothing here is surely
                the newest; of several nodes' remotes one does not (69).
            StorageError: the disk does not give a folder here that may be the newest (74).
            DamagedError, RefusedError, NoSpaceError, NotPermitted, ConfigError: as they say.
        """
        check_job_paths(self._job, "resume")
        owner = owner_of(self._job, self._options.state_dir)
        if not self._job.remotes:
            hint = "`ckptd resume SAVE_DIR URL`, or name its job file"
            self._say(f"no remote is known of {self._job.save_dir}: only what lies here counts; {hint}")
        remotes = named(self._job.remotes, self._options.remote)
        self._sources.look(remotes, owner)
        self._one.check_remotes(self._sources)
        fd = self._open()
        try:
            if self._choose_run(fd):
                # what it has committed until it fell silent
                self._sources.remotes.clear()
                self._sources.absent.clear()
                self._sources.look(remotes, owner)
                self._choose_run(fd)
            if fd is None or self._options.dry_run:
                return self._resume(fd)
            make_beside(fd, os.fstat(fd).st_mode & 0o777, is_sure=self._sources.is_numbered())
            with one_at_a_time(fd):
                return self._resume(fd)
        finally:
            if fd is not None:
                os.close(fd)

    # --- which run -------------------------------------------------------------------------------------

    def _choose_run(self, fd: int | None) -> bool:
        """Leave out what other runs committed; True: its place was waited for, and may have committed more.

        Raises:
            LockHeld: another place that lives goes on with it (75). RefusedError, NotFoundError, UsageError:
                as `choose_run`.
        """
        remotes = tuple(self._sources.remotes)
        runs = Runs(remotes)
        if not runs.views:
            return False
        save_dir = str(self._job.save_dir)
        before = read_run(fd, save_dir) if fd is not None else None
        held = before.run_id if before is not None else None
        chosen = choose_run(
            runs,
            remotes,
            () if held is not None else self._see(fd).local,
            held=held,
            asked=self._options.run,
            nodes=self._options.nodes.count,
        )
        is_first = self._chosen is None
        if is_first and self._options.run is None and self._wait(chosen.run_id, remotes):
            return True
        if is_first:
            self._say_which(runs, chosen.run_id, held)
        self._chosen = chosen
        self._sources.take(runs, chosen.run_id)
        return False

    def _wait(self, run_id: str | None, remotes: Sequence[RemoteInventory]) -> bool:
        if run_id is None or self._options.nodes.count > 1 or self._job.shared_fs or self._options.dry_run:
            return False
        for remote in remotes:
            row = elsewhere(remote.observation.rows, run_id, str(self._job.save_dir))
            insists = command_for(self._job, "resume", "--run", short(run_id))
            if row is not None and wait_until_silent(remote, row, self._say, insists):
                return True
        return False

    def _say_which(self, runs: Runs, run_id: str | None, held: str | None) -> None:
        """Say which run's checkpoints are taken, where save_dir does not say that they are its own."""
        if run_id is None:
            self._say(
                f"what lies in {self._job.save_dir} is of no run in the remotes: {runs.said_of_others(None)}"
            )
            return
        view = runs.view(run_id)
        place = view.place if view is not None else None
        is_here = place is not None and (place.host, place.save_dir) == (host_name(), str(self._job.save_dir))
        if place is not None and not is_here and (held is None or not runs.is_same(held, run_id)):
            self._say(f"{runs.words(run_id)} goes on here")

    def when_stopped(self) -> str:
        """Say what lies where after Ctrl-C."""
        if self._execution is None:
            return "stopped before anything was changed"
        return self._execution.when_stopped()

    # --- looking ---------------------------------------------------------------------------------------

    def _open(self) -> int | None:
        """Open save_dir, made where it is absent; None in a dry run without one."""
        path = self._job.save_dir
        try:
            if not self._options.dry_run and any(remote.commits for remote in self._sources.remotes):
                path.mkdir(exist_ok=True)
            return os.open(path, files.DIR_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"opening {path}") from error

    def _see(self, fd: int | None) -> _Seen:
        node = self._job.node_name or this_node(os.environ)
        memory = read_node_memory(self._job, self._options.state_dir, node)
        if fd is None:
            return _Seen(listing=SaveDirListing(device=0, folders=()), local=(), derived={}, memory=memory)
        listing, local = scan_local(self._job.save_dir, fd, self._job, self._sources.remotes)
        busy = next((sight for sight in local if sight.is_open), None)
        if busy is not None:
            msg = f"{self._job.save_dir}/{busy.tag} is being written right now"
            raise RefusedError(
                msg, hint="resume is for a save_dir whose trainer has ended; nothing was changed"
            )
        local = tuple(sight for sight in local if sight.tag not in self._damaged_here)
        return _Seen(
            listing=listing,
            local=local,
            derived=derived_universals(fd),
            memory=memory,
            loadable=derived_accelerate(fd),
            put_in=put_in_universals(fd, listing),
        )

    # --- deciding and doing ----------------------------------------------------------------------------

    def _resume(self, fd: int | None) -> Resumed:
        said: set[str] = set()
        while True:
            seen = self._see(fd)
            strange = self._strange(seen)
            local = tuple(sight for sight in seen.local if sight.tag not in {step.name for step in strange})
            choice = choose(
                local,
                self._sources.remotes,
                seen.memory,
                self._options.nodes,
                damaged=frozenset(self._sources.damaged),
                tag=self._options.tag,
            )
            self._one.settle(choice, self._sources)
            for name, error in choice.lost.items():
                self._sources.drop(name, error)
            if choice.lost:
                continue
            for note in choice.notes:
                if note not in said:
                    self._say(note)
                    said.add(note)
            candidate = self._one.candidate(choice, self._sources)
            if candidate is None:
                self._nothing(fd, seen, choice)
            if not self._is_proven(fd, candidate, seen):
                continue
            self._is_surely_newest(candidate, seen)
            self._say_unprotected(candidate.tag, seen, said)
            plan = make_plan(
                candidate,
                local,
                seen.listing,
                seen.derived,
                self._options.world_size,
                loadable=seen.loadable,
                put_in=seen.put_in,
                needs_commit=self._options.nodes.count > 1,
                aside=strange,
            )
            in_the_way = {step.name for step in plan.steps if isinstance(step, MoveAside)}
            self._must_be_read(s for s in local if s.tag in in_the_way - {candidate.tag})
            done = self._carry_out(fd, plan, seen, choice)
            if done is not None:
                return done

    def _strange(self, seen: _Seen) -> tuple[MoveAside, ...]:
        """Return moves for folders here of another run than the one that a person chose instead."""
        chosen = self._chosen
        if chosen is None or chosen.is_held or chosen.run_id is None:
            return ()
        strange = [s.tag for s in seen.local if chosen.is_strange(s, self._sources.remotes)]
        reason = f"not of run {short(chosen.run_id)}"
        return tuple(MoveAside(name=tag, label=tag, reason=reason) for tag in strange)

    def _bind(self, fd: int, candidate: Candidate) -> None:
        """Bind save_dir to the run before anything is fetched: a daemon beside takes what comes for that
        run's.
        """
        chosen = self._chosen
        if chosen is None or chosen.run_id is None:
            return
        save_dir = str(self._job.save_dir)
        if candidate.is_committed or read_run(fd, save_dir) is not None:
            bind(fd, save_dir, chosen.run_id, known_rows(self._sources.remotes))

    def _carry_out(self, fd: int | None, plan: ResumePlan, seen: _Seen, choice: Choice) -> Resumed | None:
        """Carry out the plan; None: something was left out, choose again."""
        for note in plan.notes:
            self._say(typed(self._job, note))
        path = path_of(self._job.save_dir, plan.path)
        for step in plan.steps:
            self._say(f"{'would' if self._options.dry_run else 'will'} {step}")
        if not self._options.dry_run:
            assert fd is not None
            write_resume_marker(fd, plan.candidate, seen.listing, self._say)
            self._bind(fd, plan.candidate)
            sizes = [sight.listing.total_bytes for sight in seen.local]
            sizes += [copy.bytes for c in choice.candidates[:NEWEST_READ] for copy in c.copies[:1]]
            execution = Execution(
                self._job.save_dir,
                fd,
                reserve_bytes=reserve_bytes(fd, self._job, sizes),
                memory_budget_bytes=self._options.memory_budget_bytes,
                on_progress=self._on_progress,
                say=self._say,
            )
            self._execution = execution
            try:
                execution.run(plan.steps)
            except CkptdError as error:
                self._give_up_on(plan, execution.current, error)
                return None
            if plan.candidate.local is not None and files.stat_beneath(fd, plan.candidate.tag) is None:
                self._say(f"{plan.candidate.tag} was removed meanwhile")  # before that word was there
                return None
        root = plan.candidate.layout[1][0]
        here = self._job.save_dir / plan.candidate.tag / root
        facts = model_facts(path) or model_facts(path / root) or model_facts(here)
        return Resumed(path=path, plan=plan, advice=tuple(advice(plan, facts)))

    def _give_up_on(self, plan: ResumePlan, step: Step | None, error: CkptdError) -> None:
        """Exclude what was at fault: a copy, a remote, the folder here that could not be converted."""
        self._one.why = error
        is_local = isinstance(step, Convert) and not plan.fetches and isinstance(error, DamagedError)
        if is_local:
            self._damaged_here.add(plan.candidate.tag)
        elif not self._sources.give_up_on(step, plan.steps, error):
            raise error
        if isinstance(error, DamagedError):
            self._say_damaged(plan.candidate.tag, error)

    def _say_damaged(self, tag: str, error: DamagedError) -> None:
        self._one.why = error
        then = "another copy of it is looked for" if self._one.is_bound else "the next best is taken"
        self._say(f"{tag}: {error.message}; {then}")

    def _is_proven(self, fd: int | None, candidate: Candidate, seen: _Seen) -> bool:
        """Whether the chosen folder may be trusted: one that the daemon refused is read to its end first.

        The daemon's refusal is a hint that a byte may be wrong; reading the bytes decides.
        """
        here = candidate.local
        if fd is None or here is None or here.tag not in seen.memory.refused - self._proven:
            return True
        self._say(f"{here.tag}: the daemon refused it, a byte may be wrong; it is read to its end")
        reason = damage_in(fd, here.listing)
        if reason is None:
            self._proven.add(here.tag)
        else:
            self._damaged_here.add(here.tag)
            self._say_damaged(here.tag, DamagedError(reason))
        return reason is None

    def _is_surely_newest(self, candidate: Candidate, seen: _Seen) -> None:
        """Take what is here without any remote only if the daemon's status knows nothing newer."""
        if self._sources.remotes or not self._job.remotes or self._options.tag is not None:
            return
        hints = seen.memory.orders
        hint, newest = hints.get(candidate.tag), max(hints.values(), default=None)
        if self._options.nodes.count > 1 or hint is None or newest is None or candidate.order < newest:
            raise self._sources.absent[0]
        self._say(f"no remote answers; {candidate.tag} here is the newest that the daemon knew of")

    def _say_unprotected(self, tag: str, seen: _Seen, said: set[str]) -> None:
        """Tell of checkpoints here that are none of ours, once: one of them may be newer."""
        listing = seen.listing
        for one in warn_unprotected(listing.unprotected, str(self._job.save_dir), listing.latest, (tag,)):
            if one.text not in said:
                self._say(f"{one.text}; {one.next_step}")
                said.add(one.text)

    def _must_be_read(self, sights: Iterable[LocalCheckpoint]) -> None:
        """Refuse to go on while a folder cannot be read: it may be the newest, nothing older replaces it."""
        for sight in sights:
            if sight.unread is not None and not sight.is_complete:
                folder = self._job.save_dir / sight.tag
                hint = f"call it again when the disk gives it, or move {folder} away to resume from before it"
                raise StorageError(f"{sight.tag}: {sight.unread.message}; nothing was changed", hint=hint)

    def _nothing(self, fd: int | None, seen: _Seen, choice: Choice) -> NoReturn:
        """Say why there is nothing to resume from; what is torn goes aside before a fresh start."""
        job = self._job
        if self._sources.absent:
            self._say_unprotected("", seen, set())
            raise self._sources.absent[0]
        self._must_be_read(seen.local)
        if self._sources.damaged or self._damaged_here or choice.notes:
            msg = f"every checkpoint of {job.name} is damaged"
            raise DamagedError(msg, hint="see the lines above; nothing was deleted")
        if not job.remotes:
            self._must_be_known(seen)
            torn = ", ".join(f"{s.tag} ({s.verdict.reason})" for s in seen.local)
            found = f": {torn}" if torn else ""
            msg = f"{job.save_dir} holds no complete checkpoint{found}, and no remote is known"
            raise NotFoundError(msg, hint="name the remote: ckptd resume SAVE_DIR URL, or a job file")
        self._must_be_known(seen)
        suspect = next((s for s in seen.local if s.verdict.state.value in ("suspect", "refused")), None)
        if suspect is not None:
            verdict = suspect.verdict
            msg = f"only {suspect.tag} is there, and it is {verdict.state.value}: {verdict.reason}"
            accepts = f"`{command_for(job, 'accept', suspect.tag)}` makes a suspect one usable; "
            is_suspect = verdict.state is State.SUSPECT
            raise RefusedError(msg, hint=f"{accepts if is_suspect else ''}move it away to start fresh")
        self._clear(fd, seen)
        where = ", ".join(remote.url for remote in self._sources.remotes)
        of_run = f", run {short(self._sources.run_id)}" if self._sources.run_id is not None else ""
        msg = f"{where} holds no committed checkpoint of {job.name}{of_run}, {job.save_dir} no complete one"
        alone = {
            v.commit.tag for r in self._sources.remotes for v in r.commits if v.commit.grid.is_model_only
        }
        alone |= {s.tag for s in seen.local if s.is_complete and s.listing.is_model_only}
        msg += f" (only a model: {', '.join(sorted(alone))})" if alone else ""
        weights = sorted(forms_alone(self._sources.remotes))
        msg += f" (only weights: {', '.join(weights)})" if weights else ""
        if others := self._sources.said_of_others():
            self._say(others)
        raise NothingCommitted(msg)

    def _must_be_known(self, seen: _Seen) -> None:
        """Refuse to start from scratch beside a checkpoint that ckptd does not know."""
        listing = seen.listing
        if listing.unprotected:
            first = warn_unprotected(listing.unprotected, str(self._job.save_dir), listing.latest, ())[0]
            msg = (
                f"nothing to resume from is committed or whole, and {self._job.save_dir} holds a checkpoint "
            )
            msg += (
                f"that ckptd does not protect: {unprotected.shown(listing.unprotected)}; nothing was changed"
            )
            raise RefusedError(msg, hint=f"resume from it by hand, or move it away; {first.next_step}")

    def _clear(self, fd: int | None, seen: _Seen) -> None:
        """Move aside what a fresh start would stumble over: torn folders, and `latest` that names nothing."""
        if fd is None:
            return
        names = [(s.tag, s.verdict.reason or "not whole") for s in seen.local if not s.is_complete]
        if seen.listing.latest is not None and not any(s.is_complete for s in seen.local):
            names.append(("latest", f"names {seen.listing.latest}, which cannot be loaded"))
        steps = [MoveAside(name=name, label=name, reason=reason) for name, reason in names]
        for step in steps:
            self._say(f"{'would' if self._options.dry_run else 'will'} {step}")
        if not self._options.dry_run:
            execution = Execution(
                self._job.save_dir, fd, reserve_bytes=0, memory_budget_bytes=0, say=self._say
            )
            execution.run(steps)
