"""Describe what `ckptd verify` found: differences, verdicts, exit code; choose the slice that it reads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.errors import DamagedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.manifest import ManifestFile
    from ckptd.storage.remote.messages import CommitView

BAD = ("damaged", "unreadable")
"""Verdicts that change the exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Nothing that counts differs."""
        return not self.problems and all(row.verdict not in BAD for row in self.commits)


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
