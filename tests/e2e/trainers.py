"""docs/trainers.md: what is shown of each trainer's checkpoints; `python -m tests.e2e.trainers` writes it.

Each row is a run of the trainer itself: two ranks save, ckptd commits, the node is lost, a run resumes from
what `ckptd resume` gives it. `make trainers` runs all of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import ckptd
from tests.e2e.harness import node
from tests.e2e.test_other_layouts import (
    COLUMNS,
    STEPS,
    check_inspected,
    check_torn,
    python_of,
    round_trip,
    tag_of,
    train,
    trained_further,
)
from tests.support.other_trainers import TAG_OF

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
HEAD = f"""# Trainers without ZeRO, tried

<!-- Made by `make trainers`. -->

Each row is a run of the trainer itself on CPU: two ranks train and save, ckptd commits, the node is
lost, and a run resumes from the path that `ckptd resume` prints. *Whole proved*: the verdict is
complete, with the right step. *Torn refused*: no checkpoint of which one file is cut by a byte, by
half, to nothing, or is missing is ever called complete; a file of random states or of the schedule
may be missing where nothing tells that it was there. A writer that died left no marker; quiet time
proves nothing (–). *Resumed*: the losses of the steps after
{STEPS} are those of the run that was not interrupted, to 0.001.

"""
ROWS = {
    "huggingface": ("Hugging Face Trainer, DDP", "transformers"),
    "huggingface-fsdp-full": ("Hugging Face Trainer, FSDP2, FULL_STATE_DICT", "transformers"),
    "huggingface-fsdp-sharded": ("Hugging Face Trainer, FSDP2, SHARDED_STATE_DICT", "transformers"),
    "accelerate": ("Accelerate, DDP", "accelerate"),
    "accelerate-fsdp-full": ("Accelerate, FSDP2, FULL_STATE_DICT", "accelerate"),
    "accelerate-fsdp-sharded": ("Accelerate, FSDP2, SHARDED_STATE_DICT", "accelerate"),
    "torch": ("FSDP2 and torch.distributed.checkpoint in a script", "torch"),
    "torchtitan": ("torchtitan, Llama 3", "torchtitan"),
    "lightning": ("Lightning, DDP, `.ckpt` files", "pytorch-lightning"),
    "lightning-fsdp": ("Lightning, FSDP2 (`ModelParallelStrategy`), `.ckpt` folders", "pytorch-lightning"),
    "torch-file": ("a script's `torch.save` files (`[layout] files`)", "torch"),
    "declared-marker": ('a script\'s folders with a marker (`complete_when = "marker DONE"`)', "torch"),
    "declared-manifest": (
        'a script\'s folders with their sums (`complete_when = "manifest SHA256SUMS"`)',
        "torch",
    ),
    "declared-quiet": ('a script\'s files of its own (`files`, `complete_when = "quiet 2s"`)', "torch"),
}
UNPROVED = ("declared-quiet",)
"""Nothing in these tells whether they are whole."""
TAIL = """
Accelerate takes up an FSDP plugin only where it sees a GPU; here that check alone is passed over.
Wrapping, saving and loading are its own code, and the Trainer's, on gloo. DeepSpeed below these trainers is
tried by `make demo-frameworks` ([Trainers](integrations.md)). torchtitan trains its own debug model; what
it asks of a GPU (name, memory), torch.cpu answers, and gradients are divided after gloo's sum. Its
checkpoint becomes the universal form, and that `--form dcp`: torchtitan goes on from this folder with the
losses that it has from its own.
"""


def row_of(layout: str) -> tuple[str, bool]:
    """One line of the table, and whether all of it holds."""
    shown: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ckptd-trainers-") as place:
        root = Path(place)
        try:
            source, losses = trained_further(layout, root / "trained")
            check_inspected(layout, source)
            shown += COLUMNS[:2]
            if layout not in UNPROVED:
                check_torn(layout, source / tag_of(layout, STEPS), root / "torn")
                shown.append(COLUMNS[2])
            with node(root / "node", local="save_total_limit = 2") as here:
                shown += round_trip(layout, source, losses, here, root)
            if layout == "torchtitan":
                check_through_deepspeed(source / tag_of(layout, STEPS), root)
        except AssertionError:
            traceback.print_exc()
    words, package = ROWS[layout]
    open_ones = {COLUMNS[2]} if layout in UNPROVED else set()
    marks = ("✓" if column in shown else "–" if column in open_ones else "✗" for column in COLUMNS)
    line = f"| {words} | {package} {version_of(layout, package)} | {' | '.join(marks)} |"
    return line, {*shown, *open_ones} == {*COLUMNS}


def check_through_deepspeed(source: Path, root: Path) -> None:
    """Convert a step of torchtitan's to the universal form and back: both go on with the same losses.

    From either, torchtitan is told to take the model and the optimizer alone.
    """
    name = source.name
    (root / "made").mkdir()
    ckptd.convert(source, root / "universal")
    ckptd.convert(root / "universal", root / "made" / name, form="dcp")
    shutil.copytree(source, root / "own" / name)
    shutil.copy(root / "made" / name / "ckptd.json", root / "own" / name)
    own, made = (train("torchtitan", root / of, 2, 2, root / of / name) for of in ("own", "made"))
    assert sorted(own) == [1, 2]
    assert own == made, (own, made)


def version_of(layout: str, package: str) -> str:
    """Return the version of a package where that trainer runs."""
    told = f"from importlib.metadata import version; print(version('{package}'))"
    done = subprocess.run([python_of(layout), "-c", told], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    """Run the rows that are named, or all, and renew them on the page; 1 if any does not hold."""
    assert set(ROWS) == set(TAG_OF)
    is_good = True
    for layout in sys.argv[1:] or ROWS:
        line, holds = row_of(layout)
        print(line, flush=True)
        is_good &= holds
        renew(layout, line)
    return 0 if is_good else 1


def renew(layout: str, line: str) -> None:
    """Put one row on the page; the others stay as they are, and one that was never run says so."""
    before = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = {name: f"| {words} | not run |{' |' * len(COLUMNS)}" for name, (words, _) in ROWS.items()}
    for name, (words, _) in ROWS.items():
        rows[name] = next((row for row in before if row.startswith(f"| {words} |")), rows[name])
    rows[layout] = line
    head = f"| trainer | version | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"
    PAGE.write_text(f"{HEAD}{head}\n" + "\n".join(rows.values()) + "\n" + TAIL)


if __name__ == "__main__":
    sys.exit(main())
