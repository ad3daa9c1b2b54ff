"""Pin one save for several nodes that resume together, each by itself, and for `resume --tag`.

Which save it is follows from the COMMITs as this node first sees them. What it cannot read of that save it
takes from another remote that holds it; where none does it ends with an error: an older save would be another
one than the other nodes take (docs/adr/0148).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.config.commands import command_for
from ckptd.config.quantities import shown_remote
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NotPermitted,
    RefusedError,
    RemoteError,
    RemoteUnreachable,
)
from ckptd.recover.plan import needs_universal
from ckptd.recover.select.choose import Choice, readable_copies, views_by_save
from ckptd.recover.select.copies import UNIVERSAL, ZERO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.config.schema import JobConfig
    from ckptd.core.model.save import Order
    from ckptd.recover.select.choose import Candidate
    from ckptd.recover.select.copies import Nodes
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.sources import Sources
    from ckptd.storage.remote.messages import CommitView

FORMS = (ZERO, UNIVERSAL)
_NEAREST = 3


@dataclass(slots=True, kw_only=True)
class PinnedSelection:
    """Which save may be taken; of one node that names none: any."""

    job: JobConfig
    nodes: Nodes
    world_size: int | None = None
    tag: str | None = None
    remote: str | None = None
    """The one remote of the job that is asked."""
    why: CkptdError | None = None
    """What was wrong with the copy that was given up last."""
    _key: tuple[Order, str] | None = None
    _views: list[tuple[RemoteInventory, CommitView]] = field(default_factory=list)
    """Its COMMITs, as they were seen first."""

    @property
    def is_bound(self) -> bool:
        """Whether no other save will do."""
        return self.nodes.count > 1 or self.tag is not None

    def check_remotes(self, sources: Sources) -> None:
        """Check that each of several nodes sees every remote of the job: the newest save may lie in one
        alone.

        Raises:
            RemoteError, NotPermitted: one is not there (69, 77).
        """
        if self.nodes.count == 1 or self.remote is not None or not sources.remotes:
            return
        there = [sight.name for sight in sources.remotes]
        away = [remote for remote in self.job.remotes if remote.name not in there]
        for remote, error in zip(away, sources.absent, strict=True):
            if set(FORMS) & set(remote.forms):
                shown = shown_remote(remote.name, remote.url)
                msg = (
                    f"{shown}: {error.message}; another of the {self.nodes.count} nodes may resume from there"
                )
                mend = error.hint or "mend that"
                hint = f"{mend}; or add `--remote {there[0]}` to `ckptd resume` on every node"
                raise _of_its_kind(error, msg, hint)

    def settle(self, choice: Choice, sources: Sources) -> None:
        """Pin the save, before a remote that failed meanwhile is left out."""
        if not self.is_bound or self._key is not None:
            return
        saves = views_by_save(sources.remotes, FORMS)
        read = {(one.order, one.tag) for one in choice.candidates}
        for key in sorted({*saves, *read}, reverse=True):
            views = saves.get(key, [])
            if self.tag in (None, key[1]) and (key in read or _counts(views, self.nodes)):
                self._key, self._views = key, views
                return

    def candidate(self, choice: Choice, sources: Sources) -> Candidate | None:
        """Return the one to take; None: nothing is there at all.

        Raises:
            NotFoundError: no save has the tag (66). DamagedError: no intact copy of it is left (65).
            RefusedError: it was retired meanwhile (65). RemoteError, NotPermitted: what holds it failed.
        """
        if not self.is_bound:
            return next(iter(choice.candidates), None)
        if self._key is None:
            if self.tag is not None:
                raise self._unknown(self.tag, sources)
            return None
        for one in choice.candidates:
            if (one.order, one.tag) == self._key and self._is_alike(one):
                return one
        raise self._lost(self._key, choice, sources)

    def _is_alike(self, one: Candidate) -> bool:
        """Not the universal form alone where the other nodes take shards."""
        if self.nodes.count == 1 or not one.is_universal_alone or needs_universal(one, self.world_size):
            return True
        return not any(view.commit.form == ZERO for _, view in self._views)

    def _unknown(self, tag: str, sources: Sources) -> CkptdError:
        if sources.absent:
            return sources.absent[0]
        known = {v.commit.tag for r in sources.remotes for v in r.commits if v.commit.form in FORMS}
        near = ", ".join(difflib.get_close_matches(tag, sorted(known), n=_NEAREST, cutoff=0.0))
        where = ", ".join(remote.url for remote in sources.remotes) or str(self.job.save_dir)
        msg = f"there is no checkpoint {tag!r} to resume from in {where}"
        return NotFoundError(msg, hint=f"nearest: {near}; `ckptd list` shows all" if near else "")

    def _lost(self, key: tuple[Order, str], choice: Choice, sources: Sources) -> CkptdError:
        """Return why it cannot be taken, and what to do."""
        order, tag = key
        several = self.nodes.count > 1
        names = {remote.name for remote in sources.remotes}
        if any(remote.name not in names for remote, _ in self._views):
            error = sources.absent[-1]
            others = "; every node takes it or none" if several else ""
            msg = f"{tag} cannot be fetched: {error.message}{others}"
            return _of_its_kind(error, msg, "call it again, on every node, once the remote answers")
        if self._views and key not in views_by_save(sources.remotes, FORMS):
            msg = f"{tag} was retired while it was fetched"
            return RefusedError(msg, hint="does a daemon run? stop it, and call resume again on every node")
        noted = (note for note in choice.notes if note.startswith(f"{tag} ("))
        why = self.why.message if self.why is not None else next(noted, "damaged")
        older = next((c.tag for c in choice.candidates if c.order < order and c.tag != tag), "TAG")
        mend = command_for(self.job, "verify", tag, "--repair", "--read-data")
        back = f"`--tag {older}` on every node" if several else f"`--tag {older}`"
        msg = f"{tag}: {why}; no other copy of it is left" + ("; every node takes it or none" * several)
        return DamagedError(msg, hint=f"mend it (`{mend}`), or go back: `ckptd resume` with {back}")


def _counts(views: Sequence[tuple[RemoteInventory, CommitView]], nodes: Nodes) -> bool:
    """A save that cannot be read here is one to resume from, as far as anybody can tell."""
    if any(view.commit.form == ZERO and not view.commit.grid.is_model_only for _, view in views):
        return True
    alone = [(remote, view) for remote, view in views if view.commit.form == UNIVERSAL]
    return len(readable_copies(alone, nodes, frozenset(), Choice())) < len(alone)


def _of_its_kind(error: CkptdError, message: str, hint: str) -> CkptdError:
    """Make an error of the kind that is wrong with a remote: not there (69), or no rights (77)."""
    kind = type(error) if isinstance(error, RemoteError | NotPermitted) else RemoteUnreachable
    return kind(message, hint=hint)
