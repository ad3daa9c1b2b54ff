"""Converting through the real children: published whole or not at all, resumed after any death (P7, P14)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine import children, supervisor
from ckptd.conversion.engine.inspect import inspect_files, probe_restrictions
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions, ConvertProgress
from ckptd.core.model.facts import Archive
from ckptd.core.model.layouts import Role
from ckptd.errors import (
    BehindError,
    CkptdError,
    DamagedError,
    LockHeld,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    TargetExists,
    UsageError,
)
from tests.support.synthetic import Made, Shapes, write_stage3, write_stage12
from tests.unit.formats.zero.test_zero_ranges import check, convert_here

GROUPS: list[Shapes] = [{f"blocks.{i}.w": (40, 30) for i in range(12)}, {"norm": (33,), "bias": (1,)}]
STRICT = ConvertOptions(compat="strict", low_priority=False)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return write_stage12(tmp_path / "save" / "global_step7", GROUPS, 3)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("compat", ["strict", "superset"])
def test_the_children_make_what_the_plan_says(made: Made, tmp_path: Path, compat: str) -> None:
    told: list[ConvertProgress] = []
    options = ConvertOptions(compat=compat, verify=True)  # type: ignore[arg-type]
    report = convert(made.folder, tmp_path / "u", options, on_progress=told.append)
    convert_here(made.folder, tmp_path / "here", compat)
    ours = tree(tmp_path / "u")
    manifest = json.loads(ours.pop("ckptd.json"))
    assert ours == tree(tmp_path / "here")
    check(made, tmp_path / "u", GROUPS, bare=False)
    assert manifest["plan_sha256"] == report.plan_sha256
    assert manifest["layout"] == compat == report.layout
    assert set(manifest["source"]["fingerprints"]) == {p.name for p in made.folder.iterdir()}
    assert report.verified
    assert report.parameters == 14
    assert report.bytes == sum(len(ours[p]) for p in ours) - _linked(ours)
    assert told[0].phase == "planning"
    assert told[-1].bytes_done == told[-1].bytes_total == report.bytes
    assert report.peak_rss_bytes < 64 << 20
    assert leftovers(tmp_path) == []


def _linked(ours: dict[str, bytes]) -> int:
    second = ours.get("zero_pp_rank_0_mp_rank_00_model_states.pt", b"")
    return len(second)


def test_modes_are_the_checkpoints_own_never_wider(made: Made, tmp_path: Path) -> None:
    for path in made.folder.iterdir():
        path.chmod(0o640)
    made.folder.chmod(0o750)
    convert(made.folder, tmp_path / "u", STRICT)
    for path in (tmp_path / "u").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
    assert (tmp_path / "u").stat().st_mode & 0o777 == 0o750


def test_latest_universal_is_written_only_when_asked(made: Made, tmp_path: Path) -> None:
    convert(made.folder, tmp_path / "u", STRICT)
    assert not (tmp_path / "latest_universal").exists()
    convert(made.folder, tmp_path / "v", ConvertOptions(write_latest=True))
    assert (tmp_path / "latest_universal").read_text() == "v"


def test_destinations_that_cannot_be(made: Made, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for destination, error in (
        (tmp_path / "there", TargetExists),
        (made.folder / "inside", UsageError),
        (tmp_path / "no" / "such", NotFoundError),
    ):
        with pytest.raises(error):
            convert(made.folder, destination, STRICT)
    with pytest.raises(NotFoundError):
        convert(tmp_path / "nowhere", tmp_path / "u", STRICT)


def test_a_refusal_leaves_nothing_behind(made: Made, tmp_path: Path) -> None:
    (made.folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DamagedError, match="rank_1"):
        convert(made.folder, tmp_path / "u", STRICT)
    assert not (tmp_path / "u").exists()
    assert leftovers(tmp_path) == []


def test_the_reserve_is_kept(made: Made, tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError):
        convert(made.folder, tmp_path / "u", ConvertOptions(reserve_bytes=1 << 60))
    assert leftovers(tmp_path) == []


def test_a_source_bit_flip_is_found_by_verify(made: Made, tmp_path: Path) -> None:
    path = made.folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[data.index(made.expected["blocks.1.w", "fp32"][:400]) + 8] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedError, match="CRC"):
        convert(made.folder, tmp_path / "u", ConvertOptions(verify=True))
    assert not (tmp_path / "u").exists()


def test_stopping_leaves_a_partial_that_is_finished_later(made: Made, tmp_path: Path) -> None:
    with pytest.raises(BehindError):
        convert(made.folder, tmp_path / "u", STRICT, should_stop=lambda: True)
    assert leftovers(tmp_path) == [".u.ckptd-partial"]
    convert(made.folder, tmp_path / "u", STRICT)
    assert leftovers(tmp_path) == []
    convert_here(made.folder, tmp_path / "here", "strict")
    assert {k: v for k, v in tree(tmp_path / "u").items() if k != "ckptd.json"} == tree(tmp_path / "here")


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == pid and b"executor_child" in command:
                found.append(int(entry.name))
    return found


def _kill_after(files: int, partial: Path, over: threading.Event) -> None:
    """SIGKILL to the executor as soon as `files` files have their final names."""
    while not over.wait(0.002):
        if sum(1 for p in partial.rglob("*.pt") if p.parent.name != "tmp") >= files:
            for pid in _children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return


@pytest.mark.faults
def test_killed_executors_are_resumed_and_the_result_is_the_same(tmp_path: Path) -> None:
    groups: list[Shapes] = [{f"w{i}": (50, 40) for i in range(400)}]
    made = write_stage12(tmp_path / "in", groups, 2)
    convert(made.folder, tmp_path / "whole", STRICT)
    kills = 0
    for files in (1, 1, 1, 300, 700, 1000):
        over = threading.Event()
        place = tmp_path / ".u.ckptd-partial" / "out"
        killer = threading.Thread(target=_kill_after, args=(files, place, over))
        killer.start()
        try:
            report = convert(made.folder, tmp_path / "u", STRICT)
        except BehindError:
            kills += 1
            continue
        finally:
            over.set()
            killer.join()
        if kills:
            break
        shutil.rmtree(tmp_path / "u")  # on a busy machine the killer came too late
    else:
        report = convert(made.folder, tmp_path / "u", STRICT)
        assert report.resumed_files >= 300
    assert kills >= 1
    assert tree(tmp_path / "u") == tree(tmp_path / "whole")
    assert report.files == len(tree(tmp_path / "u")) - 1
    assert leftovers(tmp_path) == []


def test_a_sigterm_that_reaches_every_child_ends_none(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of Slurm is signalled as a whole: no file is blamed for it, no conversion fails."""
    real = children.start

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        child = real(*arguments, **more)
        child.send_signal(signal.SIGTERM)  # at birth, before a line of it ran
        return child

    monkeypatch.setattr(children, "start", start)
    names = [p.name for p in made.folder.iterdir()]
    assert {f.archive for f in inspect_files(made.folder, names)} == {Archive.ZIP}
    convert(made.folder, tmp_path / "u", STRICT)
    convert_here(made.folder, tmp_path / "here", "strict")
    assert {k: v for k, v in tree(tmp_path / "u").items() if k != "ckptd.json"} == tree(tmp_path / "here")


