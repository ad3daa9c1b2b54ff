"""Resolve the configuration's place, node and job names, one file for every node, and the commands to type
for a job.

`{hostname}` and `{SLURM_JOB_ID}` are filled in before a file is judged, in save_dir, node_name and the
remotes' URLs alone; a name that means nothing here is refused with those that do. `{dir}` belongs to globs
and stays (config/globs.py).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import NAME_CHARACTERS
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.config.schema import JobConfig

HOSTNAME = "hostname"
_SLURM = ("SLURM_", "SLURMD_")
_KEPT = {"dir"}
_GENERAL = re.compile(
    r"`ckptd (accept|check|drain|gc|list|logs|pause|pin|rm|status|takeover|verify)"
    r"(?: JOB((?: [^` ]+)*)|((?: --[a-z-]+)*))`"
)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def node_name(environ: Mapping[str, str]) -> str:
    """Return this node's default name: Slurm's, else the host name."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def job_name(save_dir: Path) -> str:
    """Return a job's default name: its directory's, with - for characters that a name may not have."""
    fit = "".join(letter if letter in NAME_CHARACTERS else "-" for letter in save_dir.name)
    return fit.lstrip(".-") or "run"


def user_name() -> str:
    """Return the name of the user who runs this; the number where it has no name, as in a container under any
    user id.
    """
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def default_config_dir(environ: Mapping[str, str]) -> Path:
    """Return `$CKPTD_CONFIG_DIR`, else `$XDG_CONFIG_HOME/ckptd`, else `/etc/ckptd/<user>`."""
    if given := environ.get("CKPTD_CONFIG_DIR"):
        return Path(given)
    return _own_config_dir(environ)


def _own_config_dir(environ: Mapping[str, str]) -> Path:
    """Return the default without $CKPTD_CONFIG_DIR, which a daemon may have and a shell beside it not."""
    if base := environ.get("XDG_CONFIG_HOME"):
        return Path(base) / "ckptd"
    return Path("/etc/ckptd") / user_name()


def command_for(job: JobConfig, verb: str, *rest: str) -> str:
    """Return a line that does `verb` to this job wherever it is typed, quoted for a shell.

    By name only where the user's own configuration has the job: one that was started by its file or by two
    arguments has no name that a command could look up.
    """
    directory = job.file.parent.parent if job.file is not None and job.file.parent.name == "jobs.d" else None
    words = [str(job.save_dir)]
    if directory is not None and directory == _own_config_dir(os.environ):
        words = [job.name]
    elif directory is not None and job.is_matched:
        words = [job.name, "--config-dir", str(directory)]
    elif job.file is not None and not job.is_matched:
        words = [str(job.file)]
    elif job.remotes:
        return f"CKPTD_URL={shlex.quote(job.remotes[0].url)} {shlex.join(['ckptd', verb, *words, *rest])}"
    return shlex.join(["ckptd", verb, *words, *rest])


def with_typed_commands(job: JobConfig, text: str) -> str:
    """Rewrite the general commands in a message (`ckptd pin JOB TAG`) as they are typed for this job."""
    return _GENERAL.sub(lambda m: f"`{command_for(job, m[1], *shlex.split(m[2] or m[3] or ''))}`", text)


def fill_placeholders(data: dict[str, Any], environ: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the table of a job file with its placeholders filled in.

    Raises:
        ConfigError: a placeholder that means nothing here (78).
    """
    made = {
        key: _filled(value, environ, f"{where}: {key}") if key in ("save_dir", "node_name") else value
        for key, value in data.items()
    }
    remotes = data.get("remote")
    if isinstance(remotes, list):
        made["remote"] = [
            remote | {"url": _filled(remote["url"], environ, f"{where}: remote[{index}].url")}
            if isinstance(remote, dict) and "url" in remote
            else remote
            for index, remote in enumerate(remotes)
        ]
    return made


def _filled(value: Any, environ: Mapping[str, str], where: str) -> Any:
    if not isinstance(value, str):
        return value

    def meaning(match: re.Match[str]) -> str:
        name = match[1]
        if name in _KEPT:
            return match[0]
        if name == HOSTNAME:
            return os.uname().nodename
        if name == "node_name":
            return node_name(environ)
        if name.startswith(_SLURM) and environ.get(name):
            return environ[name]
        raise _unknown(value, name, environ, where)

    return _PLACEHOLDER.sub(meaning, value)


def _unknown(value: str, name: str, environ: Mapping[str, str], where: str) -> ConfigError:
    if name.startswith(_SLURM):
        msg = f'{where} = "{value}": {name} is not set here'
        return ConfigError(msg, hint="it is set in a step of a Slurm job (srun); start ckptd in one")
    if f"${{{name}}}" in value:
        full = os.path.expandvars(value)
        hint = f'write "{full}"' if full != value else "{hostname}, {node_name} and {SLURM_…} are filled in"
        return ConfigError(f'{where} = "{value}": variables of the environment are not read here', hint=hint)
    known = [HOSTNAME, "node_name", *sorted(n for n in environ if n.startswith(_SLURM))]
    import difflib  # 2 ms of every `ckptd status`

    near = difflib.get_close_matches(name, known, 1)
    msg = f'{where} = "{value}": {{{name}}} means nothing'
    meant = f"did you mean {{{near[0]}}}? " if near else ""
    return ConfigError(msg, hint=f"{meant}{{hostname}}, {{node_name}} and {{SLURM_…}} are filled in")
