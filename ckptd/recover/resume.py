"""Make save_dir resumable in place (`ckptd resume`; docs/contract.md *Commands*).

Looks at save_dir and the remotes, and goes through the loop of `recovery.py`: with the next best where a
copy turns out to be damaged, of several nodes with another copy of the same save. Idempotent, safe beside a
running daemon, and needs neither its journal nor its status.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from ckptd.base import files
from ckptd.base.owned_dirs import make_beside
from ckptd.config.commands import command_for, node_name, with_typed_commands
from ckptd.config.loader import check_job_paths
from ckptd.config.remote_names import shown_remote
from ckptd.core.completeness.judge import State
from ckptd.core.model.listing import SaveDirListing
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.model.runs import short
from ckptd.core.model.unprotected import shown_unprotected, warn_unprotected
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NothingCommitted,
    NotPermitted,
    RefusedError,
    RemoteError,
    RemoteUnreachable,
    StorageError,
    from_os_error,
)
from ckptd.recover.execute import one_at_a_time, write_resume_marker
from ckptd.recover.files import damage_in
from ckptd.recover.plan import RecoveryOptions, SaveDirPlanner, needs_universal
from ckptd.recover.recovery import Recovered, Recovery, reserve_bytes
from ckptd.recover.select.choose import (
    NEWEST_READ,
    Candidate,
    Candidates,
    choose,
    readable_copies,
    views_by_save,
)
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.inventory import (
    LocalCheckpoint,
    NodeMemory,
    forms_alone,
    read_node_memory,
    scan_local,
)
from ckptd.recover.select.job import owner_of
from ckptd.recover.select.runs import RemoteRuns, bind, choose_run, elsewhere, known_rows, wait_until_silent
from ckptd.recover.select.sources import RemoteSources, Where, named
from ckptd.recover.select.steps import MakeUniversal, MoveAside, Step
from ckptd.storage.local.run_file import host_name, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.save import Order
    from ckptd.recover.plan import RecoveryPlan
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.runs import Chosen
    from ckptd.storage.remote.messages import CommitView


class Resume(Recovery):
    """One call of `resume` for one job."""

    def __init__(
        self,
        job: JobConfig,
        options: RecoveryOptions,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._one = PinnedSelection(job=job, options=options)
        check_job_paths(job, "resume")
        remotes, owner = named(job.remotes, options.remote), owner_of(job, options.state_dir)
        where = Where(remotes=remotes, owner=owner, job=job)
        super().__init__(job.save_dir, where, options, say, on_progress, is_bound=self._one.is_bound)
        self._job = job
        self._damaged_here: set[str] = set()
        self._proven: set[str] = set()
        self._chosen: Chosen | None = None
        self._listing = SaveDirListing(device=0, folders=())
        self._local: tuple[LocalCheckpoint, ...] = ()
        self._memory = NodeMemory()
        self._aside: tuple[MoveAside, ...] = ()
        self._sizes: list[int] = []

    def run(self) -> Recovered:
        """Make save_dir resumable.

        Raises:
            NothingCommitted: the remote is there and ours, or surely new; it holds nothing of this run and
                neither does save_dir (4). LockHeld: another place that lives goes on with the run (75).
            NotFoundError: no remote is known and save_dir holds nothing, or no save has the tag (66).
            RemoteUnreachable, RemoteNotOurs: no remote answers or is this job's, and nothing here is surely
                the newest; of several nodes' remotes one does not (69).
            StorageError: the disk does not give a folder here that may be the newest (74).
            DamagedError, RefusedError, NoSpaceError, NotPermitted, ConfigError: as they say.
        """
        if not self._job.remotes:
            hint = "`ckptd resume SAVE_DIR URL`, or name its job file"
            self._say(f"no remote is known of {self._dir}: only what lies here counts; {hint}")
        with self._sources.saying_absent():
            return self._run()

    def _run(self) -> Recovered:
        self._sources.read_remotes(knows_new=True)
        self._one.check_remotes(self._sources)
        fd = self._fd = self._open()
        try:
            if self._choose_run():
                self._sources.read_remotes(knows_new=True)  # what it has committed until it fell silent
                self._choose_run()
            if fd is None or self._options.dry_run:
                return self._recover()
            make_beside(fd, os.fstat(fd).st_mode & 0o777, is_sure=self._sources.is_numbered())
            with one_at_a_time(fd):
                return self._recover()
        finally:
            if fd is not None:
                os.close(fd)

    # --- which run -------------------------------------------------------------------------------------

    def _choose_run(self) -> bool:
        """Leave out what other runs committed; True: its place was waited for, and may have committed more.

        Raises:
            LockHeld: another place that lives goes on with it (75). RefusedError, NotFoundError, UsageError:
                as `choose_run`.
        """
        remotes = tuple(self._sources.remotes)
        runs = RemoteRuns(remotes)
        if not runs.views:
            return False
        before = read_run(self._fd, str(self._dir)) if self._fd is not None else None
        held = before.run_id if before is not None else None
        if held is None:
            self._see()
        chosen = choose_run(
            runs,
            remotes,
            () if held is not None else self._local,
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
            row = elsewhere(remote.observation.rows, run_id, str(self._dir))
            insists = command_for(self._job, "resume", "--run", short(run_id))
            if row is None:
                continue
            self._sources.say_absent()  # the wait takes minutes
            if wait_until_silent(remote, row, self._say, insists):
                return True
        return False

    def _say_which(self, runs: RemoteRuns, run_id: str | None, held: str | None) -> None:
        """Say which run's checkpoints are taken, where save_dir does not say that they are its own."""
        if run_id is None:
            self._say(f"what lies in {self._dir} is of no run in the remotes: {runs.said_of_others(None)}")
            return
        view = runs.view(run_id)
        if view is None or view.host is None or (view.host, view.save_dir) == (host_name(), str(self._dir)):
            return
        if held is None or not runs.is_same(held, run_id):
            self._say(f"{runs.words(run_id)} goes on here")

    # --- looking ---------------------------------------------------------------------------------------

    def _open(self) -> int | None:
        """Open save_dir, made where it is absent; None in a dry run without one."""
        path = self._dir
        try:
            if not self._options.dry_run and any(remote.commits for remote in self._sources.remotes):
                path.mkdir(exist_ok=True)
            return os.open(path, files.DIR_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"opening {path}") from error

    def _see(self) -> None:
        """Look at save_dir and at what the daemon knew of it.

        Raises:
            RefusedError: somebody writes there (65).
        """
        node = self._job.node_name or node_name(os.environ)
        self._memory = read_node_memory(self._job, self._options.state_dir, node)
        if self._fd is None:
            return
        self._listing, local = scan_local(self._dir, self._fd, self._job, self._sources.remotes)
        busy = next((checkpoint for checkpoint in local if checkpoint.is_open), None)
        if busy is not None:
            msg = f"{self._dir}/{busy.tag} is being written right now"
            raise RefusedError(
                msg, hint="resume is for a save_dir whose trainer has ended; nothing was changed"
            )
        damaged = self._damaged_here | self._memory.damaged
        for checkpoint in local:
            if checkpoint.tag in self._memory.damaged:
                text = "the daemon found a file of it that is not what was committed; another copy is taken"
                self._say_once(f"{checkpoint.tag}: {text}")
        self._local = tuple(checkpoint for checkpoint in local if checkpoint.tag not in damaged)

    # --- deciding and doing ----------------------------------------------------------------------------

    def _choose(self) -> Candidates:
        self._see()
        self._aside = self._strange()
        choice = choose(
            self._kept(),
            self._sources.remotes,
            self._memory,
            self._options.nodes,
            damaged=frozenset(self._sources.damaged),
            tag=self._options.tag,
        )
        self._sizes = [copy.bytes for c in choice.candidates[:NEWEST_READ] for copy in c.copies[:1]]
        self._one.settle(choice, self._sources)
        return choice

    def _kept(self) -> tuple[LocalCheckpoint, ...]:
        """Return the folders here that are not another run's."""
        strange = {step.name for step in self._aside}
        return tuple(checkpoint for checkpoint in self._local if checkpoint.tag not in strange)

    def _pick(self, choice: Candidates) -> Candidate | None:
        candidate = self._one.candidate(choice, self._sources)
        if candidate is None:
            self._nothing(choice)
        if not self._is_proven(candidate):
            return None
        self._is_surely_newest(candidate)
        self._say_unprotected(candidate.tag)
        return candidate

    def _plan(self, candidate: Candidate) -> RecoveryPlan:
        local = self._kept()
        plan = SaveDirPlanner(
            candidate,
            self._options,
            self._dir,
            self._fd,
            listing=self._listing,
            local=local,
            aside=self._aside,
        ).plan()
        in_the_way = {step.name for step in plan.steps if isinstance(step, MoveAside)}
        self._must_be_read(s for s in local if s.tag in in_the_way - {candidate.tag})
        return replace(plan, notes=tuple(with_typed_commands(self._job, note) for note in plan.notes))

    def _strange(self) -> tuple[MoveAside, ...]:
        """Return moves for folders here of another run than the one that a person chose instead."""
        chosen = self._chosen
        if chosen is None or chosen.is_held or chosen.run_id is None:
            return ()
        strange = [s.tag for s in self._local if chosen.is_strange(s, self._sources.remotes)]
        reason = f"not of run {short(chosen.run_id)}"
        return tuple(MoveAside(name=tag, label=tag, reason=reason) for tag in strange)

    def _bind(self, fd: int, candidate: Candidate) -> None:
        """Bind save_dir to the run before anything is fetched: a daemon beside takes what comes for that
        run's.
        """
        chosen = self._chosen
        if chosen is None or chosen.run_id is None:
            return
        save_dir = str(self._dir)
        if candidate.is_committed or read_run(fd, save_dir) is not None:
            bind(fd, save_dir, chosen.run_id, known_rows(self._sources.remotes))

    def _begin(self, fd: int, plan: RecoveryPlan) -> int:
        write_resume_marker(fd, plan.candidate, self._listing, self._say)
        self._bind(fd, plan.candidate)
        sizes = [checkpoint.listing.total_bytes for checkpoint in self._local]
        return reserve_bytes(fd, self._job, sizes + self._sizes)

    def _is_there(self, fd: int, plan: RecoveryPlan) -> bool:
        if plan.candidate.local is None or files.stat_beneath(fd, plan.candidate.tag) is not None:
            return True
        self._say(f"{plan.candidate.tag} was removed meanwhile")  # before the marker was there
        return False

    def _give_up_on(self, plan: RecoveryPlan, step: Step | None, error: CkptdError) -> None:
        """Exclude, beyond copies and remotes, the folder here that could not be converted."""
        self._one.gave_up(error)
        if isinstance(step, MakeUniversal) and not plan.fetches and isinstance(error, DamagedError):
            self._damaged_here.add(plan.candidate.tag)
            self._say_damaged(plan.candidate.tag, error)
        else:
            super()._give_up_on(plan, step, error)

    def _is_proven(self, candidate: Candidate) -> bool:
        """Whether the chosen folder may be trusted: one that the daemon refused is read to its end first.

        The daemon's refusal is a hint that a byte may be wrong; reading the bytes decides.
        """
        here, fd = candidate.local, self._fd
        if fd is None or here is None or here.tag not in self._memory.refused - self._proven:
            return True
        self._say(f"{here.tag}: the daemon refused it, a byte may be wrong; it is read to its end")
        reason = damage_in(fd, here.listing)
        if reason is None:
            self._proven.add(here.tag)
        else:
            self._damaged_here.add(here.tag)
            damage = DamagedError(reason)
            self._one.gave_up(damage)
            self._say_damaged(here.tag, damage)
        return reason is None

    def _is_surely_newest(self, candidate: Candidate) -> None:
        """Take what is here without any remote only if the daemon's status knows nothing newer."""
        sources = self._sources
        is_known = bool(sources.remotes or (sources.new and not sources.absent))
        if is_known or not self._job.remotes or self._options.tag is not None:
            return
        hints = self._memory.orders
        hint, newest = hints.get(candidate.tag), max(hints.values(), default=None)
        if self._options.nodes.count > 1 or hint is None or newest is None or candidate.order < newest:
            raise sources.absent[0]
        sources.say_absent()
        self._say(f"no remote answers; {candidate.tag} here is the newest that the daemon knew of")

    def _say_unprotected(self, tag: str) -> None:
        """Tell of checkpoints here that are none of ours, once: one of them may be newer."""
        listing = self._listing
        for one in warn_unprotected(listing.unprotected, str(self._dir), listing.latest, (tag,)):
            self._say_once(f"{one.text}; {one.next_step}")

    def _must_be_read(self, checkpoints: Iterable[LocalCheckpoint]) -> None:
        """Refuse to go on while a folder cannot be read: it may be the newest, nothing older replaces it."""
        for checkpoint in checkpoints:
            if checkpoint.unread is not None and not checkpoint.is_complete:
                folder = self._dir / checkpoint.tag
                hint = f"call it again when the disk gives it, or move {folder} away to resume from before it"
                raise StorageError(
                    f"{checkpoint.tag}: {checkpoint.unread.message}; nothing was changed", hint=hint
                )

    def _nothing(self, choice: Candidates) -> NoReturn:
        """Say why there is nothing to resume from; what is torn goes aside before a fresh start."""
        job = self._job
        if self._sources.absent:
            self._say_unprotected("")
            raise self._sources.absent[0]
        self._must_be_read(self._local)
        if self._sources.damaged or self._damaged_here or choice.notes:
            msg = f"every checkpoint of {job.name} is damaged"
            raise DamagedError(msg, hint="see the lines above; nothing was deleted")
        if not job.remotes:
            self._must_be_known()
            torn = ", ".join(f"{s.tag} ({s.verdict.reason})" for s in self._local)
            found = f": {torn}" if torn else ""
            msg = f"{job.save_dir} holds no complete checkpoint{found}, and no remote is known"
            raise NotFoundError(msg, hint="name the remote: ckptd resume SAVE_DIR URL, or a job file")
        self._must_be_known()
        suspect = next((s for s in self._local if s.verdict.state.value in ("suspect", "refused")), None)
        if suspect is not None:
            verdict = suspect.verdict
            msg = f"only {suspect.tag} is there, and it is {verdict.state.value}: {verdict.reason}"
            accepts = f"`{command_for(job, 'accept', suspect.tag)}` makes a suspect one usable; "
            is_suspect = verdict.state is State.SUSPECT
            raise RefusedError(msg, hint=f"{accepts if is_suspect else ''}move it away to start fresh")
        self._clear()
        new = [remote.url for remote in self._sources.new]
        where = ", ".join([*(remote.url for remote in self._sources.remotes), *new])
        of_run = f", run {short(self._sources.run_id)}" if self._sources.run_id is not None else ""
        msg = f"{where} holds no committed checkpoint of {job.name}{of_run}, {job.save_dir} no complete one"
        alone = {
            v.commit.tag for r in self._sources.remotes for v in r.commits if v.commit.grid.is_model_only
        }
        alone |= {s.tag for s in self._local if s.is_complete and s.listing.is_model_only}
        msg += f" ({', '.join(new)}: empty, nothing was ever uploaded there)" if new else ""
        msg += f" (only a model: {', '.join(sorted(alone))})" if alone else ""
        weights = sorted(forms_alone(self._sources.remotes))
        msg += f" (only weights: {', '.join(weights)})" if weights else ""
        if others := self._sources.said_of_others():
            self._say(others)
        raise NothingCommitted(msg)

    def _must_be_known(self) -> None:
        """Refuse to start from scratch beside a checkpoint that ckptd does not know."""
        listing = self._listing
        if listing.unprotected:
            first = warn_unprotected(listing.unprotected, str(self._dir), listing.latest, ())[0]
            msg = f"nothing to resume from is committed or whole, and {self._dir} holds a checkpoint "
            msg += (
                f"that ckptd does not protect: {shown_unprotected(listing.unprotected)}; nothing was changed"
            )
            raise RefusedError(msg, hint=f"resume from it by hand, or move it away; {first.next_step}")

    def _clear(self) -> None:
        """Move aside what a fresh start would stumble over: torn folders, and `latest` that names nothing."""
        if self._fd is None:
            return
        names = [(s.tag, s.verdict.reason or "not whole") for s in self._local if not s.is_complete]
        if self._listing.latest is not None and not any(s.is_complete for s in self._local):
            names.append(("latest", f"names {self._listing.latest}, which cannot be loaded"))
        steps = [MoveAside(name=name, label=name, reason=reason) for name, reason in names]
        self._say_steps(steps)
        if not self._options.dry_run:
            self._executing(self._fd, 0).run(steps)


