"""Conversions at awkward places: links, read-only folders, odd names, file systems and threads that fail."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import queue
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptd.base import extents, files
from ckptd.base.extents import identity_of
from ckptd.conversion.engine import staging
from ckptd.conversion.engine.executor import Worker
from ckptd.conversion.engine.executor_child import Execution, Request
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.engine.writer import Ticker
from ckptd.conversion.options import ConvertOptions, parse_form
from ckptd.conversion.parts import Literal
from ckptd.conversion.plan import OutputFile, PlanReader
from ckptd.conversion.reader import SourceFiles
from ckptd.errors import NoSpaceError, RefusedError, SourceChanged, StorageError, TargetExists, UsageError
from tests.support.real import REPOSITORY
from tests.support.synthetic import Made, Shapes, write_stage12

GROUPS: list[Shapes] = [{f"blocks.{i}.w": (40, 30) for i in range(6)}]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return write_stage12(tmp_path / "save" / "in", GROUPS, 2)


def _command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", *(os.fspath(argument) for argument in arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        cwd=cwd,
        env=environment,
        check=False,
    )


def _without_rights(*arguments: str) -> subprocess.CompletedProcess[str]:
    """ckptd as a user who keeps to modes: root too does without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    program = (
        "import ctypes, os, sys; drop = ctypes.CDLL(None).prctl; drop(24, 1, 0, 0, 0); drop(24, 2, 0, 0, 0);"
        "os.execv(sys.executable, [sys.executable, '-m', 'ckptd', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def test_a_destination_below_a_link_is_made_and_pointed_at(made: Made, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    convert(made.folder, tmp_path / "link" / "u", ConvertOptions(write_latest=True))
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["latest_universal", "u"]


@pytest.mark.parametrize("ahead", [(), ("--dry-run",)])
def test_the_command_makes_nothing_in_a_directory_remote(
    made: Made, tmp_path: Path, ahead: tuple[str, ...]
) -> None:
    """`latest_universal` there is the daemons': it names what is committed."""
    remote = tmp_path / "nas"
    (remote / "_ckptd").mkdir(parents=True)
    (remote / "_ckptd/remote.json").write_text("{}")
    (remote / "latest_universal").write_text("global_step7_universal")
    (tmp_path / "link").symlink_to(remote)
    command = [sys.executable, "-m", "ckptd", "convert", str(made.folder)]
    for there in (remote / "u", f"file://{remote}/deeper/u", tmp_path / "link/u"):
        done = subprocess.run(
            [*command, str(there), *ahead], capture_output=True, text=True, cwd=REPOSITORY, check=False
        )
        assert done.returncode == 65, done.stderr
        assert f"lies in the remote of ckptd {remote}" in done.stderr
    assert sorted(os.listdir(remote)) == ["_ckptd", "latest_universal"]
    assert (remote / "latest_universal").read_text() == "global_step7_universal"


def test_an_ordinary_user_converts_a_read_only_folder(made: Made, tmp_path: Path) -> None:
    """The result has the folder's rights, and its owner's right to fill and remove it."""
    made.folder.chmod(0o555)
    done = _without_rights("convert", str(made.folder), str(tmp_path / "u"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "u" / "zero").stat().st_mode & 0o777 == 0o755
    assert not list(tmp_path.glob(".u*"))


@pytest.mark.parametrize(("where", "mode"), [("", 0o000), ("", 0o555), ("below", 0o000)])
def test_a_place_without_rights_is_named_with_its_owner(
    made: Made, tmp_path: Path, where: str, mode: int
) -> None:
    """A target is the user's own: that the trainer's user should run ckptd helps nobody."""
    shut = tmp_path / "shut"
    (shut / "below").mkdir(parents=True)
    shut.chmod(mode)
    try:
        done = _without_rights("convert", str(made.folder), str(shut / where / "u"))
    finally:
        shut.chmod(0o700)
    assert done.returncode == 77, done.stderr
    said = " ".join(done.stderr.split())
    assert str(shut) in said
    assert ("may not write there" if not where else "cannot be reached by") in said
    assert "choose a DST where you may write" in said
    assert "who trains" not in said


def test_a_disk_without_room_says_how_much_lacks(made: Made, tmp_path: Path) -> None:
    with files.opened_dir(tmp_path) as fd:
        free = extents.free_bytes(fd)
    with pytest.raises(NoSpaceError) as caught:
        convert(made.folder, tmp_path / "u", ConvertOptions(reserve_bytes=free + (3 << 30)))
    assert re.search(r"needs [\d.]+ [kM]B of new disk; [\d.]+ [GT]B are free, of which", caught.value.message)
    assert re.fullmatch(
        r"free 3\.\d+ GB there, or convert to another disk; nothing was written", caught.value.hint
    )
    assert "-" not in caught.value.message.replace(str(tmp_path), "")


@pytest.mark.parametrize("name", ["b[/x]", "[red]\x1b[31m\n\udcff"])
def test_names_are_shown_and_never_end_in_a_traceback(made: Made, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    made.folder.rename(tmp_path / name)
    target = name + "-u"
    (tmp_path / target).parent.mkdir(exist_ok=True)
    shown = "".join(c if c.isprintable() else "?" for c in name)
    for arguments in (("inspect", name), ("convert", name, target), ("inspect", target)):
        done = _command(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert shown.rpartition("/")[2] in done.stdout
        assert "\x1b" not in done.stdout
    for arguments in (("inspect", name), ("convert", name, target + "2")):
        done = _command(*arguments, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_the_root_holds_no_checkpoint_and_a_name_has_an_end(made: Made, tmp_path: Path) -> None:
    done = _command("inspect", "/")
    assert (done.returncode, "no DeepSpeed checkpoint" in done.stderr) == (66, True)
    with pytest.raises(UsageError, match="too long"):
        convert(made.folder, tmp_path / ("x" * 250))


def test_a_file_system_without_a_rename_that_never_replaces(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and Lustre answer EINVAL (fs/nfs/dir.c)."""

    def cannot(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files, "rename_noreplace", cannot)
    convert(made.folder, tmp_path / "u")
    assert (tmp_path / "u" / "ckptd.json").exists()
    (tmp_path / "place" / staging.OUTPUT).mkdir(parents=True)
    with files.opened_dir(tmp_path / "place") as fd:
        with pytest.raises(TargetExists):
            staging.StagingDir(str(tmp_path / "place"), fd).publish(str(tmp_path / "u"))
        staging.StagingDir(str(tmp_path / "place"), fd).publish(str(tmp_path / "v"))


def test_a_source_that_is_rotated_away_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    with files.opened_dir(tmp_path) as fd:
        found = SourceFiles(fd, ["a"], [identity_of((tmp_path / "a").stat())])
        (tmp_path / "a").unlink()
        with pytest.raises(SourceChanged, match="a was written or removed"):
            found[0]


def _execution(made: Made, work: Path, threads: int) -> tuple[Execution, list[int]]:
    """An execution in this process, with the plan of a conversion that was stopped before it began."""
    fds = [os.open(path, files.DIR_FLAGS) for path in (work, made.folder)]
    request = Request(
        source=str(made.folder),
        work=str(work),
        files=[p.name for p in made.folder.iterdir()],
        memory_budget_bytes=256 << 20,
        reserve_bytes=0,
        threads=threads,
        is_striped=False,
        clone=False,
        file_mode=0o644,
        folder_mode=0o755,
        gid=os.getegid(),
        verify=False,
        low_priority=False,
        manifest={},
        numpy_folder="",
    )
    return Execution(request, fds[0], fds[1], threading.Event()), fds


def _planned(made: Made, tmp_path: Path) -> Path:
    """A partial folder with a plan and nothing made."""

    def never(*_: object, **__: object) -> None:
        raise queue.Empty

    with pytest.MonkeyPatch.context() as patch, pytest.raises(queue.Empty):
        patch.setattr("ckptd.conversion.engine.supervisor.Conversion.execute", never)
        convert(made.folder, tmp_path / "u", ConvertOptions(compat="strict"))
    return tmp_path / staging.partial_name("u")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_that_fails_in_an_unknown_way_ends_the_conversion(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Its files would be missing, or everybody would wait for it for ever."""
    execution, fds = _execution(made, _planned(made, tmp_path), threads)
    make = Worker.make
    made_one = threading.Event()

    def failing(self: Worker, output: OutputFile) -> None:
        if not made_one.is_set():
            made_one.set()
            raise MemoryError
        make(self, output)

    monkeypatch.setattr(Worker, "make", failing)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            execution.run()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(200)
    for fd in fds:
        os.close(fd)
    assert [type(error) for error in ended] == [MemoryError]


def test_what_is_not_all_that_was_planned_is_not_published(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution, fds = _execution(made, _planned(made, tmp_path), 1)
    monkeypatch.setattr(Worker, "settle", lambda self: self.abandon())
    with pytest.raises(StorageError, match="files were made"):
        execution.run()
    for fd in fds:
        os.close(fd)


def test_a_rename_that_fails_closes_each_file_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second close would fail, or close what another thread opened meanwhile."""
    execution, fds = _execution(made, _planned(made, tmp_path), 1)
    closed: list[int] = []
    close = os.close

    def counting(fd: int) -> None:
        close(fd)
        closed.append(fd)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    plan = PlanReader(io.BytesIO((tmp_path / staging.partial_name("u") / "plan.jsonl").read_bytes()))
    execution.sources = SourceFiles(fds[1], [s.path for s in plan.header.sources], plan.identities)
    worker = _worker(execution)
    outputs = [o for o in plan if isinstance(o, OutputFile)][:3]
    for output in outputs:
        worker.make(output)
    mine = [fd for fd, _, _ in worker.batch]
    monkeypatch.setattr(os, "close", counting)
    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        worker.settle()
    worker.abandon()
    assert sorted(fd for fd in closed if fd in mine) == sorted(mine)


def test_a_plan_that_finds_no_room_says_so(made: Made, tmp_path: Path) -> None:
    """The planning child writes a file: what is full is the disk, nothing is wrong with the source."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from ckptd.conversion.engine.supervisor import convert\n"
        "from ckptd.errors import NoSpaceError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: convert(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except NoSpaceError as error: print(error.message)\n"
    )
    command = [sys.executable, "-c", code, str(made.folder), str(tmp_path / "u")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert "planning" in done.stdout, done.stderr


def _worker(execution: Execution) -> Worker:
    return Worker(
        number=0,
        out_fd=execution.out_fd,
        temporary_fd=execution.temporary_fd,
        sources=execution.sources,
        folders=execution.folders,
        settings=execution.settings,
        counters=execution.counters,
        pacer=execution.pacer,
        stop=execution.stop,
    )


@pytest.mark.parametrize("nbytes", [5000, 2 << 20], ids=["through the cache", "past it"])
def test_a_write_that_takes_a_part_is_not_taken_for_all(made: Made, tmp_path: Path, nbytes: int) -> None:
    """What a full disk does first: it takes what fits and reports success. The file was published short."""
    execution, fds = _execution(made, _planned(made, tmp_path), 1)
    worker = _worker(execution)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes - 100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|space"):
            worker.make(OutputFile("x", (Literal(b"a" * nbytes),)))
            worker.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        worker.abandon()
        for fd in fds:
            os.close(fd)


def test_a_save_under_way_is_not_called_damage(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would call the save refused, for ever, and a person look for a broken disk."""
    execution, fds = _execution(made, _planned(made, tmp_path), 1)

    def drifted(self: Worker, _: OutputFile) -> None:
        next(made.folder.glob("*rank_1*optim*")).write_bytes(b"saving")
        raise RefusedError("the tensor-parallel ranks hold different copies of x")

    monkeypatch.setattr(Worker, "make", drifted)
    with pytest.raises(SourceChanged, match="rank_1"):
        execution.run()
    for fd in fds:
        os.close(fd)


def test_a_copy_inside_the_kernel_that_does_nothing_is_made_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems take the call and copy nothing."""
    (tmp_path / "a").write_bytes(b"0123456789")
    monkeypatch.setattr(os, "copy_file_range", lambda *_, **__: 0)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        extents.copy_range(source.fileno(), 2, target.fileno(), 0, 5)
        with pytest.raises(SourceChanged):
            extents.copy_range(source.fileno(), 8, target.fileno(), 0, 5)
    assert (tmp_path / "b").read_bytes()[2:] == b"456"


def test_an_option_of_the_other_form_is_refused_and_stderr_may_be_closed(made: Made, tmp_path: Path) -> None:
    """`--dtype bf16` alone made fp32 universal files and said nothing."""
    for arguments in (
        ("--dtype", "bf16"),
        ("--max-shard-size", "1GB"),
        ("--form", "weights", "--compat", "strict"),
    ):
        done = _command("convert", made.folder, tmp_path / "u", *arguments)
        assert (done.returncode, "leave it out" in done.stderr) == (2, True), done.stderr
    command = f"exec {sys.executable} -m ckptd convert {made.folder} {tmp_path / 'v'} --json 2>&-"
    subprocess.run(command, shell=True, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def test_one_spelling_of_forms_and_the_old_one_beside_it() -> None:
    assert parse_form("universal") == ("universal", "fp32")
    assert parse_form("weights-bf16") == parse_form("weights", "bf16") == ("weights", "bf16")
    assert parse_form("weights") == ("weights", "fp32")
    for name, dtype in (("zero", ""), ("weights-fp8", ""), ("weights", "fp8"), ("weights-bf16", "fp16")):
        with pytest.raises(UsageError):
            parse_form(name, dtype)


def test_a_universal_folder_is_not_called_damaged(made: Made, tmp_path: Path) -> None:
    convert(made.folder, tmp_path / "u")
    with pytest.raises(RefusedError, match="universal checkpoint already"):
        convert(tmp_path / "u", tmp_path / "v")


def test_a_disk_that_refuses_is_no_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "is no folder", which counts as one of three tries: the last save stayed without its form."""
    real = os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if path == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(OSError, match="Input/output"):
        staging.check_place(tmp_path / "new")


def test_an_output_whose_flush_fails_gets_no_name(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says once that bytes are lost: who goes on has a file that lacks them."""
    real_fsync, failed = os.fsync, set[int]()

    def fsync(fd: int) -> None:
        if not failed:
            failed.add(os.fstat(fd).st_ino)
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(fd)

    work = _planned(made, tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    execution, fds = _execution(made, work, 3)
    with pytest.raises(OSError, match="Input/output"):
        execution.run()
    for fd in fds:
        os.close(fd)
    assert failed.isdisjoint(path.stat().st_ino for path in (work / "out").rglob("*"))


@pytest.mark.parametrize("call", ["copy_file_range", "preadv", "pread"])
def test_a_disk_that_fails_is_told_with_what_was_copied_from_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Source and result may lie on two disks: "converting into …" alone has people look at the wrong one."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def cannot(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    execution, fds = _execution(made, _planned(made, tmp_path), 1)
    if call != "preadv":  # large files where there is no O_DIRECT
        monkeypatch.setattr("ckptd.conversion.engine.writer.MIN_FILE_BYTES", 0)
        monkeypatch.setattr(fcntl, "fcntl", lambda _fd, to, *flags: cannot() if to == fcntl.F_SETFL else 0)
    monkeypatch.setattr(os, "copy_file_range", cannot)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=r"Input/output error, while .*_states\.pt was being copied"):
        execution.run()
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("most", [0, 5])
def test_it_goes_on_with_the_threads_that_are_to_be_had(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """`ulimit -u` and pids.max count those of the trainer, too."""
    start, running = threading.Thread.start, list[threading.Thread]()

    def start_few(self: threading.Thread) -> None:
        if sum(thread.is_alive() for thread in running) >= most:
            msg = "can't start new thread"
            raise RuntimeError(msg)
        running.append(self)
        start(self)

    work = _planned(made, tmp_path)
    execution, fds = _execution(made, work, 4)
    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ticker, "__enter__", lambda self: self)
        patch.setattr(Ticker, "__exit__", lambda *_: None)
        execution.run()
    for fd in fds:
        os.close(fd)
    assert len(list((work / "out").rglob("fp32.pt"))) > 5


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """Sources, and outputs that wait for their flush, keep to the hard limit."""
    write_stage12(tmp_path / "save", [{f"blocks.{i}.w": (8, 8) for i in range(300)}], 2)
    command = f"ulimit -n 200; exec {sys.executable} -m ckptd convert {tmp_path / 'save'} {tmp_path / 'u'}"
    subprocess.run(command, shell=True, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def test_every_output_and_folder_is_flushed_and_then_named(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the last rename loses nothing: content before its name, names before the result's."""
    flushed: set[int] = set()
    late: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        real_fsync(fd)
        flushed.add(os.fstat(fd).st_ino)

    def rename(name: str, path: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if os.stat(name, dir_fd=src_dir_fd).st_ino not in flushed:
            late.append(path)
        real_rename(name, path, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        flushed.discard(os.stat(os.path.dirname(path) or ".", dir_fd=dst_dir_fd).st_ino)

    work = _planned(made, tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    execution, fds = _execution(made, work, 3)
    execution.run()
    for fd in fds:
        os.close(fd)
    places = [work / "out", *(work / "out").rglob("*")]
    assert late == []
    assert len(places) > 20
    assert [str(path) for path in places if path.stat().st_ino not in flushed] == []
