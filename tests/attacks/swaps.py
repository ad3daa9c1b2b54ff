"""An attacker who swaps names under ckptd's hands, and a tree outside that must stay as it is (P15).

`Swapper` counts every call that ckptd makes to the kernel about a name and swaps one name before the n-th of
them, and back after some more: what a race hits once in a million runs is hit each time. `flipping` is the
same as a process of its own that swaps as fast as it can.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Role
from ckptd.core.model.save import SealedFile
from ckptd.core.policy.permit import DeletePermit
from ckptd.core.policy.view import CommitRef
from ckptd.storage.local.scan import scan_folder

TAG = "global_step1"
SHARD = "mp_rank_00_model_states.pt"
NAMES = (SHARD, "b.pt", "inner/c.pt", "inner/deep/d.pt")
ASIDE = "aside"
"""What a pruned folder is called in the trash."""
CALLS = (
    "open", "stat", "lstat", "mkdir", "rename", "rmdir", "unlink", "link", "listdir", "scandir", "readlink",
    "fsync", "replace",
)  # fmt: skip
SITES = {
    "tag folder": TAG,
    "folder in it": f"{TAG}/inner",
    "folder in it, renamed aside": f"_ckptd/trash/{ASIDE}/inner",
    "deep folder in it": f"{TAG}/inner/deep",
    "shard": f"{TAG}/{SHARD}",
    "latest": "latest",
    "ours": "_ckptd",
    "trash": "_ckptd/trash",
    "staging": "_ckptd/staging",
    "state": "_ckptd/state",
    "derived": "_ckptd/derived",
    "form": "_ckptd/derived/universal",
    "derived checkpoint": f"_ckptd/derived/universal/{TAG}",
    "audit": "_ckptd/state/audit.jsonl",
    "status": "_ckptd/state/status.json",
    "node id": "_ckptd/state/node_id",
    "decisions": "_ckptd/state/decisions",
}
"""What is swapped for a link to a thing of the same shape outside."""
ELSEWHERE = {"folder in it, renamed aside": "inner"}
"""Where the like of a site lies outside, if not under the same name."""
_OLD = (1_000_000_000_000_000_000, 1_500_000_000_000_000_000)
"""Access before change: reading such a file moves its access time even with relatime."""
_libc = ctypes.CDLL(None, use_errno=True)


def populate(root: Path, text: str) -> None:
    """A save_dir with one checkpoint and everything of ours."""
    for name in NAMES:
        path = root / TAG / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}")
    (root / "latest").write_text(TAG)
    ours = root / "_ckptd"
    for place in ("trash", "staging", "hold", "aside", "state/decisions", f"derived/universal/{TAG}/zero"):
        (ours / place).mkdir(parents=True)
    (ours / f"derived/universal/{TAG}/zero/x.pt").write_text(text)
    (ours / "trash/ours.0123456789ab").mkdir()
    (ours / "trash/ours.0123456789ab/y").write_text(text)
    (ours / "state/audit.jsonl").write_text(f'"{text}"\n')
    (ours / "state/status.json").write_text("{}")
    (ours / "state/node_id").write_text(f"{text}-node")
    (ours / "state/decisions/pin~x~1.json").write_text(text)


@dataclass
class SwapScene:
    """save_dir, the tree outside, and the permit for its one checkpoint."""

    root: Path

    def __post_init__(self) -> None:
        self.save_dir, self.outside = self.root / "run", self.root / "outside"
        self.spare = self.root / "spare"
        self.fill(self.save_dir, "inside")
        self.fill(self.outside, "secret")
        # where removing could show: what is empty, and names that a removal of ours would pick
        (self.outside / TAG / "inner" / "empty").mkdir()
        (self.outside / "inner" / "deep").mkdir(parents=True)
        (self.outside / "deep").mkdir()
        self.spare.mkdir()
        self.permit = self.permit_of()
        self.paths = [*sorted(self.outside.rglob("*"), reverse=True), self.outside]
        self.contents = {path: _content(path) for path in self.paths}
        for path in self.paths:
            os.utime(path, ns=_OLD)
        self.before = self.picture()

    def fill(self, root: Path, text: str) -> None:
        """What lies in save_dir, and its like outside."""
        populate(root, text)

    def permit_of(self) -> DeletePermit:
        """A permit as the planner makes it."""
        with files.opened_dir(self.save_dir) as fd:
            listing = scan_folder(fd, TAG)
        assert listing is not None
        return DeletePermit(
            tag=TAG,
            generation=1,
            folder=listing.folder,
            files=tuple(
                SealedFile(path=f.path, identity=f.identity, fingerprint="x", role=Role.SIDE)
                for f in listing.files
            ),
            commits=(CommitRef(remote="nas", key="k", sha256="s"),),
            issued_at_seconds=time.monotonic(),
            reason="test",
        )

    def evil(self, site: str) -> tuple[Path, Path]:
        """(the real name, a link to its like outside that waits beside save_dir)."""
        real = self.save_dir / SITES[site]
        waits = self.spare / site.replace(" ", "-")
        if not waits.is_symlink():
            waits.symlink_to(self.outside / ELSEWHERE.get(site, SITES[site]))
        return real, waits

    def picture(self) -> dict[str, tuple[int, ...]]:
        """Everything that was outside at first: mode, links, times of change and of access."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.paths:
            s = os.lstat(path)
            found[str(path)] = (s.st_mode, s.st_nlink, s.st_mtime_ns, s.st_atime_ns)
        return found

    def escaped(self) -> list[str]:
        """What is not as it was outside, in words."""
        try:
            now = self.picture()
        except FileNotFoundError as error:
            return [f"removed: {error.filename}"]
        said = [f"{path}: {self.before[path]} {now[path]}" for path in now if now[path] != self.before[path]]
        said += [f"appeared: {p}" for p in self.outside.rglob("*") if str(p) not in now]
        return said + [f"{path} was written" for path in self.paths if _content(path) != self.contents[path]]


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def exchange(one: Path, other: Path) -> None:
    """Swap two names at once; nothing where one of them is gone by now."""
    _libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2)


