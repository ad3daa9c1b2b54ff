"""`python -m ckptd.conversion.engine.inspect_child`: reads a batch of files, prints one JSON line per finding
(P14).

Request on stdin: {"folder", "files": [{"path", "expected", "facts", "identity"}]}. For each file a line with
framing and fingerprints, then, for shards, a line with facts: so a pickle that kills this process costs
only its own facts. Nothing of the checkpoint's code runs; nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from ckptd.base import files
from ckptd.conversion.engine.sandbox import restrict
from ckptd.conversion.engine.user_manifest import listed_files
from ckptd.core.model.metrics import finite, logged_name
from ckptd.errors import CkptdError, RefusedError, TornArchiveError
from ckptd.formats.torchfile.archive import DEFAULT_LIMITS, Directory, Framing, frame
from ckptd.formats.torchfile.fingerprint import fingerprint, has_crc, tensor_fingerprint
from ckptd.formats.torchfile.legacy import read_archive
from ckptd.formats.torchfile.sharded import named_parts, torn_safetensors
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.zero.facts import shard_facts

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 3600
_ALIVE_SECONDS = 5.0
_TORN = {"final": True, "bytes": 0, "archive": "torn", "fingerprint": ""}
"""Takes back what was said on the way: what has a fingerprint was read, and is not read again."""

_TRAINER_STATE_LIMIT_BYTES = 64 << 20
_MANIFEST_LIMIT_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_MOST_METRICS, _NAME_LETTERS = 256, 100


def main() -> None:
    """Serve one request."""
    held = restrict(memory_bytes=MEMORY_BYTES, cpu_seconds=CPU_SECONDS, file_bytes=0)
    request = json.loads(sys.stdin.buffer.read())
    _emit({"restrictions": list(held)})
    if not request["files"]:
        return
    with files.opened_dir(request["folder"]) as dir_fd:
        for index, item in enumerate(request["files"]):
            _emit({"index": index, **_inspect(dir_fd, index, item)})


def _emit(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class _Alive:
    """Print a sign of life now and then: a shard without CRCs is read whole, for longer than a child may be
    silent."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._said_at >= _ALIVE_SECONDS:
            self._said_at = time.monotonic()
            _emit({"alive": True})


def _inspect(dir_fd: int, index: int, item: dict[str, Any]) -> dict[str, Any]:
    """Everything about one file; the lines that come before the last are emitted on the way."""
    path = item["path"]
    try:
        with files.reading(dir_fd, path) as fd:
            before = os.fstat(fd)
            if item.get("identity") not in (None, _identity(before)):
                return {"final": True, "bytes": 0, "is_another": True}
            if item["expected"] and frame(fd, expected=True) is Framing.LEGACY:
                # its records are found by running its pickle: first what is known without
                _emit({"index": index, "bytes": before.st_size, **_unread_legacy(fd)})
            is_torch_file = bool(item.get("torch_file"))
            found = _framing(fd, path, expected=item["expected"], is_torch_file=is_torch_file)
            directory = found.pop("directory", None)
            if directory is not None and item["facts"]:
                _emit({"index": index, "bytes": before.st_size, **found})
                found.update(_facts(fd, path, directory))
            if item.get("parts"):
                found.update(_parts(fd, path, before.st_size))
            if item.get("manifest"):
                found.update(_manifest(dir_fd, fd, path, before.st_size))
            if path.endswith(".safetensors") and (torn := torn_safetensors(fd, before.st_size)):
                found["reason"] = f"{path} {torn}"
            if item.get("trainer"):
                found.update(_trainer_state(fd, before.st_size))
            after = os.fstat(fd)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                found = {**_TORN, "reason": f"{path} changed while it was read"}
            return {"final": True, **found, "bytes": before.st_size}
    except CkptdError as error:
        return {**_TORN, "reason": error.message}
    except OSError as error:
        return {**_TORN, "reason": f"{path} cannot be read ({error.strerror})", "is_unread": True}


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _parts(fd: int, path: str, size_bytes: int) -> dict[str, Any]:
    """Read which files a `.metadata` names, or why it cannot be read."""
    if size_bytes > DEFAULT_LIMITS.pickle_bytes:
        return {"reason": f"{path} is larger than a .metadata may be"}
    try:
        return {"parts": named_parts(os.pread(fd, size_bytes, 0), path)}
    except (CkptdError, MemoryError) as error:
        return {"reason": error.message if isinstance(error, CkptdError) else f"{path} needs too much memory"}


