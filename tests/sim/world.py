"""One node's whole world: disks, remotes, trainer, and the real daemon's job with everything below it.

The scheduler picks one thing at a time: a worker's action, an order in a remote's process, the deciding
thread's next turn. A kill ends all of ckptd's processes at one call; a power cut takes what was not flushed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
from collections import deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptd.config.budget import child_bytes
from ckptd.config.schema import DaemonConfig, JobConfig
from ckptd.core.model.decision import Decision
from ckptd.core.model.records import ZERO, UploadState
from ckptd.core.policy.blockers import tried_again
from ckptd.daemon.health.checks import exit_code, is_idle
from ckptd.daemon.intake.decisions import write_decision
from ckptd.daemon.job import Job
from ckptd.daemon.resources.limits import HostLimits
from ckptd.daemon.resources.workers import Workers
from ckptd.daemon.uploads.requests import hold_name
from ckptd.errors import CkptdError
from ckptd.storage.local.clones import about_name
from ckptd.storage.remote import observe
from ckptd.storage.remote.readers import ReaderLease
from ckptd.storage.stores.open import open_store
from tests.sim.decisions import HOUR_SECONDS, rules_of
from tests.sim.judge import Broken, Judge
from tests.sim.kernel import Kernel, Killed
from tests.sim.other import OtherRun
from tests.sim.remotes import Client, Cloud, Faults
from tests.sim.stage import Stage
from tests.sim.trainer import METRICS, SAVE_DIR, Save, Trainer
from tests.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.core.model.records import UploadRecord
    from ckptd.daemon.state.state import JobState
    from ckptd.daemon.uploads.session import RemoteSession
    from ckptd.storage.local.watch import OnHint
    from tests.sim.disk import Disk

NAS, S3 = "nas", "s3"
NAS_URL = "/sim/nas/run"
STATE_DIR = Path(f"{SAVE_DIR}/{'_ckptd'}/state")
REST_SECONDS = 25.0
MOST_MOVES = 4000
"""In one stretch of time: more is a daemon that turns in circles."""


@cache
def job_config(
    remotes: tuple[tuple[str, bool, int | None], ...],
    limit: int | None,
    backfill: str,
    *,
    every: int | None = None,
    rung: int | None = None,
    unuploaded: str = "keep",
    best: bool = False,
    most_bytes: int | None = None,
) -> JobConfig:
    """A job file's content: remotes as (name, required, limit); other keys only where there is a limit."""
    bytes_too = {} if most_bytes is None else {"keep_bytes": f"{most_bytes}B"}
    ladder = [] if rung is None or limit is None else [{"after": rung, "form": "gone"}]
    metric = {"metric": "loss", "metrics_file": METRICS, "extra": []} if best else {}
    return JobConfig.model_validate(
        {
            **metric,
            "save_dir": SAVE_DIR,
            "name": "run",
            "node_name": "n0",
            "existing": backfill,
            "unuploaded": unuploaded if limit is not None else "keep",
            "local": {
                "forms": [],
                "save_total_limit": limit,
                **bytes_too,
                "keep_every_steps": every if limit is not None else None,
                "keep_best": 1 if best and limit is not None else None,
                "ladder": ladder,
                "min_free": "0%",
            },
            "remote": [
                {
                    "name": name,
                    "url": NAS_URL if name == NAS else "s3://bucket/run",
                    "forms": ["zero"],
                    "required": required,
                    "save_total_limit": keep,
                    **bytes_too,
                    "keep_every_steps": every if keep is not None else None,
                    "keep_best": 1 if best and keep is not None else None,
                }
                for name, required, keep in remotes
            ],
        }
    )


class Quiet:
    """Stands for inotify: hears everything, or nothing."""

    problem = None

    def __init__(self, world: World, hint: OnHint) -> None:
        self._world = world
        world.hint = hint

    @property
    def hears_all(self) -> bool:
        return not self._world.is_deaf

    def start(self) -> None:
        return None

    def stop(self) -> None:
        self._world.hint = None

    def follow(self, _: object) -> None:
        return None


