"""Docs and code tell the same truth: problem codes, verbs, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml
from typer.main import get_group

from bench.docs_nav import decisions, without_code_links
from ckptd import __version__
from ckptd.cli.main import build_app
from ckptd.cli.verbs import EXIT_CODES, OLD_NAMES, VERBS
from ckptd.daemon.state.problems import CODES, Problems
from tests.support import commands_page, configuration_page, console, prose

if TYPE_CHECKING:
    from ckptd.daemon.state.problems import Code

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_problem_code_has_a_section_and_no_section_is_stale() -> None:
    """docs/problems.md has a section for each code of the closed list, and says its severity."""
    sections = dict(
        re.findall(
            r"^### (.+)\n\*\*(Attention|Behind|Note)\b", (DOCS / "problems.md").read_text(), re.MULTILINE
        )
    )
    problems = Problems()
    for code in CODES:
        problems.put(cast("Code", code), "", "", "")

    assert sections == {one.code: one.lasting.capitalize() for one in problems.all()}


def test_every_verb_is_in_the_contract() -> None:
    """docs/contract.md names every verb of `ckptd --help`."""
    contract = (DOCS / "contract.md").read_text()

    assert [verb for verb in VERBS if not re.search(rf"\b{verb}\b", contract)] == []


def test_every_option_is_in_the_contract() -> None:
    """docs/contract.md names every option; the stock converter's underscore spellings as a whole."""
    contract = (DOCS / "contract.md").read_text()
    missing = [
        f"{name} {option}"
        for name, verb in get_group(build_app()).commands.items()
        for parameter in verb.params
        for option in parameter.opts
        if option.startswith("--") and "_" not in option and option != "--help"
        if not re.search(rf"{option}(?![\w-])", contract)
    ]

    assert missing == []


def test_the_configuration_page_is_that_of_the_models() -> None:
    """docs/configuration.md is made by `python -m tests.support.configuration_page`."""
    assert configuration_page.PAGE.read_text() == configuration_page.page()


def test_the_page_of_commands_is_that_of_the_command_line() -> None:
    """docs/commands.md is made by `python -m tests.support.commands_page`; each exit code says what to do."""
    assert commands_page.PAGE.read_text() == commands_page.page()
    assert commands_page.TODO.keys() == EXIT_CODES.keys()


@pytest.mark.parametrize("page", console.pages(), ids=lambda page: page.stem)
def test_console_blocks_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    """Every block marked `console`, from the page's top, in one scene."""
    wrong = console.play(page, tmp_path)

    assert not wrong, "\n".join(wrong)


def _pages_of(nav: list[Any]) -> list[str]:
    """Files of a nav of mkdocs, in order."""
    return [
        page
        for entry in nav
        for page in (
            [entry] if isinstance(entry, str) else [p for part in entry.values() for p in _pages_of(part)]
        )
    ]


def test_the_site_has_every_page_once() -> None:
    """`mkdocs build --strict` (`make docs`) fails for a page that nav leaves out; so does this."""
    config = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    named = _pages_of(config["nav"]) + decisions(DOCS)

    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def _guide() -> list[Path]:
    """The pages for users: README, the first one, the Guide and its reference."""
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    groups = {title: pages for entry in nav if isinstance(entry, dict) for title, pages in entry.items()}
    return [DOCS / page for page in ("../README.md", "index.md", *groups["Guide"], *groups["Reference"])]


GUIDE = pytest.mark.parametrize("page", _guide(), ids=lambda page: page.stem)


def test_the_guide_is_small() -> None:
    """At most thirteen pages beside README and the first one; two of them are made from the code."""
    assert len(_guide()) <= 15


@GUIDE
def test_the_guide_fits_a_terminal(page: Path) -> None:
    """Lines have at most 100 columns; a row of a table cannot be wrapped, and has at most 200."""
    wide = [
        f"{page.name}:{number}: {len(line)}"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > (200 if line.startswith("|") else 100)
    ]

    assert wide == []


@GUIDE
def test_the_guide_is_in_plain_words(page: Path) -> None:
    """Numbers of decisions, promises and faults are for developers; sentences have 20 words on average."""
    text = page.read_text()
    numbers = re.findall(r"\b(?:ADR|adr/\d+|[PFH]\d{1,2})\b|§", text)
    odd = re.findall(r"\b(?:lets? go|pruned?|retired?|shipp?(?:s|ed)|mend(?:s|ed)?)\b", prose.prose(text))
    words = [len(sentence.split()) for sentence in prose.sentences(text)]

    assert numbers == []
    assert odd == [], "delete, upload, repair"
    assert sum(words) / len(words) <= 20, sorted(words)[-5:]


