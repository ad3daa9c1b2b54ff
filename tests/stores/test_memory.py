"""The memory store passes the conformance suite, so that models built on it mean something."""

from __future__ import annotations

import pytest

from ckptd.errors import RefusedError
from ckptd.storage.stores.base import Store
from tests.stores.conformance import WINDOW_BYTES, StoreConformance
from tests.stores.memory import MemoryStore


class _Checked(MemoryStore):
    def put(self, key: str, data: bytes) -> None:
        if any(part in ("", ".", "..") for part in key.split("/")):
            msg = f"unsafe path {key!r}"
            raise RefusedError(msg)
        super().put(key, data)


@pytest.mark.parametrize(
    "verb",
    (
        *("url", "lanes", "probe", "get", "put", "put_if_absent", "list", "stat", "read_at", "stream"),
        *("upload", "verify", "discard", "delete", "free_bytes"),
    ),
)
def test_a_store_without_a_verb_cannot_be_made(verb: str) -> None:
    """It would answer None: nothing there, nothing proved."""
    lacking = type("Lacking", (MemoryStore,), {verb: vars(Store)[verb]})
    with pytest.raises(TypeError, match=verb):
        lacking()


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return _Checked(window_bytes=WINDOW_BYTES)
