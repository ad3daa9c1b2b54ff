"""Make the page's view of a whole job from its remote alone: what `ckptd status URL` and `list` read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptd.base.humanize import ago, printable, size_of
from ckptd.core.model.runs import short
from ckptd.maintenance.listing import list_remote
from ckptd.maintenance.status.fleet import FleetReader, inventory_of
from ckptd.maintenance.status.rows import ROWS
from ckptd.page.timeline import Track, laid_out, when
from ckptd.page.view import CheckpointView, Detail, Form, Node, ProblemView, ShownJob, Tone, key_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptd.errors import CkptdError
    from ckptd.maintenance.listing import ListedCheckpoint
    from ckptd.maintenance.status.fleet import FleetStatus, NodeReport
    from ckptd.recover.select.runs import RunView

_TONES: dict[str, Tone] = {"safe": "good", "behind": "late", "not-safe": "bad"}
_CLOCKS = {
    "reader": "ages: the store's times, by this machine's clock",
    "nodes": "ages: by the nodes' own clocks; this store keeps no times",
}


def job_of_remote(url: str, now: float, config_dir: Path | None = None) -> ShownJob:
    """Look once at a remote.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd.
    """
    inventory = inventory_of(url, config_dir)
    found = FleetReader(inventory).read()
    listed = list_remote(inventory, datetime.fromtimestamp(now, UTC))
    newest_first = [one for one in reversed(listed.checkpoints) if found.run_id in (None, one.run_id)]
    return _job(found, newest_first, listed.problems, now)


def job_not_read(url: str, error: CkptdError, now: float) -> ShownJob:
    """Return what is shown of a remote that does not answer."""
    problem = ProblemView(
        sign="!", tone="bad", text=printable(error.message), next_step=printable(error.hint)
    )
    return ShownJob(
        key=key_of("", url),
        name=printable(url),
        where=printable(url),
        tone="bad",
        verdict="NOT READ",
        clauses=("the remote could not be read",),
        problems=(problem,),
        needs_person=1,
        as_of=when(datetime.fromtimestamp(now, UTC).isoformat(), now),
        code=1,
    )


def _job(
    found: FleetStatus, listed: Sequence[ListedCheckpoint], damaged: Sequence[str], now: float
) -> ShownJob:
    problems = [
        ProblemView(sign="!", tone="bad", text=printable(text)) for text in (*found.problems, *damaged)
    ]
    problems += [
        ProblemView(
            sign="~",
            tone="late",
            text=printable(
                f"{row.tag} (generation {row.generation}): "
                f"{', '.join(row.nodes)} uploaded their parts; {row.text}"
            ),
        )
        for row in found.uncommitted
    ]
    problems += [_left(run) for run in found.runs[1:] if run.checkpoints]
    rows = [_row(one, now) for one in listed]
    tracks = [_track(one, now) for one in listed[:ROWS]]
    detail = Detail(
        places=("remote",),
        has_local=False,
        checkpoints=tuple(rows[:ROWS]),
        older=tuple(rows[ROWS:]),
        older_title=f"{len(rows) - ROWS} older ones",
        timeline=laid_out(tracks, now, has_local=False),
        notes=tuple(text for clock, text in _CLOCKS.items() if clock == found.clock),
        nodes=tuple(_node(row) for row in found.nodes),
    )
    return ShownJob(
        key=key_of("", found.url),
        name=printable(found.job),
        where=printable(found.url),
        tone=_TONES[found.verdict],
        verdict=found.verdict.upper().replace("-", " "),
        clauses=tuple(map(printable, found.clauses)),
        problems=tuple(problems),
        needs_person=len(found.problems) + len(damaged),
        committed=when(found.safe.committed_at if found.safe is not None else None, now),
        as_of=when(datetime.fromtimestamp(now, UTC).isoformat(), now),
        code=found.exit_code,
        make_detail=lambda: detail,
    )


def _left(run: RunView) -> ProblemView:
    place = f" of {run.user}@{run.host}:{run.save_dir}" if run.host else ""
    held = f"{run.checkpoints} checkpoints ({size_of(run.bytes)})"
    text = f"earlier run {short(run.run_id)}{place}: {held} stay until they are deleted"
    step = f"ckptd gc JOB --run {short(run.run_id)}"
    return ProblemView(sign="~", tone="late", text=printable(text), next_step=printable(step))


def _node(row: NodeReport) -> Node:
    return Node(
        name=printable(row.node),
        ranks=printable(row.ranks),
        newest="–" if row.newest_step is None else f"step {row.newest_step}",
        state="✗ dead?" if row.is_dead else printable(row.state),
        tone="bad" if row.is_dead else "calm",
        heard="never" if row.heard_seconds_ago is None else f"{ago(row.heard_seconds_ago)} ago",
        version=printable(row.ckptd_version or ""),
        is_in_safe=row.is_in_safe,
    )


def _row(one: ListedCheckpoint, now: float) -> CheckpointView:
    forms = []
    for form in one.forms:
        at = when(form.committed_at, now)
        said = [f"{at.absolute} ({at.relative})" if at is not None else "", size_of(form.bytes)]
        said.append(f"COMMIT {form.commit_sha256[:12]}")
        title = "; ".join(text for text in said if text)
        forms.append(Form(name=printable(form.form), sign="✓", word="committed", tone="good", title=title))
    return CheckpointView(
        tag=printable(one.tag),
        step=str(one.step) + (f" (branch {one.branch})" if one.branch > 1 else ""),
        size=size_of(sum(form.bytes for form in one.forms)),
        here="",
        marks="pinned" if one.pinned else "",
        tone="calm",
        places=(tuple(forms),),
        note="" if one.kind == "resumable" else f"{one.kind.replace('-', ' ')}: nothing to resume from",
    )


def _track(one: ListedCheckpoint, now: float) -> Track:
    several = len(one.forms) > 1
    found = [when(form.committed_at, now, form.form if several else "") for form in one.forms]
    return Track(tag=printable(one.tag), committed=tuple(at for at in found if at is not None))
