"""Forms made while they are sent: one transfer for them and for sealed files; plans, changes, refusals."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.conversion.remote import derive
from ckptd.core.model.manifest import DerivedSource, folder_name
from ckptd.core.model.records import UNIVERSAL, ZERO
from ckptd.errors import DamagedError, SourceChanged
from ckptd.storage.remote.commit import upload_form
from ckptd.storage.remote.documents import read_commit, read_generation
from ckptd.storage.remote.messages import Committed, DeriveRequest, Planned, UploadedObject, UploadRequest
from ckptd.storage.remote.transfer import sealed
from ckptd.storage.stores.rate_limit import Cancelled
from tests.stores.memory import MemoryStore
from tests.stores.scene import JOB_ID, Node
from tests.support.synthetic import write_stage12
from tests.support.tp_saves import megatron, write

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.messages import UploadResult
    from ckptd.storage.remote.observe import AttachedRemote

GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (64, 16), "norm.weight": (16,)},
    {"norm.bias": (16,)},
]
FP32 = "weights-fp32"


class Scene:
    """A save that no other form lies beside, and a store."""

    def __init__(self, tmp_path: Path, shards: Path | None = None) -> None:
        self.node = Node(tmp_path / "save")
        self.shards = self.node.save_dir / self.node.tag
        if shards is not None:
            shutil.copytree(shards, self.shards)
        else:
            write_stage12(self.shards, GROUPS, 2)
        self.staging = tmp_path / "staging"
        self.staging.mkdir(parents=True)
        self.store = MemoryStore()
        self.ground: AttachedRemote = self.node.attached(self.store)

    def order(self, form: str, uploaded: tuple[UploadedObject, ...] = (), **changes: object) -> UploadRequest:
        save = self.node.sealed()
        order = self.node.order(save, form=form, uploaded=uploaded)
        source = DerivedSource(
            generation=1, fingerprints=save.fingerprints, plan_sha256="", layout="", alignment=0
        )
        tag = self.node.tag
        making_ = DeriveRequest(
            folders=(tag,),
            sealed=tuple((f"{tag}/{f.path}", f.identity) for f in save.files),
            staging=str(self.staging),
            memory_bytes=96 << 20,
        )
        return order.model_copy(
            update={
                "files": (),
                "manifest": order.manifest.model_copy(update={"source": source}),
                "making": making_.model_copy(update=changes),
            }
        )

    def order_from_remote(self, form: str) -> UploadRequest:
        """As `order`, of a node that has no shard any more: of those that the remote's COMMIT lists."""
        zero = read_commit(self.ground.store, (self.node.tag, 1, ZERO))
        assert zero is not None
        committed = Committed(sha256=zero.sha256, takeover_seconds=30.0)
        order = self.order(form, zero=committed, sealed=())
        shutil.rmtree(self.shards)
        return order

    def upload(self, order: UploadRequest, **changes: Any) -> UploadResult:
        control = replace(self.node.control(), on_planned=self.node.events.append, **changes)
        return upload_form(self.ground, order, control, derive.opened)

    def objects(self, form: str) -> dict[str, bytes]:
        head = f"{folder_name(self.node.tag, 1, form)}/"
        return {key.removeprefix(head): d for key, d in self.store.objects.items() if key.startswith(head)}

    def planned(self) -> list[Planned]:
        return [event for event in self.node.events if isinstance(event, Planned)]

    def is_untouched(self, form: str) -> bool:
        where = (self.node.tag, 1, form)
        return not read_generation(self.store, where) and read_commit(self.store, where) is None


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("form", [UNIVERSAL, FP32])
def test_what_is_sent_is_what_convert_makes(scene: Scene, tmp_path: Path, form: str) -> None:
    """And the manifest says of which plan; the plan itself never had a name."""
    options = ConvertOptions() if form == UNIVERSAL else ConvertOptions(form="weights")
    report = convert(scene.shards, tmp_path / "made", options)
    result = scene.upload(scene.order(form))
    assert result.outcome == "committed"
    files = (p for p in (tmp_path / "made").rglob("*") if p.is_file())
    assert scene.objects(form) == {str(p.relative_to(tmp_path / "made")): p.read_bytes() for p in files}
    (known,) = read_generation(scene.store, (scene.node.tag, 1, form))
    assert known.manifest.source is not None
    assert known.manifest.source.plan_sha256 == report.plan_sha256 == scene.planned()[0].plan_sha256
    sizes = [len(data) for data in scene.objects(form).values()]
    assert (scene.planned()[0].files, scene.planned()[0].bytes) == (len(sizes), sum(sizes))
    assert not list(scene.staging.iterdir())


def test_a_commit_that_is_there_is_not_planned_again(scene: Scene) -> None:
    scene.upload(scene.order(UNIVERSAL))
    before = dict(scene.store.objects)
    assert scene.upload(scene.order(UNIVERSAL)).outcome == "committed"
    assert scene.store.objects == before
    assert len(scene.planned()) == 1


def _stopped(scene: Scene, after: int) -> tuple[UploadedObject, ...]:
    """Cancelled when so many objects were done: what the journal knows of it."""

    def check() -> None:
        if len(scene.node.uploaded()) >= after:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        scene.upload(scene.order(UNIVERSAL), check=check)
    return scene.node.uploaded()


