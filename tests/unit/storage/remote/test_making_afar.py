"""Forms of a save that no node has whole: made of what the remote holds, by one node at a time (adr/0118)."""

from __future__ import annotations

import io
import os
import shutil
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.remote import derive
from ckptd.core.model.heartbeat import Heartbeat, heartbeat_key
from ckptd.core.model.manifest import DerivedSource, commit_key, manifest_key, sha256_of, to_bytes
from ckptd.core.model.records import UNIVERSAL
from ckptd.core.policy.leases import Attempt, attempts_folder, numbered
from ckptd.errors import SourceChanged
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.deletion import delete_commit
from ckptd.storage.remote.documents import read_commit, read_generation
from ckptd.storage.remote.heartbeats import Heartbeats
from ckptd.storage.remote.messages import Committed, DeleteCommit, DeriveRequest, Planned, UploadedObject
from ckptd.storage.stores.base import partial_name
from ckptd.storage.stores.directory import DirectoryStore
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores.scene import JOB_ID, Node
from tests.support.synthetic import write_stage12
from tests.support.tp_saves import megatron, write
from tests.unit.storage.remote.test_making import where_copies_lie

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadRequest, UploadResult
    from ckptd.storage.remote.observe import AttachedRemote

GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (640, 160), "norm.weight": (160,)},
    {"norm.bias": (160,)},
]
FP32 = "weights-fp32"
LARGE: list[dict[str, tuple[int, ...]]] = [{"embed.weight": (2048, 160), "norm.weight": (160,)}]
TAKEOVER_SECONDS = 30.0
PLANNED_BYTES = 150_000
"""What planning reads of a shard beside what it is made of: both ends, and small records."""
NAMES = ("n0", "n1", "n2")


class Counting(DirectoryStore):
    """A directory remote that counts what is read of shards."""

    shard_bytes = 0
    flipped = ""
    flips: dict[int, int]
    """Of the object whose key ends in `flipped`: how often the byte at an offset comes with a bit flipped."""

    def read_at(self, key: str, offset: int, length: int) -> bytes:
        data = super().read_at(key, offset, length)
        self.shard_bytes += len(data)
        for at, times in self.flips.items() if self.flipped and key.endswith(self.flipped) else ():
            if times and offset <= at < offset + len(data):
                self.flips[at] -= 1
                data = data[: at - offset] + bytes([data[at - offset] ^ 1]) + data[at - offset + 1 :]
        return data


