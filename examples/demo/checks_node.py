"""Checks of the node: what was removed and why, what stayed, resume, losses, memory (P1, P5, P11, P12, P18).

Each takes the evidence and returns how many things it looked at and what it found broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.demo.evidence import folder_files, shards_of, step_of, zero_commits

if TYPE_CHECKING:
    from examples.demo.evidence import AuditLine, Evidence, SeenCommit

Outcome = tuple[int, list[str]]

AUDIT_SLACK_SECONDS = 10.0
"""A removal is seen by the observer up to this long before or after its line in audit.jsonl."""


def removals_were_covered(e: Evidence) -> Outcome:
    """P1: each removed local file stood in a COMMIT of that moment, there with the trainer's bytes."""
    by_digest = {c.sha256: c for c in e.commits}
    checked, failures = 0, []
    for line in _lines(e, "prune"):
        commits = [by_digest[digest] for _, digest in line.commits if digest in by_digest]
        alive = [c for c in commits if c.existed_at(line.at)]
        if not alive or len(alive) != len(line.commits):
            failures.append(f"{line.tag}: removed without a COMMIT that existed at that moment")
            continue
        for path, size in line.files:
            checked += 1
            name = path.removeprefix(f"{line.tag}/")
            failures += [
                f"{line.tag}/{name}: {why}" for c in alive if (why := _not_covered(e, c, name, size))
            ]
    return checked, failures


def _not_covered(e: Evidence, commit: SeenCommit, name: str, size: int) -> str | None:
    shipped = shards_of(commit).get(name)
    if shipped is None:
        return f"{commit.key} does not list it"
    if shipped[0] != size:
        return f"{commit.key} lists {shipped[0]} bytes, {size} were removed"
    save = e.save_of(commit)
    if save is None or save.files[name] != shipped:
        return f"the bytes {e.where} under {commit.key} are not those the trainer wrote"
    return None


def nothing_vanished_silently(e: Evidence) -> Outcome:
    """P1: whatever left the node's directory has its line in audit.jsonl (our own faults apart)."""
    own = [(line["begin"], line["at"]) for kind in ("wipe", "resume") for line in e.driver_lines(kind)]
    actions = {"save": "prune", "derived/universal": "drop-derived"}
    checked, failures = 0, []
    for look in e.looks("vanished"):
        action = actions.get(look["place"])
        if action is None or look["name"].endswith(".partial"):
            continue
        if any(begin <= look["at"] <= end + 1 for begin, end in own):
            continue
        if look["place"] == "save" and not look["name"].startswith("global_step"):
            continue
        checked += 1
        lines = [a for a in e.audit if a.action == action and a.tag == look["name"]]
        if not any(abs(a.at - look["at"]) <= AUDIT_SLACK_SECONDS for a in lines):
            failures.append(f"{look['place']}/{look['name']} vanished without a '{action}' in audit.jsonl")
    return checked, failures


def torn_was_neither_committed_nor_deleted(e: Evidence) -> Outcome:
    """P5: the save that the kill tore was never committed, and its files lie aside, byte for byte."""
    tag, failures = str(e.plan["torn_tag"]), []
    first = min((s.at for s in e.saves if s.tag == tag), default=float("inf"))
    failures += [
        f"{c.key}: the torn save was committed" for c in e.commits if c.tag == tag and c.created < first
    ]
    expected = {name: (size, digest) for name, size, digest in e.plan["torn_files"]}
    aside = e.save_dir / "_ckptd" / "aside"
    found = [folder_files(p) for p in aside.glob(f"{tag}*") if p.is_dir()] if aside.is_dir() else []
    if expected not in found:
        failures.append(f"the files of the torn {tag} are not in {aside}")
    return len(expected), failures


def newest_stayed(e: Evidence) -> Outcome:
    """P5: at each removal, save_total_limit newer ones were committed, and a newer one was complete."""
    limit, failures = int(e.plan["save_total_limit"]), []
    lines = _lines(e, "prune")
    for line in lines:
        step = step_of(line.tag)
        newer = {c.tag for c in zero_commits(e) if c.existed_at(line.at) and c.step > step}
        if len(newer) < limit:
            failures.append(f"{line.tag} was removed with {len(newer)} newer ones committed")
        if not any(s.step > step and s.at <= line.at for s in e.saves):
            failures.append(f"{line.tag} was the newest when it was removed")
    return len(lines), failures


