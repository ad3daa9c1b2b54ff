"""A ready file is written once every remote has the checkpoint, never before."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.config.schema import JobConfig
from ckptd.daemon.health.ready_files import ReadyFiles, is_ready
from ckptd.errors import ConfigError
from ckptd.observe.status import FormStatus
from tests.unit.observe.test_event_log import checkpoint, job


def config(root: Path, **keys: object) -> JobConfig:
    """Two remotes: one takes zero and universal, the other weights alone."""
    remotes = [
        {"name": "nas", "url": str(root / "nas")},
        {"name": "models", "url": str(root / "models"), "forms": ["weights-bf16"], "required": False},
    ]
    return JobConfig.model_validate(
        {"save_dir": str(root / "run"), "name": "llama", "remote": remotes, **keys}
    )


def test_every_remote_has_it(tmp_path: Path) -> None:
    rules, one = config(tmp_path), checkpoint("step1")
    models = {"models": {"weights-bf16": FormStatus(state="committed")}}
    late = {"models": {"weights-bf16": FormStatus(state="uploading")}}
    assert is_ready(rules, replace(one, remotes=one.remotes | models))
    assert not is_ready(rules, one)
    assert not is_ready(rules, replace(one, remotes=one.remotes | late))
    assert not is_ready(rules, replace(one, remotes=models))


def test_it_is_written_again_with_a_form_more(tmp_path: Path) -> None:
    rules, one = config(tmp_path), checkpoint("step1")
    models = {"models": {"weights-bf16": FormStatus(state="committed")}}
    files = ReadyFiles(rules, tmp_path, lambda _: None)
    files.see(job(replace(one, remotes=one.remotes | models)))
    more = {"nas": one.remotes["nas"] | {"universal": FormStatus(state="committed")}}
    files.see(job(replace(one, remotes=more | models)))
    files.close()
    assert os.listdir(tmp_path) == ["step1.json"]
    assert json.loads((tmp_path / "step1.json").read_text())["remotes"]["nas"]["forms"] == [
        "universal",
        "zero",
    ]


def test_it_does_not_lie_in_save_dir(tmp_path: Path) -> None:
    with pytest.raises((ValueError, ConfigError), match="ready_dir lies in save_dir"):
        config(tmp_path, ready_dir=str(tmp_path / "run" / "ready"))
