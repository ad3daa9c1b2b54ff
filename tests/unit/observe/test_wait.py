"""What `ckptd wait` makes of a published job: committed, not yet, or never (docs/adr/0108)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.cli.daemon.wait import judge_step
from ckptd.cli.main import main
from ckptd.observe.status import CheckpointStatus
from tests.support.status_gallery import REMOTE, behind, checkpoint, job


def test_committed_is_what_is_safe_or_was_and_left_this_node() -> None:
    assert judge_step(job(), 4000) == ("committed", "step 4000 (global_step4000) is committed")
    assert judge_step(job(checkpoints=()), 4000)[0] == "committed"
    held = tuple(replace(REMOTE.held[0], step=step, tag=f"global_step{step}") for step in (4000, 3000))
    gone = job(checkpoints=(checkpoint(4000),), remotes=(replace(REMOTE, held=held),))
    assert judge_step(gone, 3000)[0] == "committed"
    weights = tuple(replace(one, forms=("weights-bf16",)) for one in held)
    assert judge_step(job(remotes=(replace(REMOTE, held=weights),)), 3000)[0] == "cannot"


def test_not_yet_is_what_is_on_its_way_or_still_to_come() -> None:
    assert judge_step(None, 1) == ("not yet", "")
    assert judge_step(behind(), 4500)[0] == "not yet"
    assert judge_step(behind(), 9000)[0] == "not yet"
    assert judge_step(job(safe=None), 3000)[0] == "not yet"


@pytest.mark.parametrize("state", ["torn re-save", "incomplete", "suspect", "refused", "vanished", "retired"])
def test_never_says_why(state: str) -> None:
    here = replace(checkpoint(4500).local, held=False)
    broken = replace(checkpoint(4500, state=state, upload="waiting"), reason=None, local=here)
    verdict, text = judge_step(behind(checkpoints=(broken, checkpoint(4000))), 4500)
    assert verdict == "cannot"
    assert text.startswith("step 4500 (global_step4500) is not committed and will not be: ")
    said = replace(broken, reason="missing: shard 3")
    assert judge_step(behind(checkpoints=(said,)), 4500)[1].endswith(": missing: shard 3")


def test_a_step_that_the_run_has_passed_is_not_waited_for() -> None:
    verdict, text = judge_step(job(), 3500)
    assert (verdict, text) == ("cannot", "no checkpoint of step 3500 is known, and the run is at step 4000")


def test_a_run_that_was_rewound_is_waited_for_again() -> None:
    """Step 4500 of branch 1 is safe; branch 2 is on its way to the same step."""
    again = checkpoint(4500, state="uploading", upload="shipping", branch=2)
    rewound = job(
        safe=replace(job().safe, step=4500, tag="global_step4500"),  # type: ignore[type-var]
        checkpoints=(again, checkpoint(4500)),
        remotes=(),
    )
    assert judge_step(rewound, 4500)[0] == "not yet"


def unsealed(state: str, tag: str = "global_step4000", step: int | None = None) -> CheckpointStatus:
    made = checkpoint(4000, state=state, upload="waiting")
    return replace(made, branch=None, step=step, tag=tag, generation=None)


def test_the_newest_save_of_a_step_decides_not_the_one_that_is_safe() -> None:
    """The run was rewound and has saved step 4000 again in its branch, under the same tag or another."""
    for again in (
        checkpoint(4000, state="uploading", upload="shipping"),
        checkpoint(4000, state="uploading", upload="shipping", tag="again4000"),
        replace(checkpoint(4000, state="vanished"), local=replace(checkpoint(4000).local, held=True)),
        unsealed("resaving"),
        unsealed("sealing", "again4000", 4000),
    ):
        assert judge_step(job(checkpoints=(again, checkpoint(4000))), 4000)[0] == "not yet"
    gone = replace(checkpoint(4000, state="vanished"), local=replace(checkpoint(4000).local, present=False))
    verdict, text = judge_step(job(checkpoints=(gone, checkpoint(4000))), 4000)
    assert (verdict, text.rpartition(": ")[2]) == ("cannot", "somebody removed it before it was committed")
    torn = judge_step(job(checkpoints=(unsealed("torn re-save"), checkpoint(4000))), 4000)
    assert torn[0] == "cannot"
    sent = replace(gone, state="pruned", remotes=checkpoint(4000).remotes)
    assert judge_step(job(checkpoints=(sent, checkpoint(4000))), 4000)[0] == "committed"


def test_what_is_no_later_save_of_the_step_is_not_waited_for() -> None:
    for other in (
        unsealed("resaving", "last"),  # one name for all saves: the next step, most likely
        unsealed("saving", "global_step4500"),
        unsealed("incomplete", "old4000", 4000),
        unsealed("leftover"),
    ):
        assert judge_step(job(checkpoints=(other, checkpoint(4000))), 4000)[0] == "committed"
    sealed = checkpoint(4000, tag="last")
    assert judge_step(job(checkpoints=(unsealed("resaving", "last"), sealed)), 4000)[0] == "committed"


def test_a_name_that_nobody_knows_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error is said at once; a job that has not begun is waited for."""
    (tmp_path / "jobs.d").mkdir()
    (tmp_path / "jobs.d" / "llama.toml").write_text(
        f'save_dir = "{tmp_path}/nvme"\n[[remote]]\nname = "nas"\nurl = "{tmp_path}/nas"\n'
    )
    for name, code in (("lama", 66), ("llama", 3)):
        with pytest.raises(SystemExit) as ended:
            main(["wait", name, "--step", "1", "--timeout", "0.1s", "--config-dir", str(tmp_path)])
        assert ended.value.code == code
    assert "no job 'lama'" in capsys.readouterr().err
