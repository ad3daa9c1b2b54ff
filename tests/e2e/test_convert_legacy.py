"""Real checkpoints from before torch 1.6's zips, by torch and by DeepSpeed, against the stock converter."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.facts import Archive
from tests.support import real, stock
from tests.support.disguise import disguise
from tests.support.real import TAG, Recipe, prepare, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RECIPES = {
    1: Recipe(stage=1, world_size=1, dtype="fp32"),
    2: Recipe(stage=2, world_size=2),
    3: Recipe(stage=3, world_size=2),
}
OTHER = Path(real.__file__).with_name("make_other_ckpt.py")


def saved_with(
    setting: dict[str, Any], recipes: Sequence[Recipe], monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Checkpoints made with a further setting of DeepSpeed's, in a cache of their own."""
    text = json.dumps(setting, sort_keys=True)
    name = f"with-{hashlib.sha256((text + OTHER.read_text()).encode()).hexdigest()[:12]}"
    monkeypatch.setenv("CKPTD_DS_CONFIG", text)
    monkeypatch.setattr(real, "MODULE", f"tests.support.{OTHER.stem}")
    monkeypatch.setattr(real, "CACHE", real.CACHE / name)
    monkeypatch.setattr(real, "EXPECTED", {})
    prepare(recipes)
    return [save_dir_of(recipe) / TAG for recipe in recipes]


def equal_to_stock(sources: Sequence[Path], work: Path) -> list[list[str]]:
    """What differs from the stock converter, per source."""
    for i, source in enumerate(sources):
        for fact in inspect_files(source, sorted(p.name for p in source.iterdir())):
            assert (fact.archive, fact.reason) == (Archive.LEGACY, None)
            assert fact.facts is not None
        convert(source, work / f"ours{i}", ConvertOptions(compat="strict", verify=True))
    stock.convert([(source, work / f"stock{i}") for i, source in enumerate(sources)])
    return stock.differences([(work / f"stock{i}", work / f"ours{i}") for i in range(len(sources))])


def test_shards_written_again_as_legacy_files(tmp_path: Path) -> None:
    prepare(list(RECIPES.values()))
    folders = [tmp_path / f"legacy{stage}" for stage in RECIPES]
    jobs = [(save_dir_of(r) / TAG, f, None, False) for r, f in zip(RECIPES.values(), folders, strict=True)]
    disguise(jobs)
    assert equal_to_stock(folders, tmp_path) == [[], [], []]


def test_shards_that_deepspeed_saved_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checkpoint.checkpoint_serialization: false`; all three stages with CKPTD_FULL=1."""
    stages = (1, 2, 3) if os.environ.get("CKPTD_FULL") else (3,)
    recipes = [Recipe(stage=stage, world_size=2) for stage in stages]
    sources = saved_with({"checkpoint": {"checkpoint_serialization": False}}, recipes, monkeypatch)
    assert equal_to_stock(sources, tmp_path) == [[] for _ in stages]
