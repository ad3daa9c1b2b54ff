"""Decide which COMMITs of each remote stay, each with its reasons: a pure function of the remote's data.

Facts of this node (a save still here, what its trainer calls the best) only ever add reasons to keep, so that
all nodes of a job delete the same set.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptd.core.model.records import SETTLED, WEIGHTS, ZERO
from ckptd.core.policy.local import best_here, best_there, score_of
from ckptd.core.policy.retention import PolicyFacts, PolicyItem, RetentionVerdict, apply_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.model.save import Order
    from ckptd.core.policy.view import JobView, RemoteCommit, RemoteView


TURN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Group all COMMITs of one save on one remote."""

    commits: Mapping[str, RemoteCommit]
    """Form → its COMMIT."""
    leader: RemoteCommit
    """The COMMIT that says what the save is: of the ZeRO form where that is still there."""
    order: Order

    @property
    def kind(self) -> str:
        """resumable; model-only and weights-only are nothing to resume from."""
        if self.leader.is_model_only:
            return "model-only"
        return "resumable" if any(form not in WEIGHTS for form in self.commits) else "weights-only"

    def held(self, view: JobView, remote: str) -> PolicyFacts:
        """Return the facts for the policy, dated by the earliest of the COMMITs, which is the ZeRO form's."""
        times = (c.committed_at_seconds for c in self.commits.values())
        lead = self.leader
        by_form = (lead, *(self.commits[form] for form in sorted(self.commits)))
        best = next((c.best for c in by_form if c.best is not None), None)
        return PolicyFacts(
            item=PolicyItem(
                key=f"{lead.tag}~g{lead.generation}",
                order=self.order,
                bytes=sum(c.bytes for c in self.commits.values()),
                pinned=lead.tag in view.pinned_tags,
                is_damaged=any((remote, lead.tag, form) in view.damaged for form in self.commits),
                has_damaged_copy=lead.tag in view.damaged_tags,
                committed_at_seconds=min((at for at in times if at is not None), default=None),
                score=score_of(view, best),
            ),
            forms=frozenset(self.commits),
            standing=frozenset(form for form, c in self.commits.items() if c.is_self_contained),
        )


def generations_of(remote: RemoteView) -> list[Generation]:
    """Group the COMMITs of a remote by save, oldest first."""
    return grouped(remote.commits)


def grouped(those: Iterable[RemoteCommit]) -> list[Generation]:
    """Group COMMITs by save, oldest first."""
    found: dict[tuple[str, int], dict[str, RemoteCommit]] = {}
    for commit in those:
        found.setdefault((commit.tag, commit.generation), {})[commit.form] = commit
    leaders = [(commits, commits.get(ZERO) or next(iter(commits.values()))) for commits in found.values()]
    return sorted((Generation(*pair, pair[1].order) for pair in leaders), key=lambda g: g.order)


def is_configured_otherwise(view: JobView, remote: RemoteView) -> bool:
    """Tell whether nodes configured otherwise took part in the newest COMMIT of several nodes.

    Such a node deletes nothing: by its own limits it might delete what the others keep.
    """
    shared = [c for c in remote.commits if c.form == ZERO]
    newest = max(shared, key=lambda c: c.order, default=None)
    if newest is None or len(newest.nodes) < 2 or not view.config_digest:
        return False
    return newest.config_digest != view.config_digest


def commits_to_delete(
    view: JobView, remote: RemoteView, verdicts: Mapping[tuple[str, str], RetentionVerdict]
) -> list[RemoteCommit]:
    """Return the COMMITs that this node may delete from the remote: nothing keeps them there.

    Deletions that the remote refused a short while ago, and those elected to other nodes, are left out.
    """
    if not remote.retention.deletes or is_configured_otherwise(view, remote):
        return []
    gone = [c for c in remote.commits if not verdicts[remote.name, c.key].keeps]
    if len(gone) == len(remote.commits):
        return []
    deletable = (c for c in gone if (remote.name, c.sha256) not in view.not_to_delete_remotely)
    return [c for c in deletable if is_elected_deleter(view, remote.name, c)]


def is_elected_deleter(view: JobView, remote: str, commit: RemoteCommit) -> bool:
    """Tell whether this node deletes a COMMIT of several nodes: one is elected, the next a minute later.

    This saves requests, it is not for safety: each reads what it needs and finishes what another began (ADR
    0105). The elected node waits a minute too: the others need that COMMIT for deletions on their disks.
    """
    if len(commit.nodes) < 2 or not view.node or view.lease is not None:
        return True  # of a shared directory the lease says whose turn it is
    earlier = _earlier(commit.sha256, commit.nodes, view.node)
    since = view.due_since_seconds.get((remote, commit.key), view.now_seconds)
    return view.now_seconds - since >= (earlier + 1) * TURN_SECONDS


@lru_cache(maxsize=1024)
def _earlier(sha256: str, nodes: frozenset[str], node: str) -> int:
    """Count the nodes elected before this one; for a COMMIT it never changes."""
    ours = _rank_by_hash(sha256, node)
    return sum(1 for name in nodes if name != node and _rank_by_hash(sha256, name) < ours)


def _rank_by_hash(sha256: str, node: str) -> str:
    return hashlib.sha256(f"{sha256} {node}".encode()).hexdigest()


def keep_remote(view: JobView) -> dict[tuple[str, str], RetentionVerdict]:
    """Return the verdict on each COMMIT: (remote, key) → verdict."""
    result: dict[tuple[str, str], RetentionVerdict] = {}
    present = [s for s in view.saves if s.is_present]
    here = {(s.save.tag, s.order) for s in present}
    newest_word = best_here(view)
    for remote in view.remotes:
        best = (newest_word, best_there(remote))
        generations = generations_of(remote)
        # orders may differ once the journal was lost, what a save is committed as does not
        claimed = {s.upload(remote.name, ZERO).commit_key for s in present}
        # what is not settled may turn out to be what a COMMIT of its tag lists (a note written over makes
        # another save of the same shards), and what retention deleted is never uploaded again
        unsettled = {s.save.tag for s in present if s.upload(remote.name, ZERO).state not in SETTLED}
        unclear = view.unsealed_tags | (unsettled if ZERO in remote.forms else set())
        for is_model_only in (False, True):
            mine = [g for g in generations if g.leader.is_model_only == is_model_only]
            if not mine:
                continue
            held = [g.held(view, remote.name) for g in mine]
            by_policy = apply_policy(held, remote.retention)
            deletes = remote.retention.deletes
            for one, generation in zip(held, mine, strict=True):
                lead = generation.leader
                more: tuple[str, ...] = ()
                is_here = (lead.tag, lead.order) in here or lead.key in claimed
                if (is_here or lead.tag in unclear) and deletes:
                    more += ("still on this node",)
                if lead.tag in best:
                    more += ("best_model_checkpoint",)
                for form, commit in generation.commits.items():
                    result[remote.name, commit.key] = by_policy[one.item.key][form].kept_for(*more)
    return result
