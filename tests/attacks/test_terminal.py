"""Names and texts that somebody else chose, on a real terminal: shown as they are, and nothing obeys (P15).

Markup of rich, emoji codes, escape sequences, line breaks, marks that turn the direction: in tags, files,
nodes, paths and reasons, through every verb that prints any.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

from ckptd.cli.main import main
from ckptd.cli.output import cell, print_answer, print_line, print_note
from ckptd.cli.screen import Screen
from ckptd.cli.status.command import _print, screen
from ckptd.cli.status.watch import watch_lines, watch_screen
from ckptd.observe.logs import TextLines
from ckptd.observe.status_reader import status_of
from tests.support import status_gallery as gallery
from tests.support.restore_scene import OPTIM, RestoreScene, scene

__all__ = ["scene"]

PLAIN = (
    "[link=http:evil.example]global_step9",
    "[blink]x5",
    "step[best]5",
    "a[/x]b",
    "[/]",
    "step:boom:7",
    "back\\[red]slash",
)
"""What a person must be able to read and to type."""
OBEYED = (
    "esc\x1b[2Jx",
    "osc\x1b]8;;http:evil\x07x",
    "c1\x9b2Jx",
    "line\nckptd: FAKE",
    "back\rFAKE",
    "bidi\u202e5\u2066x",
    "narrow\u200bx",
    "half\ud800x",
)
"""What a terminal would obey, or a reader would be misled by."""
CLI = Path(__file__).resolve().parents[2] / "ckptd" / "cli"
_SGR = re.compile(r"\x1b\[(?:[0-4]|2[2-4]|[39][0-7]|[34]9|[34]8;5;\d+|[34]8;2;\d+;\d+;\d+|;)*m")
_MOVES = re.compile(r"\x1b\[(?:\?25[lh]|2K|\d*A)")

Run = Callable[[Callable[[], Any]], str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Calls with stdout and stderr on a terminal of 250 columns: what was written to it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    # rich asks the terminal of this process, which is another
    monkeypatch.setenv("COLUMNS", "250")

    def run(call: Callable[[], Any]) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 90, 250, 0, 0))
        read: list[bytes] = []

        def listen() -> None:
            with contextlib.suppress(OSError):  # EIO: the other side is closed
                while chunk := os.read(ours, 65536):
                    read.append(chunk)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            with (
                os.fdopen(theirs, "w", encoding="utf-8") as out,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(out),
                contextlib.suppress(SystemExit),
            ):
                call()
        finally:
            listener.join(60)
            os.close(ours)
        return b"".join(read).decode()

    yield run


def judged(written: str, *, shows: tuple[str, ...] = ()) -> str:
    """What stands on the screen; nothing in it is obeyed but colours and rich's own moves."""
    left = _MOVES.sub("", _SGR.sub("", written)).replace("\r\n", "\n").replace("\r", "")
    strange = sorted({c for c in left if not c.isprintable() and c != "\n"})
    assert strange == [], (strange, left)
    assert not re.search(r"^(ckptd: )?FAKE", left, re.MULTILINE), left
    for name in shows:
        assert name in left, (name, left)
    return left


def verb(*words: object) -> Callable[[], None]:
    """`ckptd` with these arguments."""
    return lambda: main([str(word) for word in words])


def test_every_way_to_say_something(terminal: Run) -> None:
    """Lines, answers, cells, whatever is given to the console, and the daemon's log."""
    handler: logging.StreamHandler[Any] = logging.StreamHandler(io.StringIO())
    handler.setFormatter(TextLines())

    def log(text: str) -> None:
        handler.stream = sys.stderr
        try:
            raise ValueError(text)
        except ValueError:
            handler.emit(logging.LogRecord("x", 40, "", 0, "%s", (text,), sys.exc_info()))

    def print_raw(text: str) -> None:
        Screen().print(text.replace("\n", " "))

    def print_cell(text: str) -> None:
        Screen().print(cell(text))

    for way in (print_line, print_note, print_answer, log, print_cell, print_raw):
        for text in (*PLAIN, *OBEYED):
            judged(terminal(partial(way, text)), shows=(text,) if text in PLAIN else ())


def test_a_script_gets_the_path_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer("/nvme/[best]\x9b5")
    assert capsys.readouterr().out == "/nvme/[best]\x9b5\n"


