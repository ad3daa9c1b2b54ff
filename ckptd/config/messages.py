"""Translate validation errors into one sentence each: file, key path, value, reason, and what was probably
meant (P16).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptd.config.retention import EphemeralConfig, RungConfig
from ckptd.config.schema import DaemonConfig, JobConfig, LocalConfig, NotifyConfig, RemoteConfig
from ckptd.config.section import LATER, Section, holds_secret, is_secret, nearest
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_SECTIONS: dict[str, type[Section]] = {
    "the top of a job file": JobConfig,
    "[notify] of ckptd.toml": NotifyConfig,
    "[local]": LocalConfig,
    "[[remote]]": RemoteConfig,
    "ckptd.toml": DaemonConfig,
}

_TABLES: dict[str, type[Section]] = {"ephemeral": EphemeralConfig, "ladder": RungConfig}
"""Keys of [local] and [[remote]] whose values have keys of their own."""

_UNSHOWN = ("credentials", "webhook", "heartbeat")
"""What these are set to may be a secret."""


def toml_keys(section: type[Section]) -> dict[str, str]:
    """Return TOML key → its line of help, in the order of declaration; tables included."""
    keys: dict[str, str] = {}
    for name, field in section.model_fields.items():
        alias = field.validation_alias
        keys[alias if isinstance(alias, str) else name] = field.description or ""
    return keys


def explain(error: ValidationError, kind: type[Section], data: dict[str, Any], where: str) -> ConfigError:
    """Return the first problem as message, with a hint and the number of further ones."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = _shown_path(first["loc"])
    section, key = _section_of(first["loc"], kind)
    subject = f"{where}: {path}" if path else where
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if any(is_secret(part) for part in first["loc"] if isinstance(part, str)):
        return ConfigError(
            f"{subject}: a secret does not belong in a configuration file{more}",
            hint="remove it here, and use the environment or the store's own credential files",
        )
    if first["type"] == "extra_forbidden":
        message, hint = _unknown(subject, first["loc"], first["input"], section, key)
    elif first["type"] == "missing":
        message, hint = f"{subject} is missing", f"{key}: {toml_keys(section).get(key, '')}"
        message, hint = _maybe_meant(first, message, hint, section, data)
    else:
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            header = f"[{_without_places(path)}]" if path.endswith("]") else path
            reason = f"it is a table; write [{header}] and its keys below"
        if first["type"] == "tuple_type":
            reason = _list_wanted(path, first["input"])
        # what was written as credentials, or looks like a key, may be a secret; so may a key of a table
        is_shown = key and key not in _UNSHOWN and not holds_secret(first["input"])
        is_shown = is_shown and not _is_table(first["input"])
        shown = f" = {_shown(first['input'])}" if is_shown else ""
        if len(first["loc"]) == 2 and isinstance(first["input"], dict):
            # a rule of the whole table: its name tells more than its beginning
            shown = f' ("{first["input"].get("name", "")}")'
        message, hint = f"{subject}{shown}: {reason}", _help(section, key)
    return ConfigError(message + more, hint=hint)


def _maybe_meant(
    first: ErrorDetails, message: str, hint: str, section: type[Section], data: dict[str, Any]
) -> tuple[str, str]:
    if section is JobConfig and first["loc"] == ("save_dir",) and not data:
        return message, "the file is empty; `ckptd init SAVE_DIR URL` prints one"
    return message, hint


def _list_wanted(path: str, value: object) -> str:
    if path == "remote" or (path.endswith("ladder") and _is_table(value)):
        return (
            f"there may be several; write [[{_without_places(path)}]], with two brackets, and its keys below"
        )
    return "it is a list; write it in [ ]"


def _without_places(path: str) -> str:
    """Drop list indices from a key path, to match the header of a table in a list."""
    return re.sub(r"\[\d+\]", "", path)


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))


def _unknown(
    subject: str, loc: tuple[int | str, ...], value: object, section: type[Section], key: str
) -> tuple[str, str]:
    if holds_secret(value):
        value = "…"
    if key in LATER:
        return (
            f"{subject} = {_shown(value)}: {LATER[key]}: not in this version",
            f"remove {key}; nothing here would act on it",
        )
    message = f"{subject} = {_shown(value)}: no such key"
    if key in _TABLES and loc[-1] != key:
        return message, nearest(str(loc[-1]), toml_keys(_TABLES[key]), {})
    elsewhere: dict[str, str] = {}
    for title, model in _SECTIONS.items():
        for other in toml_keys(model) if model is not section else ():
            elsewhere[other] = f"{elsewhere[other]} or {title}" if other in elsewhere else title
    return message, nearest(key, toml_keys(section), elsewhere)


def _help(section: type[Section], key: str) -> str:
    for name, field in section.model_fields.items():
        if key in (name, field.validation_alias):
            extra = field.json_schema_extra
            example = extra.get("toml", "") if isinstance(extra, dict) else ""
            return f"{field.description}; for example {example}" if example else field.description or ""
    return ""


def _section_of(loc: tuple[int | str, ...], kind: type[Section]) -> tuple[type[Section], str]:
    names = [part for part in loc if isinstance(part, str)]
    if kind is JobConfig and len(names) > 1 and names[0] in ("local", "remote"):
        return (LocalConfig if names[0] == "local" else RemoteConfig), names[1]
    if kind is DaemonConfig and len(names) > 1 and names[0] == "notify":
        return NotifyConfig, names[1]
    return kind, names[0] if names else ""


def _shown_path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def _shown(value: object) -> str:
    if isinstance(value, str):
        scheme, separator, rest = value.partition("://")
        if separator and "@" in rest:
            rest = f"…@{rest.rpartition('@')[2]}"
        if separator:
            address, question, _ = rest.partition("?")
            value = f"{scheme}://{address}{question}{'…' if question else ''}"
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
