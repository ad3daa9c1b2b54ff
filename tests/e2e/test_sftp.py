"""A real checkpoint over SFTP: uploaded by the daemon, listed, and brought back to an emptied node."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.storage.remote.attach import are_one, attach
from ckptd.storage.remote.messages import RemoteSettings
from ckptd.storage.stores.open import open_store
from tests.e2e.harness import PACE, RUN, Node, children_of, same_bytes
from tests.stores.sshd import Sshd, needs_sshd, sshd
from tests.support.real import save_dir_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.real, pytest.mark.stores, needs_sshd]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as running:
        yield running


@pytest.fixture
def node(tmp_path: Path, server: Sshd) -> Iterator[Node]:
    environment = {"HOME": str(server.home), "SSH_AUTH_SOCK": ""}
    here = Node(tmp_path / "node", url=server.url("run"), environment=environment)
    # what the server holds, looked at behind ckptd's back
    here.nas = server.files / "run"
    try:
        yield here
    finally:
        here.end()


def memory_mib(pid: int) -> int:
    """Resident memory that is the process's own."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        values = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return (int(values["Private_Dirty"]) + int(values["Private_Clean"])) >> 10


def test_uploaded_over_sftp_and_resumed_from_it(node: Node, server: Sshd) -> None:
    check = node.ckptd("check", node.job_file, "--init-remote")
    assert check.returncode == 0, check.stdout + check.stderr
    assert "create-only writes are enforced; verified by read-back" in " ".join(check.stdout.split())
    node.save(1)
    daemon = node.start()
    node.wait_committed("global_step1~g1", 60)
    assert same_bytes(node, "global_step1", RUN, 1)

    server.kill()
    node.save(2)
    node.wait("the problem", lambda: "remote-unreachable" in node.problems(), 60)
    server.start()
    node.wait_committed("global_step2~g1", 60)
    node.wait("its end", lambda: not node.problems() - PACE, 30)
    own = sorted(memory_mib(pid) for pid in children_of(daemon.pid))
    print(f"memory of the children: {own} MiB")
    assert node.stop() == 0

    shutil.rmtree(node.save_dir)
    listed = node.ckptd("list", node.url, "--json")
    assert listed.returncode == 0, listed.stderr
    assert "global_step2" in json.dumps(json.loads(listed.stdout))
    done = node.ckptd("resume", node.save_dir, node.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(node.save_dir / "global_step2")
    assert (node.save_dir / "latest").read_text() == "global_step2"
    for path in (save_dir_of(RUN) / "global_step2").iterdir():
        assert (node.save_dir / "global_step2" / path.name).read_bytes() == path.read_bytes()
    assert node.ckptd("inspect", node.save_dir / "global_step2").returncode == 0


def test_an_unknown_host_is_said_with_the_next_step(node: Node, server: Sshd) -> None:
    server.know("")
    for arguments in (("list", node.url), ("resume", node.save_dir, node.url), ("check", node.job_file)):
        done = node.ckptd(*arguments)
        assert done.returncode in (1, 69), done.stdout
        words = " ".join((done.stdout + done.stderr).split())
        assert "known_hosts does not name" in words
        assert "ssh -p" in words
        assert "Traceback" not in words
    node.start()
    node.save(1)

    def of_the_remote() -> list[dict[str, Any]]:
        return [p for p in node.status()["problems"] if p["code"].startswith("remote")]

    node.wait("the problem", of_the_remote)
    (problem,) = of_the_remote()
    assert "known_hosts" in problem["text"]
    assert "ssh -p" in problem["next_step"]
    assert not node.nas.exists()


def test_one_directory_by_two_urls_is_one_copy(node: Node, server: Sshd) -> None:
    """What was "in both" left the node, and the limit of the one took from the other."""
    (server.files / "alias").symlink_to(".")
    second = (
        f'forms = ["zero"]\n[[remote]]\nname = "second"\nurl = "{server.url("alias/run")}"\nkeep_last = 1\n'
    )
    node.write_job(remote=f'{second}forms = ["zero"]')
    node.start()
    node.save(1)
    node.wait_committed("global_step1~g1", 60)
    node.save(2)
    node.wait_committed("global_step2~g1", 60)
    node.wait("the problem", lambda: "remote-not-ours" in node.problems(), 60)
    (problem,) = (p for p in node.status()["problems"] if p["code"] == "remote-not-ours")
    assert f"{server.url('alias/run')} is the same directory as remote nas" in problem["text"]
    assert set(node.commits()) == {"global_step1~g1", "global_step2~g1"}
    node.stop()
    check = node.ckptd("check", node.job_file)
    assert check.returncode == 78, check.stdout
    assert "is the same directory as remote nas" in " ".join(check.stdout.split())


def test_a_copy_on_the_server_is_another_place(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own times, or with the original's on another disk."""
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.setenv("SSH_AUTH_SOCK", "")
    other_disk = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        (server.files / "disk").symlink_to(other_disk)
        seen = {}
        for name in ("run", "alias", "anew", "disk/run"):
            copy = server.files / name
            if name == "alias":
                copy.symlink_to("run")
            elif name == "anew":
                time.sleep(1.1)  # SFTP tells whole seconds
                shutil.copytree(server.files / "run", copy, copy_function=shutil.copyfile)
            elif name != "run":
                shutil.copytree(server.files / "run", copy)
            who = {"job": "job", "save_dir": str(tmp_path), "node": "n0", "node_id": "id-n0"}
            url = server.url(name)
            settings = RemoteSettings.model_validate({"name": "nas", "url": url, **who})
            seen[name] = attach(open_store(url), settings)
        first = seen.pop("run")
        assert {one.identity for one in seen.values()} == {first.identity}
        assert [name for name, one in seen.items() if are_one(first, one)] == ["alias"]
    finally:
        shutil.rmtree(other_disk)
