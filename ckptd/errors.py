"""The error tree: every class says whether to retry, what to do next, and the exit code of a command.

One place for exit codes (docs/contract.md), so that a launch script and the daemon read failures alike.

    CkptdError ............................ 1
    ├─ UsageError ......................... 2
    ├─ BehindError ........................ 3    a deadline passed
    ├─ PersonNeeded ....................... 1    what was waited for will not come by itself
    ├─ NothingCommitted ................... 4    the remote is there and holds no commit
    ├─ DamagedError ....................... 65   the bytes are not what they should be
    │  ├─ TornArchiveError                       a shard is truncated, empty or garbled
    │  ├─ VerifyError                            a copy differs from its source
    │  └─ DocumentDamaged                        a document of `_ckptd/` in a remote cannot be read
    ├─ RefusedError ....................... 65   cannot be done right, so it is not done
    ├─ NotFoundError ...................... 66
    ├─ RemoteError ........................ 69
    │  ├─ RemoteUnreachable                      retried with backoff
    │  └─ RemoteNotOurs                          identity missing or another job's
    │     └─ RemoteNotInitialised                a place that may become this job's remote
    ├─ CommitConflict ..................... 1    another save holds this generation
    ├─ SourceChanged ...................... 1    the trainer wrote or removed it under us
    ├─ TargetExists ....................... 73
    ├─ StorageError ....................... 74   I/O error
    │  ├─ JournalFailed                          the journal cannot be read or written now
    │  │  └─ JournalDamaged                      it is no journal of ours
    │  └─ NoSpaceError                           disk, quota or P13's reserve
    ├─ LockHeld ........................... 75   another daemon owns the save_dir
    ├─ NotPermitted ....................... 77   rights or credentials
    └─ ConfigError ........................ 78
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import Any


class Retry(StrEnum):
    """Tell when the same attempt may succeed."""

    NEVER = "never"
    BACKOFF = "backoff"
    AFTER_CHANGE = "after-change"
    """Once the source, the configuration or a person changed something."""


class CkptdError(Exception):
    """A failure that we can name: `message` says what and where, `hint` what to do next."""

    exit_code = 1
    retry = Retry.NEVER
    default_hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def as_data(self) -> dict[str, Any]:
        """Return what another process needs to raise this error again: see `error_named`."""
        name = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        return {"error": name, "message": self.message, "hint": self.hint}


class UsageError(CkptdError):
    """The command line contradicts itself."""

    exit_code = 2


class BehindError(CkptdError):
    """A deadline passed before the work was done."""

    exit_code = 3
    retry = Retry.BACKOFF


class PersonNeeded(CkptdError):
    """Stop waiting: what was waited for will not come by itself (1)."""

    exit_code = 1


class NothingCommitted(CkptdError):
    """The remote is there and ours, and holds no committed checkpoint: start fresh."""

    exit_code = 4
    default_hint = "start training from scratch"


class DamagedError(CkptdError):
    """Bytes are not what they should be."""

    exit_code = 65
    retry = Retry.AFTER_CHANGE


class TornArchiveError(DamagedError):
    """A `torch.save` archive is truncated, empty or garbled."""

    default_hint = "the save was interrupted; use an older checkpoint (ckptd resume picks one)"


class VerifyError(DamagedError):
    """A copy differs from its source."""

    retry = Retry.BACKOFF


class DocumentDamaged(DamagedError):
    """A document of `_ckptd/` is not what was written: that says nothing of any checkpoint on this node."""

    retry = Retry.BACKOFF


class RefusedError(CkptdError):
    """The thing asked for cannot be done right, so nothing was done."""

    exit_code = 65
    retry = Retry.AFTER_CHANGE


class NeedsWholeFiles(RefusedError):
    """A source that cannot be read by ranges from afar; brought here whole it converts."""


class BeingRead(RefusedError):
    """Somebody reads what is to be deleted; it goes once that has ended."""

    default_hint = "nothing to do: it is tried again; a reader that was killed counts ten minutes more"


class NotFoundError(CkptdError):
    """No such job, tag or path."""

    exit_code = 66


class RemoteError(CkptdError):
    """A remote did not do what was asked."""

    exit_code = 69
    retry = Retry.BACKOFF


class RemoteUnreachable(RemoteError):
    """The remote does not answer."""

    default_hint = "ckptd tries again by itself; check the mount or the network"


class RemoteNotOurs(RemoteError):
    """The remote's identity is missing or another job's (P2)."""

    retry = Retry.AFTER_CHANGE
    default_hint = "is it mounted? see `ckptd check`"


class RemoteNotInitialised(RemoteNotOurs):
    """The place answers and may become this job's remote: nothing was ever uploaded there."""


class CommitConflict(CkptdError):
    """Another save holds this generation; the next attempt takes the next one."""

    retry = Retry.AFTER_CHANGE


class SourceChanged(CkptdError):
    """The trainer wrote, renamed or removed a file while it was being read (P4)."""

    retry = Retry.AFTER_CHANGE


class TargetExists(CkptdError):
    """The target is there already and nothing of it may be overwritten."""

    exit_code = 73
    default_hint = "choose another target or move it away"


class StorageError(CkptdError):
    """An I/O error of a local or remote file system."""

    exit_code = 74
    retry = Retry.BACKOFF


class SourceUnreadable(StorageError):
    """This node does not give a file that is to be uploaded, which says nothing of the remote."""

    default_hint = "mend the disk of this node, or save again; ckptd goes on trying"


class JournalFailed(StorageError):
    """The journal cannot be opened, read or written now."""

    default_hint = "free space or mend the disk; ckptd tries again by itself"


class JournalDamaged(JournalFailed):
    """The file is no journal of this version, or its pages contradict each other: it is set aside (P8)."""

    default_hint = "nothing to do: it is rebuilt from disk and remote"


class NoSpaceError(StorageError):
    """No room: the disk or quota is full, or the write would eat the next save's reserve (P13)."""

    default_hint = "free space; nothing was deleted to make room"


class LockHeld(CkptdError):
    """Another daemon owns this save_dir on this host (P10)."""

    exit_code = 75
    default_hint = "one daemon per save_dir; see `ckptd status`"


class NotPermitted(CkptdError):
    """Missing rights or credentials (P19)."""

    exit_code = 77
    retry = Retry.AFTER_CHANGE


class ConfigError(CkptdError):
    """The configuration is wrong; nothing was started with it (P16)."""

    exit_code = 78
    retry = Retry.AFTER_CHANGE


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
READ_ONLY = (
    "the file system is read-only: mount it writable; a service may write what its job files named when it "
    "was installed, `ckptd service install` names them anew"
)


def from_os_error(error: OSError, what: str) -> CkptdError:
    """Map an OSError to the tree; `what` names the operation and the place (`writing /nas/x`)."""
    text = f"{what}: {error.strerror or error}"
    if error.errno in _NO_SPACE:
        return NoSpaceError(text)
    if error.errno == errno.EROFS:
        return NotPermitted(text, hint=READ_ONLY)
    if error.errno in _DENIED:
        return NotPermitted(
            text, hint="run it as a user who may; in save_dir that is who trains (`ckptd check`)"
        )
    return StorageError(text)


def error_named(
    name: str, message: str, hint: str = "", *, otherwise: type[CkptdError] = StorageError
) -> CkptdError:
    """Return the error that another process described by `as_data`; `otherwise`: of a name that is none."""
    found = globals().get(name)
    kind = found if isinstance(found, type) and issubclass(found, CkptdError) else otherwise
    return kind(message, hint=hint)
