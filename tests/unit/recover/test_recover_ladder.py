"""What a ladder leaves of a checkpoint: a universal form alone is resumed from, weights alone are not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ckptd.errors import DamagedError, NotFoundError, NothingCommitted, RefusedError
from ckptd.maintenance.listing import list_remote
from ckptd.recover.select.inventory import read_remote_inventory
from tests.support.restore_scene import OPTIM, TAG, RestoreScene, scene

__all__ = ["scene"]

OLD = "global_step5"


def kinds(scene: RestoreScene) -> dict[str, tuple[str, list[str]]]:
    """What `list` says: tag → (kind, forms)."""
    listing = list_remote(read_remote_inventory("nas", str(scene.nas), None), datetime.now(UTC))
    return {c.tag: (c.kind, [f.form for f in c.forms]) for c in listing.checkpoints}


@pytest.fixture
def aged(scene: RestoreScene) -> RestoreScene:
    """global_step5 in universal form alone, global_step10 whole; on the node neither."""
    for step in (5, 10):
        scene.save(step)
    zero = scene.commit(OLD, 5)
    universal = scene.commit_universal(OLD, 5)
    scene.commit(TAG, 10)
    scene.retire(zero, universal)
    return scene


def test_a_universal_form_alone_is_a_resume_point(aged: RestoreScene) -> None:
    """Listed as such, restored by its tag on any number of ranks, resumed from when the newest is damaged."""
    assert kinds(aged) == {OLD: ("resumable", ["universal"]), TAG: ("resumable", ["zero"])}
    done = aged.restore(OLD)
    assert done.path == aged.dir / "_ckptd" / "derived" / "universal" / OLD
    assert (done.path / "zero" / "head.bias" / "fp32.pt").is_file()
    assert "only the universal form is left" in "\n".join(done.advice)
    assert '"load_universal": true' in "\n".join(done.advice)
    with pytest.raises(RefusedError, match="only the universal form"):
        aged.restore(OLD, form="zero")
    assert aged.restore().plan.candidate.tag == TAG
    aged.lose_node()
    aged.flip(aged.nas / TAG / OPTIM.format(0))
    again = aged.resume()
    assert again.plan.candidate.tag == OLD
    assert again.path == aged.save_dir / "_ckptd" / "derived" / "universal" / OLD
    assert aged.pointer("latest_universal") == f"_ckptd/derived/universal/{OLD}"
    assert aged.pointer() is None


def test_the_node_still_has_what_the_remote_let_go(aged: RestoreScene) -> None:
    """The very save lies here whole: resumed in ZeRO form on as many ranks, nothing is fetched."""
    aged.flip(aged.nas / TAG / OPTIM.format(0))
    (aged.save_dir / TAG).rename(aged.root / "lost")
    (aged.save_dir / "latest").unlink(missing_ok=True)
    done = aged.resume()
    assert (done.plan.candidate.tag, done.path) == (OLD, aged.save_dir / OLD)
    assert not done.plan.fetches


def test_a_universal_form_of_another_save_is_not_the_folder_here(aged: RestoreScene) -> None:
    """The tag was saved again here: that folder is a save of its own, behind all that is known."""
    aged.save(5, salt="again")
    done = aged.resume(world_size=1, node_name=aged.node, state_dir=aged.known_node())
    assert done.plan.candidate.tag == OLD
    assert done.plan.candidate.local is not None
    assert not done.plan.candidate.universals


def test_a_universal_form_beside_files_that_are_gone_is_none(scene: RestoreScene) -> None:
    """As Hugging Face's: it lies in the ZeRO form's folder and loads nowhere without what was beside it."""
    scene.save(5)
    zero = scene.commit(OLD, 5)
    universal = scene.commit_universal(OLD, 5, below="global_step5_universal/")
    assert zero.commit is not None
    assert universal.commit is not None
    assert not universal.commit.commit.is_self_contained
    (scene.nas / zero.commit.key).unlink()
    scene.lose_node()
    with pytest.raises(NothingCommitted):
        scene.resume()
    with pytest.raises(DamagedError):
        scene.restore()


def test_weights_alone_are_no_resume_point(scene: RestoreScene) -> None:
    """`list` says so, `resume` passes them over and names them, `restore` gives them when asked by form."""
    scene.save(5)
    scene.save(10)
    zero, weights = scene.commit(OLD, 5), scene.commit_weights(OLD, 5)
    scene.commit(TAG, 10)
    scene.retire(zero, weights)
    assert kinds(scene)[OLD] == ("weights-only", ["weights-fp32"])
    with pytest.raises(NotFoundError, match=r"only weights are left.*nothing to resume from") as refusal:
        scene.restore(OLD)
    assert "--form weights-fp32" in refusal.value.hint
    done = scene.restore(OLD, form="weights-fp32")
    assert done.path == scene.dir / f"{OLD}_weights-fp32"
    assert "nothing to resume from" in "\n".join(done.advice)
    scene.lose_node()
    scene.flip(scene.nas / TAG / OPTIM.format(0))
    with pytest.raises(DamagedError):
        scene.resume()
    (scene.nas / "_ckptd" / "commits" / f"{TAG}~g1~zero.json").unlink()
    with pytest.raises(NothingCommitted, match=f"only weights: {OLD}"):
        scene.resume()