def test_a_partial_of_another_plan_is_not_mixed_in(made: Made, tmp_path: Path) -> None:
    with pytest.raises(BehindError):
        convert(made.folder, tmp_path / "u", STRICT, should_stop=lambda: True)
    planted = tmp_path / ".u.ckptd-partial" / "out" / "zero" / "blocks.0.w"
    planted.mkdir(parents=True, exist_ok=True)
    other = write_stage12(tmp_path / "other", GROUPS, 2)
    good = convert_here(other.folder, tmp_path / "here", "strict")
    assert good.dp == 2
    size = (tmp_path / "here" / "zero" / "blocks.0.w" / "fp32.pt").stat().st_size
    (planted / "fp32.pt").write_bytes(b"\xaa" * size)
    convert(other.folder, tmp_path / "u", STRICT)
    assert {k: v for k, v in tree(tmp_path / "u").items() if k != "ckptd.json"} == tree(tmp_path / "here")


def test_two_conversions_into_one_place_do_not_meet(made: Made, tmp_path: Path) -> None:
    seen: list[type[CkptdError]] = []

    def second(_: ConvertProgress) -> None:
        if not seen:
            try:
                convert(made.folder, tmp_path / "u", STRICT)
            except CkptdError as error:
                seen.append(type(error))

    convert(made.folder, tmp_path / "u", STRICT, on_progress=second)
    assert seen == [LockHeld]
    assert (tmp_path / "u" / "ckptd.json").exists()


def test_pausing_halts_and_goes_on(made: Made, tmp_path: Path) -> None:
    asked = 0

    def pause() -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 != 0

    convert(made.folder, tmp_path / "u", STRICT, should_pause=pause)
    assert asked >= 3
    check(made, tmp_path / "u", GROUPS, bare=False)


