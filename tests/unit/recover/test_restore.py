"""`ckptd restore`: which checkpoint, in which form, what DIR may hold, what the exit codes promise."""

from __future__ import annotations

import fcntl
import os
import shutil

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.core.model.layouts import Role
from ckptd.errors import (
    DamagedError,
    LockHeld,
    NoSpaceError,
    NotFoundError,
    NothingCommitted,
    RefusedError,
    RemoteUnreachable,
    TargetExists,
    UsageError,
)
from ckptd.recover.select.copies import Nodes
from ckptd.recover.select.job import Owner
from ckptd.recover.select.sources import Where, where_of
from tests.support.legacy_files import as_legacy
from tests.support.recover_scene import EXTRA
from tests.support.restore_scene import MODEL, OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]


def test_the_newest(scene: RestoreScene) -> None:
    scene.two()
    done = scene.restore()
    assert done.path == scene.dir / TAG
    assert scene.got(TAG) == scene.shards(TAG)
    times = {p.name: p.stat().st_mtime_ns for p in (scene.save_dir / TAG).iterdir()}
    assert {p.name: p.stat().st_mtime_ns for p in done.path.iterdir()} == times
    assert scene.named() == TAG
    assert (scene.dir / EXTRA).read_text() == "{}"
    assert not list((scene.dir / "_ckptd" / "staging").iterdir())
    before = scene.everything()
    assert scene.restore().plan.steps == ()
    assert scene.everything() == before


def test_a_tag_and_then_another(scene: RestoreScene) -> None:
    scene.two()
    assert scene.restore("global_step5").path.name == "global_step5"
    assert scene.named() == "global_step5"
    assert scene.restore(TAG).path.name == TAG
    assert scene.named() == TAG
    assert scene.got("global_step5") == scene.shards("global_step5")


def test_order_is_branch_then_step(scene: RestoreScene) -> None:
    scene.save(100)
    scene.commit("global_step100", 100)
    scene.save(60)
    scene.commit("global_step60", 60, branch=2)
    assert scene.restore().path.name == "global_step60"


