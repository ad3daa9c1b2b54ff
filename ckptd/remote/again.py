"""Verbs that are tried again at once: a decorator around any store (docs/adr/0090).

Over NFS a handle goes stale when a server restarts or another node renames a folder: opened anew by name the
same call works. Everything that lasts longer is the daemon's to try again, with its own backoff.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, cast

from tenacity import Retrying, retry_if_exception, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

if TYPE_CHECKING:
    from ckptd.remote.store import Store

_TRIES = 3
_PASSING = {errno.ESTALE, errno.EAGAIN}
_VERBS = ("probe", "get", "put", "stat", "read_at", "verify", "delete", "discard", "free_bytes")
"""Each may be done twice; an upload goes on at the next attempt, a listing is asked for again as a whole."""


def briefly(*kinds: type[BaseException]) -> Retrying:
    """At most three tries within seconds, full jitter: on these errors, or on what passes by itself."""
    return Retrying(
        stop=stop_after_attempt(_TRIES),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        retry=retry_if_exception_type(kinds) if kinds else retry_if_exception(_is_passing),
        reraise=True,
    )


def tried_again(store: Store) -> Store:
    """The same store, its small verbs tried again."""
    return cast("Store", _TriedAgain(store))


def _is_passing(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return True
        cause = cause.__cause__
    return False


class _TriedAgain:
    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _VERBS:
            return found

        def verb(*arguments: Any, **more: Any) -> Any:
            return briefly()(found, *arguments, **more)

        return verb

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As the inner one; whether a try that failed did create it after all is looked up."""
        inner, asked = self._inner, 0

        def create() -> bool:
            nonlocal asked
            asked += 1
            return inner.put_if_absent(key, data) or (asked > 1 and inner.get(key) == data)

        return briefly()(create)
