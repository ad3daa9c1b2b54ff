"""A small made-up quickstart directory in which every promise holds, for the judge's tests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TAGS = [f"global_step{n}" for n in range(1, 11)]
TORN = "global_step9"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content(tag: str, rank: int) -> bytes:
    return f"{tag} shard {rank}".encode() * 10


@dataclass
class Story:
    """Written by `write`; tests change the parts before or the files after."""

    root: Path
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    audit: list[dict[str, Any]] = field(default_factory=list)
    commits: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Tag/form → (key, SHA-256)."""
    server: list[dict[str, Any]] = field(default_factory=list)
    """The log of the server, where the remote is a bucket."""

    def line(self, name: str, at: float, kind: str, **rest: Any) -> None:
        self.records.setdefault(name, []).append({"at": at, "kind": kind, **rest})

    def put(self, relative: str, data: bytes) -> Path:
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def save(self, run: str, tag: str, at: float) -> None:
        files = [[f"rank{r}.pt", len(content(tag, r)), sha(content(tag, r))] for r in range(2)]
        step = int(tag.removeprefix("global_step"))
        self.line(f"train-{run}", at, "saved", step=step, tag=tag, files=files, beside=[])

    def commit(self, tag: str, at: float, form: str = "zero") -> None:
        folder = tag if form == "zero" else f"{tag}_{form}"
        files = []
        objects = []
        for rank in range(2):
            key = f"{folder}/rank{rank}.pt"
            path = self.put(f"nas/gpt/{key}", content(tag, rank))
            status = path.stat()
            files.append({"path": f"rank{rank}.pt", "key": key, "bytes": status.st_size, "role": "optim"})
            identity = [status.st_ino, status.st_size, status.st_mtime_ns]
            objects.append({"key": key, "sha256": sha(content(tag, rank)), "identity": identity})
        manifest = json.dumps({"files": files}).encode()
        manifest_key = f"_ckptd/nodes/{tag}~g1~{form}/node~{sha(manifest)[:12]}.json"
        document = {
            "tag": tag,
            "form": form,
            "folder": folder,
            "step": int(tag.removeprefix("global_step")),
            "manifests": [{"key": manifest_key, "sha256": sha(manifest)}],
        }
        data = json.dumps(document).encode()
        key = f"_ckptd/commits/{tag}~g1~{form}.json"
        self.put(f"observed/commits/{sha(data)}.json", data)
        self.put(f"observed/manifests/{sha(manifest)}.json", manifest)
        self.log.append({"at": at + 0.03, "kind": "seen", "key": key, "sha256": sha(data), "created": at})
        self.log.append(
            {"at": at, "kind": "manifest", "commit": sha(data), "key": manifest_key, "sha256": sha(manifest)}
        )
        self.log += [{"at": at, "kind": "object", "commit": sha(data), **o} for o in objects]
        self.commits[f"{tag}/{form}"] = (key, sha(data))

    def remove(self, action: str, tag: str, at: float, form: str = "zero") -> None:
        files = [[f"rank{r}.pt", len(content(tag, r))] for r in range(2)]
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")
        self.audit.append(
            {
                "at": stamp,
                "action": action,
                "tag": tag,
                "generation": 1,
                "form": form,
                "reason": "not kept",
                "commits": [list(self.commits[f"{tag}/{form}"])],
                "files": files,
            }
        )

    def write(self) -> Path:
        if self.server:
            self.put("records/server.jsonl", _jsonl(self.server))
        for name, lines in self.records.items():
            self.put(f"records/{name}.jsonl", _jsonl(lines))
        self.put("observed/log.jsonl", _jsonl(self.log))
        self.put("audit/1.jsonl", _jsonl(self.audit))
        return self.root


