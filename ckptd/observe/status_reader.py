"""Read status.json into the records that it is written from (`observe.status`), without the models' library.

Keys that an older version did not write have their defaults, or are empty; those that a newer one adds are
passed over.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from ckptd.observe.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field

    Build = Callable[[Any], Any]


def read_status(data: bytes) -> tuple[Status, dict[str, Any]]:
    """Return a published document, and the same as it is written: `ckptd status --json` passes that on whole.

    Raises:
        ValueError: it is no status of ckptd.
    """
    written = json.loads(data)
    return status_of(written), written


def status_of(written: object) -> Status:
    """Return the records of a document that was read as JSON.

    Raises:
        ValueError: it is no status of ckptd.
    """
    if not isinstance(written, dict) or not written.keys() >= {"generated_at", "daemon", "jobs"}:
        raise ValueError("it is no status of ckptd")
    return cast("Status", _record(Status, written))


def _record(kind: type, value: Any) -> Any:
    if type(value) is not dict:
        raise ValueError(f"it is no status of ckptd: {value!r} is no object")
    found = {}
    for name, plain, build, absent in _plan(kind):
        if name not in value:
            if absent is not MISSING:
                found[name] = absent
        elif type(one := value[name]) in plain:
            found[name] = one
        elif build is not None:
            found[name] = build(one)
        else:
            raise ValueError(f"it is no status of ckptd: {name} is {one!r}")
    return kind(**found)


@cache
def _plan(kind: type) -> tuple[tuple[str, frozenset[type], Build | None, object], ...]:
    """Return of each field its name, the types that are taken as they are, what builds the others, and what
    stands for an absent one that has no default.
    """
    return tuple(_field(field) for field in fields(kind))


def _field(field: Field[Any]) -> tuple[str, frozenset[type], Build | None, object]:
    plain, build = _taken(field.type)
    if field.default is not MISSING or field.default_factory is not MISSING:
        return field.name, plain, build, MISSING
    empty = next((of for kind, of in _EMPTY.items() if kind in plain), ())
    return field.name, plain, build, empty


_EMPTY: dict[type, object] = {NoneType: None, str: "", bool: False, int: 0}


def _taken(hint: Any) -> tuple[frozenset[type], Build | None]:
    if isinstance(hint, UnionType):
        each = [_taken(one) for one in get_args(hint)]
        return frozenset[type]().union(*(plain for plain, _ in each)), next(
            filter(None, (b for _, b in each)), None
        )
    if get_origin(hint) is Literal:
        # a newer version may know more words
        return frozenset({str}), None
    if get_origin(hint) is tuple:
        return frozenset(), partial(_items, *_taken(get_args(hint)[0]))
    if get_origin(hint) is dict:
        return frozenset(), partial(_values, *_taken(get_args(hint)[1]))
    if hint is float:
        return frozenset({float, int}), None
    if hint in (str, int, bool, NoneType):
        return frozenset({hint}), None
    return frozenset(), partial(_record, hint)


def _item(plain: frozenset[type], build: Build | None, value: Any) -> Any:
    if type(value) in plain:
        return value
    if build is None:
        raise ValueError(f"it is no status of ckptd: {value!r} is in it")
    return build(value)


def _items(plain: frozenset[type], build: Build | None, value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise ValueError(f"it is no status of ckptd: {value!r} is no list")
    return tuple([_item(plain, build, one) for one in value])


def _values(plain: frozenset[type], build: Build | None, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"it is no status of ckptd: {value!r} is no object")
    return {name: _item(plain, build, one) for name, one in value.items()}
