"""Choose the run that a command means, of those whose checkpoints lie in its remotes.

By name (`--run`), else the one that save_dir holds, else the newest of the remotes. Nothing that another run
committed is taken in its place, and stderr says whose it is (core/model/runs.py, docs/adr/0185).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptd.base.humanize import ago
from ckptd.config.commands import user_name
from ckptd.core.model.layouts import Role
from ckptd.core.model.records import ZERO
from ckptd.core.model.runs import ranked, run_of, short
from ckptd.errors import CkptdError, DamagedError, LockHeld, NotFoundError, RefusedError, UsageError
from ckptd.recover.select.copies import is_here
from ckptd.storage.local.run_file import host_name, read_run, run_file, write_run
from ckptd.storage.remote.heartbeats import Heartbeats, server_time_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptd.core.model.heartbeat import Heartbeat, SeenNode
    from ckptd.core.model.manifest import Commit
    from ckptd.core.model.runs import Row
    from ckptd.recover.select.inventory import LocalCheckpoint, RemoteInventory
    from ckptd.storage.stores.base import Store

SILENT_SECONDS = 180.0
"""A place that was not heard of for so long has died, as far as `resume` can tell: three heartbeats."""
_LOOK_SECONDS = 3.0
_SHARDS = (Role.OPTIM, Role.MODEL)
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run in one remote; where it was saved last, None: of a release that did not say."""

    run_id: str
    is_newest: bool
    user: str | None
    host: str | None
    save_dir: str | None
    since: str | None
    """RFC 3339, UTC: when it began to be saved there."""
    checkpoints: int
    bytes: int
    first_step: int | None
    last_step: int | None

    @property
    def words(self) -> str:
        """Return which, and whose."""
        place = f" of {self.user or '?'}@{self.host}:{self.save_dir or '?'}" if self.host is not None else ""
        return f"run {short(self.run_id)}{place}"


def runs_in(inventory: RemoteInventory) -> tuple[RunView, ...]:
    """Return every run with a row or a COMMIT in a remote, the newest first."""
    rows, by_run = inventory.observation.rows, _by_run(inventory)
    found = []
    for index, run_id in enumerate(ranked(rows, by_run)):
        commits = by_run.get(run_id, [])
        row = max((one for one in rows if one.run_id == run_id), key=lambda one: one.number, default=None)
        steps = [commit.step for commit in commits]
        found.append(
            RunView(
                run_id=run_id,
                is_newest=index == 0,
                user=row.user if row is not None else None,
                host=(row.host or row.node) if row is not None else None,
                save_dir=row.save_dir if row is not None else None,
                since=row.created_at if row is not None else None,
                checkpoints=len({(commit.tag, commit.generation) for commit in commits}),
                bytes=sum(commit.bytes for commit in commits),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
            )
        )
    return tuple(found)


def _by_run(inventory: RemoteInventory) -> dict[str, list[Commit]]:
    found: dict[str, list[Commit]] = {}
    for view in inventory.commits:
        if _is_of_job(view.commit, inventory):
            found.setdefault(run_of(view.commit, view.commit.job_id), []).append(view.commit)
    return found


def _is_of_job(commit: Commit, inventory: RemoteInventory) -> bool:
    """Whether a COMMIT was made for this remote: one that was copied from another job's is no run's."""
    return commit.job_id == inventory.observation.identity.job_id


