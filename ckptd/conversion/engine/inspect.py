"""Inspect files without reading a pickle in this process: batches go to a restricted child.

The daemon and `ckptd inspect` call `inspect_files`; a file that kills or stalls the child costs itself,
never the batch.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from ckptd.conversion.engine import children
from ckptd.core.model.facts import Archive, FileFacts
from ckptd.core.model.layouts import TORCH_FILES, TRAINER_STATE, NamedShard, Role, ShardKey, parse_shard_name
from ckptd.core.model.other_layouts import CKPT, LIGHTNING_META, METADATA
from ckptd.errors import SourceChanged, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckptd.base.identity import FileIdentity

BATCH_FILES = 256
MAX_DEATHS = 4
"""Children that a batch may lose before the rest is read without pickles, and again before it is not read."""
_NOT_READ = "not inspected: too many files of this folder ended the inspecting child"


def inspect_files(
    folder: Path,
    relative_paths: Sequence[str],
    *,
    identities: Mapping[str, FileIdentity] | None = None,
    manifest: str = "",
    timeout_seconds: float = 120.0,
    is_final: bool = True,
) -> list[FileFacts]:
    """Inspect files below `folder`; one `FileFacts` per path, in the order given.

    A child that dies or prints nothing for `timeout_seconds` yields `FileFacts` with a reason for the
    file it was reading, without a fingerprint if it died before that; the others are read by a new child.
    A file that the disk refuses to give is torn, with a reason. Unless `is_final` is False: a disk that
    refuses now may give it later, a child that the kernel killed for memory says nothing of its file.
    `identities`: which files are meant, by path (P4). `manifest`: the one that lists the others.

    Raises:
        SourceChanged: a path names another file than the one that is meant.
        StorageError: children cannot be started at all; or a file was not read, if that is not final.
    """
    found: list[FileFacts] = []
    asked = [
        _asked(path, (identities or {}).get(path), is_manifest=path == manifest) for path in relative_paths
    ]
    for start in range(0, len(asked), BATCH_FILES):
        batch = asked[start : start + BATCH_FILES]
        found += _inspect_batch(os.path.abspath(folder), batch, timeout_seconds, is_final=is_final)
    return found


def probe_restrictions() -> tuple[str, ...]:
    """Return which restrictions hold for children on this machine (for `ckptd check`)."""
    found: list[str] = []
    _hear({"folder": "/", "files": []}, 10.0, lambda line: found.extend(line.get("restrictions", ())))
    return tuple(found)


def _inspect_batch(
    folder: str, asked: list[dict[str, Any]], timeout_seconds: float, *, is_final: bool
) -> list[FileFacts]:
    paths: list[str] = [item["path"] for item in asked]
    results: list[FileFacts | None] = [None] * len(paths)
    partial: list[dict[str, Any]] = [{} for _ in paths]
    first, deaths = 0, 0
    while first < len(paths) and deaths < 2 * MAX_DEATHS:
        has_pickles = deaths < MAX_DEATHS
        rest = asked[first:] if has_pickles else [item | {"facts": False} for item in asked[first:]]
        request = {"folder": folder, "files": rest}
        started = False

        def heard(line: dict[str, Any], first: int = first, has_pickles: bool = has_pickles) -> None:
            nonlocal started
            started = started or "restrictions" in line
            if "index" not in line:
                return
            at = _place_of(line["index"], first, len(paths))
            partial[at].update(line)
            _raise_if_unread(line, paths[at], is_final=is_final)
            if line.get("final"):
                if asked[at]["facts"] and not has_pickles:
                    partial[at]["reason"] = partial[at].get("reason") or _NOT_READ
                results[at] = _facts_of(paths[at], partial[at])

        ended = _hear(request, timeout_seconds, heard)
        if not started:
            raise StorageError(f"the inspecting child does not start ({ended})")
        done = next((i for i in range(first, len(paths)) if results[i] is None), len(paths))
        if done < len(paths):
            deaths += 1
            reason = f"reading {paths[done]} ended the inspecting child ({ended})"
            if not is_final:
                hint = "it is read again; if it lasts, see to this node's memory and disk"
                raise StorageError(reason, hint=hint)
            results[done] = _facts_of(paths[done], {**partial[done], "reason": reason})
            done += 1
        first = done
    return [r or _facts_of(p, {"reason": _NOT_READ}) for r, p in zip(results, paths, strict=True)]


def _raise_if_unread(line: dict[str, Any], path: str, *, is_final: bool) -> None:
    """Raise if the child found another file than was listed, or could not read it now."""
    if line.get("is_another"):
        reason = f"{path} was replaced or written since it was listed"
        raise SourceChanged(reason, hint="the next turn looks again")
    if line.get("is_unread") and not is_final:
        raise StorageError(str(line.get("reason")), hint="it is read again; if it lasts, see to the disk")


def _place_of(index: object, first: int, end: int) -> int:
    """Return the file of the batch that a line is about.

    Raises:
        Garbled: none that was asked for.
    """
    if type(index) is not int or not 0 <= index < end - first:
        raise children.Garbled
    return first + index


def _hear(request: dict[str, Any], timeout_seconds: float, on_line: Callable[[dict[str, Any]], None]) -> str:
    """Have one child serve a request; returns how it ended. `on_line` may raise to end it."""
    child = children.start("inspect_child", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    watched = children.watch(
        child,
        json.dumps(request).encode(),
        on_line=on_line,
        should_stop=None,
        should_pause=None,
        timeout_seconds=None,
        silence_seconds=timeout_seconds,
    )
    if watched.timed_out:
        return f"no progress for {timeout_seconds:g} s"
    return children.NONSENSE if watched.garbled else children.died_of(watched.status)


def _named(path: str) -> NamedShard | None:
    return parse_shard_name(path.rpartition("/")[2])


def _asked(path: str, identity: FileIdentity | None = None, *, is_manifest: bool = False) -> dict[str, Any]:
    i = identity
    shard = _named(path)
    is_state = path.rpartition("/")[2] == TRAINER_STATE
    return {
        "path": path,
        "expected": shard is not None or _is_universal(path),
        "facts": shard is not None or path.endswith(CKPT) or path == LIGHTNING_META,
        "torch_file": path.endswith((*TORCH_FILES, CKPT)),
        "trainer": is_state,
        "parts": path.rpartition("/")[2] == METADATA,
        "manifest": is_manifest,
        "identity": None if i is None else [i.dev, i.ino, i.size_bytes, i.mtime_ns, i.ctime_ns],
    }


def _is_universal(path: str) -> bool:
    parts = path.split("/")
    return path.endswith(".pt") and "zero" in parts[:-1]


def _facts_of(path: str, line: dict[str, Any]) -> FileFacts:
    """Parse a child's findings on a file; a line that is none becomes a torn archive with a reason."""
    try:
        return _read(path, line)
    except (ValueError, TypeError):
        return _read(path, {"archive": Archive.TORN, "reason": f"{path}: {children.NONSENSE}"})


def _read(path: str, line: dict[str, Any]) -> FileFacts:
    shard = _named(path)
    role = shard.role if shard else Role.UNIVERSAL if _is_universal(path) else Role.SIDE
    return FileFacts(
        path=path,
        bytes=line.get("bytes", 0),
        archive=Archive(line.get("archive", "other")),
        reason=line.get("reason"),
        fingerprint=line.get("fingerprint", ""),
        tensor_fingerprint=line.get("tensor_fingerprint"),
        has_crc=line.get("has_crc", False),
        role=role,
        shard=shard.shard if shard else ShardKey(),
        facts=line.get("facts"),
        parts=line.get("parts"),
        trainer=line.get("trainer") or None,
    )
