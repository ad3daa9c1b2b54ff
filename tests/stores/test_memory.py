"""The memory store passes the conformance suite, so that models built on it mean something."""

from __future__ import annotations

import pytest

from ckptd.errors import RefusedError
from tests.stores.conformance import WINDOW_BYTES, StoreConformance
from tests.stores.memory import MemoryStore


class _Checked(MemoryStore):
    def put(self, key: str, data: bytes) -> None:
        if any(part in ("", ".", "..") for part in key.split("/")):
            msg = f"unsafe path {key!r}"
            raise RefusedError(msg)
        super().put(key, data)


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return _Checked(window_bytes=WINDOW_BYTES)
