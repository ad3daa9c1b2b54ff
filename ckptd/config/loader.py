"""Load configuration: files, arguments and environment → judged models (docs/contract.md, P16).

A job is judged alone: a wrong file is a `ConfigError` that names file, key, value and what was probably
meant, and the jobs beside it go on. The models themselves are in `config.schema`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from ckptd.config.commands import default_config_dir, fill_placeholders, job_name, user_name
from ckptd.config.environment import remote_keys_from_environment, settings_from_environment
from ckptd.config.globs import expand_glob, glob_root, is_glob
from ckptd.config.messages import TYPED, explain
from ckptd.config.remote_names import UNNAMED, url_path
from ckptd.config.retention import Retention
from ckptd.config.schema import DaemonConfig, JobConfig, LocalConfig, RemoteConfig, config_digest
from ckptd.config.section import Section
from ckptd.config.values import check_spelling
from ckptd.errors import CkptdError, ConfigError, NotFoundError, NotPermitted, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# --- Relations between paths of jobs: nothing of one lies inside another (H5, H6, H30) -------------------
# Two jobs with one URL would destroy each other, a remote inside save_dir would be watched as a checkpoint;
# such mistakes are refused here, before anything is written. The path of a remote is compared as it is
# spelled:
# a call on a dead mount does not return, so only the remote's own process touches it, and refuses there
# what is found out by resolving symlinks alone (ckptd/storage/remote/attach.py).

APART_HINT = "no URL, save_dir or state directory may lie inside another"


def check_job_paths(job: JobConfig, where: str) -> None:
    """Refuse a save_dir that is a symlink or has no parent, and a remote inside it or around it.

    Raises:
        ConfigError: naming the path and what it resolves to.
    """
    save_dir, what = job.save_dir, _named(job)
    if save_dir.is_symlink():
        msg = f'{where}: {what} = "{save_dir}" is a symlink'
        raise ConfigError(msg, hint=f'write what it points to: {what} = "{os.path.realpath(save_dir)}"')
    if save_dir.exists() and not save_dir.is_dir():
        msg = f'{where}: {what} = "{save_dir}" is not a directory'
        raise ConfigError(msg)
    if not save_dir.parent.is_dir():
        msg = f'{where}: {what} = "{save_dir}": its parent {os.path.realpath(save_dir.parent)} does not exist'
        raise ConfigError(
            msg, hint=f"is the disk mounted? {what} itself may appear later, its parent must exist"
        )
    places = _places(job)
    for index, place in enumerate(places):
        for other in places[:index]:
            _apart(where, place, other)


def conflicts(job: JobConfig, others: Sequence[JobConfig], state_dirs: Sequence[Path], where: str) -> None:
    """Compare names, URLs and directories with those of the jobs before it and the state directories.

    Raises:
        ConfigError: naming both.
    """
    for other in others:
        if other.name == job.name:
            msg = f'{where}: name = "{job.name}" is taken by {other.file or other.save_dir}'
            raise ConfigError(msg, hint="names of jobs are unique in one daemon")
        for place in _places(job):
            for theirs in _places(other):
                _apart(where, place, replace(theirs, what=f"{theirs.what} of job {other.name}"))
    for state_dir in state_dirs:
        for place in _places(job):
            _apart(where, place, _Place("state_dir", state_dir))


@dataclass(frozen=True, slots=True)
class _Place:
    what: str
    path: Path
    is_remote: bool = False

    def spellings(self) -> set[Path]:
        """Return the path as written and, of a local directory, what it resolves to."""
        written = Path(os.path.normpath(self.path))
        if self.is_remote:
            return {written}
        return {written, Path(os.path.realpath(self.path))}


def _places(job: JobConfig) -> list[_Place]:
    places = [_Place(_named(job), job.save_dir)]
    for index, remote in enumerate(job.remotes):
        path = url_path(remote.url)
        if path is not None:
            what = "URL" if job.file is None else f"remote[{index}].url"
            places.append(_Place(what, path, is_remote=True))
    return places


def _named(job: JobConfig) -> str:
    """Name save_dir as whoever reads a message wrote it: in a file, or on a command line."""
    return "SAVE_DIR" if job.file is None else "save_dir"


def _apart(where: str, mine: _Place, other: _Place) -> None:
    what, path = mine.what, mine.path
    for here in mine.spellings():
        for there in other.spellings():
            if here == there:
                msg = f'{where}: {what} = "{path}" is also {other.what}'
                raise ConfigError(msg, hint="each save_dir and each URL belongs to one job alone")
            if there in here.parents or here in there.parents:
                inner, outer = (what, other.what) if there in here.parents else (other.what, what)
                msg = f'{where}: {what} = "{path}": {inner} lies inside {outer} ({other.path})'
                raise ConfigError(msg, hint=APART_HINT)


# ---------------------------------------------------------------------------------------------------------

__all__ = [
    "DaemonConfig",
    "JobConfig",
    "LoadedConfig",
    "LocalConfig",
    "RemoteConfig",
    "Retention",
    "config_digest",
    "default_config_dir",
    "job_from_arguments",
    "job_from_memory",
    "load_all",
    "load_daemon",
    "load_job",
    "load_job_file",
    "load_jobs",
    "resolve_job",
    "url_path",
    "user_name",
]

_SHOWN = 8
"""Names of jobs in a sentence."""

_VALUE = re.compile(r"""^\s*(?!url\b)\w+\s*=\s*["']*([^"'#\n]+)""", re.MULTILINE)
"""Return what may be the save_dir of a job file, also where it is no TOML or the key is misspelt."""
_FILLED_IN = re.compile(r"\{[^{}]*\}")
_NAME = re.compile(r"""^\s*name\s*=\s*["']?([^"'#\s]+)""", re.MULTILINE)

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Hold a job file as it was read, once: its table, or why it could not be read."""

    path: Path
    table: Mapping[str, Any] | None = None
    error: ConfigError | NotPermitted | None = None

    @property
    def glob(self) -> str | None:
        """Return the pattern in save_dir; None: it names one directory, or the file could not be read."""
        pattern = self.table.get("save_dir") if self.table is not None else None
        return pattern if isinstance(pattern, str) and is_glob(pattern) else None

    def jobs(self, *, check_paths: bool = True) -> list[JobConfig]:
        """Judge the table: one job, or one for each directory that a glob in save_dir matches now.

        Raises:
            ConfigError, NotPermitted: what is wrong with the file.
        """
        if self.table is None:
            assert self.error is not None
            raise self.error
        data = {"name": self.path.stem} | copy.deepcopy(dict(self.table))
        if self.glob is None:
            return [_job_of(data, self.path, check_paths=check_paths)]
        matches = expand_glob(data, str(self.path))
        jobs = [_job_of(one, self.path, check_paths=check_paths) for one in matches]
        for job in jobs:
            job._is_matched = True
        return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Hold everything that was found: the good jobs, and what is wrong with the others."""

    daemon: DaemonConfig
    jobs: tuple[JobConfig, ...]
    problems: tuple[tuple[Path, ConfigError | NotPermitted], ...] = ()
    files: tuple[JobFile, ...] = ()
    """The job files as they were read; none where the command line alone names the job."""

    @property
    def glob_roots(self) -> tuple[str, ...]:
        """Return the directories below which a save_dir is a glob: further jobs may appear there."""
        wrong = {path for path, _ in self.problems}
        return tuple(glob_root(file.glob) for file in self.files if file.glob and file.path not in wrong)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Return the globs that stand for no directory yet."""
        wrong = {path for path, _ in self.problems}
        matched = {job.file for job in self.jobs}
        return tuple(
            file.glob
            for file in self.files
            if file.glob and file.path not in wrong and file.path.absolute() not in matched
        )

    @property
    def has_globs(self) -> bool:
        """Tell whether some save_dir is a glob."""
        return bool(self.glob_roots)

    @property
    def jobs_in_daemon(self) -> int:
        """Return how many a daemon is made for: a glob is several, the next directory may come at any
        time.
        """
        return max(len(self.jobs), 2 if self.has_globs else 0)

    def expanded_again(self, environ: Mapping[str, str]) -> LoadedConfig:
        """Return the same configuration with the directories that its globs match now.

        No file is read: an edit counts when a person asks for a reload, never because a directory appeared.
        """
        return _judge(self.files, self.daemon, environ)


def load_daemon(path: Path | None, environ: Mapping[str, str]) -> DaemonConfig:
    """Load `ckptd.toml` (absent: defaults), environment on top.

    Raises:
        ConfigError: the file or a variable is wrong; the daemon does not start with it (H31).
    """
    data: dict[str, Any] = {}
    if path is not None:
        with contextlib.suppress(NotFoundError):
            data = _read_toml(path)
    data |= settings_from_environment(environ).daemon
    return _validate(DaemonConfig, data, str(path or "environment"))


def load_job(path: Path, *, check_paths: bool = True) -> JobConfig:
    """Read one job file; `name` defaults to the file's stem.

    Raises:
        ConfigError: with file, key, value and the nearest valid key (78).
        NotFoundError: no such file; or its save_dir is a glob, so that it is no single job's.
    """
    data = _read_job(path)
    data.setdefault("name", path.stem)
    if is_glob(data.get("save_dir")):
        names = [str(one["name"]) for one in expand_glob(data, str(path))]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        msg = f"{path}: save_dir is a glob; its jobs are {shown}"
        if not names:
            msg = f"{path}: save_dir is a glob, and no directory matches {data['save_dir']} yet"
        raise NotFoundError(msg, hint="name one of its jobs, or that job's SAVE_DIR")
    return _job_of(data, path, check_paths=check_paths)


def load_job_file(path: Path, *, check_paths: bool = True) -> list[JobConfig]:
    """Load the jobs of one file: one, or one per directory that a glob in save_dir matches.

    Raises:
        NotFoundError, ConfigError: as `load_job`.
    """
    return JobFile(path=path, table=_read_job(path)).jobs(check_paths=check_paths)


def _job_of(data: dict[str, Any], path: Path, *, check_paths: bool) -> JobConfig:
    job = _validate(JobConfig, data, str(path))
    if not job.remotes:
        msg = f"{path}: there is no [[remote]]: nothing would leave this node"
        raise ConfigError(msg, hint='add [[remote]] with name = "nas" and url = "/mnt/nas/…"')
    job._file = path.absolute()
    if check_paths:
        try:
            check_job_paths(job, str(path))
        except OSError as error:  # this job's alone: the others run (P16)
            raise from_os_error(error, f"{path}: looking at {error.filename}") from error
    return job


def job_from_arguments(
    save_dir: str,
    url: str | None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    check_paths: bool = True,
) -> JobConfig:
    """Make a job from `SAVE_DIR [URL]`, with `CKPTD_<KEY>` variables; relative paths start here.

    `options` has the shape of a job file and wins over the environment.
    """
    settings = settings_from_environment(environ or {})
    given = dict(options or {})
    data: dict[str, Any] = settings.job | {
        k: v for k, v in given.items() if k not in ("layout", "local", "remote")
    }
    data["save_dir"] = _absolute(save_dir)
    data.setdefault("name", job_name(Path(data["save_dir"])))
    data["layout"] = settings.layout | dict(given.get("layout", {}))
    data["local"] = settings.local | dict(given.get("local", {}))
    if url is not None:
        check_spelling(url)
        url = url if "://" in url else _absolute(url)
        remote = (
            {"name": UNNAMED}
            | remote_keys_from_environment(environ or {}, url)
            | dict(given.get("remote", {}))
        )
        data["remote"] = [remote | {"url": url}]
    job = _validate(JobConfig, data, TYPED)
    if check_paths:
        check_job_paths(job, "arguments")
    job._given = json.dumps(data)
    return job


def job_from_memory(save_dir: str, given: str, environ: Mapping[str, str]) -> JobConfig:
    """Make the job again that arguments and environment made (`JobConfig.given`); `environ` of now wins.

    Raises:
        ConfigError, ValueError: it is none that this version knows.
    """
    data: dict[str, Any] = json.loads(given)
    now = settings_from_environment(environ)
    (remote,) = data.pop("remote")
    url = environ.get("CKPTD_URL") or str(remote["url"])
    if url != remote.pop("url"):
        remote = {}
    options = {
        key: value for key, value in data.items() if key not in {*now.job, "layout", "local", "save_dir"}
    }
    for section, variables in (("layout", now.layout), ("local", now.local)):
        options[section] = {k: v for k, v in data.get(section, {}).items() if k not in variables}
    set_now = remote_keys_from_environment(environ, url)
    options["remote"] = {key: value for key, value in remote.items() if key not in set_now}
    return job_from_arguments(save_dir, url, options, environ, check_paths=False)


def changed_job(job: JobConfig, change: Callable[[dict[str, Any]], None], where: str) -> JobConfig:
    """Make a job again from its file or arguments after `change` of their table; `where`: who says so.

    Raises:
        ConfigError: a job file that says the same would be refused.
    """
    data: dict[str, Any] = json.loads(job.given or "{}")
    if job.file is not None:
        data = {"name": job.file.stem} | _read_job(job.file)
    if is_glob(data.get("save_dir")):
        matches = expand_glob(data, str(job.file))
        data = next((one for one in matches if one["save_dir"] == str(job.save_dir)), data)
    change(data)
    changed = _validate(JobConfig, data, where)
    changed._file = job.file
    return changed


def remote_from_arguments(url: str, environ: Mapping[str, str]) -> RemoteConfig:
    """Make a remote that only a command line names, with `CKPTD_REMOTE_<KEY>` variables.

    Raises:
        ConfigError: a variable or the URL is wrong.
    """
    check_spelling(url)
    data = {"name": UNNAMED} | remote_keys_from_environment(environ, url) | {"url": url}
    return _validate(RemoteConfig, data, TYPED)


def load_jobs(paths: Iterable[Path], daemon: DaemonConfig, environ: Mapping[str, str]) -> LoadedConfig:
    """Read each job file once and judge them one by one, then against each other; a conflict falls on the
    later file (H6, H31)."""
    return _judge([_job_file(path) for path in paths], daemon, environ)


def _job_file(path: Path) -> JobFile:
    try:
        return JobFile(path=path, table=_read_job(path))
    except CkptdError as error:
        return JobFile(path=path, error=_as_wrong(error))


def _judge(job_files: Iterable[JobFile], daemon: DaemonConfig, environ: Mapping[str, str]) -> LoadedConfig:
    good: list[JobConfig] = []
    problems: list[tuple[Path, ConfigError | NotPermitted]] = []
    state_dirs = [p for p in (daemon.state_dir, _optional_path(environ.get("STATE_DIRECTORY"))) if p]
    job_files = tuple(job_files)
    for file in job_files:
        try:
            jobs = file.jobs()
            for number, job in enumerate(jobs):
                conflicts(job, [*good, *jobs[:number]], state_dirs, str(file.path))
        except CkptdError as error:
            problems.append((file.path, _as_wrong(error)))
        except OSError as error:  # of a directory that a glob matches: this file's jobs alone
            problems.append((file.path, _as_wrong(from_os_error(error, f"{file.path}: {error.filename}"))))
        else:
            good += jobs
    return LoadedConfig(daemon=daemon, jobs=tuple(good), problems=tuple(problems), files=job_files)


def load_all(config_dir: Path, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Read `ckptd.toml` and every `jobs.d/*.toml` below `config_dir`.

    Raises:
        ConfigError: `ckptd.toml` is wrong. Wrong job files are in `problems`, and those that may not be read.
        NotPermitted, StorageError: jobs.d cannot be listed, so that nothing tells which jobs there are.
    """
    environ = environ or {}
    daemon = load_daemon(config_dir / "ckptd.toml", environ)
    found = [_job_file(path) for path in _listed(config_dir / "jobs.d")]
    # a file that went after it was listed is one that is not there
    there = [file for file in found if file.error is None or os.path.lexists(file.path)]
    return _judge(there, daemon, environ)


def _listed(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, f"listing {folder}") from error
    return [folder / name for name in sorted(names) if name.endswith(".toml") and not name.startswith(".")]


def resolve_job(job: str, environ: Mapping[str, str], *, config_dir: Path | None = None) -> JobConfig:
    """Find JOB as everywhere: a job file, a name in the configuration directory, or a SAVE_DIR.

    A bare word is a name first, whatever folder of that name lies here. A SAVE_DIR that no job file names
    becomes a job with the remote `$CKPTD_URL`, else with none.

    Raises:
        NotFoundError: no such job (66).
        ConfigError, NotPermitted: its file is wrong; or a file cannot be read, so that it may be its file.
    """
    path = Path(job)
    if path.suffix == ".toml" and (path.is_file() or "/" in job):
        return load_job(path, check_paths=False)
    directory = config_dir or default_config_dir(environ)
    loaded = _named_jobs(directory)
    if "/" in job:
        return _of_save_dir(job, loaded, environ)
    for candidate in loaded:
        if isinstance(candidate, JobConfig) and candidate.name == job:
            return candidate
        if isinstance(candidate, tuple) and job in (candidate[0].stem, _written_name(candidate[0])):
            raise candidate[1]
    by_file = [j for j in loaded if isinstance(j, JobConfig) and j.file is not None and j.file.stem == job]
    if len(by_file) == 1:
        return by_file[0]
    if path.is_dir():
        return _of_save_dir(job, loaded, environ)
    check_spelling(job)
    names = ", ".join(sorted(j.name for j in loaded if isinstance(j, JobConfig))) or "none"
    msg = f"no job {job!r} in {directory / 'jobs.d'} (known: {names})"
    raise NotFoundError(msg, hint="give a name, a job file, or the save_dir with a / in it")


def _of_save_dir(
    job: str,
    loaded: Sequence[JobConfig | tuple[Path, ConfigError | NotPermitted]],
    environ: Mapping[str, str],
) -> JobConfig:
    url = environ.get("CKPTD_URL") or None
    found = _job_of_save_dir(Path(_absolute(job)), loaded, url)
    return found or job_from_arguments(job, url, environ=environ, check_paths=False)


def _job_of_save_dir(
    save_dir: Path, loaded: Sequence[JobConfig | tuple[Path, ConfigError | NotPermitted]], url: str | None
) -> JobConfig | None:
    """Return the job whose file names `save_dir`, however either is spelt; None: no file does.

    Raises:
        ConfigError, NotPermitted: of the wrong file that names it. Without the remotes of that file a command
            would take what lies in save_dir for all there is.
    """
    real = Path(os.path.realpath(save_dir))
    good = [job for job in loaded if isinstance(job, JobConfig)]
    for job in good:
        if job.save_dir == save_dir:
            return job
    for job in good:
        if Path(os.path.realpath(job.save_dir)) == real:
            return job
    for wrong in loaded:
        if isinstance(wrong, JobConfig):
            continue
        text = _text_of(wrong[0])
        if (text is None and url is None) or (text is not None and _may_name(text, {save_dir, real})):
            raise wrong[1]
    return None


def _may_name(text: str, save_dirs: Iterable[Path]) -> bool:
    """Tell whether a value in a wrong job file is one of `save_dirs`, also unquoted, relative or by a
    glob.
    """
    values = {match[1].strip() for match in _VALUE.finditer(text) if "/" in match[1]}
    patterns = {_FILLED_IN.sub("*", os.path.expanduser(value)) for value in values}
    return any(save_dir.match(pattern) for save_dir in save_dirs for pattern in patterns)


def _text_of(path: Path) -> str | None:
    """Return a job file as it is written; None: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _written_name(path: Path) -> str | None:
    """Return the name that a wrong job file gives its job, as far as it can be read."""
    found = _NAME.search((_text_of(path) or "").partition("\n[")[0])
    return found[1] if found else None


def _named_jobs(directory: Path) -> list[JobConfig | tuple[Path, ConfigError | NotPermitted]]:
    found: list[JobConfig | tuple[Path, ConfigError | NotPermitted]] = []
    for path in sorted((directory / "jobs.d").glob("*.toml")):
        try:
            found += load_job_file(path, check_paths=False)
        except CkptdError as error:
            found.append((path, _as_wrong(error)))
    return found


def _as_wrong(error: CkptdError) -> ConfigError | NotPermitted:
    """Treat a file that cannot be read as a wrong one: its job alone does not run (P16)."""
    if isinstance(error, ConfigError | NotPermitted):
        return error
    return ConfigError(error.message, hint=error.hint)


def _absolute(path: str) -> str:
    return os.path.normpath(Path(path).expanduser().absolute())


def _optional_path(text: str | None) -> Path | None:
    return Path(text.split(":")[0]) if text else None


def _read_job(path: Path) -> dict[str, Any]:
    return fill_placeholders(_read_toml(path), os.environ, str(path))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"no file {path}"
        raise NotFoundError(msg, hint="`ckptd init SAVE_DIR URL` prints one") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # by brackets a thousand deep
        msg = f"{path} is no TOML: {error}"
        raise ConfigError(msg, hint='text needs quotes, lists need [ ], for example settle = "5s"') from error
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise ConfigError(msg) from error
    except IsADirectoryError as error:
        msg = f"{path} is a directory, no job file"
        hint = (
            "a SAVE_DIR goes with its URL: `ckptd run SAVE_DIR URL`; elsewhere CKPTD_SAVE_DIR and CKPTD_URL"
        )
        raise ConfigError(msg, hint=hint) from error
    except OSError as error:
        raise from_os_error(error, f"reading {path}") from error


def _validate(kind: type[AnySection], data: dict[str, Any], where: str) -> AnySection:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain(error, kind, data, where) from None