def limit_is_kept(e: Evidence) -> Outcome:
    """save_total_limit: at the end no more committed checkpoints lie on the node."""
    limit = int(e.plan["save_total_limit"])
    committed = {c.tag for c in zero_commits(e)}
    local = sorted((p.name for p in e.save_dir.iterdir() if p.name in committed), key=step_of)
    over = [f"{len(local)} committed checkpoints lie on the node: {', '.join(local)}"]
    return len(local), over if len(local) > limit else []


def trainers_files_are_untouched(e: Evidence) -> Outcome:
    """P11: what lies in the trainer's directory is what the trainer wrote, and nothing else."""
    checked, failures = 0, []
    known = {"_ckptd", "latest", "latest_universal"}
    for save in e.saves:
        known.update(save.beside)
    for path in sorted(e.save_dir.iterdir()):
        if path.name in known:
            continue
        saves = [s for s in e.saves if s.tag == path.name]
        files = folder_files(path) if path.is_dir() else {}
        checked += len(files)
        if not any(s.files == files for s in saves):
            failures.append(f"{path.name} on the node is not what the trainer saved under that name")
    return checked, failures


def resume_took_the_newest_commit(e: Evidence) -> Outcome:
    """P6, P18: `ckptd resume` took the newest COMMIT, and the trainer went on from its step."""
    failures = []
    resumes = e.driver_lines("resume")
    for resume in resumes:
        there = [c for c in zero_commits(e) if c.existed_at(resume["begin"])]
        newest = max(there, key=lambda c: c.step, default=None)
        start = e.starts.get("resumed", {})
        if newest is None or resume["exit_code"] != 0:
            failures.append(f"resume ended with {resume['exit_code']}")
        elif start.get("first_step") != newest.step:
            failures.append(
                f"training went on at {start.get('first_step')}, the newest COMMIT is {newest.step}"
            )
        elif start.get("world_size") == e.starts["first"]["world_size"]:
            failures.append("training went on with the same number of ranks")
    return len(resumes), failures


def losses_agree(e: Evidence) -> Outcome:
    """The run that crashed and went on has the losses of the one that did not."""
    reference, tolerance = e.losses.get("reference", {}), float(e.plan["tolerance"])
    checked, failures = 0, []
    for run in ("first", "resumed"):
        for step, loss in e.losses.get(run, {}).items():
            checked += 1
            if abs(loss - reference.get(step, float("inf"))) > tolerance:
                failures.append(
                    f"step {step} of '{run}': loss {loss:.6f}, uninterrupted {reference.get(step)}"
                )
    resumed = e.losses.get("resumed", {})
    if max(resumed, default=0) != int(e.plan["last_step"]):
        failures.append(f"the resumed run ended at step {max(resumed, default=0)}")
    return checked, failures


def memory_stayed_in_budget(e: Evidence) -> Outcome:
    """P12: daemon and children together stayed under memory_budget (sampled)."""
    samples = e.driver_lines("memory")
    within = _peak_bytes(e) <= int(e.plan["memory_budget_bytes"])
    return len(samples), [] if within else [memory_note(e)]


def memory_note(e: Evidence) -> str:
    """The peak and the budget."""
    return f"peak {_peak_bytes(e) / 2**20:.0f} MiB of {int(e.plan['memory_budget_bytes']) / 2**20:.0f}"


def _peak_bytes(e: Evidence) -> int:
    return max((int(line["bytes"]) for line in e.driver_lines("memory")), default=0)


def _lines(e: Evidence, action: str) -> list[AuditLine]:
    return [line for line in e.audit if line.action == action]


def losses_note(e: Evidence) -> str:
    """The largest difference of the resumed run."""
    reference = e.losses.get("reference", {})
    distances = [
        abs(loss - reference[s]) for s, loss in e.losses.get("resumed", {}).items() if s in reference
    ]
    return f"max difference {max(distances, default=0.0):.1e}"
