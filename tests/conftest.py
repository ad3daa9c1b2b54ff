"""S3 servers as real processes, for whoever asks for them by name; and which tests may run beside each other.

`make test` runs two workers: all trainings in one, file by file everything else in the other, because much of
that waits for daemons and links while training takes every core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """moto: takes any keys."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """`rclone serve s3`: checks keys."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest -n 2 --dist loadgroup`."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("training" if "tests/e2e/" in file else file))
