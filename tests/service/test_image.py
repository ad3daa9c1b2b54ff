"""The Dockerfile, step by step, and the pod's commands in what it makes.

No container runtime: the steps run in a mount namespace with an empty /opt, then everything becomes read-only
and a user id that nobody has runs resume, daemon, probe and drain with the manifest's own settings. Packages
come from this environment; with CKPTD_FULL=1 from the index, as in a real build.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.real import REPOSITORY
from tests.support.synthetic import write_stage12

pytestmark = [pytest.mark.root, pytest.mark.faults]

PLACE = REPOSITORY / "examples" / "kubernetes"
UID = 54321
FULL = bool(os.environ.get("CKPTD_FULL"))
SITES = [path for path in sys.path if path.endswith("site-packages") and Path(path).is_dir()]
OFFLINE = {
    "PYTHONPATH": ":".join(f"/opt/site{number}" for number, _ in enumerate(SITES)),
    "PIP_NO_INDEX": "1",
    "PIP_NO_DEPS": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round
}
SETUP = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir /opt/python /opt/src
mount --bind {base} /opt/python
{sites}
cp -r {source}/. /opt/src
cd /opt/src
image=$PATH
PATH=/opt/python/bin:/usr/sbin:/usr/bin:/sbin:/bin
{steps}
mount --bind {world} /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
for place in / /opt /opt/python /opt/site*; do mount -o remount,bind,ro $place; done
cd /
PATH=$image
exec setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
  sh /mnt/story.sh
"""
STORY = """
if touch /opt/ckptd/written 2>/dev/null; then echo "the root is writable"; fi
{first}
echo "first start $?"
( {resume} )
echo "resume $?"
{daemon} &
daemon=$!
until {probe} > /dev/null 2>&1; do
  kill -0 $daemon || exit 9
  sleep 0.2
done
{health}
echo "healthy $?"
touch /mnt/run/up
until [ -e /mnt/run/end ]; do sleep 0.1; done
{stop}
echo "preStop $?"
touch /mnt/run/trained
until [ -e /mnt/run/stop ]; do sleep 0.1; done
kill -TERM $daemon
wait $daemon
echo "drained $?"
"""


@dataclass(frozen=True)
class Stage:
    """One stage of the Dockerfile: its instructions in order."""

    steps: tuple[tuple[str, str], ...]

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.steps if found == word]


def stages() -> list[Stage]:
    """The Dockerfile; none of its instructions goes over several lines."""
    found: list[list[tuple[str, str]]] = []
    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        if line.strip() and not line.startswith(("#", "ARG ")):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                found.append([])
            found[-1].append((word, rest))
    return [Stage(tuple(steps)) for steps in found]


def copied(stage: Stage, into: Path) -> None:
    """What COPY takes from the source tree."""
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for rest in stage.all("COPY"):
        *sources, target = rest.split()
        for source in sources:
            assert f"!{source}" in ignored, f"{source} is not sent to docker: .dockerignore"
            place = into / target / source if target == "./" else into / target
            if (REPOSITORY / source).is_dir():
                caches = shutil.ignore_patterns("__pycache__")
                shutil.copytree(REPOSITORY / source, place, ignore=caches)
            else:
                shutil.copyfile(REPOSITORY / source, place)


def settings(world: str) -> dict[str, str]:
    """The ConfigMap, with a directory for the bucket."""
    config, _, job = yaml.safe_load_all((PLACE / "training.yaml").read_text())
    assert job["kind"] == "Job"
    found: dict[str, str] = dict(config["data"])
    del found["CKPTD_REMOTE_REGION"]
    for key in ("CKPTD_SAVE_DIR", "CKPTD_STATE_DIR"):
        found[key] = found[key].replace("/nvme", f"{world}/nvme")
    return found | {
        "CKPTD_URL": f"{world}/nas/llama-7b",
        "CKPTD_REMOTE_SAME_FILESYSTEM": "true",
        "CKPTD_SETTLE": "0.5s",
        "WORLD_SIZE": "2",
    }