class Spread:
    """Three nodes, two of which saved a rank each, and a remote that has the COMMIT of both."""

    def __init__(
        self,
        root: Path,
        groups: list[dict[str, tuple[int, ...]]] = GROUPS,
        write: Callable[[Path], object] | None = None,
    ) -> None:
        """`write`: the whole save into a folder, where it is not one of `groups`."""
        self.nas = root / "nas"
        self.nas.mkdir()
        self.whole = root / "whole"
        if write is None:
            write_stage12(self.whole, groups, 2)
        else:
            write(self.whole)
        self.nodes = {name: Node(root / name, name=name) for name in NAMES}
        self.tag = self.nodes["n0"].tag
        self.stores = {n: Counting(str(self.nas), owner=f"id-{n}", window_bytes=1 << 20) for n in NAMES}
        for node in self.nodes.values():
            (node.save_dir / self.tag).mkdir(parents=True)
            (node.save_dir / "staging").mkdir()
        for path in self.whole.iterdir():
            owner = self.nodes["n1" if "pp_rank_1_" in path.name else "n0"]
            shutil.copyfile(path, owner.save_dir / self.tag / path.name)
        self.grounds: dict[str, AttachedRemote] = {n: self.nodes[n].attached(self.stores[n]) for n in NAMES}
        for name in ("n0", "n1"):
            node = self.nodes[name]
            node.upload(self.grounds[name], node.order(node.sealed()))
        for name in NAMES:
            self.beat(name)
        commit = read_commit(self.stores["n0"], (self.tag, 1, "zero"))
        assert commit is not None
        assert len(commit.commit.manifests) == 2
        self.zero = commit

    def beat(self, name: str, *, seconds_ago: float = 0.0, state: str = "ok") -> None:
        """Its heartbeat, as old by the store's time as that."""
        said = Heartbeat(
            job_id=JOB_ID, job="job", node=name, node_id=f"id-{name}", config_digest="", ckptd_version="0",
            as_of="2026-01-01T00:00:00Z", state=state,
        )  # fmt: skip
        Heartbeats(self.stores[name]).put(said)
        at = time.time() - seconds_ago
        os.utime(self.nas / heartbeat_key(name), (at, at))

    def falls_silent(self, name: str) -> None:
        """All others are heard of after it, as late as it takes."""
        for other in NAMES:
            self.beat(other, seconds_ago=TAKEOVER_SECONDS + 1 if other == name else 0.0)

    def order(self, name: str, form: str = UNIVERSAL, **changes: object) -> UploadRequest:
        node = self.nodes[name]
        order = node.order(node.sealed(), form=form, uploaded=node.uploaded())
        source = DerivedSource(generation=1, fingerprints=(), plan_sha256="", layout="", alignment=0)
        values = {
            "folders": (self.tag,),
            "zero": Committed(sha256=self.zero.sha256, takeover_seconds=TAKEOVER_SECONDS),
            "sealed": (),
            "staging": str(node.save_dir / "staging"),
            "memory_bytes": 96 << 20,
        } | changes
        manifest = order.manifest.model_copy(update={"source": source})
        return order.model_copy(
            update={"files": (), "manifest": manifest, "making": DeriveRequest.model_validate(values)}
        )

    def upload(
        self,
        name: str,
        form: str = UNIVERSAL,
        *,
        check: Any = None,
        on_planned: Any = None,
        **changes: object,
    ) -> UploadResult:
        node = self.nodes[name]
        control = replace(node.control(), on_planned=on_planned or node.events.append)
        control = replace(control, check=check) if check is not None else control
        return upload_form(self.grounds[name], self.order(name, form, **changes), control, derive.opened)

    def sent(self, folder: str) -> dict[str, bytes]:
        """What lies in a folder of the remote."""
        base = self.nas / folder
        found = (p for p in sorted(base.rglob("*")) if p.is_file())
        return {str(p.relative_to(base)): p.read_bytes() for p in found}

    def answered_wrongly(
        self, name: str, flips: dict[int, int], form: str = UNIVERSAL, *, is_planned: bool = False
    ) -> dict[str, bytes]:
        """What n0 commits in the end where that object's bytes come flipped so often (once it is planned)."""
        self.stores["n0"].flips = dict(flips)

        def now(_: object = None) -> None:
            self.stores["n0"].flipped = name

        if not is_planned:
            now()
        first = ""
        with suppress(SourceChanged):
            first = self.upload("n0", form, on_planned=now).outcome
        rows = (self.nas / attempts_folder(self.tag, 1, form)).glob("*.json")
        assert all(Attempt.model_validate_json(row.read_bytes()).refused is None for row in rows), first
        self.nodes["n0"].events.clear()  # as the daemon does: what was sent of it is not gone on with
        assert first == "committed" or self.upload("n0", form).outcome == "committed"
        return self.sent(self.folder_of(form))

    def planned(self, name: str) -> list[Planned]:
        return [event for event in self.nodes[name].events if isinstance(event, Planned)]

    def attempts(self) -> list[Attempt]:
        folder = self.nas / attempts_folder(self.tag, 1, UNIVERSAL)
        return [Attempt.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]

    def folder(self) -> str:
        """That the COMMIT of the universal form names."""
        return self.folder_of(UNIVERSAL)

    def folder_of(self, form: str) -> str:
        """That a COMMIT names."""
        commit = read_commit(self.stores["n0"], (self.tag, 1, form))
        assert commit is not None
        return commit.commit.folder


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    return Spread(tmp_path)


def expected(spread: Spread, to: Path, form: str = UNIVERSAL) -> dict[str, bytes]:
    """What `ckptd convert` makes of the gathered folder, extents not cloned."""
    options = ConvertOptions() if form == UNIVERSAL else ConvertOptions(form="weights")
    convert(spread.whole, to, options)
    return {str(p.relative_to(to)): p.read_bytes() for p in sorted(to.rglob("*")) if p.is_file()}


