"""`restore` and `resume` while somebody plants links where they write: nothing outside is touched (P15)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from ckptd.errors import CkptdError
from tests.attacks.figures import note
from tests.attacks.swaps import SwapScene, before_each_call, exchange
from tests.support.restore_scene import TAG, RestoreScene

FULL = bool(os.environ.get("CKPTD_FULL"))
PLACES = (TAG, "_ckptd", "_ckptd/staging", "_ckptd/aside", "latest")


FULL_POINTS = {"restore": 1000, "resume": 200}
"""A resume looks at everything that lies there and takes over a second."""


def spread(calls: int, most: int, seed: str) -> list[int]:
    """One call of each of `most` equal stretches of them, by the seed; all where there are no more."""
    rng, parts = random.Random(seed), min(most, calls)
    return [rng.randint(1 + n * calls // parts, (n + 1) * calls // parts) for n in range(parts)]


class Planter:
    """Before the `at`-th call a name becomes a link to its like outside, whether it was there or not."""

    def __init__(self, place: Path, outside: Path, at: int) -> None:
        self.calls, self._at = 0, at
        self._place, self._outside = place, outside

    def __call__(self) -> None:
        self.calls += 1
        if self.calls != self._at:
            return
        waits = self._place.parent.parent / "waits"
        waits.symlink_to(self._outside)
        with contextlib.suppress(FileNotFoundError):
            exchange(waits, self._place)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            if waits.is_symlink():
                waits.rename(self._place)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A remote with two checkpoints, made once."""
    scene = RestoreScene(tmp_path_factory.mktemp("committed"))
    scene.two()
    return scene.root


def attempt(root: Path, committed: Path, verb: str, place: str, at: int, patch: pytest.MonkeyPatch) -> int:
    """One recovery with one planted link; how many calls it made."""
    shutil.copytree(committed, root / "here")
    scene = RestoreScene(root / "here")
    watched = SwapScene(root / "there")
    if verb == "resume":
        (scene.save_dir / TAG / os.listdir(scene.save_dir / TAG)[0]).write_bytes(b"torn")
    target = scene.save_dir if verb == "resume" else scene.dir
    (target / "_ckptd" / "staging").mkdir(parents=True)
    planter = Planter(target / place, watched.outside / place.replace(TAG, "global_step1"), at)
    with before_each_call(patch, planter), contextlib.suppress(CkptdError, OSError):
        scene.resume() if verb == "resume" else scene.restore()
    found = watched.escaped()
    shutil.rmtree(root / "here")
    shutil.rmtree(root / "there")
    assert not found, f"{verb}: {place} became a link before call {at}: {found}"
    return planter.calls


@pytest.mark.parametrize("verb", ["restore", "resume"])
@pytest.mark.parametrize("place", PLACES)
def test_links_planted_in_mid_recovery(
    tmp_path: Path, committed: Path, verb: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before four calls; with CKPTD_FULL=1 before so many that it takes some minutes, spread over all."""
    started = time.monotonic()
    calls = attempt(tmp_path, committed, verb, place, -1, monkeypatch)
    assert calls > 100
    chosen = spread(calls, FULL_POINTS[verb] if FULL else 4, f"{verb} {place}")
    print(f"{verb}, {place}: {len(chosen)} of {calls} points")
    for at in chosen:
        attempt(tmp_path, committed, verb, place, at, monkeypatch)
    note(
        f"F23-{verb}-{place.replace('/', '-')}",
        f"links planted before calls of {verb}",
        runs=len(chosen),
        violations=0,  # the first one ends the run
        seconds=time.monotonic() - started,
        said=f"of {calls} points",
    )
