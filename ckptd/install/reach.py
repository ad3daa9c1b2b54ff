"""Whether the user who trains can run what the service is to start: systemd says it late, and not in words.

An interpreter below /root, or in another user's home, is run by nobody else. Worse: where its own library
cannot be reached the loader takes the system's of another release, and ssl fails once a store is asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import signal
import subprocess
from typing import TYPE_CHECKING

from ckptd.errors import NotPermitted

if TYPE_CHECKING:
    from collections.abc import Sequence

IMPORTS = ("-c", "import ssl, ckptd.daemon.loop")
"""What a daemon needs of its interpreter and packages; an interpreter of another release lacks some."""
_SECONDS = 60
_ELSEWHERE = "install ckptd where that user can read it, for example in /opt/ckptd"


def check_runs(command: Sequence[str], user: str) -> None:
    """Run it as that user; asked of root alone, and of no user but another.

    Raises:
        NotPermitted: it cannot be run, or ends with an error.
    """
    account = pwd.getpwnam(user)
    if os.geteuid() != 0 or account.pw_uid == 0:
        return
    try:
        # a session of its own: what that user's interpreter loads gets no hold of root's terminal
        child = subprocess.Popen(
            command,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(user, account.pw_gid),
            cwd="/",
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        if error.errno == errno.EPERM:
            msg = f"this process may not become {user}, as whom {command[0]} was to be tried"
            raise NotPermitted(msg, hint="install the service where root may do that") from error
        raise NotPermitted(f"{user} cannot run {command[0]}: {error.strerror}", hint=_ELSEWHERE) from error
    reason = _reason(child)
    if reason is not None:
        raise NotPermitted(f"{user} cannot run {command[0]}: {reason}", hint=_ELSEWHERE)


def _reason(child: subprocess.Popen[str]) -> str | None:
    """The last line of what it says if it fails; None: it ended well."""
    with child:
        try:
            said = child.communicate(timeout=_SECONDS)[1]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return f"no end after {_SECONDS} s"
    lines = said.strip().splitlines() or [f"it ends with {child.returncode}"]
    return lines[-1] if child.returncode else None
