"""A tag that is saved again, file by file: half of it is no save (H2), what was made of it goes (H15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.base.identity import FileIdentity, FolderIdentity
from ckptd.core.completeness.grid import Context
from ckptd.core.completeness.judge import Memory, State, Verdict, judge
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import Trainer, parse_shard_name
from ckptd.core.model.listing import FolderListing, ListedFile
from ckptd.core.model.records import DerivedRecord, DerivedState
from ckptd.core.model.shard_facts import ShardFacts
from ckptd.core.policy.actions import DropDerived, PointUniversal
from ckptd.core.policy.planner import plan
from tests.stores.scene import MODEL, OPTIM
from tests.support.core_views import job_view, save_view, sealed

QUIET = Context(settle_seconds=1, quiet_seconds=100, is_in_flight=False, save_spread_seconds=60)
NAMES = (MODEL, OPTIM.format(d=0), OPTIM.format(d=1))
BEFORE, NOW = 1000, 5000


def listed(seconds: dict[str, int]) -> FolderListing:
    """Three shards, each written at its time."""
    files = [
        ListedFile(
            path=name,
            identity=FileIdentity(dev=1, ino=number, size_bytes=9, mtime_ns=at * 10**9, ctime_ns=at * 10**9),
        )
        for number, (name, at) in enumerate(seconds.items())
    ]
    folder = FolderIdentity(dev=1, ino=99)
    return FolderListing(
        tag="global_step2", folder=folder, files=tuple(files), trainer=Trainer.DEEPSPEED, roots=("",)
    )


def judged(seconds: dict[str, int], memory: Memory | None, context: Context = QUIET) -> Verdict:
    facts = {}
    for name in seconds:
        shard = parse_shard_name(name)
        assert shard is not None
        said = ShardFacts(zero_stage=2, partition_count=(2,), optimizer_step=2)
        if name == MODEL:
            said = ShardFacts(zero_stage=2, dp_world_size=2, mp_world_size=1, global_steps=2)
        facts[name] = FileFacts(
            path=name, bytes=9, archive=Archive.ZIP, fingerprint=name, role=shard.role, facts=said
        )
    return judge(listed(seconds), facts, memory, context)


REMEMBERED = Memory(shards={f.path: f.identity for f in listed(dict.fromkeys(NAMES, BEFORE)).files})


@pytest.mark.parametrize("new", [NAMES[:1], NAMES[:2], NAMES[1:], NAMES[2:]])
def test_a_tag_is_complete_again_only_with_every_shard_anew(new: tuple[str, ...]) -> None:
    """A run that was killed in mid-save: rank 0 new, rank 1 old, quiet for ever, and it would load."""
    half = {name: NOW if name in new else BEFORE for name in NAMES}
    assert judged(half, REMEMBERED).state is State.TORN_RESAVE
    assert judged(half, REMEMBERED, replace(QUIET, is_in_flight=True)).state is State.RESAVING
    assert judged(dict.fromkeys(NAMES, NOW), REMEMBERED).state is State.COMPLETE
    assert judged(dict.fromkeys(NAMES, BEFORE), REMEMBERED).state is State.COMPLETE


def test_without_memory_of_the_save_before_their_times_tell() -> None:
    """The journal is lost: shards that were written an hour apart wait for a person."""
    half = {name: NOW if name != NAMES[2] else BEFORE for name in NAMES}
    verdict = judged(half, None)
    assert verdict.state in (State.SUSPECT, State.TORN_RESAVE)
    assert judged(dict.fromkeys(NAMES, NOW), None).state is State.COMPLETE
    apart = {name: NOW - (59 if name == NAMES[2] else 0) for name in NAMES}
    assert judged(apart, None).state is State.COMPLETE


def test_what_was_made_of_a_save_goes_when_its_tag_is_saved_again() -> None:
    """`latest_universal` must not name the state before (H15)."""
    ready = DerivedRecord(state=DerivedState.READY, is_source_verified=True)
    changed = save_view(1, sealed(1), is_intact=False, universal=ready)
    view = job_view([changed], latest_universal="_ckptd/derived/universal/s1b1")
    actions = plan(view).actions
    assert [a.tag for a in actions if isinstance(a, PointUniversal)] == [None]
    assert [a.save_id for a in actions if isinstance(a, DropDerived)] == [1]
