"""A real checkpoint cut off and flipped everywhere: never complete, never committed, found (P2, P5, P18).

Truncations at every 4 KiB and at every byte of the last 64 KiB; one flipped bit per 4 KiB block of every
file, on the node before and in the remote after it was committed. All with CKPTD_FULL=1, else a sample.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import files
from ckptd.conversion.engine import inspect, inspect_child
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.listing import FolderListing
from ckptd.errors import CkptdError, DamagedError, TornArchiveError
from ckptd.maintenance.verify import Slice, Verifier
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.storage.local.scan import scan_folder
from ckptd.storage.stores.sources import CheckedSource, FileSource, crc64_of, records_of
from tests.attacks.figures import note
from tests.support.real import Recipe, prepare, save_dir_of
from tests.support.recover_scene import Scene

pytestmark = pytest.mark.real
FULL = bool(os.environ.get("CKPTD_FULL"))
BLOCK = 4096
CONTEXT = Context(settle_seconds=5, quiet_seconds=1000, is_in_flight=False, save_spread_seconds=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a real save of two ranks."""
    copy = tmp_path / "run" / "global_step2"
    recipe = Recipe(stage=2, world_size=2)
    prepare([recipe])
    shutil.copytree(save_dir_of(recipe) / "global_step2", copy)
    return copy


def inspected(folder_fd: int, name: str, patch: pytest.MonkeyPatch) -> FileFacts:
    """What the inspecting child says of a file, by its own code, here."""
    line: dict[str, Any] = {}
    patch.setattr(inspect_child, "_emit", line.update)
    line |= inspect_child._inspect(folder_fd, 0, inspect._asked(name))
    return inspect._facts_of(name, line)


def listed(folder: Path) -> FolderListing:
    """By the scanner."""
    with files.opened_dir(folder.parent) as fd:
        found = scan_folder(fd, folder.name)
    assert found is not None
    return found


def verdict_on(folder: Path, facts: dict[str, FileFacts]) -> Verdict:
    """By the real judgement."""
    return judge(listed(folder), facts, None, CONTEXT)


def cuts(size: int, rng: random.Random) -> Iterator[int]:
    """Lengths to cut to, from the longest to the shortest."""
    near = range(size - 1, max(size - (64 << 10), 0), -1)
    wide = range((size - 1) // BLOCK * BLOCK, 0, -BLOCK)
    if FULL:
        yield from sorted({*near, *wide}, reverse=True)
    else:
        yield from sorted({*near[:30], *rng.sample(near, 16), *wide[::9]}, reverse=True)
    yield 0


def test_no_cut_shard_is_taken_for_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it ends: the checkpoint is not complete, and the reason names the file."""
    started, runs = time.monotonic(), 0
    names = sorted(path.name for path in folder.iterdir())
    whole = {fact.path: fact for fact in inspect_files(folder, names)}
    listing, missed = listed(folder), []
    assert judge(listing, whole, None, CONTEXT).state is State.COMPLETE
    for name in names:
        data = (folder / name).read_bytes()
        with files.opened_dir(folder) as fd:
            for size in cuts(len(data), random.Random(8)):
                os.truncate(folder / name, size)
                facts = whole | {name: inspected(fd, name, monkeypatch)}
                verdict = judge(listing, facts, None, CONTEXT)
                runs += 1
                if verdict.state is not State.INCOMPLETE or name not in (verdict.reason or ""):
                    missed.append((name, size, verdict.state, verdict.reason))
        (folder / name).write_bytes(data)
    note("F8", "shards cut off", runs=runs, violations=len(missed), seconds=time.monotonic() - started)
    assert runs > 150
    assert not missed, missed[:5]


def test_a_missing_and_an_extra_rank(folder: Path) -> None:
    """What is missing is named; a stale shard of a wider save is named and stands in nobody's way (H13)."""
    names = sorted(path.name for path in folder.iterdir())
    facts = {fact.path: fact for fact in inspect_files(folder, names)}
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        verdict = verdict_on(folder, {n: f for n, f in facts.items() if n != name})
        assert verdict.state is State.INCOMPLETE
        assert (
            "rank 1" in (verdict.reason or "")
            or "rank 0" in (verdict.reason or "")
            or "model" in (verdict.reason or "")
        )
        (folder / name).write_bytes(data)
    extra = names[0].replace("rank_0", "rank_2")
    (folder / extra).write_bytes((folder / names[0]).read_bytes())
    facts |= {fact.path: fact for fact in inspect_files(folder, [extra])}
    verdict = verdict_on(folder, facts)
    assert verdict.state is not State.COMPLETE or any(extra in text for text in verdict.notes)


def flips(size: int, rng: random.Random, step: int) -> Iterator[tuple[int, int]]:
    """(offset, bit) of one bit in every block, or in every `step`-th."""
    for at in range(0, size, BLOCK * step):
        yield min(at + rng.randrange(BLOCK), size - 1), rng.randrange(8)


@contextlib.contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    """One bit of a file turned."""
    with path.open("r+b") as file:
        value = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([value ^ (1 << bit)]), at)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), bytes([value]), at)


