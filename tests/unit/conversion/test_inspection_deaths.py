"""A process that inspects and is killed says nothing of its file (P2, P14, H28).

The kernel kills it for memory, a person by hand: a shard that nobody read was sealed by its name alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.base import files
from ckptd.conversion.engine import children, inspect, inspect_child
from ckptd.conversion.engine.inspect import MAX_DEATHS, inspect_files
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import State, Verdict, judge
from ckptd.core.model.facts import Archive
from ckptd.daemon.health.stalls import what_reads_it
from ckptd.daemon.intake.inspection import TRIES, ShardInspector
from ckptd.errors import StorageError
from ckptd.storage.journal.journal import Journal
from ckptd.storage.local.scan import scan, scan_folder
from tests.support.recover_scene import Scene
from tests.support.synthetic import write_stage12
from tests.unit.daemon.state.test_reading import AtOnce, hourly

TAG = "global_step5"
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
HOUR_SECONDS = 3600.0
VICTIM = """
import json, os, signal, sys
from ckptd.conversion.engine import inspect_child
inspect = inspect_child._inspect
def killed(dir_fd, index, item):
    if item["path"] in {paths!r} and (item["facts"] or {also_without}):
        if {is_framed}:
            inspect_child._facts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            return inspect(dir_fd, index, item)
        os.kill(os.getpid(), signal.SIGKILL)
    return inspect(dir_fd, index, item)
inspect_child._inspect = killed
inspect_child.main()
"""


def kill(patch: pytest.MonkeyPatch, *paths: str, is_framed: bool = False, also_without: bool = True) -> None:
    """The real child, with SIGKILL when it comes to one of these; `is_framed`: at its pickle."""
    script = VICTIM.format(paths=paths, is_framed=is_framed, also_without=also_without)

    def start(name: str, **more: Any) -> Any:
        assert name == "inspect_child"
        here = {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, env=os.environ | here, **more
        )

    patch.setattr(children, "start", start)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save of two ranks."""
    write_stage12(tmp_path / TAG, [{"w": (4, 4)}], 2, step=5)
    return tmp_path / TAG


def verdict_on(folder: Path, facts: list[Any]) -> Verdict:
    """After any quiet time, where names were proven before."""
    with files.opened_dir(folder.parent) as fd:
        listing = scan_folder(fd, folder.name)
    assert listing is not None
    grids = frozenset({(2, 1, 2)})
    context = Context(
        settle_seconds=1.0,
        quiet_seconds=HOUR_SECONDS,
        is_in_flight=False,
        save_spread_seconds=60.0,
        known_grids=grids,
    )
    return judge(listing, {fact.path: fact for fact in facts}, None, context)


def names(folder: Path) -> list[str]:
    """All files."""
    return sorted(path.name for path in folder.iterdir())


def test_names_do_not_vouch_for_what_nobody_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in half, and its reader is killed: it would have been uploaded as whole."""
    (saved / SHARD).write_bytes((saved / SHARD).read_bytes()[: (saved / SHARD).stat().st_size // 2])
    with monkeypatch.context() as patch:
        kill(patch, SHARD)
        facts = inspect_files(saved, names(saved))
    [unread] = [fact for fact in facts if fact.path == SHARD]
    assert (unread.archive, unread.fingerprint) == (Archive.OTHER, "")
    verdict = verdict_on(saved, facts)
    assert verdict.state is State.INCOMPLETE
    assert f"{SHARD} was not read (reading {SHARD} ended the inspecting child (signal SIGKILL))" in str(
        verdict.reason
    )


def test_a_pickle_that_kills_its_reader_ships_by_names(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its framing was told before: H28 stands."""
    with monkeypatch.context() as patch:
        kill(patch, SHARD, is_framed=True)
        facts = inspect_files(saved, names(saved))
    [unread] = [fact for fact in facts if fact.path == SHARD]
    assert unread.archive is Archive.ZIP
    assert unread.fingerprint
    assert unread.facts is None
    assert verdict_on(saved, facts).state is State.COMPLETE


@pytest.mark.parametrize("is_framed", [False, True])
def test_a_death_is_no_finding_while_there_is_time(
    saved: Path, monkeypatch: pytest.MonkeyPatch, is_framed: bool
) -> None:
    with monkeypatch.context() as patch:
        kill(patch, SHARD, is_framed=is_framed)
        with pytest.raises(StorageError, match=rf"reading {SHARD} ended .* \(signal SIGKILL\)") as told:
            inspect_files(saved, names(saved), is_final=False)
    assert "read again" in told.value.hint


