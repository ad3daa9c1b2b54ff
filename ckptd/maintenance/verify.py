"""Prove what a remote claims, from the remote alone (`ckptd verify`).

COMMIT → digests of its manifests → every object's presence and size, and on demand its bytes. Nothing local
is asked: neither the daemon nor its journal nor save_dir.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptd.base.humanize import in_columns, printable, size_of
from ckptd.base.names import ROOT
from ckptd.core.model.generation import missing, objects_of, order_of
from ckptd.core.model.layouts import POINTERS
from ckptd.core.model.manifest import commit_key
from ckptd.core.model.runs import run_of
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NothingCommitted,
    NotPermitted,
    RefusedError,
    StorageError,
    UsageError,
)
from ckptd.recover.fetch import PARALLEL, read_through
from ckptd.recover.select.inventory import is_gone, why_untrusted
from ckptd.storage.remote.documents import manifests_of_commit, read_generation, stem_of
from ckptd.storage.remote.readers import ReaderLease
from ckptd.storage.stores.checksums import to_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ckptd.core.model.manifest import Commit, ManifestFile
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import CommitView


BAD = ("damaged", "unreadable")
"""Verdicts that change the exit code."""


class Reading(Protocol):
    """Which objects are read."""

    def has(self, key: str) -> bool:
        """Tell whether an object is."""
        ...


@dataclass(frozen=True, slots=True)
class Keys:
    """Some objects by their keys."""

    keys: frozenset[str]

    def has(self, key: str) -> bool:
        """Tell whether it is one of them."""
        return key in self.keys


@dataclass(frozen=True, slots=True)
class Slice:
    """The `number`-th (from 1) of `of` slices of all objects, by a hash of their keys."""

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            msg = f"--slice {self.number}/{self.of} is not one of {self.of} slices"
            raise UsageError(msg, hint="slices count from 1: --slice 1/7 … --slice 7/7")

    def has(self, key: str) -> bool:
        """Whether an object belongs to the slice: the same one on every machine."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.of == self.number - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was committed."""

    key: str
    expected: str
    found: str
    code: int = DamagedError.exit_code
    """65: other bytes, or none. 77, 74: it could not be read (rights, I/O), so nothing is proven of it."""

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCommit:
    """One COMMIT. `verdict`: good, damaged, unreadable (rights or I/O kept something from being compared, the
    rest is good), disputed or retired (these two do not count for anybody)."""

    tag: str
    generation: int
    run_id: str
    form: str
    branch: int
    step: int
    files: int
    bytes: int
    read_bytes: int
    commit_sha256: str
    verdict: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifiedRemote:
    """One remote; oldest checkpoint first. `unlisted`: objects that no manifest lists."""

    name: str
    url: str
    job: str
    commits: tuple[VerifiedCommit, ...]
    unlisted: tuple[str, ...]
    unlisted_bytes: int
    problems: tuple[str, ...]
    """Documents that could not be read."""

    @property
    def is_good(self) -> bool:
        """Tell whether nothing that counts differs."""
        return not self.problems and all(row.verdict not in BAD for row in self.commits)

    def __repr__(self) -> str:
        """Show a verdict on each COMMIT, and everything that differs."""
        rows = [("tag", "form", "size", "read", "verdict")]
        for row in self.commits:
            read = size_of(row.read_bytes) if row.read_bytes else ""
            rows.append((row.tag, row.form, size_of(row.bytes), read, row.verdict))
        wrong = [*self.problems, *(str(one) for row in self.commits for one in row.differences)]
        title = printable(f"{self.name}: {self.url} (job {self.job})")
        body = in_columns(rows) if self.commits else ["  no committed checkpoint"]
        return "\n".join([title, *body, *(printable(f"  ! {text}") for text in wrong)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """One object of a COMMIT that counts, proven absent or other bytes."""

    view: CommitView
    file: ManifestFile
    difference: Difference


def slice_of(text: str) -> Slice:
    """`2/7` → the second of seven slices.

    Raises:
        UsageError: it is none.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and len(number) < 10 and len(of) < 10):
        msg = f"--slice {text!r} is not N/T"
        raise UsageError(msg, hint="--slice 1/7 reads the first of seven slices")
    return Slice(number=int(number), of=int(of))


def exit_code(verified: Sequence[VerifiedRemote]) -> int:
    """0: all as committed; 65: something differs; 77, 74: nothing differs, something could not be read."""
    if all(remote.is_good for remote in verified):
        return 0
    rows = [row for remote in verified for row in remote.commits]
    if any(remote.problems for remote in verified) or any(row.verdict == "damaged" for row in rows):
        return DamagedError.exit_code
    return max(one.code for row in rows if row.verdict == "unreadable" for one in row.differences)


_KEPT_FROM_READING = (NotPermitted, StorageError)


class Verifier:
    """Verifies one remote. `read`: read the bytes of those; `on_progress(what, done, total)`: bytes."""

    def __init__(
        self,
        remote: RemoteInventory,
        *,
        read: Reading | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._remote = remote
        self._read = read
        self._on_progress = on_progress
        self._sizes: dict[str, int] = {}
        self._checked: dict[tuple[str, int, str], Difference | None] = {}
        self._listed: set[str] = set()
        self._lock = threading.Lock()
        self._done_bytes = 0
        self.bad: list[BadObject] = []
        """Objects of COMMITs that count which are absent or other bytes; filled by `run`."""

    def run(
        self, tag: str | None = None, is_wanted: Callable[[Commit], bool] | None = None
    ) -> VerifiedRemote:
        """Prove every COMMIT, or those of one tag; `is_wanted`: only these, as of one run.

        Raises:
            NothingCommitted: there is none (4). NotFoundError: none of that tag (66).
            RemoteUnreachable: the remote went away.
        """
        seen = self._remote.observation
        views = [
            view
            for view in seen.commits
            if tag in (None, view.commit.tag) and (is_wanted is None or is_wanted(view.commit))
        ]
        views.sort(
            key=lambda v: (order_of(v.commit), v.commit.tag, v.commit.generation, v.commit.form != "zero")
        )
        retired = {stem_of(stone) for stone in seen.retired}
        damaged = () if tag is not None and views else seen.damaged
        if tag is not None and not views and seen.commits:
            known = ", ".join(dict.fromkeys(view.commit.tag for view in seen.commits))
            msg = f"{self._remote.url} holds no committed checkpoint {tag!r}"
            raise NotFoundError(msg, hint=f"there are {known}")
        counting = [v for v in views if not v.disputed and stem_of(v.commit) not in retired]
        if not counting and not damaged:
            msg = f"{self._remote.url} holds no committed checkpoint"
            hint = "disputed ones, and those that retention deleted, do not count" if views else ""
            raise NothingCommitted(msg, hint=hint)
        is_all = tag is None and is_wanted is None
        self._list(None if is_all else {view.commit.folder for view in views})
        rows = self._all(views, retired)
        self._collect_uncommitted()
        unlisted = sorted(set(self._sizes) - self._listed) if is_all else []
        return VerifiedRemote(
            name=self._remote.name,
            url=self._remote.url,
            job=seen.identity.job,
            commits=tuple(rows),
            unlisted=tuple(unlisted),
            unlisted_bytes=sum(self._sizes[key] for key in unlisted),
            problems=tuple(damaged),
        )

    def _all(self, views: Sequence[CommitView], retired: Collection[Stem]) -> list[VerifiedCommit]:
        """Prove one COMMIT after the other; retention waits for the one whose bytes are being read."""
        rows = []
        with ReaderLease(self._remote.store, "verify").renewing() as hold:
            for view in views:
                if self._read is not None:
                    hold(view.commit.tag)
                rows.append(self._one(view, stem_of(view.commit) in retired))
        return rows

    def _list(self, folders: set[str] | None) -> None:
        """List the sizes of all objects in one pass: thousands of questions would cost minutes on S3."""
        prefixes = (
            [""] if folders is None else [f"{folder.rstrip('/')}/" for folder in sorted(folders) if folder]
        )
        for prefix in prefixes:
            for info in self._remote.store.list(prefix):
                if not info.key.startswith(f"{ROOT}/") and info.key not in POINTERS:
                    self._sizes[info.key] = info.bytes

    def _one(self, view: CommitView, is_retired: bool) -> VerifiedCommit:
        commit = view.commit
        differences: list[Difference] = []
        files: Mapping[str, ManifestFile] = {}
        try:
            files = self._documents(view, differences)
        except (DamagedError, RefusedError) as error:
            differences.append(Difference(key=view.key, expected="its manifests", found=error.message))
        except _KEPT_FROM_READING as error:
            differences.append(_unreadable(view.key, "its manifests", error))
        before = self._done_bytes
        bad = self._objects(commit.tag, files.values())
        differences += [difference for _, difference in bad]
        verdict = self._verdict(view, is_retired, differences)
        if verdict == "damaged":
            self.bad += [
                BadObject(view=view, file=file, difference=difference)
                for file, difference in bad
                if difference.code == DamagedError.exit_code
            ]
        return VerifiedCommit(
            tag=commit.tag,
            generation=commit.generation,
            run_id=run_of(commit, commit.job_id),
            form=commit.form,
            branch=commit.branch,
            step=commit.step,
            files=commit.files,
            bytes=commit.bytes,
            read_bytes=self._done_bytes - before,
            commit_sha256=view.sha256,
            verdict=verdict,
            differences=tuple(differences),
        )

    def _verdict(self, view: CommitView, is_retired: bool, differences: Sequence[Difference]) -> str:
        if view.disputed:
            return "disputed"
        with contextlib.suppress(*_KEPT_FROM_READING):
            # retention goes on while hours of bytes are read
            is_retired = is_retired or (bool(differences) and is_gone(self._remote.store, view))
        if is_retired:
            return "retired"
        if not differences:
            return "good"
        is_proven = any(one.code == DamagedError.exit_code for one in differences)
        return "damaged" if is_proven else "unreadable"

    def _documents(self, view: CommitView, differences: list[Difference]) -> Mapping[str, ManifestFile]:
        """Return the objects that a COMMIT promises; what does not agree among its documents is added."""
        commit, identity = view.commit, self._remote.observation.identity
        own = commit_key(commit.tag, commit.generation, commit.form)
        if own != view.key:
            differences.append(Difference(key=view.key, expected=f"the COMMIT {own}", found="another name"))
        known = manifests_of_commit(self._remote.store, commit)
        problem = why_untrusted(identity, commit, [one.manifest for one in known])
        if problem is not None:
            differences.append(Difference(key=view.key, expected="a COMMIT of this job", found=problem))
            return {}
        objects = objects_of(one.manifest for one in known)
        self._listed |= set(objects)
        total = sum(file.bytes for file in objects.values())
        if (len(objects), total) != (commit.files, commit.bytes):
            expected = f"{commit.files} files of {commit.bytes} bytes"
            found = f"{len(objects)} of {total} in its manifests"
            differences.append(Difference(key=view.key, expected=expected, found=found))
        objects |= objects_of(self._remote.supplements(commit))
        self._listed |= set(objects)
        lacking = missing(known, commit.form)
        differences += [Difference(key=view.key, expected=what, found="in no manifest") for what in lacking]
        return objects

    def _objects(self, tag: str, wanted: Iterable[ManifestFile]) -> list[tuple[ManifestFile, Difference]]:
        listed = list(wanted)
        total = sum(f.bytes for f in listed if self._read is not None and self._read.has(f.key))
        start = self._done_bytes

        def on_bytes(count: int) -> None:
            with self._lock:
                self._done_bytes += count
                if self._on_progress is not None:
                    self._on_progress(f"{self._remote.name}: {tag}", self._done_bytes - start, total)

        stop = threading.Event()
        count = max(PARALLEL, self._remote.store.lanes)
        with ThreadPoolExecutor(count, thread_name_prefix="verify") as pool:
            futures = [pool.submit(self._object, file, on_bytes, stop) for file in listed]
            try:
                found = [future.result() for future in futures]
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        rows = zip(listed, found, strict=True)
        return [(file, difference) for file, difference in rows if difference is not None]

    def _object(
        self, file: ManifestFile, on_bytes: Callable[[int], None], stop: threading.Event
    ) -> Difference | None:
        """Verify one object; a replica that several COMMITs list is read once."""
        mark = (file.key, file.bytes, file.checksums.crc64nvme)
        if mark not in self._checked:
            try:
                self._checked[mark] = self._compare(file, on_bytes, stop)
            except _KEPT_FROM_READING as error:
                self._checked[mark] = _unreadable(file.key, f"{file.bytes} bytes", error)
        return self._checked[mark]

    def _compare(
        self, file: ManifestFile, on_bytes: Callable[[int], None], stop: threading.Event
    ) -> Difference | None:
        size = self._sizes.get(file.key)
        if size is None:
            held = self._remote.store.stat(file.key)
            size = None if held is None else held.bytes
        if size != file.bytes:
            found = "nothing" if size is None else f"{size} bytes"
            return Difference(key=file.key, expected=f"{file.bytes} bytes", found=found)
        if self._read is None or not self._read.has(file.key):
            return None
        try:
            done, crc = read_through(self._remote.store, file, on_bytes, stop)
        except (FileNotFoundError, DamagedError) as error:
            return Difference(key=file.key, expected=f"{file.bytes} bytes", found=str(error))
        if done == file.bytes and to_hex(crc) == file.checksums.crc64nvme:
            return None
        expected = f"CRC64 {file.checksums.crc64nvme}"
        return Difference(key=file.key, expected=expected, found=f"CRC64 {to_hex(crc)} over {done} bytes")

    def _collect_uncommitted(self) -> None:
        """Collect the objects that manifests of uploads under way list already."""
        seen = self._remote.observation
        for where in {*seen.uncommitted, *seen.retiring}:
            with contextlib.suppress(*_KEPT_FROM_READING):
                for known in read_generation(self._remote.store, where):
                    self._listed |= {file.key for file in known.manifest.files}


def _unreadable(key: str, expected: str, error: CkptdError) -> Difference:
    return Difference(key=key, expected=expected, found=f"unreadable: {error.message}", code=error.exit_code)
