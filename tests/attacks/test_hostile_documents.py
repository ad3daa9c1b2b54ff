"""Documents of a remote made to hurt: bombs, lies, absurd formats; every verb ends in words (P15)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ckptd.maintenance.verify import Verifier
from ckptd.recover.select.inventory import read_remote_inventory
from tests.support.restore_scene import TAG, RestoreScene, scene
from tests.unit.recover.test_recover_commands import ckptd

__all__ = ["scene"]
FULL = bool(os.environ.get("CKPTD_FULL"))
DEEP = b"[" * 200_000 + b"]" * 200_000
WIDE = b'{"format": "1.0", "files": [' + b"{}," * 2_000_000 + b"{}]}"
BOMBS: dict[str, bytes] = {
    "empty": b"",
    "no json": b"\x00" * 1000,
    "nested 200,000 deep": DEEP,
    "two million files": WIDE,
    "a number of a million digits": b'{"format": "1.0", "step": ' + b"9" * 1_000_000 + b"}",
    "a major of letters": b'{"format": "x.1", "tag": "t"}',
    "a major of many digits": b'{"format": "' + b"9" * 5000 + b'.0", "tag": "t"}',
    "a future major": b'{"format": "99.0"}',
    "null": b"null",
    "a list": b"[]",
    "lone surrogates": b'{"format": "1.0", "tag": "\\ud800"}',
    "bytes that are no text": b'{"format": "1.0", "tag": "\xff\xfe"}',
    "NaN": b'{"format": "1.0", "step": NaN}',
    "sixteen megabytes": b'"' + b"a" * (16 << 20) + b'"',
}
PLACES = {
    "COMMIT": f"_ckptd/commits/{TAG}~g1~zero.json",
    "pin": "_ckptd/pins/pin~x~1.json",
    "tombstone": "_ckptd/retired/other~g1~zero.json",
    "dispute": "_ckptd/disputes/other~g1~zero.json",
    "heartbeat": "_ckptd/heartbeats/other.json",
}
MEASURED = """
import atexit, runpy, sys
from ckptd.conversion.engine.sandbox import peak_rss_bytes
atexit.register(lambda: print("peak", peak_rss_bytes(), file=sys.stderr))
runpy.run_module("ckptd", run_name="__main__")
"""
VERBS: list[tuple[str, ...]] = [
    ("list", "NAS"),
    ("verify", "NAS"),
    ("restore", "NAS", "--to", "DIR"),
    ("gc", "NAS", "--dry-run"),
]


def plant(scene: RestoreScene, bomb: str) -> None:
    """Where a COMMIT, a pin, a tombstone, a dispute and a heartbeat should be."""
    scene.two()
    for relative in PLACES.values():
        path = scene.nas / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BOMBS[bomb])


@pytest.mark.parametrize("bomb", BOMBS)
def test_documents_that_hurt(scene: RestoreScene, bomb: str) -> None:
    """Refused in one sentence; the older checkpoint is restored and verified as good."""
    plant(scene, bomb)
    assert scene.restore().path.name == "global_step5"
    assert max(map(len, scene.said)) < 2000
    found = Verifier(read_remote_inventory("nas", str(scene.nas), None)).run(None)
    assert [row.tag for row in found.commits if row.verdict == "good"] == ["global_step5"]


@pytest.mark.parametrize("bomb", BOMBS if FULL else ["two million files"])
def test_every_verb_ends_in_words(scene: RestoreScene, bomb: str) -> None:
    """As commands, with what memory they take."""
    plant(scene, bomb)
    for verb in VERBS if FULL else VERBS[1:3]:
        words = [{"NAS": str(scene.nas), "DIR": str(scene.dir)}.get(word, word) for word in verb]
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, (verb, done.stderr[-2000:])
        assert done.returncode in (0, 4, 65), (verb, done.returncode, done.stderr[-500:])
        assert len(done.stdout) + len(done.stderr) < 100_000
        peak_bytes = int(done.stderr.rsplit("peak ", 1)[1])
        assert peak_bytes < 1 << 30, f"{verb}: {peak_bytes >> 20} MiB"


KEYS = ("%2e%2e/%2e%2e/out.pt", "..%2f..%2fout.pt", "%2fetc%2fpasswd", "a/%2e%2e/%2e%2e/b", "%00", "~g1~zero")


@pytest.mark.parametrize("key", KEYS)
def test_percent_signs_lead_nowhere(scene: RestoreScene, key: str) -> None:
    """A key is a name, never decoded once more on its way to the disk."""
    from tests.attacks.test_hostile_remotes import rewrite

    scene.two()
    (scene.root / "out.pt").write_text("mine")

    def change(document: dict[str, Any]) -> None:
        document["files"][0]["key"] = f"{TAG}/{key}"

    rewrite(scene, TAG, change)
    assert scene.restore().path.name == "global_step5", "its object is not there: the one before"
    assert (scene.root / "out.pt").read_text() == "mine"


@pytest.mark.parametrize("size", [0, 1, 10**6])
def test_a_manifest_that_lies_about_a_size(scene: RestoreScene, size: int) -> None:
    """Neither believed nor allocated: the one before is restored."""
    from tests.attacks.test_hostile_remotes import rewrite

    scene.two()

    def change(document: dict[str, Any]) -> None:
        document["files"][0]["bytes"] = size

    rewrite(scene, TAG, change)
    assert scene.restore().path.name == "global_step5"
    done = ckptd("verify", scene.nas, "--read-data", "--json")
    rows = {row["tag"]: row["verdict"] for row in json.loads(done.stdout)["remotes"][0]["commits"]}
    assert rows == {TAG: "damaged", "global_step5": "good"}


def test_tombstones_of_a_stranger_remove_nothing_that_is_committed(scene: RestoreScene) -> None:
    """`gc` finishes a removal only where no COMMIT stands; names that lead out are not even looked at."""
    scene.two()
    retired = scene.nas / "_ckptd" / "retired"
    retired.mkdir(parents=True, exist_ok=True)
    outside = scene.root / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    text = {
        "format": "1.0",
        "tag": "../../outside",
        "generation": 1,
        "form": "zero",
        "keys": ["../outside/file"],
    }
    (retired / "..%2F..%2Foutside~g1~zero.json").write_text(json.dumps(text))
    done = ckptd("gc", scene.nas)
    assert "Traceback" not in done.stderr
    assert (outside / "file").read_text() == "mine"
    assert scene.restore().path.name == TAG