# --- one save for several nodes --------------------------------------------------------------------------
# Several nodes that resume together, each by itself, and `resume --tag` take one save. Which one follows from
# the COMMITs as this node first sees them. What it cannot read of that save it takes from another remote that
# holds it; where none does it ends with an error: an older save would be another one than the other nodes
# take (docs/adr/0148).

FORMS = (ZERO, UNIVERSAL)
_NEAREST = 3


@dataclass(slots=True, kw_only=True)
class PinnedSelection:
    """Decide which save may be taken; a single node that names none takes any."""

    job: JobConfig
    options: RecoveryOptions
    _why: CkptdError | None = None
    """Error of the copy that was given up last."""
    _key: tuple[Order, str] | None = None
    _views: list[tuple[RemoteInventory, CommitView]] = field(default_factory=list)
    """COMMITs of the chosen save, as seen first."""

    @property
    def is_bound(self) -> bool:
        """Whether no other save will do."""
        return self.options.nodes.count > 1 or self.options.tag is not None

    def gave_up(self, error: CkptdError) -> None:
        """Note what was wrong with a copy: it is why none is left, if none is."""
        self._why = error

    def check_remotes(self, sources: RemoteSources) -> None:
        """Check that each of several nodes sees every remote of the job: the newest save may lie in one
        alone.

        Raises:
            RemoteError, NotPermitted: one is not there (69, 77).
        """
        if self.options.nodes.count == 1 or self.options.remote is not None or not sources.remotes:
            return
        there = [
            *(remote.name for remote in sources.remotes),
            *(remote.name for remote in sources.new),
        ]
        away = [remote for remote in self.job.remotes if remote.name not in there]
        for remote, error in zip(away, sources.absent, strict=True):
            if set(FORMS) & set(remote.forms):
                shown = shown_remote(remote.name, remote.url)
                others = f"another of the {self.options.nodes.count} nodes may resume from there"
                msg = f"{shown}: {error.message}; {others}"
                mend = error.hint or "mend that"
                hint = f"{mend}; or add `--remote {there[0]}` to `ckptd resume` on every node"
                raise _of_its_kind(error, msg, hint) from error

    def settle(self, choice: Candidates, sources: RemoteSources) -> None:
        """Pin the save, before a remote that failed meanwhile is left out."""
        if not self.is_bound or self._key is not None:
            return
        saves = views_by_save(sources.remotes, FORMS)
        read = {(one.order, one.tag) for one in choice.candidates}
        for key in sorted({*saves, *read}, reverse=True):
            views = saves.get(key, [])
            if self.options.tag in (None, key[1]) and (key in read or _counts(views, self.options.nodes)):
                self._key, self._views = key, views
                return

    def candidate(self, choice: Candidates, sources: RemoteSources) -> Candidate | None:
        """Return the one to take; None: nothing is there at all.

        Raises:
            NotFoundError: no save has the tag (66). DamagedError: no intact copy of it is left (65).
            RefusedError: it was retired meanwhile (65). RemoteError, NotPermitted: what holds it failed.
        """
        if not self.is_bound:
            return next(iter(choice.candidates), None)
        if self._key is None:
            if self.options.tag is not None:
                raise self._unknown(self.options.tag, sources)
            return None
        for one in choice.candidates:
            if (one.order, one.tag) == self._key and self._is_alike(one):
                return one
        raise self._lost(self._key, choice, sources)

    def _is_alike(self, one: Candidate) -> bool:
        """Tell whether this node may take it: not the universal form alone where the other nodes take
        shards."""
        if self.options.nodes.count == 1 or not one.is_universal_alone:
            return True
        if needs_universal(one, self.options.world_size):
            return True
        return not any(view.commit.form == ZERO for _, view in self._views)

    def _unknown(self, tag: str, sources: RemoteSources) -> CkptdError:
        if sources.absent:
            return sources.absent[0]
        known = {v.commit.tag for r in sources.remotes for v in r.commits if v.commit.form in FORMS}
        near = ", ".join(difflib.get_close_matches(tag, sorted(known), n=_NEAREST, cutoff=0.0))
        where = ", ".join(remote.url for remote in sources.remotes) or str(self.job.save_dir)
        msg = f"there is no checkpoint {tag!r} to resume from in {where}"
        return NotFoundError(msg, hint=f"nearest: {near}; `ckptd list` shows all" if near else "")

    def _lost(self, key: tuple[Order, str], choice: Candidates, sources: RemoteSources) -> CkptdError:
        """Return why it cannot be taken, and what to do."""
        order, tag = key
        several = self.options.nodes.count > 1
        names = {remote.name for remote in sources.remotes}
        if any(remote.name not in names for remote, _ in self._views):
            error = sources.absent[-1]
            others = "; every node takes it or none" if several else ""
            msg = f"{tag} cannot be fetched: {error.message}{others}"
            found = _of_its_kind(error, msg, "call it again, on every node, once the remote answers")
            found.__cause__ = error
            return found
        if self._views and key not in views_by_save(sources.remotes, FORMS):
            msg = f"{tag} was deleted from the remote while it was fetched"
            return RefusedError(msg, hint="does a daemon run? stop it, and call resume again on every node")
        noted = (note for note in choice.notes if note.startswith(f"{tag} ("))
        why = self._why.message if self._why is not None else next(noted, "damaged")
        older = next((c.tag for c in choice.candidates if c.order < order and c.tag != tag), "TAG")
        mend = command_for(self.job, "verify", tag, "--repair", "--read-data")
        back = f"`--tag {older}` on every node" if several else f"`--tag {older}`"
        msg = f"{tag}: {why}; no other copy of it is left" + ("; every node takes it or none" * several)
        return DamagedError(msg, hint=f"mend it (`{mend}`), or go back: `ckptd resume` with {back}")


def _counts(views: Sequence[tuple[RemoteInventory, CommitView]], nodes: Nodes) -> bool:
    """A save that cannot be read here is one to resume from, as far as anybody can tell."""
    if any(view.commit.form == ZERO and not view.commit.grid.is_model_only for _, view in views):
        return True
    alone = [(remote, view) for remote, view in views if view.commit.form == UNIVERSAL]
    return len(readable_copies(alone, nodes, frozenset(), Candidates())) < len(alone)


def _of_its_kind(error: CkptdError, message: str, hint: str) -> CkptdError:
    """Make an error of the kind that is wrong with a remote: not there (69), or no rights (77)."""
    kind = type(error) if isinstance(error, RemoteError | NotPermitted) else RemoteUnreachable
    return kind(message, hint=hint)
