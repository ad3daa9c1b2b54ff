"""The command line of `status`, which is read without Typer (docs/adr/0197)."""

from __future__ import annotations

import inspect

import pytest
import typer
from typer.main import get_command

from ckptd.cli.main import build_app, main
from ckptd.cli.output import ENV_JOB
from ckptd.cli.status.command import parse, show


def by_typer(arguments: list[str]) -> dict[str, object]:
    """What Typer makes of the same words."""
    root = get_command(build_app(("status",)))
    command = root.get_command(typer.Context(root), "status")  # type: ignore[attr-defined]
    with command.make_context("status", list(arguments)) as context:
        return dict(context.params)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a"],
        ["a", "global_step5"],
        ["a", "--json", "global_step5"],
        ["--live", "--state-dir", "/s", "a"],
        ["--watch", "--interval", "0.5", "--retention"],
        ["--config-dir=/c", "a"],
    ],
)
@pytest.mark.parametrize("job", [None, "", "named"])
def test_it_is_read_as_typer_reads_it(
    arguments: list[str], job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENV_JOB:
        monkeypatch.delenv(name, raising=False)
    if job is not None:
        monkeypatch.setenv(ENV_JOB[-1], job)
    found = parse(arguments)
    assert found is not None
    assert vars(found) == by_typer(arguments)
    assert set(vars(found)) == set(inspect.signature(show).parameters)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--nope"], ["-h"], ["--js"], ["a", "b", "c"], ["--interval", "0.01"], ["--interval", "x"]],
)
def test_help_and_errors_are_typers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(arguments) is None
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    assert ended.value.code == (0 if arguments in (["--help"], ["-h"]) else 2)
    said = capsys.readouterr()
    assert "status" in said.out + said.err