@pytest.mark.parametrize("evil", [*PLAIN, *OBEYED])
def test_status_of_a_run_whose_names_are_hostile(evil: str, terminal: Run) -> None:
    """Every text of the document; tables, one checkpoint's story, --retention, --watch."""
    documents = gallery.documents()
    keys = {"tag", "name", "reason", "next_step", "text", "url", "save_dir", "by", "notify_error", "goes"}
    several = {"keep", "why", "notes", "opt_outs", "missing", "late"}

    def spoilt(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            is_remotes = key == "remotes"
            return {f"{k}{evil}" if is_remotes else k: spoilt(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [f"{v}{evil}" if key in several else spoilt(v) for v in value]
        return f"{value or ''}{evil}" if key in keys else value

    shows = (evil,) if evil in PLAIN else ()
    for title in ("a person is needed", "daemon dead", "draining, and too slow", "nobody was told"):
        document = status_of(spoilt(gallery.plain(documents[title])))
        look = partial(screen, document, gallery.NOW, retention=False)
        name = document.jobs[0].name
        judged(terminal(partial(_print, [document], None, False)), shows=shows)
        judged(terminal(partial(_print, [document], None, True)), shows=shows)
        judged(terminal(partial(watch, look)), shows=shows)
        judged(terminal(partial(watch_lines, [name].copy, 0.0, rounds=1)))
        for checkpoint in document.jobs[0].checkpoints if evil in PLAIN else ():
            judged(terminal(partial(_print, [document], checkpoint.tag, False)), shows=(checkpoint.tag,))


def watch(look: Callable[[], list[Any]]) -> None:
    """One round of --watch."""
    watch_screen(lambda: Group(*look()), 0.0, Screen(), rounds=1)


LOCAL = ("[blink]x5", "step[best]6", *(f"{name}7" for name in OBEYED if "\ud800" not in name))
REMOTE = ("step[best]6", "[link=http:evil.example]global_step9", "c1\x9b2J\u202e:boom:10")


def test_every_verb_that_looks_at_a_folder_or_a_remote(
    scene: RestoreScene, terminal: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags that a trainer chose, here and there; files beside them; a job whose own path has brackets."""
    monkeypatch.setenv("CKPTD_MIN_FREE", "0%")
    for step, tag in enumerate(REMOTE, start=6):
        scene.save(step, tag)
        (scene.save_dir / tag / "note[best]\u202e.txt").write_text("x")
        scene.commit(tag, step)
    shown, missing = ("step[best]6", "[link=http:evil.example]global_step9"), "[blink][/x]"
    nas, to = scene.nas, scene.dir / "[red]to"
    scene.dir.mkdir()
    for words in (
        ("list", nas),
        ("verify", nas, "--read-data"),
        ("status", nas),
        ("gc", nas, "--dry-run"),
        ("restore", nas, "--to", to, "--dry-run"),
        ("restore", nas, REMOTE[0], "--to", to),
        ("restore", nas, missing, "--to", to),
    ):
        lists = words[0] in ("list", "verify")
        judged(terminal(verb(*words)), shows=shown if lists else ())
    assert (to / REMOTE[0] / OPTIM.format(0)).exists()
    (scene.save_dir / REMOTE[0]).rename(scene.save_dir / LOCAL[0])
    for tag in LOCAL[1:]:
        (scene.save_dir / tag).mkdir(exist_ok=True)
        (scene.save_dir / tag / "mp_rank_00_model_states.pt").write_bytes(b"no archive")
    judged(terminal(verb("inspect", scene.save_dir)), shows=LOCAL[:2])
    judged(terminal(verb("inspect", scene.save_dir / LOCAL[0])), shows=("note[best]?.txt",))
    judged(terminal(verb("resume", scene.save_dir, nas, "--dry-run")))
    judged(terminal(verb("convert", scene.save_dir / LOCAL[0], to, "--dry-run")))
    job = scene.root / "[blink]job.toml"
    job.write_text(f'output_dir = "x[/x]"\nsave_dir = "{scene.save_dir}"\n')
    judged(terminal(verb("check", job, "--no-probe")), shows=("[blink]job.toml",))


def test_no_verb_speaks_past_these() -> None:
    """A `print` in the command line is of a constant, of JSON, or of what was made printable; one console."""
    wrong = []
    for path in sorted(CLI.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
            if "escape" in names or (
                "Console" in names and path.name != "screen.py" and not _is_hint(tree, node)
            ):
                wrong.append(f"{path.name} imports {names}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                text = ast.unparse(node.args[0])
                if not re.search(r"^'[^{]*'$|json\.dumps|printable|__version__|job_template", text):
                    wrong.append(f"{path.name}:{node.lineno} print({text})")
    assert wrong == []


def _is_hint(tree: ast.Module, node: ast.AST) -> bool:
    """Imported for a type checker alone."""
    blocks = [b for b in tree.body if isinstance(b, ast.If) and ast.unparse(b.test) == "TYPE_CHECKING"]
    return any(node is inner for block in blocks for inner in ast.walk(block))
