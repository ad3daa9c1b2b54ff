"""Saves in DeepSpeed's format whose every byte is known, and whether what lies somewhere is one of them.

Nothing here asks ckptd what it planned or noted: bytes are compared with what the trainer wrote.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.support import synthetic
from tests.support.synthetic import Shapes, write_stage12

Bytes = dict[str, bytes]
Element = Callable[[str, str, int], int]
"""(state, parameter, index) → the 32 bits of an element."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its files, and what each (parameter, state) of it must become."""

    step: int
    files: Bytes
    expected: dict[tuple[str, str], bytes]


def make_save(groups: list[Shapes], step: int, element: Element) -> Save:
    """Return a save of ZeRO-2 by two ranks whose elements are those."""
    with TemporaryDirectory() as folder, mock.patch.object(synthetic, "element", element):
        path = Path(folder) / "save"
        expected = write_stage12(path, groups, 2, step=step).expected
        files = {p.name: p.read_bytes() for p in path.iterdir()}
    files["note.txt"] = f"saved at {step}\n".encode()
    return Save(step, files, expected)


def write_save(folder: Path, save: Save, *, pause_seconds: float = 0.0, block_bytes: int = 1 << 18) -> None:
    """Write model states, then optimizer states, in place where there are files; nothing is flushed."""
    folder.mkdir(exist_ok=True)
    for name in sorted(save.files, key=lambda name: ("optim" in name, name)):
        data = memoryview(save.files[name])
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(fd, "wb") as out:
            for at in range(0, len(data), block_bytes):
                out.write(data[at : at + block_bytes])
                if pause_seconds:
                    time.sleep(pause_seconds)


def tree(folder: Path) -> Bytes:
    """Return every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def differs(contents: Mapping[str, bytes], save: Save) -> str:
    """Say in what the files are not those of the save; empty if they are."""
    if set(contents) != set(save.files):
        return f"holds {sorted(contents)}, the save is {sorted(save.files)}"
    wrong = [name for name, data in save.files.items() if contents[name] != data]
    return f"{wrong} are not the bytes of step {save.step}" if wrong else ""


def is_no_universal(contents: Mapping[str, bytes], save: Save) -> str:
    """Say in what the files are not the save's universal form; empty if they are."""
    for (name, state), data in save.expected.items():
        held = contents.get(f"zero/{name}/{state}.pt")
        if held is None:
            return f"{name}/{state} is missing"
        try:
            is_same = _first_storage(held) == data
        except zipfile.BadZipFile:
            is_same = False  # a file without its bytes
        if not is_same:
            return f"{name}/{state} is not that of step {save.step}"
    return ""


def _first_storage(archive: bytes) -> bytes:
    """Record data/0 of a torch archive; its CRC is 0 in what ckptd writes, which zipfile would refuse."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        record = next(i for i in packed.infolist() if i.filename.endswith("/data/0"))
    name, extra = struct.unpack_from("<HH", archive, record.header_offset + 26)
    at = record.header_offset + 30 + name + extra
    return archive[at : at + record.file_size]


@dataclass(frozen=True, slots=True)
class Commit:
    """A COMMIT of which all is there that it rests on."""

    step: int
    form: str
    folder: str
    contents: Bytes
    """Of the checkpoint: name → bytes."""
    keys: frozenset[str]
    """Objects that it rests on."""


def read_commit(found: Mapping[str, bytes], key: str) -> Commit | str:
    """Return the COMMIT at `key` among a remote's objects, or what is wrong with it."""
    try:
        commit = json.loads(found[key])
    except ValueError:
        return f"{key} is torn (P3)"
    contents: Bytes = {}
    keys: set[str] = set()
    for row in commit["manifests"]:
        text = found.get(row["key"])
        if text is None or hashlib.sha256(text).hexdigest() != row["sha256"]:
            return f"{key} rests on {row['key']}, which is gone or another (P3)"
        keys.add(row["key"])
        for file in json.loads(text)["files"]:
            keys.add(file["key"])
            if file["key"] not in found:
                return f"{key}: {file['key']} is not there (P3)"
            contents[file["path"]] = found[file["key"]]
    return Commit(commit["step"], commit["form"], commit["folder"], contents, frozenset(keys))
