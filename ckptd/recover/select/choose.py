"""Choose the checkpoint to resume from: the newest in (branch, step) that is complete here or committed.

Pure. A local folder that is the very save of a COMMIT has that COMMIT's order; `local_order_of` places the
others. Clocks are never asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckptd.core.completeness.order import next_order, rebuilt_order
from ckptd.core.model.generation import order_of
from ckptd.core.model.layouts import Trainer
from ckptd.core.model.other_layouts import layout_of, other_layout
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.core.model.save import Order
from ckptd.errors import CkptdError, DamagedError, NotPermitted, RemoteError, StorageError
from ckptd.recover.select.copies import Copy, Nodes, files_for_node, is_held, is_made_from, is_self_contained
from ckptd.recover.select.inventory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ckptd.core.model.layouts import Grid
    from ckptd.recover.select.inventory import LocalCheckpoint, RemoteInventory
    from ckptd.storage.remote.messages import CommitView


NEWEST_READ = 5
"""Committed saves that are read: one to take, the others for the room that the next save needs (P13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One save that may be resumed from."""

    tag: str
    order: Order
    grid: Grid
    local: LocalCheckpoint | None = None
    """The folder in save_dir, when it is whole and this very save."""
    copies: tuple[Copy, ...] = ()
    universals: tuple[Copy, ...] = ()

    @property
    def layout(self) -> tuple[Trainer, tuple[str, ...]]:
        """Return which trainer wrote the folder, and where in it the shards lie."""
        if self.local is not None:
            return self.local.listing.trainer, self.local.listing.roots
        if (other := other_layout(self.grid.layout)) is not None:
            return other.trainer, ()
        whole = self.copies or self.universals
        return layout_of(self.tag, (file.path for file in whole[0].files))

    @property
    def is_committed(self) -> bool:
        """Whether it is committed on at least one remote."""
        return bool(self.copies or self.universals)

    @property
    def is_universal_alone(self) -> bool:
        """Whether its ZeRO form is nowhere any more."""
        return self.local is None and not self.copies

    @property
    def saved_world_size(self) -> int:
        """Return the number of ranks that wrote it."""
        return self.grid.dp * self.grid.mm_count

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint by path of the ZeRO form."""
        if self.copies:
            return self.copies[0].fingerprints
        if self.local is not None:
            return self.local.fingerprints
        sources = [m.source for copy in self.universals[:1] for m in copy.manifests if m.source is not None]
        return dict(sources[0].fingerprints) if sources else {}


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Candidates, newest first, and what was noticed on the way."""

    candidates: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: dict[str, CkptdError] = field(default_factory=dict)
    """Remotes that stopped answering, or refused, while their manifests were read."""


def choose(
    local: Sequence[LocalCheckpoint],
    remotes: Sequence[RemoteInventory],
    memory: NodeMemory,
    nodes: Nodes,
    *,
    damaged: frozenset[tuple[str, str]] = frozenset(),
    tag: str | None = None,
) -> Candidates:
    """Return the candidates, newest first: of what is committed the newest, those of `tag`, and all that lies
    here.

    `damaged`: (remote, digest of a COMMIT) whose bytes are bad.
    """
    choice = Candidates()
    wanted = SavesWanted(tags=frozenset({tag or "", *(checkpoint.tag for checkpoint in local)}))
    committed = committed_saves(remotes, nodes, damaged, choice, wanted)
    matched: set[str] = set()
    for index, candidate in enumerate(committed):
        here = next((checkpoint for checkpoint in local if checkpoint.tag == candidate.tag), None)
        if here is not None and here.tag not in matched and _is_here(here, candidate):
            committed[index] = replace(candidate, local=here)
            matched.add(here.tag)
    known = [order_of(view.commit) for remote in remotes for view in remote.commits]
    if nodes.count == 1:
        rest = [s for s in local if s.is_complete and not s.listing.is_model_only and s.tag not in matched]
        for checkpoint in sorted(rest, key=lambda checkpoint: checkpoint.verdict.step or 0):
            own = partial(_is_own, memory, choice)
            order, doubt = local_order_of(
                checkpoint.tag, checkpoint.verdict.step or 0, known, remotes, memory, own
            )
            known.append(order)
            if doubt is not None and checkpoint.tag != tag:
                choice.notes.append(doubt)
            grid = checkpoint.verdict.grid
            assert grid is not None
            committed.append(Candidate(tag=checkpoint.tag, order=order, grid=grid, local=checkpoint))
    choice.candidates = sorted(committed, key=lambda c: (c.order, c.is_committed), reverse=True)
    return choice


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesWanted:
    """Select the saves to read from a remote that may hold thousands: the newest, and those of some tags."""

    most: int = NEWEST_READ
    """Number of the newest usable saves to read."""
    tags: frozenset[str] = frozenset()
    """All saves of these."""
    is_usable: Callable[[Candidate], bool] = lambda _: True


def committed_saves(
    remotes: Sequence[RemoteInventory],
    nodes: Nodes,
    damaged: frozenset[tuple[str, str]],
    choice: Candidates,
    wanted: SavesWanted,
    *,
    model: str | None = None,
) -> list[Candidate]:
    """Return one candidate per (tag, order) wanted, newest first, with every remote that holds its ZeRO form.

    Where a ladder left the universal form alone, that is enough (adr/0094). A model alone is none, but for
    the one asked for by its tag (`model`).
    """
    saves = views_by_save(remotes, (ZERO, UNIVERSAL))
    found: list[Candidate] = []
    left = wanted.most
    for order, tag in sorted(saves, reverse=True):
        if left <= 0 and tag not in wanted.tags:
            continue
        copies = readable_copies(saves[order, tag], nodes, damaged, choice)
        candidate = _candidate(order, tag, copies, may_be_model=tag == model)
        if candidate is not None:
            found.append(candidate)
            left -= wanted.is_usable(candidate)
    return found


def _candidate(order: Order, tag: str, copies: Sequence[Copy], *, may_be_model: bool) -> Candidate | None:
    found: Candidate | None = None
    for copy in copies:
        commit = copy.view.commit
        if commit.form == ZERO and (may_be_model or not commit.grid.is_model_only):
            found = found or Candidate(tag=tag, order=order, grid=commit.grid)
            found = replace(found, copies=(*found.copies, copy))
    for copy in copies:
        if copy.view.commit.form != UNIVERSAL:
            continue
        if found is None:
            if is_self_contained(copy):
                found = Candidate(tag=tag, order=order, grid=copy.view.commit.grid, universals=(copy,))
        elif is_made_from(copy, found.fingerprints):
            found = replace(found, universals=(*found.universals, copy))
    return found


def committed_weights(
    remotes: Sequence[RemoteInventory],
    form: str,
    tag: str | None,
    damaged: frozenset[tuple[str, str]],
    lost: dict[str, CkptdError],
) -> list[Candidate]:
    """Return the newest weights (of a tag): from copies of that form alone, whatever else is left of their
    save.
    """
    saves = views_by_save(remotes, (form,))
    for order, one in sorted(saves, reverse=True):
        if tag not in (None, one):
            continue
        copies = readable_copies(saves[order, one], Nodes(), damaged, Candidates(lost=lost))
        found = [
            Candidate(tag=one, order=order, grid=copy.view.commit.grid, universals=(copy,))
            for copy in copies
            if is_self_contained(copy)
        ]
        if found:
            return found
    return []


def views_by_save(
    remotes: Sequence[RemoteInventory], forms: Collection[str]
) -> dict[tuple[Order, str], list[tuple[RemoteInventory, CommitView]]]:
    """Return the COMMITs of some forms by (order, tag), in the remotes' order.

    Of several generations of one save only the newest counts: an older one is being superseded.
    """
    found: dict[tuple[Order, str], list[tuple[RemoteInventory, CommitView]]] = {}
    for remote in remotes:
        newest: dict[tuple[str, str, Order], CommitView] = {}
        for view in remote.commits:
            if view.commit.form in forms:
                newest[view.commit.tag, view.commit.form, order_of(view.commit)] = view
        for (tag, _, order), view in newest.items():
            found.setdefault((order, tag), []).append((remote, view))
    return found


def readable_copies(
    views: Iterable[tuple[RemoteInventory, CommitView]],
    nodes: Nodes,
    damaged: frozenset[tuple[str, str]],
    choice: Candidates,
) -> list[Copy]:
    """Return every copy whose documents are as they should be, what a daemon found damaged last; `choice`
    hears of the others.
    """
    copies: list[Copy] = []
    for remote, view in views:
        if (remote.name, view.sha256) in damaged or remote.name in choice.lost:
            continue
        try:
            copies.append(_copy(remote, view, nodes, choice.notes))
        except DamagedError as error:
            choice.notes.append(
                f"{view.commit.tag} ({view.commit.form}) on {remote.name} is damaged: {error.message}"
            )
        except (RemoteError, NotPermitted, StorageError) as error:
            choice.lost[remote.name] = error
    return sorted(copies, key=lambda copy: copy.view.sha256 in copy.remote.suspects)


def _copy(remote: RemoteInventory, view: CommitView, nodes: Nodes, notes: list[str]) -> Copy:
    manifests = remote.manifests(view.commit)
    late, note = remote.late(view.commit, manifests)
    notes += [note] if note else []
    return files_for_node(Copy(remote=remote, view=view, manifests=manifests, files=(), late=late), nodes)


def _is_here(here: LocalCheckpoint, candidate: Candidate) -> bool:
    """The folder is the whole save of a candidate; of a universal form alone: what that was made from."""
    if candidate.copies:
        return is_held(here, candidate.copies[0])
    ours, marks = here.fingerprints, candidate.fingerprints
    return here.is_complete and bool(marks) and all(ours.get(path) == mark for path, mark in marks.items())


def _is_own(memory: NodeMemory, choice: Candidates, remote: RemoteInventory, view: CommitView) -> bool:
    try:
        return memory.is_own(view, lambda: remote.manifests(view.commit))
    except DamagedError:
        return False
    except (RemoteError, NotPermitted, StorageError) as error:
        choice.lost[remote.name] = error
        return False


# --- the order of a folder that no COMMIT holds ----------------------------------------------------------
# A rewind is never guessed. A tag whose COMMIT has other content was saved again here, later, only if that
# COMMIT and all above it are this node's own: the job may have gone on elsewhere under the same names.


def local_order_of(
    tag: str,
    step: int,
    known: Sequence[Order],
    remotes: Sequence[RemoteInventory],
    memory: NodeMemory,
    is_own: Callable[[RemoteInventory, CommitView], bool],
) -> tuple[Order, str | None]:
    """Return the place of a complete folder here at `step` in the order of all saves, and why one that may be
    the newest does not count as it.

    Use the order in the daemon's status if it is for this content. Otherwise place the save after every known
    save if the tag was saved again here or no rewind is possible, else before anything committed later.

    `known`: every order known by now; `is_own`: whether a COMMIT is of a save from here.
    """
    highest = max(known, default=None)
    views = [view for remote in remotes for view in remote.commits]
    same_tag = [view for view in views if view.commit.tag == tag]
    newest = max((order_of(view.commit) for view in same_tag), default=Order(0, 0, 0))
    hint = memory.orders.get(tag)
    if hint is not None and hint.step == step and hint > newest:
        return hint, None
    if not same_tag or highest is None:
        return Order(highest.branch if highest else 1, step, 0), None
    later = [(remote, v) for remote in remotes for v in remote.commits if order_of(v.commit) >= newest]
    if step >= highest.step or all(is_own(remote, view) for remote, view in later):
        return next_order(step, highest), None
    return _doubtful(tag, step, highest, [view for _, view in later])


def _doubtful(tag: str, step: int, highest: Order, later: Sequence[CommitView]) -> tuple[Order, str]:
    """`later`: the newest COMMIT of the tag, and all above it."""
    top = max(later, key=lambda view: order_of(view.commit)).commit
    said = f"nothing proves that {tag} here is newer than {top.tag} (step {top.step}) of {top.committed_by}"
    same = [order_of(v.commit) for v in later if v.commit.tag == tag and v.commit.step == step]
    if not same:
        return rebuilt_order(step, highest), f"{said}: that one comes first"
    # before its own COMMIT, so that whoever asks for the tag gets what lies here
    order = Order(max(same).branch, step, max(same).save_seq + 1)
    return order, f"{said}: that one comes first (`--tag {tag}` takes what is here)"
