"""Whole lives of a job, drawn at random: whatever happens in whatever order, the planner keeps P1, P3 and P5.

The machine trains, rewinds, saves a tag again, lets remotes vanish and lose COMMITs, kills the daemon and
executes only part of each plan; after every step the promises are judged from the world's own books, and at
the end, with everything healed, the job must come to rest with nothing left undone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckptd.core.model.records import ZERO, DerivedState, UploadState
from ckptd.core.policy import deletion, planner, retention
from ckptd.core.policy import local as keeping
from ckptd.core.policy.actions import Action, DeleteLocal, DeleteRemote
from ckptd.core.policy.local import keep_local
from ckptd.core.policy.permit import OptOutPermit
from ckptd.core.policy.remote import keep_remote
from ckptd.core.policy.retention import RetentionPolicy, RetentionVerdict, Tier, Unuploaded
from tests.model.world import Remote, World, order_of

LIMITS = st.one_of(st.none(), st.integers(1, 3))
STEPS = (Tier(form="universal", after_newer=1), Tier(form="gone", after_newer=4))
SPANS = (Tier(form="universal", after_seconds=20.0), Tier(form="gone", after_seconds=200.0))
LADDERS = st.sampled_from([(), STEPS, STEPS[:1], STEPS[:1], SPANS[:1], SPANS])
SETTINGS = settings(
    max_examples=600,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def aged(policy: RetentionPolicy, rungs: tuple[Tier, ...]) -> RetentionPolicy:
    """With a ladder, which is for what a limit lets go."""
    limit = policy.save_total_limit or (1 if rungs else None)
    return policy.model_copy(update={"ladder": rungs, "save_total_limit": limit})


class Life(RuleBasedStateMachine):
    """One job with a required and an optional remote."""

    carried_out: ClassVar[Counter[str]] = Counter()
    """How often each kind of action was executed: a machine that never deletes proves nothing."""
    stepped_down: ClassVar[Counter[str]] = Counter()
    """How often a save lost its ZeRO form and kept another, on the node and in remotes."""

    @initialize(
        limits=st.tuples(LIMITS, LIMITS, LIMITS),
        both=st.booleans(),
        can_clone=st.booleans(),
        keeps_universal=st.sampled_from([True, True, True, False]),
        unuploaded=st.sampled_from(["keep", "keep", "keep", "thin", "delete"]),
    )
    def begin(
        self,
        limits: tuple[int | None, ...],
        both: bool,
        can_clone: bool,
        keeps_universal: bool,
        unuploaded: Unuploaded,
    ) -> None:
        self.step = 0
        local, nas, s3 = (RetentionPolicy(save_total_limit=limit) for limit in limits)
        self.world = World(
            local=local,
            remotes={"nas": Remote("nas", True, nas), "s3": Remote("s3", both, s3)},
            can_clone=can_clone,
            keeps_universal=keeps_universal,
            unuploaded=unuploaded,
        )

    @initialize(ladders=st.tuples(LADDERS, LADDERS, LADDERS))
    def age(self, ladders: tuple[tuple[Tier, ...], ...]) -> None:
        """Runs before or after `begin`: a ladder may come with a later configuration."""
        if hasattr(self, "world"):
            world = self.world
            world.local = aged(world.local, ladders[0])
            for remote, rungs in zip(world.remotes.values(), ladders[1:], strict=True):
                remote.policy = aged(remote.policy, rungs)

    # --- what the world does -----------------------------------------------------------------------------

    @rule(gain=st.integers(1, 3))
    def save(self, gain: int) -> None:
        self.step += gain
        self.world.train(self.step, f"global_step{self.step}")

    @rule(back=st.integers(1, 6))
    def rewind(self, back: int) -> None:
        self.step = max(1, self.step - back)
        self.world.train(self.step, f"global_step{self.step}")

    @rule(pick=st.integers(0, 50))
    def comes_late(self, pick: int) -> None:
        if self.world.saves:
            self.world.comes_late(sorted(self.world.saves)[pick % len(self.world.saves)])

    @rule()
    def save_begins(self) -> None:
        self.world.in_flight = True

    @rule()
    def save_ends(self) -> None:
        self.world.in_flight = False

    @rule(data=st.data())
    def trainer_rotates(self, data: st.DataObject) -> None:
        present = [s.id for s in self.world.saves.values() if s.is_present]
        if len(present) > 1:
            self.world.trainer_deletes(data.draw(st.sampled_from(sorted(present)[:-1])))

    @rule(name=st.sampled_from(["nas", "s3"]))
    def remote_goes_or_returns(self, name: str) -> None:
        remote = self.world.remotes[name]
        remote.is_there = not remote.is_there

    @rule(name=st.sampled_from(["nas", "s3"]), data=st.data())
    def stranger_deletes_a_commit(self, name: str, data: st.DataObject) -> None:
        """Not the newest: then the promise that it stays could not be judged."""
        remote = self.world.remotes[name]
        newest = max(remote.zero_orders(), default=None)
        keys = sorted(k for k, c in remote.commits.items() if order_of(c) != newest)
        if keys:
            del remote.commits[data.draw(st.sampled_from(keys))]

    @rule(free=st.sampled_from([50, 250, 10_000]))
    def disk(self, free: int) -> None:
        self.world.free_bytes = free

    @precondition(lambda self: self.world.converting is not None)
    @rule()
    def disk_fills_while_converting(self) -> None:
        self.world.free_bytes = 50
        for action in self.world.actions():
            self.carry_out(action)
        self.world.first_scan = False

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_seconds += seconds

    @rule(name=st.sampled_from(["nas", "s3"]))
    def upload_ends(self, name: str) -> None:
        self.world.finish_upload(self.world.remotes[name])

    @rule(gain=st.integers(1, 3))
    def a_save_comes_while_a_form_is_sent(self, gain: int) -> None:
        self.zero_forms_arrive(3)
        self.world.finish_conversion()
        self.zero_forms_arrive(2)
        self.save(gain)
        self.zero_forms_arrive(1)

    @rule(turns=st.integers(1, 4))
    def zero_forms_arrive(self, turns: int) -> None:
        """Some turns at a stretch; derived forms stay on their way."""
        for _ in range(turns):
            for action in self.world.actions():
                self.carry_out(action)
            self.world.first_scan = False
            for remote in self.world.remotes.values():
                if self.world.form_on_its_way(remote) == ZERO:
                    self.world.finish_upload(remote)

    @rule()
    def conversion_ends(self) -> None:
        self.world.finish_conversion()

    @rule(name=st.sampled_from(["nas", "s3"]))
    def remote_is_observed(self, name: str) -> None:
        self.world.remotes[name].observe()

    @rule()
    def daemon_is_killed(self) -> None:
        self.world.restart()

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        """A plan, of which any part is carried out."""
        actions = self.world.actions()
        count = data.draw(st.integers(0, len(actions)))
        for action in actions[:count]:
            self.carry_out(action)
        self.world.first_scan = False

    def carry_out(self, action: Any) -> None:
        world = self.world
        self.carried_out[type(action).__name__] += 1
        if isinstance(action, DeleteLocal | DeleteRemote):
            assert not world.first_scan, "nothing is deleted in the first scan"
        if isinstance(action, DeleteLocal):
            assert not world.in_flight, "nothing is deleted while a save is in flight"
            save = world.saves[action.save_id]
            complete = [s.save.order for s in world.saves.values() if s.is_intact]
            assert save.is_intact, "what changed is never deleted"
            assert save.save.order != max(complete), "the newest complete one is never deleted"
            assert save.save.tag != world.latest, "what latest names is never deleted"
            assert action.permit.commits or world.unuploaded == "delete", "a permit names COMMITs"
            assert action.permit.is_grounded
            is_opt_out = isinstance(action.permit, OptOutPermit)
            assert not is_opt_out or world.unuploaded != "keep", "an opt-out is the job file's alone"
            self.carried_out["by opt-out"] += is_opt_out
            if "ladder: universal" in action.permit.reason:
                assert save.universal.state is DerivedState.READY, (
                    "the rung's form is here before the save goes"
                )
        if isinstance(action, DeleteRemote) and action.commit.form == ZERO:
            orders = world.remotes[action.remote].zero_orders()
            is_here = any(
                s.is_present and (s.save.tag, s.save.order) == (action.commit.tag, order_of(action.commit))
                for s in world.saves.values()
            )
            assert not is_here, "what is still on the node stays in the remote"
            assert not orders or order_of(action.commit) != max(orders), "a remote's newest COMMIT stays"
        if isinstance(action, DeleteLocal):
            self.stepped_down["node"] += "universal" in action.permit.reason
        world.execute(action)

    # --- what must hold ----------------------------------------------------------------------------------

    @invariant()
    def pruned_only_what_every_required_remote_holds(self) -> None:
        if hasattr(self, "world"):
            assert all(safe for _, safe in self.world.pruned)

    @invariant()
    def newest_commit_of_each_remote_stays(self) -> None:
        if hasattr(self, "world"):
            for name, order in self.world.best_ever.items():
                assert max(self.world.remotes[name].zero_orders()) == order

    @invariant()
    def a_ladder_without_an_end_leaves_a_form_of_everything(self) -> None:
        if hasattr(self, "world"):
            for remote in self.world.remotes.values():
                rungs = remote.policy.ladder
                assert not rungs or rungs[-1].form == "gone" or not remote.emptied

    def teardown(self) -> None:
        """Everything heals; the job comes to rest with all uploaded and the limits kept."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.in_flight, world.free_bytes = False, 10_000
        for remote in world.remotes.values():
            remote.is_there = True
        for _ in range(300):
            world.now_seconds += 10
            for remote in world.remotes.values():
                world.finish_upload(remote)
                remote.observe()
            world.finish_conversion()
            actions = world.actions()
            if not actions:
                break
            for action in actions:
                self.carry_out(action)
            world.first_scan = False
        else:
            pytest.fail(f"the job never rests: {world.actions()}")
        self.stepped_down["remote"] += sum(r.stepped_down for r in world.remotes.values())
        self.a_ladder_without_an_end_leaves_a_form_of_everything()
        self._rests()

    def _rests(self) -> None:
        view = self.world.view()
        verdicts, remote_fates = keep_local(view).zero, keep_remote(view)
        for save in view.saves:
            if save.is_intact:
                for name in self.world.remotes:
                    state = save.upload(name, ZERO).state
                    assert state in (UploadState.COMMITTED, UploadState.DELETED), (save.save.tag, name, state)
                assert verdicts[save.id].keeps, f"{save.save.tag} may go and did not"
            assert not save.is_held, "no hold outlives its commit"
        for (name, key), verdict in remote_fates.items():
            limited = self.world.remotes[name].policy.save_total_limit is not None
            assert verdict.keeps or not limited, f"{key} of {name} may go and did not"


