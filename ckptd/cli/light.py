"""A command line whose texts are taken as they are: Typer loads pydantic to turn a str into a str.

That was half of what `ckptd status` took. A value that has its type is handed on; everything else goes
Typer's own way, and a Typer that has no such step is left alone.
"""

from __future__ import annotations

from typing import Any

import typer.core

_STEP = "build_runtime_param"


class _AsGiven:
    """In the place of a parameter's coercion."""

    def __init__(self, build: Any, descriptor: Any) -> None:
        self._build = build
        self._descriptor = descriptor

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        """The value itself where nothing was given, or a text where a text is wanted."""
        is_one = not param.multiple and param.nargs == 1
        if is_one and (value is None or value is param.default or self._is_text(value)):
            return value
        return self._build(self._descriptor).coerce(value, param=param, ctx=ctx)

    def _is_text(self, value: Any) -> bool:
        return self._descriptor.annotation is str and isinstance(value, str)


def take_texts_as_they_are() -> None:
    """For the rest of this process."""
    build = getattr(typer.core, _STEP, None)
    if build is not None:
        setattr(typer.core, _STEP, lambda descriptor: _AsGiven(build, descriptor))
