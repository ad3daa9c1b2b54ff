"""A ladder with a real daemon: whole, universal, weights, gone, here and there; and the trainer's metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import PACE, RUN, Node, made_before, node

pytestmark = [pytest.mark.real, pytest.mark.faults]

WEIGHTS = "weights-fp32"
HERE = 'save_total_limit = 1\nladder = [{ after = 1, form = "universal" }, { after = 2, form = "gone" }]'
THERE = f"""save_total_limit = 1
forms = ["zero", "universal", "{WEIGHTS}"]
ladder = [
  {{ after = 1, form = "universal" }}, {{ after = 2, form = "{WEIGHTS}" }}, {{ after = 3, form = "gone" }}
]"""


real_saves = made_before(RUN)


def forms(here: Node) -> dict[int, str]:
    """Step → committed forms, straight from the remote: z, u, w."""
    found: dict[int, str] = {}
    for letter, form in (("z", "zero"), ("u", "universal"), ("w", WEIGHTS)):
        for commit in here.commits(form).values():
            found[commit["step"]] = found.get(commit["step"], "") + letter
    return found


def universals(here: Node) -> set[str]:
    """Universal forms on the node."""
    place = here.save_dir / "_ckptd" / "derived" / "universal"
    return {p.name for p in place.iterdir() if not p.name.startswith(".")} if place.is_dir() else set()


def save(here: Node, step: int) -> None:
    """Saved, and in every form where it belongs."""
    here.save(step)
    here.wait(f"all forms of {step}", lambda: forms(here).get(step) == "zuw", 60)


def test_from_whole_to_gone(tmp_path: Path) -> None:
    """Four saves and a kill -9: each form goes when its turn comes, never before the next one is there."""
    with node(tmp_path / "n", local=HERE, remote=THERE) as here:
        here.start()
        save(here, 1)
        save(here, 2)
        here.kill()
        here.start()
        save(here, 3)
        save(here, 4)
        here.wait("the remote's ladder", lambda: forms(here) == {4: "zuw", 3: "uw", 2: "w"}, 40)
        here.wait("the node's ladder", lambda: here.local_tags() == {"global_step4"}, 20)
        kept = {"global_step3", "global_step4"}
        here.wait("the node's universal forms", lambda: universals(here) == kept, 20)
        here.wait("its objects gone", lambda: not list((here.nas / "global_step3").glob("*.pt")))
        assert (here.nas / "latest").read_text() == "global_step4"
        told(here)
        audited(here)
        assert not here.problems() - PACE
        here.stop()
        assert here.ckptd("verify", here.nas, "--read-data").returncode == 0
        restored = here.ckptd("restore", here.nas, "global_step3", "--to", tmp_path / "three")
        assert restored.returncode == 0, restored.stderr
        assert "only the universal form is left" in restored.stderr
        nothing = here.ckptd("restore", here.nas, "global_step2", "--to", tmp_path / "two")
        assert nothing.returncode == 66
        assert "nothing to resume from" in nothing.stderr


def told(here: Node) -> None:
    """`status --retention`, from status.json alone: every checkpoint, here and there, and why."""

    def held() -> dict[int, dict[str, Any]]:
        return {h["step"]: h for h in here.status()["remotes"][0]["held"]}

    here.wait("status", lambda: {step: len(h["forms"]) for step, h in held().items()} == {4: 3, 3: 2, 2: 1})
    assert held()[3]["forms"] == ["universal", WEIGHTS]
    assert held()[3]["why"] == ["ladder: universal after 1 newer"]
    assert held()[2]["why"] == [f"ladder: {WEIGHTS} after 2 newer"]
    assert held()[2]["kind"] == "weights-only"
    assert "save_total_limit: 1 of 1" in held()[4]["why"]
    assert {h["verdict"] for h in held().values()} == {"keep"}
    shown = here.ckptd("status", here.job_file, "--retention", "--state-dir", here.state).stdout
    assert "weights only: nothing to resume from; ladder: weights-fp32 after 2 newer" in shown
    story = here.ckptd("status", here.job_file, "global_step2", "--json", "--state-dir", here.state)
    assert json.loads(story.stdout)["held"]["nas"][0]["forms"] == [WEIGHTS]


def audited(here: Node) -> None:
    """Every deletion with its reason and what it rested on."""
    retired: dict[tuple[str, str], dict[str, Any]] = {}
    for line in here.audit("retire"):  # one that made way for a save is finished later, in a line of its own
        retired.setdefault((line["tag"], line["form"]), line)
    assert retired["global_step3", "zero"]["reason"] == "ladder: universal after 1 newer of nas"
    rests_on = [key.rsplit("/", 1)[1] for key, _ in retired["global_step3", "zero"]["commits"]]
    assert rests_on == ["global_step3~g1~zero.json", "global_step3~g1~universal.json"]
    assert retired["global_step2", "universal"]["reason"] == f"ladder: {WEIGHTS} after 2 newer of nas"
    assert retired["global_step1", WEIGHTS]["reason"] == "ladder: gone after 3 newer of nas"
    pruned = {line["tag"]: line for line in here.audit("prune")}
    assert set(pruned) == {f"global_step{step}" for step in (1, 2, 3)}
    assert {line["reason"] for line in pruned.values()} == {"ladder: universal after 1 newer"}
    assert all(line["commits"] for line in pruned.values())
    lines = [line for line in here.audit("drop-derived") if line["form"] == "universal"]
    assert {line["tag"]: line["reason"] for line in lines} == dict.fromkeys(
        ("global_step1", "global_step2"), "ladder: gone after 2 newer"
    )


def best(here: Node) -> dict[int, Any]:
    """Step → best in its COMMIT."""
    return {c["step"]: (c.get("best") or {}).get("value") for c in here.commits().values()}


@pytest.mark.full
def test_the_trainers_metrics_decide_what_is_best(tmp_path: Path) -> None:
    """Of plain DeepSpeed: in manifest and COMMIT; one that comes late counts here; a symlink is refused."""
    job = 'metric = "eval_loss"\nmetrics_file = "metrics.jsonl"'
    with node(tmp_path, job, "save_total_limit = 1\nkeep_best = 1", "keep_last = 1\nkeep_best = 1") as here:
        log = here.save_dir / "metrics.jsonl"
        here.start()
        for step, value in ((1, 1.0), (2, 3.0)):
            with log.open("a") as stream:
                stream.write(json.dumps({"step": step, "eval_loss": value}) + "\n")
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        assert best(here) == {1: 1.0, 2: 3.0}
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.wait("the worse one to go", lambda: best(here) == {1: 1.0, 3: None}, 30)
        with log.open("a") as stream:
            stream.write('{"step": 3, "eval_loss": 0.5}\n{"step": 4, "eval_')
        here.wait(
            "the late value", lambda: "keep_best: 1 of 1" in here.checkpoint("global_step3")["keep"], 20
        )
        here.wait("the old best to go here", lambda: here.local_tags() == {"global_step3"}, 20)
        assert best(here) == {1: 1.0, 3: None}, "the remote goes by its COMMITs"
        os.rename(log, tmp_path / "elsewhere.jsonl")
        log.symlink_to(tmp_path / "elsewhere.jsonl")
        here.save(4)
        here.wait("the refusal", lambda: "metrics-unreadable" in here.problems(), 20)
        here.wait_committed("global_step4~g1")
        assert best(here)[4] is None
