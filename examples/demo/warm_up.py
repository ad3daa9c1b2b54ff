"""`python -m examples.demo.warm_up`: one tiny run of two ranks, so that DeepSpeed's JIT is compiled.

DeepSpeed builds its shared-memory collective on first use (about half a minute); this moves it to set-up.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from examples.demo.launch import start_training


def main() -> None:
    """Train two steps of a tiny model and say how long it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptd-warm-up-") as name:
        options = ["--last-step", "2", "--hidden", "16", "--layers", "1", "--heads", "2", "--vocab", "64"]
        training = start_training(
            "warm-up", Path(name) / "records", Path(name) / "save", stage=2, world_size=2, options=options
        )
        training.wait(timeout_seconds=600)
    print(f"DeepSpeed is ready ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