def after(spread: Spread, name: str, objects: int, then: Callable[[], None]) -> Callable[[], None]:
    """A check that does something once, when that node has sent so many objects."""
    done: list[int] = []

    def check() -> None:
        if not done and len(spread.nodes[name].uploaded()) >= objects + before:
            done.append(1)
            then()

    before = len(spread.nodes[name].uploaded())
    return check


def stop() -> None:
    raise Cancelled("enough")


@pytest.mark.parametrize("form", [UNIVERSAL, FP32])
def test_a_node_without_the_shards_makes_the_form_that_all_of_them_make(tmp_path: Path, form: str) -> None:
    """Each byte of a shard crosses once; what is told of the source is of the whole save."""
    spread = Spread(tmp_path, LARGE)
    wanted = expected(spread, tmp_path / "made", form)
    spread.stores["n2"].shard_bytes = 0
    result = spread.upload("n2", form)
    assert result.outcome == "committed"
    assert result.commit is not None
    assert spread.sent(f"{spread.tag}_{form}") == wanted
    sizes = [path.stat().st_size for path in spread.whole.iterdir()]
    assert spread.stores["n2"].shard_bytes <= sum(sizes) + len(sizes) * PLANNED_BYTES < 1.3 * sum(sizes)
    (known,) = read_generation(spread.stores["n2"], (spread.tag, 1, form))
    assert known.manifest.source is not None
    marks = dict(known.manifest.source.fingerprints)
    assert marks.keys() == {path.name for path in spread.whole.iterdir()}
    assert not list((spread.nodes["n2"].save_dir / "staging").iterdir())
    for name in ("n0", "n1"):
        again = spread.upload(name, form)
        assert (again.outcome, again.commit) == ("committed", result.commit)
        assert not spread.planned(name)


def test_others_wait_for_the_one_that_makes_it_and_replace_it_when_it_is_silent(
    spread: Spread, tmp_path: Path
) -> None:
    wanted = expected(spread, tmp_path / "made")
    with pytest.raises(Cancelled):
        spread.upload("n0", check=after(spread, "n0", 2, stop))
    begun = spread.sent(f"{spread.tag}_universal")
    assert begun
    key = next(iter(begun))
    partial = partial_name(spread.stores["n0"]._owner, f"{spread.tag}_universal/{key}")
    half = (spread.nas / f"{spread.tag}_universal" / key).with_name(partial)
    half.write_bytes(b"half an upload")
    waiting = spread.upload("n1")
    assert (waiting.outcome, waiting.reason) == ("waiting", "n0 makes it")
    assert not spread.planned("n1")
    spread.falls_silent("n0")
    assert spread.upload("n1").outcome == "committed"
    assert [(a.number, a.node) for a in spread.attempts()] == [(1, "n0"), (2, "n1")]
    assert spread.sent(spread.folder()) == wanted
    assert spread.folder() == f"{spread.tag}_universal.a2"
    left = spread.sent(f"{spread.tag}_universal")
    assert list(left.values()) == [b"half an upload"], "nobody will go on with it; its own node gives that up"
    assert spread.upload("n0").outcome == "committed"
    assert not (spread.nas / f"{spread.tag}_universal").exists()
    assert len(spread.planned("n0")) == 1


def test_one_that_goes_on_after_a_break_goes_on_in_its_own_folder(spread: Spread, tmp_path: Path) -> None:
    wanted = expected(spread, tmp_path / "made")
    with pytest.raises(Cancelled):
        spread.upload("n0", check=after(spread, "n0", 2, stop))
    done = spread.nodes["n0"].uploaded()
    result = spread.upload("n0", plan_sha256=spread.planned("n0")[0].plan_sha256)
    assert result.outcome == "committed"
    assert result.bytes_skipped >= sum(one.bytes for one in done if one.key.startswith(f"{spread.tag}_"))
    assert [a.number for a in spread.attempts()] == [1]
    assert spread.sent(spread.folder()) == wanted


def test_one_that_was_paused_is_replaced(spread: Spread) -> None:
    with pytest.raises(Cancelled):
        spread.upload("n0", check=after(spread, "n0", 1, stop))
    spread.beat("n0", state="paused")
    assert spread.upload("n1").outcome == "committed"


