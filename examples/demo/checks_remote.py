"""Checks of what the remote holds: bytes, COMMITs, pointers, retention, the kill in mid-upload (P2-P8).

Each takes the evidence and returns how many things it looked at and what it found broken. A directory and a
bucket are judged by the same checks; what a bucket's server logged is judged in addition.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from examples.demo.evidence import COMMITS, zero_commits

if TYPE_CHECKING:
    from examples.demo.evidence import Evidence, SeenCommit

Outcome = tuple[int, list[str]]

PARTS_IN_FLIGHT = 4
"""Of one object (docs/design.md P7)."""


def remote_bytes_are_the_trainers(e: Evidence) -> Outcome:
    """P2: every file of every ZeRO COMMIT has the trainer's SHA-256: when it was committed, and now."""
    checked, failures = 0, []
    for commit in zero_commits(e):
        save = e.save_of(commit)
        if save is None:
            failures.append(f"{commit.key}: its objects are not what the trainer wrote in any one save")
            continue
        for entry in commit.entries:
            expected = save.beside if entry["role"] == "extra" else save.files
            checked += 1
            digest = expected.get(entry["path"].rsplit("/", 1)[-1], (0, "unknown"))[1]
            failures += _differences(e, commit, entry["key"], digest)
    return checked, failures


def bytes_note(e: Evidence) -> str:
    """How much was compared when it was committed."""
    return f"{sum(entry['bytes'] for c in zero_commits(e) for entry in c.entries) / 1e6:.0f} MB"


def _differences(e: Evidence, commit: SeenCommit, key: str, expected: str) -> list[str]:
    failures = []
    if commit.objects.get(key, ("",))[0] != expected:
        failures.append(f"{key}: other bytes than the trainer's when it was committed")
    if commit.gone is None:
        now = _sha256_now(e, key)
        if now is None:
            failures.append(f"{key}: missing {e.where}, and {commit.key} lists it")
        elif now != expected:
            failures.append(f"{key}: other bytes than the trainer's {e.where} now")
    return failures


def _sha256_now(e: Evidence, key: str) -> str | None:
    """Of the bytes that the remote gives now; None: it gives none."""
    try:
        return e.remote.sha256(key)[0]
    except OSError:
        return None


def derived_objects_stayed(e: Evidence) -> Outcome:
    """P2: every file of every derived COMMIT that still stands has the SHA-256 it had when committed."""
    checked, failures = 0, []
    for commit in e.commits:
        if commit.form == "zero" or commit.gone is not None:
            continue
        for entry in commit.entries:
            checked += 1
            known = commit.objects.get(entry["key"], ("",))[0]
            if not known or _sha256_now(e, entry["key"]) != known:
                failures.append(f"{entry['key']}: missing or changed since its COMMIT")
    return checked, failures


def commits_are_final(e: Evidence) -> Outcome:
    """P3: a COMMIT rests on manifests with the quoted digests, and no key ever showed a second COMMIT."""
    failures = [problem for commit in e.commits for problem in commit.manifest_problems]
    failures += [f"{line['key']}: listed by a COMMIT and missing" for line in e.looks("manifest-missing")]
    keys: dict[str, set[str]] = {}
    for commit in e.commits:
        keys.setdefault(commit.key, set()).add(commit.sha256)
    failures += [f"{key} was replaced" for key, digests in keys.items() if len(digests) > 1]
    if e.is_bucket:
        failures += _commits_by_the_server(e, set(keys))
    return len(e.commits), failures


def _commits_by_the_server(e: Evidence, seen: set[str]) -> list[str]:
    """Each COMMIT was written once, and the eyewitness saw each."""
    made = Counter(w.key for w in e.writes if w.makes_object and w.key.startswith(COMMITS))
    failures = [
        f"{key} was written {count} times, says the server" for key, count in made.items() if count > 1
    ]
    failures += [f"{key} was written and never seen" for key in made if key not in seen]
    return failures + [
        f"{key} was seen, and the server wrote no such thing" for key in seen if key not in made
    ]


def one_save_per_commit(e: Evidence) -> Outcome:
    """P4: all files of a ZeRO COMMIT are of one recorded save, and none of that save is missing."""
    commits = zero_commits(e)
    return len(commits), [f"{c.key} mixes saves or lacks files" for c in commits if e.save_of(c) is None]


def latest_names_the_committed(e: Evidence) -> Outcome:
    """P6: the remote's `latest` and `latest_universal` named committed ones whenever we looked."""
    looks = e.looks("pointer")
    failures = [f"{x['name']} named {x['value']} without a COMMIT" for x in looks if not x["committed"]]
    return len(looks), failures + [f"the eyewitness saw nothing: {x['error']}" for x in e.looks("blind")]


