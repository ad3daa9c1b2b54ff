"""A ladder's step whose process is killed between tombstone, COMMIT and objects, on real stores (P7, P5).

Each time a process of its own carries the step out and kills itself before its n-th change of the store; what
it left is looked at as any reader does, and a second one finishes it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptd.storage.remote.messages import CommitView, DeleteCommit
from ckptd.storage.stores.access import Access
from ckptd.storage.stores.open import open_store
from tests.e2e.harness import RUN
from tests.e2e.s3_node import s3_node
from tests.stores import servers
from tests.stores.scene import Node
from tests.support import observing as observe
from tests.support.real import prepare

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.stores.base import Store

pytestmark = pytest.mark.faults

SCRIPT = """
import os, signal, sys
from ckptd.storage.stores.access import Access
from ckptd.storage.remote.observe import AttachedRemote
from ckptd.storage.remote.documents import read_identity
from ckptd.storage.remote.messages import DeleteCommit
from ckptd.storage.stores.open import open_store
from ckptd.storage.remote.deletion import delete_commit

url, endpoint, left, order = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
store = open_store(url, access=Access(endpoint_url=endpoint or None))

def dying(name):
    real = getattr(store, name)
    def call(*arguments):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*arguments)
    setattr(store, name, call)

ground = AttachedRemote(store=store, abilities=store.probe(), identity=read_identity(store))
for name in ("put", "put_if_absent", "delete"):
    dying(name)
delete_commit(ground, DeleteCommit.model_validate_json(order), lambda: None)
"""
TAG = "global_step10"


class Scene:
    """global_step10 with both forms and global_step20, on a real store; its content as it was."""

    def __init__(self, root: Path, url: str, endpoint: str) -> None:
        self.url, self.endpoint = url, endpoint
        self.store: Store = open_store(url, access=Access(endpoint_url=endpoint or None))
        node = Node(root / "save")
        ground, views = node.attached(self.store), []
        for step, forms in ((10, ("zero", "universal")), (20, ("zero",))):
            node.tag = f"global_step{step}"
            node.write_all(str(step).encode(), size=20)
            for form in forms:
                result = node.upload(ground, node.order(node.sealed(step=step), form=form))
                assert result.commit is not None
                views.append(result.commit)
        self.order = order_of(views[0], views[1])
        self.before = self.objects()

    def objects(self) -> dict[str, bytes]:
        """Everything that lies there."""
        return {info.key: self.store.get(info.key) or b"" for info in self.store.list("")}

    def put_back(self) -> None:
        """As it was before the step."""
        now = self.objects()
        for key in now.keys() - self.before.keys():
            self.store.delete(key)
        for key, data in self.before.items():
            if now.get(key) != data:
                self.store.put(key, data)

    def step(self, changes: int) -> int:
        """Its exit code; killed before so many changes (a million: never)."""
        command = [sys.executable, "-c", SCRIPT, self.url, self.endpoint, str(changes)]
        done = subprocess.run(
            [*command, self.order.model_dump_json()], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def forms(self) -> set[str]:
        """Committed forms of the older one that count for list, restore and verify."""
        seen = observe.observe(self.store)
        gone = {(stone.tag, stone.form) for stone in seen.retired}
        return {
            v.commit.form for v in seen.commits if v.commit.tag == TAG and (TAG, v.commit.form) not in gone
        }


def order_of(gone: CommitView, left: CommitView) -> DeleteCommit:
    """ZeRO goes, universal stays."""
    return DeleteCommit(
        tag=TAG,
        generation=1,
        form="zero",
        reason="ladder: universal after 1 newer",
        commit_sha256=gone.sha256,
        instead=(left.commit.form, left.sha256),
    )


@pytest.fixture(params=["directory", pytest.param("moto", marks=pytest.mark.full)])
def scene(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    if request.param == "directory":
        (tmp_path / "nas").mkdir()
        return Scene(tmp_path, str(tmp_path / "nas"), "")
    server: servers.Server = request.getfixturevalue("moto")
    for name, value in servers.environment().items():
        monkeypatch.setenv(name, value)
    return Scene(tmp_path, f"s3://{servers.BUCKET}/ladder", server.endpoint)


def test_killed_between_any_two_changes(scene: Scene, request: pytest.FixtureRequest) -> None:
    """A whole form counts at every instant, the one that stays is never touched, repeating ends the same."""
    is_remote = bool(scene.endpoint)
    few = (1, 3)  # the tombstone is there, and the COMMIT; an object is gone
    universal = {k: v for k, v in scene.before.items() if "universal" in k}
    finished: dict[str, bytes] | None = None
    for changes in few if is_remote and not os.environ.get("CKPTD_FULL") else itertools.count():
        scene.put_back()
        code = scene.step(changes)
        now = scene.objects()
        assert {k: v for k, v in now.items() if "universal" in k} == universal
        zero = [key for key in now if key.startswith(f"{TAG}/")]
        assert scene.forms() == ({"zero", "universal"} if changes == 0 else {"universal"})
        assert (changes == 0) == (f"_ckptd/retired/{TAG}~g1~zero.json" not in now)
        if code != 0:
            assert scene.step(1_000_000) == 0
        finished = finished or scene.objects()
        assert scene.objects() == finished
        assert not any(key.startswith(f"{TAG}/") for key in finished)
        if code == 0:
            assert changes > 5
            assert not zero
            break


@pytest.mark.full
@pytest.mark.real
@pytest.mark.stores
def test_a_daemon_finishes_it_in_a_bucket(tmp_path: Path, moto: servers.Server) -> None:
    """Tombstone written, nothing removed: the next daemon goes on, and only with what the tombstone names."""
    prepare([RUN])
    with s3_node(tmp_path, moto, local="save_total_limit = 1") as here:
        here.start()
        here.save(1)
        here.wait("a universal form", lambda: len(here.commits("universal")) == 1)
        here.save(2)
        here.wait("another", lambda: len(here.commits("universal")) == 2)
        here.wait("the prune", lambda: here.local_tags() == {"global_step2"})
        here.stop()
        kept = {key: here.read(key) for key in here.objects() if key.startswith(("global_step1/", "_ckptd/"))}
        rungs = 'keep_last = 1\nladder = [{ after = 1, form = "universal" }]'
        here.write_job(remote=f"{here.remote}\n{rungs}")
        here.start()
        here.wait("the step", lambda: not here.objects("global_step1/"))
        here.wait("its manifests", lambda: not here.objects("_ckptd/nodes/global_step1~g1~zero/"))
        here.kill()
        for key, data in kept.items():
            if "global_step1/" in key or "global_step1~g1~zero" in key:
                here.client.put_object(Bucket=here.bucket, Key=f"run/{key}", Body=data)
        here.start()
        here.wait(
            "finished", lambda: "global_step1~g1" not in here.commits() and not here.objects("global_step1/")
        )
        assert set(here.commits("universal")) == {"global_step1~g1", "global_step2~g1"}
        finished = here.audit("retire")[-1]
        assert finished["reason"] == "what was cut short is finished: ladder: universal after 1 newer of nas"