class Swapper:
    """Swaps before the `at`-th call, and back `back` calls later (0: never)."""

    def __init__(self, one: Path, other: Path, at: int, back: int) -> None:
        self.calls = 0
        self._pair = (one, other)
        self._when = {at, at + back} if back else {at}

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self._when:
            exchange(*self._pair)


@contextlib.contextmanager
def before_each_call(monkeypatch: pytest.MonkeyPatch, attack: Callable[[], None]) -> Iterator[None]:
    """Run `attack` before every call about a name."""

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            attack()
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(getattr(os, name)))
        patch.setattr(files, "_renameat2", wrapped(files._renameat2))
        yield


FLIP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
one, other, most = os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2]), int(sys.argv[3])
done = 0
sys.stdout.write("ready\\n"); sys.stdout.flush()
while done < most:
    if libc.renameat2(-100, one, -100, other, 2) == 0:
        done += 1
    elif os.getppid() == 1:
        break
sys.stdout.write(f"{done}\\n"); sys.stdout.flush()
"""


@dataclass
class Flipper:
    """The process that swaps."""

    process: subprocess.Popen[bytes]

    @property
    def is_at_it(self) -> bool:
        """It has not ended yet."""
        return self.process.poll() is None

    def made(self) -> int:
        """How many swaps it says that it made, once it has ended; one that fell over is an error."""
        said = self.process.communicate(timeout=10)[0]
        assert self.process.returncode == 0, f"the flipper ended with {self.process.returncode}"
        return int(said)


@contextlib.contextmanager
def flipping(one: Path, other: Path, most: int) -> Iterator[Flipper]:
    """A process that swaps the two names `most` times as fast as it can."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", FLIP, str(one), str(other), str(most)],
        stdout=subprocess.PIPE,
        bufsize=0,  # else a line that came with the first one is lost to `communicate`
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield Flipper(process)
        finally:
            process.kill()


def digest_of(root: Path) -> str:
    """Names and bytes of a tree."""
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        total.update(str(path.relative_to(root)).encode() + b"\0")
        if path.is_file() and not path.is_symlink():
            total.update(path.read_bytes())
    return total.hexdigest()
