"""`make audit` claims nothing that it was not told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.audit import main, verdict

GOOD: dict[str, Any] = {"name": "pydantic", "version": "2.0", "vulns": []}
UNKNOWN: dict[str, Any] = {"name": "ours", "skip_reason": "Dependency not found"}
BAD: dict[str, Any] = {
    "name": "urllib3",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}],
}


@pytest.mark.parametrize(
    ("rows", "status", "words"),
    [
        ([GOOD, GOOD], 0, "2 packages, no known vulnerability"),
        ([GOOD, UNKNOWN], 0, "1 packages, no known vulnerability; not known to the service: ours"),
        ([UNKNOWN, UNKNOWN], 0, "skipped"),
        ([GOOD, BAD, UNKNOWN], 1, "urllib3 1.0: PYSEC-1, fixed in 1.1"),
    ],
)
def test_verdicts(rows: list[dict[str, Any]], status: int, words: str) -> None:
    code, lines = verdict({"dependencies": rows})
    assert code == status
    assert words in lines[0]


TRACE = 'Traceback (most recent call last):\n  File "pypi.py", line 62, in query\n'
PROXY = f"""{TRACE}requests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org', port=443): \
Max retries exceeded with url: /pypi/boolean-py/5.0/json (Caused by ProxyError('Unable to connect'))"""
TIP = """ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed
ERROR:pip_audit._cli:Tip: your network may be blocking this service. Try another service with `-s SERVICE`"""
UNWELL = f"""{TRACE}requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: x

The above exception was the direct cause of the following exception:

{TRACE}pip_audit._service.interface.ServiceError"""
NO_ANSWER = {
    "no way there": (PROXY, "Unable to connect"),
    "no name": (f"{TRACE}requests.exceptions.ConnectionError: Failed to resolve 'pypi.org'", "resolve"),
    "silence": (f"{TRACE}requests.exceptions.ReadTimeout: Read timed out. (read timeout=15)", "timed out"),
    "in its own words": (TIP, "Could not connect to PyPI"),
    "an error of the service": (UNWELL, "503 Server Error"),
}
ENDED = {
    "nothing at all": ("", "no output"),
    "used wrongly": ("pip-audit: error: unrecognized arguments: --path", "unrecognized arguments"),
    "a fault of its own": (f"{PROXY}\n{TRACE}KeyError: 'vulns'", "KeyError: 'vulns'"),
    "not installed whole": (f"{TRACE}ModuleNotFoundError: No module named 'requests'", "ModuleNotFoundError"),
    "a version that is none": (
        f"{TRACE}pip_audit._service.interface.ServiceError: Received malformed version from PyPI: x",
        "malformed version",
    ),
}


def said(folder: Path, words: str, answer: str = "") -> str:
    """A pip-audit that says this."""
    (folder / "words").write_text(words)
    (folder / "answer").write_text(answer)
    tool = folder / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat {folder}/words >&2\ncat {folder}/answer\nexit 1\n")
    os.chmod(tool, 0o755)
    return str(tool)


@pytest.mark.parametrize("what", NO_ANSWER)
def test_a_service_that_does_not_answer_is_no_failure(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, reason = NO_ANSWER[what]
    assert main(said(tmp_path, words), "packages") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("skipped: the advisory service does not answer (")
    assert reason in printed


@pytest.mark.parametrize("what", ENDED)
def test_any_other_end_without_an_answer_is_a_failure(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, reason = ENDED[what]
    assert main(said(tmp_path, words), "packages") == 2
    printed = capsys.readouterr().out
    assert printed.startswith("pip-audit ended with 1 and no answer:")
    assert reason in printed


def test_an_answer_is_judged_whatever_stands_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = said(tmp_path, "Found 1 known vulnerability in 1 package", json.dumps({"dependencies": [BAD]}))
    assert main(tool, "packages") == 1
    assert "urllib3 1.0: PYSEC-1" in capsys.readouterr().out
