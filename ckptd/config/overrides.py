"""Apply settings that a person typed (`keep_last=5`, `nas.keep_bytes=2TB`) to the retention keys of a job."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptd.config.loader import changed_job
from ckptd.config.messages import toml_keys
from ckptd.config.retention import Retention
from ckptd.config.section import nearest
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config.schema import JobConfig

_EXAMPLE = "such as --with keep_last=5, --with local.keep_bytes=2TB or --with other.toml"
_LIMITS = ("save_total_limit", "keep_last")
"""Two names of one key: who sets one unsets the other."""


class _Setting(NamedTuple):
    place: str
    """"local", a remote's name, or "" for all of them."""
    key: str
    value: Any
    """None: the key is unset."""


def with_settings(job: JobConfig, settings: Sequence[str]) -> JobConfig:
    """Return the job with other retention keys, judged as its job file would be with them.

    Raises:
        UsageError: that is no setting, or there is no such key or place (2). ConfigError: a job file that
        says so would be refused (78).
    """
    places = {"local", *(remote.name for remote in job.remotes)}
    parsed = [_parsed(text, places) for text in settings]

    def change(table: dict[str, Any]) -> None:
        for setting in parsed:
            _apply(setting, table)

    return changed_job(job, change, "--with") if parsed else job


def _parsed(text: str, places: set[str]) -> _Setting:
    name, is_setting, written = text.partition("=")
    place, _, key = name.strip().rpartition(".")
    known = {*toml_keys(Retention), *(("unuploaded",) if not place else ())}
    if not is_setting:
        raise UsageError(f"{text!r} is neither a job file nor a setting", hint=_EXAMPLE)
    if place and place not in places:
        raise UsageError(
            f"{text!r}: the job has no place {place!r}", hint=f"it has {', '.join(sorted(places))}"
        )
    if key not in known:
        hint = nearest(key, known, {}) or _EXAMPLE
        raise UsageError(f"{text!r}: {key!r} is no retention key", hint=hint)
    value: Any = written.strip()
    try:
        value = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):  # a bare word, or brackets a thousand deep
        value = None if value == "none" else value
    return _Setting(place, key, value)


def _apply(setting: _Setting, table: dict[str, Any]) -> None:
    """Change the table of a job as a person would who edits its file."""
    if setting.key == "unuploaded":
        sections = [table]
    else:
        named = [("local", table.setdefault("local", {}))]
        named += [(remote.get("name", ""), remote) for remote in table.get("remote", ())]
        sections = [section for name, section in named if setting.place in ("", name)]
    for section in sections:
        for key in _LIMITS if setting.key in _LIMITS else (setting.key,):
            section.pop(key, None)
        if setting.value is not None:
            section[setting.key] = setting.value