def test_two_at_once_leave_one_commit_and_one_folder(spread: Spread, tmp_path: Path) -> None:
    """A node that everybody took for dead goes on to its last byte while another one makes it all."""
    wanted = expected(spread, tmp_path / "made")
    seen: list[UploadResult] = []

    def meanwhile() -> None:
        spread.falls_silent("n0")
        seen.append(spread.upload("n1"))

    late = spread.upload("n0", check=after(spread, "n0", 2, meanwhile))
    assert [result.outcome for result in (*seen, late)] == ["committed", "committed"]
    assert late.commit == seen[0].commit
    assert spread.folder() == f"{spread.tag}_universal.a2"
    assert spread.sent(spread.folder()) == wanted
    assert not spread.sent(f"{spread.tag}_universal"), "what it sent later is swept as well"
    commits = sorted(path.name for path in (spread.nas / "_ckptd" / "commits").iterdir())
    assert commits == [f"{spread.tag}~g1~universal.json", f"{spread.tag}~g1~zero.json"]


def test_what_another_manifest_lists_is_not_swept(spread: Spread) -> None:
    """Whoever lists an object of a dead attempt's folder keeps it."""
    with pytest.raises(Cancelled):
        spread.upload("n0", check=after(spread, "n0", 2, stop))
    held = next(iter(spread.sent(f"{spread.tag}_universal")))
    key = f"{spread.tag}_universal/{held}"
    (other, *_) = read_generation(spread.stores["n0"], (spread.tag, 1, "zero"))
    files = (other.manifest.files[0].model_copy(update={"key": key}),)
    listing = other.manifest.model_copy(update={"files": files, "form": "weights-bf16"})
    data = to_bytes(listing)
    spread.stores["n0"].put_if_absent(manifest_key(listing, sha256_of(data)), data)
    spread.falls_silent("n0")
    assert spread.upload("n1").outcome == "committed"
    assert set(spread.sent(f"{spread.tag}_universal")) == {held}


def test_a_form_that_cannot_be_made_is_told_to_all(spread: Spread) -> None:
    first = spread.upload("n0", folders=(spread.tag, f"{spread.tag}/other"))
    assert first.outcome == "refused"
    spread.falls_silent("n0")
    second = spread.upload("n1")
    assert (second.outcome, second.reason, second.hint) == ("refused", first.reason, first.hint)
    assert not spread.planned("n1")


@pytest.mark.parametrize("form", [UNIVERSAL, FP32])
def test_of_a_damaged_object_nothing_is_committed_until_it_is_mended(tmp_path: Path, form: str) -> None:
    """All nodes say so, and none makes it again, before what the remote holds is another thing."""
    spread = Spread(tmp_path, LARGE)
    wanted = expected(spread, tmp_path / "made", form)
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    good = shard.read_bytes()
    shard.write_bytes(_with_damaged_storages(good))
    first = spread.upload("n0", form)
    assert (first.outcome, f"{spread.tag}/{shard.name}" in str(first.reason)) == ("damaged", True)
    assert len(spread.sent(f"{spread.tag}_{form}")) == len(wanted), "it was found out of what was read of it"
    for name in NAMES:
        again = spread.upload(name, form)
        assert (again.outcome, again.reason, again.hint) == ("damaged", first.reason, first.hint)
    assert [len(spread.planned(name)) for name in NAMES] == [1, 0, 0]
    assert read_commit(spread.stores["n0"], (spread.tag, 1, form)) is None

    shard.write_bytes(good)
    assert spread.upload("n1", form).outcome == "committed"
    commit = read_commit(spread.stores["n0"], (spread.tag, 1, form))
    assert commit is not None
    assert commit.commit.folder == f"{spread.tag}_{form}.a3"
    assert spread.sent(commit.commit.folder) == wanted
    assert not spread.sent(f"{spread.tag}_{form}")


