"""Every screen that `ckptd status` shows, over documents as a daemon writes them.

The times are of one moment; `python -m tests.support.status_gallery > tests/golden/status.txt` keeps its
texts.
"""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from ckptd.cli.screen import Screen
from ckptd.cli.status.command import screen
from ckptd.maintenance.status.verdict import exit_code, life_of
from ckptd.observe import status as st
from ckptd.observe.status import pid_space
from ckptd.observe.status_reader import status_of

NOW = datetime.fromisoformat("2026-03-01T12:00:00+00:00").timestamp()
NO_PROCESS = 4_194_304 + 1
"""Above the largest process id that Linux gives out."""


def before(seconds: float) -> str:
    """An RFC 3339 time."""
    return st.rfc3339(NOW - seconds)


def daemon(**changes: Any) -> st.DaemonStatus:
    """One that runs: this process."""
    made = st.DaemonStatus(
        pid=os.getpid(),
        alive=True,
        version="0.3.0",
        started_at=before(86400),
        last_turn_age_seconds=0.0,
        memory_bytes=90 << 20,
        memory_budget_bytes=1 << 30,
        pid_space=pid_space(),
    )
    return replace(made, **changes)


def checkpoint(
    step: int, *, state: str = "committed", upload: str = "", **changes: Any
) -> st.CheckpointStatus:
    """One of 12 GB, on its way to s3 as `upload` says."""
    form = st.FormStatus(
        state=upload or ("committed" if state == "committed" else "waiting"),
        bytes_total=12_000_000_000 if upload == "shipping" else 0,
        bytes_done=7_500_000_000 if upload == "shipping" else 0,
        eta_seconds=240.0 if upload == "shipping" else None,
        commit_sha256="3fa9c2d17b0e" * 5 if state == "committed" else None,
        generation=1 if state == "committed" or upload == "shipping" else None,
        started_at=before(500) if upload or state == "committed" else None,
        ended_at=before(180) if state == "committed" else None,
    )
    made = st.CheckpointStatus(
        tag=f"global_step{step}",
        generation=1,
        branch=1,
        step=step,
        state=state,
        bytes=12_000_000_000,
        local=st.LocalStatus(
            present=True,
            universal="ready" if state == "committed" else "none",
            held=state != "committed",
            seen_at=before(620),
            complete_at=before(560),
        ),
        remotes={"s3": {"zero": form, "universal": st.FormStatus(state="waiting")}},
        comparisons={"universal": st.ComparisonStatus(tensors=290, elements=6_738_415_616)},
        keep=("newest",),
    )
    return replace(made, **changes)


NOT_REACHED = st.RemoteStatus(name="s3", url="s3://bucket/llama", attached=False)
REMOTE = st.RemoteStatus(
    name="s3",
    url="s3://bucket/llama",
    attached=True,
    create_only=True,
    proof="store-checksum",
    resumable=True,
    held=(
        st.HeldStatus(
            tag="global_step4000",
            generation=1,
            branch=1,
            step=4000,
            forms=("zero",),
            verdict="keep",
            why=("one of the newest 10",),
            bytes=12_000_000_000,
        ),
    ),
)


def job(name: str = "llama", **changes: Any) -> st.JobStatus:
    """All is well: step 4000 is committed."""
    made = st.JobStatus(
        name=name,
        job_id="9f2c",
        save_dir=f"/nvme/{name}",
        state="ok",
        as_of=before(0),
        safe=st.SafeStatus(
            tag="global_step4000",
            generation=1,
            branch=1,
            step=4000,
            committed_at=before(180),
            age_seconds=180.0,
        ),
        newest_complete="global_step4000",
        steps_at_risk=0,
        seconds_at_risk=560.0,
        disk=st.DiskStatus(free_bytes=800_000_000_000, next_save_bytes=13_200_000_000),
        production_bytes_per_second=2e7,
        link_bytes_per_second=5e7,
        checkpoints=(checkpoint(4000),),
        remotes=(REMOTE,),
    )
    return replace(made, **changes)


