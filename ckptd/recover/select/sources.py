"""Open the sources that a command reads: remotes of a job or one URL; know which answer, which copies are
bad.

`list`, `verify`, `restore` and `resume` mean the same by JOB, URL and --remote; a remote that fails half-way
is left out and the next one is asked.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.owned_dirs import is_numbered_tag
from ckptd.base.process import LIMIT_SECONDS, NOT_ANSWERING
from ckptd.config.loader import remote_from_arguments
from ckptd.config.remote_names import said_of
from ckptd.core.model.layouts import Trainer
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NoSpaceError,
    NotFoundError,
    NotPermitted,
    RemoteError,
    RemoteNotInitialised,
    RemoteNotOurs,
    SourceChanged,
    StorageError,
)
from ckptd.recover.select.inventory import is_gone, read_remote_inventory
from ckptd.recover.select.job import job_named, no_remote, owner_of, settings_to_ask, state_dir_hint
from ckptd.recover.select.steps import ConvertFrom, Fetch, MakeUniversal, RestoreExtras
from ckptd.storage.child.client import attach_once
from ckptd.storage.local.job_names import is_remote
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.stores.access import access_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckptd.config.schema import JobConfig, RemoteConfig
    from ckptd.recover.select.copies import Copy
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.job import Owner
    from ckptd.recover.select.runs import RemoteRuns
    from ckptd.recover.select.steps import Step


_OF_A_REMOTE = (RemoteError, NotPermitted, StorageError)
"""Errors after which the next remote is asked; a fault of this node shows there again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Hold what JOB names: remotes, their required owner (None: anybody), and the job if any."""

    remotes: tuple[RemoteConfig, ...]
    owner: Owner | None
    job: JobConfig | None = None
    node_id: str = ""
    """This node's, where something is sent to the remotes."""

    def read(
        self, say: Callable[[str], None], failures: dict[str, CkptdError], *, is_tolerant: bool = False
    ) -> Iterator[RemoteInventory]:
        """Read one remote after the other; why one does not answer is said and put into `failures`, by name.

        `is_tolerant`: as `read_remote_inventory`.
        """
        for remote in self.remotes:
            try:
                inventory = self.read_one(remote.name, is_tolerant=is_tolerant)
            except CkptdError as error:
                failures[remote.name] = error
                say(said_of(remote.name, remote.url, str(error)))
            else:
                yield inventory

    def remote(self, name: str) -> RemoteConfig:
        """Return the remote of that name."""
        return next(remote for remote in self.remotes if remote.name == name)

    def is_new(self, name: str, error: CkptdError) -> bool:
        """Tell whether a remote of the job that could not be read was reached, and surely holds nothing yet.

        `error`: why it could not be read; a place that does not answer is not asked once more.
        """
        is_there = isinstance(error, RemoteNotOurs) or error.hint != NOT_ANSWERING
        if self.job is None or self.owner is None or not isinstance(error, RemoteError) or not is_there:
            return False
        settings = settings_to_ask(self.job, self.remote(name), self.owner)
        settings = settings.model_copy(update={"only_looks": True})
        return isinstance(attach_once(settings, LIMIT_SECONDS), RemoteNotInitialised)

    def read_one(self, name: str, *, is_tolerant: bool = False) -> RemoteInventory:
        """Read the remote of that name."""
        remote = self.remote(name)
        access = access_of(remote)
        return read_remote_inventory(
            name, remote.url, self.owner, access, node_id=self.node_id, is_tolerant=is_tolerant
        )


def where_of(
    job: str, environ: Mapping[str, str], *, only: str | None = None, config_dir: Path | None = None
) -> Where:
    """Resolve a URL, a directory with `_ckptd/remote.json`, or a job; `only`: one remote of it by name.

    Raises:
        NotFoundError: no such job, it has no remote, or none of that name (66).
    """
    if is_remote(job):
        url = job if "://" in job else str(Path(job).absolute())
        return Where(remotes=named((remote_from_arguments(url, environ),), only), owner=None)
    found = job_named(job, environ, config_dir=config_dir)
    if found.remotes:
        owner = owner_of(found, state_dir_hint(found, environ, config_dir))
        return Where(remotes=named(found.remotes, only), owner=owner, job=found)
    if not found.save_dir.exists():
        remote = remote_from_arguments(str(found.save_dir), environ)
        return Where(remotes=named((remote,), only), owner=None)
    raise no_remote(found)


def named(remotes: Sequence[RemoteConfig], only: str | None) -> tuple[RemoteConfig, ...]:
    """Return all remotes, or the one called `only`.

    Raises:
        NotFoundError: none is called so.
    """
    chosen = tuple(remote for remote in remotes if only in (None, remote.name))
    if not chosen and only is not None:
        names = ", ".join(remote.name for remote in remotes) or "none"
        msg = f"there is no remote {only!r} (known: {names})"
        raise NotFoundError(msg, hint="--remote takes a name of the job file")
    return chosen


