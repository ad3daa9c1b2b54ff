"""`ckptd --help` and the help of each verb: short, plain, and of commands that ckptd takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.main import get_group

from ckptd import __version__, errors
from ckptd.cli.help import first_sentence, overview
from ckptd.cli.main import build_app, main
from ckptd.cli.verbs import EXIT_CODES, GROUPS, OLD_NAMES, VERBS
from tests.unit.cli.test_recipes import in_shell, refusal

COMMANDS = get_group(build_app()).commands
WORDS = {
    "ADDRESS", "COMPAT", "DIR", "DTYPE", "DURATION", "FILE", "FORM", "FORMAT", "ID", "LEVEL", "N", "N/T",
    "NAME", "NODE", "RANKS", "WHICH", "RUN", "SECONDS", "SETTING", "SIZE", "TAG", "USER",
}  # fmt: skip
"""What stands for an option's value."""


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Exit code and stdout."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def test_the_overview_has_every_verb_once_in_its_group() -> None:
    lines = overview().splitlines()
    assert max(map(len, lines)) <= 80
    assert set(VERBS) == set(COMMANDS)
    for title, verbs in GROUPS.items():
        at = lines.index(f"{title}:")
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(verbs)]] == list(verbs)
        assert lines[at + 1 + len(verbs)] == ""


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_line_is_the_first_sentence_of_its_help(verb: str) -> None:
    sentence, _ = first_sentence(COMMANDS[verb].help or "")
    assert sentence.removesuffix(".") == VERBS[verb].summary
    assert len(VERBS[verb].summary) <= 60


def test_the_exit_codes_are_those_of_the_errors() -> None:
    tree = [errors.CkptdError]
    for one in tree:
        tree += one.__subclasses__()
    assert {one.exit_code for one in tree} | {0, 4} == set(EXIT_CODES)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns; values in plain words; the same by every way to ask; examples that ckptd takes."""
    code, text = said(capsys, verb, "-h")
    assert code == 0
    assert said(capsys, verb, "--help") == said(capsys, "help", verb) == (0, text)
    assert max(map(len, text.splitlines())) <= 80
    assert "<" not in text
    options = text.partition("\nOptions:\n")[2].partition("\nExample")[0]
    named = [line.split("  ")[1].split() for line in options.splitlines() if line.startswith("  -")]
    assert {words[-1] for words in named if not words[-1].startswith("-")} <= WORDS
    examples = text.partition("Example")[2].partition("\n")[2].strip("\n")
    commands = list(in_shell(examples))
    assert 1 <= len(commands) <= 3
    assert [refused for words in commands if (refused := refusal(words))] == []


@pytest.mark.parametrize("arguments", [("-V",), ("--version",), ("version",)])
def test_the_version(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *arguments) == (0, f"ckptd {__version__}\n")


def test_the_overview_is_shown_by_every_way_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((("-h",), 0), (("--help",), 0), (("help",), 0), ((), 2)):
        assert said(capsys, *arguments) == (code, overview() + "\n")


def test_help_of_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "help", "nothing-of-that-name")[0] == 2


def test_the_overview_loads_no_library() -> None:
    """It is the first thing that people type."""
    code = (
        "import sys\nfrom ckptd.cli.main import main\n"
        "try: main(['-h'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'typer', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0


@pytest.mark.parametrize(("old", "now"), OLD_NAMES.items())
def test_an_old_name_is_todays_and_listed_nowhere(
    old: str, now: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Help, usage errors and exit codes are those of today's name, which stderr says."""
    assert said(capsys, old, "-h") == said(capsys, "help", old) == said(capsys, *now, "-h")
    assert f"  {old} " not in overview()
    for words in ((), ("a", "--nothing-of-that-name")):
        ends = []
        for name in ((old,), now):
            with pytest.raises(SystemExit) as ended:
                main([*name, *words, "--config-dir", "/nowhere"])
            ends.append((ended.value.code, capsys.readouterr().err))
        note = f"ckptd: `ckptd {old}` is `ckptd {' '.join(now)}` now; the next release takes that alone\n"
        assert ends[0] == (ends[1][0], note + ends[1][1])


@pytest.mark.parametrize(
    "words",
    [
        ("accept", "a"),
        ("service",),
        ("service", "start"),
        ("service", "uninstall", "--user", "--now"),
        ("service", "uninstall", "--user", "--config-dir", "/nowhere"),
    ],
)
def test_what_means_nothing_is_a_usage_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *words)[0] == 2
