"""`ckptd status JOB TAG`: one checkpoint's whole story, from being seen to what retention makes of it.

From the published document alone; `--json` gives the same as data.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckptd.base.humanize import ago, size_of
from ckptd.errors import NotFoundError
from ckptd.maintenance.status.verdict import seconds_since, unix_of
from ckptd.maintenance.status.words import form_state_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptd.observe.status import (
        CheckpointStatus,
        ComparisonStatus,
        FormStatus,
        HeldStatus,
        JobStatus,
        ProblemStatus,
    )

_HERE = {"none": "", "ready": ", universal form ready", "refused": ", no universal form"}


def story_of(jobs: Sequence[JobStatus], tag: str, *, is_alive: bool = True) -> list[str]:
    """Return the story as lines; not `is_alive`: nothing is under way any more.

    Raises:
        NotFoundError: nothing published names the tag.
    """
    for job in jobs:
        here = next((one for one in job.checkpoints if one.tag == tag), None)
        held = [(remote.name, one) for remote in job.remotes for one in remote.held if one.tag == tag]
        if here is not None or held:
            problems = [one for one in job.problems if tag in (one.about or one.text)]
            return list(_lines(here, held, tag, problems, is_alive=is_alive))
    raise _unknown(tag)


def story_as_written(jobs: Sequence[dict[str, Any]], tag: str) -> dict[str, Any]:
    """Return the same as data, of what is written of the jobs: what a newer daemon adds is passed on.

    Raises:
        NotFoundError: as `story_of`.
    """
    for job in jobs:
        here = next((one for one in job["checkpoints"] if one["tag"] == tag), None)
        held = {
            remote["name"]: [one for one in remote.get("held", ()) if one["tag"] == tag]
            for remote in job.get("remotes", ())
        }
        if here is not None or any(held.values()):
            problems = [one for one in job["problems"] if tag in (one.get("about") or one["text"])]
            return (here or {"tag": tag}) | {"held": held, "problems": problems}
    raise _unknown(tag)


def _unknown(tag: str) -> NotFoundError:
    msg = f"no checkpoint {tag!r} in the published status"
    return NotFoundError(msg, hint="ckptd status shows those there are; ckptd list shows the remote's")


def _lines(
    here: CheckpointStatus | None,
    held: Sequence[tuple[str, HeldStatus]],
    tag: str,
    problems: Sequence[ProblemStatus],
    *,
    is_alive: bool,
) -> Iterator[str]:
    if here is None:
        yield f"{tag}: not on this node"
    else:
        yield _title(here, is_alive)
        yield f"  here: {_here(here)}"
        for name, forms in here.remotes.items():
            for form, state in forms.items():
                yield f"  {name}: {_upload_state(form, state, here, is_alive)}"
        for form, compared in here.comparisons.items():
            yield from (f"  {form}: {text}" for text in _compared(compared))
        if why := _fate(here):
            yield f"  {why}"
    for name, one in held:
        yield f"  in {name}: {_held(one)}"
    for problem in problems:
        yield f"  ! {problem.text}"
        if problem.next_step:
            yield f"    → {problem.next_step}"


def _title(here: CheckpointStatus, is_alive: bool) -> str:
    step = f"step {here.step}" if here.step is not None else "step not known"
    if here.branch and here.branch > 1:
        step += f" (branch {here.branch})"
    words = [step, size_of(here.bytes), state_of(here.state, is_alive=is_alive)]
    if here.kind == "model-only":
        words.append("only a model: nothing to resume from")
    if here.complete_for == "node":
        words.append("complete for this node, not for the job")
    if here.pinned:
        words.append("pinned")
    reason = f": {here.reason}" if here.reason else ""
    return f"{here.tag}: {', '.join(words)}{reason}"


def _here(here: CheckpointStatus) -> str:
    local = here.local
    parts = []
    seen, complete, ended = local.seen_at, local.complete_at, local.ended_at
    if seen:
        parts.append(f"seen {_clock(seen)}")
    if complete:
        parts.append(f"complete {_clock(complete)}{_after(seen, complete)}")
    if ended:
        parts.append(f"gone {_clock(ended)}")
    text = ", ".join(parts) or ("here" if local.present else "not here")
    text += _HERE.get(local.universal, f", universal form {local.universal}")
    return text + (", held by clone until it is committed" if local.held else "")


def _compared(seen: ComparisonStatus) -> Iterator[str]:
    """Write how far the masters of a form were compared with the model's weights."""
    if seen.tensors:
        yield f"masters are the model's weights in {seen.tensors} tensors, {seen.elements:,} elements"
    for reason in seen.not_compared:
        yield f"not compared with the model's weights: {reason}"


def _upload_state(form: str, state: FormStatus, here: CheckpointStatus, is_alive: bool) -> str:
    is_uploading = state.state == "shipping"
    text = f"{form} {form_state_of(state, is_alive=is_alive)}"
    if is_uploading and state.bytes_total:
        text += f" {size_of(state.bytes_done)} of {size_of(state.bytes_total)}"
    if state.eta_seconds is not None and is_uploading and is_alive:
        text += f", {ago(state.eta_seconds)} to go"
    if state.ended_at:
        after = _after(here.local.complete_at, state.ended_at, "complete")
        text += f" {_clock(state.ended_at)}{after}"
    if state.generation:
        text += f", generation {state.generation}"
    if state.commit_sha256:
        text += f", COMMIT {state.commit_sha256[:12]}"
    return text + (f" ({state.reason})" if state.reason else "")


def _fate(here: CheckpointStatus) -> str:
    if here.goes:
        return f"to be deleted from this node: {here.goes}"
    return f"kept here: {'; '.join(here.keep)}" if here.keep else ""


def _held(one: HeldStatus) -> str:
    forms = ", ".join(one.forms)
    leaves = f" (leaves {', '.join(one.leaves)})" if one.verdict == "step-down" else ""
    return f"generation {one.generation}, {forms}: {one.verdict}{leaves}, {'; '.join(one.why)}"


def _clock(at: str) -> str:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(at).strftime("%Y-%m-%d %H:%M:%SZ")
    return at


def _after(before: str | None, at: str, what: str = "seen") -> str:
    if not before:
        return ""
    seconds = seconds_since(before, unix_of(at, 0.0))
    return f" ({ago(seconds)} after it was {what})"