def story() -> str:
    """The pod's commands: init container, the image's own with the sidecar's arguments, probe."""
    pod: dict[str, Any] = list(yaml.safe_load_all((PLACE / "training.yaml").read_text()))[2]["spec"][
        "template"
    ]
    resume, sidecar = pod["spec"]["initContainers"]
    once = yaml.safe_load((PLACE / "first-start.yaml").read_text())["spec"]["template"]["spec"]
    final = stages()[-1]
    entry = yaml.safe_load(final.all("ENTRYPOINT")[0])
    assert yaml.safe_load(final.all("CMD")[0]) == sidecar["args"]
    return STORY.format(
        resume=f"sh -ec {shlex.quote(resume['args'][0].replace('/run/ckptd', '/mnt/run'))}",
        first=shlex.join([*entry, *once["containers"][0]["args"]]),
        daemon=shlex.join([*entry, *sidecar["args"]]),
        health=shlex.join(yaml.safe_load(final.all("HEALTHCHECK")[0].partition(" CMD ")[2])),
        probe=shlex.join(sidecar["livenessProbe"]["exec"]["command"]),
        stop=shlex.join(sidecar["lifecycle"]["preStop"]["exec"]["command"]),
    )


def save(world: Path, step: int) -> None:
    """What the trainer leaves on the volume."""
    folder = world / "nvme" / "llama-7b" / f"global_step{step}"
    write_stage12(folder, [{"w": (8, 3)}], 2, step=step)
    for path in (folder.parent, folder, *folder.iterdir()):
        os.chown(path, UID, UID)


def wait(what: str, done: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if done():
            return
        time.sleep(0.1)
    raise AssertionError(f"waited for {what}: {log.read_text()[-4000:]}")


def test_the_image_runs_read_only_under_any_user(tmp_path: Path) -> None:
    """Built by its own steps; where nothing is committed, a fresh start; alive before the first checkpoint,
    which is then committed; preStop and SIGTERM each commit what was saved just before, the end is 0."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    build, final = stages()
    assert final.all("COPY") == ["--from=build /opt/ckptd /opt/ckptd"]
    assert final.all("USER") == ["10001:10001"]
    world, source = tmp_path / "world", tmp_path / "source"
    for name in ("nvme", "nas/llama-7b", "run"):
        (world / name).mkdir(parents=True)
    source.mkdir()
    copied(build, source)
    (world / "story.sh").write_text(story())
    for path in (world, *world.rglob("*")):
        os.chown(path, UID, UID)
    script = tmp_path / "setup.sh"
    script.write_text(
        SETUP.format(
            base=sys.base_prefix,
            sites="\n".join(
                f"mkdir /opt/site{n}; mount --bind {path} /opt/site{n}" for n, path in enumerate(SITES)
            ),
            source=source,
            world=world,
            steps="\n".join(build.all("RUN")),
            uid=UID,
        )
    )
    made = dict(word.split("=", 1) for word in final.all("ENV")[0].split())
    environment = {
        **settings("/mnt"),
        **made,
        "PATH": made["PATH"].replace("/usr/local/bin", "/opt/python/bin") + ":/usr/sbin:/sbin",
        "LANG": "C.UTF-8",
        **({} if FULL else OFFLINE),
    }
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = ["unshare", "--mount", "--fork", "--kill-child", "sh", str(script)]
        pod = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait("the probe", (world / "run" / "up").exists, pod, log)
        assert (world / "run" / "resume-from").read_text() == ""
        commits = world / "nas" / "llama-7b" / "_ckptd" / "commits"
        save(world, 7)
        wait("the COMMIT", (commits / "global_step7~g1~zero.json").exists, pod, log)
        save(world, 8)
        (world / "run" / "end").touch()
        wait("preStop", (world / "run" / "trained").exists, pod, log)
        assert (commits / "global_step8~g1~zero.json").exists(), log.read_text()[-4000:]
        save(world, 9)
        (world / "run" / "stop").touch()
        assert pod.wait(120) == 0, log.read_text()[-4000:]
    finally:
        if pod.poll() is None:
            pod.send_signal(signal.SIGKILL)
            pod.wait(20)
    said = log.read_text()
    assert "first start 0" in said
    assert "resume 0" in said
    assert "healthy 0" in said
    assert "preStop 0" in said
    assert "drained 0" in said
    assert said.index("draining for at most 110 s") < said.index("global_step9 (zero) committed")
    assert "writable" not in said
    assert {path.stat().st_uid for path in commits.iterdir()} == {UID}
