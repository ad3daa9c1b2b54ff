"""Readers leave leases, and a deletion in the remote waits for those that count (docs/adr/0214)."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.remote.convert import RemoteConversion
from ckptd.core.model.reader import MOST_SECONDS, READERS, SILENT_SECONDS, SKEW_SECONDS, Reader
from ckptd.errors import BeingRead, NotPermitted
from ckptd.maintenance.verify import Slice, Verifier
from ckptd.recover.execute import StepExecution
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.storage.remote import readers
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.documents import read_commits
from ckptd.storage.remote.garbage import find
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.readers import ReaderLease, ReaderLeases, reader_of
from ckptd.storage.stores.base import Abilities, ObjectInfo
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.open import open_store
from tests.support.repair_scene import RepairScene, built, scene
from tests.support.restore_scene import TAG

__all__ = ["built", "scene"]
OLD = "global_step5"


def leases(scene: RepairScene) -> list[dict[str, Any]]:
    """The leases in the remote; not what one is written to before it takes its name."""
    found = (scene.nas / "_ckptd" / "readers").glob("[!.]*.json")
    return [json.loads(path.read_bytes()) for path in found]


def delete(scene: RepairScene, store: Any = None) -> None:
    """What retention does with the older checkpoint."""
    store = store or open_store(str(scene.nas))
    (view,) = (v for v in read_commits(store).commits if v.commit.tag == OLD)
    order = DeleteCommit(tag=OLD, generation=1, form="zero", reason="limit", commit_sha256=view.sha256)
    attached = AttachedRemote(
        store=store,
        abilities=Abilities(create_only=True, checksum=None, resumable=True),
        identity=scene.ground().identity,
    )
    delete_commit(attached, order, lambda: None)


def leave(scene: RepairScene, *, age_seconds: float = 0.0, **changes: Any) -> Path:
    """A lease as a reader left it so long ago, by the store's clock."""
    now = datetime.now(UTC).isoformat()
    values = {
        "tag": OLD,
        "what": "restore",
        "host": "gpu7",
        "begun": now,
        "renewed": now,
        "held_seconds": 1.0,
    }
    folder = scene.nas / "_ckptd" / "readers"
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())):016x}.json"
    path.write_text(Reader.model_validate(values | changes).model_dump_json())
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


def files_of(scene: RepairScene) -> set[str]:
    """All objects and documents, without leases."""
    found = (str(p.relative_to(scene.nas)) for p in scene.nas.rglob("*") if p.is_file())
    return {name for name in found if not name.startswith(READERS)}


def test_a_deletion_waits_for_a_reader_and_says_for_whom(scene: RepairScene) -> None:
    """Not even a tombstone is written; once the lease is gone the checkpoint is."""
    before = files_of(scene)
    with ReaderLease(open_store(str(scene.nas)), "restore").renewing() as hold:
        hold(OLD)
        with pytest.raises(BeingRead, match=r"^restore on \S+ reads it since 20"):
            delete(scene)
        assert files_of(scene) == before
    assert leases(scene) == []
    delete(scene)
    assert not (scene.nas / OLD).exists()


def test_readers_of_other_checkpoints_hold_nothing_up(scene: RepairScene) -> None:
    leave(scene, tag=TAG)
    (scene.nas / "_ckptd" / "readers" / "torn.json").write_text("{")
    delete(scene)


@pytest.mark.parametrize(
    ("age_seconds", "changes", "is_live"),
    [
        (SILENT_SECONDS - 60, {}, True),
        (SILENT_SECONDS + 1, {}, False),
        # a reader that hangs renews its lease for ever
        (0.0, {"held_seconds": MOST_SECONDS + 1}, False),
        (SILENT_SECONDS - 60, {"held_seconds": MOST_SECONDS - SILENT_SECONDS}, True),
        # no clock of a reader counts where the store tells a time
        (0.0, {"begun": "1999-01-01T00:00:00+00:00", "renewed": "1999-01-01T00:00:00+00:00"}, True),
        (
            SILENT_SECONDS + 1,
            {"begun": "2999-01-01T00:00:00+00:00", "renewed": "2999-01-01T00:00:00+00:00"},
            False,
        ),
        (0.0, {"begun": "yesterday", "renewed": ""}, True),
    ],
)
def test_which_leases_count(
    scene: RepairScene, age_seconds: float, changes: dict[str, Any], is_live: bool
) -> None:
    leave(scene, age_seconds=age_seconds, **changes)
    if is_live:
        with pytest.raises(BeingRead):
            delete(scene)
    else:
        delete(scene)


