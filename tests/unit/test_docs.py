"""Docs and code tell the same truth: problem codes, verbs, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_group

from ckptd.cli.main import VERBS, build_app
from ckptd.daemon.problems import CODES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_problem_code_has_a_section_and_no_section_is_stale() -> None:
    """docs/operations.md explains exactly the closed list of problem codes."""
    sections = re.findall(r"^### ([a-z-]+)$", (DOCS / "operations.md").read_text(), re.MULTILINE)

    assert sorted(sections) == sorted(CODES)


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
