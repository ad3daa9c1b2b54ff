"""Real runs of transformers.Trainer with DeepSpeed on CPU, live into a save_dir (docs/formats.md §1.2)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.real import CACHE
from tests.stores.servers import free_port

SCRIPT = Path(__file__).with_name("hf_train.py")
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfRun:
    """One run of the Trainer; the total batch is 8 whatever the number of processes."""

    stage: int = 2
    processes: int = 2
    steps: int = 8
    save_steps: int = 2
    limit: int = 0
    save_only_model: bool = False
    best: bool = False
    pause_seconds: float = 0.0
    resume: Path | None = None
    universal: bool = False
    init_seed: int = 7

    def command(self, out: Path, losses: Path, notes: Path | None = None) -> list[str]:
        """The launch, as users write it."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.processes)),
            *("--master_port", str(free_port()), str(SCRIPT), "--out", str(out), "--losses", str(losses)),
            *("--stage", str(self.stage), "--steps", str(self.steps), "--save-steps", str(self.save_steps)),
            *("--limit", str(self.limit), "--pause", str(self.pause_seconds)),
            *("--init-seed", str(self.init_seed)),
        ]
        command += ["--save-only-model"] if self.save_only_model else []
        command += ["--best"] if self.best else []
        command += ["--universal"] if self.universal else []
        command += ["--resume", str(self.resume)] if self.resume else []
        return command + (["--notes", str(notes)] if notes else [])

    def start(self, out: Path, losses: Path, notes: Path | None = None) -> subprocess.Popen[bytes]:
        """Train in the background, its output beside the losses."""
        with losses.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                self.command(out, losses, notes), stdout=log, stderr=log, env=os.environ | ENVIRONMENT
            )

    def run(self, out: Path, losses: Path, notes: Path | None = None) -> dict[int, float]:
        """Train to the end; loss by step."""
        process = self.start(out, losses, notes)
        if process.wait(240) != 0:
            raise AssertionError(losses.with_suffix(".log").read_text()[-3000:])
        return read_losses(losses)

    def reference(self) -> dict[int, float]:
        """Losses of this run, trained once per machine."""
        text = json.dumps([asdict(self), SCRIPT.read_text()], sort_keys=True, default=str)
        cached = CACHE / f"hf-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        if not cached.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            self.run(cached.with_suffix(".out"), cached.with_suffix(".new"))
            cached.with_suffix(".new").rename(cached)
        return read_losses(cached)


def read_losses(path: Path) -> dict[int, float]:
    """Loss by step."""
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}