@dataclass(slots=True, kw_only=True)
class RemoteSources:
    """The remotes that answer, the errors of the others, and (remote, COMMIT digest) of bad copies.

    Why a remote is left out is said where something is done without it; an error that ends the command is
    printed by whoever catches it.
    """

    where: Where
    say: Callable[[str], None]
    remotes: list[RemoteInventory] = field(default_factory=list)
    new: list[RemoteConfig] = field(default_factory=list)
    """Places that answer, hold nothing and are no remotes yet: asked for by `read_remotes`."""
    absent: list[CkptdError] = field(default_factory=list)
    damaged: set[tuple[str, str]] = field(default_factory=set)
    run_id: str | None = None
    """The one run whose checkpoints are offered, once `take` has said so."""
    _runs: RemoteRuns | None = None
    _unsaid: dict[str, CkptdError] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def read_remotes(self, *, knows_new: bool = False) -> None:
        """Read each remote, perhaps again; one that is not there is left out, or with `knows_new` in `new`
        if it is not there yet.
        """
        failures: dict[str, CkptdError] = {}
        self.remotes = []
        for inventory in self.where.read(lambda _: None, failures):
            self.remotes.append(_with_suspects(inventory) if len(self.where.remotes) > 1 else inventory)
            for text in inventory.observation.damaged:
                self.say(said_of(inventory.name, inventory.url, text))
        new = [name for name, error in failures.items() if knows_new and self.where.is_new(name, error)]
        self.new = [self.where.remote(name) for name in new]
        self._unsaid = {name: error for name, error in failures.items() if name not in new}
        self.absent = list(self._unsaid.values())

    def say_absent(self, but: CkptdError | None = None) -> None:
        """Say which remotes are left out and why, each once; `but`: what is raised, and printed, instead."""
        for name, error in self._unsaid.items():
            text = said_of(name, self.where.remote(name).url, str(error))
            if but is None or error not in (but, but.__cause__):
                if text not in self._said:
                    self.say(text)
                self._said.add(text)
        self._unsaid = {}

    @contextlib.contextmanager
    def saying_absent(self) -> Iterator[None]:
        """Say at an error that ends the command which other remotes were left out."""
        try:
            yield
        except CkptdError as error:
            self.say_absent(error)
            raise

    def take(self, runs: RemoteRuns, run_id: str | None) -> None:
        """Keep only what one run committed; None: nothing."""
        self._runs, self.run_id = runs, run_id
        self.remotes = [runs.only(remote, run_id) for remote in self.remotes]

    def said_of_others(self) -> str:
        """Say what other runs hold in the remotes, and the option that takes it; empty: there are none."""
        return self._runs.said_of_others(self.run_id) if self._runs is not None else ""

    def said_of_tag(self, tag: str) -> str:
        """Return which other run has a checkpoint of that name, and what takes it; empty where none has."""
        return self._runs.said_of_tag(tag, self.run_id) if self._runs is not None else ""

    def is_numbered(self) -> bool:
        """A remote knows this save_dir as one that Accelerate names itself: nothing of ours goes into it."""
        numbered = [
            (remote, view.commit)
            for remote in self.remotes
            for view in remote.commits[-1:]
            if is_numbered_tag(view.commit.tag)
        ]
        with contextlib.suppress(DamagedError):
            return any(
                manifest.writer.trainer == Trainer.ACCELERATE
                for remote, commit in numbered
                for manifest in remote.manifests(commit)
            )
        return True

    def drop(self, name: str, error: CkptdError) -> None:
        """Leave out a remote that failed half-way: it is asked no more."""
        self.remotes = [remote for remote in self.remotes if remote.name != name]
        self.absent.append(error)
        others = ", ".join(remote.name for remote in self.remotes)
        if others:
            text = f"{error.message}; going on with {others}"
            self.say(said_of(name, self.where.remote(name).url, text))
        else:
            self._unsaid[name] = error

    def _look_again(self, copy: Copy) -> None:
        """A COMMIT that retention removed meanwhile is no damage, and what was seen then is history."""
        remote = copy.remote
        try:
            if not is_gone(copy.remote.store, copy.view):
                return
            inventory = self.where.read_one(remote.name)
        except CkptdError as error:
            self.drop(remote.name, error)
        else:
            inventory = inventory if self._runs is None else self._runs.only(inventory, self.run_id)
            self.remotes = [inventory if old.name == remote.name else old for old in self.remotes]
            text = f"{copy.view.commit.tag} was deleted from the remote meanwhile; looked again"
            self.say(said_of(remote.name, remote.url, text))

    def give_up_on(self, step: Step | None, steps: Sequence[Step], error: CkptdError) -> bool:
        """Leave out the copy or the remote that made `step` fail; False when that is not its fault.

        A conversion that fails on bytes just fetched is the fault of what was fetched.
        """
        if isinstance(step, Fetch | RestoreExtras | ConvertFrom):
            # what is read by ranges and is gone or another object all at once was changed in the remote
            if isinstance(error, DamagedError | SourceChanged):
                self.damaged.add((step.copy.remote.name, step.copy.view.sha256))
                self._look_again(step.copy)
                return True
            if isinstance(error, _OF_A_REMOTE) and not isinstance(error, NoSpaceError):
                self.drop(step.copy.remote.name, error)
                return True
        fetched = [s for s in steps if isinstance(s, Fetch)]
        if isinstance(step, MakeUniversal) and isinstance(error, DamagedError) and fetched:
            self.damaged |= {(s.copy.remote.name, s.copy.view.sha256) for s in fetched}
            return True
        return False


def _with_suspects(inventory: RemoteInventory) -> RemoteInventory:
    """Add what daemons said lately that they found damaged in a remote."""
    with contextlib.suppress(CkptdError):
        seen = Heartbeats(inventory.store).newest()
        return replace(inventory, suspects=frozenset[str]().union(*(one.damaged for one in seen)))
    return inventory
