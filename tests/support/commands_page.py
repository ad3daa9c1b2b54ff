"""docs/commands.md, made from the command line; `python -m tests.support.commands_page` writes it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from typer.main import get_group

from ckptd.cli.main import build_app
from ckptd.cli.verbs import EXIT_CODES, GROUPS, OLD_NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
HEAD = """# Commands

<!-- Made from the command line by `python -m tests.support.commands_page`; a test compares. -->

JOB is a job file, a job's name (also that of a running daemon), its save_dir or the URL of its
remote. URL is a remote: a directory, `s3://bucket/prefix`, `sftp://user@host/path`. TAG is the
name of a checkpoint, such as `global_step4000`. `ckptd help COMMAND` prints what this page says of
a command. The documents that `--json` prints are in the [contract](contract.md#commands).
"""
EXITS = """## Exit codes

All commands use the same codes. A launch script trains on 0 and 4 of `ckptd resume`, and on nothing
else.
"""
TODO: dict[int, str] = {
    0: "nothing",
    1: "`ckptd status` names the problem and the command; see [problems](problems.md)",
    2: "`ckptd help COMMAND`",
    3: "wait, or raise the deadline; nothing is committed yet, or uploads are not finished",
    4: "of `resume` and `restore`: train from the start",
    65: "read the lines above; [recovery](recovery.md) says how to repair",
    66: "check the name: `ckptd status` lists jobs, `ckptd list JOB` lists checkpoints",
    69: "mount it, or bring the server back; never train from scratch instead",
    73: "move the target away, or choose another one",
    74: "free space, or look at the disk",
    75: "stop the other daemon, or let it work",
    77: "run ckptd as the user who trains; check credentials",
    78: "correct the key that is named",
}
"""What a person does about each exit code."""


def page() -> str:
    """The whole page."""
    commands = get_group(build_app()).commands
    parts = [HEAD]
    for title, verbs in GROUPS.items():
        rows = "\n".join(
            f"| [`{name}`](#{name}) | {verb.summary} | `{_first_example(commands[name])}` |"
            for name, verb in verbs.items()
        )
        parts.append(f"## {title}\n\n| command | what it does | example |\n|---|---|---|\n{rows}\n")
    codes = "\n".join(f"| {code} | {meaning} | {TODO[code]} |" for code, meaning in EXIT_CODES.items())
    parts.append(f"{EXITS}\n| code | meaning | what to do |\n|---|---|---|\n{codes}\n")
    parts.append("## Each command\n")
    parts += [f"### {name}\n\n```text\n{_help(name, commands[name])}\n```\n" for name in commands]
    old = "\n".join(f"| `{name}` | `ckptd {' '.join(today)}` |" for name, today in OLD_NAMES.items())
    parts.append(
        f"## Old names\n\nTaken in this release, not in the next one.\n\n| 0.1 | now |\n|---|---|\n{old}\n"
    )
    return "\n".join(parts)


def _first_example(command: Any) -> str:
    return str(command.epilog).split("\n", maxsplit=1)[0].replace("|", "\\|")


def _help(name: str, command: Any) -> str:
    """What `ckptd help NAME` prints on a terminal of 96 columns."""
    names = ["-h", "--help"]
    # Typer keeps the classes of commands and contexts to itself
    context = command.context_class(command, info_name=f"ckptd {name}", help_option_names=names)
    with mock.patch.dict(os.environ, {"COLUMNS": "96"}):
        return str(command.get_help(context)).rstrip()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} written", file=sys.stderr)
