"""Job files for tests: a right one, a writer, and the refusal of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.loader import load_job
from ckptd.errors import ConfigError

DATE = "@1979-05-27"
"""Written as a TOML date, which no key takes."""


def to_toml(data: dict[str, Any]) -> str:
    """A small TOML writer for tests: scalars and lists, `[tables]` and `[[arrays of tables]]`."""

    def value(item: Any) -> str:
        if isinstance(item, str) and item.startswith("@"):
            return item[1:]
        if isinstance(item, dict):
            return "{" + ", ".join(f"{k} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(value(v) for v in item) + "]"
        return json.dumps(item)

    lines = [f"{json.dumps(k)} = {value(v)}" for k, v in data.items() if k not in ("local", "remote")]
    for key in ("local", "remote"):
        tables = data.get(key, [])
        if not isinstance(tables, dict | list):
            lines.insert(0, f"{key} = {value(tables)}")
            continue
        for table in [tables] if isinstance(tables, dict) else tables:
            lines.append(f"[{key}]" if isinstance(tables, dict) else f"[[{key}]]")
            lines += [f"{json.dumps(k)} = {value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """A right job file as a dict: every key of every section that has a value of its own."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nas").mkdir()
    return {
        "save_dir": str(tmp_path / "nvme" / "run"),
        "settle": "5s",
        "existing": "newest",
        "local": {"save_total_limit": 3, "min_free": "5%"},
        "remote": [{"name": "nas", "url": str(tmp_path / "nas" / "run"), "bandwidth": "8Gb/s"}],
    }


def write(tmp_path: Path, data: dict[str, Any], name: str = "llama.toml") -> Path:
    """Write a job file."""
    path = tmp_path / name
    path.write_text(to_toml(data))
    return path


def refusal(path: Path) -> ConfigError:
    """Load a file that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert caught.value.exit_code == 78
    return caught.value