class RemoteRuns:
    """The runs in all remotes of a job that answer.

    Two remotes of a job that were made apart have two job ids; the first run of the one is that of the other.
    """

    def __init__(self, inventories: Sequence[RemoteInventory]) -> None:
        self._inventories = tuple(inventories)
        self._firsts = frozenset(inventory.observation.identity.job_id for inventory in inventories)
        self.views = tuple(view for inventory in inventories for view in runs_in(inventory))

    def is_same(self, run_id: str, other: str) -> bool:
        """Whether two ids are of one run."""
        return run_id == other or {run_id, other} <= self._firsts

    def newest(self) -> str | None:
        """Return the run of the newest row in the first remote that has any; else the only one; None: there
        is none.

        Raises:
            RefusedError: there are several, and no row says which goes on (65).
        """
        rows = next(
            (inventory.observation.rows for inventory in self._inventories if inventory.observation.rows), ()
        )
        if rows:
            return max(rows, key=lambda row: row.number).run_id
        known = list(dict.fromkeys(view.run_id for view in self.views))
        if all(self.is_same(known[0], one) for one in known):
            return known[0] if known else None
        msg = f"{self._urls()} holds checkpoints of several runs: {self.said_of_others(None)}"
        raise RefusedError(msg, hint="name one: --run RUN; `ckptd list` shows them")

    def newest_committed(self) -> str | None:
        """Return the newest that has committed something: `latest` names a checkpoint of it."""
        return next((view.run_id for view in self.views if view.checkpoints), None)

    def named(self, text: str) -> str:
        """Return the run whose id begins so.

        Raises:
            NotFoundError: none does (66). UsageError: several do.
        """
        known = list(dict.fromkeys(view.run_id for view in self.views))
        fit = [run_id for run_id in known if text and run_id.startswith(text)]
        if text in known:
            return text
        if len(fit) == 1 or (fit and all(self.is_same(fit[0], one) for one in fit)):
            return fit[0]
        if fit:
            raise UsageError(
                f"--run {text}: {len(fit)} runs begin so", hint=f"write more of {', '.join(fit)}"
            )
        there = ", ".join(map(short, known)) or "none"
        raise NotFoundError(
            f"{self._urls()} knows no run {text!r}", hint=f"there are: {there}; see `ckptd list`"
        )

    def only(self, inventory: RemoteInventory, run_id: str | None) -> RemoteInventory:
        """Return a remote with what one run committed alone; None: with nothing."""
        kept = (
            view
            for view in inventory.commits
            if run_id is not None
            and _is_of_job(view.commit, inventory)
            and self.is_same(run_of(view.commit, view.commit.job_id), run_id)
        )
        return replace(inventory, commits=tuple(kept))

    def view(self, run_id: str) -> RunView | None:
        """Return what is known of a run, from the first remote that knows it."""
        return next((view for view in self.views if self.is_same(view.run_id, run_id)), None)

    def words(self, run_id: str) -> str:
        """Return which run, and whose."""
        view = self.view(run_id)
        return view.words if view is not None else f"run {short(run_id)}"

    def others(self, run_id: str | None) -> tuple[RunView, ...]:
        """Return the other runs that have committed checkpoints, each once."""
        found: dict[str, RunView] = {}
        for view in self.views:
            is_other = run_id is None or not self.is_same(view.run_id, run_id)
            if is_other and view.checkpoints:
                found.setdefault(view.run_id, view)
        return tuple(found.values())

    def said_of_others(self, run_id: str | None) -> str:
        """Say what other runs hold, and the option that takes it; empty where there are none."""
        others = self.others(run_id)
        foreign = [
            f"{view.words} holds {view.checkpoints} checkpoint{'s' * (view.checkpoints != 1)} there "
            f"(--run {short(view.run_id)})"
            for view in others[:_FEW]
        ]
        more = [f"{len(others) - _FEW} more runs"] if len(others) > _FEW else []
        strange = [
            f"the COMMIT of {view.commit.tag} is of job {view.commit.job_id!r}, {inventory.url} is another's"
            for inventory in self._inventories
            for view in inventory.commits
            if not _is_of_job(view.commit, inventory)
        ]
        more += strange[:_FEW]
        return "; ".join([*foreign, *more])

    def said_of_tag(self, tag: str, run_id: str | None) -> str:
        """Return the other run that has a checkpoint of that name, and what takes it; empty: none has."""
        for view in self.others(run_id):
            of_run = (self.only(inventory, view.run_id).commits for inventory in self._inventories)
            if any(one.commit.tag == tag for commits in of_run for one in commits):
                return f"{view.words} has one: --run {short(view.run_id)}"
        return ""

    def _urls(self) -> str:
        return ", ".join(inventory.url for inventory in self._inventories) or "no remote"


