"""Verbs that are tried again at once: a decorator around any store (docs/adr/0090).

Over NFS a handle goes stale when a server restarts or another node renames a folder: opened anew by name the
same call works. Everything that lasts longer is the daemon's to try again, with its own backoff.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity import Retrying

    from ckptd.remote.store import Store

P = ParamSpec("P")
T = TypeVar("T")
_TRIES = 3
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0
_PASSING = {errno.ESTALE, errno.EAGAIN}
_VERBS = ("probe", "get", "put", "stat", "read_at", "verify", "delete", "discard", "free_bytes")
"""Each may be done twice; an upload goes on at the next attempt, a listing is asked for again as a whole."""


def briefly(action: Callable[P, T], *kinds: type[Exception]) -> Callable[P, T]:
    """`action` in at most three tries, full jitter after the second: on these errors, or what passes."""

    def is_worth_it(error: BaseException) -> bool:
        return isinstance(error, kinds) if kinds else _is_passing(error)

    def tried(*arguments: P.args, **more: P.kwargs) -> T:
        try:
            return action(*arguments, **more)
        except Exception as error:
            if not is_worth_it(error):
                raise
        return _retrying(is_worth_it)(action, *arguments, **more)

    return tried


def _retrying(is_worth_it: Callable[[BaseException], bool]) -> Retrying:
    """What follows a first try that failed; only then is tenacity loaded: asyncio takes 4 MiB (P12)."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt
    from tenacity.wait import wait_random_exponential

    wait = wait_random_exponential(multiplier=_FIRST_SECONDS, max=_LONGEST_SECONDS)
    return Retrying(
        stop=stop_after_attempt(_TRIES - 1), wait=wait, retry=retry_if_exception(is_worth_it), reraise=True
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
            return briefly(found)(*arguments, **more)

        return verb

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As the inner one; whether a try that failed did create it after all is looked up."""
        inner, asked = self._inner, 0

        def create() -> bool:
            nonlocal asked
            asked += 1
            return inner.put_if_absent(key, data) or (asked > 1 and inner.get(key) == data)

        return briefly(create)()
