"""S3 servers as real processes, for whoever asks for them by name; one of each per test module.

Hypothesis judges no time: a slow moment of a shared machine is no defect.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("ckptd", deadline=None)
settings.load_profile("ckptd")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without CKPTD_FULL=1 the tests marked `full` are left out."""
    if os.environ.get("CKPTD_FULL"):
        return
    longer = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if not item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=longer)


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