def _manifest(dir_fd: int, fd: int, path: str, size_bytes: int) -> dict[str, Any]:
    """Read which files a declared manifest lists, and compare those of which it says a SHA-256."""
    if size_bytes > _MANIFEST_LIMIT_BYTES:
        return {"reason": f"{path} is larger than a manifest may be"}
    try:
        rows = listed_files(os.pread(fd, size_bytes, 0), path)
    except TornArchiveError as error:
        return {"reason": error.message}
    alive = _Alive()
    for row in rows:
        if row.sha256 and _sha256_of(dir_fd, row.name, alive) not in (None, row.sha256):
            return {"reason": f"{row.name} has another SHA-256 than {path} says"}
    return {"parts": [(row.name, -1 if row.size_bytes is None else row.size_bytes) for row in rows]}


def _sha256_of(dir_fd: int, name: str, alive: _Alive) -> str | None:
    """Return the SHA-256 of a file, in hexadecimal; None: it is not there."""
    try:
        with files.reading(dir_fd, name) as fd:
            digest, offset = hashlib.sha256(), 0
            while data := os.pread(fd, _READ_BYTES, offset):
                digest.update(data)
                offset += len(data)
                alive()
            return digest.hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _trainer_state(fd: int, size_bytes: int) -> dict[str, Any]:
    """The few values of trainer_state.json that a verdict needs; nothing when it is no whole JSON yet."""
    if size_bytes > _TRAINER_STATE_LIMIT_BYTES:
        return {}
    try:
        state = json.loads(os.pread(fd, size_bytes, 0))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    step, metric, best = (state.get(k) for k in ("global_step", "best_metric", "best_model_checkpoint"))
    return {
        "trainer": {
            "global_step": step if type(step) is int else None,
            "best_metric": finite(metric),
            "best_checkpoint": os.path.basename(best.rstrip("/")) if isinstance(best, str) else None,
            "metrics": _metrics_at(step, state.get("log_history")),
        }
    }


def _metrics_at(step: object, history: object) -> list[tuple[str, float]]:
    """Finite numbers that were logged at this very step, the last of each name.

    A training loss is left out once the evaluation's was logged at any step: it is not comparable with it.
    """
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    found: dict[str, float] = {}
    for entry in entries:
        if type(step) is not int or entry.get("step") != step:
            continue
        for name, value in entry.items():
            number = finite(value)
            if number is not None and len(name) <= _NAME_LETTERS:
                found[name] = number
    evaluated = {name for entry in entries for name in entry}
    return sorted((n, v) for n, v in found.items() if logged_name(n) not in evaluated)[:_MOST_METRICS]


def _framing(fd: int, path: str, *, expected: bool, is_torch_file: bool = False) -> dict[str, Any]:
    framing = frame(fd, expected=expected)
    directory: Directory | None = None
    reason: str | None = None
    if framing is Framing.ZIP or (framing is Framing.LEGACY and expected):
        try:
            directory = read_archive(fd, path)
        except TornArchiveError as error:
            # what merely starts with "PK" was never promised to be a torch archive (parts of torch are many)
            framing = Framing.TORN if expected else Framing.OTHER
            reason = error.message if expected or is_torch_file else None
        except RefusedError as error:
            framing = framing if framing is Framing.LEGACY else Framing.OTHER
            reason = error.message if expected else None
    elif framing is Framing.EMPTY and expected:
        reason = f"{path} is empty"
    elif framing is Framing.TORN:
        reason = f"{path} is no torch.save archive"
    found: dict[str, Any] = {"archive": framing.value, "reason": reason, "directory": directory}
    whole = framing is not Framing.TORN and framing is not Framing.EMPTY
    alive = _Alive()
    found["fingerprint"] = fingerprint(fd, directory, alive) if whole else ""
    if directory is not None:
        found["has_crc"] = has_crc(directory)
        found["tensor_fingerprint"] = tensor_fingerprint(fd, directory)
    return found


def _unread_legacy(fd: int) -> dict[str, Any]:
    """Return the findings that remain if reading the pickle ends this process."""
    return {"archive": Framing.LEGACY.value, "fingerprint": fingerprint(fd, None)}


def _facts(fd: int, path: str, directory: Directory) -> dict[str, Any]:
    """Facts, or the reason why the pickle could not be read."""
    try:
        record = directory.records["data.pkl"]
        data = os.pread(fd, record.size, record.offset)
        return {"facts": asdict(shard_facts(unpickle(data, path, directory), fd))}
    except (CkptdError, MemoryError) as error:
        reason = error.message if isinstance(error, CkptdError) else f"{path} needs too much memory to read"
        return {"reason": reason}


if __name__ == "__main__":
    main()
