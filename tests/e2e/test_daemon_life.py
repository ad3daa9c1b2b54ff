"""The daemon's ordinary life and its restarts, with real saves, a real directory and a real SIGKILL."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.harness import (
    OTHER_RUN,
    PATIENCE_SECONDS,
    RUN,
    Node,
    children_of,
    made_before,
    node,
    same_bytes,
)
from tests.support.processes import wait_gone
from tests.support.real import save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.faults]
PACED = 'bandwidth = "200kB/s"'


real_saves = made_before(RUN, OTHER_RUN)


def test_ships_converts_commits_and_keeps_the_limit(tmp_path: Path) -> None:
    """Five saves end as two on the node, three in the NAS, byte for byte, with a permit for each deletion."""
    with node(tmp_path, remote="keep_last = 3") as here:
        here.start()
        for step in range(1, 6):
            here.save(step, pause_seconds=0.2)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("two on the node", lambda: here.local_tags() == {"global_step4", "global_step5"})
        here.wait("three in the NAS", lambda: len(here.commits()) == 3)
        here.wait("its universal form", lambda: "global_step5~g1" in here.commits("universal"))
        here.wait("the pointer that follows its COMMIT", (here.nas / "latest_universal").exists)

        assert all(same_bytes(here, f"global_step{n}", RUN, n) for n in (3, 4, 5))
        assert (here.nas / "latest").read_text() == "global_step5"
        assert (here.nas / "latest_universal").read_text() == "global_step5_universal"
        here.wait(
            "the pointer",
            lambda: (
                (here.save_dir / "latest_universal").read_text() == "_ckptd/derived/universal/global_step5"
            ),
        )
        # two that go in one turn may go in either order: each has a worker of its own
        gone = {line["tag"] for line in here.audit()}
        assert gone == {"global_step1", "global_step2", "global_step3"} and len(here.audit()) == 3
        assert all(line["commits"] and len(line["files"]) == 3 for line in here.audit())
        here.wait("safe", lambda: here.status()["safe"]["tag"] == "global_step5")
        assert here.ckptd("status", here.save_dir).returncode == 0
        # a COMMIT in the NAS may be newer than the published status by one interval
        compared = re.compile(r"universal: masters are the model's weights in \d+ tensors, [\d,]+ elements")
        here.wait(
            "what was compared",
            lambda: compared.search(here.ckptd("status", here.save_dir, "global_step5").stdout),
        )
        assert here.stop() == 0
        assert {p.name for p in (here.save_dir / "global_step5").iterdir()} == {
            p.name for p in (save_dir_of(RUN) / "global_step5").iterdir()
        }


@pytest.mark.parametrize("after_bytes", [200_000, 700_000, 1_200_000])
def test_killed_during_an_upload(tmp_path: Path, after_bytes: int) -> None:
    """kill -9 in mid-upload: children end, a restart finishes, nothing is deleted early or sent twice."""
    with node(tmp_path, remote=PACED) as here:
        here.start()
        here.save(1)
        here.wait("bytes under way", lambda: _bytes_in(here.nas) >= after_bytes)
        children = children_of(here.processes[-1].pid)
        here.kill()
        wait_gone(children)
        assert not here.commits()
        whole = {p: p.stat().st_mtime_ns for p in here.nas.rglob("*states.pt") if p.stat().st_size}

        here.write_job(remote="")
        here.start()
        here.wait_committed("global_step1~g1")

        assert same_bytes(here, "global_step1", RUN, 1)
        assert all(p.stat().st_mtime_ns == at for p, at in whole.items())
        assert not here.audit()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and "_ckptd/" not in str(path) else 0
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize("wait_seconds", [0.0, 0.05, 0.15])
def test_killed_during_a_conversion(tmp_path: Path, wait_seconds: float) -> None:
    """kill -9 while converting: no half universal form is ever pointed at; a restart makes a whole one."""
    with node(tmp_path) as here:
        here.start()
        here.save(1)
        staging = here.save_dir / "_ckptd" / "staging"
        here.wait("a conversion", lambda: staging.is_dir() and any(staging.iterdir()), 20)
        time.sleep(wait_seconds)
        here.kill()
        pointer = here.save_dir / "latest_universal"
        if pointer.exists():
            assert here.ckptd("inspect", here.save_dir / pointer.read_text()).returncode == 0

        here.start()
        here.wait("its universal form", lambda: "global_step1~g1" in here.commits("universal"))

        assert here.ckptd("inspect", here.save_dir / pointer.read_text()).returncode == 0
        assert same_bytes(here, "global_step1", RUN, 1)


def test_a_rewound_run(tmp_path: Path) -> None:
    """Rewound from 8 to 4 and saving 5…7: latest is the new 7, nothing of the new branch goes, 8 waits."""
    with node(tmp_path, local="save_total_limit = 3", remote="keep_last = 6") as here:
        here.start()
        for step in (4, 5, 6, 7, 8):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("three left", lambda: len(here.local_tags()) == 3)
        for step in (5, 6, 7):
            if (here.save_dir / f"global_step{step}").exists():
                shutil.rmtree(here.save_dir / f"global_step{step}")
            here.save(step, OTHER_RUN)
            here.wait_committed(f"global_step{step}~g2")

        here.wait("latest", lambda: (here.nas / "latest").read_text() == "global_step7.g2")
        assert {"global_step5", "global_step6", "global_step7", "global_step8"} <= here.local_tags()
        here.wait("branch 2", lambda: here.checkpoint("global_step7")["branch"] == 2)
        assert same_bytes(here, "global_step7.g2", OTHER_RUN, 7)
        assert same_bytes(here, "global_step8", RUN, 8)
        assert not [line for line in here.audit() if line["generation"] == 2]
        here.wait("safe", lambda: here.status()["safe"]["step"] == 7)
        here.wait("kept", lambda: "abandoned" in " ".join(here.checkpoint("global_step8")["keep"]))


def test_one_tag_saved_twice_with_a_crash_between(tmp_path: Path) -> None:
    """A torn re-save is never committed over; the full one becomes generation 2, generation 1 stays whole."""
    with node(tmp_path) as here:
        here.start()
        here.save(3)
        here.wait_committed("global_step3~g1")
        here.save(3, OTHER_RUN, shards=2)
        here.wait(
            "resaving", lambda: here.checkpoint("global_step3")["state"] in ("resaving", "torn re-save")
        )
        time.sleep(2)
        assert set(here.commits()) == {"global_step3~g1"}
        assert same_bytes(here, "global_step3", RUN, 3)
        assert (here.save_dir / "global_step3").is_dir()

        here.save(3, OTHER_RUN)
        here.wait_committed("global_step3~g2")

        assert same_bytes(here, "global_step3", RUN, 3)
        assert same_bytes(here, "global_step3.g2", OTHER_RUN, 3)


def test_journal_deleted(tmp_path: Path) -> None:
    """Without its journal the daemon recognises everything by fingerprints and sends nothing again."""
    with node(tmp_path) as here:
        here.start()
        for step in (1, 2, 3):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("universal", lambda: "global_step3~g1" in here.commits("universal"))
        here.stop()
        before = {p: p.stat().st_mtime_ns for p in here.nas.rglob("*.pt")}
        for path in here.state.glob("journal.db*"):
            path.unlink()

        here.start()
        here.wait("recognised", lambda: here.checkpoint("global_step3")["state"] == "committed")
        here.save(4)
        here.wait_committed("global_step4~g1")
        here.wait("the limit", lambda: here.local_tags() == {"global_step3", "global_step4"})

        assert {p: p.stat().st_mtime_ns for p in before} == before
        commit = here.commits()["global_step4~g1"]
        assert (commit["branch"], commit["step"]) == (1, 4)


def test_state_lost_then_garbage(tmp_path: Path) -> None:
    """A lost state directory deletes nothing that was found; a garbage journal is set aside and rebuilt."""
    with node(tmp_path) as here:
        here.start()
        for step in (1, 2, 3):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.stop()
        (here.state / "journal.db").write_bytes(os.urandom(50_000))
        for tail in ("-wal", "-shm"):
            (here.state / f"journal.db{tail}").unlink(missing_ok=True)

        here.start()
        here.wait("set aside", lambda: "journal-set-aside" in here.problems())
        here.wait("recognised", lambda: here.checkpoint("global_step3")["state"] == "committed")

        assert here.local_tags() >= {"global_step2", "global_step3"}
        assert list(here.state.glob("journal.db.aside-*"))


def test_first_start_deletes_nothing_until_adopted(tmp_path: Path) -> None:
    """Of five old checkpoints the newest is uploaded and none deleted; adopt lets the limit hold."""
    with node(tmp_path) as here:
        for step in range(1, 6):
            here.save(step)
        assert here.once() == 0
        assert set(here.commits()) == {"global_step5~g1"}
        assert len(here.local_tags()) == 5

        assert here.ckptd("accept", here.job_file, "--existing").returncode == 0
        here.start()
        here.wait("the limit", lambda: here.local_tags() == {"global_step4", "global_step5"}, 40)

        assert set(here.commits()) >= {f"global_step{n}~g1" for n in range(1, 6)}


def test_what_was_saved_before_a_remote_first_answered_was_not_found(tmp_path: Path) -> None:
    """The remote is refused at first; the daemon saw three saves come, and is restarted to mend that."""
    with node(tmp_path, remote='forms = ["zero"]', local="forms = []\nsave_total_limit = 2") as here:
        here.write_job(url=str(here.nas))  # without same_filesystem
        for step in (1, 2):
            here.save(step)
        here.start()
        here.wait("the two", lambda: len(here.status().get("checkpoints", ())) == 2)
        for step in (3, 4, 5):
            here.save(step)
        here.wait("all five", lambda: len(here.status()["checkpoints"]) == 5)
        assert not here.commits()
        here.kill()
        here.write_job(url="")
        here.start()
        kept = {f"global_step{n}" for n in (1, 2, 4, 5)}
        sent = {f"global_step{n}~g1" for n in (2, 3, 4, 5)}
        here.wait("the limit", lambda: here.local_tags() == kept)
        here.wait("all but the older of the two", lambda: set(here.commits()) == sent)
        why = "there before ckptd (ckptd accept --existing)"
        here.wait("the reason", lambda: why in here.checkpoint("global_step1").get("keep", ()))
        assert here.local_tags() == kept


def test_pin_survives_the_journal(tmp_path: Path) -> None:
    """A pinned checkpoint stays here and in the NAS, whatever the limit, also without a journal."""
    with node(tmp_path, local="save_total_limit = 1", remote="keep_last = 1") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        assert here.ckptd("pin", here.job_file, "global_step1").returncode == 0
        here.stop()
        for path in here.state.glob("journal.db*"):
            path.unlink()
        here.start()
        for step in (2, 3):
            here.save(step)
            here.wait_committed(f"global_step{step}~g1")
        here.wait("2 gone", lambda: here.local_tags() == {"global_step1", "global_step3"})
        here.wait("2 retired", lambda: set(here.commits()) == {"global_step1~g1", "global_step3~g1"})

        assert here.ckptd("pin", here.job_file, "global_step1", "--remove").returncode == 0
        here.wait("1 gone", lambda: here.local_tags() == {"global_step3"})
        here.wait("1 retired", lambda: set(here.commits()) == {"global_step3~g1"})


def test_a_suspect_save_waits_for_a_person(tmp_path: Path) -> None:
    """Shards written an hour apart are neither committed nor deleted, until accept."""
    with node(tmp_path) as here:
        here.start()
        here.save(1)
        shard = here.save_dir / "global_step1" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        then = time.time() - 3600
        os.utime(shard, (then, then))
        here.wait("suspect", lambda: "suspect-save" in here.problems())
        assert not here.commits()
        assert here.ckptd("accept", here.job_file, "global_step1").returncode == 0
        here.wait_committed("global_step1~g1")


def test_two_daemons_on_one_save_dir(tmp_path: Path) -> None:
    """Of several daemons started at once exactly one runs; the others exit 75 and change nothing."""
    with node(tmp_path) as here:
        here.save(1)
        started = [here.start() for _ in range(1)]
        started += [here.start() for _ in range(5)]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(p.poll() is None for p in started) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [p.poll() for p in started if p.poll() is not None] == [75] * 5
        assert started[0].poll() is None
        here.wait_committed("global_step1~g1")


def test_one_bad_job_among_good_ones(tmp_path: Path) -> None:
    """The good job runs; the bad one is in status with the key that was meant."""
    with node(tmp_path) as here:
        jobs, state = tmp_path / "config" / "jobs.d", tmp_path / "state"
        jobs.mkdir(parents=True)
        shutil.copy(here.job_file, jobs / "run.toml")
        (jobs / "bad.toml").write_text(
            f'output_dir = "{tmp_path}/x"\n[[remote]]\nname="n"\nurl="{tmp_path}/y"\n'
        )
        (tmp_path / "config" / "ckptd.toml").write_text(f'state_dir = "{state}"\n')
        here.save(1)
        done = here.ckptd("run", "--config-dir", tmp_path / "config", "--once")
        assert done.returncode in (1, 78)
        assert "save_dir" in done.stderr
        assert "global_step1~g1" in here.commits()
        document = json.loads((state / "run" / "status.json").read_text())
        assert {j["name"]: j["state"] for j in document["jobs"]}["bad"] == "invalid"


def test_sigterm_in_mid_upload(tmp_path: Path) -> None:
    """SIGTERM ends the daemon with 0 in mid-upload, long before the upload's end; the next start goes on."""
    with node(tmp_path, remote='bandwidth = "50kB/s"') as here:
        here.start()
        here.save(1)
        here.wait("bytes under way", lambda: _bytes_in(here.nas) >= 100_000)
        assert here.stop() == 0
        assert not here.commits()
        assert json.loads((here.state / "status.json").read_text())["daemon"]["alive"] is False
        here.write_job(remote="")
        here.start()
        here.wait_committed("global_step1~g1")


def test_latest_ahead_of_the_shards(tmp_path: Path) -> None:
    """`latest` names a save seconds before rank 1's shard is there: nothing is committed before it is."""
    with node(tmp_path) as here:
        here.start()
        here.save(1, shards=2)
        (here.save_dir / "latest").write_text("global_step1")
        here.wait("seen", lambda: "missing" in (here.checkpoint("global_step1")["reason"] or ""))
        time.sleep(2)
        assert not here.commits()
        here.save(1)
        here.wait_committed("global_step1~g1")
        assert same_bytes(here, "global_step1", RUN, 1)


def test_node_helper_is_honest(tmp_path: Path) -> None:
    """The comparison used above can fail."""
    with node(tmp_path) as here:
        assert isinstance(here, Node)
        here.save(1)
        here.once()
        path = here.nas / "global_step1" / "mp_rank_00_model_states.pt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert not same_bytes(here, "global_step1", RUN, 1)
