"""Repair what verifying found, from intact bytes elsewhere (`ckptd verify --repair`; docs/adr/0091).

A bad or absent file of a folder in save_dir comes from a remote, a bad or absent object from save_dir or
another remote. What counts as intact is CRC64 equal to the manifest's; nothing intact is ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.base.humanize import size_of
from ckptd.base.owned_dirs import lock, opened_ours
from ckptd.errors import (
    CkptdError,
    DamagedError,
    LockHeld,
    NoSpaceError,
    NothingCommitted,
    RefusedError,
    from_os_error,
)
from ckptd.maintenance.verify import VerifiedRemote, Verifier, exit_code
from ckptd.recover.execute import one_at_a_time
from ckptd.recover.files import FileRepairer, LocalFiles, drop_fetched, is_same_file, opened_save_dir
from ckptd.recover.recovery import reserve_bytes
from ckptd.storage.local.state_dir import REPAIR_UPLOADS
from ckptd.storage.remote.kept import SOURCE, KeptDocuments, audited, heal_documents, heal_side_documents
from ckptd.storage.remote.observe import live_commits, read_remote
from ckptd.storage.remote.repair import ObjectRepairer, StoreSource
from ckptd.storage.stores.rate_limit import RateLimiter
from ckptd.storage.stores.sources import FileSource, RateLimitedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.maintenance.verify import BadObject, Reading
    from ckptd.observe.audit import Audit
    from ckptd.recover.files import LocalFault
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.remote.kept import RepairedDocument
    from ckptd.storage.remote.messages import CommitView
    from ckptd.storage.stores.base import Source, Store


HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """One damaged file. `where`: a remote's name, or `here`; `source`: where intact bytes lie (None: nowhere
    that is known); `outcome`: planned, repaired, or left, with the reason and the exit code it stands for."""

    where: str
    tag: str
    generation: int
    form: str
    key: str
    bytes: int
    damage: str
    source: str | None
    outcome: str
    reason: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRequest:
    """Choose what is to be repaired: `targets`: names of remotes; `here`: all of save_dir, or paths in it."""

    targets: frozenset[str]
    here: bool | frozenset[str] = True
    tag: str | None = None
    read: Reading | None = None
    dry_run: bool = False
    is_daemons: bool = False
    """The job's own daemon asks, which holds the lock of save_dir and keeps what is damaged."""


