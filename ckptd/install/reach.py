"""Whether the user who trains can run what the service is to start: systemd says it late, and not in words.

An interpreter below /root, or in another user's home, is run by nobody else. Worse: where its own library
cannot be reached the loader takes the system's of another release, and ssl fails once a store is asked.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from typing import TYPE_CHECKING

from ckptd.errors import NotPermitted

if TYPE_CHECKING:
    from collections.abc import Sequence

IMPORTS = ("-c", "import ssl, ckptd")
"""What a daemon needs of its interpreter, and an interpreter of another release lacks."""
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
        done = subprocess.run(
            command,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(user, account.pw_gid),
            cwd="/",
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no end after {_SECONDS} s"
        raise NotPermitted(f"{user} cannot run {command[0]}: {reason}", hint=_ELSEWHERE) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1]
        raise NotPermitted(f"{user} cannot run {command[0]}: {last}", hint=_ELSEWHERE)