def problem(
    code: str, severity: Any, text: str, next_step: str, age_seconds: float = 720
) -> st.ProblemStatus:
    """An open one."""
    return st.ProblemStatus(
        code=code, severity=severity, since=before(age_seconds), text=text, next_step=next_step, about="s3"
    )


def behind(**changes: Any) -> st.JobStatus:
    """Step 4500 is on its way."""
    both = (checkpoint(4500, state="uploading", upload="shipping"), checkpoint(4000))
    return job(
        **{
            "state": "behind",
            "newest_complete": "global_step4500",
            "steps_at_risk": 500,
            "checkpoints": both,
            **changes,
        }
    )


UNREACHABLE = problem("remote-unreachable", "behind", "s3: no answer from bucket", "ckptd check llama")
FULL = problem(
    "remote-full", "attention", "s3: the remote is full", "free space there, or lower its keep_last"
)
INVALID = st.JobStatus(
    name="typo",
    job_id=None,
    save_dir="/etc/ckptd/jobs.d/typo.toml",
    state="invalid",
    problems=(
        problem("config-invalid", "attention", "typo.toml: output_dir is no key", "the nearest is save_dir"),
    ),
)
NOTHING_YET = job(
    state="waiting",
    safe=None,
    newest_complete=None,
    steps_at_risk=None,
    seconds_at_risk=None,
    disk=None,
    production_bytes_per_second=None,
    link_bytes_per_second=None,
    checkpoints=(),
    remotes=(),
    problems=(
        problem(
            "save-dir-missing", "note", "/nvme/llama does not exist yet", "it appears when training starts"
        ),
    ),
)
PAUSED = st.PauseStatus(since=before(3600), by="alice")


def _drain(
    *,
    is_done: bool,
    left: float = 75.0,
    late: tuple[str, ...] = (),
    unsent: tuple[str, ...] = (),
    stalled: tuple[str, ...] = (),
) -> st.DrainStatus:
    missing = () if is_done else ("global_step4500",)
    return st.DrainStatus(
        asked_at=before(45),
        deadline_at=before(-left),
        is_done=is_done,
        missing=missing,
        late=late,
        unsent=unsent,
        stalled=stalled,
    )


def whole(step: int) -> st.CheckpointStatus:
    """One whose forms are all committed."""
    one = checkpoint(step)
    (zero,) = (forms["zero"] for forms in one.remotes.values())
    return replace(one, remotes={"s3": {"zero": zero, "universal": zero}})


def gone_from_here(step: int) -> st.CheckpointStatus:
    """One that was deleted here, and whose clone is kept until it is committed."""
    one = checkpoint(step, state="pruned")
    return replace(one, local=replace(one.local, present=False, held=True))


GONE = st.LocalStatus(present=False, universal="none", held=False)
LONG = (
    *(whole(4000 - 50 * n) for n in range(30)),
    checkpoint(2400, upload="failed"),
    *(whole(2300 - 50 * n) for n in range(4)),
    gone_from_here(2000),
)
"""More than fit below their headline; an old one is not settled, one left the node."""


HUNDRED = tuple(whole(100_000 - 1000 * n) for n in range(100))
LEFT = "there before ckptd: not uploaded; `ckptd accept llama --existing` uploads and rotates it"


def in_remotes(one: st.CheckpointStatus, *names: str) -> st.CheckpointStatus:
    """The same on several remotes, with the forms of its first."""
    (forms,) = one.remotes.values()
    return replace(one, remotes=dict.fromkeys(names, forms))


def several(*names: str) -> st.JobStatus:
    """One upload under way to each of several remotes; an older checkpoint failed on the last."""
    older = in_remotes(whole(4000), *names)
    failed = st.FormStatus(state="failed", reason="no byte moved for 60 s")
    older.remotes[names[-1]] = {"zero": failed, "universal": st.FormStatus(state="waiting")}
    newer = in_remotes(checkpoint(4500, state="uploading", upload="shipping"), *names)
    remotes = tuple(replace(REMOTE, name=name) for name in names)
    return behind(checkpoints=(newer, older), remotes=remotes)


