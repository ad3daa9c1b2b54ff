"""List what a remote holds, one row a COMMIT, in (branch, step) order: the data of `ckptd list`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.base.humanize import ago, in_columns, printable, size_of
from ckptd.core.model.decision import pinned_tags
from ckptd.core.model.records import WEIGHTS
from ckptd.core.model.runs import run_of
from ckptd.recover.select.runs import runs_in
from ckptd.storage.remote.documents import stem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptd.core.model.layouts import Grid
    from ckptd.core.model.manifest import Commit
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.runs import RunView
    from ckptd.storage.remote.documents import Stem
    from ckptd.storage.remote.messages import CommitView, Observation


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
    """Pointer files that name it: latest, latest_universal."""
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        """Show the checkpoints as lines."""
        rows = [("tag", "step", "forms", "size", "committed", "")]
        for one in self.checkpoints:
            ages = [form.age_seconds for form in one.forms if form.age_seconds is not None]
            since = f"{ago(min(ages))} ago" if ages else "?"
            marks = [f"← {name}" for form in one.forms for name in form.pointers] + ["pinned"] * one.pinned
            forms = " ".join(form.form for form in one.forms)
            size = size_of(sum(form.bytes for form in one.forms))
            rows.append((one.tag, str(one.step), forms, size, since, " ".join(marks)))
        title = printable(f"{self.name}: {self.url} (job {self.job})")
        body = in_columns(rows) if self.checkpoints else ["  no committed checkpoint"]
        return "\n".join([title, *body, *(printable(f"  ! {problem}") for problem in self.problems)])


def list_remote(remote: RemoteInventory, now: datetime) -> RemoteListing:
    """Return the rows of one remote."""
    seen = remote.observation
    saves: dict[tuple[int, int, int, str, int], list[CommitView]] = {}
    for view in remote.commits:
        commit = view.commit
        key = (commit.branch, commit.step, commit.save_seq, commit.tag, commit.generation)
        saves.setdefault(key, []).append(view)
    late: dict[Stem, list[Commit]] = {}
    for view in seen.supplements:
        late.setdefault(stem_of(view.commit), []).append(view.commit)
    pinned = pinned_tags((*seen.damaged_pins, *seen.decisions))
    rows = []
    for (branch, step, save_seq, tag, generation), views in sorted(saves.items(), key=lambda row: row[0]):
        commit = views[-1].commit
        forms = [_form(seen, view, late.get(stem_of(view.commit), ()), now) for view in views]
        rows.append(
            ListedCheckpoint(
                tag=tag,
                generation=generation,
                branch=branch,
                step=step,
                save_seq=save_seq,
                zero_stage=commit.grid.zero_stage,
                saved_by_ranks=commit.grid.dp * commit.grid.mm_count,
                pinned=tag in pinned,
                run_id=run_of(commit, commit.job_id),
                kind=_kind(commit.grid, {form.form for form in forms}),
                forms=tuple(sorted(forms, key=lambda f: (f.form != "zero", f.form))),
            )
        )
    disputed = tuple(f"{v.key} is disputed: it does not count" for v in seen.commits if v.disputed)
    return RemoteListing(
        name=remote.name,
        url=remote.url,
        job=seen.identity.job,
        latest=seen.latest,
        latest_universal=seen.latest_universal,
        checkpoints=tuple(rows),
        runs=runs_in(remote),
        problems=seen.damaged + disputed,
    )


def _form(seen: Observation, view: CommitView, late: Sequence[Commit], now: datetime) -> ListedForm:
    commit = view.commit
    pointers = (("latest", seen.latest), ("latest_universal", seen.latest_universal))
    return ListedForm(
        form=commit.form,
        folder=commit.folder,
        bytes=commit.bytes,
        files=commit.files,
        committed_at=commit.committed_at,
        age_seconds=_age_seconds(commit.committed_at, now),
        commit_sha256=view.sha256,
        pointers=tuple(name for name, value in pointers if value == commit.folder),
        late_files=sum(one.files for one in late),
        late_bytes=sum(one.bytes for one in late),
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
