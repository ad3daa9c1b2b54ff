"""`python -m bench.lastbyte`: how long after its last byte a save is committed, for many saves in a row.

    make bench-lastbyte            (python -m bench.lastbyte --saves 500 --trainer huggingface --stage 3)

A writer does what a trainer does to files: two ranks write at once, in place and at the pace of a disk;
`huggingface` writes all shards twice, as Trainer at stage 3, then rank 0's random state, trainer_state.json
and the other rank's random state; `deepspeed` writes them once, `latest` when rank 0 has ended. A real daemon
with its default settings commits them to a directory over a link of twice the production. Counted is from the
last close of a file to the COMMIT's mtime; then every committed file is compared with what was written last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from tests.support.synthetic import Shard, write_stage3, write_stage12

RANKS = 2
CHUNK_BYTES = 1 << 18
WAIT_SECONDS = 60.0
BYTES_PER_PARAMETER = 12


@dataclass(slots=True)
class Save:
    """One save: its files as they were written last, and when the last of them was closed."""

    tag: str
    closed_at: float = 0.0
    sha256: dict[str, str] = field(default_factory=dict)


class Writer:
    """Writes saves below a save_dir, each of `parameters` elements in `seconds`."""

    def __init__(
        self, save_dir: Path, trainer: str, stage: int, parameters: int, seconds: float, apart_seconds: float
    ) -> None:
        self._save_dir = save_dir
        self._is_trainers = trainer == "huggingface"
        self._stage = stage
        self._parameters = parameters
        self._seconds = seconds
        self._apart_seconds = apart_seconds
        self._made = Path(tempfile.mkdtemp(prefix="ckptd-bench-made-"))

    def write(self, step: int) -> Save:
        """Write one save as the trainer does, and return it."""
        shards = self._shards(step)
        tag = f"checkpoint-{step}" if self._is_trainers else f"global_step{step}"
        folder = self._save_dir / tag
        root = folder / f"global_step{step}" if self._is_trainers else folder
        root.mkdir(parents=True)
        save = Save(tag)
        times = 2 if self._is_trainers and self._stage == 3 else 1
        for _ in range(times):
            self._write_all(root, shards, self._seconds / times)
        (folder if self._is_trainers else self._save_dir).joinpath("latest").write_text(root.name)
        if self._is_trainers:
            Shard().save(folder / "rng_state_0.pth", {"cpu": step})
            state = {"global_step": step, "log_history": [], "epoch": 1.0}
            (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
            time.sleep(0.02)
            Shard().save(folder / "rng_state_1.pth", {"cpu": step})
        save.closed_at = time.time()
        for path in folder.rglob("*"):
            if path.is_file():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                save.sha256[path.relative_to(folder).as_posix()] = digest
        return save

    def _shards(self, step: int) -> dict[str, bytes]:
        place = self._made / str(step)
        make = write_stage3 if self._stage == 3 else write_stage12
        make(place, [{"w": (self._parameters,)}], RANKS, step=step)
        shards = {path.name: path.read_bytes() for path in sorted(place.iterdir())}
        shutil.rmtree(place)
        return shards

    def _write_all(self, root: Path, shards: dict[str, bytes], seconds: float) -> None:
        """Each rank its own files, model states first, with no barrier but the one at the end."""
        ranks = [
            [n for n in shards if f"rank_{rank}_" in n or (rank == 0 and n.startswith("mp_"))]
            for rank in range(RANKS)
        ]
        ranks = [sorted(names, key=lambda name: "optim" in name) for names in ranks]
        threads = [
            threading.Thread(
                target=self._write_files, args=(root, names, shards, seconds, rank * self._apart_seconds)
            )
            for rank, names in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _write_files(
        self, root: Path, names: list[str], shards: dict[str, bytes], seconds: float, after_seconds: float
    ) -> None:
        time.sleep(after_seconds)
        began, total, done = time.monotonic(), sum(len(shards[name]) for name in names), 0
        for name in names:
            with (root / name).open("wb", buffering=0) as out:
                for at in range(0, len(shards[name]), CHUNK_BYTES):
                    done += out.write(shards[name][at : at + CHUNK_BYTES])
                    ahead_seconds = began + seconds * done / total - time.monotonic()
                    time.sleep(max(0.0, ahead_seconds))

    def close(self) -> None:
        """Remove what it made."""
        shutil.rmtree(self._made, ignore_errors=True)


def committed_at(remote: Path, save: Save, deadline: float) -> float | None:
    """Wait for a save's COMMIT and return its time; None: it did not come."""
    while time.time() < deadline:
        found = list((remote / "_ckptd" / "commits").glob(f"{save.tag}~*~zero*"))
        if found:
            return found[0].stat().st_mtime
        time.sleep(0.02)
    return None


