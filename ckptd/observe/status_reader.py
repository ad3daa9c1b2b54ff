"""Read status.json into the records that it is written from (`observe.status`), without the models' library.

Keys that an older version did not write have their defaults, or are empty; those that a newer one adds are
passed over. A value of another type counts as absent, and nothing of a job with such a value counts as safe.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import MISSING, fields, replace
from datetime import datetime
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from ckptd import __version__
from ckptd.observe.status import SCHEMA_VERSION, DaemonStatus, JobStatus, ProblemStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field

    Build = Callable[[Any, list[str], str], Any]
    Taken = tuple[frozenset[type], type, Build | None]
    """The types that are taken as they are, the type that is built from, and what builds."""


def read_status(data: bytes) -> tuple[Status, dict[str, Any]]:
    """Return a published document, and the same as it is written: `ckptd status --json` passes that on whole.

    Raises:
        ValueError: it is no status of ckptd.
    """
    written = _loaded(data)
    return status_of(written), written


def status_of(written: object) -> Status:
    """Return the records of a document that was read as JSON.

    Raises:
        ValueError: it is no status of ckptd.
    """
    if type(written) is not dict:
        raise ValueError(f"it is no status of ckptd: it is {_type_of(written)}")
    for name, kind in (("generated_at", str), ("daemon", dict), ("jobs", list)):
        if type(one := written.get(name)) is not kind:
            raise ValueError(f"it is no status of ckptd: {name} is {_type_of(one)}")
    at, jobs = written["generated_at"], written["jobs"]
    datetime.fromisoformat(at)
    if wrong := [one for one in jobs if type(one) is not dict]:
        raise ValueError(f"it is no status of ckptd: a job is {_type_of(wrong[0])}")
    return Status(
        generated_at=at,
        daemon=_record(DaemonStatus, written["daemon"], [], ""),
        jobs=tuple([_job(one, at, written) for one in jobs]),
    )


def hint_of(data: bytes) -> str:
    """Return what to do about a document that cannot be read."""
    with contextlib.suppress(ValueError):
        return _hint_of(_loaded(data))
    return _hint_of(None)


def _hint_of(written: Any) -> str:
    document = written if type(written) is dict else {}
    daemon, schema = document.get("daemon"), document.get("schema_version", SCHEMA_VERSION)
    version = daemon.get("version") if type(daemon) is dict else None
    version = version[:40] if type(version) is str else ""
    if schema == SCHEMA_VERSION and version in ("", __version__):
        return "a daemon that runs writes it again within 20 s"
    its = f"ckptd {version}" if version else "another ckptd"
    its += f" (schema_version {schema})" if type(schema) is int and schema != SCHEMA_VERSION else ""
    return f"{its} wrote it, this is {__version__}: ask with that one, or restart the daemon with this one"


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is no status of ckptd: it is nested too deep") from None


def _job(value: Any, at: str, written: Any) -> JobStatus:
    wrong: list[str] = []
    job = cast("JobStatus", _record(JobStatus, value, wrong, ""))
    if not wrong:
        return job
    problem = ProblemStatus(
        code="",
        severity="attention",
        since=at,
        text=f"in status.json {wrong[0]}, which ckptd {__version__} cannot read: nothing counts as safe",
        next_step=_hint_of(written),
    )
    state = job.state if job.state == "invalid" else "attention"
    return replace(job, state=state, problems=(problem, *job.problems))


def _record(kind: type, value: Any, wrong: list[str], _: str) -> Any:
    found = {}
    for name, taken, absent in _plan(kind):
        if name not in value:
            one = absent
        elif type(one := value[name]) not in taken[0]:
            one = _built(taken, one, wrong, name)
            one = absent if one is MISSING else one
        if one is not MISSING:
            found[name] = one
    return kind(**found)


@cache
def _plan(kind: type) -> tuple[tuple[str, Taken, object], ...]:
    """Return of each field its name, what it is taken from, and what stands for an absent one that has no
    default.
    """
    return tuple(_field(field) for field in fields(kind))


def _field(field: Field[Any]) -> tuple[str, Taken, object]:
    taken = plain, built_from, build = _taken(field.type)
    if field.default is not MISSING or field.default_factory is not MISSING:
        return field.name, taken, MISSING
    if build is not None and NoneType not in plain:
        return field.name, taken, build(built_from(), [], "")
    return field.name, taken, next(of for kind, of in _EMPTY.items() if kind in plain)


_EMPTY: dict[type, object] = {NoneType: None, str: "", bool: False, int: 0}
_TYPES = {NoneType: "null", str: "a text", bool: "a truth value", dict: "an object", list: "a list"}


def _type_of(value: object) -> str:
    return _TYPES.get(type(value), "a number")


def _taken(hint: Any) -> Taken:
    if isinstance(hint, UnionType):
        each = [_taken(one) for one in get_args(hint)]
        _, built_from, build = next((one for one in each if one[2] is not None), each[0])
        return frozenset[type]().union(*(plain for plain, _, _ in each)), built_from, build
    if get_origin(hint) is Literal:
        # a newer version may know more words
        return frozenset({str}), NoneType, None
    if get_origin(hint) is tuple:
        return frozenset(), list, partial(_items, _taken(get_args(hint)[0]))
    if get_origin(hint) is dict:
        return frozenset(), dict, partial(_values, _taken(get_args(hint)[1]))
    if hint is float:
        return frozenset({float, int}), NoneType, None
    if hint in (str, int, bool, NoneType):
        return frozenset({hint}), NoneType, None
    return frozenset(), dict, partial(_record, hint)


def _built(taken: Taken, value: Any, wrong: list[str], name: str) -> Any:
    """Return what is built from a value; MISSING: it has a wrong type, which is noted.

    Of a record that may be absent, a wrong type within it takes the whole: half of one may say too much.
    """
    plain, built_from, build = taken
    if type(value) in plain:
        return value
    if build is None or type(value) is not built_from:
        wrong.append(f"{name} is {_type_of(value)}")
        return MISSING
    before = len(wrong)
    made = build(value, wrong, name)
    return None if NoneType in plain and len(wrong) > before else made


def _items(taken: Taken, value: Any, wrong: list[str], name: str) -> tuple[Any, ...]:
    made = [_built(taken, one, wrong, f"a part of {name}") for one in value]
    return tuple([one for one in made if one is not MISSING])


def _values(taken: Taken, value: Any, wrong: list[str], name: str) -> dict[str, Any]:
    made = {key: _built(taken, one, wrong, f"a part of {name}") for key, one in value.items()}
    return {key: one for key, one in made.items() if one is not MISSING}