def uploaded(folder_fd: int, name: str, patch: pytest.MonkeyPatch) -> str:
    """How far a damaged file gets: "torn", "damaged" (in the upload's pass), or "uploaded"."""
    if inspected(folder_fd, name, patch).archive is not Archive.ZIP:
        return "torn"
    with files.reading(folder_fd, name) as fd:
        try:
            source = CheckedSource(FileSource(fd, name), records_of(fd, name, is_shard=True), name)
            crc64_of(source, 0, source.size_bytes)
        except TornArchiveError:
            return "torn"
        except DamagedError:
            return "damaged"
    return "uploaded"


def test_no_flipped_bit_of_a_record_is_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of every record is under the CRC that torch.save wrote; what passes lay between records."""
    started, runs, missed, between = time.monotonic(), 0, [], 0
    rng = random.Random(9)
    with files.opened_dir(folder) as folder_fd:
        for path in sorted(folder.iterdir()):
            with files.reading(folder_fd, path.name) as fd:
                records = records_of(fd, path.name, is_shard=True)
            for at, bit in flips(path.stat().st_size, rng, 1 if FULL else 4):
                runs += 1
                with flipped(path, at, bit):
                    if uploaded(folder_fd, path.name, monkeypatch) == "uploaded":
                        is_inside = any(r.offset <= at < r.offset + r.size for r in records)
                        missed += [(path.name, at, bit)] if is_inside else []
                        between += not is_inside
    note(
        "F9-local",
        "a bit flips on the node",
        runs=runs,
        violations=len(missed),
        seconds=time.monotonic() - started,
    )
    assert not missed
    assert runs > 30
    assert between <= runs // 10, "padding is little"


def test_every_flipped_bit_in_the_remote_is_found(folder: Path, tmp_path: Path) -> None:
    """`verify --read-data` names the object."""
    started, runs, missed = time.monotonic(), 0, []
    scene = Scene(tmp_path / "scene")
    shutil.copytree(folder, scene.save_dir / folder.name)
    (scene.save_dir / "tokenizer.json").write_text("{}")
    scene.commit(folder.name, 2)
    inventory = read_remote_inventory("nas", str(scene.nas), None)
    assert Verifier(inventory, read=Slice()).run(None).is_good
    rng = random.Random(10)
    for path in sorted((scene.nas / folder.name).glob("*.pt")):
        for at, bit in flips(path.stat().st_size, rng, 1 if FULL else 40):
            runs += 1
            with flipped(path, at, bit):
                found = Verifier(inventory, read=Slice()).run(None)
            keys = [difference.key for row in found.commits for difference in row.differences]
            if keys != [f"{folder.name}/{path.name}"]:
                missed.append((path.name, at, bit, keys))
    note(
        "F9-remote", "a bit flips at rest in the remote", runs=runs, violations=len(missed),
        seconds=time.monotonic() - started,
    )  # fmt: skip
    assert not missed, missed[:5]
    assert runs > 10


def test_a_file_that_changed_after_it_was_sealed_is_not_uploaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity is compared when it is opened: even with size and mtime put back (P4)."""
    scene = Scene(tmp_path / "scene")
    shutil.copytree(folder, scene.save_dir / folder.name)
    (scene.save_dir / "tokenizer.json").write_text("{}")
    path = scene.save_dir / folder.name / sorted(os.listdir(folder))[0]
    status = path.stat()
    real = scene._upload

    def upload_after_a_flip(*arguments: Any) -> Any:
        with flipped(path, path.stat().st_size // 2, 3):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            return real(*arguments)

    monkeypatch.setattr(scene, "_upload", upload_after_a_flip)
    with pytest.raises(CkptdError, match="was written since it was sealed"):
        scene.commit(folder.name, 2)
    assert not list((scene.nas / "_ckptd").rglob("commits/*"))
