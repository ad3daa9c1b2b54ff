"""`make powercuts`: cut the power of ext4 or XFS under a real daemon, and judge what the disks hold.

save_dir and the NAS are loop devices over tests/vm/disks.py, whose write caches are lost at one moment. After
each cut the file systems are mounted anew (their own journals are replayed) and judged before any daemon
runs; then `resume`, a daemon and a trainer go on. An epoch is some cuts in the life of one pair of disks; it
ends with `ckptd run --once`. What was cut counts in `.build/powercuts`, so the command goes on with the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ckptd.base import extents
from tests.support.known_saves import tree
from tests.support.processes import kill_with_children
from tests.vm.cuts import BUILD, REMOVAL, Cut, Record
from tests.vm.defects import DEFECTS, plant
from tests.vm.disks import Lost
from tests.vm.image import ROOT
from tests.vm.judge import Told, Verdict, is_save, judge
from tests.vm.trainer import saves_in, step_of

DISK_MEGABYTES = 400
"""XFS takes no less than 300."""
FIRST_LOOP = 32
EPOCH_CUTS = 25
IDLE_CUTS = 6
"""More of them without a COMMIT are no chance."""
OFF_SECONDS = 200
"""How long a machine stays off, as the times of files say: what was being written is no save in flight."""
SILENT_SECONDS = 90.0
VERIFIED = 0.25
"""Of the cuts, after which `verify --read-data` reads everything as well."""
WRITTEN_BACK, YOUNG_SECONDS = 0.1, 5.0
"""Share of the files of that age whose pages the kernel writes at each look."""
MOUNT_OPTIONS = {"ext4": ("", "commit=1"), "xfs": ("",)}

TORN = {"ext4": 0.02, "xfs": 0.0}
"""Share of the blocks that are kept in part. XFS trusts its disk not to do so: a directory block whose first
sector alone was written is what its recovery refuses to mount."""

JOB = """save_dir = "{save_dir}"
settle = "0.5s"
existing = "all"
[local]
save_total_limit = 2
forms = ["universal"]
min_free = "1MB"
[[remote]]
name = "nas"
url = "{nas}"
forms = ["zero", "universal"]
keep_last = 4
bandwidth = "6MB/s"
"""


def run(
    *command: object, seconds: float = 60.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; nothing is raised when it fails."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=seconds, env=env, stdin=subprocess.DEVNULL
    )


def must(*command: object) -> str:
    """Run a command that has to succeed; returns what it said."""
    done = run(*command)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


def clear(work: Path, devices: Iterable[Path]) -> None:
    """Unmount and detach what lies below `work` and on the devices, also what a killed run left."""
    table = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    mine = [(place, kind) for _, place, kind in reversed(table) if place.startswith(f"{work}/")]
    _unmount(place for place, kind in mine if not kind.startswith("fuse"))
    for device in devices:
        if run("losetup", device).returncode == 0:
            run("losetup", "-d", device)
            until = time.monotonic() + 10.0
            while run("losetup", device).returncode == 0 and time.monotonic() < until:
                time.sleep(0.1)  # the kernel detaches it once nobody has it open
    _unmount(place for place, kind in mine if kind.startswith("fuse"))


def _unmount(places: Iterable[str]) -> None:
    for place in places:
        until = time.monotonic() + 10.0
        while run("umount", place).returncode and time.monotonic() < until:
            time.sleep(0.1)


def loop(number: int) -> Path:
    """Return a loop device, made if need be: a disk keeps its number when its machine starts again."""
    device = Path(f"/dev/loop{number}")
    if not device.exists():
        must("mknod", device, "b", "7", number)
    return device


@contextlib.contextmanager
def lane() -> Iterator[int]:
    """Yield the first of two loop devices that no run beside this one uses meanwhile."""
    for number in range(FIRST_LOOP, FIRST_LOOP + 16, 2):
        with Path(f"/run/ckptd-powercuts-loop{number}.lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    raise SystemExit("eight runs of power cuts use all loop devices that are for them")


class Rig:
    """Two disks, the daemon and the trainer on them."""

    def __init__(self, work: Path, lane: int, fs: str, seed: int, defect: str) -> None:
        self.work, self.fs, self.seed = work, fs, seed
        self.rng = random.Random(f"{fs} {seed}")
        self.told = Told()
        self.serial = 1
        self._idle_cuts = 0
        self._running: list[subprocess.Popen[str]] = []
        self.mounts = (work / "nvme", work / "nas")
        self.save_dir, self.nas = work / "nvme" / "run", work / "nas" / "run"
        self.job = work / "run.toml"
        self.env = os.environ | {"NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        self.devices = [loop(lane + n) for n in range(len(self.mounts))]
        self.clear()
        shutil.rmtree(work, ignore_errors=True)
        for folder in (*self.mounts, work / "disks"):
            folder.mkdir(parents=True)
        if defect:
            self.env["PYTHONPATH"] = f"{plant(defect, work / 'defect')}:{ROOT}"
        self.job.write_text(JOB.format(save_dir=self.save_dir, nas=self.nas))
        for mount in self.mounts:
            image = work / f"{mount.name}.img"
            with image.open("wb") as out:
                out.truncate(DISK_MEGABYTES << 20)
            must(f"mkfs.{fs}", "-q", *(["-F"] if fs == "ext4" else ["-f"]), image)

    @contextlib.contextmanager
    def powered(self) -> Iterator[subprocess.Popen[str]]:
        """Mount both disks; yields the process that serves them. Everything is unmounted in the end."""
        images = [self.work / f"{mount.name}.img" for mount in self.mounts]
        server = self._spawn(
            "tests.vm.disks",
            self.work / "disks",
            self.rng.randrange(1 << 30),
            TORN[self.fs],
            *images,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        try:
            server.stdout.readline()
            options = self.rng.choice(MOUNT_OPTIONS[self.fs])
            for image, mount, device in zip(images, self.mounts, self.devices, strict=True):
                must("losetup", device, self.work / "disks" / image.name)
                must("mount", "-t", self.fs, *(["-o", options] if options else []), device, mount)
                (mount / "run").mkdir(exist_ok=True)
            yield server
        finally:
            self._end_processes()
            self.clear()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def clear(self) -> None:
        """Unmount and detach everything."""
        clear(self.work, self.devices)

    def _spawn(self, module: str, *arguments: object, **pipes: Any) -> subprocess.Popen[str]:
        """Start a process that does not outlive this one."""
        words = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", module, *map(str, arguments)]
        # in a session of its own: what ends this run by its process group leaves it the disks to unmount
        return subprocess.Popen(
            words, text=True, env=self.env, cwd=self.work, start_new_session=True, **pipes
        )

    def ckptd(self, *arguments: object, seconds: float = SILENT_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run a command of ckptd."""
        return run(sys.executable, "-m", "ckptd", *arguments, env=self.env, seconds=seconds)

    # --- one cut -------------------------------------------------------------------------------------

    def live(self, number: int) -> Cut:
        """Mount, judge, go on, and cut."""
        cut = Cut(self.seed, number)
        log = self.work / f"run{number:03d}.log"
        with self.powered() as server, log.open("w") as out:
            verdict = judge(self.save_dir, self.nas, self.told)
            cut.wrong += verdict.wrong
            self._age(verdict)
            if verdict.committed and self.rng.random() < VERIFIED:
                done = self.ckptd("verify", self.nas, "--read-data")
                if done.returncode:
                    cut.wrong.append(
                        f"verify --read-data: {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
                    )
            first = self._resume(verdict, cut)
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            daemon = self._spawn("ckptd", "run", "--job", self.job, "--log-format", "json", **pipes)
            self._running.append(daemon)
            count, every = self.rng.choice((2, 3, 4)), self.rng.choice((0.3, 1.0, 2.0))
            saves = (self.save_dir, first, count, self.serial, "--every", every, "--removes", 0.1)
            self._running.append(self._spawn("tests.vm.trainer", *saves, **pipes))
            self.serial += count
            begun = time.monotonic()
            self._wait(daemon, log, cut)
            cut.seconds = round(time.monotonic() - begun, 1)
            text = log.read_text()  # what is said later, of disks that are dead, does not count
            self._cut(server, cut)
        before = (self.told.commits, self.told.removals)
        self.told.read(text)
        cut.commits, cut.removals = self.told.commits - before[0], self.told.removals - before[1]
        self._idle_cuts = 0 if cut.commits else self._idle_cuts + 1
        if self._idle_cuts == IDLE_CUTS:
            cut.wrong.append(f"nothing was committed in {IDLE_CUTS} cuts: {text[-1500:]}")
        cut.set_aside = text.count("set aside")
        cut.wrong += self.told.errors
        self.told.errors.clear()
        return cut

    def _age(self, verdict: Verdict) -> None:
        """Give what was being written at the cut the age that it has when a machine comes back."""
        for folder in saves_in(self.save_dir):
            if folder.name not in verdict.whole:
                for path in (*folder.iterdir(), folder):
                    os.utime(path, (time.time() - OFF_SECONDS,) * 2)

    def _resume(self, verdict: Verdict, cut: Cut) -> int:
        """Ask `resume` as a launch script does; returns the step that the trainer goes on with."""
        if not verdict.committed:
            return 1 + max((step_of(f.name) for f in saves_in(self.save_dir)), default=0)
        done = self.ckptd("resume", self.job)
        offered = Path(done.stdout.strip())
        least = step_of(verdict.latest) if verdict.latest else 0
        if done.returncode or not offered.name.startswith("global_step"):
            cut.wrong.append(
                f"resume ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-500:]}"
            )
            return least + 1
        cut.resumed = step_of(offered.name)
        if cut.resumed < least:
            cut.wrong.append(
                f"resume offers step {cut.resumed}, step {least} is committed: {done.stderr[-500:]}"
            )
        if not is_save(tree(offered), self.told.saves(offered.name)):
            cut.wrong.append(f"resume offers {offered}, which holds no save")
        return cut.resumed + 1

    def _wait(self, daemon: subprocess.Popen[str], log: Path, cut: Cut) -> None:
        """Wait for the moment of the cut: for half of them until something is removed, or for long.

        Few come before the daemon watches, which takes seconds on a busy machine.
        """
        late = time.monotonic() + SILENT_SECONDS
        while self.rng.random() < 0.995 and time.monotonic() < late and '"watching ' not in log.read_text():
            time.sleep(0.05)
        is_awaited = self.rng.random() < 0.5
        until = time.monotonic() + (20.0 if is_awaited else self.rng.uniform(0.5, 12.0))
        while time.monotonic() < until:
            if daemon.poll() is not None:
                cut.wrong.append(f"the daemon ended with {daemon.returncode}: {log.read_text()[-1500:]}")
                return
            if is_awaited and '"delete-' in log.read_text():
                until, cut.at, is_awaited = time.monotonic() + self.rng.uniform(0.0, 0.6), REMOVAL, False
            self._write_back()
            time.sleep(0.05)

    def _write_back(self) -> None:
        """Have the kernel write some young pages without a flush, as it does at its leisure."""
        for folder, _, names in (found for mount in self.mounts for found in os.walk(mount)):
            for path in [Path(folder, name) for name in names if self.rng.random() < WRITTEN_BACK]:
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime < YOUNG_SECONDS and path.is_file():
                        with path.open("rb") as file:
                            extents.start_flush(file.fileno())

    def _cut(self, server: subprocess.Popen[str], cut: Cut) -> None:
        """Cut the power of the disks, then end what ran."""
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("cut\n")
        server.stdin.flush()
        cut.disks = Lost(**json.loads(server.stdout.readline()))
        self._end_processes()

    def _end_processes(self) -> None:
        """Kill daemon and trainer with their children, as a power cut does."""
        for process in self._running:
            kill_with_children(process)
        self._running.clear()

    def settle(self) -> list[str]:
        """End an epoch: judge once more, then `run --once` has to bring everything to rest."""
        with self.powered():
            verdict = judge(self.save_dir, self.nas, self.told)
            self._age(verdict)
            done = self.ckptd("run", "--job", self.job, "--once", "--log-format", "json", seconds=300)
            self.told.read(done.stderr + done.stdout)
            wrong = verdict.wrong + self.told.errors
            if done.returncode:
                wrong.append(
                    f"run --once ended with {done.returncode}: {self.ckptd('status', self.job).stdout[:2000]}"
                )
            end = judge(self.save_dir, self.nas, self.told)
            wrong += end.wrong
            left = end.whole - {tag for tag, form in end.committed | self.told.retired if form == "zero"}
            if left:
                wrong.append(f"{sorted(left)} are whole here and not committed in the end")
            junk = [
                str(p) for f in ("trash", "staging", "hold") for p in (self.save_dir / "_ckptd" / f).glob("*")
            ]
            if junk:
                wrong.append(f"left lying: {junk}")
        return wrong


