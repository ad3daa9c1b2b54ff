"""Names swapped for links under the hands of every local operation: nothing outside is touched (P15)."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.conversion.engine import supervisor
from ckptd.core.model.decision import Decision
from ckptd.daemon.intake.decisions import read_decisions, write_decision
from ckptd.daemon.job import make_state
from ckptd.daemon.node_id import node_id_of
from ckptd.errors import CkptdError
from ckptd.observe.audit import Audit
from ckptd.storage.local import fs
from ckptd.storage.local.fs import remove_incomplete
from ckptd.storage.local.scan import read_pointer, scan
from tests.attacks.figures import note
from tests.attacks.swaps import ASIDE, SHARD, SITES, TAG, Swapper, SwapScene, before_each_call, flipping
from tests.support.synthetic import write_stage12

FULL = bool(os.environ.get("CKPTD_FULL"))
FLIPS = 100_000 if FULL else 2_000
Operation = Callable[[SwapScene, int], object]


def _prune(scene: SwapScene, fd: int) -> None:
    fs.delete_checkpoint(fd, scene.permit, ASIDE)


def _remove_derived(scene: SwapScene, fd: int) -> None:
    fs.remove_ours(fd, f"{fs.DERIVED}/universal", TAG)


def _empty_trash(scene: SwapScene, fd: int) -> None:
    fs.empty_our_trash(fd)


def _remove_incomplete(scene: SwapScene, fd: int) -> None:
    for folder in scan(fd).folders:
        remove_incomplete(fd, folder.tag, folder.files)


def _flush(scene: SwapScene, fd: int) -> None:
    fs.flush(fd, TAG, [f.path for f in scene.permit.files])


def _look(scene: SwapScene, fd: int) -> None:
    scan(fd)
    read_pointer(fd, "latest")
    fs.folder_is_intact(fd, TAG, scene.permit.files)


def _point(scene: SwapScene, fd: int) -> None:
    fs.point_latest_universal(fd, f"_ckptd/derived/universal/{TAG}")
    fs.point_latest_universal(fd, None)


def _state(scene: SwapScene, fd: int) -> None:
    state = make_state(scene.save_dir / "_ckptd" / "state", scene.save_dir, fd)
    assert "secret" not in node_id_of(state)
    Audit(state / "audit.jsonl").write("prune", tag=TAG, generation=1, form="zero", reason="test")
    read_decisions(state)
    decision = Decision(kind="pin", tag=TAG, serial=1)
    write_decision(state, decision)


OPERATIONS: dict[str, Operation] = {
    "prune": _prune,
    "remove a derived form": _remove_derived,
    "empty our trash": _empty_trash,
    "remove an incomplete one": _remove_incomplete,
    "flush": _flush,
    "look": _look,
    "point": _point,
    "state": _state,
}


def attempt(
    root: Path, operation: Operation, site: str, at: int, back: int, patch: pytest.MonkeyPatch
) -> tuple[int, list[str]]:
    """One run with one swap: how many calls it made, and what it touched outside."""
    scene = SwapScene(root)
    swapper = Swapper(*scene.evil(site), at, back)
    with (
        files.opened_dir(scene.save_dir) as fd,
        before_each_call(patch, swapper),
        contextlib.suppress(CkptdError, OSError),
    ):
        operation(scene, fd)
    found = scene.escaped()
    shutil.rmtree(root)
    return swapper.calls, found


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_swap_before_any_call_leads_nowhere(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every site × every call × (for good, back after one, two or five calls); by default a sample."""
    calls, _ = attempt(tmp_path / "x", OPERATIONS[what], "tag folder", -1, 0, monkeypatch)
    every = [(site, back, at) for site in SITES for back in (0, 1, 2, 5) for at in range(1, calls + 1)]
    escapes, started = [], time.monotonic()
    chosen = every if FULL else every[:: len(every) // 30 or 1]
    for site, back, at in chosen:
        _, found = attempt(tmp_path / "x", OPERATIONS[what], site, at, back, monkeypatch)
        escapes += [f"{what}, {site} swapped before call {at}, back {back}: {f}" for f in found]
    note(
        f"F23-{what.replace(' ', '-')}",
        f"links swapped before each call: {what}",
        runs=len(chosen),
        violations=len(escapes),
        seconds=time.monotonic() - started,
    )
    assert not escapes, "\n".join(escapes[:20])
    assert calls > 3


def test_the_harness_sees_links_that_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories opened without O_NOFOLLOW."""
    monkeypatch.setattr(files, "DIR_FLAGS", files.DIR_FLAGS & ~os.O_NOFOLLOW)
    found = []
    for at in range(1, 60):
        found += attempt(tmp_path / "x", _prune, "folder in it", at, 0, monkeypatch)[1]
    assert found


def test_the_harness_sees_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that works by path is caught: once reading, once writing, once removing."""

    def reads(scene: SwapScene, fd: int) -> None:
        time.sleep(0.001)
        os.close(os.open(scene.save_dir / TAG / SHARD, os.O_RDONLY))
        (scene.save_dir / TAG / SHARD).read_bytes()

    def writes(scene: SwapScene, fd: int) -> None:
        os.close(os.open(scene.save_dir / TAG / "new", os.O_CREAT | os.O_WRONLY))

    def removes(scene: SwapScene, fd: int) -> None:
        os.unlink(scene.save_dir / TAG / SHARD)

    for operation in (reads, writes, removes):
        assert attempt(tmp_path / "x", operation, "tag folder", 1, 0, monkeypatch)[1]


CONVERSION_SITES = ("tag folder", "ours", "staging", "derived", "form")


class ConversionScene(SwapScene):
    """Checkpoints that convert, here and outside, with other numbers in them."""

    def fill(self, root: Path, text: str) -> None:
        super().fill(root, text)
        write_stage12(root / TAG, [{text: (16, 8), "b": (8,)}], 1)
        if text == "inside":
            shutil.rmtree(root / SITES["derived checkpoint"])

    def convert(self, *, is_bound: bool = True) -> None:
        """The universal form as the daemon makes it."""
        place = self.save_dir / "_ckptd"
        made = place / "derived" / "universal" / TAG
        with contextlib.suppress(CkptdError, OSError):
            beneath = self.save_dir if is_bound else None
            supervisor.convert(self.save_dir / TAG, made, work_dir=place / "staging", beneath=beneath)

    def made(self) -> str | None:
        """Names of the parameters of what was made here; looked at when nothing is swapped any more."""
        made = self.save_dir / "_ckptd" / "derived" / "universal" / TAG
        is_here = os.path.realpath(made) == str(made) and made.is_dir()
        return ",".join(sorted(p.name for p in (made / "zero").iterdir())) if is_here else None


def test_conversions_while_names_are_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, staging and place of the result: nothing of the secret comes in, nothing goes out."""
    escapes, made = [], 0
    whole = Swapper(tmp_path, tmp_path, -1, 0)
    with before_each_call(monkeypatch, whole):
        ConversionScene(tmp_path / "x").convert()
    shutil.rmtree(tmp_path / "x")
    for number, site in enumerate(CONVERSION_SITES):
        for at in range(1 + number, whole.calls + 5, 1 if FULL else whole.calls // 2):
            scene = ConversionScene(tmp_path / "x")
            swapper = Swapper(*scene.evil(site), at, 0)
            with before_each_call(monkeypatch, swapper):
                scene.convert()
            escapes += [f"{site} before call {at}: {f}" for f in scene.escaped()]
            names = scene.made()
            made += names is not None
            if "secret" in (names or ""):
                escapes.append(f"{site} before call {at}: made {names}")
            shutil.rmtree(tmp_path / "x")
    assert not escapes, "\n".join(escapes[:20])
    assert made, "some swaps come too late to disturb"


@pytest.mark.parametrize("site", ["staging", "tag folder"])
def test_the_same_swaps_lead_outside_where_links_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    """`ckptd convert` follows what a person typed; the daemon's conversions are bound to save_dir."""
    scene = ConversionScene(tmp_path / "x")
    with before_each_call(monkeypatch, Swapper(*scene.evil(site), 1, 0)):
        scene.convert(is_bound=False)
    assert scene.escaped() or "secret" in (scene.made() or "")


@pytest.mark.parametrize("site", SITES if FULL else list(SITES)[::3])
def test_a_hundred_thousand_flips(tmp_path: Path, site: str) -> None:
    """Another process swaps as fast as it can while everything that may be repeated is repeated.

    Two thousand of them, of every third site, without CKPTD_FULL=1.
    """
    scene = SwapScene(tmp_path / "x")
    (scene.save_dir / "_ckptd" / "trash" / ASIDE / "inner").mkdir(parents=True)
    started, rounds = time.monotonic(), 0
    with flipping(*scene.evil(site), FLIPS) as flipper, files.opened_dir(scene.save_dir) as fd:
        while flipper.is_at_it or rounds < 20:
            rounds += 1
            for operation in (_look, _flush, _point, _state):
                with contextlib.suppress(CkptdError, OSError):
                    operation(scene, fd)
        flips = flipper.made()
    escaped = scene.escaped()
    note(
        f"F23-flips-{site.replace(' ', '-')}",
        f"{flips:,} flips of a name under a racing process: {site}",
        runs=flips,
        violations=len(escaped),
        seconds=time.monotonic() - started,
    )
    assert not escaped
    assert flips == FLIPS, "it stopped before its end"
