"""What is the best is kept by every node, though one alone has the trainer's word (§5, P5).

Two nodes look at one remote: node a has trainer_state.json, node b has parts without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.model.manifest import Commit
from ckptd.core.model.save import Best
from ckptd.core.policy.actions import DeleteLocal, DeleteRemote
from ckptd.core.policy.planner import plan
from ckptd.core.policy.remote import keep_remote
from ckptd.core.policy.retention import RetentionPolicy
from ckptd.daemon.state.remote_sync import as_committed
from tests.support.core_views import NAS, confirmation, job_view, remote_commit, save_view, sealed

if TYPE_CHECKING:
    from ckptd.core.model.save import SealedSave
    from ckptd.core.policy.view import JobView, RemoteCommit

ONE = RetentionPolicy(save_total_limit=1)


def saved(step: int, branch: int = 1, *, best: str | None, tag: str = "") -> SealedSave:
    """As node a sealed it."""
    return sealed(step, branch, tag=tag).model_copy(update={"best_checkpoint": best})


def committed(save: SealedSave, value: float | None = None) -> RemoteCommit:
    best = None if value is None else Best(metric="loss", value=value)
    return replace(remote_commit(save), best_tag=save.best_checkpoint, best=best)


def seen_by(
    commits: list[RemoteCommit], here: list[SealedSave], policy: RetentionPolicy = ONE, metric: str = ""
) -> JobView:
    """A node that has these saves and sees these COMMITs."""
    view = job_view([save_view(n, save) for n, save in enumerate(here, 1)])
    remote = replace(view.remotes[0], commits=tuple(commits), retention=policy)
    return replace(view, remotes=(remote,), metric=metric or None)


def without_word(save: SealedSave) -> SealedSave:
    """As node b sealed its part."""
    return save.model_copy(update={"best_checkpoint": None, "is_part": True})


def kept(view: JobView) -> set[str]:
    return {key for (_, key), verdict in keep_remote(view).items() if verdict.keeps}


def retired(view: JobView) -> list[str]:
    return [a.commit.tag for a in plan(view).actions if isinstance(a, DeleteRemote)]


def test_a_node_without_the_trainers_word_keeps_the_best_in_the_remote() -> None:
    saves = [saved(step, best="s2b1") for step in (2, 4, 6)]
    commits = [committed(save) for save in saves]
    newest = without_word(saves[2])
    assert retired(seen_by(commits, [newest])) == ["s4b1"]
    verdicts = keep_remote(seen_by(commits, [newest]))
    assert verdicts[NAS, commits[0].key].keeps == ("best_model_checkpoint",)


def test_a_later_best_lets_the_earlier_go() -> None:
    saves = [saved(2, best="s2b1"), saved(4, best="s4b1"), saved(6, best="s4b1")]
    view = seen_by([committed(save) for save in saves], [without_word(saves[2])])
    assert retired(view) == ["s2b1"]


def test_a_rewound_run_names_its_best_again() -> None:
    """The best of an abandoned branch is of a higher order than the one that the trainer goes back to."""
    saves = [saved(2, best="s2b1"), saved(8, best="s8b1"), saved(4, 2, best="s2b1"), saved(6, 2, best=None)]
    view = seen_by([committed(save) for save in saves], [without_word(saves[3])])
    assert {key.split("/")[2].split("~")[0] for key in kept(view)} == {"s2b1", "s6b2"}


SAVES = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(-1, 9),
        st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda row: row[:2],
)
POLICIES = st.builds(
    RetentionPolicy,
    save_total_limit=st.none() | st.integers(1, 3),
    keep_best=st.none() | st.integers(1, 2),
    keep_every_steps=st.none() | st.just(3),
)


@given(SAVES, POLICIES, st.data())
def test_facts_of_one_node_only_ever_keep_more(
    rows: list[tuple[int, int, int, float | None]], policy: RetentionPolicy, data: st.DataObject
) -> None:
    """Whatever lies on a node and whatever its trainer says: it lets nothing go that a bare node keeps, and
    every node keeps what the newest COMMIT that names one calls the best."""
    named = [rows[best % len(rows)] if best >= 0 else None for _, _, best, _ in rows]
    saves = [
        saved(step, branch, best=other and f"s{other[1]}b{other[0]}")
        for (branch, step, _, _), other in zip(rows, named, strict=True)
    ]
    commits = [committed(save, row[3]) for save, row in zip(saves, rows, strict=True)]
    bare = kept(seen_by(commits, [], policy, "loss"))
    mine = data.draw(st.lists(st.sampled_from(saves), unique_by=lambda save: save.tag))
    mine = [without_word(save) if data.draw(st.booleans()) else save for save in mine]
    assert bare <= kept(seen_by(commits, mine, policy, "loss"))
    words = [save for save in saves if save.best_checkpoint]
    if words:
        best = max(words, key=lambda save: save.order).best_checkpoint
        assert {commit.key for commit in commits if commit.tag == best} <= bare


# --- what lies on the nodes themselves -------------------------------------------------------------------


def document(save: SealedSave, **more: object) -> Commit:
    """Its COMMIT, as node a or node b wrote it."""
    given = {
        "job_id": "j", "tag": save.tag, "generation": 1, "form": "zero", "folder": save.tag,
        "branch": save.branch, "step": save.step, "save_seq": save.save_seq, "grid": save.grid, "bytes": 1,
        "files": 1, "manifests": [{"key": "k", "sha256": "d"}], "committed_by": "b", "committed_at": "then",
        "config_digest": "c", "best_checkpoint": save.best_checkpoint,
    }  # fmt: skip
    return Commit.model_validate(given | more)


def test_a_part_counts_as_its_commit_says() -> None:
    value = Best(metric="loss", value=1.0)
    whole = saved(2, best="s2b1")
    part = without_word(whole)
    told = as_committed(part, [document(whole, best=value)])
    assert (told.best_checkpoint, told.best, told.order) == ("s2b1", value, part.order)
    assert as_committed(told, [document(whole, best=value)]) is told
    assert as_committed(part, [None]) is part


@pytest.mark.parametrize("is_best", [True, False])
def test_a_commit_of_earlier_versions_says_it_of_itself_alone(*, is_best: bool) -> None:
    best = Best(metric="loss", value=1.0, is_best=is_best)
    commit = document(saved(2, best=None), best=best)
    assert commit.names_best == ("s2b1" if is_best else None)


def on_node_b(*, are_read: bool) -> JobView:
    """Parts of three saves, of which the first is the best; its limit is one."""
    saves = [saved(step, best="s2b1") for step in (2, 4, 6)]
    parts = [as_committed(without_word(s), [document(s) if are_read else None]) for s in saves]
    view = seen_by([committed(s) for s in saves] if are_read else [], parts, RetentionPolicy())
    return replace(view, confirmations={n: confirmation(s) for n, s in enumerate(parts, 1)})


def test_the_best_stays_on_a_node_without_the_trainers_word() -> None:
    view = on_node_b(are_read=True)
    assert [a.permit.tag for a in plan(view).actions if isinstance(a, DeleteLocal)] == ["s4b1"]


def test_what_a_remote_calls_the_best_stays_on_a_node_that_was_told_by_nobody_else() -> None:
    """Its own rows say nothing of it, as after the loss of its journal."""
    saves = [saved(step, best="s2b1") for step in (2, 4, 6)]
    view = seen_by([committed(save) for save in saves], [without_word(save) for save in saves])
    planned = plan(view)
    assert [a.permit.tag for a in planned.actions if isinstance(a, DeleteLocal)] == ["s4b1"]
    assert planned.local_verdicts[1].keeps == ("best_model_checkpoint",)


def test_nothing_leaves_a_node_before_the_commit_that_names_the_best_was_read() -> None:
    """Committed by this very node, and not looked at since."""
    planned = plan(on_node_b(are_read=False))
    assert not [a for a in planned.actions if isinstance(a, DeleteLocal)]
    assert "its COMMIT was not read yet, which names the best" in planned.local_verdicts[2].keeps