def with_notes() -> st.JobStatus:
    """Checkpoints of which something is to be said: a doubtful one, and three from before ckptd."""
    doubtful = checkpoint(
        4200,
        state="suspect",
        remotes={},
        reason="two saves? its optimizer shard is 51 s older",
        next_step="ckptd accept llama global_step4200",
    )
    before_ckptd = (checkpoint(n, state="complete", remotes={"s3": {}}, reason=LEFT) for n in (900, 600, 300))
    pinned = replace(whole(4000), pinned=True)
    return job(checkpoints=(doubtful, pinned, *before_ckptd))


LONG_NAME = "experiment-17-llama-7b-long-context-continued"


def long_names() -> st.JobStatus:
    """A run whose every name is long."""
    tag = f"{LONG_NAME}-global_step4500"
    one = replace(checkpoint(4500, state="uploading", upload="shipping"), tag=tag, branch=2)
    remotes = ("object-store-frankfurt", "network-attached-storage")
    named = several(*remotes)
    return replace(
        named,
        name=LONG_NAME,
        checkpoints=(in_remotes(one, *remotes), *named.checkpoints[1:]),
    )


def of_the_readme() -> st.Status:
    """One upload under way, one committed checkpoint, two that left this node."""
    newer, _ = behind().checkpoints
    rows = (newer, whole(4000), *(replace(gone_from_here(n), local=GONE) for n in (3500, 3000)))
    one = behind(
        name="llama-7b",
        checkpoints=tuple(in_remotes(row, "nas") for row in rows),
        remotes=(replace(REMOTE, name="nas"),),
    )
    return st.Status(generated_at=before(3.0), daemon=daemon(), jobs=(one,))