def test_any_life_keeps_the_promises() -> None:
    """600 lives of 40 events each, in which every kind of action happens."""
    Life.carried_out.clear()
    Life.stepped_down.clear()
    run_state_machine_as_test(Life, settings=SETTINGS)
    kinds = {kind.__name__ for kind in get_args(Action)} | {"by opt-out"}
    assert set(Life.carried_out) == kinds, Life.carried_out
    assert min(Life.carried_out.values()) >= 3, Life.carried_out
    assert min(Life.stepped_down[where] for where in ("node", "remote")) >= 3, Life.stepped_down


@pytest.mark.parametrize("what", ["confirmation", "newest", "remote newest", "ladder", "opt-out"])
def test_the_machine_sees_a_broken_planner(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard taken out by hand is noticed, so the machine is no decoration."""
    if what == "confirmation":
        for module in (keeping, planner):
            monkeypatch.setattr(module, "is_committed", lambda view, save: bool(view.remotes))
    elif what == "opt-out":
        # thin that asks for no newer COMMIT
        monkeypatch.setattr(keeping, "may_go_uncommitted", lambda view, save: view.unuploaded != "keep")
        monkeypatch.setattr(deletion, "newer_commits", lambda view, save: ())
        monkeypatch.setattr(OptOutPermit, "is_grounded", True)
        real = deletion.delete_one
        monkeypatch.setattr(
            deletion,
            "delete_one",
            lambda view, save, why: (
                real(replace(view, unuploaded="delete"), save, why)
                if view.unuploaded == "thin"
                else real(view, save, why)
            ),
        )
    elif what == "newest":
        monkeypatch.setattr(keeping, "_protection", lambda save, ground, **_: ())
    elif what == "ladder":
        every, honest = frozenset({"zero", "universal"}), retention.step_down  # as if each form were there
        monkeypatch.setattr(
            "ckptd.core.policy.retention.step_down",
            lambda rungs, age, forms, standing, otherwise: {
                form: replace(verdict, instead=None)
                for form, verdict in honest(rungs, age, every, every, otherwise).items()
                if form in forms
            },
        )
    else:
        monkeypatch.setattr(
            planner, "keep_remote", lambda view: {("nas", "none"): RetentionVerdict(keeps=("x",))}
        )
        monkeypatch.setattr(
            planner,
            "_remote_deletions",
            lambda view, keeps: [
                DeleteRemote(remote=r.name, commit=c, reason="broken")
                for r in view.remotes
                for c in r.commits[-1:]
                if r.retention.deletes and not view.is_first_scan
            ],
        )
    quick = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(Life, settings=quick)


def test_what_a_rung_leaves_is_not_dropped_for_room_in_the_same_turn() -> None:
    """Found by such a life: under pressure the universal form went, and its shards on the strength of it."""
    life = Life()
    life.begin(
        limits=(None, None, None), both=False, can_clone=False, keeps_universal=True, unuploaded="keep"
    )
    rungs = (Tier(form="universal", after_newer=1), Tier(form="gone", after_newer=4))
    life.age(ladders=(rungs, (), ()))
    life.a_save_comes_while_a_form_is_sent(gain=2)
    life.rewind(back=1)
    life.a_save_comes_while_a_form_is_sent(gain=2)
    life.disk_fills_while_converting()
    assert life.stepped_down["node"] > 0