@GUIDE
def test_commands_of_the_guide_are_those_of_the_command_line(page: Path) -> None:
    """Every `ckptd …` on a page names a verb, and options that it takes."""
    known = {
        name: {option for one in verb.params for option in one.opts} | {"-h", "--help"}
        for name, verb in get_group(build_app()).commands.items()
    }
    own = {"help": set[str](), "version": set[str]()}
    taken = known | own | {old: set[str]() for old in OLD_NAMES if page.stem == "upgrade"}
    wrong = []
    is_made = page == commands_page.PAGE
    for verb, *rest in [] if is_made else prose.commands(page.read_text()):
        options = {word.partition("=")[0].rstrip(",.") for word in rest if word.startswith("--")}
        wrong += [] if verb in taken and options <= taken[verb] else [f"{verb} {' '.join(rest)}"]

    assert wrong == []


def test_links_between_pages_lead_somewhere() -> None:
    """Pages and pictures that are linked are there, and inside docs/: the site has nothing else.

    Links to the code are no links there; tests/test_house.py looks where they lead.
    """
    broken = [
        f"{path.relative_to(DOCS)}: {target}"
        for path in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_code_links(path.read_text()))
        if "://" not in target
        and not ((path.parent / target).is_file() and (path.parent / target).resolve().is_relative_to(DOCS))
    ]

    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_at_the_top_lead_somewhere(name: str) -> None:
    """Into docs/, config/ or examples/: what was moved or removed is not linked any more."""
    root = DOCS.parent
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (root / name).read_text())

    assert [target for target in targets if "://" not in target and not (root / target).exists()] == []


def test_the_version_heads_the_changelog() -> None:
    """A release is described before it is made."""
    text = (DOCS.parent / "CHANGELOG.md").read_text()

    assert re.findall(r"^## \[([^]]+)\]", text, re.MULTILINE)[0] in (__version__, "Unreleased")


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test) as a page names them: `path/test_x.py` `test_y`, `test_x.py::test_y[…]`, either alone.

    A test belongs to the file that the same cell, or the line, named last; "" where none was.
    """
    found = []
    for cell in re.split(r"\n| \| ", text):
        file = ""
        for name in re.findall(r"(?<!\w)(?:[\w/]+/)?test_\w+(?:\.py)?", cell):
            if name.endswith(".py"):
                file = name
                found.append((file, ""))
            elif "/" not in name:
                found.append((file, name))
    return found


def test_every_test_that_a_page_names_is_there() -> None:
    """In docs/faults.md a fault without its test would look as if it had one."""
    root = DOCS.parent / "tests"
    tests = {
        path: set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
        for path in root.rglob("test_*.py")
    }
    absent = []
    for page in DOCS.glob("*.md"):
        for file, name in named_tests(page.read_text()):
            held = [
                names for path, names in tests.items() if path.as_posix().endswith(f"/{file}" if file else "")
            ]
            is_there = any(name in names for names in held) if name else bool(held)
            is_deepspeeds = file.startswith("tests/unit/checkpoint/")
            absent += [] if is_there or is_deepspeeds else [f"{page.name}: {file} {name}".strip()]

    assert absent == []
    assert named_tests("| `tests/a/test_b.py` `test_c`, `test_d[x]` | `test_e` |") == [
        ("tests/a/test_b.py", ""),
        ("tests/a/test_b.py", "test_c"),
        ("tests/a/test_b.py", "test_d"),
        ("", "test_e"),
    ]


def test_a_wrong_block_is_found(tmp_path: Path) -> None:
    """The harness itself: other output, another exit code, no such target, wildcards that fit too much."""
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ make nothing-of-that-name\n$ ckptd status nowhere/at/all\n$ echo a b\na c\n"
        "$ echo a  b   # fine\na b\n$ printf '1\\n2\\n3\\n'\n…\n3\n$ echo one two\none … three\n```\n"
    )
    wrong = console.play(page, tmp_path / "scene")

    assert len(wrong) == 4
    assert console.agree(("…", "b"), ["a", "b"])
    assert not console.agree(("…", "b"), ["a", "b", "c"])
    assert not console.agree(("a",), [])


def test_completion_knows_every_verb() -> None:
    """`ckptd --install-completion` puts a call of this kind into the shell."""
    asked = {"_CKPTD_COMPLETE": "complete_bash", "COMP_WORDS": "ckptd re", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['ckptd']; from ckptd.cli.main import main; main()"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | asked,
        timeout=200,
    )
    assert sorted(done.stdout.split()) == [verb for verb in sorted(VERBS) if verb.startswith("re")], (
        done.stderr
    )
