"""Checks of what the NAS holds: bytes, COMMITs, pointers, retention, the kill in mid-upload (P2-P8).

Each takes the evidence and returns how many things it looked at and what it found broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.quickstart.evidence import sha256_of_file, zero_commits

if TYPE_CHECKING:
    from ckptd.quickstart.evidence import Evidence, SeenCommit

Outcome = tuple[int, list[str]]


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
        path = e.nas / key
        if not path.is_file():
            failures.append(f"{key}: missing on the NAS, and {commit.key} lists it")
        elif sha256_of_file(path) != expected:
            failures.append(f"{key}: other bytes than the trainer's on the NAS now")
    return failures


def derived_objects_stayed(e: Evidence) -> Outcome:
    """P2: every file of every derived COMMIT that still stands has the SHA-256 it had when committed."""
    checked, failures = 0, []
    for commit in e.commits:
        if commit.form == "zero" or commit.gone is not None:
            continue
        for entry in commit.entries:
            checked += 1
            known, path = commit.objects.get(entry["key"], ("",))[0], e.nas / entry["key"]
            if not known or not path.is_file() or sha256_of_file(path) != known:
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
    return len(e.commits), failures


def one_save_per_commit(e: Evidence) -> Outcome:
    """P4: all files of a ZeRO COMMIT are of one recorded save, and none of that save is missing."""
    commits = zero_commits(e)
    return len(commits), [f"{c.key} mixes saves or lacks files" for c in commits if e.save_of(c) is None]


def latest_names_the_committed(e: Evidence) -> Outcome:
    """P6: the NAS's `latest` and `latest_universal` named committed checkpoints whenever we looked."""
    looks = e.looks("pointer")
    return len(looks), [
        f"{x['name']} named {x['value']} without a COMMIT" for x in looks if not x["committed"]
    ]


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


def nothing_was_sent_twice(e: Evidence) -> Outcome:
    """P8: no committed object was written again: same inode, size and mtime now as when committed."""
    checked, failures = 0, []
    for commit in e.commits:
        if commit.gone is not None:
            continue
        for key, (_, identity) in commit.objects.items():
            checked += 1
            path = e.nas / key
            now = path.stat() if path.exists() else None
            if now is None or [now.st_ino, now.st_size, now.st_mtime_ns] != identity:
                failures.append(f"{key} was written again after its COMMIT")
    return checked, failures


def tombstone_precedes_removal(e: Evidence) -> Outcome:
    """§5: before a COMMIT of the NAS goes, its tombstone is there, and audit.jsonl has a 'retire'."""
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
