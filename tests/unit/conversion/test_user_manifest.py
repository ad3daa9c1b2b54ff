"""Manifests that a job file declares: every spelling that is read, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptd.conversion.engine.user_manifest import ListedPart, listed_files
from ckptd.errors import TornArchiveError

SUM = "ab" * 32
SIZED, SUMMED, BARE = ListedPart("a.pt", 7), ListedPart("a.pt", None, SUM), ListedPart("a.pt")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (["a.pt", "b/c.pt"], [BARE, ListedPart("b/c.pt")]),
        ([{"name": "a.pt", "size": 7}], [SIZED]),
        ([{"path": "./a.pt", "bytes": 7, "sha256": SUM.upper()}], [ListedPart("a.pt", 7, SUM)]),
        ({"a.pt": 7}, [SIZED]),
        ({"a.pt": SUM}, [SUMMED]),
        ({"a.pt": {"size": 7}}, [SIZED]),
        ({"files": ["a.pt"], "step": 3}, [BARE]),
        ({"files": {"a.pt": 7}, "step": 3}, [SIZED]),
        ({"files": {"a.pt": {"sha256": SUM, "size": 0}}}, [ListedPart("a.pt", 0, SUM)]),
        ([], []),
        ({"files": []}, []),
    ],
)
def test_json(value: Any, wanted: list[ListedPart]) -> None:
    assert listed_files(json.dumps(value).encode(), "m") == wanted
    assert listed_files(b"\n " + json.dumps(value, indent=1).encode(), "m") == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{SUM}  a.pt\n", [SUMMED]),
        (f"{SUM} *a.pt\n{SUM}  two words.pt\n", [SUMMED, ListedPart("two words.pt", None, SUM)]),
        (f"{SUM}  ./a.pt", [SUMMED]),
        ("a.pt\nb/c.pt\n\n", [BARE, ListedPart("b/c.pt")]),
        ("a.pt\r\n", [BARE]),
        ("two words.pt\n", [ListedPart("two words.pt")]),
        ("", []),
    ],
)
def test_lines(text: str, wanted: list[ListedPart]) -> None:
    """As `sha256sum` writes them, or names alone."""
    assert listed_files(text.encode(), "m") == wanted


@pytest.mark.parametrize(
    "data",
    [
        b'["a.pt", ',
        b"\xff\xfe",
        b'[{"file": "a.pt"}]',
        b'[{"name": 7}]',
        b'[{"name": "a.pt", "size": -1}]',
        b'[{"name": "a.pt", "size": true}]',
        b'[{"name": "a.pt", "size": 7.5}]',
        b'[{"name": "a.pt", "sha256": "ab"}]',
        b'{"a.pt": "not a sum"}',
        b"[7]",
        b'{"files": 7}',
        b"[" * 100_000,
        b" \n",
    ],
)
def test_what_is_none_is_torn(data: bytes) -> None:
    """Nothing that is read by halves: a file that is not asked for could be missing."""
    with pytest.raises(TornArchiveError, match="m is no manifest"):
        listed_files(data, "m")


@pytest.mark.parametrize("name", ["../a.pt", "/etc/passwd", "a/../../b", "a//b", "."])
def test_a_name_that_leads_out_is_refused(name: str) -> None:
    for value in ([name], {name: 7}, [{"path": name}]):
        with pytest.raises(TornArchiveError, match="leads out of its folder"):
            listed_files(json.dumps(value).encode(), "m")


def test_a_name_that_no_disk_takes_is_refused() -> None:
    with pytest.raises(TornArchiveError, match="is no text"):
        listed_files(b'["\\ud800.pt"]', "m")
