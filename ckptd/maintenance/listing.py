"""List what a remote holds, one row a COMMIT, in (branch, step) order: the data of `ckptd list`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.core.model.records import WEIGHTS
from ckptd.core.model.runs import run_of
from ckptd.recover.select.runs import runs_in
from ckptd.storage.remote.documents import stem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.decision import Decision
    from ckptd.core.model.layouts import Grid
    from ckptd.core.model.manifest import Commit
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.runs import RunView
    from ckptd.storage.remote.documents import Stem


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedForm:
    """One committed form; `committed_at` RFC 3339 UTC, `age_seconds` by this machine's clock."""

    form: str
    folder: str
    bytes: int
    files: int
    committed_at: str
    age_seconds: float | None
    commit_sha256: str
    pointers: tuple[str, ...]
    """Which pointer files name it: latest, latest_universal."""
    late_files: int = 0
    """Files that were committed beside it later (SUPPLEMENTs), beyond `files`; a file written again counts
    again."""
    late_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One generation of one tag with its committed forms."""

    tag: str
    generation: int
    branch: int
    step: int
    save_seq: int
    zero_stage: int
    saved_by_ranks: int
    pinned: bool
    run_id: str
    forms: tuple[ListedForm, ...]
    kind: str = "resumable"
    """Or "model-only" (saved as weights alone) or "weights-only" (nothing else is left of it): nothing to
    resume from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListing:
    """One remote; oldest checkpoint first."""

    name: str
    url: str
    job: str
    latest: str | None
    latest_universal: str | None
    checkpoints: tuple[ListedCheckpoint, ...]
    runs: tuple[RunView, ...] = ()
    problems: tuple[str, ...] = ()


def pinned_tags(decisions: Sequence[Decision]) -> set[str]:
    """Return the tags whose newest pin or unpin is a pin (P8)."""
    newest: dict[str, Decision] = {}
    for decision in decisions:
        if decision.kind in ("pin", "unpin"):
            held = newest.get(decision.tag)
            if held is None or decision.serial >= held.serial:
                newest[decision.tag] = decision
    return {tag for tag, decision in newest.items() if decision.kind == "pin"}


def list_remote(remote: RemoteInventory, now: datetime) -> RemoteListing:
    """Return the rows of one remote."""
    seen = remote.observation
    pinned = pinned_tags(seen.decisions)
    grouped: dict[tuple[int, int, int, str, int], list[ListedForm]] = {}
    grids: dict[tuple[int, int, int, str, int], Grid] = {}
    runs: dict[tuple[int, int, int, str, int], str] = {}
    late: dict[Stem, list[Commit]] = {}
    for view in seen.supplements:
        late.setdefault(stem_of(view.commit), []).append(view.commit)
    for view in remote.commits:
        commit = view.commit
        key = (commit.branch, commit.step, commit.save_seq, commit.tag, commit.generation)
        beside = late.get(stem_of(commit), [])
        pointers = (("latest", seen.latest), ("latest_universal", seen.latest_universal))
        grouped.setdefault(key, []).append(
            ListedForm(
                form=commit.form,
                folder=commit.folder,
                bytes=commit.bytes,
                files=commit.files,
                committed_at=commit.committed_at,
                age_seconds=_age_seconds(commit.committed_at, now),
                commit_sha256=view.sha256,
                pointers=tuple(name for name, value in pointers if value == commit.folder),
                late_files=sum(one.files for one in beside),
                late_bytes=sum(one.bytes for one in beside),
            )
        )
        grids[key] = commit.grid
        runs[key] = run_of(commit, commit.job_id)
    rows = tuple(
        ListedCheckpoint(
            tag=key[3],
            generation=key[4],
            branch=key[0],
            step=key[1],
            save_seq=key[2],
            zero_stage=grids[key].zero_stage,
            saved_by_ranks=grids[key].dp * grids[key].mm_count,
            pinned=key[3] in pinned,
            run_id=runs[key],
            kind=_kind(grids[key], {form.form for form in forms}),
            forms=tuple(sorted(forms, key=lambda f: (f.form != "zero", f.form))),
        )
        for key, forms in sorted(grouped.items())
    )
    disputed = tuple(f"{v.key} is disputed: it does not count" for v in seen.commits if v.disputed)
    return RemoteListing(
        name=remote.name,
        url=remote.url,
        job=seen.identity.job,
        latest=seen.latest,
        latest_universal=seen.latest_universal,
        checkpoints=rows,
        runs=runs_in(remote),
        problems=seen.damaged + disputed,
    )


def _kind(grid: Grid, forms: set[str]) -> str:
    if grid.is_model_only:
        return "model-only"
    return "weights-only" if forms <= set(WEIGHTS) else "resumable"


def _age_seconds(committed_at: str, now: datetime) -> float | None:
    try:
        at = datetime.fromisoformat(committed_at)
    except ValueError:
        return None
    return (now - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds()
