"""The large real checkpoint that is converted: 319 M parameters, trained for one step on CPU, cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from tests.support.real import MODULE, REPOSITORY, SCRIPTS, Recipe, launch

CACHE = REPOSITORY / ".build" / "bench"
LARGE = {
    2: Recipe(stage=2, world_size=2, hidden=1024, layers=20, heads=16, vocab=32768),
    3: Recipe(stage=3, world_size=4, hidden=1024, layers=20, heads=16, vocab=32768),
}
TINY = {stage: Recipe(stage=stage, world_size=2) for stage in (2, 3)}


def checkpoint(recipe: Recipe) -> Path:
    """The tag folder of a recipe, made when it is not cached."""
    versions = [importlib.metadata.version(p) for p in ("torch", "deepspeed")]
    text = json.dumps([asdict(recipe), versions, SCRIPTS[0].read_text()], sort_keys=True)
    place = CACHE / f"z{recipe.stage}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not (place / "done").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        job = {
            "out": str(place / "save"),
            "recipe": asdict(recipe),
            "load": None,
            "tag": None,
            "steps": 1,
            "save_at": [1],
            "init_seed": 7,
            "losses": str(place / "losses.json"),
        }
        launch(recipe.world_size, [job], place, MODULE)
        (place / "done").touch()
    return place / "save" / "global_step1"