@pytest.mark.parametrize(
    ("form", "where"),
    [
        (UNIVERSAL, "pickle"),
        (UNIVERSAL, "method"),
        (FP32, "directory"),
        (UNIVERSAL, "storage 0"),
        *((FP32, f"storage {number}") for number in range(3)),
    ],
)
def test_one_wrong_answer_on_the_way_is_no_damage(tmp_path: Path, form: str, where: str) -> None:
    """All nodes would be told for good that a shard is damaged, or that there is no such form."""
    spread = Spread(tmp_path, LARGE)
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    data = shard.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = sorted(archive.infolist(), key=lambda record: -record.file_size)
    pickle = next(one for one in records if one.filename.endswith("data.pkl"))
    last = data.rindex(b"PK\x01\x02")
    # a mirror has its ends twice, and small records thrice: the last answer counts
    flips = {
        "pickle": {_payload(data, pickle)[0] + 40: 3},
        "directory": {last + 16: 2},
        "method": {last + 10: 2},
    }
    for number, one in enumerate(records[:3]):
        flips[f"storage {number}"] = {_payload(data, one)[0] + one.file_size // 2: 1}
    assert spread.answered_wrongly(shard.name, flips[where], form) == expected(
        spread, tmp_path / "made", form
    )


def test_copies_that_differ_on_the_way_alone_have_not_drifted_apart(tmp_path: Path) -> None:
    """A wrong answer is none, and damage ends: neither is a form that will never be."""
    for is_damage in (True, False):
        (tmp_path / str(is_damage)).mkdir()
        spread = Spread(tmp_path / str(is_damage), write=partial(write, megatron(2)))
        shard, at = where_copies_lie(spread.nas / spread.tag)
        good = shard.read_bytes()
        if is_damage:
            shard.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            first = spread.upload("n1")
            assert (first.outcome, shard.name in str(first.reason)) == ("damaged", True), first.reason
        else:
            made = spread.answered_wrongly(shard.name, {at: 1}, is_planned=True)
            assert made == expected(spread, tmp_path / "made")


def test_what_lies_beside_damaged_shards_mends_nothing(tmp_path: Path) -> None:
    """Forms that are made, and files that come late, lie in their folder."""
    spread = Spread(tmp_path, LARGE)
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    good = shard.read_bytes()
    shard.write_bytes(_with_damaged_storages(good))
    assert spread.upload("n0").outcome == "damaged"
    (spread.nas / spread.tag / "late.txt").write_bytes(b"a note")
    assert [spread.upload(name).outcome for name in NAMES] == ["damaged"] * 3
    assert [len(spread.planned(name)) for name in NAMES] == [1, 0, 0], "nobody tries it again"
    shard.write_bytes(good)
    assert spread.upload("n2").outcome == "committed"


def test_a_node_of_an_earlier_release_says_the_same_otherwise(tmp_path: Path) -> None:
    """Its digest is of all that lies in the folder. It takes ours for a mended shard, we take its once."""
    spread = Spread(tmp_path, LARGE)
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    good = shard.read_bytes()
    shard.write_bytes(_with_damaged_storages(good))
    row = attempts_folder(spread.tag, 1, UNIVERSAL)

    def of_an_earlier_release() -> None:
        number = len(spread.attempts()) + 1
        said = Attempt(
            job_id=JOB_ID, number=number, node="n1", node_id="id-n1", refused="x", damaged="0" * 64
        )
        spread.stores["n1"].put_if_absent(numbered(row, number), to_bytes(said))

    for _ in range(3):
        of_an_earlier_release()
        assert [spread.upload(name).outcome for name in ("n0", "n2")] == ["damaged"] * 2
    assert [len(spread.planned(name)) for name in NAMES] == [1, 0, 0], "read once by all of this release"
    shard.write_bytes(good)
    assert spread.upload("n2").outcome == "committed"


def test_a_bit_of_what_weights_are_made_of_is_seen(tmp_path: Path) -> None:
    """They read the master weights of a shard; its two moments they neither need nor compare."""
    outcomes = []
    for number in range(3):
        root = tmp_path / str(number)
        root.mkdir()
        spread = Spread(root, LARGE)
        shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_0_" in p.name)
        data = bytearray(shard.read_bytes())
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
            largest = sorted(archive.infolist(), key=lambda record: -record.file_size)[:3]
        begin, size = _payload(bytes(data), largest[number])
        data[begin + size - 1] ^= 1
        shard.write_bytes(data)
        outcomes.append(spread.upload("n0", FP32).outcome)
        if outcomes[-1] == "committed":
            assert spread.sent(f"{spread.tag}_{FP32}") == expected(spread, root / "made", FP32)
    assert sorted(outcomes) == ["committed", "committed", "damaged"]


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_planning_reads_of_a_damaged_object_is_not_believed(spread: Spread, is_directory: bool) -> None:
    """Its pickle against the CRC32 in the zip directory, and that against the manifest's fingerprint."""
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    data = bytearray(shard.read_bytes())
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        info = next(one for one in archive.infolist() if one.filename.endswith("data.pkl"))
        at = _payload(bytes(data), info)[0] + 40
        if is_directory:  # the CRC32 of a storage, as the directory has it
            at = data.rindex(b"PK\x01\x02") + 16
    data[at] ^= 1
    shard.write_bytes(bytes(data))
    assert spread.upload("n0").outcome == "damaged"
    assert not spread.planned("n0")


@pytest.mark.parametrize("at", [10, 20], ids=["method", "packed size"])
def test_a_directory_that_a_flipped_bit_makes_unreadable_is_damage_that_ends(spread: Spread, at: int) -> None:
    """It was told to all as a save that has no such form, for ever."""
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "pp_rank_1_" in p.name)
    good = shard.read_bytes()
    data = bytearray(good)
    data[data.rindex(b"PK\x01\x02") + at] ^= 1
    shard.write_bytes(data)
    first = spread.upload("n0")
    assert (first.outcome, shard.name in str(first.reason)) == ("damaged", True)
    assert spread.upload("n1").outcome == "damaged"
    shard.write_bytes(good)
    assert spread.upload("n1").outcome == "committed"


