"""Keep the events of a job in its state directory, and read them: one line of JSON each, at least once.

Beside events.jsonl lies events.json, the facts that the last line goes by. Lines are flushed before it is
replaced, so what a crash cuts in between is written again, under a new id. audit.jsonl is something else: the
evidence of each deletion, which never ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ckptd.base import files
from ckptd.base.extents import write_all
from ckptd.base.owned_dirs import opened_ours
from ckptd.errors import CkptdError
from ckptd.observe.events import Event, events_between
from ckptd.observe.status import FormStatus, JobStatus, rfc3339

if TYPE_CHECKING:
    from pathlib import Path

EVENTS, OLD_EVENTS = "events.jsonl", "events.jsonl.1"
"""Files in a job's state directory; a full first one becomes the second."""
KNOWN = "events.json"
"""The last id, and the facts that the events so far go by."""
EVENTS_BYTES = 1 << 20
REAPPEARS_SECONDS = 60.0
"""A problem of before a start is not solved before so long: what lasts is found again by then."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class EventLog:
    """Write the events of one job; its daemon alone does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made_at_seconds = time.monotonic()
        self._known: JobStatus | None = None
        self._last_id = 0
        self._unwritten: list[Event] = []
        self._is_outdated = False
        """The facts on the disk are not the last ones."""

    def see(self, status: JobStatus) -> None:
        """Write what happened since the status before, over restarts too; the first time all that is there.

        Raises:
            OSError, CkptdError: it could not be written; the next call tries it again.
        """
        before = self._known or self._open()
        if time.monotonic() - self._made_at_seconds < REAPPEARS_SECONDS:
            status = _with_problems_of(before, status)
        self._unwritten += events_between(before, status)
        self._known = _facts(status)
        self._is_outdated |= bool(self._unwritten) or self._known.checkpoints != before.checkpoints
        if not self._is_outdated:
            return
        with opened_ours(self._folder) as folder:
            if self._unwritten:
                self._append(folder)
            document = {"id": self._last_id, "job": asdict(self._known)}
            files.write_atomic(folder, KNOWN, json.dumps(document).encode())
        self._is_outdated = False

    def unended(self) -> frozenset[tuple[str, str | None]]:
        """Return tag and completion of each checkpoint whose end is no event yet; as far as known now."""
        with contextlib.suppress(OSError, CkptdError):
            self._known = self._known or self._open()
        known = self._known.checkpoints if self._known is not None else ()
        return frozenset((one.tag, one.local.complete_at) for one in known if one.local.ended_at is None)

    def _open(self) -> JobStatus:
        """Return the facts that the events so far go by; without any, none.

        Raises:
            OSError, CkptdError: they cannot be read now, which does not mean that they are lost.
        """
        from pydantic import TypeAdapter

        rows = read_events(self._folder)
        last_ids = [row["id"] for row in rows]
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            with opened_ours(self._folder) as folder:
                document = json.loads(files.read_beneath(folder, KNOWN))
            self._last_id = max([*last_ids, int(document["id"])])
            return TypeAdapter(JobStatus).validate_python(document["job"])
        self._last_id = max(last_ids, default=0)
        if rows:
            text = f"{KNOWN} was lost: some events may be missing here; what is there now follows"
            gap = Event(kind="gap", job=str(rows[-1].get("job")), at=rfc3339(time.time()), text=text)
            self._unwritten.append(gap)
        return JobStatus(name="", job_id=None, save_dir="", state="ok")

    def _append(self, folder: int) -> None:
        """Write all that waits, then flush; an id is the time in ms, or one more than the last."""
        last_id, text = self._last_id, ""
        for event in self._unwritten:
            after, last_id = last_id, max(last_id + 1, int(time.time() * 1000))
            text += json.dumps({"id": last_id, "after": after, **asdict(event)}) + "\n"
        fd = os.open(EVENTS, _APPEND, 0o644, dir_fd=folder)
        try:
            # a line that a crash or a full disk cut short ends here, and spoils no other
            write_all(fd, (b"" if files.ends_whole(folder, EVENTS) else b"\n") + text.encode())
            os.fsync(fd)
            is_full = os.fstat(fd).st_size >= EVENTS_BYTES
        finally:
            os.close(fd)
        self._last_id = last_id
        self._unwritten.clear()
        if is_full:
            os.rename(EVENTS, OLD_EVENTS, src_dir_fd=folder, dst_dir_fd=folder)
        files.fsync_dir(folder)


def _with_problems_of(before: JobStatus, status: JobStatus) -> JobStatus:
    """Return the status with the problems of the one before that it lacks."""
    known = {(problem.code, problem.about) for problem in status.problems}
    left = (problem for problem in before.problems if (problem.code, problem.about) not in known)
    return replace(status, problems=(*status.problems, *left))


def _facts(status: JobStatus) -> JobStatus:
    """Return what `events_between` compares, without progress and ages."""
    checkpoints = tuple(
        replace(
            one,
            bytes=0,
            reason=None,
            keep=(),
            goes=None,
            next_step=None,
            remotes={
                remote: {form: FormStatus(state=its.state) for form, its in forms.items()}
                for remote, forms in one.remotes.items()
            },
        )
        for one in status.checkpoints
    )
    return JobStatus(
        name=status.name,
        job_id=status.job_id,
        save_dir=status.save_dir,
        state="ok",
        checkpoints=checkpoints,
        problems=status.problems,
    )


# --- reading ---------------------------------------------------------------------------------------------


def read_events(folder: Path, since: int | None = None) -> list[dict[str, Any]]:
    """Return the events that are kept, oldest first; with `since` those after that id.

    What lies between and is not kept any more is an event too, `gap`; so is that the events were lost and
    began anew since, perhaps with lower ids: then all that is kept follows. A line that is not whole yet is
    left out. Without a file there are none.

    Raises:
        OSError, CkptdError: what is kept cannot be read now; to leave it out would tell of a gap for ever.
    """
    rows: dict[int, dict[str, Any]] = {}
    # the new file first: what is moved in between is then read from where it went
    for name in (EVENTS, OLD_EVENTS):
        with contextlib.suppress(FileNotFoundError), opened_ours(folder) as fd:
            for line in files.read_beneath(fd, name).split(b"\n")[:-1]:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    rows[int(row["id"])] = row | {"after": int(row["after"])}
    found: list[dict[str, Any]] = []
    last = since
    began_anew = since is not None and since > max(rows, default=since)
    for at in sorted(rows):
        if since is not None and at <= since and not began_anew:
            continue
        after = rows[at]["after"]
        if last is not None and after != last and after not in rows:
            text = f"what happened after event {last} is not kept any more, up to event {after}"
            if after < last:
                text = f"events were lost after event {last} and began anew: some may be missing here"
            gap = Event(kind="gap", job=str(rows[at].get("job")), at=rows[at].get("at"), text=text)
            found.append({"id": after, "after": last, **asdict(gap)})
        found.append(rows[at])
        last = at
    return found


def version_of(folder: Path) -> tuple[int, int]:
    """Return size and inode of the file that grows, which differ once there is more; zeros where it is not
    there.
    """
    try:
        status = os.lstat(folder / EVENTS)
    except OSError:
        return 0, 0
    return status.st_size, status.st_ino