def test_an_attempt_goes_on_where_one_of_the_same_plan_ended(scene: Scene) -> None:
    """Nothing that it finished is made or sent again."""
    done = _stopped(scene, 3)
    assert scene.is_untouched(UNIVERSAL)
    result = scene.upload(scene.order(UNIVERSAL, done, plan_sha256=scene.planned()[0].plan_sha256))
    assert result.outcome == "committed"
    assert result.bytes_skipped >= sum(entry.bytes for entry in done)
    assert result.bytes_sent + result.bytes_skipped == scene.planned()[0].bytes


def test_what_another_plan_sent_is_compared_and_not_believed(scene: Scene) -> None:
    """Another version laid it out otherwise: the same name and size, other bytes."""
    done = _stopped(scene, 3)
    first = done[0].key
    good = scene.store.objects[first]
    scene.store.objects[first] = bytes(len(good))
    assert scene.upload(scene.order(UNIVERSAL, done, plan_sha256="0" * 64)).outcome == "committed"
    assert scene.store.objects[first] == good


def test_a_save_that_changes_meanwhile_is_never_committed(scene: Scene) -> None:
    """P4: whether before planning or when the last byte is sent."""
    name = next(iter(sorted(scene.shards.iterdir()))).name
    data = (scene.shards / name).read_bytes()
    order = scene.order(UNIVERSAL)

    def on_done(entry: UploadedObject) -> None:
        scene.node.events.append(entry)
        if len(scene.node.uploaded()) == len(scene.objects(UNIVERSAL)) == scene.planned()[0].files:
            scene.node.rewrite(name, data)

    with pytest.raises(SourceChanged):
        scene.upload(order, on_done=on_done)
    assert len(scene.objects(UNIVERSAL)) == scene.planned()[0].files, "changed too early"
    scene.node.events.clear()
    with pytest.raises(SourceChanged):
        scene.upload(order)
    assert not scene.planned()
    assert scene.is_untouched(UNIVERSAL)


def test_planning_ends_when_the_order_is_cancelled(scene: Scene) -> None:
    def check() -> None:
        raise Cancelled("at once")

    with pytest.raises(Cancelled):
        scene.upload(scene.order(UNIVERSAL), check=check)
    assert not scene.planned()


def test_a_form_that_cannot_be_made_is_an_answer(scene: Scene) -> None:
    """Nothing is sent, and nobody tries it again."""
    two = scene.order(UNIVERSAL, folders=(scene.node.tag, "other"))
    result = scene.upload(two)
    assert (result.outcome, scene.objects(UNIVERSAL)) == ("refused", {})
    assert "two engines" in (result.reason or "")
    assert result.hint
    assert scene.is_untouched(UNIVERSAL)


def where_copies_lie(folder: Path) -> tuple[Path, int]:
    """Of a save of two tensor ranks: a shard, and where in it a byte of its copy of norm.weight lies."""
    for shard in sorted(folder.glob("*zero_pp_rank_*_mp_rank_01_optim*")):
        inner = torch.load(shard, weights_only=False)["optimizer_state_dict"]
        for group, mapping in enumerate(inner["param_slice_mappings"]):
            if "norm.weight" in mapping:
                begin = mapping["norm.weight"].start
                values = inner["base_optimizer_state"]["state"][group]["exp_avg"]
                data, wanted = shard.read_bytes(), values[begin : begin + 3].numpy().tobytes()
                assert data.count(wanted) == 1
                return shard, data.index(wanted)
    raise AssertionError(folder)


@pytest.mark.parametrize("is_drift", [True, False], ids=["drifted", "damaged"])
def test_copies_that_differ_by_damage_are_no_form_that_will_never_be(tmp_path: Path, is_drift: bool) -> None:
    write(megatron(2), tmp_path / "shards")
    scene = Scene(tmp_path, tmp_path / "shards")
    shard, at = where_copies_lie(scene.shards)
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    if is_drift:  # as a trainer saves it: the record has its CRC32
        with zipfile.ZipFile(shard) as archive:
            records = archive.infolist()
        record = max((one for one in records if one.header_offset < at), key=lambda one: one.header_offset)
        name = int.from_bytes(data[record.header_offset + 26 :][:2], "little")
        extra = int.from_bytes(data[record.header_offset + 28 :][:2], "little")
        head = record.header_offset + 30 + name + extra
        crc = zlib.crc32(data[head : head + record.file_size]).to_bytes(4, "little")
        old = record.CRC.to_bytes(4, "little")
        data = data.replace(old, crc)
    shard.write_bytes(data)
    order = scene.order(UNIVERSAL)
    if is_drift:
        result = scene.upload(order)
        assert (result.outcome, "different copies" in str(result.reason)) == ("refused", True)
    else:
        with pytest.raises(DamagedError, match=shard.name):
            scene.upload(order)


def test_a_remotes_lasting_child_makes_nothing(scene: Scene) -> None:
    with pytest.raises(Exception, match="makes no universal"):
        upload_form(scene.ground, scene.order(UNIVERSAL), scene.node.control(), sealed)
    assert scene.ground.identity.job_id == JOB_ID