def _jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def story(root: Path) -> Story:
    """Saves 1-8, torn 9, resume from 8, saves 9 and 10; 1-3 pruned, 1 retired on the NAS."""
    s = Story(root)
    for run, ranks, first in (("first", 2, 0), ("resumed", 4, 8), ("reference", 2, 0)):
        s.line(f"train-{run}", 100.0, "start", world_size=ranks, first_step=first)
    for number, tag in enumerate(TAGS, start=1):
        run = "first" if number <= 8 else "resumed"
        at = 100.0 + 10 * number + (50 if number > 8 else 0)
        for who in (run, "reference"):
            s.line(f"train-{who}", at, "step", step=number, loss=5.0 - number / 100)
        s.save(run, tag, at)
        s.commit(tag, at + 4)
        s.log.append({"at": at + 4.1, "kind": "pointer", "name": "latest", "value": tag, "committed": True})
    s.commit(TAGS[-1], 260.0, "universal")
    for number in (1, 2, 3):
        tag, at = TAGS[number - 1], 100.0 + 10 * (number + 2) + 6
        s.remove("prune", tag, at)
        s.log.append({"at": at - 0.1, "kind": "vanished", "place": "save", "name": tag})
    _retire(s, TAGS[0], 170.0)
    s.line("driver", 123.0, "kill-daemon", tag=TAGS[1], part_bytes=10)
    s.line("driver", 200.0, "kill-trainer", tag=TORN)
    s.line("driver", 202.0, "wipe", begin=201.0)
    s.line("driver", 205.0, "resume", begin=203.0, exit_code=0, printed=TAGS[7])
    s.line("driver", 206.0, "memory", bytes=1000)
    s.put("nvme/gpt/_ckptd/aside/global_step9.1/rank0.pt", b"torn")
    s.put("nvme/gpt/latest", b"global_step10")
    for tag in TAGS[-2:]:
        for rank in range(2):
            s.put(f"nvme/gpt/{tag}/rank{rank}.pt", content(tag, rank))
    plan = {
        "save_dir": "nvme/gpt",
        "remote": {
            "kind": "directory",
            "place": "the NAS",
            "where": "on the NAS",
            "address": "nas/gpt",
        },
        "save_total_limit": 2,
        "memory_budget_bytes": 4000,
        "tolerance": 1e-3,
        "last_step": 10,
        "torn_tag": TORN,
        "torn_files": [["rank0.pt", 4, sha(b"torn")]],
    }
    s.put("plan.json", json.dumps(plan).encode())
    return s


def _retire(s: Story, tag: str, at: float) -> None:
    key, digest = s.commits[f"{tag}/zero"]
    stone = key.replace("/commits/", "/retired/")
    s.log.append({"at": at - 1, "kind": "seen", "key": stone, "sha256": "0", "created": at - 1.1})
    s.log.append({"at": at, "kind": "gone", "key": key, "sha256": digest})
    s.remove("retire", tag, at)
    for rank in range(2):
        (s.root / f"nas/gpt/{tag}/rank{rank}.pt").unlink()


BUCKET = "/training/gpt"


def bucket_story(root: Path) -> Story:
    """The same, kept from a bucket: its server's log, its objects as files, a kill and an outage."""
    s = story(root)
    plan = json.loads((root / "plan.json").read_text())
    plan["remote"] = {
        "kind": "s3",
        "place": "the bucket",
        "where": "in the bucket",
        "address": f"http://127.0.0.1:1{BUCKET}",
    }
    s.put("plan.json", json.dumps(plan).encode())
    (root / "bucket").mkdir()
    (root / "nas/gpt").rename(root / "bucket/objects")
    objects = root / "bucket/objects"
    listing = {str(p.relative_to(objects)): _etag(p.read_bytes()) for p in objects.rglob("*") if p.is_file()}
    s.put("bucket/listing.json", json.dumps(listing).encode())
    for line in s.log:
        if line["kind"] == "object":
            line["identity"] = _etag(
                content(line["key"].split("/")[0].removesuffix("_universal"), _rank(line))
            )
    for line in sorted(s.log, key=lambda line: float(line["at"])):
        _told_by_the_server(s, line)
    s.server.sort(key=lambda line: float(line["at"]))
    s.line("driver", 243.3, "remote-away", begin=242.5, tag=TAGS[8])
    return s


def _rank(line: dict[str, Any]) -> int:
    return int(line["key"][-4])


def _etag(data: bytes) -> list[Any]:
    return [hashlib.md5(data).hexdigest(), len(data), 0]


def server_line(at: float, method: str, key: str, **query: str) -> dict[str, Any]:
    """One write as the server logs it."""
    path = f"{BUCKET}/{key}"
    return {
        "begin": at - 0.01,
        "at": at,
        "method": method,
        "path": path,
        "status": 200,
        "bytes": 1,
        "query": query,
    }


def _told_by_the_server(s: Story, line: dict[str, Any]) -> None:
    if line["kind"] == "seen":
        s.server.append(server_line(line["created"], "PUT", line["key"]))
    elif line["kind"] == "gone":
        s.server.append(server_line(line["at"] - 0.1, "DELETE", line["key"]))
    elif line["kind"] == "object":
        # the kill (of TAGS[1]) and the outage (of TAGS[8]) fall between the two parts
        at = line["at"]
        s.server.append(server_line(at - 3.0, "POST", line["key"], uploads=""))
        s.server.append(server_line(at - 2.0, "PUT", line["key"], partNumber="1", uploadId="u"))
        s.server.append(server_line(at - 0.6, "PUT", line["key"], partNumber="2", uploadId="u"))
        s.server.append(server_line(at - 0.5, "POST", line["key"], uploadId="u"))
