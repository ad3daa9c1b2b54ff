"""Commands in messages are typed as they are for the job (`command_for`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.config.commands import with_typed_commands
from ckptd.config.loader import job_from_arguments


@pytest.mark.parametrize(
    ("general", "said"),
    [
        ("`ckptd pause --off`", "`ckptd pause {run} --off`"),
        ("`ckptd status --retention` names each", "`ckptd status {run} --retention` names each"),
        ("`ckptd accept --existing`; `ckptd list`", "`ckptd accept {run} --existing`; `ckptd list {run}`"),
        ("stop the daemon, `ckptd takeover JOB`", "stop the daemon, `ckptd takeover {run}`"),
        ("`ckptd pin JOB global_step5 --remove`", "`ckptd pin {run} global_step5 --remove`"),
        ("`ckptd accept JOB 'my tag'`", "`ckptd accept {run} 'my tag'`"),
        ("`ckptd gc JOB --gone n1`", "`ckptd gc {run} --gone n1`"),
        ("`ckptd verify run.toml global_step5 --repair`", "`ckptd verify run.toml global_step5 --repair`"),
        ("`ckptd status URL`", "`ckptd status URL`"),
    ],
)
def test_the_job_is_filled_in_once(tmp_path: Path, general: str, said: str) -> None:
    job = job_from_arguments(str(tmp_path / "run"), None, {})
    once = with_typed_commands(job, general)
    assert once == said.format(run=tmp_path / "run")
    assert with_typed_commands(job, once) == once