class Timeless(DirectoryStore):
    """A store that tells no times, and counts its listings of leases."""

    listed = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.listed += prefix == READERS
        for info in super().list(prefix):
            yield ObjectInfo(key=info.key, bytes=info.bytes)

    def stat(self, key: str) -> ObjectInfo | None:
        info = super().stat(key)
        return None if info is None else ObjectInfo(key=info.key, bytes=info.bytes)


@pytest.mark.parametrize(
    ("seconds_ago", "is_live"),
    [
        (0.0, True),
        (SKEW_SECONDS + SILENT_SECONDS - 60, True),
        (SKEW_SECONDS + SILENT_SECONDS + 60, False),
        (60 - SKEW_SECONDS, True),
        (-60 - SKEW_SECONDS, False),
    ],
)
def test_without_times_of_the_store_clocks_are_compared_with_patience(
    scene: RepairScene, seconds_ago: float, is_live: bool
) -> None:
    at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    leave(scene, renewed=at)
    assert (reader_of(Timeless(str(scene.nas)), OLD) is not None) is is_live


def test_what_killed_readers_left_costs_no_request_each(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the store's own time alone they are over, whatever they say."""
    for _ in range(5):
        leave(scene, age_seconds=SILENT_SECONDS + 1)
    live = leave(scene)
    gets: list[str] = []
    real = DirectoryStore.get

    def get(self: DirectoryStore, key: str) -> bytes | None:
        gets.append(key)
        return real(self, key)

    monkeypatch.setattr(DirectoryStore, "get", get)
    with pytest.raises(BeingRead):
        delete(scene)
    assert [key for key in gets if key.startswith(READERS)] == [f"{READERS}{live.name}"]


def test_one_listing_for_each_deletion(scene: RepairScene) -> None:
    store = Timeless(str(scene.nas))
    delete(scene, store)
    assert store.listed == 1


def test_what_was_begun_is_finished_beside_a_reader(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tombstone says that it does not count any more: half of it would help no reader."""
    real = DirectoryStore.delete

    def cut(self: DirectoryStore, key: str) -> None:
        if "/commits/" in key:
            raise KeyboardInterrupt
        real(self, key)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DirectoryStore, "delete", cut)
        delete(scene)
    leave(scene)
    delete(scene)
    assert not (scene.nas / OLD).exists()


def test_gc_removes_what_killed_readers_left(scene: RepairScene) -> None:
    store = open_store(str(scene.nas))
    dead, live = leave(scene, age_seconds=SILENT_SECONDS + 1), leave(scene)
    found = [one.key for one in find(store, scene.ground().identity).objects]
    assert found == [str(dead.relative_to(scene.nas))]
    assert live.exists()


# --- the reader's side ------------------------------------------------------------------------------------


def test_it_is_renewed_while_it_lasts(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time says how long it has been held by the reader's own clock; nothing is left at the end."""
    monkeypatch.setattr(readers, "RENEW_SECONDS", 0.05)
    with ReaderLease(open_store(str(scene.nas)), "restore").renewing() as hold:
        hold(OLD)
        (first,) = leases(scene)
        end = time.monotonic() + 20
        while time.monotonic() < end and leases(scene)[0]["held_seconds"] < 0.3:
            time.sleep(0.02)
        (last,) = leases(scene)
        assert last["held_seconds"] >= 0.3
        assert (last["begun"], last["tag"], last["what"]) == (first["begun"], OLD, "restore")
    assert leases(scene) == []
    time.sleep(0.2)
    assert leases(scene) == [], "a thread that renewed it after the end"


def test_another_checkpoint_takes_its_place(scene: RepairScene) -> None:
    """One lease at a time: what was read before may go."""
    with ReaderLease(open_store(str(scene.nas)), "verify").renewing() as hold:
        hold(OLD)
        hold(TAG)
        assert [one["tag"] for one in leases(scene)] == [TAG]


def test_who_may_not_write_reads_without(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, said in the log alone, and everything else is as ever."""
    tried = 0

    def put(_self: object, _key: str, _data: bytes) -> None:
        nonlocal tried
        tried += 1
        raise NotPermitted("read-only")

    store = DirectoryStore(str(scene.nas))
    monkeypatch.setattr(DirectoryStore, "put", put)
    with caplog.at_level(logging.INFO), ReaderLease(store, "restore").renewing() as hold:
        hold(OLD)
        hold(TAG)
    assert tried == 1
    assert "read without a lease" in caplog.text


def seen_while(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[[], object]
) -> list[Any]:
    """What `look` sees at each call of a method."""
    found: list[Any] = []
    real = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        found.append(look())
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, spied)
    return found


def words(scene: RepairScene) -> list[tuple[str, str]]:
    return [(one["what"], one["tag"]) for one in leases(scene)]


@pytest.mark.parametrize("what", ["restore", "resume"])
def test_recoveries_leave_one(scene: RepairScene, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    seen = seen_while(monkeypatch, StepExecution, "run", lambda: words(scene))
    if what == "restore":
        scene.restore(OLD)
    else:
        for path in (scene.save_dir / TAG).iterdir():
            path.unlink()
        (scene.save_dir / TAG).rmdir()
        scene.resume()
    assert seen == [[(what, OLD if what == "restore" else TAG)]]
    assert leases(scene) == []


def test_a_dry_run_writes_nothing(scene: RepairScene) -> None:
    scene.restore(OLD, dry_run=True)
    assert not (scene.nas / "_ckptd" / "readers").exists()


def test_verify_leaves_one_for_what_it_reads(scene: RepairScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at names and sizes takes seconds and leaves none."""
    remote = read_remote_inventory("nas", str(scene.nas), None)
    seen = seen_while(monkeypatch, Verifier, "_one", lambda: words(scene))
    Verifier(remote).run()
    assert seen == [[], []]
    seen.clear()
    Verifier(remote, read=Slice()).run()
    assert seen == [[("verify", OLD)], [("verify", TAG)]]
    assert leases(scene) == []


@pytest.mark.parametrize("to", ["here", "remote"])
def test_a_conversion_from_a_url_leaves_one(
    scene: RepairScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    seen = seen_while(monkeypatch, RemoteConversion, "_conversion", lambda: words(scene))
    target = tmp_path / "made" if to == "here" else f"file://{tmp_path}/made"
    RemoteConversion(f"{scene.nas}/{OLD}", target, ConvertOptions(), {}).run()
    assert seen == [[("convert", OLD)]]
    assert leases(scene) == []


def test_ckptd_urls_leave_one_until_the_file_system_is_gone(scene: RepairScene) -> None:
    import gc

    fs = fsspec.filesystem("ckptd", url=str(scene.nas), skip_instance_cache=True)
    name = scene.shard(1, OLD, scene.nas).name
    with fs.open(f"{OLD}/{name}") as file:
        assert file.read()
    assert words(scene) == [("ckptd://", OLD)]
    with pytest.raises(BeingRead):
        delete(scene)
    del fs, file
    gc.collect()
    assert leases(scene) == []


def puts_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of leases that are written."""
    found: list[str] = []
    real = DirectoryStore.put

    def put(self: DirectoryStore, key: str, data: bytes) -> None:
        if key.startswith(READERS):
            found.append(key)
        real(self, key, data)

    monkeypatch.setattr(DirectoryStore, "put", put)
    return found


def test_ckptd_urls_leave_one_for_each_checkpoint(
    scene: RepairScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes to and fro between two, as an average does, keeps both; each is written once."""
    puts = puts_of(monkeypatch)
    store = open_store(str(scene.nas))
    held = ReaderLeases(store, "ckptd://")
    for _ in range(3):
        held.hold(OLD)
        held.hold(TAG)
    assert sorted(words(scene)) == [("ckptd://", TAG), ("ckptd://", OLD)]
    assert len(puts) == 2
    with pytest.raises(BeingRead):
        delete(scene)
    held.end()
    assert leases(scene) == []
    held.hold(OLD)
    monkeypatch.setattr(readers, "SILENT_SECONDS", 0.0)
    held.hold(TAG)
    assert words(scene) == [("ckptd://", TAG)], "of the other nothing was read for long"
    held.end()


def test_two_checkpoints_of_one_file_system(scene: RepairScene) -> None:
    """fsspec gives the same one to all that name its URL."""
    fs = fsspec.filesystem("ckptd", url=str(scene.nas), skip_instance_cache=True)
    name = scene.shard(1, OLD, scene.nas).name
    fs.cat(f"{OLD}/{name}")
    fs.cat(f"{TAG}/{name}")
    with pytest.raises(BeingRead):
        delete(scene)
    assert fs.cat(f"{OLD}/{name}")