def _payload(data: bytes, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Where a record's bytes begin, and how many."""
    name, extra = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
    return info.header_offset + 30 + name + extra, info.file_size


def test_what_was_sent_of_a_shard_that_was_mended_since_is_sent_again(spread: Spread, tmp_path: Path) -> None:
    """An attempt that ended early left objects; by the next one the shard is good."""
    wanted = expected(spread, tmp_path / "made")
    shard = next(p for p in (spread.nas / spread.tag).iterdir() if "zero_pp_rank_0_" in p.name)
    good = shard.read_bytes()
    shard.write_bytes(_with_damaged_storages(good))
    with pytest.raises(Cancelled):
        spread.upload("n0", check=after(spread, "n0", 6, stop))
    shard.write_bytes(good)
    plan_sha256 = spread.planned("n0")[0].plan_sha256
    with pytest.raises(SourceChanged, match="made of other bytes"):
        spread.upload("n0", plan_sha256=plan_sha256)
    assert read_commit(spread.stores["n0"], (spread.tag, 1, UNIVERSAL)) is None
    spread.nodes["n0"].events.clear()  # as the journal forgets what it knew of that attempt
    assert spread.upload("n0", plan_sha256=plan_sha256).outcome == "committed"
    assert spread.sent(spread.folder()) == wanted


def _with_damaged_storages(data: bytes) -> bytes:
    """A shard that reads as before, with other numbers in its largest storages."""
    changed = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        largest = sorted(archive.infolist(), key=lambda record: -record.file_size)[:3]
    for record in largest:
        begin = record.header_offset + record.file_size // 2
        changed[begin : begin + 64] = bytes(byte ^ 1 for byte in changed[begin : begin + 64])
    return bytes(changed)


def test_of_a_commit_that_is_gone_nothing_is_made(spread: Spread) -> None:
    (spread.nas / commit_key(spread.tag, 1, "zero")).unlink()
    with pytest.raises(SourceChanged, match="no longer holds"):
        spread.upload("n0")
    assert not spread.planned("n0")


def test_what_is_retired_is_not_made_again_and_forgets_who_made_it(spread: Spread) -> None:
    result = spread.upload("n0")
    assert result.commit is not None
    order = DeleteCommit(
        tag=spread.tag, generation=1, form=UNIVERSAL, reason="keys", commit_sha256=result.commit.sha256
    )
    delete_commit(spread.grounds["n0"], order, lambda: None)
    assert not spread.attempts()
    assert not spread.sent(f"{spread.tag}_universal")
    assert spread.upload("n1").outcome == "conflict"
    assert not spread.attempts()
    assert not [event for event in spread.nodes["n1"].events if isinstance(event, UploadedObject)][2:]
