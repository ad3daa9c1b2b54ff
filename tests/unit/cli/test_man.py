"""The manual page says what the commands say of themselves, in roff that renders."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from ckptd.cli.help import named_parameters
from ckptd.cli.man import main, page
from ckptd.cli.verbs import EXIT_CODES, VERBS
from tests.unit.cli.test_help import COMMANDS

REQUESTS = {".TH", ".SH", ".SS", ".TP", ".B", ".I", ".RS", ".RE", ".nf", ".fi"}


def test_it_names_every_command_option_and_exit_code() -> None:
    text = page().replace("\\-", "-")
    for verb in VERBS:
        assert f"\n.B ckptd {verb} " in text
        for spelt, _ in named_parameters(COMMANDS[verb].params):
            assert f"\n.I {spelt}\n" in text, (verb, spelt)
    for code in EXIT_CODES:
        assert f"\n.B {code}\n" in text


def test_it_is_roff() -> None:
    """ASCII, known requests, indents that end; and nothing that a renderer warns of."""
    lines = page().splitlines()
    assert page().isascii()
    assert {line.split()[0] for line in lines if line.startswith(".")} == REQUESTS
    assert lines.count(".RS") == lines.count(".RE")
    assert lines.count(".nf") == lines.count(".fi")
    assert not [line for line in lines if re.search(r"(?<!\\)'|`", line)]


def test_it_renders(tmp_path: Path) -> None:
    path = tmp_path / "man" / "ckptd.1"
    main([str(path)])
    for command in (["groff", "-man", "-ww", "-Tutf8"], ["mandoc", "-T", "lint", "-W", "error"]):
        if shutil.which(command[0]):
            done = subprocess.run(
                [*command, str(path)], capture_output=True, text=True, check=True, timeout=60
            )
            assert done.stderr == ""
            if command[0] == "groff":
                assert "restore" in done.stdout
    assert path.read_text() == page()
