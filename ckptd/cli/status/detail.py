"""`ckptd status JOB TAG`: one checkpoint's whole story, from being seen to what retention makes of it.

From the published document alone; `--json` gives the same as data.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ckptd.base.humanize import ago, size_of
from ckptd.errors import NotFoundError
from ckptd.maintenance.status.words import form_state_of, state_of

_HERE = {"none": "", "ready": ", universal form ready", "refused": ", no universal form"}


def story_of(
    jobs: list[dict[str, Any]], tag: str, *, is_alive: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the story as data and as lines; not `is_alive`: nothing is under way any more.

    Raises:
        NotFoundError: nothing published names the tag.
    """
    for job in jobs:
        here = next((c for c in job["checkpoints"] if c["tag"] == tag), None)
        held = {
            remote["name"]: [one for one in remote.get("held", []) if one["tag"] == tag]
            for remote in job.get("remotes", [])
        }
        if here is not None or any(held.values()):
            data = (here or {"tag": tag}) | {"held": held}
            problems = [p for p in job["problems"] if tag in (p.get("about") or p["text"])]
            lines = _lines(here, held, tag, problems, is_alive=is_alive)
            return data | {"problems": problems}, lines
    msg = f"no checkpoint {tag!r} in the published status"
    raise NotFoundError(msg, hint="ckptd status shows those there are; ckptd list shows the remote's")


def _lines(
    here: dict[str, Any] | None,
    held: dict[str, list[dict[str, Any]]],
    tag: str,
    problems: list[dict[str, Any]],
    *,
    is_alive: bool,
) -> list[str]:
    lines = (
        [f"{tag}: not on this node"] if here is None else [_title(here, is_alive), f"  here: {_here(here)}"]
    )
    for name, forms in (here or {"remotes": {}})["remotes"].items():
        lines += [f"  {name}: {_upload_state(form, state, here, is_alive)}" for form, state in forms.items()]
    if here is not None and (why := _fate(here)):
        lines.append(f"  {why}")
    for name, ones in held.items():
        lines += [f"  in {name}: {_held(one)}" for one in ones]
    for problem in problems:
        lines.append(f"  ! {problem['text']}")
        if problem["next_step"]:
            lines.append(f"    → {problem['next_step']}")
    return lines


def _title(here: dict[str, Any], is_alive: bool) -> str:
    step = f"step {here['step']}" if here["step"] is not None else "step not known"
    if here["branch"] and here["branch"] > 1:
        step += f" (branch {here['branch']})"
    words = [step, size_of(here["bytes"]), state_of(here, is_alive=is_alive)]
    if here.get("kind") == "model-only":
        words.append("only a model: nothing to resume from")
    if here.get("complete_for") == "node":
        words.append("complete for this node, not for the job")
    if here["pinned"]:
        words.append("pinned")
    reason = f": {here['reason']}" if here["reason"] else ""
    return f"{here['tag']}: {', '.join(words)}{reason}"


def _here(here: dict[str, Any]) -> str:
    local = here["local"]
    parts = []
    seen, complete, ended = (local.get(k) for k in ("seen_at", "complete_at", "ended_at"))
    if seen:
        parts.append(f"seen {_clock(seen)}")
    if complete:
        parts.append(f"complete {_clock(complete)}{_after(seen, complete)}")
    if ended:
        parts.append(f"gone {_clock(ended)}")
    text = ", ".join(parts) or ("here" if local["present"] else "not here")
    text += _HERE.get(local["universal"], f", universal form {local['universal']}")
    return text + (", held by clone until it is committed" if local["held"] else "")


def _upload_state(form: str, state: dict[str, Any], here: dict[str, Any] | None, is_alive: bool) -> str:
    is_uploading = state["state"] == "shipping"
    text = f"{form} {form_state_of(state, is_alive=is_alive)}"
    if is_uploading and state["bytes_total"]:
        text += f" {size_of(state['bytes_done'])} of {size_of(state['bytes_total'])}"
    if state.get("eta_seconds") is not None and is_uploading and is_alive:
        text += f", {ago(state['eta_seconds'])} to go"
    if state.get("ended_at"):
        complete = here["local"].get("complete_at") if here else None
        text += f" {_clock(state['ended_at'])}{_after(complete, state['ended_at'], 'complete')}"
    if state.get("generation"):
        text += f", generation {state['generation']}"
    if state.get("commit_sha256"):
        text += f", COMMIT {state['commit_sha256'][:12]}"
    return text + (f" ({state['reason']})" if state.get("reason") else "")


def _fate(here: dict[str, Any]) -> str:
    if here.get("goes"):
        return f"to be deleted from this node: {here['goes']}"
    return f"kept here: {'; '.join(here['keep'])}" if here["keep"] else ""


def _held(one: dict[str, Any]) -> str:
    forms = ", ".join(one["forms"])
    leaves = f" (leaves {', '.join(one['leaves'])})" if one["verdict"] == "step-down" else ""
    return f"generation {one['generation']}, {forms}: {one['verdict']}{leaves}, {'; '.join(one['why'])}"


def _clock(at: str) -> str:
    return datetime.fromisoformat(at).strftime("%Y-%m-%d %H:%M:%SZ")


def _after(before: str | None, at: str, what: str = "seen") -> str:
    if not before:
        return ""
    seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(before)).total_seconds()
    return f" ({ago(max(0.0, seconds))} after it was {what})"
