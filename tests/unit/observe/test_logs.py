"""The daemon's log: which job, tag and action a line is of, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.resources.workers import Workers
from ckptd.observe.logs import JsonLines, TextLines, job_lines, line_fields

log = logging.getLogger("ckptd.test_logs")


@pytest.fixture
def written() -> Iterator[Callable[[logging.Formatter], io.StringIO]]:
    """What the logger writes through a formatter."""
    handlers: list[logging.Handler] = []

    def through(formatter: logging.Formatter) -> io.StringIO:
        out = io.StringIO()
        handlers.append(logging.StreamHandler(out))
        handlers[-1].setFormatter(formatter)
        log.addHandler(handlers[-1])
        return out

    log.setLevel(logging.DEBUG)
    yield through
    for handler in handlers:
        log.removeHandler(handler)


def lines_of(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_names_job_tag_and_action(written: Callable[[logging.Formatter], io.StringIO]) -> None:
    text, data = written(TextLines()), written(JsonLines())
    with job_lines("llama"):
        fields = line_fields("delete-local", "global_step1")
        log.info("%s deleted here: %s", "global_step1", "two newer", extra=fields)
        with job_lines("qwen"):
            log.warning("a line\nof two, and €")
    log.error("of no job")
    first, second, third = lines_of(data)
    assert first.pop("at").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "ckptd.test_logs",
        "job": "llama",
        "tag": "global_step1",
        "action": "delete-local",
        "text": "global_step1 deleted here: two newer",
    }
    assert (second["job"], second["text"]) == ("qwen", "a line\nof two, and €")
    assert "job" not in third
    assert data.getvalue().isascii()
    no_text = logging.makeLogRecord({"msg": "\udcff", "name": "x"})
    assert "\\udcff" in JsonLines().format(no_text)
    shown = text.getvalue().splitlines()
    assert shown[0].endswith("INFO ckptd.test_logs [llama]: global_step1 deleted here: two newer")
    assert shown[-1].endswith("ERROR ckptd.test_logs: of no job")


def test_a_worker_speaks_of_the_job_that_asked(
    written: Callable[[logging.Formatter], io.StringIO],
) -> None:
    done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    workers, out = Workers(done.put, threads=1), written(JsonLines())

    def work() -> None:
        log.info("at work")

    for name in ("one", "two"):
        with job_lines(name):
            workers.submit("work", work, lambda _: None, lambda _: None)
        done.get(timeout=60)()
    workers.stop()
    assert [line["job"] for line in lines_of(out)] == ["one", "two"]


def test_a_trace_is_in_the_line_and_the_journal_gets_its_priority(
    written: Callable[[logging.Formatter], io.StringIO],
) -> None:
    out = written(JsonLines(has_priority=True))
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    log.debug("small")
    first, second = out.getvalue().splitlines()
    assert first.startswith("<3>{")
    assert "ValueError: why" in json.loads(first[3:])["trace"]
    assert second.startswith("<7>{")


_BEGIN = (
    "import logging, os; from ckptd.observe import logs; "
    "logs.configure(os.environ, 'INFO', os.environ['STYLE']); logging.getLogger('ckptd').info('here')"
)


@pytest.mark.parametrize(
    ("style", "is_journal", "begins"),
    [("auto", True, b'<6>{"at"'), ("auto", False, b"20"), ("json", False, b'{"at"'), ("text", True, b"20")],
)
def test_json_goes_to_the_journal(tmp_path: Path, style: str, is_journal: bool, begins: bytes) -> None:
    """JOURNAL_STREAM is inherited by whatever a service starts: it counts where stderr is that file."""
    with (tmp_path / "err").open("wb") as err:
        status = os.fstat(err.fileno())
        inode = status.st_ino if is_journal else status.st_ino + 1
        journal = {"JOURNAL_STREAM": f"{status.st_dev}:{inode}", "STYLE": style}
        subprocess.run(
            [sys.executable, "-c", _BEGIN], stderr=err, env=os.environ | journal, check=True, timeout=60
        )
    assert (tmp_path / "err").read_bytes().startswith(begins)
