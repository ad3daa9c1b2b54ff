"""Real mixtures of experts that `tests.support.real` cannot describe: cached and resumed in the same way."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.real import CACHE, SAVED_AT, STEPS, Recipe, launch, locked

MODULE = "tests.support.make_experts"
SCRIPT = Path(__file__).with_name("make_experts.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A recipe and what is special about its experts; see make_experts.py."""

    recipe: Recipe
    in_blocks: bool = False
    auto: int = 0

    @property
    def place(self) -> Path:
        """Its cached folder: `save/`, `losses.json`."""
        text = json.dumps([self.recipe.key, self.in_blocks, self.auto, SCRIPT.read_text()])
        return CACHE / f"experts-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def job(self, out: Path, losses: Path, **more: Any) -> dict[str, Any]:
        """One run of make_experts.py."""
        recipe = {**asdict(self.recipe), "in_blocks": self.in_blocks, "auto": self.auto}
        return {"out": str(out), "recipe": recipe, "losses": str(losses), **more}


def prepare(experts: Experts) -> Path:
    """The save_dir of a training run of it; never write into it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked():
        if not (experts.place / "done").exists():
            shutil.rmtree(experts.place, ignore_errors=True)
            experts.place.mkdir()
            job = experts.job(
                experts.place / "save",
                experts.place / "losses.json",
                load=None,
                tag=None,
                steps=STEPS,
                save_at=[SAVED_AT],
                init_seed=7,
            )
            launch(experts.recipe.world_size, [job], experts.place, MODULE)
            (experts.place / "done").touch()
    return experts.place / "save"


def resume(
    world_size: int, runs: Sequence[tuple[Experts, Path, str, str]], work: Path
) -> list[dict[int, float]]:
    """Losses by step of each (experts, save_dir, tag, "zero" or "universal"), all in one start."""
    jobs = [
        one.job(
            out,
            work / f"losses{i}.json",
            load=load,
            tag=tag,
            steps=STEPS - SAVED_AT,
            save_at=[],
            init_seed=99,
        )
        for i, (one, out, tag, load) in enumerate(runs)
    ]
    launch(world_size, jobs, work, MODULE)
    found = [json.loads((work / f"losses{i}.json").read_text()) for i in range(len(runs))]
    return [{int(step): float(loss) for step, loss in losses.items()} for losses in found]
