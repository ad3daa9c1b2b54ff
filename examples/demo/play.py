"""The play itself: training under watch, two kills, a lost node, resume on other ranks, the end.

Faults are real: SIGKILL to ckptd in mid-upload, SIGKILL to every rank in mid-save, rm of the node's files.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.actors import Daemon, Watcher
from examples.demo.convert_only import QuickstartFailed, run_ckptd
from examples.demo.evidence import folder_files
from examples.demo.launch import start_training

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.demo.gate import Gate
    from examples.demo.launch import Training
    from examples.demo.progress import Progress
    from examples.demo.scene import Scene

REFERENCE = "reference"
COMMITS_BEFORE_KILL = 2
OUTAGE_SECONDS = 6.0
QUIET_SECONDS = 0.5
"""Until requests that were under way when the gate was shut have ended."""
TICK_SECONDS = 0.05
ACT_SECONDS = 400.0
SETTLE_SECONDS = 200.0


class Play:
    """One quickstart from the first step to the last COMMIT."""

    def __init__(self, scene: Scene, progress: Progress) -> None:
        self._scene, self._progress = scene, progress
        self._daemon = Daemon(scene)
        self._watcher: Watcher | None = None
        self._trainings: list[Training] = []
        self._reference: Training | None = None

    def run(self) -> None:
        """All acts; whatever was started is ended, however it goes."""
        self._scene.prepare()
        try:
            self._watcher = Watcher(self._scene)
            self._daemon.start()
            self._train_and_kill()
            self._lose_the_node()
            self._resume()
            self._train_to_the_end()
        finally:
            for training in self._trainings:
                training.kill()
            self._daemon.stop()
            if self._watcher is not None:
                self._watcher.stop()
            self._keep_audit("2")

    def _wait(self, what: str, done: Callable[[], bool], seconds: float, *, must: bool = True) -> bool:
        deadline = time.monotonic() + seconds
        while not done():
            self._daemon.check()
            self._progress.update()
            if time.monotonic() > deadline:
                if must:
                    msg = f"waited {seconds:.0f} s for {what}"
                    raise QuickstartFailed(msg, hint=f"see {self._scene.records}")
                return False
            time.sleep(TICK_SECONDS)
        return True

    def _start(self, run: str, world_size: int, options: list[str]) -> Training:
        scene = self._scene
        training = start_training(
            run,
            scene.records,
            scene.root / run if run == REFERENCE else scene.save_dir,
            stage=scene.stage,
            world_size=world_size,
            options=["--last-step", str(scene.script.last_step), *scene.script.model, *options],
            in_background=run == REFERENCE,
        )
        self._trainings.append(training)
        if run != REFERENCE:
            self._progress.follow(training)
        return training

    def _pace(self) -> list[str]:
        script = self._scene.script
        return ["--save-every", str(script.save_every), "--step-seconds", str(script.step_seconds)]

    def _train_and_kill(self) -> None:
        scene, say = self._scene, self._progress.say
        say(f"training on {scene.world_size} ranks, ZeRO stage {scene.stage}; ckptd watches")
        options = [*self._pace(), "--tear-at", str(scene.script.torn_at)]
        training = self._start("first", scene.world_size, options)
        say("beside it, in idle time, the same training without saves and faults, for comparison")
        self._reference = self._start(REFERENCE, scene.world_size, [])
        hit: list[str] = []

        def uploading() -> bool:
            training.check()
            hit[:] = scene.remote.parts_in_flight()
            return bool(hit) and len(scene.committed_tags()) >= COMMITS_BEFORE_KILL

        self._wait("an upload to interrupt", uploading, ACT_SECONDS)
        tag = hit[0]
        self._daemon.kill()
        scene.note("kill-daemon", tag=tag, part_bytes=scene.remote.parts_in_flight().get(tag, 0))
        say(f"SIGKILL to ckptd in the middle of the upload of {tag}; it is started again")
        self._daemon.start()
        self._wait(f"a torn save of {scene.torn_tag}", lambda: self._is_torn(training), ACT_SECONDS)
        self._wait(f"the COMMIT of {tag}", lambda: tag in scene.committed_tags(), SETTLE_SECONDS)
        training.kill()
        scene.note("kill-trainer", tag=scene.torn_tag, latest=self._latest())
        torn = folder_files(scene.save_dir / scene.torn_tag)
        scene.write_plan([(name, size, digest) for name, (size, digest) in torn.items()])
        say(
            f"SIGKILL to the training in the middle of saving {scene.torn_tag}; latest names {self._latest()}"
        )

    def _is_torn(self, training: Training) -> bool:
        training.check()
        if not any(line["kind"] == "tearing" for line in training.rank_lines(1)):
            return False
        if self._scene.stage < 3:
            return self._latest() == self._scene.torn_tag
        folder = self._scene.save_dir / self._scene.torn_tag
        before = [p.stat().st_size for p in sorted(folder.iterdir())]
        time.sleep(1.0)
        return before == [p.stat().st_size for p in sorted(folder.iterdir())]

    def _latest(self) -> str | None:
        try:
            return (self._scene.save_dir / "latest").read_text().strip()
        except OSError:
            return None

    def _lose_the_node(self) -> None:
        scene, begin = self._scene, time.time()
        self._daemon.kill()
        self._keep_audit("1")
        for path in scene.save_dir.iterdir():
            if path.name in (scene.torn_tag, "latest"):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        scene.note("wipe", begin=begin, left=sorted(p.name for p in scene.save_dir.iterdir()))
        self._progress.say("the node is replaced: only the unfinished save and `latest` are left of it")

    def _keep_audit(self, name: str) -> None:
        source = self._scene.state_dir / "audit.jsonl"
        if source.exists():
            shutil.copyfile(source, self._scene.root / "audit" / f"{name}.jsonl")

    def _resume(self) -> None:
        scene, begin = self._scene, time.time()
        ranks = scene.resume_world_size
        done = run_ckptd(
            ["resume", str(scene.job_file), "--world-size", str(ranks)], environment=scene.remote.environment
        )
        scene.note(
            "resume",
            begin=begin,
            exit_code=done.returncode,
            printed=done.stdout.strip(),
            stderr=done.stderr,
            latest=self._latest(),
        )
        if done.returncode:
            msg = f"ckptd resume ended with {done.returncode}: {done.stderr.strip()}"
            raise QuickstartFailed(msg)
        path = Path(done.stdout.strip()).relative_to(scene.save_dir)
        self._progress.say(f"ckptd resume: {path} after {time.time() - begin:.1f} s")
        self._progress.say(f"the unfinished {scene.torn_tag} was moved to _ckptd/aside")

    def _train_to_the_end(self) -> None:
        scene, ranks = self._scene, self._scene.resume_world_size
        self._daemon.start()
        self._progress.say(f"training resumes from universal on {ranks} {'rank' if ranks == 1 else 'ranks'}")
        options = [*self._pace(), "--load", "universal", "--init-seed", "99"]
        resumed = self._start("resumed", ranks, options)
        if scene.remote.gate is not None:
            self._shut(scene.remote.gate, resumed)
        self._wait("the resumed training", lambda: not resumed.check(), ACT_SECONDS)
        reference = self._reference
        self._wait("the reference run", lambda: reference is None or not reference.check(), ACT_SECONDS)
        tags = {str(line["tag"]) for line in resumed.lines("saved")}
        self._wait("the last COMMITs", lambda: tags <= scene.committed_tags(), SETTLE_SECONDS, must=False)
        self._wait("rotation", lambda: self._is_rotated(tags), SETTLE_SECONDS / 3, must=False)

    def _shut(self, gate: Gate, resumed: Training) -> None:
        """No way to the remote for a while, from the middle of an upload on."""
        scene, hit = self._scene, list[str]()

        def uploading() -> bool:
            resumed.check()
            saved = {str(line["tag"]) for line in resumed.lines("saved")}
            hit[:] = saved & scene.remote.uploads_in_flight() - scene.committed_tags()
            return bool(hit)

        self._wait("an upload to cut off", uploading, ACT_SECONDS)
        gate.shut()
        time.sleep(QUIET_SECONDS)
        begin, tag = time.time(), hit[0]
        self._progress.say(
            f"no way to {scene.remote.place} for {OUTAGE_SECONDS:.0f} s, in mid-upload of {tag}"
        )
        self._wait("the way back", lambda: time.time() > begin + OUTAGE_SECONDS, OUTAGE_SECONDS * 2)
        scene.note("remote-away", begin=begin, tag=tag)
        gate.reopen()

    def _is_rotated(self, tags: set[str]) -> bool:
        """Rotation is over and the newest universal form is in the remote."""
        newest = max(tags, key=lambda tag: int(tag.removeprefix("global_step")))
        scene = self._scene
        local = [tag for tag in scene.local_tags() if tag in scene.committed_tags()]
        return len(local) <= 2 and newest in scene.committed_tags("universal")
