"""Define the steps of a recovery, as data: printed by --dry-run, carried out once by `execute`.

Each is idempotent. What is in the way is renamed into `_ckptd/aside/`, and pointers come last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.base.humanize import size_of
from ckptd.core.model.listing import OURS
from ckptd.core.model.records import UNIVERSAL

if TYPE_CHECKING:
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.recover.select.copies import Copy

DERIVED_UNIVERSAL = f"{OURS}/derived/{UNIVERSAL}"
DERIVED_ACCELERATE = f"{OURS}/derived/accelerate"
"""Folders as `accelerator.load_state` wants them: the universal form under the engine's own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveAside:
    """Rename a name below save_dir to `_ckptd/aside/<label>.<n>`."""

    name: str
    label: str
    reason: str

    def __str__(self) -> str:
        return f"move {self.name} aside ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Bring a committed form into staging, every byte checked while it is read."""

    form: str
    copy: Copy

    def __str__(self) -> str:
        what = f"{self.copy.view.commit.tag} ({self.form}, {size_of(self.copy.bytes)})"
        return f"fetch {what} from {self.copy.remote.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Rename what was fetched from staging to `target`; nothing is replaced."""

    form: str
    copy: Copy
    target: str

    def __str__(self) -> str:
        return f"put it in place as {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeUniversal:
    """Make the universal form of `tag`; `verify`: nothing has checked the source's bytes yet."""

    tag: str
    target: str
    verify: bool

    def __str__(self) -> str:
        return f"convert {self.tag} to {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertFrom:
    """Make the universal form of a committed ZeRO form by ranges of its objects: no copy of it lies here."""

    copy: Copy
    target: str

    def __str__(self) -> str:
        what = f"{self.copy.view.commit.tag} ({size_of(self.copy.bytes)})"
        return f"convert {what} from {self.copy.remote.name} to {self.target} while it is read"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreExtras:
    """Put files that travelled with the checkpoint back into save_dir where they are absent."""

    copy: Copy
    files: tuple[ManifestFile, ...]

    def __str__(self) -> str:
        return f"restore {', '.join(name_of_extra(f) for f in self.files)} from {self.copy.remote.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePointer:
    """Write a pointer file atomically."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"write {self.name} = {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """Put fetched files into a folder that holds the rest; a bad one goes to `_ckptd/aside/` first."""

    form: str
    copy: Copy
    """Its `files` are those that were fetched."""
    target: str

    def __str__(self) -> str:
        return f"put {len(self.copy.files)} files into {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBeside:
    """Copy what lies beside the shards of `tag` (random states, sampler …) into `target`."""

    tag: str
    target: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"copy what lies beside the shards of {self.tag} to {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Remove a derived form of ours that was made from another save; it can be made again."""

    folder: str
    name: str

    def __str__(self) -> str:
        return f"drop {self.folder}/{self.name} (made from another save)"


Step = (
    MoveAside
    | Fetch
    | Install
    | Mend
    | MakeUniversal
    | ConvertFrom
    | RestoreExtras
    | WritePointer
    | CopyBeside
    | Delete
)


_DONE = {
    "move": "moved",
    "fetch": "fetched",
    "put": "put",
    "convert": "converted",
    "restore": "restored",
    "write": "wrote",
    "copy": "copied",
    "drop": "dropped",
}


def done(step: Step) -> str:
    """Say a step that was carried out; `str` of it says what it does."""
    verb, _, rest = str(step).partition(" ")
    return f"{_DONE[verb]} {rest}"


def name_of_extra(file: ManifestFile) -> str:
    """Return the name in save_dir of a file of role extra (`_extra/<name>` in the remote folder)."""
    return file.path.rpartition("/")[2]


def is_plain(name: str) -> bool:
    """Whether a file that travelled along may be put into save_dir under its own name."""
    return bool(name) and not name.startswith((OURS, ".ckptd", "latest")) and name not in (".", "..")