# --- the run that save_dir holds -------------------------------------------------------------------------


def is_of(checkpoint: LocalCheckpoint, remote: RemoteInventory) -> bool:
    """Whether a folder here is what a COMMIT in that remote lists, as far as it is here.

    Raises:
        RemoteError, NotPermitted, StorageError: the remote does not give its manifests.
    """
    for view in remote.commits:
        if view.commit.tag != checkpoint.tag or view.commit.form != ZERO:
            continue
        with contextlib.suppress(DamagedError):
            listed = [file for manifest in remote.manifests(view.commit) for file in manifest.files]
            there = [file for file in listed if file.role in _SHARDS and file.path in checkpoint.facts]
            if any(file.role is Role.OPTIM for file in there) and all(is_here(checkpoint, f) for f in there):
                return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The run that `resume` takes; `run_id` None: one that has committed nothing yet."""

    run_id: str | None
    is_held: bool
    """save_dir holds it already, or what lies there is of it."""

    def is_strange(self, checkpoint: LocalCheckpoint, remotes: Iterable[RemoteInventory]) -> bool:
        """Whether a folder here is another run's, where a person had this one brought in its place."""
        return not self.is_held and not any(is_of(checkpoint, remote) for remote in remotes)


def choose_run(
    runs: RemoteRuns,
    remotes: Sequence[RemoteInventory],
    local: Sequence[LocalCheckpoint],
    *,
    held: str | None,
    asked: str | None,
    nodes: int,
) -> Chosen:
    """Return the run that was asked for, else the one that save_dir holds, else that of the newest row.

    `held`: as `run.json` of this very directory has it. What lies here without such a word and is what a run
    committed is of that run; what no run committed is of a new one. Several nodes take the newest or none, so
    that they all take one.

    Raises:
        RefusedError: of several nodes this one holds another run (65). As `named` and `newest` of `runs`.
    """
    is_whole = any(checkpoint.is_complete and not checkpoint.listing.is_model_only for checkpoint in local)
    found = held or recognised(runs, remotes, local)
    if asked is not None:
        run_id = runs.named(asked)
        return Chosen(run_id=run_id, is_held=found is not None and runs.is_same(found, run_id))
    if nodes > 1:
        newest = runs.newest() or held
        if held is not None and newest is not None and not runs.is_same(held, newest):
            msg = f"this node holds run {short(held)}, and an empty one would take {runs.words(newest)}"
            raise RefusedError(
                msg, hint=f"name one on every node: --run {short(held)} or --run {short(newest)}"
            )
        return Chosen(run_id=newest, is_held=True)
    if found is not None:
        return Chosen(run_id=found, is_held=True)
    has_rows = any(remote.observation.rows for remote in remotes)
    # before releases wrote rows a remote held one run, and what lay here was of it
    return Chosen(run_id=None if is_whole and has_rows else runs.newest(), is_held=True)


def recognised(
    runs: RemoteRuns, remotes: Sequence[RemoteInventory], local: Sequence[LocalCheckpoint]
) -> str | None:
    """Return the newest run that committed something that lies here."""
    for run_id in dict.fromkeys(view.run_id for view in runs.views):
        of_run = [runs.only(remote, run_id) for remote in remotes]
        if any(is_of(checkpoint, remote) for remote in of_run for checkpoint in local):
            return run_id
    return None


def known_rows(remotes: Iterable[RemoteInventory]) -> tuple[tuple[str, int], ...]:
    """Return (remote id, number of the newest row) of each."""
    return tuple(
        (one.observation.identity.remote_id, max((row.number for row in one.observation.rows), default=0))
        for one in remotes
    )


