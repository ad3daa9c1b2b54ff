"""Where a quickstart happens and with which numbers: one directory that holds node, remote, records.

<root>/nvme/gpt    the trainer's save_dir ("NVMe")        <root>/records    trainer's and quickstart's lines
<root>/nas/gpt     the remote if it is a "NAS", paced     <root>/observed   the eyewitness
<root>/job.toml    the job file                           <root>/audit      copies of audit.jsonl
<root>/bucket      after --keep: a copy of the remote if it is a bucket
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from examples.demo.remotes import Remote

SAVE_TOTAL_LIMIT = 2
MEMORY_BUDGET_MIB = 256
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How long the play is and how big its checkpoints are."""

    save_every: int
    torn_at: int
    last_step: int
    step_seconds: float
    remote_keep_last: int
    bandwidth: str
    model: tuple[str, ...] = ()
    """Options of the trainer."""


FULL = Script(
    save_every=5, torn_at=45, last_step=60, step_seconds=0.6, remote_keep_last=6, bandwidth="40MB/s"
)
SHORT = Script(
    save_every=3,
    torn_at=21,
    last_step=33,
    step_seconds=0.8,
    remote_keep_last=4,
    bandwidth="20MB/s",
    model=("--hidden", "256", "--layers", "1", "--heads", "4"),
)
"""The same acts in two thirds of the time, with checkpoints of half the size and few parameters."""

JOB_TOML = """\
# Written by `python -m examples.demo`; a job file as you would write one, but for the marked lines.
save_dir = "{save_dir}"
settle = "1s"
existing = "all"                        # what `ckptd resume` fetched may be rotated like the rest

[local]
save_total_limit = {limit}                    # older ones go once they are committed {where}, never before
min_free = "100MB"

[[remote]]
name = "{name}"
{remote}bandwidth = "{bandwidth}"                  # quickstart: slow, so that there is something to see
keep_last = {keep_last}
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """One quickstart: its directory, its ranks and its ZeRO stage."""

    root: Path
    stage: int
    world_size: int
    resume_world_size: int
    remote: Remote
    script: Script = FULL

    @property
    def save_dir(self) -> Path:
        """What the trainer calls save_dir."""
        return self.root / "nvme" / "gpt"

    @property
    def records(self) -> Path:
        """Lines of trainer and quickstart."""
        return self.root / "records"

    @property
    def observed(self) -> Path:
        """The eyewitness' notes."""
        return self.root / "observed"

    @property
    def job_file(self) -> Path:
        """The job file."""
        return self.root / "job.toml"

    @property
    def state_dir(self) -> Path:
        """Where ckptd keeps status.json and audit.jsonl of this job: on the node, lost with it."""
        return self.save_dir / "_ckptd" / "state"

    @property
    def torn_tag(self) -> str:
        """The save that the kill tears."""
        return f"global_step{self.script.torn_at}"

    def prepare(self) -> None:
        """Make the directories and the job file."""
        for folder in (self.save_dir, self.records, self.observed, self.root / "audit"):
            folder.mkdir(parents=True, exist_ok=True)
        text = JOB_TOML.format(
            save_dir=self.save_dir,
            limit=SAVE_TOTAL_LIMIT,
            where=self.remote.where,
            name=self.remote.name,
            remote=self.remote.toml,
            bandwidth=self.script.bandwidth,
            keep_last=self.script.remote_keep_last,
        )
        self.job_file.write_text(text)

    def write_plan(self, torn_files: list[tuple[str, int, str]]) -> None:
        """plan.json: what the judge must know of our intentions."""
        plan = {
            "save_dir": str(self.save_dir.relative_to(self.root)),
            "remote": {
                "kind": self.remote.kind,
                "place": self.remote.place,
                "where": self.remote.where,
                "address": self.remote.address.removeprefix(f"{self.root}/"),
            },
            "save_total_limit": SAVE_TOTAL_LIMIT,
            "memory_budget_bytes": MEMORY_BUDGET_MIB << 20,
            "tolerance": TOLERANCE,
            "last_step": self.script.last_step,
            "torn_tag": self.torn_tag,
            "torn_files": torn_files,
        }
        (self.root / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")

    def note(self, kind: str, **fields: Any) -> None:
        """One line of what the quickstart did itself, in records/driver.jsonl."""
        with (self.records / "driver.jsonl").open("a") as sink:
            sink.write(json.dumps({"at": time.time(), "kind": kind, **fields}) + "\n")

    def committed_tags(self, form: str = "zero") -> set[str]:
        """Tags with a COMMIT in the remote now, by name."""
        names = self.remote.view.entries("_ckptd/commits")
        parts = [n.removesuffix(".json").split("~") for n in names if n.endswith(".json")]
        return {p[0] for p in parts if len(p) == 3 and p[2] == form}

    def local_tags(self) -> list[str]:
        """Checkpoint folders in save_dir, by step."""
        tags = [
            n for n in _names(self.save_dir) if n.startswith("global_step") and not n.endswith("_universal")
        ]
        return sorted(tags, key=lambda tag: int(tag.removeprefix("global_step")))

    def status(self) -> dict[str, Any]:
        """The job in status.json; empty while there is none."""
        try:
            document = json.loads((self.state_dir / "status.json").read_text())
            return dict(document["jobs"][0])
        except (OSError, ValueError, LookupError):
            return {}


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
