"""Fixtures of the end-to-end tests: real checkpoints, made once and cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real import real_checkpoint as _real_checkpoint


@pytest.fixture(scope="session")
def real_checkpoint() -> Callable[..., Path]:
    """`real_checkpoint(stage, world_size, dtype="bf16", **recipe) -> save_dir` (read-only)."""
    return _real_checkpoint
