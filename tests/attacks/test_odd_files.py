"""Names and kinds of files that nobody expects in a save_dir, under a real daemon (P15, H8)."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.errors import RefusedError
from ckptd.storage.local import fs
from ckptd.storage.local.scan import scan_folder
from tests.e2e.harness import Node, node
from tests.support.synthetic import Shapes, write_stage12

pytestmark = pytest.mark.faults
SHAPES: list[Shapes] = [{"w": (16, 8), "b": (8,)}]
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
TAGS = (
    b"global_step3\n",
    b"global_step4\xff\xfe",
    b"global_step5\x1b[2J",
    b"global_step6 ",
    b"global_step7" + b"x" * 243,
    b"...global_step8",
    "global_step9\u202e".encode(),
    b"global_step10~g1",
    b"-rf",
)
SIDES = (b"new\nline", b"not \xff utf-8", b"esc\x1b[2J", b"n" * 255, b"..hidden", b"-rf", b" ")


def save(folder: bytes, step: int) -> None:
    """A save of two ranks under any name."""
    made = Path(os.fsdecode(folder))
    write_stage12(made, SHAPES, 2, step=step)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, local="forms = []\nsave_total_limit = 1", remote='forms = ["zero"]') as made:
        yield made


def test_names_that_nobody_expects(here: Node) -> None:
    """A good checkpoint among them is committed; each of the others is committed or refused with a reason."""
    root = os.fsencode(here.save_dir)
    here.write_job(job='existing = "all"', local="forms = []")
    for number, tag in enumerate(TAGS):
        save(root + b"/" + tag, 3 + number)
    save(root + b"/global_step99", 99)
    here.start()
    here.wait_committed("global_step99~g1")

    def refused() -> set[str]:
        return {p["text"] for p in here.status()["problems"] if p["code"] == "tag-refused"}

    here.wait("the others", lambda: len(here.commits()) + len(refused()) == len(TAGS) + 1)
    assert len(refused()) == 5
    here.stop()
    text = here.log.read_text()
    assert "Traceback" not in text, text[-3000:]
    assert "internal" not in here.problems()
    for command in (["status"], ["status", "--json"], ["list"], ["verify"]):
        done = here.ckptd(command[0], here.job_file, *command[1:])
        assert "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
    assert here.ckptd("verify", here.job_file).returncode == 0, "what is committed can be restored"
    assert sorted(os.listdir(root)) == sorted([*TAGS, b"global_step99", b"_ckptd"]), "nothing was deleted"


@pytest.mark.full
def test_side_files_with_such_names(here: Node) -> None:
    """In a checkpoint: uploaded byte for byte and restored, or it keeps its folder here and says why."""
    root = os.fsencode(here.save_dir)
    here.start()
    save(root + b"/global_step90", 90)
    here.wait_committed("global_step90~g1")
    for number, side in enumerate(SIDES, 1):
        save(b"%s/staged%d" % (root, number), 90 + number)
        with open(b"%s/staged%d/%s" % (root, number, side), "wb") as out:
            out.write(b"side")
        os.rename(b"%s/staged%d" % (root, number), b"%s/global_step%d" % (root, 90 + number))
    here.wait("all of them", lambda: len(here.commits()) == len(SIDES) + 1)
    save(root + b"/global_step99", 99)
    here.wait_committed("global_step99~g1")
    commits = here.commits()
    uploaded = {n: commits[f"global_step{90 + n}~g1"]["files"] == 4 for n in range(1, len(SIDES) + 1)}
    kept = {f"global_step{90 + n}" for n, is_uploaded in uploaded.items() if not is_uploaded}
    assert len(kept) == 3
    here.wait("pruned", lambda: here.local_tags() == kept | {"global_step99"})
    here.wait("said", lambda: all(here.checkpoint(tag)["keep"] for tag in kept))
    here.stop()
    assert "Traceback" not in here.log.read_text()
    assert "internal" not in here.problems()
    for number, side in enumerate(SIDES, 1):
        tag = f"global_step{90 + number}"
        here_still = os.path.exists(root + b"/" + tag.encode() + b"/" + side)
        assert here_still == (tag in kept)
        if number == 4:
            done = here.ckptd("restore", here.nas, tag, "--to", here.root / "back")
            assert done.returncode == 0, done.stderr
            back = os.fsencode(here.root / "back" / tag) + b"/" + side
            assert os.path.exists(back) == uploaded[number]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)
        made.bind(path.name)


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def test_shards_that_are_no_files(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither opened nor waited for: such a checkpoint is not complete, and the good one is safe."""
    monkeypatch.chdir(here.root)
    here.write_job(job='existing = "all"')
    save(os.fsencode(here.save_dir / "global_step1"), 1)
    for number, make in enumerate((_fifo, _socket, _device, _link, _folder), 2):
        save(os.fsencode(here.save_dir / f"global_step{number}"), number)
        shard = here.save_dir / f"global_step{number}" / RANK1
        shard.unlink()
        make(shard)
    here.start()
    here.wait_committed("global_step1~g1")
    bad = [f"global_step{number}" for number in range(2, 7)]
    here.wait("said", lambda: all("rank 1" in (here.checkpoint(tag)["reason"] or "") for tag in bad))
    for tag in bad:
        assert os.path.lexists(here.save_dir / tag / RANK1)
    here.stop()
    assert set(here.commits()) == {"global_step1~g1"}
    assert "Traceback" not in here.log.read_text()


def test_a_hard_link_from_outside_loses_its_name_here_alone(tmp_path: Path) -> None:
    """Unlinking is all that a prune does to a file."""
    from tests.attacks.swaps import TAG, SwapScene

    scene = SwapScene(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("outside")
    (scene.save_dir / TAG / "linked").hardlink_to(precious)
    permit = scene.permit_of()
    with files.opened_dir(scene.save_dir) as fd:
        fs.delete_checkpoint(fd, permit, "aside")
    assert not (scene.save_dir / TAG).exists()
    assert precious.read_text() == "outside"
    assert precious.stat().st_nlink == 1


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A directory of another place of the same file system, bind-mounted into a checkpoint."""
    from tests.attacks.swaps import TAG, SwapScene

    scene = SwapScene(tmp_path)
    (scene.save_dir / TAG / "mounted").mkdir()
    target = scene.save_dir / TAG / "mounted"
    subprocess.run(["mount", "--bind", scene.outside / TAG, target], check=True)
    try:
        yield scene.save_dir
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_bind_mount_inside_is_not_entered(mounted: Path) -> None:
    """It has the device number of save_dir and is another place all the same."""
    with files.opened_dir(mounted) as fd:
        listing = scan_folder(fd, "global_step1")
        assert listing is not None
        assert [p for p in listing.irregular if p.startswith("mounted")] == ["mounted"]
        assert not [f for f in listing.files if f.path.startswith("mounted")]
        with pytest.raises(RefusedError, match="mount"):
            files.open_dir_beneath(fd, "global_step1/mounted/inner")
        os.rename("global_step1", "_ckptd/trash/ours.x", src_dir_fd=fd, dst_dir_fd=fd)
        try:
            with pytest.raises(RefusedError, match="mount"):
                fs.empty_our_trash(fd)
        finally:
            os.rename("_ckptd/trash/ours.x", "global_step1", src_dir_fd=fd, dst_dir_fd=fd)
    outside = mounted.parent / "outside" / "global_step1"
    assert (outside / "b.pt").read_text() == "secret b.pt"
