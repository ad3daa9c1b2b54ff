"""Complete JOB, TAG and FORM on the shell's command line, from files of this node alone: no remote is asked.

Loaded with each verb; what a completion needs is imported when a shell asks for one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE = "_CKPTD_COMPLETE"
"""Set by a shell that asks for completions: then no argument is no question."""
_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Name the variables in which bash, and zsh and fish, pass the line that is completed."""


def verb_asked(environ: Mapping[str, str]) -> str | None:
    """Return the verb whose arguments are completed; None: the verb itself is."""
    line = next((environ[name] for name in _WORDS if name in environ), "")
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    is_whole = len(words) > 2 or line[-1:].isspace()
    return words[1] if len(words) > 1 and is_whole else None


def complete_job(incomplete: str) -> list[str]:
    """Return names of configured jobs, and of those that a daemon of this user watches.

    For what begins like a path nothing: then the shell completes files.
    """
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return []
    return sorted({name for name in _job_names() if name.startswith(incomplete)})


def complete_tag(ctx: Any, incomplete: str) -> list[str]:
    """Return the tags of the job that stands before: those here, and those that remotes held lately."""
    job = ctx.params.get("job")
    if not isinstance(job, str):
        return []
    config_dir = ctx.params.get("config_dir")
    named = ctx.params.get("tags") or ()
    return [
        tag
        for tag in _tags(job, Path(config_dir) if config_dir else None)
        if tag.startswith(incomplete) and tag not in named
    ]


def complete_form(ctx: Any, incomplete: str) -> list[str]:
    """Return the forms that `convert` makes; of other verbs those that a remote may hold."""
    from typing import get_args

    from ckptd.conversion.options import FormName

    is_convert = ctx.command.name == "convert"
    forms = [form for form in (*get_args(FormName), "zero") if form != ("zero" if is_convert else "dcp")]
    return [form for form in forms if form.startswith(incomplete)]


def _job_names() -> Iterator[str]:
    from ckptd.config.commands import default_config_dir
    from ckptd.maintenance.status.places import written_in
    from ckptd.storage.local.job_names import running_jobs

    with contextlib.suppress(OSError):
        for path in (default_config_dir(os.environ) / "jobs.d").glob("*.toml"):
            written = written_in(str(path))
            yield written[0] if written is not None else path.stem
    for job in running_jobs():
        yield job.name


def _tags(job: str, config_dir: Path | None) -> list[str]:
    from ckptd.errors import CkptdError
    from ckptd.maintenance.status.published import is_meant, published

    found: list[str] = []
    with contextlib.suppress(CkptdError, OSError):
        for document in published(job, None, config_dir):
            for one in document.status.jobs:
                if is_meant(one, job, config_dir):
                    found += [row.tag for row in one.checkpoints]
                    found += [row.tag for remote in one.remotes for row in remote.held]
    return list(dict.fromkeys(found))