def test_after_too_many_deaths_the_rest_is_read_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest were not even framed: nothing of such a folder could be uploaded."""
    write_stage12(tmp_path / TAG, [{"w": (16, 4)}], MAX_DEATHS + 2, step=5)
    shards = [name for name in names(tmp_path / TAG) if "optim" in name]
    with monkeypatch.context() as patch:
        kill(patch, *shards, is_framed=True, also_without=False)
        facts = inspect_files(tmp_path / TAG, names(tmp_path / TAG))
    assert all(fact.fingerprint and fact.archive is Archive.ZIP for fact in facts)
    by_path = {fact.path: fact for fact in facts}
    for number, name in enumerate(shards):
        why = "ended the inspecting child" if number < MAX_DEATHS else "not inspected: too many files"
        assert why in str(by_path[name].reason)
        assert by_path[name].facts is None
    with monkeypatch.context() as patch:
        kill(patch, *names(tmp_path / TAG))
        facts = inspect_files(tmp_path / TAG, names(tmp_path / TAG))
    assert all(fact.reason and not fact.fingerprint for fact in facts)


def test_killed_once_it_is_read_again_and_sealed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sealed without a fingerprint for good: no universal form could ever be made of it."""
    scene = Scene(tmp_path)
    scene.save(5)
    _, state, look = hourly(scene, AtOnce())

    with monkeypatch.context() as patch:
        kill(patch, SHARD)
        look()
        for _ in range(TRIES):
            assert look().state is State.UNKNOWN
            assert "ended the inspecting child" in state.failures.all()[f"inspecting {TAG}"].text
        look()
        verdict = look()
        assert (verdict.state, verdict.is_unread) == (State.INCOMPLETE, True)
        assert "memory" in what_reads_it(str(verdict.reason))
    look()
    assert look().state is State.COMPLETE
    assert state.folders.facts[TAG][SHARD].fingerprint
    state.journal.close()


def test_what_an_earlier_release_noted_without_reading_is_read_again(tmp_path: Path) -> None:
    """It stood in the journal as a fact; nothing would ever have asked for that shard again."""
    scene = Scene(tmp_path)
    folder = scene.save_dir / scene.save(5)
    journal = Journal(tmp_path / "journal.db")
    facts = {fact.path: fact for fact in inspect_files(folder, names(folder))}
    unread = {"reason": "it ended the inspecting child", "fingerprint": "", "archive": Archive.OTHER}
    facts[SHARD] = facts[SHARD].model_copy(update={**unread, "facts": None, "tensor_fingerprint": None})
    with files.opened_dir(scene.save_dir) as fd:
        [listing] = scan(fd).folders
    journal.put_facts([(f.identity, facts[f.path]) for f in listing.files])
    state: Any = SimpleNamespace(journal=journal)
    known = ShardInspector(scene.job(), state, AtOnce(), lambda: None).known_facts(listing)  # type: ignore[arg-type]
    assert set(facts) - set(known) == {SHARD}
    journal.close()


def test_a_long_reading_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no archive is read to its end; the silent are ended."""
    path = tmp_path / "note.bin"
    path.write_bytes(os.urandom((5 << 20) + 7))
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(inspect_child, "_emit", said.append)
    monkeypatch.setattr(inspect_child, "_ALIVE_SECONDS", 0.0)
    with files.opened_dir(tmp_path) as fd:
        last = inspect_child._inspect(fd, 0, inspect._asked(path.name))
    assert last["fingerprint"]
    assert said.count({"alive": True}) >= 5
    with files.opened_dir(tmp_path) as fd, monkeypatch.context() as patch:
        said.clear()
        patch.setattr(inspect_child, "_ALIVE_SECONDS", 3600.0)
        inspect_child._inspect(fd, 0, inspect._asked(path.name))
    assert {"alive": True} not in said


def test_a_line_of_life_is_no_finding(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = inspect_files(saved, names(saved))
    script = (
        "from ckptd.conversion.engine import inspect_child\n"
        "emit = inspect_child._emit\n"
        "inspect_child._emit = lambda line: (emit({'alive': True}), emit(line))\n"
        "inspect_child.main()"
    )

    def start(name: str, **more: Any) -> Any:
        here = {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, env=os.environ | here, **more
        )

    monkeypatch.setattr(children, "start", start)
    assert inspect_files(saved, names(saved)) == before
