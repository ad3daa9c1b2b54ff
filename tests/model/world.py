"""A small world around the planner: trainer, two remotes, a disk and a clock, as plain data.

It executes plans the way workers do, one action at a time, late or never, and remembers what happened so that
the promises can be judged from outside. Nothing here asks the planner what it thinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckptd.base.identity import FileIdentity
from ckptd.core.completeness.order import next_order
from ckptd.core.model.listing import ListedFile
from ckptd.core.model.records import UNIVERSAL, ZERO, DerivedRecord, DerivedState, UploadRecord, UploadState
from ckptd.core.model.save import Order, SealedSave
from ckptd.core.policy.actions import (
    Action,
    CancelUpload,
    ConfirmCommits,
    Convert,
    DeleteLocal,
    DeleteRemote,
    Describe,
    DropDerived,
    Hold,
    PointUniversal,
    ReleaseHold,
    StopConverting,
    Upload,
    UploadEarly,
    UploadLateFiles,
)
from ckptd.core.policy.planner import plan
from ckptd.core.policy.retention import RetentionPolicy, Unuploaded
from ckptd.core.policy.view import (
    CommitRef,
    Confirmation,
    Disk,
    GenerationAnswer,
    JobView,
    RemoteCommit,
    RemoteView,
    SaveView,
)
from tests.support.core_views import sealed

SAVE_BYTES = 100
SHARD = ListedFile(
    path="zero_pp_rank_0_mp_rank_00_optim_states.pt",
    identity=FileIdentity(dev=1, ino=1, size_bytes=1, mtime_ns=1, ctime_ns=1),
)
"""Of a save that is being written."""


@dataclass(slots=True)
class Remote:
    """What a remote truly holds, and what was last seen of it."""

    name: str
    is_required: bool
    policy: RetentionPolicy
    is_there: bool = True
    commits: dict[str, RemoteCommit] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    seen: tuple[RemoteCommit, ...] = ()
    known_tags: frozenset[str] = frozenset()
    shipping: int | None = None
    not_early: set[tuple[str, ListedFile]] = field(default_factory=set)
    emptied: list[tuple[str, int]] = field(default_factory=list)
    """(tag, generation) of which a removal took the last form."""
    stepped_down: int = 0
    """Saves that lost their ZeRO form and kept another."""

    def zero_orders(self) -> list[Order]:
        """Orders of the ZeRO forms it holds."""
        return [Order(c.branch, c.step, c.save_seq) for c in self.commits.values() if c.form == ZERO]

    def holds(self, save: SealedSave) -> bool:
        """The very bytes of that save are committed here."""
        return any(c.form == ZERO and order_of(c) == save.order for c in self.commits.values())

    def observe(self) -> None:
        """Look, when it answers."""
        if self.is_there:
            self.seen = tuple(self.commits.values())
            self.known_tags = frozenset(c.tag for c in self.seen) | self.tombstones


def order_of(commit: RemoteCommit) -> Order:
    """Order of a COMMIT."""
    return Order(commit.branch, commit.step, commit.save_seq)


@dataclass(slots=True)
class World:
    """One node, one job; `saves` is what the journal knows."""

    local: RetentionPolicy
    remotes: dict[str, Remote]
    can_clone: bool
    keeps_universal: bool = True
    """False: universal forms are made while they are sent, and lie nowhere here."""
    saves: dict[int, SaveView] = field(default_factory=dict)
    generations: dict[tuple[int, str, str], GenerationAnswer] = field(default_factory=dict)
    confirmations: dict[int, Confirmation] = field(default_factory=dict)
    free_bytes: int = 10_000
    now_seconds: float = 1000.0
    in_flight: bool = False
    first_scan: bool = True
    unuploaded: Unuploaded = "keep"
    latest: str | None = None
    latest_universal: str | None = None
    converting: int | None = None
    pruned: list[tuple[int, bool]] = field(default_factory=list)
    """(save id, all required remotes truly held it when it went, or what the job file asks for instead)."""
    best_ever: dict[str, Order] = field(default_factory=dict)
    """Highest ZeRO order ever committed, per remote."""

    # --- the trainer -----------------------------------------------------------------------------------

    def train(self, step: int, tag: str) -> None:
        """A complete save appears under a tag, over whatever lay there."""
        for other in self.saves.values():
            if other.save.tag == tag and other.is_present:
                self._change(other, is_present=False, is_intact=False)
        highest = max((s.save.order for s in self.saves.values()), default=None)
        order = next_order(step, highest)
        save_id = len(self.saves) + 1
        made = sealed(order.step, order.branch, save_id, tag=tag)
        made = made.model_copy(update={"save_seq": order.save_seq})
        self.saves[save_id] = SaveView(
            id=save_id, save=made, is_adopted=True, was_found_first=False, is_intact=True, is_present=True
        )
        self.latest = tag

    def comes_late(self, save_id: int) -> None:
        """A file appears in a folder that every required remote holds committed."""
        save = self.saves[save_id]
        held = [
            name for name in self.remotes if self._record(save_id, name, ZERO).state is UploadState.COMMITTED
        ]
        if save.is_intact and all(r.name in held for r in self.remotes.values() if r.is_required):
            late = (save.save.files[0].model_copy(update={"path": "notes.txt"}),)
            self._change(save, late=late, has_unlisted=("notes.txt",), lacking=dict.fromkeys(held, late))

    def _supplement(self, save_id: int, name: str) -> None:
        save = self.saves[save_id]
        lacking = {other: files for other, files in save.lacking.items() if other != name}
        needed = any(remote.is_required and remote.name in lacking for remote in self.remotes.values())
        self._change(save, lacking=lacking, has_unlisted=("notes.txt",) if needed else ())

    def trainer_deletes(self, save_id: int) -> None:
        """The trainer's own rotation."""
        self._change(self.saves[save_id], is_present=False, is_intact=False)

    # --- the daemon ------------------------------------------------------------------------------------

    def view(self) -> JobView:
        """As the daemon would gather it."""
        return JobView(
            saves=tuple(self.saves.values()),
            remotes=tuple(self._remote_view(r) for r in self.remotes.values()),
            local_forms=(UNIVERSAL,) if self.keeps_universal else (),
            local_retention=self.local,
            existing="newest",
            latest=self.latest,
            latest_universal=self.latest_universal,
            is_save_in_flight=self.in_flight,
            at_rest={f"written-{len(self.saves)}": (SHARD,)} if self.in_flight else {},
            is_first_scan=self.first_scan,
            is_paused=False,
            unuploaded=self.unuploaded,
            may_delete=True,
            deletions_left=5,
            disk=Disk(
                free_bytes=self.free_bytes, reserve_bytes=200, min_free_bytes=60, can_clone=self.can_clone
            ),
            generations=self.generations,
            confirmations=self.confirmations,
            is_converting=self.converting is not None,
            now_seconds=self.now_seconds,
        )

    def _remote_view(self, remote: Remote) -> RemoteView:
        return RemoteView(
            name=remote.name,
            is_required=remote.is_required,
            forms=(ZERO, UNIVERSAL),
            is_attached=remote.is_there,
            is_busy=remote.shipping is not None,
            uploading=self.form_on_its_way(remote),
            not_early=frozenset(remote.not_early),
            commits=remote.seen,
            known_tags=remote.known_tags,
            retention=remote.policy,
        )

    def form_on_its_way(self, remote: Remote) -> str | None:
        """What is being sent there."""
        save_id = remote.shipping
        if save_id is None:
            return None
        return next(
            f
            for f in (ZERO, UNIVERSAL)
            if self._record(save_id, remote.name, f).state is UploadState.UPLOADING
        )

    def actions(self) -> tuple[Action, ...]:
        """One turn's plan."""
        return plan(self.view()).actions

    def execute(self, action: Action) -> None:  # noqa: C901 - one case a kind
        """Do what a worker does; uploads and conversions take until `finish_*`."""
        match action:
            case Upload(save_id=save_id, remote=name, form=form, generation=g):
                self.remotes[name].shipping = save_id
                record = self._record(save_id, name, form)
                self._put(
                    save_id, record.model_copy(update={"generation": g, "state": UploadState.UPLOADING})
                )
            case UploadLateFiles(save_id=save_id, remote=name):
                self._supplement(save_id, name)
            case UploadEarly(remote=name, tag=tag, file=file):
                self.remotes[name].not_early.add((tag, file))
            case CancelUpload(remote=name):
                self._cancel(self.remotes[name])
            case Describe(remote=name, tag=tag, save_id=save_id):
                self._describe(self.remotes[name], tag, save_id)
            case Hold(save_id=save_id) | ReleaseHold(save_id=save_id):
                self._change(self.saves[save_id], is_held=isinstance(action, Hold))
            case Convert(save_id=save_id):
                self.converting = save_id
                self._derive(save_id, DerivedState.CONVERTING)
                if not self.can_clone:
                    self.free_bytes -= SAVE_BYTES
            case StopConverting():
                self.finish_conversion_as_killed()
            case DropDerived(save_id=save_id):
                self._derive(save_id, DerivedState.NONE)
                if not self.can_clone:
                    self.free_bytes += SAVE_BYTES
            case PointUniversal(tag=tag):
                self.latest_universal = f"_ckptd/derived/universal/{tag}" if tag else None
            case ConfirmCommits(save_id=save_id, commits=refs):
                self._confirm(save_id, refs)
            case DeleteLocal() | DeleteRemote():
                self._remove(action)

    def _remove(self, action: DeleteLocal | DeleteRemote) -> None:
        if isinstance(action, DeleteLocal):
            self._prune(action.save_id)
        else:
            self._retire(self.remotes[action.remote], action.commit, action.instead)

    def _describe(self, remote: Remote, tag: str, save_id: int) -> None:
        if not remote.is_there:
            return
        save = self.saves[save_id].save
        mine = [c for c in remote.commits.values() if c.tag == tag and c.form == ZERO]
        same = next((c for c in mine if order_of(c) == save.order), None)
        if same is not None:
            self._committed(save_id, remote.name, same)
            return
        taken = [c.generation for c in mine] + [1 for t in remote.tombstones if t == tag]
        self.generations[save_id, remote.name, ZERO] = GenerationAnswer(generation=max(taken, default=0) + 1)

    def _cancel(self, remote: Remote) -> None:
        """The derived form that is on its way; it is begun, and goes on later."""
        save_id, form = remote.shipping, self.form_on_its_way(remote)
        assert save_id is not None
        assert form == UNIVERSAL, "a ZeRO form makes way for nothing"
        record = self._record(save_id, remote.name, form)
        self._put(save_id, record.model_copy(update={"state": UploadState.NEW}))
        remote.shipping = None

    def finish_upload(self, remote: Remote) -> None:
        """The upload ends: committed if the source held still (or a hold did), else given up."""
        form = self.form_on_its_way(remote)
        save_id, remote.shipping = remote.shipping, None
        if save_id is None or form is None:
            return
        view = self.saves[save_id]
        record = self._record(save_id, remote.name, form)
        is_here = view.universal.state == "ready" or (not self.keeps_universal and view.is_intact)
        has_source = view.is_intact or view.is_held if form == ZERO else is_here
        key = f"_ckptd/commits/{view.save.tag}~g{record.generation}~{form}.json"
        if not (remote.is_there and has_source) or key in remote.commits:
            failed = {"state": UploadState.FAILED, "retry_at_seconds": self.now_seconds + 5}
            self._put(save_id, record.model_copy(update=failed))
            self.generations.pop((save_id, remote.name, form), None)
            return
        commit = RemoteCommit(
            tag=view.save.tag,
            generation=record.generation or 1,
            form=form,
            branch=view.save.branch,
            step=view.save.step,
            save_seq=view.save.save_seq,
            key=key,
            sha256=f"sha-{key}-{save_id}",
            committed_at_seconds=self.now_seconds,
        )
        remote.commits[key] = commit
        if form == ZERO:
            known = self.best_ever.get(remote.name)
            self.best_ever[remote.name] = max(known, view.save.order) if known else view.save.order
        self._committed(save_id, remote.name, commit)

    def _committed(self, save_id: int, name: str, commit: RemoteCommit) -> None:
        record = self._record(save_id, name, commit.form)
        done = {
            "state": UploadState.COMMITTED,
            "generation": commit.generation,
            "commit_key": commit.key,
            "commit_sha256": commit.sha256,
        }
        self._put(save_id, record.model_copy(update=done))

    def finish_conversion(self) -> None:
        """The running conversion ends."""
        save_id, self.converting = self.converting, None
        if save_id is not None:
            is_good = self.saves[save_id].is_intact
            self._derive(save_id, DerivedState.READY if is_good else DerivedState.NONE)
            if not is_good and not self.can_clone:
                self.free_bytes += SAVE_BYTES

    def _confirm(self, save_id: int, refs: tuple[CommitRef, ...]) -> None:
        """Every required remote is read afresh; a COMMIT that is gone sends the save back to NEW."""
        asked = [self.remotes[ref.remote] for ref in refs]
        if not all(remote.is_there for remote in asked):
            return
        for ref, remote in zip(refs, asked, strict=True):
            held = remote.commits.get(ref.key)
            if held is None or held.sha256 != ref.sha256:
                record = self._record(save_id, remote.name, ZERO)
                lost = {"state": UploadState.NEW, "commit_key": None, "commit_sha256": None}
                self._put(save_id, record.model_copy(update=lost))
                self.generations.pop((save_id, remote.name, ZERO), None)
                remote.observe()
                return
        self.confirmations[save_id] = Confirmation(commits=refs, at_seconds=self.now_seconds)

    def _prune(self, save_id: int) -> None:
        save = self.saves[save_id].save
        required = [r for r in self.remotes.values() if r.is_required]
        safe = all(r.holds(save) for r in required)
        if not safe and self.unuploaded == "thin":
            safe = all(
                any(o.branch == save.branch and o > save.order for o in r.zero_orders()) for r in required
            )
        safe = safe or self.unuploaded == "delete"
        self.pruned.append((save_id, safe))
        self._change(self.saves[save_id], is_present=False, is_intact=False, is_pruned=True)

    def _retire(self, remote: Remote, commit: RemoteCommit, instead: RemoteCommit | None) -> None:
        """As the store does it: what is to stay instead is looked at afresh."""
        if not remote.is_there or commit.key not in remote.commits:
            return
        if instead is not None and instead.key not in remote.commits:
            remote.observe()
            return
        del remote.commits[commit.key]
        remote.tombstones.add(commit.tag)
        where = (commit.tag, commit.generation)
        if not any((c.tag, c.generation) == where for c in remote.commits.values()):
            remote.emptied.append(where)
        elif commit.form == ZERO:
            remote.stepped_down += 1
        for save_id in self.saves:
            record = self._record(save_id, remote.name, commit.form)
            if record.commit_sha256 == commit.sha256:
                self._put(save_id, record.model_copy(update={"state": UploadState.DELETED}))
        remote.observe()

    def restart(self) -> None:
        """kill -9 and start: what was under way is forgotten, the journal is not."""
        self.first_scan = True
        self.confirmations.clear()
        self.generations.clear()
        self.finish_conversion_as_killed()
        for remote in self.remotes.values():
            save_id, remote.shipping = remote.shipping, None
            if save_id is not None:
                for form in (ZERO, UNIVERSAL):
                    record = self._record(save_id, remote.name, form)
                    if record.state is UploadState.UPLOADING:
                        self._put(save_id, record.model_copy(update={"state": UploadState.NEW}))
            remote.observe()

    def finish_conversion_as_killed(self) -> None:
        """A conversion that was killed leaves nothing."""
        save_id, self.converting = self.converting, None
        if save_id is not None:
            self._derive(save_id, DerivedState.NONE)
            if not self.can_clone:
                self.free_bytes += SAVE_BYTES

    # --- bookkeeping -----------------------------------------------------------------------------------

    def _record(self, save_id: int, remote: str, form: str) -> UploadRecord:
        return self.saves[save_id].upload(remote, form)

    def _put(self, save_id: int, record: UploadRecord) -> None:
        view = self.saves[save_id]
        uploads = {**view.uploads, (record.remote, record.form): record}
        self._change(view, uploads=uploads)

    def _derive(self, save_id: int, state: DerivedState) -> None:
        made = DerivedRecord(state=state, is_source_verified=state is DerivedState.READY)
        self._change(self.saves[save_id], universal=made)

    def _change(self, view: SaveView, **changes: object) -> None:
        self.saves[view.id] = replace(view, **changes)  # type: ignore[arg-type]