def kill_lost_nothing(e: Evidence) -> Outcome:
    """P7: the checkpoint whose upload SIGKILL hit was committed afterwards."""
    kills = e.driver_lines("kill-daemon")
    failures = []
    for kill in kills:
        tag = kill["tag"]
        if any(c.tag == tag and c.created < kill["at"] for c in zero_commits(e)):
            failures.append(f"{tag} was committed before the kill: the kill hit no upload")
        if not any(c.tag == tag and c.created > kill["at"] for c in zero_commits(e)):
            failures.append(f"{tag} was never committed after the kill")
    return len(kills), failures


def outage_lost_nothing(e: Evidence) -> Outcome:
    """P7: while the remote was away nothing reached it, and what it interrupted was committed afterwards."""
    outages, failures = e.driver_lines("remote-away"), []
    for outage in outages:
        begin, end, tag = outage["begin"], outage["at"], outage["tag"]
        if any(begin < w.at < end for w in e.writes):
            failures.append("something was written while the remote was away: it was not away")
        if not any(c.tag == tag and c.created > end for c in zero_commits(e)):
            failures.append(f"{tag}, whose upload was interrupted, was not committed afterwards")
    return len(outages), failures


def parts_were_sent_once(e: Evidence) -> Outcome:
    """P7: after a kill or an outage, of each unfinished upload at most the parts in flight came twice."""
    checked, failures = 0, []
    breaks = [line["at"] for line in e.driver_lines("kill-daemon")]
    breaks += [line["begin"] for line in e.driver_lines("remote-away")]
    for at in breaks:
        for key, parts in _unfinished_at(e, at).items():
            checked += len(parts)
            again = parts & _parts_after(e, key, at)
            if len(again) > PARTS_IN_FLIGHT:
                failures.append(f"{key}: {len(again)} of {len(parts)} parts were sent again")
    return checked, failures


def _unfinished_at(e: Evidence, at: float) -> dict[str, set[int]]:
    """Key → parts that had arrived by then of objects that were not whole yet."""
    found: dict[str, set[int]] = {}
    for write in e.writes:
        if write.at > at:
            break
        if write.part is not None:
            found.setdefault(write.key, set()).add(write.part)
        elif "uploadId" in write.query:
            found.pop(write.key, None)
    return found


def _parts_after(e: Evidence, key: str, at: float) -> set[int]:
    """Parts of an object that came later, until it was whole."""
    found: set[int] = set()
    for write in e.writes:
        if write.key == key and write.at > at:
            if write.makes_object:
                break
            found |= {write.part} if write.part is not None else set()
    return found


def nothing_was_sent_twice(e: Evidence) -> Outcome:
    """P8: no committed object was written again.

    Directory: same inode, size and mtime now as when committed. Bucket: same ETag, size and time, and its
    server logged no write of that key after the COMMIT's.
    """
    checked, failures = 0, []
    for commit in e.commits:
        if commit.gone is not None:
            continue
        written = _written_after(e, commit)
        for key, (_, identity) in commit.objects.items():
            checked += 1
            if key in written or _identity_now(e, key) != identity:
                failures.append(f"{key} was written again after its COMMIT")
    return checked, failures


def _written_after(e: Evidence, commit: SeenCommit) -> set[str]:
    """Keys that the server wrote after it wrote this COMMIT, in the order of its log."""
    order = next((n for n, w in enumerate(e.writes) if w.makes_object and w.key == commit.key), None)
    return set() if order is None else {w.key for w in e.writes[order + 1 :] if w.makes_object}


def _identity_now(e: Evidence, key: str) -> list[object] | None:
    try:
        return e.remote.identity(key)
    except OSError:
        return None


def tombstone_precedes_removal(e: Evidence) -> Outcome:
    """§5: before a COMMIT of the remote goes, its tombstone is there, and audit.jsonl has a 'retire'."""
    stones = {x["key"].rsplit("/", 1)[-1]: x["created"] for x in e.looks("seen") if "/retired/" in x["key"]}
    gone = [c for c in e.commits if c.gone is not None]
    failures = []
    for commit in gone:
        name = commit.key.rsplit("/", 1)[-1]
        if commit.gone is not None and stones.get(name, float("inf")) > commit.gone:
            failures.append(f"{commit.key} went without a tombstone")
        if not any(a.action == "retire" and a.tag == commit.tag for a in e.audit):
            failures.append(f"{commit.key} went without a 'retire' in audit.jsonl")
    return len(gone), failures


def everything_came_through(e: Evidence) -> Outcome:
    """Every save of the resumed run is committed at the end, and at least eight saves were made in all."""
    saves = [s for s in e.saves if s.run == "resumed"]
    committed = {id(s) for c in zero_commits(e) if (s := e.save_of(c)) is not None}
    failures = [f"{s.tag} of the resumed run was never committed" for s in saves if id(s) not in committed]
    if len(e.saves) < 8:
        failures.append(f"only {len(e.saves)} saves were made")
    return len(saves), failures