def epoch(rig: Rig, record: Record, cuts: int, until: float, *, is_kept: bool) -> bool:
    """Make up to so many cuts of one pair of disks; whether a promise was broken."""
    number, is_broken = 0, False
    while number < cuts and not is_broken and time.monotonic() < until:
        number += 1
        cut = rig.live(number)
        is_last = number == cuts or time.monotonic() > until
        if is_last and not cut.wrong:
            cut.wrong += rig.settle()
        is_broken = bool(cut.wrong)
        if is_kept:
            record.add(cut)
        print(cut.line(), flush=True)
    return is_broken


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.powercuts")
    parser.add_argument("--fs", choices=sorted(MOUNT_OPTIONS), default="ext4")
    parser.add_argument("--cuts", type=int, default=200, help="all in all, with those of earlier runs")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="of one epoch, which is repeated and does not count")
    parser.add_argument("--anew", action="store_true", help="forget the cuts of earlier runs")
    parser.add_argument(
        "--defect",
        choices=sorted(DEFECTS),
        default="",
        help="a flush that is left out: exit 0 when it is found",
    )
    return parser.parse_args()


def cut_all(args: argparse.Namespace, record: Record, first_loop: int, *, is_kept: bool) -> bool:
    """Live epochs until all is cut, the time is over or a promise was broken; whether one was."""
    until = time.monotonic() + 60 * args.minutes
    while time.monotonic() < until:
        left = args.cuts - (len(record.cuts()) if is_kept else 0)
        if left <= 0:
            break
        seed = args.seed if args.seed is not None else time.time_ns() // 1_000_000
        rig = Rig(BUILD / f"loop{first_loop}", first_loop, args.fs, seed, args.defect)
        try:
            is_broken = epoch(rig, record, min(left, EPOCH_CUTS), until, is_kept=is_kept)
        finally:
            rig.clear()
        if is_broken:
            stays = BUILD / f"{args.fs}-{seed}{args.defect and '-'}{args.defect}"
            shutil.rmtree(stays, ignore_errors=True)  # of the last time
            rig.work.rename(stays)
            print(f"the disks and lines stay in {stays}", flush=True)
            return True
        if args.seed is not None:
            break
    return False


def main() -> int:
    """Cut; exit 1 when a promise was broken."""
    args = _arguments()
    if os.geteuid() != 0:
        raise SystemExit("power cuts mount loop devices, which needs root")
    signal.signal(signal.SIGTERM, _end)
    record = Record(args.fs, anew=args.anew)
    is_kept = args.seed is None and not args.defect
    with lane() as first_loop:
        is_broken = cut_all(args, record, first_loop, is_kept=is_kept)
    if args.defect:
        print(f"the defect {args.defect} was {'found' if is_broken else 'NOT found'}")
        return int(not is_broken)
    return int(record.end(f"make powercuts FS={args.fs}") if is_kept else is_broken)


def _end(number: int, frame: FrameType | None) -> None:
    """End with everything unmounted."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
