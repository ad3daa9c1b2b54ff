"""Every command line of ckptd in examples/, config/, docs/ and the README is one that ckptd takes.

A launch script that names an option which is not there ends where it is needed most: in a restart at night.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.main import get_group

from ckptd.cli.main import build_app
from ckptd.config.quantities import parse_duration
from tests.support.real import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERBS = get_group(build_app()).commands
SCRIPTS = sorted(
    path
    for path in (REPOSITORY / "examples").rglob("*")
    if path.suffix in (".sh", ".sbatch", ".yaml") and "frameworks" not in path.parts
)
"""Those of examples/frameworks know nothing of ckptd (tests/e2e/test_frameworks.py)."""
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TEXTS = [
    *PAGES,
    *SCRIPTS,
    *sorted(path for path in (REPOSITORY / "config").rglob("*") if path.suffix in (".toml", ".yaml", ".yml")),
]
DURATIONS = ("drain", "deadline", "timeout")
_VALUE = re.compile(r"\$\(\(.*?\)\)|\$\w+|\$\{\w+.*?\}|\b[A-Z][A-Z_]*\b")
"""What a script or a reader fills in."""


def name_of(path: Path) -> str:
    """Below the repository."""
    return str(path.relative_to(REPOSITORY))


def in_shell(text: str) -> Iterator[list[str]]:
    """Words after `ckptd` of each command of a shell text; a quoted sentence is one word, and no command."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for at, word in enumerate(words):
            if word == "ckptd" and words[at - 1 : at] != ["-c"]:  # a container's name
                rest = words[at + 1 :]
                ends = [n for n, one in enumerate(rest) if set(one) <= set("();<>|&")]
                yield rest[: ends[0] if ends else None]


def in_yaml(node: Any) -> Iterator[list[str]]:
    """Likewise of a manifest: lists of words (an image's entry point is ckptd), and texts for a shell."""
    if isinstance(node, dict):
        for value in node.values():
            yield from in_yaml(value)
    elif isinstance(node, list) and node and node[0] in ("ckptd", *VERBS):
        yield node[node[0] == "ckptd" :]
    elif isinstance(node, list):
        for value in node:
            yield from in_yaml(value)
    elif isinstance(node, str):
        yield from in_shell("\n".join(line for line in node.splitlines() if "ckptd " in line))


def commands_of(path: Path) -> list[list[str]]:
    """Of a script, a manifest, or the blocks of a page that are for a shell."""
    text = path.read_text()
    if path.suffix == ".yaml":
        return list(in_yaml(list(yaml.safe_load_all(text))))
    if path.suffix == ".md":
        blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = "".join(blocks).replace("\\\n", " ").splitlines()
        text = "\n".join(line.removeprefix("$ ") for line in lines if re.search(r"(^|\s)ckptd [a-z]", line))
    return list(in_shell(text))


def refusal(words: list[str]) -> str:
    """What ckptd says to a command line before it looks at anything; empty: it takes it."""
    verb, *given = (_VALUE.sub("1", word) for word in words)
    try:
        read = VERBS[verb].make_context(verb, given).params
        for name in DURATIONS:
            if read.get(name) not in (None, "1"):
                parse_duration(read[name])
    except Exception as error:  # typer keeps the class of these for itself
        return f"ckptd {' '.join(words)}: {error!r}"
    return ""


@pytest.mark.parametrize("path", [*SCRIPTS, *PAGES], ids=name_of)
def test_every_command_of_a_recipe_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real command line, with a value for each variable; in a pod its settings name the job."""
    if path.suffix == ".yaml":
        monkeypatch.setenv("CKPTD_SAVE_DIR", "/nvme/run")
    commands = commands_of(path)
    assert commands or path.suffix == ".md"
    assert [text for words in commands if (text := refusal(words))] == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_option_that_is_named_with_a_verb_is_that_verbs(path: Path) -> None:
    """Also in sentences, comments and tables."""
    wrong = []
    for verb, rest in re.findall(r"\bckptd ([a-z-]+)((?:(?!\bckptd |\s{3}|[`\n;#&]).)*)", path.read_text()):
        if verb in VERBS:
            known = {option for parameter in VERBS[verb].params for option in parameter.opts}
            wrong += [f"{verb} {word}" for word in re.findall(r"--[a-z][\w-]*", rest) if word not in known]
    assert wrong == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("--node-rank", "--node-rnk"),
        ("--world-size", "--world-sise"),
        ("--drain 15m", "--drian 15m"),
        ("--drain 15m", "--drain 15x"),
        ("ckptd run", "ckptd rnu"),
    ],
)
def test_a_recipe_that_is_nearly_right_is_refused(good: str, bad: str) -> None:
    """So the tests above can fail."""
    text = (REPOSITORY / "examples" / "torchrun" / "node.sh").read_text()
    assert good in text
    assert [words for words in in_shell(text) if refusal(words)] == []
    assert len([words for words in in_shell(text.replace(good, bad)) if refusal(words)]) == 1
