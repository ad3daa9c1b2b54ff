"""Guards taken out of ckptd by hand: the simulation of a fleet must notice each."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from ckptd.core.model import generation
from ckptd.core.model.generation import JoinGeneration
from ckptd.core.policy import deletion, local, planner
from ckptd.core.policy import remote as keeping_remote
from ckptd.core.policy.remote import keep_remote
from ckptd.daemon.state import remote_sync
from ckptd.storage.remote import commit
from ckptd.storage.remote import deletion as remote_deletion
from tests.fleet import node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.core.model.manifest import Commit
    from ckptd.core.model.save import Order, SealedSave
    from ckptd.core.policy.actions import Action
    from ckptd.core.policy.retention import RetentionVerdict
    from ckptd.core.policy.view import JobView, RemoteCommit


def _no_generations(*_: object, **__: object) -> JoinGeneration:
    return JoinGeneration(generation=1)


def _by_local_view(view: JobView) -> dict[tuple[str, str], RetentionVerdict]:
    """Retention by what lies on this node: what does not counts as the oldest."""
    mine = {record.commit_key for save in view.saves for record in save.uploads.values()}
    remotes = tuple(
        replace(remote, commits=tuple(c if c.key in mine else _old(c) for c in remote.commits))
        for remote in view.remotes
    )
    return keep_remote(replace(view, remotes=remotes))


def _old(commit: RemoteCommit) -> RemoteCommit:
    return replace(commit, branch=0, step=0, save_seq=0)


def _own(own: Order, _: object) -> Order:
    return own


def _raised(own: Order, told: Sequence[Order | None]) -> Order:
    return max([own, *(order for order in told if order is not None)])


def _orders_alone(save: SealedSave, told: Sequence[Commit | None]) -> SealedSave:
    found = remote_sync.as_committed(save, told)
    return found.model_copy(update={"best_checkpoint": save.best_checkpoint})


def _unheard(_: object) -> None:
    """What COMMITs call the best."""


def _beside_a_save(view: JobView, verdicts: dict[int, RetentionVerdict]) -> list[Action]:
    return deletion.delete_local(replace(view, is_save_in_flight=False), verdicts)


DEFECTS: dict[str, tuple[list[tuple[Any, str, Any]], str]] = {
    "saves not compared": (
        [
            (generation, "differs", lambda *_, **__: None),
            (commit, "named_conflict", lambda *_, **__: None),
            (generation, "named_conflict", lambda *_, **__: None),
        ],
        "mixes saves",
    ),
    "generations skipped": ([(node, "choose_generation", _no_generations)], "has no COMMIT"),
    "retired by local view": (
        [(planner, "keep_remote", _by_local_view), (remote_deletion, "_protected", lambda *_: None)],
        "though the policy keeps it",
    ),
    "orders not taken from COMMITs": (
        [(remote_sync, "order_by_commits", _own)],
        "though its policy keeps it",
    ),
    "orders only raised by COMMITs": (
        [(remote_sync, "order_by_commits", _raised)],
        "though its policy keeps it",
    ),
    "the best known to one node here": (
        [(node, "as_committed", _orders_alone), (local, "best_there", _unheard)],
        "is the best",
    ),
    "the best known to one node there": (
        [
            (node, "as_committed", _orders_alone),
            (keeping_remote, "best_there", _unheard),
            (remote_deletion, "best_named", _unheard),
        ],
        "is the best",
    ),
    "prunes beside a save": ([(planner, "delete_local", _beside_a_save)], "is saved"),
    "late prunes not looked at again": (
        [(node.Daemon, "is_undisturbed", lambda *_: True)],
        "is saved",
    ),
    "parts of others not heard of": (
        [(node, "note_parts", lambda waiting, at, **_: (waiting, at))],
        "nobody commits",
    ),
    "other configurations not noticed here": (
        [(deletion, "is_configured_otherwise", lambda *_: False)],
        "is configured otherwise",
    ),
    "other configurations not noticed there": (
        [(keeping_remote, "is_configured_otherwise", lambda *_: False)],
        "though the policy keeps it",
    ),
}
"""Name → what is put in the place of what, and words of what it leads to."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within, the guard is out."""
    patches = [mock.patch.object(*one) for one in DEFECTS[name][0]]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
