"""SFTP on a real sshd and a driver of fsspec on a real S3 server pass the suite that every store passes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from ckptd.remote.fsspec_store import FilesStore
from ckptd.remote.open import open_store
from tests.stores.conformance import WINDOW_BYTES, StoreConformance
from tests.stores.sshd import Sshd, needs_sshd, sshd

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def home(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return server


@pytest.fixture
def store(home: Sshd) -> Iterator[FilesStore]:
    opened = open_store(home.url(secrets.token_hex(4)), owner="n0", window_bytes=WINDOW_BYTES)
    assert isinstance(opened, FilesStore)
    yield opened
    opened.close()


@needs_sshd
class TestSftp(StoreConformance):
    pass
