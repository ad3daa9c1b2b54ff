"""What the judge reads: records of the trainer, the observer's log, audit.jsonl, all as plain facts.

Nothing of ckptd is imported here: the files are read as the JSON that they are, bytes are hashed anew. Of a
bucket there is one more witness, its server's log of writes: it tells when a COMMIT came and went to the
moment, and shows writes that were over before anybody looked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from examples.demo.remote_view import COPY, CopyView, Identity, view_of

if TYPE_CHECKING:
    from examples.demo.remote_view import RemoteView

COMMITS = "_ckptd/commits/"
BUCKET = "s3"
"""The kind of remote whose server tells what was written."""

FileSet = dict[str, tuple[int, str]]
"""Relative name → (bytes, SHA-256)."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save_checkpoint as the trainer recorded it."""

    run: str
    tag: str
    step: int
    at: float
    files: FileSet
    beside: FileSet
    """Regular files directly in save_dir at that time."""


@dataclass(slots=True)
class SeenCommit:
    """A COMMIT as the observer saw it; times are unix seconds."""

    key: str
    sha256: str
    document: dict[str, Any]
    created: float
    """The earlier of the file's ctime and the first look."""
    gone: float | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    """`files` of its manifests."""
    manifest_problems: list[str] = field(default_factory=list)
    objects: dict[str, tuple[str, Identity]] = field(default_factory=dict)
    """Object key → (SHA-256, identity) as read right after the COMMIT appeared."""

    @property
    def form(self) -> str:
        """zero, universal, …"""
        return str(self.document["form"])

    @property
    def tag(self) -> str:
        """Tag."""
        return str(self.document["tag"])

    @property
    def step(self) -> int:
        """Optimizer step."""
        return int(self.document["step"])

    def existed_at(self, at: float) -> bool:
        """Whether it was there at that moment."""
        return self.created <= at and (self.gone is None or at <= self.gone)


@dataclass(frozen=True, slots=True)
class Write:
    """One request that changed a bucket, as its server logged it once it had taken effect."""

    begin: float
    at: float
    method: str
    key: str
    """Relative to the remote's root."""
    query: dict[str, str]

    @property
    def part(self) -> int | None:
        """Number of the part that it sent."""
        number = self.query.get("partNumber")
        return int(number) if number is not None and self.method == "PUT" else None

    @property
    def makes_object(self) -> bool:
        """A whole object came to be."""
        return (self.method == "PUT" and self.part is None) or (
            self.method == "POST" and "uploadId" in self.query
        )

    @property
    def removes_object(self) -> bool:
        """An object went."""
        return self.method == "DELETE" and "uploadId" not in self.query


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of audit.jsonl."""

    at: float
    action: str
    tag: str
    form: str
    reason: str
    commits: tuple[tuple[str, str], ...]
    """(key, SHA-256)."""
    files: tuple[tuple[str, int], ...]
    """(path, bytes)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything there is to judge."""

    root: Path
    plan: dict[str, Any]
    saves: tuple[Save, ...]
    losses: dict[str, dict[int, float]]
    """Run → step → loss."""
    starts: dict[str, dict[str, Any]]
    commits: tuple[SeenCommit, ...]
    observed: tuple[dict[str, Any], ...]
    audit: tuple[AuditLine, ...]
    driver: tuple[dict[str, Any], ...]
    steps: tuple[float, ...]
    """When each training step of the two runs that were saved ended."""
    remote: RemoteView
    writes: tuple[Write, ...]
    """Of a bucket: in the order in which they took effect."""

    @property
    def is_bucket(self) -> bool:
        """Whether the remote's server told of every write."""
        return bool(self.plan["remote"]["kind"] == BUCKET)

    @property
    def place(self) -> str:
        """What to call the remote: "the NAS", "the bucket"."""
        return str(self.plan["remote"]["place"])

    @property
    def where(self) -> str:
        """ "on the NAS", "in the bucket"."""
        return str(self.plan["remote"]["where"])

    @property
    def save_dir(self) -> Path:
        """The node's directory."""
        return self.root / str(self.plan["save_dir"])

    def driver_lines(self, kind: str) -> list[dict[str, Any]]:
        """What the quickstart did itself."""
        return [line for line in self.driver if line["kind"] == kind]

    def looks(self, kind: str) -> list[dict[str, Any]]:
        """The observer's lines of one kind."""
        return [line for line in self.observed if line["kind"] == kind]

    def save_of(self, commit: SeenCommit) -> Save | None:
        """The one recorded save whose files are exactly the objects that a ZeRO COMMIT lists."""
        shipped = shards_of(commit)
        return next((s for s in self.saves if s.tag == commit.tag and s.files == shipped), None)


def commit_of(e: Evidence, save: Save, form: str = "zero") -> SeenCommit | None:
    """The COMMIT of this very save; of a derived form, the first one in the tag's life after it."""
    if form == "zero":
        return next((c for c in zero_commits(e) if e.save_of(c) is save), None)
    zero = commit_of(e, save)
    named = (c for c in e.commits if c.form == form and c.tag == save.tag)
    return next((c for c in named if zero is not None and c.created >= zero.created), None)


def life_of(e: Evidence, save: Save) -> tuple[float, float]:
    """From when to when a tag on the node meant this save: until saved again, or the node was lost."""
    ends = [s.at for s in e.saves if s.tag == save.tag and s.at > save.at]
    ends += [line["begin"] for line in e.driver_lines("wipe") if line["begin"] > save.at]
    return save.at - 1.0, min(ends, default=float("inf"))


