"""An object that found no room is not sent again and again for nothing (adr/0161)."""

from __future__ import annotations

import time

import pytest

from ckptd.storage.stores.retrying import FullStoreMemory

SIZE = 8 << 20


def test_a_full_disk_is_asked_for_room() -> None:
    room = FullStoreMemory()
    assert not room.is_in_vain("a", SIZE, lambda: 0), "nobody knows before it was tried"
    room.missed("a", SIZE, 1 << 20)
    assert room.is_in_vain("a", SIZE, lambda: SIZE - 1)
    assert room.is_in_vain("a", SIZE, lambda: None)
    assert not room.is_in_vain("a", SIZE, lambda: SIZE)
    assert not room.is_in_vain("b", SIZE, lambda: 0)
    room.found("a")
    assert not room.is_in_vain("a", SIZE, lambda: 0)


def test_a_quota_that_no_count_shows_is_tried_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try sent the whole object again, without a pause."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    room, waited = FullStoreMemory(), []
    for _ in range(6):
        room.missed("a", SIZE, 10 * SIZE)
        began = now[0]
        while room.is_in_vain("a", SIZE, lambda: 10 * SIZE):
            now[0] += 1.0
        waited.append(now[0] - began)
    assert waited == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    room.missed("a", SIZE, 10 * SIZE)
    room.freed()
    assert not room.is_in_vain("a", SIZE, lambda: 10 * SIZE), "something was removed there"
