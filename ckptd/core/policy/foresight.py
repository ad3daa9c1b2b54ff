"""Say what retention keys would delete and keep: the planner's own plans, carried out in thought.

A view goes in with other keys. Plan after plan of `ckptd.core.policy.planner` is applied to it until none has
anything left to do, and again after each save to come, which is like the newest. Remotes answer, uploads
succeed, nothing is paused and no hourly limit delays a deletion: the result is where retention comes to rest.
Nothing is done.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptd.core.model.listing import OURS
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.policy.actions import (
    ConfirmCommits,
    Convert,
    DeleteLocal,
    DeleteRemote,
    Describe,
    DropDerived,
    Hold,
    PointUniversal,
    ReleaseHold,
    Upload,
    UploadLateFiles,
)
from ckptd.core.policy.local import bytes_here
from ckptd.core.policy.planner import plan
from ckptd.core.policy.remote import commits_to_delete
from ckptd.core.policy.view import (
    WEIGHTS_SHARE,
    Confirmation,
    GenerationAnswer,
    RemoteCommit,
    RemoteView,
    SaveView,
)
from ckptd.errors import BehindError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptd.core.policy.actions import Action, Plan
    from ckptd.core.policy.capacity import SaveRhythm
    from ckptd.core.policy.retention import RemoteKeys, RetentionKeys
    from ckptd.core.policy.view import JobView

_NO_LIMIT = 1_000_000_000
_MOST_TURNS = 2000
_WAITED_SECONDS = 1e9
"""Time that passes in thought, after which every failed upload and conversion is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseenDeletion:
    """Describe a checkpoint, or forms of it, that will be deleted in one place."""

    tag: str
    generation: int
    forms: tuple[str, ...]
    bytes: int
    why: str
    after_saves: int
    """Number of further saves after which it is deleted; 0: with what is there now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseenPlace:
    """Describe one place under the keys: what is deleted there, and what it holds afterwards."""

    remote: str | None
    """None: this node's disk."""
    is_known: bool
    """False: the remote has not been read yet."""
    before: tuple[int, int]
    """Checkpoints that are there now, and their bytes."""
    held: tuple[tuple[int, int], ...]
    """Checkpoints and bytes after 0, 1, 2 … further saves."""
    deletions: tuple[ForeseenDeletion, ...]
    """Without those of saves that are yet to come."""


