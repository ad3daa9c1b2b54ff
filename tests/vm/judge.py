"""What was said from outside of the disks (the trainer's and the daemon's lines), and what must lie on them.

ckptd is not asked: a COMMIT counts if every byte that it rests on is that of a save which the trainer wrote.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.known_saves import Save, differs, is_no_universal, read_commit, tree
from tests.vm.trainer import save_of, saves_in, step_of

_FORM = re.compile(r"\((zero|universal)\)")


@dataclass(slots=True)
class Told:
    """What the lines of all runs so far came to."""

    serials: dict[str, set[int]] = field(default_factory=dict)
    """Tag → serial numbers of the saves that were begun under it."""
    sealed: set[str] = field(default_factory=set)
    """Tags whose last save was said to be complete."""
    committed: set[tuple[str, str]] = field(default_factory=set)
    retired: set[tuple[str, str]] = field(default_factory=set)
    """(tag, form) of COMMITs that were to be deleted."""
    commits: int = 0
    removals: int = 0
    """Saves that were removed here, and COMMITs in the remote."""
    errors: list[str] = field(default_factory=list)
    """Lines of the daemon that are no information, and no warning."""

    def read(self, text: str) -> None:
        """Take in the lines of a run."""
        for line in text.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                if "trainer" in row:
                    self._trainer(row["trainer"], row["tag"], row["serial"])
                else:
                    self._daemon(row)
            elif "Traceback" in line:
                self.errors.append(text[-2000:])

    def _trainer(self, verb: str, tag: str, serial: int) -> None:
        if verb == "writes":
            self.serials.setdefault(tag, set()).add(serial)
        if verb in ("writes", "removes"):
            self.sealed.discard(tag)

    def _daemon(self, line: dict[str, str]) -> None:
        action, tag, text = line.get("action", ""), line.get("tag", ""), line.get("text", "")
        form = found[1] if (found := _FORM.search(text)) else ""
        if action == "complete":
            self.sealed.add(tag)
        elif action == "commit":
            self.committed.add((tag, form))
            self.retired.discard((tag, form))
            self.commits += 1
        elif action == "delete-remote":
            self.retired.add((tag, form))
            self.removals += 1
        elif action == "delete-local" and "deleted here" in text:
            self.removals += 1
        if line["level"] in ("error", "critical") or "trace" in line:
            self.errors.append(f"{line['level']}: {text} {line.get('trace', '')[-500:]}")

    def saves(self, tag: str) -> list[Save]:
        """Return the saves that were begun under a tag."""
        return [save_of(step_of(tag), serial) for serial in sorted(self.serials.get(tag, ()))]


@dataclass(slots=True)
class Verdict:
    """What a look at the disks came to."""

    wrong: list[str] = field(default_factory=list)
    committed: set[tuple[str, str]] = field(default_factory=set)
    """(tag, form) of whole COMMITs."""
    latest: str = ""
    """Tag that the remote's pointer names."""
    whole: set[str] = field(default_factory=set)
    """Tags whose folder in save_dir holds a save of the trainer's."""


def is_save(contents: dict[str, bytes], saves: list[Save]) -> bool:
    """Whether these files are one of the saves."""
    return any(not differs(contents, save) for save in saves)


def judge(save_dir: Path, nas: Path, told: Told) -> Verdict:
    """Judge what lies on the disks; nothing of ckptd runs."""
    verdict = Verdict()
    _judge_remote(tree(nas), told, verdict)
    verdict.whole = {f.name for f in saves_in(save_dir) if is_save(tree(f), told.saves(f.name))}
    retired = told.retired | _audited(save_dir)
    for tag, form in sorted(told.committed - retired - verdict.committed):
        verdict.wrong.append(f"{tag} ({form}) was said to be committed, and has no COMMIT (P3)")
    for tag in sorted(told.sealed - verdict.whole):
        is_safe = (tag, "zero") in verdict.committed | retired
        if not is_safe and not _is_set_aside(save_dir, tag, told):
            verdict.wrong.append(
                f"{tag} was said to be complete, and is neither whole here nor committed (P1)"
            )
    pointer = save_dir / "latest_universal"
    if pointer.exists():
        name = pointer.read_text()
        tag = found[0] if (found := re.search(r"global_step\d+", name)) else ""
        made = tree(save_dir / name)
        if all(is_no_universal(made, save) for save in told.saves(tag)):
            verdict.wrong.append(f"latest_universal names {name}, which is not whole (P6)")
    return verdict


def _judge_remote(found: dict[str, bytes], told: Told, verdict: Verdict) -> None:
    folders: dict[str, str] = {}
    for key in found:
        if not re.fullmatch(r"_ckptd/commits/[^/.][^/]*\.json", key):
            continue
        commit = read_commit(found, key)
        if isinstance(commit, str):
            verdict.wrong.append(commit)
            continue
        tag = f"global_step{commit.step}"
        compare = differs if commit.form == "zero" else is_no_universal
        if all(compare(commit.contents, save) for save in told.saves(tag)):
            verdict.wrong.append(f"{key} holds the bytes of no save (P2, P4)")
            continue
        verdict.committed.add((tag, commit.form))
        folders[commit.folder] = tag
    latest = found.get("latest")
    if latest is not None:
        verdict.latest = folders.get(latest.decode(errors="replace"), "")
        if not verdict.latest:
            verdict.wrong.append(f"remote latest holds {latest!r}, which no whole COMMIT has (P6)")


def _audited(save_dir: Path) -> set[tuple[str, str]]:
    """Return what audit.jsonl says that went from the remote; a line that was cut short is no line."""
    path = save_dir / "_ckptd/state/audit.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return {(row["tag"], row["form"]) for row in rows if row["action"] == "retire"}


def _is_set_aside(save_dir: Path, tag: str, told: Told) -> bool:
    """Whether the save lies whole in a folder of ckptd's (trash, hold, aside)."""
    folders = [f for f in (save_dir / "_ckptd").glob("*/**") if f.is_dir() and tag in str(f)]
    return any(is_save(tree(folder), told.saves(tag)) for folder in folders)
