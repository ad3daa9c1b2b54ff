"""What `ckptd status` says in every state, word by word; its schema; --watch, --live, NO_COLOR (P17, H33)."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.text import Text

from ckptd.cli.status.detail import story_as_written, story_of
from ckptd.cli.status.watch import watch_lines, watch_screen
from ckptd.errors import NotFoundError
from ckptd.maintenance.status.verdict import Life, life_of
from ckptd.maintenance.status.words import headline, start_it
from ckptd.observe.schema import schema_text
from ckptd.observe.status import DiskStatus, Status, rfc3339
from tests.support import status_gallery as g
from tests.support.status_schema import problems_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "status.txt"


def test_every_answer_is_as_it_was_judged_to_be_right() -> None:
    """After a change of words: read the difference, then write the file anew (see the gallery's head)."""
    assert g.gallery() == GOLDEN.read_text()


def test_the_quick_start_shows_what_is_shown() -> None:
    screen, _, _ = g.shown(g.of_the_readme()).rpartition("[exit ")
    assert screen in (ROOT / "docs" / "quickstart.md").read_text()


@pytest.mark.parametrize("name", list(g.documents()))
def test_no_line_is_long_and_no_first_line_calls_safe_what_is_not(name: str) -> None:
    """But for what is to be typed, which nobody breaks; no line ends with blanks."""
    document = g.documents()[name]
    lines = g.shown(document).splitlines()
    assert [line for line in lines if len(line) > 80 and "→" not in line] == []
    assert [line for line in lines if line != line.rstrip()] == []
    is_safe = "● SAFE  " in lines[0]
    one = document.jobs[0]
    assert not is_safe or (one.safe is not None and not one.steps_at_risk and document.daemon.alive)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_checkpoint_takes_one_line_however_wide_the_terminal_is(width: int) -> None:
    """Its tag is whole, and the state in each remote that is shown stands behind it."""
    document = g.documents()["behind, many remotes"]
    lines = g.shown(document, width=width).splitlines()
    (row,) = (line for line in lines if line.startswith("  global_step4500"))
    (title,) = (line for line in lines if line.startswith("  tag "))
    assert len(row) <= width
    names = title.split()
    assert row.count("62 %") == sum(name in names for name in ("nas", "s3", "backup", "tape")) + sum(
        name.startswith("archive") for name in names
    )


@pytest.mark.parametrize("free_bytes", [3000, 1000])
def test_a_daemon_that_may_find_no_room_to_publish_is_not_to_be_ended_at_once(free_bytes: int) -> None:
    """On a full disk it lives and cannot say so."""
    now = time.time()
    job = g.job(save_dir="/nvme/run", disk=DiskStatus(free_bytes=free_bytes, next_save_bytes=2000))
    daemon = g.daemon(start_command="ckptd run")
    life = life_of(Status(generated_at=rfc3339(now - 85), daemon=daemon, jobs=(job,)), now)
    assert life.reason.endswith("has not published for 85 s")
    first = (
        f"end process {os.getpid()}, then start it: ckptd run; until then nothing of /nvme/run is uploaded"
    )
    short = "if the disk of /nvme/run is full, free space: the daemon goes on by itself; else "
    assert start_it(job, life) == (short if free_bytes < 2000 else "") + first


# --- the schema ----------------------------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_models() -> None:
    assert (ROOT / "docs" / "status.schema.json").read_text() == schema_text()


@pytest.mark.parametrize("name", list(g.documents()))
def test_what_the_gallery_writes_validates(name: str) -> None:
    document = g.plain(g.documents()[name])
    assert problems_of(document) == []
    document["jobs"][0]["state"] = "fine"
    assert "'fine' is not one of" in problems_of(document)[0]
    document["jobs"][0] |= {"state": "ok", "mood": "good"}
    assert "'mood' was unexpected" in problems_of(document)[0]


# --- one checkpoint's story ----------------------------------------------------------------------------


def test_a_checkpoint_tells_its_whole_story() -> None:
    document = g.documents()["behind, the remote is away"]
    data = story_as_written(g.plain(document)["jobs"], "global_step4000")
    assert data["held"]["s3"][0]["verdict"] == "keep"
    jobs = g.read(document).jobs
    day, after = "2026-03-01", "after it was"
    assert story_of(jobs, "global_step4000") == [
        "global_step4000: step 4000, 12.0 GB, committed",
        f"  here: seen {day} 11:49:40Z, complete {day} 11:50:40Z (60 s {after} seen), universal form ready",
        f"  s3: zero committed {day} 11:57:00Z (6 min {after} complete), generation 1, COMMIT 3fa9c2d17b0e",
        "  s3: universal waiting",
        "  universal: masters are the model's weights in 290 tensors, 6,738,415,616 elements",
        "  kept here: newest",
        "  in s3: generation 1, zero: keep, one of the newest 10",
    ]
    assert "zero uploading 7.5 GB of 12.0 GB, 4 min to go" in story_of(jobs, "global_step4500")[2]
    with pytest.raises(NotFoundError, match="global_step9"):
        story_of(jobs, "global_step9")
    with pytest.raises(NotFoundError, match="global_step9"):
        story_as_written(g.plain(document)["jobs"], "global_step9")


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    publish(tmp_path, "behind")
    return tmp_path


def publish(folder: Path, name: str, **of_daemon: Any) -> None:
    """A document of the gallery, as of now."""
    document = g.plain(g.documents()[name])
    document["generated_at"] = rfc3339(time.time())
    document["daemon"] |= of_daemon
    for job in document["jobs"]:
        job["as_of"] = document["generated_at"]
    (folder / "new").write_text(json.dumps(document))
    (folder / "new").rename(folder / "status.json")


def ckptd(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    return subprocess.run(
        [sys.executable, "-m", "ckptd", "status", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=clean | environment,
        timeout=200,
    )


def test_live_answers_a_probe(state_dir: Path, tmp_path: Path) -> None:
    """0 while turns go on, whatever becomes of the jobs; else 1 and why."""
    publish(state_dir, "invalid job")
    done = ckptd("--live", "--state-dir", state_dir)
    assert (done.returncode, done.stdout) == (0, f"live: process {os.getpid()}\n")
    publish(state_dir, "safe", pid=g.NO_PROCESS)
    done = ckptd("--live", "--state-dir", state_dir)
    assert (done.returncode, "is gone" in done.stdout) == (1, True)
    publish(state_dir, "safe", alive=False)
    assert "was stopped" in ckptd("--live", "--state-dir", state_dir).stdout
    (state_dir / "status.json").unlink()
    done = ckptd("--live", "--state-dir", state_dir)
    assert (done.returncode, "not live: no daemon has published" in done.stdout) == (1, True)


def test_watch_without_a_terminal_is_a_line_per_interval(state_dir: Path) -> None:
    """For a log; SIGINT ends it without a word, with the code of what was seen last: nothing was read."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ckptd",
            "status",
            "--watch",
            "--interval",
            "0.2",
            "--state-dir",
            str(state_dir),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    (state_dir / "status.json").unlink()
    while "no status: " not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert (process.returncode, said) == (1, "")
    assert re.match(r"\d{4}-\S+Z llama  BEHIND  step 4000 ", lines[0])


def test_a_closed_pipe_ends_a_watch(state_dir: Path) -> None:
    words = f"'{sys.executable}' -m ckptd status --watch --interval 0.1 --state-dir '{state_dir}' | head -n 1"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, timeout=200)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_the_last_good_screen_stays() -> None:
    """What cannot be read for a while is said below what was read last."""
    answers: Iterator[Any] = iter([Text("all is well"), NotFoundError("status.json is gone")])

    def look() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    out = io.StringIO()
    watch_screen(look, 0.01, Console(file=out, force_terminal=True, width=60, no_color=True), rounds=2)
    last = out.getvalue().rpartition("all is well")[2]
    assert re.search(r"not read for 0 s: status\.json is gone", last)


def test_lines_are_printed_once_per_round(capsys: pytest.CaptureFixture[str]) -> None:
    watch_lines(lambda: ["a  SAFE", "b  BEHIND"], 0.0, rounds=2)
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "a  SAFE",
        "b  BEHIND",
    ] * 2


def on_a_terminal(*words: object, **environment: str) -> str:
    """What the command writes to a terminal of 150 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd", "status", *map(str, words)],
        stdout=theirs,
        stderr=theirs,
        env=clean | {"TERM": "xterm-256color"} | environment,
    )
    os.close(theirs)
    read = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while chunk := os.read(ours, 65536):
            read += chunk
    os.close(ours)
    process.wait(200)
    return read.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def test_colours_only_on_a_terminal_that_wants_them(state_dir: Path) -> None:
    where = ("--state-dir", state_dir)
    assert COLOUR.search(on_a_terminal(*where))
    assert not COLOUR.search(on_a_terminal(*where, NO_COLOR="1"))
    assert "\x1b" not in ckptd(*where).stdout


def test_a_verdict_has_its_colour(tmp_path: Path) -> None:
    """What is safe is green, what is behind yellow, what is neither red; a wait has none."""
    for name, style in (("safe", "1;32"), ("behind", "1;33"), ("nothing committed yet", "1;31")):
        publish(tmp_path, name)
        assert re.search(rf"\x1b\[{style}m● [A-Z ]+\x1b\[0m\w", on_a_terminal("--state-dir", tmp_path))
    publish(tmp_path, "waiting for the first checkpoint")
    assert "\x1b[1m● WAITING" in on_a_terminal("--state-dir", tmp_path)


def test_without_utf_8_signs_are_ascii(state_dir: Path) -> None:
    """By the encoding of stdout, and on a terminal that is called dumb; as wide as COLUMNS says."""
    plain = ckptd("--state-dir", state_dir, PYTHONIOENCODING="ascii", COLUMNS="100").stdout
    assert "llama  * BEHIND  step 4000 on s3, 3 min ago - next: global_step4500 62 %, 4 min left" in plain
    assert "+ zero  o universal" in plain
    assert "######=" in plain
    assert plain.isascii()
    assert on_a_terminal("--state-dir", state_dir, TERM="dumb").isascii()
    assert "● BEHIND" in ckptd("--state-dir", state_dir).stdout


def test_help_explains_the_signs() -> None:
    said = ckptd("--help", COLUMNS="100").stdout
    assert [sign for sign in "✓○✗–█!~·" if sign not in said] == []


def test_a_drain_that_is_over_is_told_no_more() -> None:
    """Once its time is up, or as soon as something was saved after it: then it says nothing."""
    (job,) = g.read(g.documents()["drained"]).jobs
    assert "drained: all" in headline(job, Life(), g.NOW)
    assert "drained" not in headline(job, Life(), g.NOW + 600)
    assert "drained" not in headline(replace(job, steps_at_risk=500), Life(), g.NOW)


def test_status_of_a_save_dir_needs_no_configuration(state_dir: Path) -> None:
    """Neither pydantic's models of job files nor the daemon are loaded for the commonest call."""
    place = state_dir / "run" / "_ckptd" / "state"
    place.mkdir(parents=True)
    publish(place, "safe")
    document = json.loads((place / "status.json").read_text())
    document["jobs"][0]["save_dir"] = str(state_dir / "run")
    (place / "status.json").write_text(json.dumps(document))
    code = (
        "import sys\nfrom ckptd.cli.main import main\n"
        f"try:\n    main(['status', {str(state_dir / 'run')!r}])\n"
        "except SystemExit as e:\n    assert e.code == 0\n"
        "parts = ('ckptd.config', 'ckptd.daemon', 'ckptd.core')\n"
        "print(sorted(m for m in sys.modules if m.startswith(parts)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_how_long_the_newest_save_is_exposed_is_said_to_the_second() -> None:
    """And goes on while the document ages."""
    waiting = g.behind(exposed_seconds=12.0)
    assert "500 steps, 9 min of training at risk (saved 12 s ago)" in headline(waiting, Life(), g.NOW)
    assert "(saved 17 s ago)" in headline(waiting, Life(), g.NOW + 5)
    assert "saved" not in headline(g.behind(), Life(), g.NOW)
