"""Apply settings that a person typed (`keep_last=5`, `nas.keep_bytes=2TB`) to the retention keys of a job."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import ValidationError

from ckptd.config.messages import explain, toml_keys
from ckptd.config.retention import Retention
from ckptd.config.section import nearest
from ckptd.core.policy.retention import Unuploaded
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config.schema import JobConfig

_EXAMPLE = "such as --with keep_last=5, --with local.keep_bytes=2TB or --with other.toml"
_FIELDS = {field.validation_alias or name: name for name, field in Retention.model_fields.items()}
"""Key as a job file spells it → field."""
_LIMITS = {"save_total_limit": None, "keep_last": None}
"""Two names of one key: who sets one unsets the other."""


class _Setting(NamedTuple):
    place: str
    """"local", a remote's name, or "" for all of them."""
    key: str
    value: Any


def with_settings(job: JobConfig, settings: Sequence[str]) -> JobConfig:
    """Return the job with other retention keys.

    Raises:
        UsageError: that is no setting, or there is no such key or place (2). ConfigError: its value (78).
    """
    for text in settings:
        setting = _parsed(text, {"local", *(remote.name for remote in job.remotes)})
        if setting.key == "unuploaded":
            job = job.model_copy(update={"unuploaded": setting.value})
            continue
        changes = _changes(setting)
        if setting.place in ("", "local"):
            job = job.model_copy(update={"local": job.local.model_copy(update=changes)})
        remotes = tuple(
            remote.model_copy(update=changes) if setting.place in ("", remote.name) else remote
            for remote in job.remotes
        )
        job = job.model_copy(update={"remotes": remotes})
    return job


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
    except tomllib.TOMLDecodeError:
        value = None if value == "none" else value
    if key == "unuploaded" and value not in get_args(Unuploaded):
        raise UsageError(f"{text!r}: no such value", hint=" | ".join(get_args(Unuploaded)))
    return _Setting(place, key, value)


def _changes(setting: _Setting) -> dict[str, Any]:
    """Return the fields that change, with their values as a job file gives them."""
    field = _FIELDS[setting.key]
    if setting.value is None:
        value = Retention.model_fields[field].default
    else:
        # a ladder alone is refused, and another key may be in the job file
        beside = {} if setting.key in _LIMITS else {"save_total_limit": 1}
        written = {**beside, setting.key: setting.value}
        try:
            value = getattr(Retention.model_validate(written), field)
        except ValidationError as error:
            raise explain(error, Retention, written, "--with") from None
    return {**(_LIMITS if setting.key in _LIMITS else {}), field: value}
