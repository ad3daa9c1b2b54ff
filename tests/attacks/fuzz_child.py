"""`python -S -m tests.attacks.fuzz_child FOLDER SEED RUNS`: shards nearly right, read as a child reads.

Mutates what lies in FOLDER, restricted like the inspecting child, and prints one line of JSON: how it ended
how often, the slowest, and every event by which code of a pickle would show (an audit hook sees imports,
calls of exec, processes, files opened for writing, sockets).
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ckptd.conversion.engine import inspect_child
from ckptd.conversion.engine.sandbox import peak_rss_bytes, restrict
from ckptd.formats.torchfile.unpickler import TABLE

BAD_EVENTS = (
    "import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "subprocess.Popen", "socket.", "ctypes.dlopen", "shutil.", "os.remove", "os.rename",
    "pickle.find_class", "marshal.",
)  # fmt: skip
WORDS = (
    b"os\nsystem\n",
    b"builtins\neval\n",
    b"posix\nsystem\n",
    b"builtins\n__import__\n",
    b"subprocess\nPopen\n",
)
"""What a hostile stream names."""


class Ear:
    """Notes what a pickle should never make happen."""

    def __init__(self) -> None:
        self.is_listening = False
        self.heard: Counter[str] = Counter()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_listening:
            return
        if event.startswith(BAD_EVENTS):
            self.heard[f"{event} {arguments!r}"[:200]] += 1
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.heard[f"open {arguments!r}"[:200]] += 1


def grown(rng: random.Random) -> bytes:
    """A stream of opcodes drawn at random, with arguments that fit or nearly fit."""
    out = bytearray(b"\x80" + bytes([rng.choice((2, 3, 4, 5))]))
    table = [code for code in range(256) if TABLE[code] is not None and code != 0x2E]
    for _ in range(rng.randint(1, 80)):
        code = rng.choice(table)
        out.append(code)
        if code in b"c":
            out += rng.choice(WORDS)
        elif code in b"VISFULDgpP":
            out += bytes(rng.choices(b"0123456789-.abcx", k=rng.randint(0, 6))) + b"\n"
        elif code in b"KhqCU\x8c\x8a":
            out += bytes([rng.choice((0, 1, 2, 5, 255))]) + rng.randbytes(rng.randint(0, 5))
        elif code in b"MJrjTXBG\x8b\x8d\x8e\x95":
            out += struct.pack("<Q", rng.choice((0, 1, 3, 1 << 31, (1 << 63) - 1)))[: rng.choice((2, 4, 8))]
    return bytes(out) + b"."


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes turned, cut, doubled or replaced by hostile ones."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        at = rng.randrange(len(out))
        kind = rng.randrange(5)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + rng.randint(1, 30)]
        elif kind == 3:
            out[at:at] = out[at : at + rng.randint(1, 60)]
        else:
            out[at:at] = (
                b"c" + rng.choice(WORDS) + b"(X\x04\x00\x00\x00true" + rng.choice((b"tR", b"tRb", b"\x81"))
            )
        if not out:
            return b"."
    return bytes(out)


def one(source: bytes, pickled: tuple[int, int], rng: random.Random) -> bytes:
    """One damaged archive: its pickle changed in place, or any byte of it."""
    start, size = pickled
    draw = rng.random()
    if draw < 0.5:
        changed = mutated(source[start : start + size], rng)[:size].ljust(size, b".")
        return source[:start] + changed + source[start + size :]
    if draw < 0.75:
        changed = grown(rng)[:size].ljust(size, b".")
        return source[:start] + changed + source[start + size :]
    return mutated(source, rng)


def main(folder: str, seed: int, runs: int) -> dict[str, Any]:
    """Fuzz; what came of it."""
    ear = Ear()
    sources = [(path.name, path.read_bytes()) for path in sorted(Path(folder).glob("*.pt"))]
    places = [_place_of_pickle(data) for _, data in sources]
    work = os.memfd_create("shard")
    restrict(memory_bytes=1 << 30, cpu_seconds=3600, file_bytes=64 << 20)
    setattr(inspect_child, "_emit", lambda line: None)  # noqa: B010
    for name, data in sources:  # imports that reading needs happen before anybody listens
        os.pwrite(work, data, 0)
        _inspect(work, name)
        os.ftruncate(work, 0)
    "".encode("raw_unicode_escape")
    ended: Counter[str] = Counter()
    slowest = 0.0
    rng = random.Random(seed)
    for _ in range(runs):
        index = rng.randrange(len(sources))
        data = one(sources[index][1], places[index], rng)
        os.ftruncate(work, 0)
        os.pwrite(work, data, 0)
        began = time.monotonic()
        ear.is_listening = True
        try:
            found = _inspect(work, sources[index][0])
            ended[found] += 1
        except Exception as error:
            ended[f"uncaught {type(error).__name__}: {error}"[:90]] += 1
        finally:
            ear.is_listening = False
        slowest = max(slowest, time.monotonic() - began)
    peak = peak_rss_bytes()
    return {"ended": ended, "heard": ear.heard, "slowest_seconds": slowest, "peak_bytes": peak}


def _inspect(fd: int, name: str) -> str:
    framing = inspect_child._framing(fd, name, expected=True)
    directory = framing.pop("directory", None)
    if directory is None:
        return str(framing["archive"])
    facts = inspect_child._facts(fd, name, directory)
    return "facts" if "facts" in facts else "refused"


def _place_of_pickle(data: bytes) -> tuple[int, int]:
    """Where data.pkl lies."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("/data.pkl")]
    name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
    return info.header_offset + 30 + name + extra, info.file_size


if __name__ == "__main__":
    pickle.loads = None  # type: ignore[assignment]
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))) + "\n")
