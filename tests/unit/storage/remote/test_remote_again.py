"""Small verbs that are tried again: a stale handle passes, anything else is for the daemon's own backoff."""

from __future__ import annotations

import errno

import pytest

from ckptd.errors import NotPermitted, StorageError, from_os_error
from ckptd.storage.stores.retrying import tried_again
from tests.stores.memory import MemoryStore


class Failing(MemoryStore):
    """The next calls fail with these errors; `after`: only once they have done their work."""

    def __init__(self, *codes: int, after: bool = False) -> None:
        super().__init__()
        self.codes = list(codes)
        self.after = after
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.codes:
            code = self.codes.pop(0)
            try:
                raise OSError(code, "injected")
            except OSError as error:
                raise from_os_error(error, "reading") from error

    def get(self, key: str) -> bytes | None:
        if not self.after:
            self._fail()
        return super().get(key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if not self.after:
            self._fail()
        done = super().put_if_absent(key, data)
        if self.after:
            self._fail()
        return done


def test_a_stale_handle_passes() -> None:
    inner = Failing(errno.ESTALE, errno.ESTALE)
    assert tried_again(inner).get("a") is None
    assert inner.calls == 3


def test_one_that_stays_stale_is_said() -> None:
    inner = Failing(*[errno.ESTALE] * 9)
    with pytest.raises(StorageError):
        tried_again(inner).get("a")
    assert inner.calls == 3


def test_what_does_not_pass_by_itself_is_not_tried_again() -> None:
    for code, kind in ((errno.EIO, StorageError), (errno.EACCES, NotPermitted)):
        inner = Failing(code)
        with pytest.raises(kind):
            tried_again(inner).get("a")
        assert inner.calls == 1


def test_created_although_it_failed_is_created() -> None:
    """The handle went stale after the link: the second try finds our own bytes (P3)."""
    inner = Failing(errno.ESTALE, after=True)
    assert tried_again(inner).put_if_absent("a", b"ours")
    assert inner.objects == {"a": b"ours"}
    other = Failing(errno.ESTALE, after=True)
    other.objects["a"] = b"theirs"
    assert not tried_again(other).put_if_absent("a", b"ours")
    assert other.objects == {"a": b"theirs"}
