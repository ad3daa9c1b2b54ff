"""The judge of a life: reads bytes on disk and in the remote, and asks the trainer what it wrote.

Nothing of ckptd is asked here: neither what it planned nor what it noted. A COMMIT counts if every object
that it rests on is there with the very bytes of one save.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from tests.killpoints import trainer
from tests.killpoints.life import Place
from tests.support.known_saves import differs, is_no_universal, read_commit, tree

WINDOW_BYTES = 4096
TEMPORARY = (".ckptd-tmp-", ".ckptd-part-")
Objects = dict[str, bytes]


@dataclass(slots=True)
class Verdict:
    """`wrong`: promises broken; `keys`: objects that COMMITs rest on; `garbage`: that nothing lists."""

    wrong: list[str] = field(default_factory=list)
    keys: frozenset[str] = frozenset()
    garbage: int = 0
    committed: set[tuple[int, str]] = field(default_factory=set)
    """(step, form) of every whole COMMIT."""


def objects_of(place: Place) -> Objects:
    """What the remote holds."""
    if place.scenario.store == "directory":
        return tree(place.remote)
    folder = place.root / "shelf" / "objects"
    if not folder.is_dir():
        return {}
    return {unquote(p.name): p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def judge(place: Place) -> Verdict:
    """What must hold at every instant (P1, P3, P4, P5, P6)."""
    verdict = Verdict()
    found = objects_of(place)
    keys: set[str] = set()
    tags: set[str] = set()
    for key in found:
        if key.startswith("_ckptd/commits/") and key.endswith(".json"):
            _judge_commit(found, key, verdict, keys, tags)
    verdict.keys = frozenset(keys)
    listed = keys | {"latest", "latest_universal"}
    verdict.garbage = sum(
        k not in listed and not k.startswith("_ckptd/") and TEMPORARY[0] not in k for k in found
    )
    latest = found.get("latest")
    if latest is not None and latest.decode() not in tags:
        verdict.wrong.append(f"remote latest names {latest!r}, which has no whole COMMIT (P6)")
    _judge_local(place, verdict)
    return verdict


def _judge_commit(found: Objects, key: str, verdict: Verdict, keys: set[str], tags: set[str]) -> None:
    commit = read_commit(found, key)
    if isinstance(commit, str):
        verdict.wrong.append(commit)
        return
    keys |= commit.keys
    save = next(s for s in trainer.saves() if s.step == commit.step)
    why = (differs if commit.form == "zero" else is_no_universal)(commit.contents, save)
    if why:
        verdict.wrong.append(f"{key}: {why} (P2, P4)")
        return
    tags.add(commit.folder)
    verdict.committed.add((commit.step, commit.form))


def _judge_local(place: Place, verdict: Verdict) -> None:
    is_constant = place.scenario.is_constant
    written = place.saves[: place.written]
    newest = written[-1].step if written else 0
    for number, save in enumerate(written):
        folder = place.save_dir / trainer.tag_of(save.step, is_constant=is_constant)
        is_here = folder.is_dir() and not differs(tree(folder), save)
        newer = [other.step for other in written[number + 1 :] if (other.step, "zero") in verdict.committed]
        is_safe = (save.step, "zero") in verdict.committed or len(newer) >= 2
        if save.step == newest and not is_here:
            verdict.wrong.append(f"the newest save, {folder.name}, is not here any more (P5)")
        elif not is_here and not is_safe and not (is_constant and place.hits):
            verdict.wrong.append(f"step {save.step} is neither here nor committed (P1)")
    names = {"latest", "latest_universal", "_ckptd"}
    names |= {trainer.tag_of(s.step, is_constant=is_constant) for s in written}
    strange = [n for n in os.listdir(place.save_dir) if n not in names and not n.startswith(TEMPORARY)]
    if strange:
        verdict.wrong.append(f"{strange} appeared in save_dir (P11)")
    pointer = place.save_dir / "latest_universal"
    if pointer.exists():
        target = place.save_dir / pointer.read_text()
        made = tree(target) if target.is_dir() else {}
        if not any(not is_no_universal(made, save) for save in written):
            verdict.wrong.append(f"latest_universal names {target.name}, which is not whole (P6)")


def judge_rest(place: Place) -> list[str]:
    """What must hold whenever nothing is left to do for the saves that were written, whoever died before."""
    verdict = judge(place)
    forms = ("zero", "universal") if place.scenario.universal else ("zero",)
    newest = place.saves[place.written - 1]
    missing = {(newest.step, form) for form in forms} - verdict.committed
    if missing and not place.hits:
        verdict.wrong.append(f"{sorted(missing)} is not committed")
    if verdict.garbage:
        verdict.wrong.append(f"{verdict.garbage} objects in the remote belong to nothing")
    _judge_leftovers(place, verdict.wrong, sum(line.startswith("killed ") for line in place.told()))
    return verdict.wrong


def newest_is_safe(place: Place) -> bool:
    """Whether the newest save is committed in every form."""
    forms = ("zero", "universal") if place.scenario.universal else ("zero",)
    wanted = {(save.step, form) for save in place.saves[: place.written][-1:] for form in forms}
    return wanted <= judge(place).committed


def judge_end(place: Place, *, deaths: int = 0, hurts: int = 0) -> Verdict:
    """What must hold as well once all is done: everything arrived, nothing is left lying (P1, P7).

    A process that is killed leaves at most one temporary of a document, which nothing reads; so does each of
    `hurts` errors that lasted. After an error older forms than the newest may have been skipped.
    """
    verdict = judge(place)
    scenario, wrong = place.scenario, verdict.wrong
    wrong += [line for line in place.told() if line.startswith(("VIOLATION", "STANDSTILL", "SILENT"))]
    forms = ("zero", "universal") if scenario.universal else ("zero",)
    expected = {(save.step, form) for save in place.saves[-2:] for form in forms}
    if place.was_found_first:
        expected |= {(place.saves[0].step, form) for form in forms} & verdict.committed
    optional = {(place.saves[-2].step, "universal")} if place.hits else set()
    if not expected - optional <= verdict.committed <= expected:
        wrong.append(f"committed are {sorted(verdict.committed)}, wanted {sorted(expected)}")
    last = place.tag(-1)
    first = {place.tag(0)} - {last} if place.was_found_first else set()
    folders = {p.name for p in place.save_dir.iterdir() if p.is_dir()}
    if folders - first != {last, "_ckptd"}:
        wrong.append(f"save_dir holds {sorted(folders)}, wanted {last}")
    made = _names(place.save_dir / "_ckptd" / "derived" / "universal")
    if made - first != ({last} if scenario.universal else set()):
        wrong.append(f"_ckptd/derived/universal holds {sorted(made)}")
    # what an unlink leaves that fails itself, nobody else removes
    unlinks = sum(hit.split()[1] == "unlink" for hit in place.hits)
    lasted = any(hit.split()[1] == "unlink" and ":once" not in hit for hit in place.hits)
    _judge_leftovers(place, wrong, deaths + hurts + unlinks + (1000 if lasted else 0))
    if verdict.garbage:
        wrong.append(f"{verdict.garbage} objects in the remote belong to nothing")
    code = place.last_of("exit", "0")
    if code != "0":
        wrong.append(f"at the end the exit code would be {code}: {place.last_of('problems', '')}")
    wrong += sent_again(place, is_killed=deaths > 0)
    gone = {place.tag(number) for number in range(place.written)} - folders
    wrong += [f"{tag} went without a line in audit.jsonl (P1)" for tag in sorted(gone - _told(place))]
    return verdict


def _told(place: Place) -> set[str]:
    """Tags of which audit.jsonl says that they were pruned; what a full disk cut short is no line."""
    path = place.save_dir / "_ckptd" / "state" / "audit.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith(b"}")]
    return {row["tag"] for row in rows if row["action"] == "prune"}


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _judge_leftovers(place: Place, wrong: list[str], most_temporaries: int) -> None:
    rmdirs = sum(hit.split()[1] == "rmdir" for hit in place.hits)  # empty folders, until the next start
    for name in ("trash", "hold", "staging"):
        left = _names(place.save_dir / "_ckptd" / name)
        if len(left) > (rmdirs if name == "trash" else 0):
            wrong.append(f"_ckptd/{name} holds {sorted(left)}")
    found = [p for f in (place.save_dir, place.remote) for p in f.rglob("*") if p.name.startswith(TEMPORARY)]
    if len(found) > most_temporaries or any(p.name.startswith(TEMPORARY[1]) for p in found):
        wrong.append(f"temporaries are left: {[str(p.relative_to(place.root)) for p in found]}")
    partial = _names(place.root / "shelf" / "partial")
    if partial:
        wrong.append(f"partial uploads are left: {sorted(partial)}")


def sent_again(place: Place, *, is_killed: bool) -> list[str]:
    """P7, P8: nothing committed is sent again, and of a file in flight at most one window."""
    wrong: list[str] = []
    committed: set[str] = set()
    flushed: dict[str, int] = {}
    for line in place.told():
        word, _, rest = line.partition(" ")
        if word == "committed":
            committed = set(json.loads(rest))
        elif word == "flushed":
            key, count = json.loads(rest)
            flushed[key] = count
        elif word == "upload":
            key, resumed = json.loads(rest)
            if key in committed:
                wrong.append(f"{key} was sent again although it was committed (P8)")
            elif is_killed and place.scenario.lanes == 1 and resumed < flushed.pop(key, 0) - WINDOW_BYTES:
                wrong.append(f"{key} was sent again from {resumed} (P7)")
    return wrong
