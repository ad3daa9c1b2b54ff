"""What a remote that fails is told as (docs/operations.md), and for how long after the last failure (P17)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptd import errors

if TYPE_CHECKING:
    from ckptd.daemon.problems import Code, Problems

FULL_SECONDS = 180.0
"""An upload that found no room is tried again every minute: no longer than that after the last one."""
_FULL_STEP = "free space there, or set or lower its keep_last and `ckptd reload`; nothing local is deleted"


def tell(problems: Problems, name: str, error: errors.CkptdError, *, lacks_room: bool) -> Code:
    """Raise the remote's problem; which it is. `lacks_room`: for an upload, while looks are answered."""
    code: Code = "remote-unreachable"
    if isinstance(error, errors.RemoteNotOurs | errors.ConfigError):
        code = "remote-not-ours"
    elif isinstance(error, errors.DocumentDamaged):
        code = "remote-damaged"
    elif isinstance(error, errors.NoSpaceError | errors.NotPermitted):
        code = "remote-full" if isinstance(error, errors.NoSpaceError) else "remote-denied"
    hint = _FULL_STEP if code == "remote-full" else error.hint
    seconds = FULL_SECONDS if lacks_room else math.inf
    problems.put(code, name, f"{name}: {error.message}", hint, lasts_seconds=seconds)
    return code