def watched(
    script: str, on_line: Any = None, *, pause: Any = None, **seconds: float
) -> tuple[children.Watched, subprocess.Popen[bytes]]:
    """Serve a shell that runs `script`, steered as a conversion is."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    limits: dict[str, Any] = {"timeout_seconds": None} | seconds
    found = children.watch(
        child, b"", on_line=on_line, should_stop=lambda: False, should_pause=pause, **limits
    )
    return found, child


def test_a_paused_child_has_as_much_time_as_any() -> None:
    """A planner may be paused for hours: it was killed as one that hangs, and its save refused for good."""
    until = time.monotonic() + 2.5
    limits = {"timeout_seconds": 1.5, "silence_seconds": 1.5}
    found, _ = watched("echo >&2; sleep 0.3", pause=lambda: time.monotonic() < until, **limits)
    assert time.monotonic() > until
    assert (found.timed_out, found.status) == (False, 0)


def test_who_stood_still_together_with_its_child_does_not_call_it_silent() -> None:
    """A frozen container: whoever wakes up first looks before the other could speak."""
    pids: list[int] = []

    def freeze(line: dict[str, Any]) -> None:
        if not pids:
            pids.append(line["pid"])
            os.kill(line["pid"], signal.SIGSTOP)
            time.sleep(2.0)
            threading.Timer(0.2, os.kill, (line["pid"], signal.SIGCONT)).start()

    script = """echo '{"pid": '$$'}'; sleep 0.1; echo '{"over": true}'"""
    found, child = watched(script, freeze, timeout_seconds=1.5, silence_seconds=1.5)
    assert pids == [child.pid]
    assert (found.timed_out, found.status) == (False, 0)


def test_who_says_nothing_is_still_ended() -> None:
    began = time.monotonic()
    for limit in ("timeout_seconds", "silence_seconds"):
        found, _ = watched("exec sleep 60", **{limit: 0.3})
        assert (found.timed_out, found.status) == (True, -signal.SIGKILL)
    assert time.monotonic() - began < 30


def test_planning_that_takes_too_long_is_no_refusal(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk hung: tried again, three times at most (`MAX_CONVERSION_TRIES`)."""
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "PLAN_SECONDS", 0.0)
        with pytest.raises(BehindError, match="planning the conversion took too long"):
            convert(made.folder, tmp_path / "u", STRICT)
    convert(made.folder, tmp_path / "u", STRICT)
    check(made, tmp_path / "u", GROUPS, bare=False)


def test_links_in_a_source_folder_are_not_followed(made: Made, tmp_path: Path) -> None:
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (made.folder / name).rename(tmp_path / "elsewhere.pt")
    (made.folder / name).symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CkptdError):
        convert(made.folder, tmp_path / "u", STRICT)
    assert not (tmp_path / "u").exists()


def test_a_work_dir_elsewhere_on_the_file_system(made: Made, tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with pytest.raises(BehindError):
        convert(made.folder, tmp_path / "u", STRICT, work_dir=tmp_path / "staging", should_stop=lambda: True)
    assert leftovers(tmp_path / "staging") == [".u.ckptd-partial"]
    convert(made.folder, tmp_path / "u", STRICT, work_dir=tmp_path / "staging")
    assert leftovers(tmp_path / "staging") == []


def test_stage_3_through_the_children(tmp_path: Path) -> None:
    made = write_stage3(tmp_path / "in", GROUPS, 4)
    report = convert(made.folder, tmp_path / "u", ConvertOptions())
    assert report.layout == "superset"
    check(made, tmp_path / "u", GROUPS, bare=False)


def test_inspection_tells_whole_from_torn(made: Made) -> None:
    names = sorted(p.name for p in made.folder.iterdir())
    torn = made.folder / names[1]
    torn.write_bytes(torn.read_bytes()[:-30])
    (made.folder / "note.txt").write_text("hello")
    found = inspect_files(made.folder, [*names, "note.txt", "gone.pt", "../escape"])
    assert [f.path for f in found] == [*names, "note.txt", "gone.pt", "../escape"]
    first, second = found[0], found[1]
    assert first.archive is Archive.ZIP
    assert first.role is Role.OPTIM
    assert first.facts is not None
    assert (first.facts.zero_stage, first.facts.partition_count, first.facts.optimizer_step) == (2, (3, 3), 7)
    assert second.archive is Archive.TORN
    assert second.reason is not None
    assert "no zip directory" in second.reason
    assert found[-3].archive is Archive.OTHER
    assert found[-2].reason == "gone.pt vanished"
    assert found[-1].reason is not None


def test_the_restrictions_that_hold_are_told() -> None:
    assert {"dies-with-parent", "no-new-privs", "rlimits"} <= set(probe_restrictions())


def test_children_start_without_environment_and_without_big_imports() -> None:
    code = (
        "import sys, json, os; import ckptd.conversion.engine.planner_child; "
        "import ckptd.conversion.engine.executor_child;"
        "print(json.dumps([sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('torch', 'pydantic', 'boto3', 'typer', 'rich', 'numpy', 'deepspeed'))]))"
    )
    out = subprocess.run(
        [sys.executable, "-E", "-s", "-S", "-c", code],
        cwd=children.PACKAGE_PARENT,
        env={},
        capture_output=True,
        check=True,
    )
    assert json.loads(out.stdout) == [[]]


def test_an_unknown_form_is_a_usage_error(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        convert(made.folder, tmp_path / "u", ConvertOptions(form="zero"))  # type: ignore[arg-type]


def test_garbled_legacy_files_are_refused_with_a_reason(made: Made, tmp_path: Path) -> None:
    path = made.folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"x" * 100)
    with pytest.raises(RefusedError, match="opcode 0x78"):
        convert(made.folder, tmp_path / "u", STRICT)