def test_of_several_generations_the_newest(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    scene.save(10, salt="again")
    scene.commit(TAG, 10, save_seq=2, generation=2)
    scene.restore(TAG)
    assert scene.got(TAG) == scene.shards(TAG)
    # the older generation is no stand-in for the tag that was asked for
    (scene.nas / f"{TAG}.g2" / MODEL).write_bytes(b"rot")
    shutil.rmtree(scene.dir)
    with pytest.raises(DamagedError, match="damaged"):
        scene.restore(TAG)
    assert not (scene.dir / TAG).exists()
    # of one save that was uploaded twice the older generation never counts
    scene.commit(TAG, 10, save_seq=2, generation=3)
    scene.restore(TAG)
    assert scene.got(TAG) == scene.shards(TAG)


def test_only_some_ranks(scene: RestoreScene) -> None:
    scene.dp = 4
    scene.save(10)
    scene.commit(TAG, 10)
    scene.restore(ranks=frozenset({0, 2}))
    assert set(scene.got(TAG)) == {MODEL, OPTIM.format(0), OPTIM.format(2)}
    assert "ranks 0,2" in "\n".join(scene.said)
    assert scene.restore(ranks=frozenset({0, 2})).plan.steps == ()
    done = scene.restore(ranks=frozenset({1}))
    assert [file.path for file in done.plan.fetches[0].copy.files] == [OPTIM.format(1)]
    scene.restore()
    assert scene.got(TAG) == scene.shards(TAG)
    with pytest.raises(NotFoundError, match="ranks 0-3, not 4"):
        scene.restore(ranks=frozenset({1, 4}))


def test_what_was_staged_for_other_ranks_is_not_put_in_place(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    (fetch,) = scene.restore(dry_run=True).plan.fetches
    name = f"resume.zero.{fetch.copy.view.sha256[:16]}"
    staging = scene.dir / "_ckptd" / "staging" / name
    staging.mkdir(parents=True)
    shutil.copy2(scene.save_dir / TAG / OPTIM.format(0), staging)
    scene.restore(ranks=frozenset({1}))
    assert set(scene.got(TAG)) == {MODEL, OPTIM.format(1)}


def test_each_node_its_shards(scene: RestoreScene) -> None:
    scene.save(10)
    scene.node = "n0"
    first = scene.commit(TAG, 10, only=lambda p: "rank_1_" not in p)
    assert first.commit is None
    scene.node = "n1"
    scene.commit(TAG, 10, only=lambda p: "rank_0_" not in p)
    scene.restore(nodes=Nodes(count=2, rank=1))
    assert OPTIM.format(1) in scene.got(TAG)
    assert OPTIM.format(0) not in scene.got(TAG)
    with pytest.raises(UsageError):
        scene.restore(nodes=Nodes(count=2, rank=1), ranks=frozenset({1}))


def test_universal_that_is_committed(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    scene.commit_universal(TAG, 10)
    done = scene.restore(form="universal")
    assert done.path == scene.derived
    assert scene.named("latest_universal") == f"_ckptd/derived/universal/{TAG}"
    assert scene.named() is None
    assert not (scene.dir / TAG).exists()
    assert '"load_universal": true' in "\n".join(done.advice)
    assert scene.restore(form="universal").plan.steps == ()
    scene.flip(scene.derived / "zero" / "head.bias" / "fp32.pt")
    again = scene.restore(form="universal")
    assert [f.path for f in again.plan.fetches[0].copy.files] == ["zero/head.bias/fp32.pt"]


def test_universal_by_conversion(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    done = scene.restore(world_size=3)
    assert done.path == scene.derived
    # by ranges: no copy of the ZeRO form lies here, so nothing but the universal form is named
    assert not (scene.dir / TAG).exists()
    assert scene.named() is None
    assert scene.named("latest_universal") == f"_ckptd/derived/universal/{TAG}"
    convert(scene.save_dir / TAG, scene.root / "local")
    assert sorted(p.name for p in scene.derived.rglob("*")) == sorted(
        p.name for p in (scene.root / "local").rglob("*")
    )
    assert scene.restore(world_size=3).plan.steps == ()
    # once it is committed too, what was converted here stays
    scene.commit_universal(TAG, 10)
    assert scene.restore(world_size=3).plan.steps == ()


@pytest.mark.parametrize("name", [OPTIM.format(1), MODEL])
def test_what_is_converted_from_afar_is_compared_with_its_commit(scene: RestoreScene, name: str) -> None:
    """A bit of the newest turned, in a tensor or at the very end: the one before it is taken (P18)."""
    scene.two()
    scene.flip(scene.nas / TAG / name, at=-1)
    done = scene.restore(world_size=3)
    assert done.plan.candidate.tag == "global_step5"
    assert "the next best is taken" in "\n".join(scene.said)
    assert not scene.derived.exists()
    assert not list(scene.derived.parent.glob(".*"))


def test_what_ranges_cannot_read_is_fetched_whole(scene: RestoreScene) -> None:
    """Of torch's format before zip archives: the ZeRO form comes here and is converted here."""
    scene.save(10)
    as_legacy(scene.save_dir / TAG / OPTIM.format(0))
    scene.commit(TAG, 10)
    done = scene.restore(world_size=3)
    assert done.path == scene.derived
    assert (scene.derived / "ckptd.json").is_file()
    assert scene.got(TAG) == scene.shards(TAG)


def test_with_the_zero_form_here_nothing_is_read_twice(scene: RestoreScene) -> None:
    """It was restored before: the universal form is made from what lies in DIR."""
    scene.save(10)
    scene.commit(TAG, 10)
    scene.restore()
    done = scene.restore(world_size=3)
    assert [type(step).__name__ for step in done.plan.steps] == ["MakeUniversal", "WritePointer"]


def test_universal_whose_zero_form_is_gone(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    scene.commit_universal(TAG, 10)
    (scene.nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json").unlink()
    with pytest.raises(RefusedError, match="only the universal form"):
        scene.restore(TAG, form="zero")
    with pytest.raises(DamagedError):
        scene.restore(form="zero")
    assert scene.restore().path == scene.derived
    assert scene.restore(form="universal").plan.steps == ()


def test_a_damaged_universal_falls_back_to_the_zero_form(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    scene.commit_universal(TAG, 10)
    scene.flip(scene.nas / f"{TAG}_universal" / "zero" / "head.bias" / "fp32.pt")
    done = scene.restore(TAG, form="universal")
    assert done.path == scene.derived
    assert "another copy of it is looked for" in "\n".join(scene.said)


def test_forms_that_cannot_be(scene: RestoreScene) -> None:
    scene.save(10)
    scene.commit(TAG, 10)
    with pytest.raises(RefusedError, match="saved by 2 ranks"):
        scene.restore(form="zero", world_size=4)
    with pytest.raises(RefusedError, match="universal"):
        scene.restore(ranks=frozenset({0}), world_size=4)
    for wish in ({"form": "weights"}, {"form": "universal", "ranks": frozenset({0})}):
        with pytest.raises(UsageError):
            scene.restore(**wish)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "manifest"])
def test_a_damaged_newest_falls_back(scene: RestoreScene, how: str) -> None:
    scene.two()
    shard = scene.nas / TAG / OPTIM.format(1)
    if how == "flipped":
        scene.flip(shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "gone":
        shard.unlink()
    else:
        shutil.rmtree(scene.nas / "_ckptd" / "nodes" / f"{TAG}~g1~zero")
    done = scene.restore()
    assert done.path.name == "global_step5"
    assert scene.named() == "global_step5"
    assert not (scene.dir / TAG).exists()
    assert TAG in "\n".join(scene.said)
    shutil.rmtree(scene.dir)
    with pytest.raises(DamagedError):
        scene.restore(TAG)
    assert scene.named() is None
    assert not (scene.dir / TAG).exists()


def test_all_damaged(scene: RestoreScene) -> None:
    scene.two()
    for tag in ("global_step5", TAG):
        scene.flip(scene.nas / tag / MODEL)
    with pytest.raises(DamagedError, match="every checkpoint"):
        scene.restore()
    assert scene.named() is None


def test_what_is_bad_here_is_fetched_again(scene: RestoreScene) -> None:
    scene.two()
    scene.restore()
    for harm in ("flip", "cut", "unlink"):
        shard = scene.dir / TAG / OPTIM.format(1)
        if harm == "flip":
            scene.flip(shard)
        elif harm == "cut":
            shard.write_bytes(b"half")
        else:
            shard.unlink()
        done = scene.restore()
        assert [f.path for f in done.plan.fetches[0].copy.files] == [OPTIM.format(1)]
        assert scene.got(TAG) == scene.shards(TAG)
    aside = sorted(p.name for p in (scene.dir / "_ckptd" / "aside").iterdir())
    assert aside == [f"{TAG}.{OPTIM.format(1)}.1", f"{TAG}.{OPTIM.format(1)}.2"]


def test_another_content_under_the_tag(scene: RestoreScene) -> None:
    scene.two()
    scene.restore()
    before = scene.everything()
    scene.save(10, salt="another run")
    scene.commit(TAG, 10, save_seq=2, generation=2)
    with pytest.raises(TargetExists, match="not the zero form"):
        scene.restore()
    assert scene.everything() == before
    scene.restore("global_step5")
    shutil.rmtree(scene.dir / TAG)
    (scene.dir / TAG).mkdir()
    (scene.dir / TAG / MODEL).write_text("mine")
    with pytest.raises(TargetExists):
        scene.restore()
    assert (scene.dir / TAG / MODEL).read_text() == "mine"


def test_places_that_are_somebodys(scene: RestoreScene) -> None:
    scene.two()
    job = scene.job()
    mine = Where(remotes=job.remotes, owner=Owner(job="run"), job=job)
    with pytest.raises(RefusedError, match="save_dir of job run"):
        scene.restore(where=mine, to=scene.save_dir)
    for to in (scene.nas, scene.nas / "inner", scene.nas.parent):
        with pytest.raises(RefusedError, match="remote"):
            scene.restore(to=to)
    with pytest.raises(NotFoundError):
        scene.restore(to=scene.root / "no" / "where")
    (scene.root / "file").touch()
    with pytest.raises(TargetExists):
        scene.restore(to=scene.root / "file")
    fd = os.open(scene.save_dir, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(LockHeld):
            scene.restore(to=scene.save_dir)
    finally:
        os.close(fd)
    scene.dir.mkdir()
    (scene.dir / TAG).mkdir()
    with (scene.dir / TAG / "x.pt").open("wb"), pytest.raises(RefusedError, match="written right now"):
        scene.restore()


def test_no_room(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.base import extents

    scene.two()
    monkeypatch.setattr(extents, "free_bytes", lambda fd: 1000)
    with pytest.raises(NoSpaceError, match="needs"):
        scene.restore()
    assert not (scene.dir / TAG).exists()
    assert not (scene.dir / "_ckptd").exists()


def test_on_a_file_system_without_locks_and_exclusive_renames(
    scene: RestoreScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS answers."""
    import errno

    from ckptd.base import files

    def refused(*arguments: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def no_lock(*arguments: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    scene.two()
    monkeypatch.setattr(files, "rename_noreplace", refused)
    monkeypatch.setattr(fcntl, "flock", no_lock)
    scene.restore()
    scene.flip(scene.dir / TAG / OPTIM.format(1))
    scene.restore()
    assert scene.got(TAG) == scene.shards(TAG)
    assert [p.name for p in (scene.dir / "_ckptd" / "aside").iterdir()] == [f"{TAG}.{OPTIM.format(1)}.1"]


def test_a_file_of_many_ranges(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.recover import fetch

    scene.two()
    for buffer in (64, 101):
        monkeypatch.setattr(fetch, "RANGE_BYTES", buffer)
        scene.restore(to=scene.root / f"in{buffer}")
        for name, data in scene.shards(TAG).items():
            assert (scene.root / f"in{buffer}" / TAG / name).read_bytes() == data
    shard = scene.nas / TAG / OPTIM.format(1)
    shard.write_bytes(shard.read_bytes()[:130])
    with pytest.raises(DamagedError):
        scene.restore(TAG)
    assert "has 130 bytes" in "\n".join(scene.said)


def test_not_there(scene: RestoreScene) -> None:
    with pytest.raises(RemoteUnreachable):
        scene.restore(where=where_of(f"file://{scene.nas}", {}))
    scene.ground()
    with pytest.raises(NothingCommitted):
        scene.restore()
    with pytest.raises(NothingCommitted):
        scene.restore("global_step5")
    scene.two()
    with pytest.raises(NotFoundError, match="global_step11") as caught:
        scene.restore("global_step11")
    assert TAG in caught.value.hint
    assert not scene.dir.exists()


def test_a_dry_run_changes_nothing(scene: RestoreScene) -> None:
    scene.two()
    done = scene.restore(dry_run=True, world_size=3)
    assert done.path == scene.derived
    assert not scene.dir.exists()
    assert any(line.startswith(f"would convert {TAG}") for line in scene.said)
    scene.restore()
    before = scene.everything()
    scene.restore(dry_run=True, world_size=3)
    assert scene.everything() == before


def test_a_copied_remote(scene: RestoreScene) -> None:
    scene.two()
    shutil.copytree(scene.nas, scene.root / "copied")
    shutil.rmtree(scene.nas)
    scene.restore(where=where_of(str(scene.root / "copied"), {}))
    assert scene.got(TAG) == scene.shards(TAG)


def test_extras_never_overwrite(scene: RestoreScene) -> None:
    scene.two()
    scene.dir.mkdir()
    (scene.dir / EXTRA).write_text("mine")
    done = scene.restore()
    assert (scene.dir / EXTRA).read_text() == "mine"
    assert all(f.role is not Role.EXTRA for f in done.plan.candidate.copies[0].files)
