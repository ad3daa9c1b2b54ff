"""Two releases side by side on one job, as during an upgrade: they commit together, or one refuses in words.

The other release is a copy of the package in a process of its own: another version and minor format, a field
that this one does not know, names of manifests as they once were. The remote is what the first release wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.core.model.manifest import FORMAT
from ckptd.errors import RefusedError
from ckptd.maintenance.verify import Slice, Verifier
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.storage.remote.documents import read_commit
from ckptd.storage.remote.messages import UploadResult
from tests.support import observing as observe
from tests.support.recover_scene import Scene

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "remote-1.0"
TAG = "global_step20"
RANK1 = "zero_pp_rank_1"
CHILD = """
import sys
from pathlib import Path
import ckptd
from ckptd.errors import CkptdError
from ckptd.storage.remote.documents import read_commit
from ckptd.storage.remote.messages import UploadResult
from tests.support.recover_scene import Scene
assert Path(ckptd.__file__).is_relative_to(Path.cwd()), ckptd.__file__
what, root, node, part = sys.argv[1:]
scene = Scene(Path(root), node=node)
try:
    if what == "ship":
        done = scene.commit("global_step20", 20, only=lambda path: (part in path) == (node == "n1"))
        print(done.outcome, done.reason)
    else:
        found = read_commit(scene.ground().store, (node, 1, "zero"))
        scene.retire(UploadResult(outcome="committed", commit=found))
        print("retired")
except CkptdError as error:
    print(f"{type(error).__name__}: {error.message}; {error.hint}")
"""


@dataclass
class Release:
    """Another release of ckptd in a folder of its own."""

    folder: Path

    def change(self, name: str, before: str, after: str) -> None:
        """One line of it is other than ours."""
        path = self.folder / "ckptd" / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))

    def do(self, what: str, scene: Scene, node: str) -> str:
        """What it says."""
        done = subprocess.run(
            [sys.executable, "-c", CHILD, what, str(scene.root), node, RANK1],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A save of two ranks beside the remote of the first release."""
    found = Scene(tmp_path)
    shutil.copytree(GOLDEN, found.nas)
    found.save(20, TAG)
    return found


def release(tmp_path: Path, *, format_: str) -> Release:
    """A copy of this one with another version, format, field, and way to name manifests."""
    made = Release(tmp_path / "other")
    shutil.copytree(ROOT / "ckptd", made.folder / "ckptd", ignore=shutil.ignore_patterns("__pycache__"))
    made.change("core/model/manifest.py", f'FORMAT = "{FORMAT}"', f'FORMAT = "{format_}"')
    made.change("core/model/manifest.py", "MAJOR = 1", f"MAJOR = {format_[0]}")
    made.change(
        "core/model/manifest.py", "    save_seq: int\n", '    save_seq: int\n    later: str = "not known"\n'
    )
    made.change("core/model/manifest.py", '    if manifest.form != "zero":', "    if True:")
    return made


def ours(scene: Scene, node: str) -> UploadResult:
    """This release ships the part of a node."""
    scene.node = node
    return scene.commit(TAG, 20, only=lambda path: (RANK1 in path) == (node == "n1"))


def everything(nas: Path) -> dict[str, bytes]:
    return {str(p.relative_to(nas)): p.read_bytes() for p in sorted(nas.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "is_ours_first",
    [True, pytest.param(False, marks=pytest.mark.full)],
    ids=["ours-first", "theirs-first"],
)
def test_two_releases_commit_together(tmp_path: Path, scene: Scene, *, is_ours_first: bool) -> None:
    """Whoever comes last commits both parts, and what it makes of the remote both can read."""
    other = release(tmp_path, format_="1.7")
    if is_ours_first:
        assert ours(scene, "n0").outcome == "waiting"
        assert other.do("ship", scene, "n1") == "committed None"
        # who came first finds the COMMIT of the other
        assert ours(scene, "n0").outcome == "committed"
    else:
        assert other.do("ship", scene, "n1").startswith("waiting waiting for optimizer shard of rank 0")
        assert ours(scene, "n0").outcome == "committed"
        assert other.do("ship", scene, "n1") == "committed None"
    commit = json.loads((scene.nas / f"_ckptd/commits/{TAG}~g1~zero.json").read_bytes())
    formats = {json.loads((scene.nas / ref["key"]).read_bytes())["format"] for ref in commit["manifests"]}
    assert formats == {FORMAT, "1.7"}
    assert (scene.nas / "latest").read_text() == TAG
    found = Verifier(read_remote_inventory("nas", str(scene.nas), None), read=Slice()).run(None)
    assert {row.verdict for row in found.commits} == {"good"}
    assert (TAG, "zero") in {(row.tag, row.form) for row in found.commits}
    assert other.do("retire", scene, "global_step10") == "retired"
    seen = observe.observe(scene.ground().store)
    assert {v.commit.tag for v in seen.commits if v.commit.form == "zero"} == {"global_step5", TAG}


def test_a_higher_major_is_refused_in_words(tmp_path: Path, scene: Scene) -> None:
    """By whoever is older, who then changes nothing: neither the tag's parts nor what is retired."""
    other = release(tmp_path, format_="2.0")
    old = UploadResult(
        outcome="committed", commit=read_commit(scene.ground().store, ("global_step5", 1, "zero"))
    )
    assert other.do("ship", scene, "n1").startswith("waiting")
    before = everything(scene.nas)
    words = f"format 2.0, this ckptd knows {FORMAT}"
    with pytest.raises(RefusedError, match=words) as refused:
        ours(scene, "n0")
    # an uncommitted part of it is enough: what else it means is not known
    with pytest.raises(RefusedError, match=words):
        scene.retire(old)
    assert "upgrade ckptd" in refused.value.hint
    assert everything(scene.nas) == before
    # the newer one reads what both wrote, and commits alone once it has both parts
    assert other.do("ship", scene, "n0") == "committed None"
    before = everything(scene.nas)
    with pytest.raises(RefusedError, match=words):
        observe.observe(scene.ground().store)
    with pytest.raises(RefusedError, match=words):
        scene.retire(old)
    assert everything(scene.nas) == before
