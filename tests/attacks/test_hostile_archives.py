"""Zips, storages and names that lie: one clear sentence, exit 65, nothing written (P14, P15)."""

from __future__ import annotations

import copy
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.core.model.facts import Archive
from ckptd.errors import CkptdError
from tests.attacks.hostile import OPTIM
from tests.support.synthetic import Made, Shapes, write_stage12

GROUPS: list[Shapes] = [{"w": (16, 8), "b": (8,)}]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return write_stage12(tmp_path / "tag", GROUPS, 2)


def central(data: bytearray, record: str) -> int:
    """Offset of a record's central directory entry."""
    at = data.index(b"PK\x01\x02")
    while True:
        length = struct.unpack_from("<H", data, at + 28)[0]
        if data[at + 46 : at + 46 + length].endswith(b"/" + record.encode()):
            return at
        at = data.index(b"PK\x01\x02", at + 4)


def size_of(record: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<2L", data, central(data, record) + 20, value, value)


def offset_of(record: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<L", data, central(data, record) + 42, value)


def flags_of(record: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<H", data, central(data, record) + 8, value)


def method_of(record: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<H", data, central(data, record) + 10, value)


def eocd(at: int, form: str, *values: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, data.rindex(b"PK\x05\x06") + at, *values)


def cut_at(share: float) -> Callable[[bytearray], None]:
    def cut(data: bytearray) -> None:
        del data[int(len(data) * share) :]

    return cut


def zip64_locator(data: bytearray) -> None:
    """A locator that points at itself."""
    at = data.rindex(b"PK\x05\x06")
    data[at:at] = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)


LIES: dict[str, Callable[[bytearray], None]] = {
    "data.pkl larger than the file": size_of("data.pkl", 1 << 30),
    "storage larger than the file": size_of("data/1", 1 << 30),
    "storage a little larger, into the next": size_of("data/1", 400),
    "storage smaller than its tensor": size_of("data/1", 4),
    "saturated size without zip64": size_of("data/1", 0xFFFFFFFF),
    "record behind the end": offset_of("data/1", 0x7FFFFFF0),
    "record inside another": offset_of("data/1", 3),
    "two names for one place": offset_of("data/2", 0),
    "encrypted": flags_of("data/1", 1),
    "strongly encrypted": flags_of("data/1", 0x41),
    "deflated": method_of("data/1", 8),
    "a deflated pickle": method_of("data.pkl", 8),
    "an encrypted pickle": flags_of("data.pkl", 1),
    "a pickle inside a storage": offset_of("data.pkl", 900),
    "a quine: a storage that is the archive": offset_of("data/1", 0),
    "directory outside": eocd(16, "<L", 0x7FFFFFF0),
    "directory longer than the file": eocd(12, "<L", 0x7FFFFFF0),
    "a million records claimed": eocd(8, "<2H", 0xFFFF, 0xFFFF),
    "fewer records than there are": eocd(8, "<2H", 1, 1),
    "split over disks": eocd(4, "<H", 3),
    "zip64 locator in a circle": zip64_locator,
    "no end": cut_at(0.99),
    "half": cut_at(0.5),
    "ten bytes": cut_at(0.001),
    "all zero": lambda data: data.__setitem__(slice(None), bytes(len(data))),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_lying_archives_are_refused_in_one_sentence(made: Made, tmp_path: Path, lie: str) -> None:
    path = made.folder / OPTIM
    data = bytearray(path.read_bytes())
    LIES[lie](data)
    path.write_bytes(bytes(data))
    (found,) = inspect_files(made.folder, [OPTIM])
    assert found.archive is not Archive.LEGACY
    if found.archive is Archive.ZIP:
        assert found.reason, "its zip is in order, its tensors are not"
    with pytest.raises(CkptdError) as caught:
        convert(made.folder, tmp_path / "out", ConvertOptions())
    assert caught.value.exit_code == 65
    assert OPTIM in caught.value.message
    assert "\n" not in caught.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tag"]


def test_a_storage_of_another_type_cannot_reach_outside(tmp_path: Path) -> None:
    """A float tensor declared as double would read twice its record."""

    def change(rank: int, inner: dict[str, Any]) -> None:
        tensor = inner["single_partition_of_fp32_groups"][0]
        object.__setattr__(tensor, "dtype", "float64")

    write_stage12(tmp_path / "tag", GROUPS, 1, change=change)
    with pytest.raises(CkptdError, match="its record holds"):
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())


def test_ranks_that_store_another_type_are_refused(tmp_path: Path) -> None:
    def change(rank: int, inner: dict[str, Any]) -> None:
        if rank == 1:
            tensor = inner["base_optimizer_state"]["state"][0]["exp_avg"]
            object.__setattr__(tensor, "dtype", "int32")

    write_stage12(tmp_path / "tag", GROUPS, 2, change=change)
    with pytest.raises(CkptdError, match="other optimizer states"):
        convert(tmp_path / "tag", tmp_path / "out", ConvertOptions())


def test_a_zip_of_very_many_records_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    folder.mkdir()
    with zipfile.ZipFile(folder / OPTIM, "w") as out:
        out.writestr("a/data.pkl", b"\x80\x02}.")
        for i in range(70_000):
            out.writestr(f"a/data/{i}", b"")
    (found,) = inspect_files(folder, [OPTIM], timeout_seconds=60)
    assert found.archive is Archive.ZIP
    assert found.facts is not None


GIB = 1 << 30
REFUSE = """
import resource, sys
from pathlib import Path
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError
folder, name, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
(found,) = inspect_files(folder, [name], timeout_seconds=60)
print(found.facts, found.reason)
try:
    convert(folder, out, ConvertOptions())
except CkptdError as error:
    print(error.exit_code, error.message)
# not RUSAGE_SELF: that starts from what the test process, which has torch in it, had when it began this one
mine = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
print(max(int(mine.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


def with_record(path: Path, record: str, pattern: bytes, end: bytes = b".") -> None:
    """A record becomes `pattern` for a gibibyte and `end`, deflated; all that is said of it is true."""
    with zipfile.ZipFile(path) as old:
        held = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, data in held.items():
            if not name.endswith(f"/{record}"):
                out.writestr(zipfile.ZipInfo(name), data)
                continue
            info = zipfile.ZipInfo(name)
            info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, GIB + len(end)
            with out.open(info, "w") as inside:
                for _ in range(GIB >> 20):
                    inside.write(pattern * ((1 << 20) // len(pattern)))
                inside.write(end)


def a_pickle(path: Path) -> None:
    with_record(path, "data.pkl", b"N0", b"N.")


def a_storage(path: Path) -> None:
    with_record(path, "data/1", bytes(1 << 10))


def a_pickle_that_says_it_is_small(path: Path) -> None:
    """Stored and of a hundred bytes, says the directory; its local header tells the truth."""
    a_pickle(path)
    data = bytearray(path.read_bytes())
    method_of("data.pkl", 0)(data)
    size_of("data.pkl", 100)(data)
    path.write_bytes(bytes(data))


def names_for_one_place(path: Path) -> None:
    """A thousand and twenty-four records of a mebibyte, which all lie on the same one."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as out:
        prefix = out.namelist()[0].partition("/")[0]
        out.writestr(zipfile.ZipInfo(f"{prefix}/data/1000"), bytes(1 << 20))
        last = out.infolist()[-1]
        for number in range(1001, 2024):
            again = copy.copy(last)
            again.filename = f"{prefix}/data/{number}"
            out.filelist.append(again)


BOMBS: dict[Callable[[Path], None], str] = {
    a_pickle: "compressed record",
    a_storage: "compressed record",
    a_pickle_that_says_it_is_small: "no local header where its directory says",
    names_for_one_place: "overlapping records",
}


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_a_bomb_does_not_go_off(made: Made, tmp_path: Path, bomb: Callable[[Path], None]) -> None:
    """Two megabytes that would be a gibibyte: refused in a sentence, by processes that stay small."""
    path = made.folder / OPTIM
    bomb(path)
    assert path.stat().st_size < 3 << 20
    command = [sys.executable, "-c", REFUSE, str(made.folder), OPTIM, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    inspected, converted, kib = done.stdout.splitlines()
    assert inspected.startswith("None ")
    assert converted.startswith("65 ")
    for said in (inspected, converted):
        assert OPTIM in said
        assert BOMBS[bomb] in said
    assert int(kib) < 200 << 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tag"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_is_no_regular_file_is_not_opened(made: Made, tmp_path: Path, kind: str) -> None:
    path = made.folder / OPTIM
    data = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    (found,) = inspect_files(made.folder, [OPTIM], timeout_seconds=10)
    assert found.reason
    assert found.fingerprint == ""
    with pytest.raises(CkptdError):
        convert(made.folder, tmp_path / "out", ConvertOptions())
