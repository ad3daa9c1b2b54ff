"""`ckptd resume --world-size N`: the universal form from the node, from the remote, or made on the way."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.model.listing import OURS
from ckptd.recover.advice import advice, model_facts
from tests.support.recover_scene import Scene, scene
from tests.support.synthetic import full_bytes

__all__ = ["scene"]
TAG = "global_step5"
UNIVERSAL = f"{OURS}/derived/universal/{TAG}"


def names(scene: Scene) -> list[str]:
    """Kinds of the steps that resume said."""
    said = [line.removeprefix("will ").split()[0] for line in scene.said]
    return [word for word in said if word in ("fetch", "convert", "move", "write")]


def test_the_same_number_of_ranks_needs_none(scene: Scene) -> None:
    scene.save(5)
    assert scene.resume(world_size=2, remote=False).plan.form == "zero"


def test_made_on_the_way(scene: Scene) -> None:
    scene.save(5)
    done = scene.resume(world_size=4, remote=False)
    assert done.path == scene.save_dir / UNIVERSAL
    assert (done.path / "zero" / "optimizer_state.pt").is_file()
    assert (done.path / "ckptd.json").is_file()
    assert scene.pointer("latest_universal") == UNIVERSAL
    assert scene.pointer() == TAG
    text = "\n".join(done.advice)
    assert '"checkpoint": {"load_universal": true}' in text
    assert "gradient_accumulation_steps 1" in text
    assert "train_micro_batch_size_per_gpu 2" in text
    assert "buffers are not restored" in text
    again = scene.resume(world_size=4, remote=False)
    assert again.plan.steps == ()


def test_the_accumulation_that_keeps_the_batch(scene: Scene) -> None:
    scene.save(5)
    text = "\n".join(scene.resume(world_size=1, remote=False).advice)
    assert "train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 2" in text
    text = "\n".join(scene.resume(world_size=3, remote=False).advice)
    assert "cannot be kept" in text


def test_experts_and_sequence_parallelism_are_told(scene: Scene) -> None:
    """A mixture of experts keeps its ep_size; with sequence parallelism the batch is the script's."""
    scene.save(5)
    done = scene.resume(world_size=4, remote=False)
    grid = done.plan.candidate.grid.model_copy(update={"ep": 2, "sp": 2})
    plan = replace(done.plan, candidate=replace(done.plan.candidate, grid=grid))
    text = "\n".join(advice(plan, model_facts(scene.save_dir / TAG)))
    assert "keep ep_size 2" in text
    assert "sequence parallel degree 2" in text
    assert "gradient_accumulation_steps" not in text


def test_a_release_that_cannot_load_the_form_is_told(scene: Scene) -> None:
    """Stage 3 of a DeepSpeed whose own loader does not read the form that it is handed."""
    scene.save(5)
    done = scene.resume(world_size=4, remote=False)
    facts = model_facts(scene.save_dir / TAG)
    assert facts is not None
    assert facts.groups == 1
    for version, stage, groups, is_told in (
        ("0.14.4", 3, 1, True),
        ("0.14.4", 2, 1, False),
        ("0.16.9", 3, 1, False),
        ("0.16.9", 3, 2, True),
        ("0.16.9", 3, None, True),
        ("0.18.3", 3, 2, False),
    ):
        grid = done.plan.candidate.grid.model_copy(update={"zero_stage": stage})
        plan = replace(done.plan, candidate=replace(done.plan.candidate, grid=grid))
        seen = facts.model_copy(update={"ds_version": version, "groups": groups})
        text = "\n".join(advice(plan, seen))
        assert ("load it with 0.18.3 or newer" in text) is is_told


def test_from_the_remote_alone(scene: Scene) -> None:
    scene.save(5)
    scene.commit(TAG, 5)
    scene.commit_universal(TAG, 5)
    scene.lose_node()
    done = scene.resume(world_size=1)
    assert names(scene) == ["fetch", "write"]
    assert done.path == scene.save_dir / UNIVERSAL
    assert not (scene.save_dir / TAG).exists()
    assert scene.pointer("latest_universal") == UNIVERSAL
    assert scene.pointer() is None
    assert scene.resume(world_size=1).plan.steps == ()
    assert scene.resume().path == scene.save_dir / TAG
    assert scene.pointer() == TAG


def test_a_damaged_universal_is_made_again(scene: Scene) -> None:
    scene.save(5)
    scene.commit(TAG, 5)
    scene.commit_universal(TAG, 5)
    scene.lose_node()
    (scene.nas / f"{TAG}_universal" / "zero" / "embed.weight" / "fp32.pt").write_bytes(b"rot")
    done = scene.resume(world_size=1)
    assert "the next best is taken" in "\n".join(scene.said)
    assert (done.path / "zero" / "embed.weight" / "fp32.pt").is_file()
    assert (scene.save_dir / TAG).is_dir()


def test_a_universal_of_another_save_is_not_used(scene: Scene) -> None:
    scene.save(5)
    scene.resume(world_size=4, remote=False)
    scene.save(5, salt="again")
    done = scene.resume(world_size=4, remote=False)
    assert scene.aside() == [f"{TAG}_universal.1"]
    assert done.path.is_dir()
    assert scene.resume(world_size=4, remote=False).plan.steps == ()


def test_a_universal_without_its_description_is_not_trusted(scene: Scene) -> None:
    scene.save(5)
    scene.resume(world_size=4, remote=False)
    (scene.save_dir / UNIVERSAL / "ckptd.json").write_text("{")
    scene.resume(world_size=4, remote=False)
    assert scene.aside() == [f"{TAG}_universal.1"]


def test_latest_that_names_nothing_goes_aside(scene: Scene) -> None:
    scene.save(5)
    scene.commit(TAG, 5)
    scene.commit_universal(TAG, 5)
    scene.lose_node()
    scene.tear(9)
    scene.resume(world_size=1)
    assert scene.pointer() is None
    assert scene.aside() == ["global_step9.1", "latest.1"]


def test_a_bit_that_flipped_here_is_found_before_it_is_converted(scene: Scene) -> None:
    """Nothing has checked an uncommitted save's bytes: the conversion does, and the older one is taken."""
    scene.save(3)
    scene.save(5)
    path = scene.save_dir / TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[data.index(full_bytes("exp_avg", "embed.weight", (7, 5))[:16]) + 3] ^= 1
    path.write_bytes(data)
    done = scene.resume(world_size=4, remote=False)
    assert done.path.name == "global_step3"
    assert "the next best is taken" in "\n".join(scene.said)
    assert (scene.save_dir / TAG).exists()


def test_model_parallel_degrees_are_the_scripts_choice(scene: Scene) -> None:
    from dataclasses import replace

    from ckptd.base import files
    from ckptd.recover.plan import RecoveryOptions, SaveDirPlanner
    from ckptd.recover.select.choose import choose
    from ckptd.recover.select.inventory import scan_local

    scene.save(5)
    with files.opened_dir(scene.save_dir) as fd:
        listing, local = scan_local(scene.save_dir, fd, scene.job(remote=False), [])
    from ckptd.recover.select.copies import Nodes
    from ckptd.recover.select.inventory import NodeMemory

    best = choose(local, [], NodeMemory(), Nodes()).candidates[0]
    wide = replace(best, grid=best.grid.model_copy(update={"mm_count": 2}))
    for world_size, form in ((3, "universal"), (4, "zero"), (2, "universal")):
        wish = RecoveryOptions(world_size=world_size)
        planner = SaveDirPlanner(wide, wish, scene.save_dir, None, listing=listing, local=local)
        assert planner.plan().form == form