def shards_of(commit: SeenCommit) -> FileSet:
    """The files of the checkpoint folder itself, with the SHA-256 that the observer found in the remote."""
    found: FileSet = {}
    for entry in commit.entries:
        if entry["role"] != "extra":
            digest = commit.objects.get(entry["key"], ("not found", []))[0]
            found[str(entry["path"])] = (int(entry["bytes"]), digest)
    return found


def zero_commits(e: Evidence) -> list[SeenCommit]:
    """The COMMITs of the trainer's own form."""
    return [c for c in e.commits if c.form == "zero"]


def step_of(tag: str) -> int:
    """The step in a tag of this trainer."""
    return int(tag.removeprefix("global_step"))


def folder_files(folder: Path) -> FileSet:
    """Every file below `folder`, hashed."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, sha256_of_file(p))
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def sha256_of_file(path: Path) -> str:
    """SHA-256, hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; none when it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]


def load(root: Path) -> Evidence:
    """Read a quickstart's directory."""
    records, observed = root / "records", root / "observed"
    saves: list[Save] = []
    losses: dict[str, dict[int, float]] = {}
    starts: dict[str, dict[str, Any]] = {}
    steps: list[float] = []
    for path in sorted(records.glob("train-*.jsonl")):
        run = path.stem.removeprefix("train-")
        for line in read_lines(path):
            if line["kind"] == "saved":
                saves.append(_save(run, line))
            elif line["kind"] == "step":
                losses.setdefault(run, {})[line["step"]] = line["loss"]
                steps += [line["at"]] if run != "reference" else []
            elif line["kind"] == "start":
                starts[run] = line
    plan = json.loads((root / "plan.json").read_text())
    writes = [w for line in read_lines(records / "server.jsonl") if (w := _write(line, plan)) is not None]
    log = [_dated(line, writes) for line in read_lines(observed / "log.jsonl")]
    audit = [_audit(line) for path in sorted((root / "audit").glob("*.jsonl")) for line in read_lines(path)]
    return Evidence(
        root=root,
        plan=plan,
        saves=tuple(saves),
        losses=losses,
        starts=starts,
        commits=tuple(_commits(observed, log)),
        observed=tuple(log),
        audit=tuple(sorted(audit, key=lambda line: line.at)),
        driver=tuple(read_lines(records / "driver.jsonl")),
        steps=tuple(steps),
        remote=_remote(root, plan["remote"]["address"]),
        writes=tuple(writes),
    )


def _save(run: str, line: dict[str, Any]) -> Save:
    files = {name: (size, digest) for name, size, digest in line["files"]}
    beside = {name: (size, digest) for name, size, digest in line["beside"]}
    return Save(run, line["tag"], line["step"], line["at"], files, beside)


def _remote(root: Path, address: str) -> RemoteView:
    """The remote itself, or the copy of a bucket whose server has ended."""
    if (root / COPY).is_dir():
        return CopyView(root / COPY)
    return view_of(address if address.startswith("http://") else str(root / address))


def _write(line: dict[str, Any], plan: dict[str, Any]) -> Write | None:
    """A line of the server's log that changed an object of this remote."""
    root = f"{urlsplit(plan['remote']['address']).path}/"
    changed = 200 <= line["status"] < 300 and line["path"].startswith(root)
    if not changed:
        return None
    return Write(
        begin=line["begin"],
        at=line["at"],
        method=line["method"],
        key=line["path"].removeprefix(root),
        query=line["query"],
    )


def _dated(look: dict[str, Any], writes: list[Write]) -> dict[str, Any]:
    """A look with the moment at which the server did what was seen, where a server told."""
    if look["kind"] not in ("seen", "gone"):
        return look
    mine = [w for w in writes if w.key == look["key"] and w.at <= look["at"]]
    if look["kind"] == "seen":
        made = [w.at for w in mine if w.makes_object]
        return look | {"created": made[-1]} if made else look
    removed = [w.begin for w in mine if w.removes_object]
    return look | {"at": removed[-1]} if removed else look


def _audit(line: dict[str, Any]) -> AuditLine:
    return AuditLine(
        at=datetime.fromisoformat(line["at"]).timestamp(),
        action=line["action"],
        tag=line["tag"],
        form=line["form"],
        reason=line["reason"],
        commits=tuple((key, digest) for key, digest in line["commits"]),
        files=tuple((path, size) for path, size in line["files"]),
    )


def _commits(observed: Path, log: list[dict[str, Any]]) -> list[SeenCommit]:
    found: dict[str, SeenCommit] = {}
    for line in log:
        if line["kind"] == "seen" and line["key"].startswith(COMMITS):
            document = json.loads((observed / "commits" / f"{line['sha256']}.json").read_bytes())
            created = min(line["created"], line["at"])
            found.setdefault(line["sha256"], SeenCommit(line["key"], line["sha256"], document, created))
        elif line["kind"] == "gone" and line["sha256"] in found:
            found[line["sha256"]].gone = line["at"]
        elif line["kind"] == "object":
            found[line["commit"]].objects[line["key"]] = (line["sha256"], line["identity"])
        elif line["kind"] == "manifest":
            _add_manifest(observed, found[line["commit"]], line)
    return list(found.values())


def _add_manifest(observed: Path, commit: SeenCommit, line: dict[str, Any]) -> None:
    quoted = {reference["key"]: reference["sha256"] for reference in commit.document["manifests"]}
    if quoted[line["key"]] != line["sha256"]:
        commit.manifest_problems.append(f"{line['key']} is not the manifest that {commit.key} quotes")
    document = json.loads((observed / "manifests" / f"{line['sha256']}.json").read_bytes())
    commit.entries += document["files"]
