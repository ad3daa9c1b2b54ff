"""Recover: select a candidate, plan, execute, and select again without what failed.

The one loop of `resume` and `restore`. A copy whose bytes are bad or a remote that does not answer is named
and left out, and the choice is made again.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base.humanize import printable
from ckptd.base.owned_dirs import path_of
from ckptd.core.policy.view import next_save_bytes
from ckptd.errors import CkptdError, DamagedError
from ckptd.recover.advice import advice, model_facts
from ckptd.recover.execute import StepExecution
from ckptd.recover.plan import RecoveryOptions, RecoveryPlan
from ckptd.recover.select.sources import RemoteSources
from ckptd.recover.select.steps import ConvertFrom, Fetch, RestoreExtras
from ckptd.storage.remote.readers import ReaderLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.recover.select.choose import Candidate, Candidates
    from ckptd.recover.select.sources import Where
    from ckptd.recover.select.steps import MoveAside, Step


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recovered:
    """The path to resume from, the plan that was executed, and what the trainer needs to know."""

    path: Path
    plan: RecoveryPlan
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        """Show the path, what was done, or would be, and what the trainer needs to know."""
        lines = [str(self.path), *(f"  {step}" for step in self.plan.steps), *(f"  {a}" for a in self.advice)]
        return "\n".join(map(printable, lines))


def reserve_bytes(fd: int, job: JobConfig, sizes_bytes: Iterable[int]) -> int:
    """Return what must stay free on the disk of `fd`: the next save and min_free."""
    status = os.fstatvfs(fd)
    return job.local.min_free.of(status.f_blocks * status.f_frsize) + next_save_bytes(sizes_bytes)


class Recovery(ABC):
    """One call. `say(line)`: for stderr; `on_progress(what, done, total)`: bytes.

    `directory`: what is recovered into.
    """

    def __init__(
        self,
        directory: Path,
        where: Where,
        options: RecoveryOptions,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None] | None,
        *,
        is_bound: bool,
    ) -> None:
        self._dir = directory
        self._options = options
        self._say = say
        self._on_progress = on_progress
        self._is_bound = is_bound
        """True: no other save will do than the one that was asked for."""
        self._sources = RemoteSources(where=where, say=say)
        self._execution: StepExecution | None = None
        self._said: set[str] = set()
        self._fd: int | None = None
        """The directory while it is open; None in a dry run where it is absent."""

    def when_stopped(self) -> str:
        """Say what lies where after Ctrl-C."""
        if self._execution is None:
            return "stopped before anything was changed"
        return self._execution.when_stopped()

    # --- what resume and restore do each in its own way -------------------------------------------------

    @abstractmethod
    def _choose(self) -> Candidates:
        """Return the candidates of what is there now."""

    @abstractmethod
    def _pick(self, choice: Candidates) -> Candidate | None:
        """Return the one to take; None: one was left out, choose again; raises where nothing is left."""

    @abstractmethod
    def _plan(self, candidate: Candidate) -> RecoveryPlan:
        """Return the steps to a candidate."""

    @abstractmethod
    def _begin(self, fd: int, plan: RecoveryPlan) -> int:
        """Take the last look before anything is changed; return the bytes that must stay free."""

    @abstractmethod
    def _is_there(self, fd: int, plan: RecoveryPlan) -> bool:
        """Whether what was planned is there now."""

    # --- the loop --------------------------------------------------------------------------------------

    def _recover(self, candidate: Candidate | None = None) -> Recovered:
        """Recover the first candidate whose plan can be carried out; `candidate`: already selected."""
        while True:
            candidate = candidate or self._select()
            plan = self._plan(candidate)
            if self._carry_out(plan):
                return self._recovered(plan)
            candidate = None

    def _select(self) -> Candidate:
        """Return the best candidate; remotes that stop answering meanwhile are left out."""
        while True:
            choice = self._choose()
            for name, error in choice.lost.items():
                self._sources.drop(name, error)
            if choice.lost:
                continue
            for note in choice.notes:
                self._say_once(note)
            candidate = self._pick(choice)
            if candidate is not None:
                self._sources.say_absent()
                return candidate

    def _carry_out(self, plan: RecoveryPlan) -> bool:
        """Carry out the plan; False: a copy, a remote or a folder was left out, choose again."""
        for note in plan.notes:
            self._say(note)
        self._say_steps(plan.steps)
        fd = self._fd
        if fd is None or self._options.dry_run:
            return True
        execution = self._executing(fd, self._begin(fd, plan))
        try:
            with self._leases(plan):
                execution.run(plan.steps)
        except CkptdError as error:
            self._give_up_on(plan, execution.current, error)
            return False
        return self._is_there(fd, plan)

    @contextlib.contextmanager
    def _leases(self, plan: RecoveryPlan) -> Iterator[None]:
        """Leave a lease in each remote that the plan reads from: retention there waits meanwhile."""
        steps = (s for s in plan.steps if isinstance(s, Fetch | RestoreExtras | ConvertFrom))
        stores = {step.copy.remote.name: step.copy.remote.store for step in steps}
        with contextlib.ExitStack() as held:
            for store in stores.values():
                lease = ReaderLease(store, type(self).__name__.lower())
                held.enter_context(lease.renewing())(plan.candidate.tag)
            yield

    def _executing(self, fd: int, kept_bytes: int) -> StepExecution:
        job = self._sources.where.job
        self._execution = StepExecution(
            self._dir,
            fd,
            reserve_bytes=kept_bytes,
            compare_masters=job is None or job.compare_masters,
            on_progress=self._on_progress,
            say=self._say,
        )
        return self._execution

    def _give_up_on(self, plan: RecoveryPlan, step: Step | None, error: CkptdError) -> None:
        """Exclude what was at fault: a copy, or a remote; anything else is raised."""
        if not self._sources.give_up_on(step, plan.steps, error):
            raise error
        if isinstance(error, DamagedError):
            self._say_damaged(plan.candidate.tag, error)

    def _recovered(self, plan: RecoveryPlan) -> Recovered:
        path = path_of(self._dir, plan.path)
        root = "".join(plan.candidate.layout[1][:1])
        places = (path, path / root, self._dir / plan.candidate.tag / root)
        facts = next(filter(None, map(model_facts, places)), None)
        return Recovered(path=path, plan=plan, advice=tuple(advice(plan, facts)))

    # --- telling ---------------------------------------------------------------------------------------

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _say_steps(self, steps: Sequence[Step] | Sequence[MoveAside]) -> None:
        for step in steps:
            self._say(f"{'would' if self._options.dry_run else 'will'} {step}")

    def _say_damaged(self, tag: str, error: DamagedError) -> None:
        then = "another copy of it is looked for" if self._is_bound else "the next best is taken"
        self._say(f"{tag}: {error.message}; {then}")