class Repair:
    """One call. `remotes`: all that answer, in the job file's order; `audit` may be None in a dry run."""

    def __init__(
        self,
        job: JobConfig,
        remotes: Sequence[RemoteInventory],
        wanted: RepairRequest,
        *,
        node_id: str | None,
        audit: Audit | None,
        unfinished: Unfinished,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._job = job
        self._remotes = list(remotes)
        self._wanted = wanted
        self._node_id = node_id
        self._audit = audit
        self._unfinished = unfinished
        self._say = say
        self._on_progress = on_progress
        self._local: LocalFiles | None = None
        self._fd = -1
        self.verified: list[VerifiedRemote] = []
        self.rows: list[RepairResult] = []

    def run(self) -> None:
        """Verify, compare, put right; fills `verified` (as found) and `rows`.

        Raises:
            NothingCommitted, NotFoundError: no remote holds a COMMIT (4), or none of that tag (66).
        """
        if not self._wanted.is_daemons:
            self._mend_documents()
        found = self._verify()
        fd = opened_save_dir(self._job.save_dir)
        self._fd = -1 if fd is None else fd
        try:
            if fd is not None:
                self._local = LocalFiles(self._job.save_dir, fd, self._node_id, self._say)
                if here := self._wanted.here:
                    only = None if here is True else here
                    self._mend_here(self._local, self._local.faults(self._remotes, self._wanted.tag, only))
            for remote, bad in found:
                resender = self._resender(remote)
                self.rows += [self._put_right(remote, resender, one) for one in bad]
        finally:
            if fd is not None:
                os.close(fd)

    def exit_code(self) -> int:
        """0: nothing was damaged, or all is repaired; 65: damage is left; else why nothing more was done."""
        left = [row for row in self.rows if row.outcome == "left"]
        if self._wanted.dry_run:
            return DamagedError.exit_code if self.rows else exit_code(self.verified)
        repaired = {(row.where, row.key) for row in self.rows if row.outcome == "repaired"}
        codes = {row.code for row in left}
        for remote in self.verified:
            codes |= {DamagedError.exit_code} if remote.problems else set()
            for row in remote.commits:
                if row.verdict in ("damaged", "unreadable"):
                    keys = [d for d in row.differences if (remote.name, d.key) not in repaired]
                    codes |= {one.code for one in keys}
        for code in (DamagedError.exit_code, LockHeld.exit_code):
            if code in codes:
                return code
        return max(codes, default=0)

    # --- looking ---------------------------------------------------------------------------------------

    def _verify(self) -> list[tuple[RemoteInventory, list[BadObject]]]:
        found = []
        nothing: CkptdError | None = None
        for remote in self._remotes:
            if remote.name not in self._wanted.targets:
                continue
            verifier = Verifier(remote, read=self._wanted.read, on_progress=self._on_progress)
            try:
                self.verified.append(verifier.run(self._wanted.tag))
            except NothingCommitted as error:
                nothing = error
                continue
            found.append((remote, verifier.bad))
        if nothing is not None and not found:
            raise nothing
        return found

    # --- here ------------------------------------------------------------------------------------------

    def _mend_here(self, local: LocalFiles, faults: Sequence[LocalFault]) -> None:
        if self._wanted.dry_run or not faults:
            self.rows += [self._row_here(f, outcome="left" if f.left else "planned") for f in faults]
            return
        try:
            with self._locked(faults):
                drop_fetched(self._fd)
                for folder in dict.fromkeys(fault.folder for fault in faults):
                    self._mend_folder(local, [fault for fault in faults if fault.folder == folder])
        except (LockHeld, NoSpaceError) as error:
            self.rows += [self._row_here(fault, outcome="left", error=error) for fault in faults]

    def _make_folder(self, fault: LocalFault) -> None:
        """Make an empty folder of a save again, with the mode of the checkpoint's own folder."""
        path = fault.path
        try:
            with files.opened_dir(fault.folder, self._fd) as folder:
                status = os.fstat(folder)
                files.make_folders(folder, [path], mode=stat.S_IMODE(status.st_mode) & 0o777)
                # trainers that rotate go by the time of the folder
                os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
        except OSError as error:
            raise from_os_error(error, f"making {path}") from error

    @contextlib.contextmanager
    def _locked(self, faults: Sequence[LocalFault]) -> Iterator[None]:
        """Lock save_dir as `restore` does: shared with other recoveries, never beside a daemon, which may be
        pruning.
        """
        try:
            # its daemon has locked it, and starts one repair at a time
            if not self._wanted.is_daemons:
                lock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"a daemon owns {self._job.save_dir}"
            hint = "stop it for the repair; the trainer may go on, what it writes in now is left alone"
            raise LockHeld(msg, hint=hint) from error
        try:
            needed = sum(fault.file.bytes for fault in faults if fault.file is not None)
            reserve = reserve_bytes(self._fd, self._job, [fault.copies[0].bytes for fault in faults])
            if extents.free_bytes(self._fd) - needed < reserve:
                msg = f"{self._job.save_dir} has no room for {size_of(needed)} more"
                raise NoSpaceError(msg)
            with one_at_a_time(self._fd):
                yield
        finally:
            if not self._wanted.is_daemons:
                lock(self._fd, fcntl.LOCK_UN)

    def _mend_folder(self, local: LocalFiles, faults: Sequence[LocalFault]) -> None:
        first = faults[0]
        mender = FileRepairer(self._fd, first.folder, first.copies, first.seen, self._on_progress)
        for fault in faults:
            source = None
            try:
                if fault.left is not None:
                    raise RefusedError(fault.left, hint="call it again when it is quiet")
                if fault.file is None:
                    self._make_folder(fault)
                else:
                    source = mender.put_back(fault.file)
                    local.is_good_now(fault.folder, fault.file)
            except CkptdError as error:
                self.rows.append(self._row_here(fault, outcome="left", error=error))
                continue
            row = self._row_here(fault, outcome="repaired", source=source)
            self._note(row, fault.copies[0].view)
            self.rows.append(row)
        mender.end()

    def _row_here(
        self,
        fault: LocalFault,
        *,
        outcome: str,
        source: str | None = None,
        error: CkptdError | None = None,
    ) -> RepairResult:
        commit, file = fault.copies[0].view.commit, fault.file
        copies = [c for c in fault.copies if file is None or any(is_same_file(f, file) for f in c.files)]
        if file is None:
            damage = "an empty folder of the save is absent"
        else:
            damage = "other bytes" if fault.is_there else "absent"
        return RepairResult(
            where=HERE,
            tag=fault.tag,
            generation=commit.generation,
            form=commit.form,
            key=f"{fault.folder}/{fault.path}" + ("/" if file is None else ""),
            bytes=file.bytes if file is not None else 0,
            damage=damage,
            source=source or next((copy.remote.name for copy in copies), None),
            outcome=outcome,
            reason=str(error) if error is not None else fault.left or "",
            code=error.exit_code if error is not None else 0,
        )

    # --- documents -------------------------------------------------------------------------------------

    def _mend_documents(self) -> None:
        """Write documents again from what this node kept of them; what was mended is read anew."""
        state_dir, is_dry = self._unfinished.state_dir, self._wanted.dry_run
        for number, remote in enumerate(self._remotes):
            if state_dir is None or remote.name not in self._wanted.targets:
                continue
            kept = KeptDocuments(state_dir, remote.observation.identity.remote_id)
            repaired: list[RepairedDocument] = []
            for where in sorted(kept.names()):
                if self._wanted.tag not in (None, where[0]):
                    continue
                try:
                    repaired += heal_documents(kept, remote.store, where, dry_run=is_dry)
                except CkptdError as error:
                    self._say(f"{remote.name}: the documents of {where[0]} are not repaired: {error}")
            if self._wanted.tag is None:
                try:
                    repaired += heal_side_documents(kept, remote.store, dry_run=is_dry)
                except CkptdError as error:
                    self._say(f"{remote.name}: its side documents are not repaired: {error}")
            if repaired and not is_dry:
                audited(state_dir, remote.name, repaired)
                seen = read_remote(remote.store, is_tolerant=True)
                self._remotes[number] = replace(remote, observation=seen, commits=live_commits(seen))
            outcome = "planned" if is_dry else "repaired"
            self.rows += [_document_row(remote.name, one, outcome) for one in repaired]

    # --- in a remote -----------------------------------------------------------------------------------

    def _resender(self, remote: RemoteInventory) -> ObjectRepairer:
        return ObjectRepairer(
            remote.store,
            remote.observation.identity,
            lambda key, token: self._unfinished.note(remote.name, key, token),
            lambda key, done, total: self._tell(f"{remote.name}: {key}", done, total),
        )

    def _put_right(self, remote: RemoteInventory, resender: ObjectRepairer, bad: BadObject) -> RepairResult:
        name, last = None, ""
        for name, opened in self._sources(remote, bad, resender):
            if self._wanted.dry_run:
                return self._row(remote, bad, source=name, outcome="planned")
            try:
                with opened() as open_source:
                    was_bad = resender.put_right(bad.view, bad.file, self._paced(remote.name, open_source))
            except (CkptdError, OSError) as error:
                last = f"from {name}: {error}"
                self._say(f"{remote.name}: {bad.file.key}: {last}")
                continue
            if not was_bad:
                why = "read again it is as it was committed; nothing was sent"
                return self._row(remote, bad, source=None, outcome="repaired", reason=why)
            row = self._row(remote, bad, source=name, outcome="repaired")
            self._note(row, bad.view)
            return row
        reason = last or "its bytes lie intact nowhere that is known"
        return self._row(remote, bad, source=name, outcome="left", reason=reason, code=DamagedError.exit_code)

    def _paced(self, name: str, open_source: Callable[[], Source]) -> Callable[[], Source]:
        """No faster than the job file lets this remote be written to."""
        now = time.time()
        pacer = RateLimiter(next((r.bandwidth.at(now) for r in self._job.remotes if r.name == name), None))
        return lambda: RateLimitedSource(open_source(), pacer, lambda: None)

    def _sources(
        self, remote: RemoteInventory, bad: BadObject, resender: ObjectRepairer
    ) -> Iterator[tuple[str, Callable[[], contextlib.AbstractContextManager[Callable[[], Source]]]]]:
        """Yield where the committed bytes may lie: the node first, then other remotes, then an earlier
        repair's.
        """
        commit, file = bad.view.commit, bad.file
        path = self._local.find(commit.tag, commit.form, file) if self._local is not None else None
        if path is not None:
            yield f"{HERE} ({path})", partial(self._from_here, path)
        for other in self._remotes:
            if other.name != remote.name:
                same = self._same_in(other, bad)
                if same is not None:
                    yield other.name, partial(_from_remote, other, same)
        spare = resender.spare_of(file)
        if spare is not None:
            yield "an earlier repair", partial(_from_remote, remote, spare)

    @contextlib.contextmanager
    def _from_here(self, path: str) -> Iterator[Callable[[], Source]]:
        with files.reading(self._fd, path) as fd:
            yield lambda: FileSource(fd, path)

    def _same_in(self, other: RemoteInventory, bad: BadObject) -> ManifestFile | None:
        """Return the object of another remote that its own COMMIT of this tag says to be the same bytes."""
        for view in other.commits:
            commit = view.commit
            if (commit.tag, commit.form) != (bad.view.commit.tag, bad.view.commit.form):
                continue
            for listed in (other.manifests, other.supplements):
                with contextlib.suppress(CkptdError):
                    for file in (file for manifest in listed(commit) for file in manifest.files):
                        if is_same_file(file, bad.file) and _is_stored(other, file):
                            return file
        return None

    def _row(
        self,
        remote: RemoteInventory,
        bad: BadObject,
        *,
        source: str | None,
        outcome: str,
        reason: str = "",
        code: int = 0,
    ) -> RepairResult:
        commit = bad.view.commit
        return RepairResult(
            where=remote.name,
            tag=commit.tag,
            generation=commit.generation,
            form=commit.form,
            key=bad.file.key,
            bytes=bad.file.bytes,
            damage=f"expected {bad.difference.expected}, found {bad.difference.found}",
            source=source,
            outcome="left" if outcome == "planned" and source is None else outcome,
            reason=reason,
            code=code,
        )

    def _note(self, row: RepairResult, view: CommitView) -> None:
        if self._audit is not None:
            self._audit.write(
                "repair",
                tag=row.tag,
                generation=row.generation,
                form=row.form,
                reason=f"{row.where}: {row.damage}; from {row.source}",
                commits=[(view.key, view.sha256)],
                files=[(row.key, row.bytes)],
            )

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(what, done, total)


def _document_row(where: str, one: RepairedDocument, outcome: str) -> RepairResult:
    tag, generation, form = one.where
    return RepairResult(
        where=where,
        tag=tag,
        generation=generation,
        form=form,
        key=one.key,
        bytes=one.bytes,
        damage=one.damage,
        source=SOURCE,
        outcome=outcome,
    )


@contextlib.contextmanager
def _from_remote(remote: RemoteInventory, file: ManifestFile) -> Iterator[Callable[[], Source]]:
    yield lambda: StoreSource(remote.store, file)


def _is_stored(remote: RemoteInventory, file: ManifestFile) -> bool:
    info = remote.store.stat(file.key)
    return info is not None and info.bytes == file.bytes


# --- uploads that a killed repair leaves on a server -----------------------------------------------------
# Their ids are kept until they are over. Only what is noted here is ever aborted by the next repair or `ckptd
# gc`, of which one is at work at a time.


class Unfinished:
    """The notes of one job, in its state directory; None: nothing is kept (no state directory)."""

    def __init__(self, state_dir: Path | None) -> None:
        self.state_dir = state_dir
        self._open = {(remote, key): token for remote, key, token in self._read()}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other repairs and `gc` of this job off this node, by flock on the state directory.

        Raises:
            LockHeld: one is; what it has under way must not be taken for what it left.
        """
        if self.state_dir is None:
            yield
            return
        with files.opened_dir(self.state_dir) as fd:
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"a repair or `ckptd gc` is at work with {self.state_dir}"
                raise LockHeld(msg, hint="call it again when that is done") from error
            self._open = {(remote, key): token for remote, key, token in self._read()}
            yield

    def of(self, remote: str) -> list[tuple[str, str]]:
        """Return (key, token) of uploads to a remote that nobody goes on with."""
        return [(key, token) for (name, key), token in self._open.items() if name == remote]

    def note(self, remote: str, key: str, token: str) -> None:
        """An upload began (or goes on under another id); token "": it is over."""
        if token:
            self._open[remote, key] = token
        elif self._open.pop((remote, key), None) is None:
            return
        self._write()

    def give_up(self, remote: str, store: Store) -> int:
        """Abort what is noted of a remote; how many there were."""
        left = self.of(remote)
        for key, token in left:
            store.discard(key, token)
            self.note(remote, key, "")
        return len(left)

    def _read(self) -> Iterable[tuple[str, str, str]]:
        try:
            rows = (
                json.loads((self.state_dir / REPAIR_UPLOADS).read_bytes())
                if self.state_dir is not None
                else []
            )
            return [(str(remote), str(key), str(token)) for remote, key, token in rows]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self) -> None:
        if self.state_dir is None:
            return
        rows = [[remote, key, token] for (remote, key), token in sorted(self._open.items())]
        with opened_ours(self.state_dir) as fd:
            files.write_atomic(fd, REPAIR_UPLOADS, json.dumps(rows).encode())
