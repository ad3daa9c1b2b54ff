"""Reads back what was written into runs of W&B (offline) and MLflow (SQLite)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlflow.entities import Run

BLOCK_BYTES = 32768
"""LevelDB's log format: no record's header crosses the end of a block."""
HEADER_BYTES = 7
"""Checksum (4), length (2), kind (1): 1 whole, 2 first, 3 middle, 4 last part of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """A run of W&B as `wandb sync` would upload it."""

    run_id: str
    summary: dict[str, Any]
    history: list[dict[str, Any]]

    def values_of(self, name: str) -> list[Any]:
        """Return a metric's history."""
        return [row[name] for row in self.history if name in row]


def read_wandb(folder: Path) -> list[OfflineRun]:
    """Return the offline runs below a folder, oldest first."""
    return [
        _read_run(path) for path in sorted(folder.rglob("run-*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    ]


def read_mlflow(tracking_uri: str) -> list[Run]:
    """Return the runs of every experiment, newest first."""
    client = MlflowClient(tracking_uri)
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def _read_run(path: Path) -> OfflineRun:
    run_id = ""
    summary: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id = record.run.run_id
        elif kind == "summary":
            summary |= {_name(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "history":
            history.append({_name(item): json.loads(item.value_json) for item in record.history.item})
    return OfflineRun(run_id=run_id, summary=summary, history=history)


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER_BYTES, b""  # the file begins with a header of W&B's own
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:
            return
        parts += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (1, 4):
            yield parts
            parts = b""