def foresee(
    view: JobView,
    keys: RetentionKeys,
    saves: int,
    pace: SaveRhythm | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[ForeseenPlace, ...]:
    """Return what becomes of each place under these keys, now and after each of so many further saves.

    `pace`: of the run; None: it is not known, and the next saves are a step and a second apart.
    `may_go_on`: asked before each plan; once it says no, the saves that are left are not looked at.

    Raises:
        BehindError: that was before retention came to rest with what is there now.
    """
    thought = _Thought(_at_rest(view, keys), pace, may_go_on)
    before = _held(thought.view)
    held: list[dict[str | None, tuple[int, int]]] = []
    newest = next((kind[0] for kind in view.intact.values() if kind), None)
    for count in range(saves + 1):
        if count and newest is not None:
            thought.save(newest, count)
        if not thought.settle(count):
            break
        held.append(_held(thought.view))
    if not held:
        msg = "there was not time enough to plan what is there now"
        raise BehindError(msg, hint="ask again when the node is less busy")
    return tuple(
        ForeseenPlace(
            remote=place,
            is_known=is_known,
            before=before[place],
            held=tuple(one[place] for one in held),
            deletions=tuple(one for one in thought.deletions[place].values() if one.after_saves < len(held)),
        )
        for place, is_known in [(None, True), *((r.name, r.was_heard) for r in thought.view.remotes)]
    )


def _at_rest(view: JobView, keys: RetentionKeys) -> JobView:
    """Return the view with the keys, and with nothing in the way of what they say.

    A remote that the keys alone name is taken as empty.
    """
    known = {remote.name: remote for remote in view.remotes}
    return replace(
        view,
        saves=tuple(
            replace(save, is_busy=False, is_adopted=save.is_adopted or keys.existing == "all")
            for save in view.saves
        ),
        remotes=tuple(_remote_at_rest(known.get(name), name, one) for name, one in keys.remotes.items()),
        local_forms=keys.local_forms,
        local_retention=keys.local,
        existing=keys.existing,
        unuploaded=keys.unuploaded,
        metric=keys.metric,
        is_higher_better=keys.is_higher_better,
        is_save_in_flight=False,
        is_first_scan=False,
        is_paused=False,
        is_converting=False,
        may_delete=True,
        deletions_left=_NO_LIMIT,
        not_to_delete=frozenset(),
        not_to_upload_late=frozenset(),
        not_to_delete_remotely=frozenset(),
        drain=None,
        removal=None,
        lease=None,
        # whichever node or host is elected to delete, and however the others are configured now
        node="",
        config_digest="",
        now_seconds=view.now_seconds + _WAITED_SECONDS,
    )


def _remote_at_rest(remote: RemoteView | None, name: str, keys: RemoteKeys) -> RemoteView:
    is_heard = remote is None or remote.was_heard
    at_rest = RemoteView(
        name=name,
        is_required=keys.is_required,
        forms=keys.forms,
        is_attached=is_heard,
        is_busy=False,
        was_heard=is_heard,
        retention=keys.retention,
        deletions_left=_NO_LIMIT,
    )
    if remote is None:
        return at_rest
    return replace(
        at_rest,
        commits=remote.commits,
        known_tags=remote.known_tags,
        deleting_tags=remote.deleting_tags,
    )


def _held(view: JobView) -> dict[str | None, tuple[int, int]]:
    """Return the checkpoints and bytes of each place."""
    here = [bytes_here(save) for save in view.saves]
    found: dict[str | None, tuple[int, int]] = {None: (sum(size > 0 for size in here), sum(here))}
    for remote in view.remotes:
        tags = {(commit.tag, commit.generation) for commit in remote.commits}
        found[remote.name] = len(tags), sum(commit.bytes for commit in remote.commits)
    return found


@dataclass(slots=True)
class _Thought:
    """A view that changes as plans are carried out; collects what they delete."""

    view: JobView
    pace: SaveRhythm | None
    may_go_on: Callable[[], bool]
    saves: dict[int, SaveView] = field(init=False)
    """Those of the view, as they are in the middle of a turn."""
    confirmations: dict[int, Confirmation] = field(default_factory=dict)
    generations: dict[tuple[int, str, str], GenerationAnswer] = field(default_factory=dict)
    deletions: dict[str | None, dict[tuple[str, int], ForeseenDeletion]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    after_saves: int = 0
    at_seconds: float | None = None
    """Unix time of the newest COMMIT."""

    def __post_init__(self) -> None:
        self.saves = {save.id: save for save in self.view.saves}
        self.generations |= self.view.generations
        answers = {"confirmations": self.confirmations, "generations": self.generations}
        self.view = replace(self.view, **answers)  # type: ignore[arg-type]

    def settle(self, after_saves: int) -> bool:
        """Plan and carry out until nothing is left to do; False: there was not time enough."""
        self.after_saves = after_saves
        for _ in range(_MOST_TURNS):
            if not self.may_go_on():
                return False
            made = plan(self.view)
            if not made.actions:
                break
            for action in made.actions:
                self._carry_out(action, made)
            self.view = replace(self.view, saves=tuple(self.saves.values()))
        return True

    def save(self, like: SaveView, count: int) -> None:
        """Let the trainer save once more, as it saved before: the same bytes, the usual steps on."""
        newest = max((s.order for s in self.saves.values()), default=like.order)
        last_ns = max((s.save.window.last for s in self.saves.values()), default=like.save.window.last)
        steps, every = (self.pace.steps, self.pace.every_seconds) if self.pace is not None else (1, 1.0)
        tag = f"+{count}"
        changes = {
            "tag": tag,
            "branch": newest.branch,
            "step": newest.step + steps,
            "save_seq": newest.save_seq + 1,
            "window": like.save.window.model_copy(update={"last": last_ns + round(every * 1e9)}),
            "rivals": (),
            "beside": (),
            "late": (),
            "best": None,
            "best_checkpoint": None,
        }
        self.at_seconds = None if self.at_seconds is None else self.at_seconds + every
        fresh = SaveView(
            id=max(self.saves, default=like.id) + 1,
            save=like.save.model_copy(update=changes),
            is_adopted=True,
            was_found_first=False,
            is_intact=True,
            is_present=True,
        )
        latest = tag if self.view.latest is not None else None
        self.saves[fresh.id] = fresh
        self.view = replace(self.view, saves=tuple(self.saves.values()), latest=latest)

    # --- carrying out ----------------------------------------------------------------------------------

    def _carry_out(self, action: Action, made: Plan) -> None:
        view = self.view
        match action:
            case Upload():
                self._upload(action)
            case Describe():
                self._describe(action)
            case UploadLateFiles():
                self._change(action.save_id, lacking={}, has_unlisted=())
            case Convert():
                size = self.saves[action.save_id].save.total_bytes
                self._change(
                    action.save_id,
                    universal=DerivedRecord(
                        state=DerivedState.READY,
                        bytes=size,
                        is_cloned=view.disk.can_clone,
                        is_source_verified=True,
                    ),
                )
            case Hold() | ReleaseHold():
                self._change(action.save_id, is_held=isinstance(action, Hold))
            case PointUniversal():
                name = f"{OURS}/derived/{UNIVERSAL}/{action.tag}" if action.tag else None
                self.view = replace(view, latest_universal=name)
            case ConfirmCommits():
                self.confirmations[action.save_id] = Confirmation(
                    commits=action.commits, at_seconds=view.now_seconds
                )
            case DropDerived():
                self._drop(action)
            case DeleteLocal():
                self._delete_local(action)
            case DeleteRemote():
                self._delete_remote(action, made)
            case _:  # there is no upload and no conversion under way that could be stopped
                pass

    def _change(self, save_id: int, **changes: object) -> None:
        """Change a save; one of which nothing is left here is forgotten."""
        save = self.saves[save_id] = replace(self.saves[save_id], **changes)  # type: ignore[arg-type]
        if not (save.is_present or save.is_held or save.universal.state is DerivedState.READY):
            del self.saves[save_id]

    def _remote(self, name: str) -> RemoteView:
        return next(remote for remote in self.view.remotes if remote.name == name)

    def _set_commits(self, name: str, commits: Iterable[RemoteCommit]) -> None:
        held = tuple(commits)
        remotes = (replace(r, commits=held) if r.name == name else r for r in self.view.remotes)
        self.view = replace(self.view, remotes=tuple(remotes))

    def _describe(self, action: Describe) -> None:
        commits = self._remote(action.remote).commits
        known = [commit.generation for commit in commits if commit.tag == action.tag]
        order = self.saves[action.save_id].order
        same = [c.generation for c in commits if (c.tag, c.order) == (action.tag, order)]
        generation = (same or [max(known, default=0) + 1])[0]
        key = (action.save_id, action.remote, action.form)
        self.generations[key] = GenerationAnswer(generation=generation)

    def _upload(self, action: Upload) -> None:
        save, remote = self.saves[action.save_id], self._remote(action.remote)
        name = (save.save.tag, action.generation, action.form)
        known = [c for c in remote.commits if (c.tag, c.generation, c.form) == name]
        if not known and save.save.is_part and not self.view.is_spread:
            # no node is known that could hold the rest: what it uploads waits for that, and is no COMMIT
            waits = {"state": UploadState.WAITING, "retry_at_seconds": math.inf}
            record = save.upload(remote.name, action.form).model_copy(update=waits)
            self._change(save.id, uploads={**save.uploads, (remote.name, action.form): record})
            return
        commit = known[0] if known else self._commit(save, remote, action)
        record = UploadRecord(
            remote=remote.name,
            form=action.form,
            state=UploadState.COMMITTED,
            generation=action.generation,
            commit_key=commit.key,
            commit_sha256=commit.sha256,
        )
        self._change(save.id, uploads={**save.uploads, (remote.name, action.form): record})
        if not known:
            self._set_commits(remote.name, (*remote.commits, commit))

    def _commit(self, save: SaveView, remote: RemoteView, action: Upload) -> RemoteCommit:
        """Return the COMMIT of an upload: as large as the newest of its form there, which all nodes wrote."""
        like = max((c for c in remote.commits if c.form == action.form), key=lambda c: c.order, default=None)
        size = round(save.save.total_bytes * WEIGHTS_SHARE.get(action.form, 1.0))
        dates = [c.committed_at_seconds for r in self.view.remotes for c in r.commits]
        known = [at for at in dates if at is not None]
        self.at_seconds = max([*known, *([self.at_seconds] if self.at_seconds else [])], default=None)
        tag, generation = save.save.tag, action.generation
        return RemoteCommit(
            tag=tag,
            generation=generation,
            form=action.form,
            branch=save.order.branch,
            step=save.order.step,
            save_seq=save.order.save_seq,
            key=f"{OURS}/commits/{tag}~g{generation}~{action.form}.json",
            sha256=f"{remote.name} {save.id} {action.form}",
            bytes=like.bytes if like is not None else size,
            is_model_only=save.is_model_only,
            committed_at_seconds=self.at_seconds,
            best=save.save.best,
            best_tag=save.save.best_checkpoint,
            is_self_contained=action.form == ZERO or save.is_self_contained,
        )

    def _drop(self, action: DropDerived) -> None:
        save = self.saves[action.save_id]
        if not save.is_present:
            self._note_deletion(None, save.save.tag, 0, UNIVERSAL, save.universal.bytes, action.reason)
        self._change(save.id, universal=DerivedRecord())

    def _delete_local(self, action: DeleteLocal) -> None:
        save = self.saves[action.save_id]
        size, why = save.save.total_bytes, action.permit.reason
        self._note_deletion(None, save.save.tag, action.permit.generation, ZERO, size, why)
        self._change(save.id, is_present=False, is_intact=False, is_pruned=True)

    def _delete_remote(self, action: DeleteRemote, made: Plan) -> None:
        """Delete one COMMIT a turn, as the daemon does; of very many a tenth at once."""
        name = action.remote
        willing = commits_to_delete(self.view, self._remote(name), made.remote_verdicts)
        willing.sort(key=lambda c: (c.branch, c.step, c.save_seq, c.form == ZERO))
        gone = willing[: len(willing) // 10] or [action.commit]
        for commit in gone:
            why = made.remote_verdicts[name, commit.key].goes
            self._note_deletion(name, commit.tag, commit.generation, commit.form, commit.bytes, why)
        keys = {commit.key for commit in gone}
        self._set_commits(name, (c for c in self._remote(name).commits if c.key not in keys))
        for save in tuple(self.saves.values()):
            records = {
                place: record.model_copy(update={"state": UploadState.DELETED})
                for place, record in save.uploads.items()
                if place[0] == name and record.commit_key in keys
            }
            if records:
                self._change(save.id, uploads={**save.uploads, **records})

    def _note_deletion(
        self, place: str | None, tag: str, generation: int, form: str, size: int, why: str
    ) -> None:
        if tag.startswith("+"):
            return
        deletions = self.deletions[place]
        before = deletions.get((tag, generation))
        forms, bytes_before = (before.forms, before.bytes) if before is not None else ((), 0)
        deletions[tag, generation] = ForeseenDeletion(
            tag=tag,
            generation=generation,
            forms=(*forms, form),
            bytes=bytes_before + size,
            why=why,
            after_saves=before.after_saves if before is not None else self.after_saves,
        )