def bind(save_dir_fd: int, save_dir: str, run_id: str, seen: tuple[tuple[str, int], ...]) -> None:
    """Write that the directory holds this run from now on, as a person said; `seen`: as `known_rows`."""
    before = read_run(save_dir_fd, save_dir)
    if before is not None and before.run_id == run_id:
        known = tuple(sorted({**dict(before.known), **dict(seen)}.items()))
        found = before.model_copy(update={"how": "resumed", "known": known})
    else:
        found = run_file(save_dir_fd, save_dir, run_id, "resumed", seen)
    if found != before:
        write_run(save_dir_fd, found)


# --- other hosts that go on with the run -----------------------------------------------------------------


def elsewhere(rows: Iterable[Row], run_id: str, save_dir: str) -> Row | None:
    """Return the newest row of a run, where its place is surely not this one.

    The same path on another host is taken for a job that moved; parts of one save, and hosts over one
    directory, are no other place.
    """
    row = max((row for row in rows if row.run_id == run_id), key=lambda row: row.number, default=None)
    if row is None or not row.is_whole or row.is_shared or not row.save_dir:
        return None
    is_here, is_same_path = row.host == host_name(), row.save_dir == save_dir
    if is_same_path:
        return row if not is_here and row.user != user_name() else None
    return row


def wait_until_silent(remote: RemoteInventory, row: Row, say: Callable[[str], None], command: str) -> bool:
    """Wait until that place is silent or has said that it ends; False: it was already.

    Raises:
        LockHeld: it is alive (75).
    """
    first = _heard(remote, row)
    if first is None or first.seconds_ago is None:
        return False
    heard, left = first.seconds_ago, SILENT_SECONDS - first.seconds_ago
    if first.has_ended or left <= 0:
        return False
    whose = f"run {short(row.run_id)} goes on at {row.words}"
    say(f"{whose}, heard of {ago(heard)} ago: waiting up to {ago(left)} for it to fall silent")
    while left > 0:
        pause = min(_LOOK_SECONDS, left + 0.1)
        time.sleep(pause)
        seen = _heard(remote, row)
        if seen is None or seen.has_ended or seen.seconds_ago is None:
            return True
        if seen.heartbeat != first.heartbeat or seen.seconds_ago < heard:
            hint = f"stop it first, or give this run a name and a url of its own; `{command}` insists"
            raise LockHeld(f"{whose}: it was heard of just now", hint=hint)
        heard = seen.seconds_ago
        left = SILENT_SECONDS - heard
    return True


def _heard(remote: RemoteInventory, row: Row) -> SeenNode | None:
    """Return the last heartbeat of the place of a row."""
    place = (row.host, row.save_dir)
    return _last(remote, lambda _, b: b.node_id == row.node_id or (b.host, b.save_dir) == place)


def alive(remote: RemoteInventory, run_id: str) -> SeenNode | None:
    """Return who goes on with a run there, heard of lately; None: nobody does."""
    job_id = remote.observation.identity.job_id
    return _last(remote, lambda seen, beat: not seen.is_dead and run_of(beat, job_id) == run_id)


def _last(remote: RemoteInventory, is_wanted: Callable[[SeenNode, Heartbeat], bool]) -> SeenNode | None:
    everyone = Heartbeats(remote.store).everyone(_now_seconds(remote.store))
    found = [seen for seen in everyone if seen.heartbeat is not None and is_wanted(seen, seen.heartbeat)]
    return min(found, key=lambda seen: seen.seconds_ago or 0.0, default=None)


def _now_seconds(store: Store) -> float | None:
    """Return the store's present; by this machine's clock where it tells none and nothing may be written
    there.
    """
    with contextlib.suppress(CkptdError):
        return server_time_seconds(store)
    return store.now_seconds() or time.time()


def held_by(save_dir: os.PathLike[str]) -> str | None:
    """Return the run that a directory holds; None: nobody said."""
    try:
        fd = os.open(save_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = read_run(fd, str(save_dir))
    finally:
        os.close(fd)
    return found.run_id if found is not None else None