def differing(remote: Path, save: Save) -> list[str]:
    """Return the files that a commit holds otherwise than they were written last."""
    return [
        path
        for path, digest in save.sha256.items()
        if not (remote / save.tag / path).exists()
        or hashlib.sha256((remote / save.tag / path).read_bytes()).hexdigest() != digest
    ]


def measure(options: argparse.Namespace, work: Path) -> dict[str, object]:
    """Run a daemon beside a writer and return the figures."""
    save_dir, remote, state = work / "run", work / "remote", work / "state"
    save_dir.mkdir()
    remote.mkdir()
    production = options.parameters * BYTES_PER_PARAMETER / options.every
    bits = int(8 * options.link * production)
    config = work / "run.toml"
    config.write_text(
        f'save_dir = "{save_dir}"\n[local]\nsave_total_limit = 3\n'
        f'[[remote]]\nname = "nas"\nurl = "{remote}"\nbandwidth = "{bits}b/s"\nforms = ["zero"]\n'
        "same_filesystem = true\n"
        "save_total_limit = 4\n"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    ckptd = [sys.executable, "-m", "ckptd"]
    subprocess.run(
        [*ckptd, "check", "--init-remote", config], env=environment, check=True, capture_output=True
    )
    writer = Writer(
        save_dir, options.trainer, options.stage, options.parameters, options.seconds, options.apart
    )
    late: list[float] = []
    wrong: list[str] = []
    with (work / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen([*ckptd, "run", config], stdout=log, stderr=log, env=environment)
    try:
        for number in range(options.saves + 1):
            began = time.monotonic()
            save = writer.write(10 * (number + 1))
            at = committed_at(remote, save, time.time() + WAIT_SECONDS)
            if at is None:
                raise SystemExit(f"{save.tag} was not committed; see {work / 'daemon.log'}")
            wrong += [f"{save.tag}/{path}" for path in differing(remote, save)]
            # the first one makes the daemon open its journal and its remote
            late += [at - save.closed_at] if number else []
            time.sleep(max(0.0, options.every - (time.monotonic() - began)))
    finally:
        daemon.terminate()
        daemon.wait(30)
        writer.close()
    cuts = quantiles(late, n=20) if len(late) > 1 else late * 19
    return {
        "trainer": options.trainer,
        "stage": options.stage,
        "saves": len(late),
        "save_bytes": options.parameters * BYTES_PER_PARAMETER,
        "link_bytes_per_second": bits // 8,
        "median_seconds": round(median(late), 3),
        "p95_seconds": round(cuts[-1], 3),
        "least_seconds": round(min(late), 3),
        "most_seconds": round(max(late), 3),
        "wrong_files": wrong,
    }


def main() -> None:
    """Print the figures as one JSON object; 1 where a committed file is not what was written last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--saves", type=int, default=500)
    parser.add_argument("--trainer", choices=("huggingface", "deepspeed"), default="huggingface")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="what one save takes")
    parser.add_argument(
        "--apart", type=float, default=0.0, help="seconds by which rank 1 writes later than rank 0"
    )
    parser.add_argument("--every", type=float, default=6.0, help="seconds from one save to the next")
    parser.add_argument(
        "--link", type=float, default=2.0, help="bandwidth of the link, as times the production"
    )
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ckptd-bench-lastbyte-"))
    found = measure(options, work)
    print(json.dumps(found))
    if found["wrong_files"]:
        raise SystemExit(1)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
