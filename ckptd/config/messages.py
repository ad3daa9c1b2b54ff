"""Translate validation errors into one sentence each: file, key path, value, reason, and what was probably
meant (P16).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptd.config.retention import EphemeralConfig, RungConfig
from ckptd.config.schema import DaemonConfig, JobConfig, LayoutConfig, LocalConfig, NotifyConfig, RemoteConfig
from ckptd.config.section import LATER, Section, holds_secret, is_secret, nearest
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_SECTIONS: dict[str, type[Section]] = {
    "the top of a job file": JobConfig,
    "[notify] of ckptd.toml": NotifyConfig,
    "[layout]": LayoutConfig,
    "[local]": LocalConfig,
    "[[remote]]": RemoteConfig,
    "ckptd.toml": DaemonConfig,
}

_OF_JOB: dict[str, type[Section]] = {"layout": LayoutConfig, "local": LocalConfig, "remote": RemoteConfig}

_TABLES: dict[str, type[Section]] = {"ephemeral": EphemeralConfig, "ladder": RungConfig}
"""Keys of [local] and [[remote]] whose values have keys of their own."""

TYPED = "arguments and environment"
"""Sources of a job that no file describes: a message then names the argument that was typed."""

_UNSHOWN = ("credentials", "storage_options", "webhook", "heartbeat")
"""Keys whose values are never shown, since they may be secrets."""


def toml_keys(section: type[Section]) -> dict[str, str]:
    """Return TOML key → its line of help, in the order of declaration; tables included."""
    keys: dict[str, str] = {}
    for name, field in section.model_fields.items():
        alias = field.validation_alias
        keys[alias if isinstance(alias, str) else name] = field.description or ""
    return keys


def explain(error: ValidationError, kind: type[Section], data: dict[str, Any], where: str) -> ConfigError:
    """Return every problem as one sentence, unknown keys first, each with a hint."""
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
    # a key that is spelt wrong is not missing as well
    unknown_in = {p["loc"][:-1] for p in problems if p["type"] == "extra_forbidden"}
    problems = [p for p in problems if p["type"] != "missing" or p["loc"][:-1] not in unknown_in]
    named = "" if len(problems) > 1 else where
    mistakes = [_explained(problem, kind, data, named, is_typed=where == TYPED) for problem in problems]
    if len(mistakes) == 1:
        return ConfigError(mistakes[0][0], hint=mistakes[0][1])
    messages = "; ".join(f"({number}) {message}" for number, (message, _) in enumerate(mistakes, 1))
    hints = " ".join(f"({number}) {hint}" for number, (_, hint) in enumerate(mistakes, 1) if hint)
    return ConfigError(f"{where}: {len(mistakes)} mistakes: {messages}", hint=hints)


def _explained(
    problem: ErrorDetails, kind: type[Section], data: dict[str, Any], where: str, *, is_typed: bool
) -> tuple[str, str]:
    """Return what is wrong, and what to do; `where`: the file, "" where it is named already.

    `is_typed`: there is no file; the argument is named, or the variable that sets the key.
    """
    path = _shown_path(problem["loc"])
    section, key = _section_of(problem["loc"], kind)
    if is_typed and key:
        where, path = "", _as_typed(section, key) + path.partition(key)[2]
    subject = ": ".join(part for part in (where, path) if part) or "it"
    if any(is_secret(part) for part in problem["loc"] if isinstance(part, str)):
        hint = "remove it here, and use the environment or the store's own credential files"
        return f"{subject}: a secret does not belong in a configuration file", hint
    if problem["type"] == "extra_forbidden":
        return _unknown(subject, problem["loc"], problem["input"], section, key)
    if problem["type"] == "missing":
        hint = f"{key}: {toml_keys(section).get(key, '')}"
        if section is JobConfig and problem["loc"] == ("save_dir",) and not data:
            hint = "the file is empty; `ckptd init SAVE_DIR URL` prints one"
        return f"{subject} is missing", hint
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "model_type":
        header = f"[{_without_places(path)}]" if path.endswith("]") else path
        reason = f"it is a table; write [{header}] and its keys below"
    if problem["type"] == "tuple_type":
        reason = _list_wanted(path, problem["input"])
    # what was written as credentials, or looks like a key, may be a secret; so may a key of a table
    is_shown = key and key not in _UNSHOWN and not holds_secret(problem["input"])
    is_shown = is_shown and not _is_table(problem["input"])
    shown = f" = {_shown(problem['input'])}" if is_shown else ""
    if len(problem["loc"]) == 2 and isinstance(problem["input"], dict) and not is_typed:
        # a rule of the whole table: its name tells more than its beginning
        shown = f' ("{problem["input"].get("name", "")}")'
    help_text = _help(section, key)
    return f"{subject}{shown}: {reason}", help_text.partition("; for example ")[0] if is_typed else help_text


def _as_typed(section: type[Section], key: str) -> str:
    """Return the argument, or the variable of the environment, that sets a key."""
    if key in ("save_dir", "url", "remote"):
        return "SAVE_DIR" if key == "save_dir" else "URL"
    return f"{'CKPTD_REMOTE_' if section is RemoteConfig else 'CKPTD_'}{key.upper()}"


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
    if kind is JobConfig and len(names) > 1 and names[0] in _OF_JOB:
        return _OF_JOB[names[0]], names[1]
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
