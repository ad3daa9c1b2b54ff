"""Secrets planted in the environment reach no child that reads checkpoints, and no file of ours (P15)."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.harness import children_of, node
from tests.support.synthetic import write_stage12

pytestmark = pytest.mark.faults
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "PlantedSecretOne0123456789abcdefghijklmn",
    "AWS_SESSION_TOKEN": "PlantedSecretTwo0123456789",
    "WANDB_API_KEY": "PlantedSecretThree0123456789",
    "HTTPS_PROXY": "http://user:PlantedSecretFour@127.0.0.1:9",
}


class Ear(threading.Thread):
    """Reads what every child of a daemon was given, while they come and go."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.is_done = False
        self.heard: dict[str, tuple[bytes, str]] = {}
        """Module of a child → its environment, its limit on core files."""

    def run(self) -> None:
        while not self.is_done:
            for pid in children_of(self._pid):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    limits = Path(f"/proc/{pid}/limits").read_text()
                    core = next(line for line in limits.splitlines() if line.startswith("Max core"))
                    module = next((w.decode() for w in words if w.startswith(b"ckptd.")), "")
                    if module:
                        environ = Path(f"/proc/{pid}/environ").read_bytes()
                        self.heard[module] = (environ, core.split()[4])
            time.sleep(0.002)


def test_nothing_planted_is_found_anywhere(tmp_path: Path) -> None:
    """A directory needs no secret: not even the remote's child gets one; core files of readers are off."""
    with node(tmp_path, local='forms = ["universal"]') as here:
        here.environment.update(SECRETS)
        daemon = here.start("--log-level", "debug")
        ear = Ear(daemon.pid)
        ear.start()
        write_stage12(here.root / "staged", [{"w": (64, 80), "b": (8,)}], 2, step=1)
        (here.root / "staged").rename(here.save_dir / "global_step1")
        here.wait_committed("global_step1~g1")
        here.wait("universal", lambda: "global_step1~g1" in here.commits("universal"))
        printed = [here.ckptd(verb, here.job_file) for verb in ("status", "list", "verify", "check")]
        ear.is_done = True
        ear.join(5)
        here.stop()
        kinds = {module.rpartition(".")[2] for module in ear.heard}
        assert {"inspect_child", "child"} <= kinds, kinds
        for module, (environ, core) in ear.heard.items():
            assert not any(secret.encode() in environ for secret in SECRETS.values()), module
            assert module.endswith("remote.child") or core == "0", module
        for path in here.root.rglob("*"):
            if path.is_file():
                assert not any(secret.encode() in path.read_bytes() for secret in SECRETS.values()), path
        for done in printed:
            assert not any(secret in done.stdout + done.stderr for secret in SECRETS.values())
