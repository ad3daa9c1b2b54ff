"""The promises that a quickstart can show, each with its check (P-numbers of docs/design.md §2).

A promise of which nothing could be checked has failed: showing nothing is not showing that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.demo import checks_node as node
from examples.demo import checks_remote as remote

if TYPE_CHECKING:
    from examples.demo.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise, judged."""

    promise: str
    text: str
    checked: int
    unit: str
    failures: tuple[str, ...]
    note: str = ""
    """A figure worth showing: how near to the limit."""

    @property
    def held(self) -> bool:
        """Checked at least once, and never found broken."""
        return self.checked > 0 and not self.failures


Check = Callable[["Evidence"], tuple[int, list[str]]]

PROMISES: tuple[tuple[str, str, str, Check], ...] = (
    ("P1", "removed local files: listed by a COMMIT of that moment", "files", node.removals_were_covered),
    ("P1", "nothing left the node without a line in audit.jsonl", "folders", node.nothing_vanished_silently),
    ("P2", "files {where} = the trainer's SHA-256", "files", remote.remote_bytes_are_the_trainers),
    ("P2", "derived files {where} = as committed", "files", remote.derived_objects_stayed),
    ("P3", "COMMITs rest on quoted manifests, none replaced", "commits", remote.commits_are_final),
    ("P4", "one COMMIT holds one whole save", "commits", remote.one_save_per_commit),
    (
        "P5",
        "the torn save: never committed, never deleted",
        "files",
        node.torn_was_neither_committed_nor_deleted,
    ),
    ("P5", "the newest stayed at each removal", "removals", node.newest_stayed),
    ("P5", "save_total_limit is kept at the end", "checkpoints", node.limit_is_kept),
    ("P6", "`latest` {where} named committed ones only", "looks", remote.latest_names_the_committed),
    ("P7", "SIGKILL in mid-upload: committed afterwards", "kills", remote.kill_lost_nothing),
    ("P8", "nothing committed was sent again", "files", remote.nothing_was_sent_twice),
    ("P11", "the trainer's files are as it wrote them", "files", node.trainers_files_are_untouched),
    ("P12", "daemon and children within memory_budget", "samples", node.memory_stayed_in_budget),
    ("P18", "resume took the newest COMMIT, on other ranks", "resumes", node.resume_took_the_newest_commit),
    ("§5", "remote retention: tombstone before removal", "commits", remote.tombstone_precedes_removal),
    ("end", "every save of the resumed run is committed", "saves", remote.everything_came_through),
    ("end", "losses = uninterrupted run's, within 1e-3", "steps", node.losses_agree),
)

BUCKET_PROMISES: tuple[tuple[str, str, str, Check], ...] = (
    ("P7", "no way to {place} in mid-upload: committed afterwards", "outages", remote.outage_lost_nothing),
    (
        "P7",
        "broken off uploads: at most the parts in flight sent again",
        "parts",
        remote.parts_were_sent_once,
    ),
)
"""Judged in addition where the server logs what it gets."""

NOTES: dict[Check, Callable[[Evidence], str]] = {
    node.memory_stayed_in_budget: node.memory_note,
    node.losses_agree: node.losses_note,
    remote.remote_bytes_are_the_trainers: remote.bytes_note,
}


def promises_for(is_bucket: bool) -> list[tuple[str, str, str, Check]]:
    """What is judged of a remote of this kind; rows of one promise stand together."""
    rows = [*PROMISES, *(BUCKET_PROMISES if is_bucket else ())]
    numbers = list(dict.fromkeys(row[0] for row in rows))
    return sorted(rows, key=lambda row: numbers.index(row[0]))


def judge(e: Evidence) -> list[Verdict]:
    """Every promise."""
    verdicts = []
    for promise, text, unit, check in promises_for(e.is_bucket):
        checked, failures = check(e)
        note = NOTES[check](e) if check in NOTES and checked else ""
        verdicts.append(
            Verdict(promise, text.format(place=e.place, where=e.where), checked, unit, tuple(failures), note)
        )
    return verdicts