class _Defects(logging.Handler):
    """A defect that ckptd caught and logged is still a defect."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._world.defect = record.exc_info[1]


class World:
    """See the module's first lines; every choice comes from the generators it is given."""

    def __init__(
        self, seed: int, config: JobConfig, *, can_clone: bool = True, trainer: type[Trainer] = Trainer
    ) -> None:
        self.config = config
        self.kernel = Kernel()
        self.kernel.can_clone = can_clone
        self.crashes = self.starts = 0
        self._rests_since: float | None = None
        self._was_cut = False
        self.is_power_cut = False
        self.is_deaf = False
        self.was_stale = self.was_set_back = False
        """A list may have hidden what a save is committed as: its COMMIT is retired, and it stays here."""
        self.clocked: set[int] = set()
        """Saves in which the clock was moved: without a journal they look like two, and people are asked."""
        self.written_over: set[str] = set()
        """Tags in which a note was written over: if it was part of the save, that is another save now, and
        may be retired before it was committed."""
        self.hint: OnHint | None = None
        self.defect: BaseException | None = None
        self.posts: deque[Callable[[], None]] = deque()
        self.tasks: list[Callable[[], None]] = []
        self.clients: list[Client] = []
        self.job: Job | None = None
        rng = random.Random(f"{seed}-world")
        self._rng = rng
        for name in ("nvme", "nas"):
            disk = self.kernel.add_disk(name)
            disk.pending.clear()
        self._mounted: dict[str, Disk] = dict(self.kernel.disks)
        self.moods = {name: Faults(self.kernel, rng) for name in (NAS, S3)}
        self.cloud = Cloud()
        self.cloud.attend(self.kernel, self.moods[S3])
        self.kernel.fate = self.moods[NAS].on_disk
        self.trainer = trainer(self.kernel, self._on_step)
        self.trainer.notes_losses = config.metric is not None
        self.other = OtherRun(self.kernel)
        required = frozenset(r.name for r in config.remotes if r.required)
        held = {NAS: self._on_nas, S3: self._in_cloud}
        self.slept_seconds = 0.0
        """What power cuts took from the kernel's clock."""
        self.had_limits = {r.name for r in config.remotes if r.save_total_limit is not None}
        self.judge = Judge(
            self.trainer,
            {r.name: held[r.name] for r in config.remotes},
            required,
            self.kernel.history,
            rules_of(config),
            self.clock,
            self._audit,
            self.other.kept,
        )
        self.kernel.on_removal = lambda inode, path: self.judge.on_removal(
            inode, path, self.kernel.now_seconds
        )
        self.kernel.on_move = lambda inode, path, target: self.judge.on_move(
            inode, path, target, self.kernel.now_seconds
        )
        self.kernel.on_write = self._on_write
        self.cloud.on_upload = lambda key: self.judge.on_upload(S3, key)
        self.stage = Stage(
            self.kernel,
            rng,
            self.tasks,
            self._client,
            lambda _path, hint: Quiet(self, hint),
            self._open_store,
            lambda _path, tag: self.trainer.has_open(tag),
        )
        self._handler = _Defects(self)

    def _audit(self) -> bytes:
        path = str(STATE_DIR / "audit.jsonl")
        return self.kernel.content_of(path) if self.kernel.exists(path) else b""

    def enter(self) -> None:
        """The life begins: save_dir is there."""
        self.stage.enter()
        logging.getLogger("ckptd").addHandler(self._handler)
        self.kernel.actor = "trainer"
        self.kernel.mkdir(SAVE_DIR)
        self.kernel.actor = "ckptd"
        for disk in self.kernel.disks.values():
            disk.flush_folder(disk.root)

    def leave(self) -> None:
        """The life is over."""
        logging.getLogger("ckptd").removeHandler(self._handler)
        self.stage.leave()

    # --- what the stage asks for -----------------------------------------------------------------------

    def _client(self, settings: Any, on_answer: Any, making: str) -> Client:
        client = Client(self.moods, settings, on_answer, making)
        client.on_confirm = lambda name, order: self.judge.asked(name, order.commits, self.kernel.now_seconds)
        self.clients.append(client)
        return client

    def _open_store(self, url: str, **more: Any) -> Any:
        return self.cloud if url.startswith("s3:") else open_store(url, **more)

    def _on_step(self) -> None:
        if self.hint is not None and not self.is_deaf:
            self.hint(is_writing=True)

    def _on_write(self, inode: Any, path: str) -> None:
        if self.kernel.actor == "ckptd":
            self.judge.on_write(inode, path)

    def _on_nas(self) -> dict[str, tuple[object, bytes]]:
        found: dict[str, tuple[object, bytes]] = {}
        top = self._mounted["nas"].root.entries.get("run")
        stack = [("", top)] if top is not None else []
        while stack:
            prefix, folder = stack.pop()
            for name, inode in folder.entries.items():
                if inode.is_folder:
                    stack.append((f"{prefix}{name}/", inode))
                elif not name.startswith(".ckptd-"):
                    found[prefix + name] = (inode.ino, inode.changed_ns, len(inode.data)), bytes(inode.data)
        return found

    def _in_cloud(self) -> dict[str, tuple[object, bytes]]:
        return {key: (id(data), data) for key, data in self.cloud.objects.items()}

    # --- the daemon ------------------------------------------------------------------------------------

    def ensure_daemon(self) -> Job:
        """Start it when it does not run."""
        if self.job is None:
            workers = Workers(self.posts.append)
            costs = [child_bytes(remote.url, remote.client) for remote in self.config.remotes]
            self.limits = HostLimits(DaemonConfig(), self._sessions, lambda: 0, remotes=lambda: [costs])
            if self.starts == 0 and self.config.existing != "all":
                # a folder without a file is no checkpoint yet
                self.judge.protected = {s.number for s in self.trainer.saves if s.is_finished or s.written}
            has_journal = self._has_journal()
            if not has_journal:
                self.judge.lost_journal()
            self.starts += 1
            self.judge.on_start(seals_anew=not has_journal or self._was_cut)
            self._was_cut = False
            self.kernel.history.append("daemon starts")
            self.job = Job(
                self.config,
                DaemonConfig(),
                STATE_DIR,
                self.limits,
                workers,
                self.posts.append,
                is_patient=False,
            )
            self.job.open()
        return self.job

    def _has_journal(self) -> bool:
        try:
            return not self.kernel.content_of(f"{STATE_DIR}/journal.db")
        except OSError:
            return False

    def _sessions(self) -> list[RemoteSession]:
        return list(self.job.sessions.values()) if self.job is not None else []

    def guarded(self, what: Callable[[], None]) -> bool:
        """Do something of the daemon's; False when that killed it."""
        try:
            what()
        except Killed:
            self._killed()
            return False
        except Broken:
            raise
        except CkptdError as error:
            msg = f"P7: the job stops: {error}"
            raise Broken(msg) from error
        except Exception as error:
            msg = f"a defect: {type(error).__name__}: {error}"
            raise Broken(msg) from error
        if self.defect is not None:
            msg = f"a defect: {type(self.defect).__name__}: {self.defect}"
            raise Broken(msg) from self.defect
        return True

    def turn(self) -> None:
        """What happened reaches the deciding thread, then a turn."""
        job = self.ensure_daemon()
        self.take_posts()
        job.turn(self.kernel.now_seconds)
        self.limits.share_and_wake()

    def take_posts(self) -> None:
        """What happened elsewhere reaches the deciding thread, before any turn."""
        while self.posts:
            self.posts.popleft()()

    def work(self, rng: random.Random) -> bool:
        """Let one worker or one remote's process go on; False when all have nothing to do."""
        choices: list[Callable[[], None]] = [lambda t=t: self._run(t) for t in self.tasks]  # type: ignore[misc]
        choices += [
            lambda c=client, lane=lane: c.go_on(lane)  # type: ignore[misc]
            for client in self.clients
            for lane in client.lanes()
        ]
        if not choices:
            return False
        rng.choice(choices)()
        return True

    def _run(self, task: Callable[[], None]) -> None:
        self.tasks.remove(task)
        task()

    def move(self, rng: random.Random) -> bool:
        """One thing happens: a worker, a remote, or a turn; False when that killed the daemon."""

        def one() -> None:
            self.ensure_daemon()
            if rng.random() < 0.4 or not self.work(rng):
                self.turn()

        return self.guarded(one)

    def live_on(self, seconds: float, rng: random.Random, until: Callable[[], bool] = lambda: False) -> None:
        """Time passes with a daemon that runs, or is started again when it was killed."""
        end = self.clock() + seconds
        moves = 0
        while self.clock() < end and not until():
            moves += 1
            if moves > MOST_MOVES:
                self.judge.say("liveness", f"{MOST_MOVES} moves in {seconds} s")

            def one() -> None:
                job = self.ensure_daemon()
                if self.work(rng):
                    if rng.random() < 0.5:
                        self.turn()
                    return
                if not self.posts:
                    wait = job.seconds_to_next(self.kernel.now_seconds)
                    self.kernel.now_seconds += min(max(wait, 0.01), 10.0)
                self.turn()

            self.guarded(one)

    def clock(self) -> float:
        """Seconds of this life; a power cut sets the kernel's clock back, hours perhaps, never this one."""
        return self.kernel.now_seconds + self.slept_seconds

    def kill(self) -> None:
        """The daemon's processes end now."""
        self.kernel.history.append("killed between two calls")
        self._killed()

    def _killed(self) -> None:
        kernel = self.kernel
        self.crashes += 1
        sealed, claims, was_power_cut = self._sealed(), self.claims(), self.is_power_cut
        if self.job is not None:
            for session in self.job.sessions.values():
                session.close()
        self.job, self.hint = None, None
        self.posts.clear()
        self.tasks.clear()
        self.clients.clear()
        self.cloud.partial = dict(self.cloud.partial)
        if self.is_power_cut:
            self.trainer.abort()
            for disk in self._mounted.values():
                disk.lose_power(self._rng)
            wall, before = kernel.wall(), kernel.now_seconds
            self._was_cut = True
            kernel.now_seconds = self._rng.uniform(1.0, 400.0)
            kernel.wall_offset_seconds = wall + self._rng.choice((20.0, 300.0)) - kernel.now_seconds
            self.slept_seconds += before - kernel.now_seconds
        self.stage.databases.roll_back()
        kernel.forget_processes()
        kernel.history.append("power cut" if self.is_power_cut else "kill -9")
        if self.is_power_cut:
            self._after_power_cut(sealed)
        self.is_power_cut = False
        kernel.actor = "judge"
        if was_power_cut:
            self.judge.lost_power(claims)
        else:
            self.judge.look({})
        kernel.actor = "ckptd"

    # --- what a power cut may not take -----------------------------------------------------------------

    def _sealed(self) -> list[int]:
        """Saves that ckptd calls durable and that lie here as they were saved."""
        state = self.job.state if self.job is not None else None
        if state is None:
            return []
        found = []
        for row in state.saves.rows.values():
            save = self.trainer.current(row.save.tag)
            if row.state == "present" and save is not None and save.is_finished and not save.is_gone:
                steps = {f.identity.ino for f in row.save.files}
                inodes = {inode.ino for inode in save.inodes.values()}
                times = {f.path: f.identity.mtime_ns for f in row.save.files}
                same = all(times.get(p) == inode.written_ns for p, inode in save.inodes.items())
                if steps == inodes and same and self.is_intact(save):
                    found.append(save.number)
        return found

    def is_intact(self, save: Save) -> bool:
        """Every file of a save lies under its tag with its content."""
        for path, data in save.files.items():
            try:
                if self.kernel.content_of(f"{SAVE_DIR}/{save.tag}/{path}") != data:
                    return False
            except OSError:
                return False
        return True

    def _after_power_cut(self, sealed: list[int]) -> None:
        self._take_back()
        for save in self.trainer.saves:
            if save.is_gone or self.is_intact(save):
                continue
            removed = self.judge.removed.get(save.number, 0)
            if not removed and save.number in sealed and not self._in_trash(save):
                self.judge.say("P7", f"save {save.number} ({save.tag}) was sealed, and a power cut tore it")
            if removed and self._is_torn(save):
                self.judge.say("P7", f"{save.tag} lies in save_dir with files that ckptd removed")
            if not removed and not self._in_trash(save):
                save.is_gone = True

    def _take_back(self) -> None:
        """What was about to be overwritten may be there as it was before: then it is that save again."""
        for tag in dict.fromkeys(save.tag for save in self.trainer.saves):
            mine = [save for save in self.trainer.saves if save.tag == tag]
            whole = [save for save in mine if self.is_intact(save)]
            for save in mine:
                if whole:
                    save.is_gone = save is not whole[-1]
            for path in whole[-1].files if whole else ():
                inode = self.kernel.inode_of(f"{SAVE_DIR}/{tag}/{path}")
                inode.saved = whole[-1].number, path
                whole[-1].inodes[path] = inode

    # --- what people decide ----------------------------------------------------------------------------

    def decide(self, kind: Literal["pin", "unpin", "adopt"], tag: str) -> None:
        """What `ckptd pin [--remove]` and `accept --existing` do: in each remote, then on the node (P8)."""
        if not self.kernel.exists(STATE_DIR) or any(f.mood == "stale" for f in self.moods.values()):
            return  # a store whose listings lie tells no serial
        judge = self.judge
        if kind == "adopt":
            judge.protected.clear()
        else:
            judge.pinned.pop(tag, None)
            judge.maybe_pinned.add(tag)
        serial = int(self.kernel.wall() * 1e9)
        decision = Decision(kind=kind, tag=tag, by="a person", serial=serial)
        self.kernel.history.append(f"{kind} {tag}")
        try:
            for remote in self.config.remotes:
                store = self._open_store(remote.url)
                decision = observe.record(store, decision, observe.require_identity(store))
            write_decision(STATE_DIR, decision)
        except (CkptdError, OSError) as error:
            self.kernel.history.append(f"it failed: {error}")
        else:
            if kind == "pin":
                judge.on_pin(tag)
            elif kind == "unpin":
                judge.maybe_pinned.discard(tag)

    def configure(self, config: JobConfig) -> None:
        """A person changes the limits of the job file: the job ends and starts with it."""
        self.kill()
        self.kernel.history.append(f"the job file says {rules_of(config)}")
        self.config = config
        self.had_limits |= {r.name for r in config.remotes if r.save_total_limit is not None}
        self.judge.on_rules(rules_of(config), frozenset(r.name for r in config.remotes if r.required))

    def trainer_has(self, tag: str) -> bool:
        """The folder is in save_dir."""
        return tag in self.kernel.listdir(SAVE_DIR)

    def _is_torn(self, save: Save) -> bool:
        try:
            names = self.kernel.listdir(f"{SAVE_DIR}/{save.tag}")
        except OSError:
            return False
        return bool(names) and not set(names) >= set(save.files)

    def _in_trash(self, save: Save) -> bool:
        kernel = self.kernel
        try:
            names = kernel.listdir(f"{SAVE_DIR}/_ckptd/trash")
        except OSError:
            return False
        for name in names:
            if name.rsplit(".", 1)[0] == save.tag:
                folder = f"{SAVE_DIR}/_ckptd/trash/{name}"
                there = kernel.listdir(folder)
                if all(p in there and kernel.content_of(f"{folder}/{p}") == d for p, d in save.files.items()):
                    return True
        return False

    # --- looking ---------------------------------------------------------------------------------------

    def claims(self) -> dict[str, list[tuple[str, str]]]:
        """What the daemon believes to be committed."""
        state = self.job.state if self.job is not None else None
        found: dict[str, list[tuple[str, str]]] = {}
        for row_id, records in (state.uploads.records if state else {}).items():
            row = state.saves.rows.get(row_id) if state else None
            for record in records.values():
                is_here = row is not None and row.state == "present" and record.form == ZERO
                if is_here and record.state is UploadState.COMMITTED and record.commit_key:
                    found.setdefault(record.remote, []).append(
                        (record.commit_key, record.commit_sha256 or "")
                    )
        return found

    def look(self) -> None:
        """Judge the world as it is now."""
        self.kernel.actor = "judge"
        try:
            self.judge.look(self.claims())
        finally:
            self.kernel.actor = "ckptd"

    def is_at_rest(self) -> bool:
        """Nothing is left to do, and nothing is under way."""
        return self.has_nothing_to_do() and not self.tasks and not self.posts

    def has_nothing_to_do(self) -> bool:
        """Nothing is left to do; a heartbeat may be under way."""
        job = self.job
        if job is None:
            return False
        if not all(session.is_ready and not session.seconds_to_transfer for session in job.sessions.values()):
            return False
        return is_idle(job)

    def has_rested(self) -> bool:
        """At rest, with nothing to do for a while: a backoff that ends has not reached the next plan yet.

        `--once` gives up what failed thrice; a daemon does not, and here every remote works again. Heartbeats
        interrupt no rest: where a save is in doubt they come more often than a while lasts.
        """
        job = self.job
        state, view = (job.state, job.view) if job is not None else (None, None)
        verdicts = state.plan.local_verdicts if state is not None and state.plan is not None else {}
        waits = (
            state is not None and state.uploads.failed_late
        )  # files that came late are tried again as well
        if not self.has_nothing_to_do() or waits or (view is not None and tried_again(view, verdicts)):
            self._rests_since = None
        elif self._rests_since is None:
            self._rests_since = self.kernel.now_seconds
        if self._rests_since is None or not self.is_at_rest():
            return False
        return self.kernel.now_seconds - self._rests_since > REST_SECONDS

    def exit_code(self) -> int:
        """What `--once` would end with."""
        return exit_code(self.job) if self.job is not None else -1

    # --- what happens to remotes -----------------------------------------------------------------------

    def set_mood(self, name: str, mood: str) -> None:
        """How a remote behaves from now on; `empty`: its mount point shows an empty folder instead."""
        self.moods[name].mood = mood
        self.was_stale = self.judge.was_stale = self.was_stale or mood == "stale"
        if name == NAS:
            mounted = self._mounted["nas"]
            if mood == "empty":
                # what lies under a mount point is the root file system
                self.kernel.add_disk("nas").mount_at(os.stat("/").st_dev)
            else:
                self.kernel.disks["nas"] = mounted

    def forget(self, name: str, rng: random.Random) -> None:
        """Somebody removes a COMMIT, never the newest."""
        if name not in {remote.name for remote in self.config.remotes}:
            return
        live = sorted(self.judge.live(name), key=lambda live: live.order)
        newest = {one.run_id: one for one in live}.values()
        found = [one for one in live if one not in newest]
        if not found:
            return
        key = rng.choice(found).key
        if name == S3:
            del self.cloud.objects[key]
        else:
            disk = self._mounted["nas"]
            folder = disk.root
            for part in ["run", *key.split("/")[:-1]]:
                folder = folder.entries[part]
            base = key.rsplit("/", 1)[1]
            disk.change((folder, base, None), moved=(folder.entries[base],))
            disk.flush_folder(folder)
        self.judge.forgot(name, key)

    def another_commits(self, rng: random.Random) -> None:
        """Another run of this job name commits into a remote of the job."""
        name = rng.choice(self.config.remotes).name
        with self._beside(name) as store:
            self.other.commit(name, store, rng, self.trainer.saves)

    def another_ends(self) -> None:
        """The daemon of the other run is stopped."""
        for name in sorted(self.other.beating):
            with self._beside(name) as store:
                self.other.end(name, store)

    @contextlib.contextmanager
    def reading(self, name: str, tag: str) -> Iterator[Callable[[], None]]:
        """A lease on a checkpoint of a remote for as long as the block runs; yields what renews it."""
        with self._beside(name) as store:
            lease = ReaderLease(store, "restore")

        def renew() -> None:
            with self._beside(name):
                lease.hold(tag)

        renew()
        self.judge.on_read(name, tag)
        try:
            yield renew
        finally:
            self.judge.being_read.clear()
            with self._beside(name):
                lease.end()

    @contextlib.contextmanager
    def _beside(self, name: str) -> Iterator[Any]:
        """A remote as it truly is, over a connection without moods: where it is not mounted here, too."""
        kernel = self.kernel
        shown, kernel.disks["nas"] = kernel.disks["nas"], self._mounted["nas"]
        kernel.actor = "judge"
        try:
            yield MemoryStore(self.cloud.objects) if name == S3 else open_store(NAS_URL)
        finally:
            kernel.actor = "ckptd"
            kernel.disks["nas"] = shown

    def judge_rest(self) -> None:
        """At the end: at rest, everything committed, no more kept than the limit allows."""
        say = self.judge.say
        if not self.is_at_rest():
            say("liveness", f"the daemon does not come to rest: {self._words()}")
        here = self._uploaded_here()
        required = [remote.name for remote in self.config.remotes if remote.required]
        # what may go uncommitted is not sent while the hourly limit or a doubt holds it here
        for save in here if self.config.unuploaded == "keep" else here[-1:]:
            for name in required:
                is_retired = name in self.had_limits and save.number in self.judge.ever[name]
                if not self.judge.holds(name, save) and not is_retired:
                    say("liveness", f"save {save.number} ({save.tag}) never got to {name}: {self._words()}")
        if extra := self._above_limit(here):
            limit = self.judge.rules.local.most
            say("P5", f"{limit} may stay, {', '.join(extra)} do as well: {self._words()}")
        self._judge_leftovers()
        self._judge_memory()

    def _judge_leftovers(self) -> None:
        """Nothing half-done lies about, and only what is still wanted is held."""
        state = self.job.state if self.job is not None else None
        for name in ("trash", "staging"):
            if left := self._ours(name):
                self.judge.say("P7", f"_ckptd/{name} holds {left} at rest")
        wanted = (
            {hold_name(row) for row in state.saves.rows.values() if row.held} if state is not None else set()
        )
        strays = set(state.holds.stray) if state is not None else set()
        held = {name.removesuffix(about_name("")) for name in self._ours("hold")}
        if held - wanted - strays:
            self.judge.say("P7", f"_ckptd/hold holds {sorted(held - wanted)}, wanted are {sorted(wanted)}")

    def _judge_memory(self) -> None:
        """The journal, read again, says what the daemon has in mind."""
        state = self.job.state if self.job is not None else None
        if state is None:
            return
        rows, uploads = dict(state.saves.rows), _without_waits(state)
        state.load()
        if rows != state.saves.rows:
            self.judge.say("P7", f"the journal knows other saves: {rows} and {state.saves.rows}")
        if uploads != (again := _without_waits(state)):
            self.judge.say("P7", f"the journal knows other uploads: {uploads} and {again}")

    def _ours(self, name: str) -> list[str]:
        try:
            return sorted(self.kernel.listdir(f"{SAVE_DIR}/_ckptd/{name}"))
        except OSError:
            return []

    def is_in_doubt(self) -> bool:
        """The clock was set back, and more stay than may: their times contradict until the next save."""
        return self.was_set_back and bool(self._above_limit(self._uploaded_here()))

    def _uploaded_here(self) -> list[Save]:
        """What lies here whole and is uploaded, and believed to be one save, without anybody being asked."""
        alive = [s for s in self.trainer.saves if s.is_finished and not s.is_gone and not s.is_rotated]
        found_first = self._found_first() if self.config.existing != "all" else frozenset()
        spread = self.config.save_spread_seconds - 1
        return [
            s
            for s in alive
            if self.is_intact(s)
            and s.tag not in found_first
            and s.window_seconds < spread
            and s.number not in self.clocked
        ]

    def _above_limit(self, here: list[Save]) -> list[str]:
        """What stays beyond the limit, but for what a rewind left ahead or the hourly limit holds up."""
        keys = self.judge.rules.local
        if keys.limit is None or keys.most is None or self.was_stale or not here:
            return []
        # what was removed before the clock was set back may count as just removed for as long
        since = 0.0 if self.was_set_back else self.clock() - 2 * HOUR_SECONDS
        if sum(at >= since for at in self.judge.removed_at) >= max(3, 2 * keys.limit):
            return []
        spared = self.written_over | self.judge.maybe_pinned
        behind = [s for s in here if s.step < here[-1].step and s.tag not in spared]
        beyond = [save.tag for save in behind if not keys.may_stay(save.step)]
        return beyond if len(beyond) + 1 > keys.most else []

    def _found_first(self) -> frozenset[str]:
        """Tags that ckptd noted as older than itself: not uploaded without being asked."""
        kernel, folder = self.kernel, f"{STATE_DIR}/decisions"
        try:
            names = kernel.listdir(folder)
        except OSError:
            return frozenset()
        notes = [json.loads(kernel.content_of(f"{folder}/{n}")) for n in names if n.startswith("first-start")]
        return frozenset(tag for note in notes for tag in note["tags"])

    def _words(self) -> str:
        job = self.job
        if job is None or job.state is None:
            return "no state"
        verdicts = {
            tag: f"{v.state} {v.reason or ''}".strip() for tag, v in job.state.folders.verdicts.items()
        }
        problems = [f"{p.code}: {p.text}" for p in job.problems.all()]
        plan = [type(x).__name__ for x in job.state.plan.actions] if job.state.plan else None
        return f"verdicts {verdicts}, problems {problems}, plan {plan}"


def _without_waits(state: JobState) -> dict[tuple[int, str, str], UploadRecord]:
    """Records of uploads; when one is tried again is monotonic, and in memory alone."""
    return {
        (save_id, *key): record.model_copy(update={"retry_at_seconds": 0.0})
        for save_id, records in state.uploads.records.items()
        for key, record in records.items()
    }
