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
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from ckptd.base.humanize import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Style = Literal["auto", "text", "json"]
STYLES: tuple[str, ...] = get_args(Style)
Action = Literal["complete", "upload", "commit", "convert", "hold", "delete-local", "delete-remote", "vanish"]

Args = ParamSpec("Args")
Result = TypeVar("Result")

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
    """For people, on a terminal: time, level, part, job."""

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


def configure(environ: Mapping[str, str], level: str, style: Style) -> None:
    """Log to stderr from now on; `auto`: JSON where stderr is the journal's, else text."""
    is_journal = _is_journal(environ)
    handler = logging.StreamHandler(sys.stderr)
    is_json = style == "json" or (style == "auto" and is_journal)
    handler.setFormatter(JsonLines(has_priority=is_journal) if is_json else TextLines())
    logging.basicConfig(handlers=[handler], level=level)


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