def documents() -> dict[str, st.Status]:
    """Name of the state → the document."""

    def of(*jobs: st.JobStatus, published: float = 3.0, **of_daemon: Any) -> st.Status:
        return st.Status(generated_at=before(published), daemon=daemon(**of_daemon), jobs=jobs)

    full_soon = st.DiskStatus(
        free_bytes=40_000_000_000,
        next_save_bytes=13_200_000_000,
        full_in_saves=3,
        full_in_seconds=2400.0,
        unfinished_bytes=12_000_000_000,
    )
    lost = tuple(
        replace(REMOTE.held[0], tag=f"global_step{step}", step=step) for step in range(3900, 3000, -100)
    )
    gone = checkpoint(3500, state="pruned")
    gone = replace(gone, local=replace(gone.local, present=False, held=False))
    one = (checkpoint(4500, state="uploading", upload="shipping"),)
    done = checkpoint(4000)
    converting = replace(done, local=replace(done.local, universal="converting"))
    sent = {"s3": {**done.remotes["s3"], "universal": one[0].remotes["s3"]["zero"]}}
    sending = replace(done, remotes=sent)
    forgetful = job(safe=None, steps_at_risk=4000, seconds_at_risk=None, problems=(UNREACHABLE,))
    old = {"as_of": before(7200)}
    return {
        "safe": of(job()),
        "safe, and older ones left this node": of(job(checkpoints=(checkpoint(4000), gone))),
        "safe, and a remote alone holds others": of(
            job(
                checkpoints=(checkpoint(4000), replace(gone_from_here(3950), local=GONE)),
                remotes=(replace(REMOTE, held=(*REMOTE.held, *lost)),),
            )
        ),
        "waiting on a node that replaces a lost one": of(replace(NOTHING_YET, remotes=(REMOTE,))),
        "safe, a long run": of(job(checkpoints=LONG)),
        "safe, a hundred checkpoints": of(job(checkpoints=HUNDRED)),
        "behind, two remotes": of(several("nas", "s3")),
        "behind, many remotes": of(several("nas", "s3", "backup", "archive-eu", "archive-us", "tape")),
        "behind, long names": of(long_names()),
        "something to say of checkpoints": of(with_notes()),
        "waiting for the first checkpoint": of(NOTHING_YET),
        "the first save is written": of(
            job(
                safe=None,
                newest_complete=None,
                steps_at_risk=None,
                seconds_at_risk=None,
                checkpoints=(checkpoint(500, state="saving"),),
            )
        ),
        "nothing committed yet": of(
            behind(safe=None, steps_at_risk=4500, seconds_at_risk=None, checkpoints=one)
        ),
        "started again, the remote not reached yet": of(
            job(safe=None, seconds_at_risk=None, checkpoints=(), remotes=(NOT_REACHED,))
        ),
        "behind": of(behind()),
        "behind, the remote is away": of(behind(problems=(UNREACHABLE,))),
        "the remote is away, and what it held is not proved": of(replace(forgetful, state="behind")),
        "a person is needed": of(behind(state="attention", problems=(FULL,))),
        "safe, and the disk fills": of(job(disk=full_soon)),
        "opt-out": of(job(opt_outs=('unuploaded = "thin": checkpoints may go before they are committed',))),
        "paused": of(behind(state="paused", paused=PAUSED)),
        "draining": of(behind(drain=_drain(is_done=False))),
        "draining, and too slow": of(behind(drain=_drain(is_done=False, late=("global_step4500",)))),
        "draining, and nothing moves": of(behind(drain=_drain(is_done=False, stalled=("s3",)))),
        "the drain's deadline passed": of(behind(drain=_drain(is_done=False, left=-5.0))),
        "beside a save": of(behind(making_way=True)),
        "the node is short of memory": of(behind(waits_for_memory=True)),
        "the node is short of memory, and a conversion waits": of(
            job(waits_for_memory=True, checkpoints=(converting,))
        ),
        "the node is short of memory, and a form moves slowly": of(
            job(waits_for_memory=True, checkpoints=(sending,))
        ),
        "drained": of(job(drain=_drain(is_done=True))),
        "drained, old ones not sent": of(job(drain=_drain(is_done=True, unsent=("global_step3000",)))),
        "daemon stopped": of(job(**old), published=7200.0, alive=False),
        "daemon dead": of(
            behind(**old),
            published=7200.0,
            pid=NO_PROCESS,
            start_command="cd /home/alice && ckptd run --job llama.toml",
        ),
        "daemon stands still": of(
            behind(as_of=before(400)), published=400.0, start_command="systemctl start ckptd@alice"
        ),
        "a remote that is not as it should be": of(
            job(remotes=(replace(REMOTE, create_only=False, notes=("ETags prove nothing",)),))
        ),
        "daemon in another container": of(job(), pid=NO_PROCESS, pid_space="another"),
        "invalid job": of(INVALID),
        "two jobs": of(job(), behind(name="qwen", save_dir="/nvme/qwen")),
        "nobody was told": of(job(), notify_error="https://hooks.example: 503"),
    }


def plain(document: st.Status) -> dict[str, Any]:
    """As it stands in the file."""
    written: dict[str, Any] = json.loads(json.dumps(asdict(document)))
    return written


def read(document: st.Status) -> st.Status:
    """As a reader has it from the file."""
    return status_of(plain(document))


def shown(document: st.Status, *, width: int = 80, retention: bool = False, encoding: str = "utf-8") -> str:
    """What stands on the screen at `NOW`, and the exit code."""
    found = read(document)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Screen(file=out, width=width)
    for part in screen(found, NOW, retention=retention):
        console.print(part, soft_wrap=True)
    out.seek(0)
    code = exit_code(found.jobs, is_alive=life_of(found, NOW).is_well)
    return f"{out.read()}[exit {code}]".replace(f"process {os.getpid()}", "process 4711")


def gallery() -> str:
    """All of them in 80 columns, and some otherwise."""
    every = documents()
    screens = {name: shown(document) for name, document in every.items()}
    for name in ("behind, two remotes", "behind, many remotes", "something to say of checkpoints"):
        screens[f"{name}, in 160 columns"] = shown(every[name], width=160)
    screens["behind, two remotes, --retention"] = shown(every["behind, two remotes"], retention=True)
    screens["behind, two remotes, in ASCII"] = shown(every["behind, two remotes"], encoding="ascii")
    return "\n\n".join(f"=== {name}\n{text}" for name, text in screens.items()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(gallery())
