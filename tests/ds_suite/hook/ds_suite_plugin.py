"""pytest plugin of the suite: its class fixtures under pytest 8.4 and later, and halves of the suite.

DeepSpeed marks classes as fixtures by an attribute that pytest 8.4 no longer looks for; without this plugin
it wants an older pytest. `DS_SUITE_SHARD=1/2` keeps every second test, so that two runs share the work.
"""

from __future__ import annotations

import os
from typing import Any

import pytest


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Register a module's DistributedFixture classes by their names."""
    if not isinstance(collector, pytest.Module):
        return
    manager: Any = collector.session._fixturemanager
    for name, found in vars(collector.obj).items():
        if not isinstance(found, type) or not isinstance(getattr(found, "world_size", None), int):
            continue
        if getattr(found, "is_dist_fixture", False) and not manager.getfixturedefs(name, collector):
            manager._register_fixture(name=name, func=found, nodeid=collector.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this run's share."""
    which, _, count = os.environ.get("DS_SUITE_SHARD", "0/1").partition("/")
    kept = items[int(which) :: int(count)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
