"""Read the settings of a single job from the environment: `CKPTD_<KEY>`, `CKPTD_LOCAL_<KEY>`,
`CKPTD_REMOTE_<KEY>`.

`CKPTD_SETTLE=10s ckptd run SAVE_DIR URL` says what `settle = "10s"` says in a file. A variable that is nearly
a key is a typing error and refused; anything else that starts with CKPTD_ is ignored (Kubernetes makes such
names for services).
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from ckptd.config.s3 import S3Keys
from ckptd.config.schema import DaemonConfig, JobConfig, LayoutConfig, LocalConfig, RemoteConfig
from ckptd.config.section import LATER, Section, holds_secret, is_secret
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWN = {
    "CKPTD_DEBUG",
    "CKPTD_CONFIG_DIR",
    "CKPTD_JOB",
    "CKPTD_ONCE",
    "CKPTD_DRAIN",
    "CKPTD_LOG_FORMAT",
    "CKPTD_URL",
    "CKPTD_SAVE_DIR",
}
_DROPPED = ("CKPTD_INCOMPLETE_AFTER", "never")
"""A variable of earlier versions and its only value: accepted, without effect."""
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionValues:
    """Hold TOML-shaped values by section."""

    job: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    remote: dict[str, Any] = field(default_factory=dict)
    daemon: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    section: str
    key: str
    kinds: frozenset[type]


def settings_from_environment(environ: Mapping[str, str]) -> SectionValues:
    """Read the variables that are keys.

    Raises:
        ConfigError: a variable is nearly a key, or its text is no value of that key's type.
    """
    settings = SectionValues()
    known = variables()
    known |= {"CKPTD_BACKFILL": replace(known["CKPTD_EXISTING"], key="backfill")}
    for name, text in sorted(environ.items()):
        if not name.startswith("CKPTD_") or name in _OWN or (name, text) == _DROPPED:
            continue
        variable = known.get(name)
        if variable is None:
            _refuse_near_miss(name, known)
            continue
        getattr(settings, variable.section)[variable.key] = _value(name, text, variable.kinds)
    return settings


def remote_keys_from_environment(environ: Mapping[str, str], url: str) -> dict[str, Any]:
    """Read `CKPTD_REMOTE_<KEY>` for a URL of a command line; report and leave out what means nothing there.

    The variables are set once for a shell or a job; a URL beside them may be of another kind.

    Raises:
        ConfigError: as `settings_from_environment`.
    """
    found = settings_from_environment(environ).remote
    if url.startswith("s3://"):
        return found
    foreign = {field.validation_alias or name for name, field in S3Keys.model_fields.items()} | {"part_size"}
    if url.startswith(("/", "file://")):
        foreign |= {"credentials"}
    for key in sorted(found.keys() & foreign):
        _say_once(f"CKPTD_REMOTE_{key.upper()} is set and means nothing for {url}: not used")
    return {key: value for key, value in found.items() if key not in foreign}


@cache
def _say_once(text: str) -> None:
    logging.getLogger("ckptd.config").warning("ckptd: %s", text)


def variables() -> dict[str, _Variable]:
    """Return the section, key and types that each variable sets."""
    table: dict[str, _Variable] = {}
    sections: tuple[tuple[str, str, type[Section]], ...] = (
        ("CKPTD_REMOTE_", "remote", RemoteConfig),
        ("CKPTD_LAYOUT_", "layout", LayoutConfig),
        ("CKPTD_LOCAL_", "local", LocalConfig),
        ("CKPTD_", "local", LocalConfig),
        ("CKPTD_", "job", JobConfig),
        ("CKPTD_", "daemon", DaemonConfig),
    )
    for prefix, section, model in sections:
        for name, declared in model.model_fields.items():
            key = declared.validation_alias if isinstance(declared.validation_alias, str) else name
            if key in ("layout", "local", "remote", "save_dir", "url") or (
                prefix == "CKPTD_" and key == "forms"
            ):
                continue
            kinds = frozenset(_kinds(declared.annotation))
            table[f"{prefix}{key.upper()}"] = _Variable(section=section, key=key, kinds=kinds)
    return table


def _kinds(annotation: Any) -> list[type]:
    if annotation in (bool, int, tuple) or getattr(annotation, "__origin__", None) is tuple:
        return [tuple if annotation not in (bool, int) else annotation]
    found = [kind for argument in get_args(annotation) for kind in _kinds(argument)]
    return found + [type(argument) for argument in get_args(annotation) if isinstance(argument, bool)]


def _value(name: str, text: str, kinds: frozenset[type]) -> object:
    if tuple in kinds:
        items = [item.strip() for item in text.strip("[] ").split(",") if item.strip()]
        return [int(item) if item.isdecimal() else item.strip("\"'") for item in items]
    if bool in kinds:
        if text.lower() not in _BOOLEANS:
            msg = f'{name} = "{text}": true or false was expected'
            raise ConfigError(msg)
        return _BOOLEANS[text.lower()]
    if int in kinds and text.strip().isdecimal():
        return int(text)
    return text


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are ours and may be shown: no secret, and no URL that may hold one."""
    known = (_OWN - {"CKPTD_DEBUG"}) | variables().keys() - {"CKPTD_REMOTE_STORAGE_OPTIONS"}
    return {
        name: text
        for name, text in sorted(environ.items())
        if name in known and text and not (is_secret(name) or holds_secret(text) or _may_hold_secret(text))
    }


def _may_hold_secret(text: str) -> bool:
    _, is_url, rest = text.partition("://")
    return bool(is_url) and ("?" in rest or ":" in rest.rpartition("@")[0])


def _refuse_near_miss(name: str, known: Mapping[str, _Variable]) -> None:
    if name.removeprefix("CKPTD_").lower() in LATER:
        msg = f"{name}: {LATER[name.removeprefix('CKPTD_').lower()]}: not in this version"
        raise ConfigError(msg, hint=f"unset {name}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if close:
        msg = f"{name} is no setting"
        raise ConfigError(msg, hint=f"did you mean {close[0]}? otherwise unset it")
