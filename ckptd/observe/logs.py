"""Format the daemon's log: lines for people, or JSON with job, tag and action for the journal and log
collectors.

The caller knows which job a line is about, the logging module does not: a context variable carries it through
turns, results and workers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from ckptd.base.humanize import printable
from ckptd.base.owned_dirs import opened_ours
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Style = Literal["auto", "text", "json"]
STYLES: tuple[str, ...] = get_args(Style)
Action = Literal[
    "complete",
    "doubt",
    "upload",
    "commit",
    "convert",
    "hold",
    "delete-local",
    "delete-remote",
    "vanish",
    "repair",
]
"""`doubt`: a checkpoint here is incomplete, torn, suspect or refused."""

Args = ParamSpec("Args")
Result = TypeVar("Result")

LOG, OLD_LOG = "daemon.log", "daemon.log.1"
"""Files in a job's state directory; a full first one becomes the second."""
LOG_BYTES = 1 << 20
_EARLY_LINES = 200

_job: ContextVar[str] = ContextVar("ckptd_job", default="")
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


@contextlib.contextmanager
def job_lines(job: str) -> Iterator[None]:
    """Mark the lines that are written inside as that job's."""
    token = _job.set(job)
    try:
        yield
    finally:
        _job.reset(token)


def bind_job(call: Callable[Args, Result]) -> Callable[Args, Result]:
    """Bind the current job to a call that is made later or in another thread."""
    job = _job.get()

    @wraps(call)
    def later(*args: Args.args, **named: Args.kwargs) -> Result:
        with job_lines(job):
            return call(*args, **named)

    return later


def line_fields(action: Action, tag: str) -> Mapping[str, str]:
    """Make the `extra` of a line: what happens to which checkpoint."""
    return {"action": action, "tag": tag}


class TextLines(logging.Formatter):
    """Format log lines as text: time, level, part, job."""

    def __init__(self, style: str = "%(asctime)s %(levelname)s %(name)s%(job)s: %(message)s") -> None:
        super().__init__(style, defaults={"job": ""})

    def format(self, record: logging.LogRecord) -> str:
        """Format one line, and the trace where there is one."""
        job = _job.get()
        record.job = f" [{job}]" if job else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format the line; names in it come from outside, and a terminal must obey none of them (P15)."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Format the trace, whose last lines quote them, so that no line of it looks like one of the log."""
        return "\n".join(f"| {printable(line)}" for line in super().formatException(ei).split("\n"))


class JsonLines(logging.Formatter):
    """One object a line: at, level, logger, job?, tag?, action?, text, trace?.

    `has_priority`: with the level in front, as the journal takes it (sd-daemon(3)).
    """

    def __init__(self, *, has_priority: bool = False) -> None:
        super().__init__()
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        """Format one line without what is not known. ASCII: names that are no UTF-8 pass as escapes."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "job": _job.get(),
            "tag": getattr(record, "tag", ""),
            "action": getattr(record, "action", ""),
            "text": record.getMessage(),
            "trace": self.formatException(record.exc_info) if record.exc_info else "",
        }
        text = json.dumps({key: value for key, value in line.items() if value})
        if not self._has_priority:
            return text
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{text}"


class JobLogs(logging.Handler):
    """Write the lines of each job to a file in its state directory; a line of no job to all of them.

    At most two files of LOG_BYTES a job. A line that cannot be written is on stderr all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(TextLines())
        self._places: dict[str, Path] = {}
        self._early: dict[str, deque[str]] = {}
        """Lines of jobs that have no state directory yet, and under "" of none."""

    def begin(self, job: str, state_dir: Path) -> None:
        """Write the job's lines there from now on, and those that came before."""
        with self.lock or contextlib.nullcontext():
            self._places[job] = state_dir
            for text in [*self._early.get("", ()), *self._early.pop(job, ())]:
                _append(state_dir, text)

    def end(self, job: str) -> None:
        """Write nothing of the job from now on."""
        with self.lock or contextlib.nullcontext():
            self._places.pop(job, None)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        job, text = _job.get(), self.format(record)
        if job not in self._places:
            self._early.setdefault(job, deque(maxlen=_EARLY_LINES)).append(text)
        for place in [self._places[job]] if job in self._places else () if job else self._places.values():
            _append(place, text)


def _append(state_dir: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError, CkptdError), opened_ours(state_dir) as folder:
        fd = os.open(LOG, flags, 0o644, dir_fd=folder)
        try:
            os.write(fd, f"{text}\n".encode("utf-8", "replace"))
            is_full = os.fstat(fd).st_size >= LOG_BYTES
        finally:
            os.close(fd)
        if is_full:
            os.rename(LOG, OLD_LOG, src_dir_fd=folder, dst_dir_fd=folder)


_kept = JobLogs()


def begin_file(job: str, state_dir: Path) -> None:
    """Keep the job's lines in its state directory, where the daemon's stderr is not the journal."""
    if _kept in logging.getLogger().handlers:
        _kept.begin(job, state_dir)


def end_file(job: str) -> None:
    """Keep no more lines of the job."""
    _kept.end(job)


def configure(environ: Mapping[str, str], level: str, style: Style) -> None:
    """Log to stderr from now on; `auto`: JSON where stderr is the journal's, else text.

    What the journal does not keep is kept in a file of each job (`begin_file`).
    """
    is_journal = _is_journal(environ)
    handler = logging.StreamHandler(sys.stderr)
    is_json = style == "json" or (style == "auto" and is_journal)
    handler.setFormatter(JsonLines(has_priority=is_journal) if is_json else TextLines())
    logging.basicConfig(handlers=[handler] if is_journal else [handler, _kept], level=level)


def configure_plainly(level: str) -> None:
    """Log to stderr as a verb speaks that works like the daemon for a moment."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines("ckptd: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


def _is_journal(environ: Mapping[str, str]) -> bool:
    """Tell whether stderr is the journal's socket: $JOURNAL_STREAM alone does not say so."""
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
    return False
