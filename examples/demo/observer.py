"""An eyewitness: looks at the remote and at save_dir every 50 ms and writes down what was there when.

It exists so that the judge need not believe ckptd: it imports nothing of it, copies every COMMIT and node
manifest on first sight, hashes every object a COMMIT lists, and notes what appears and what goes. At a
bucket it looks four times a second; its server's log tells the moments (evidence.py).

    python -m examples.demo.observer --remote DIR|http://HOST:PORT/BUCKET/PREFIX --save-dir DIR --out DIR
                                                                                    (ends at SIGTERM)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.remote_view import view_of

if TYPE_CHECKING:
    from examples.demo.remote_view import Entry, Identity, RemoteView

POLL_SECONDS = 0.05
COMMITS, RETIRED = "_ckptd/commits", "_ckptd/retired"
POINTERS = ("latest", "latest_universal")


def sha256_of(data: bytes) -> str:
    """SHA-256, hex."""
    return hashlib.sha256(data).hexdigest()


class Log:
    """Append-only JSON lines, shared by two threads; `at` is unix time in seconds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def write(self, kind: str, *, at: float | None = None, **fields: Any) -> None:
        """One line."""
        line = json.dumps({"at": time.time() if at is None else at, "kind": kind, **fields})
        with self._lock:
            self._file.write(line + "\n")


class Hasher(threading.Thread):
    """Reads what a COMMIT lists, as soon as it was seen."""

    def __init__(self, remote: RemoteView, out: Path, log: Log) -> None:
        super().__init__(daemon=True)
        self._remote, self._out, self._log = remote, out, log
        self._work: queue.Queue[tuple[str, bytes] | None] = queue.Queue()

    def add(self, commit_sha256: str, data: bytes) -> None:
        """Have the objects of this COMMIT hashed."""
        self._work.put((commit_sha256, data))

    def finish(self) -> None:
        """Wait until everything added was hashed."""
        self._work.put(None)
        self.join()

    def run(self) -> None:
        """Until `finish`."""
        while (item := self._work.get()) is not None:
            commit_sha256, data = item
            for reference in json.loads(data)["manifests"]:
                self._manifest(commit_sha256, reference["key"])

    def _manifest(self, commit_sha256: str, key: str) -> None:
        try:
            data = self._remote.read(key)
        except OSError as error:
            self._log.write("manifest-missing", commit=commit_sha256, key=key, error=str(error))
            return
        digest = sha256_of(data)
        (self._out / "manifests" / f"{digest}.json").write_bytes(data)
        self._log.write("manifest", commit=commit_sha256, key=key, sha256=digest)
        for entry in json.loads(data)["files"]:
            self._object(commit_sha256, entry["key"])

    def _object(self, commit_sha256: str, key: str) -> None:
        try:
            digest, identity = self._remote.sha256(key)
        except OSError as error:
            self._log.write("object-missing", commit=commit_sha256, key=key, error=str(error))
            return
        self._log.write("object", commit=commit_sha256, key=key, sha256=digest, identity=identity)


class Observer:
    """What was there at the last look, and the differences as lines."""

    def __init__(self, remote: RemoteView, save_dir: Path, out: Path) -> None:
        for name in ("commits", "manifests"):
            (out / name).mkdir(parents=True, exist_ok=True)
        self._remote, self._save_dir, self._out = remote, save_dir, out
        self._log = Log(out / "log.jsonl")
        self._hasher = Hasher(remote, out, self._log)
        self._hasher.start()
        self._documents: dict[str, tuple[Identity, str]] = {}
        self._pointers: dict[str, str | None] = dict.fromkeys(POINTERS)
        self._folders: dict[str, frozenset[str]] = {}
        self._folder_cache: dict[str, str | None] = {}
        self._longest_gap_seconds = 0.0

    def watch(self, stop: threading.Event) -> None:
        """Look until `stop`, then once more, and close the account."""
        last = next_remote = time.monotonic()
        while not stop.is_set():
            if time.monotonic() >= next_remote:
                next_remote = time.monotonic() + self._remote.poll_seconds
                self._look_at_remote()
            self._look_at_node()
            stop.wait(POLL_SECONDS)
            now = time.monotonic()
            self._longest_gap_seconds = max(self._longest_gap_seconds, now - last)
            last = now
        self.look()
        self._hasher.finish()
        self._log.write("end", longest_gap_seconds=round(self._longest_gap_seconds, 3))

    def look(self) -> None:
        """One round."""
        self._look_at_remote()
        self._look_at_node()

    def _look_at_remote(self) -> None:
        try:
            before = {name: self._pointer(name) for name in POINTERS}
            self._commits_and_tombstones()
            for name in POINTERS:
                self._judge_pointer(name, before[name], self._pointer(name))
        except OSError as error:
            self._log.write("blind", error=str(error))

    def _look_at_node(self) -> None:
        self._local("save", self._save_dir)
        for name in ("derived/universal", "aside", "trash", "hold"):
            self._local(name, self._save_dir / "_ckptd" / name)

    def _commits_and_tombstones(self) -> None:
        present: dict[str, Entry] = {}
        for folder in (COMMITS, RETIRED):
            for name, entry in self._remote.entries(folder).items():
                if name.endswith(".json"):
                    present[f"{folder}/{name}"] = entry
        for key, entry in sorted(present.items()):
            self._document(key, entry)
        for key in sorted(set(self._documents) - set(present)):
            self._log.write("gone", key=key, sha256=self._documents.pop(key)[1])

    def _document(self, key: str, entry: Entry) -> None:
        if key in self._documents and self._documents[key][0] == entry.identity:
            return
        try:
            data = self._remote.read(key)
            json.loads(data)
        except (FileNotFoundError, ValueError):
            return  # being written, or gone again: the next look tells
        digest = sha256_of(data)
        self._documents[key] = (entry.identity, digest)
        self._log.write("seen", key=key, sha256=digest, created=entry.created or time.time())
        if key.startswith(COMMITS):
            (self._out / "commits" / f"{digest}.json").write_bytes(data)
            self._hasher.add(digest, data)

    def _pointer(self, name: str) -> str | None:
        try:
            return self._remote.read(name).decode().strip()
        except FileNotFoundError:
            return None

    def _judge_pointer(self, name: str, before: str | None, after: str | None) -> None:
        if before != after or after is None:
            return  # it moved during this look
        committed = after in {self._folder_of(digest) for _, digest in self._documents.values()}
        if after != self._pointers[name] or not committed:
            self._pointers[name] = after
            self._log.write("pointer", name=name, value=after, committed=committed)

    def _folder_of(self, digest: str) -> str | None:
        if digest not in self._folder_cache:
            try:
                data = json.loads((self._out / "commits" / f"{digest}.json").read_bytes())
            except OSError:
                data = {}
            self._folder_cache[digest] = data.get("folder")
        return self._folder_cache[digest]

    def _local(self, place: str, folder: Path) -> None:
        now = frozenset(n for n in _names(folder) if place != "save" or (folder / n).is_dir())
        was = self._folders.get(place, frozenset())
        for name in sorted(now - was):
            self._log.write("appeared", place=place, name=name)
        for name in sorted(was - now):
            self._log.write("vanished", place=place, name=name)
        self._folders[place] = now


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def main() -> None:
    """Watch until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remote", required=True)
    for option in ("--save-dir", "--out"):
        parser.add_argument(option, type=Path, required=True)
    a = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    Observer(view_of(a.remote), a.save_dir, a.out).watch(stop)


if __name__ == "__main__":
    main()
