"""Layouts whose shards lie one level deeper: what is copied beside them, and what lies there already."""

from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Role
from ckptd.core.model.manifest import sha256_of
from ckptd.core.model.records import DerivedRecord, SaveRow
from ckptd.core.policy.actions import Upload
from ckptd.daemon.uploads.requests import files_to_upload
from ckptd.errors import TargetExists
from ckptd.maintenance.verify import Slice, Verifier
from ckptd.recover.execute import StepExecution
from ckptd.recover.select.inventory import read_remote_inventory
from ckptd.recover.select.steps import CopyBeside
from ckptd.storage.remote import derive_attempts
from ckptd.storage.remote.messages import UploadFile, UploadRequest
from ckptd.storage.remote.supplement import supplement
from ckptd.storage.remote.transfer import TransferControl
from ckptd.storage.stores.rate_limit import RateLimiter
from tests.support.core_views import sealed
from tests.support.recover_scene import EXTRA, SHAPES
from tests.support.restore_scene import RestoreScene
from tests.support.synthetic import write_stage12

_RANKS = 100
_TARGET = "_ckptd/derived/accelerate/checkpoint_1"


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    """Accelerate writes one `random_states_<rank>.pkl` per rank; the usual limit is 1,024 open files."""
    folder = tmp_path / "checkpoint_1"
    paths = tuple(f"states/random_states_{rank}.pkl" for rank in range(_RANKS))
    (folder / "states").mkdir(parents=True)
    for path in paths:
        (folder / path).write_text(path)
    fd = os.open(tmp_path, os.O_RDONLY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + _RANKS, limits[1]))
    try:
        execution = StepExecution(tmp_path, fd, reserve_bytes=0, compare_masters=True)
        execution.run([CopyBeside(tag="checkpoint_1", target=_TARGET, paths=paths)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(fd)
    assert all((tmp_path / _TARGET / path).read_text() == path for path in paths)


TAG, ROOT = "checkpoint-10", "global_step10"
FORM = f"{ROOT}_universal"
STOCK = {
    f"{FORM}/zero/embed.weight/fp32.pt": b"half of it",
    f"{FORM}/mp_rank_00_model_states.pt": b"",
    "latest_universal": b"x",
}
"""What DeepSpeed's own converter leaves when it is killed; nothing says what it was made from."""


@dataclass
class HfScene(RestoreScene):
    """checkpoint-10 as Hugging Face's Trainer writes it."""

    @property
    def form(self) -> Path:
        """The universal form beside the shards here."""
        return self.save_dir / TAG / FORM

    def hf_save(self, salt: str = "") -> None:
        """In place, also over an earlier one."""

        def change(model: dict[str, object]) -> None:
            model["ds_config"] = {"salt": salt}

        write_stage12(self.save_dir / TAG / ROOT, SHAPES, self.dp, step=10, change_model=change)
        (self.save_dir / TAG / "trainer_state.json").write_text('{"global_step": 10}')
        (self.save_dir / EXTRA).write_text("{}")

    def put_stock(self) -> None:
        """A person ran `ds_to_universal`, which was killed."""
        for name, data in STOCK.items():
            path = self.save_dir / TAG / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def ship_late(self) -> None:
        """As the daemon ships what came after the COMMIT."""
        inventory = read_remote_inventory("nas", str(self.nas), None)
        view = next(view for view in inventory.commits if view.commit.form == "zero")
        rows = tuple(
            UploadFile(
                path=name,
                key=f"{TAG}/{name}",
                source=f"{TAG}/{name}",
                identity=files.identity_of((self.save_dir / TAG / name).stat()),
                bytes=len(data),
                role=Role.SIDE,
                fingerprint=sha256_of(data),
                check_zip_crc=False,
            )
            for name, data in STOCK.items()
        )
        manifest = inventory.manifests(view.commit)[0].model_copy(update={"files": ()})
        order = UploadRequest(
            root=str(self.save_dir), manifest=manifest, files=rows, supplement_to=view.sha256
        )
        control = TransferControl(
            pacer=RateLimiter(), check=lambda: None, on_moving=lambda *_: None, on_done=lambda _: None
        )
        assert supplement(self.ground(), order, control).outcome == "committed"

    def made_from(self, form: Path) -> dict[str, str]:
        """Fingerprints in a form's description."""
        marks: dict[str, str] = json.loads((form / "ckptd.json").read_text())["source"]["fingerprints"]
        return marks


@pytest.fixture
def hf(tmp_path: Path) -> HfScene:
    """A node with one checkpoint."""
    scene = HfScene(tmp_path)
    scene.hf_save()
    return scene


def test_a_form_of_the_save_before_is_not_used(hf: HfScene) -> None:
    """The Trainer, rewound, saves over checkpoint-10 and leaves in it what `resume` put there (H15)."""
    hf.resume(remote=False, world_size=4)
    before = hf.made_from(hf.form)
    hf.resume(remote=False, world_size=4)
    assert hf.aside() == [], "what was made from this very save stays"
    hf.hf_save(salt="the run was rewound")
    hf.resume(remote=False, world_size=4)
    assert hf.made_from(hf.form) != before
    (aside,) = hf.aside()
    assert hf.made_from(hf.save_dir / "_ckptd" / "aside" / aside) == before
    assert (hf.save_dir / TAG / "latest_universal").read_text() == FORM


def test_nor_left_where_a_trainer_would_follow_it(hf: HfScene) -> None:
    """With `load_universal` in its configuration, also on the ranks that saved it."""
    hf.resume(remote=False, world_size=4)
    before = hf.tree()
    hf.resume(remote=False)
    assert hf.tree() == before
    hf.hf_save(salt="the run was rewound")
    hf.resume(remote=False)
    assert not hf.form.exists()
    assert not (hf.save_dir / TAG / "latest_universal").exists()
    assert len(hf.aside()) == 2


def test_half_a_form_of_somebody_elses_is_not_used(hf: HfScene) -> None:
    hf.put_stock()
    hf.resume(remote=False, world_size=4)
    assert hf.made_from(hf.form)
    (aside,) = hf.aside()
    assert (
        hf.save_dir / "_ckptd" / "aside" / aside / "zero" / "embed.weight" / "fp32.pt"
    ).read_bytes() == b"half of it"
    before = hf.tree()
    hf.resume(remote=False, world_size=4)
    assert hf.tree() == before


@pytest.mark.parametrize("has_universal", [False, True])
def test_a_form_that_was_uploaded_late_is_in_nobodys_way(hf: HfScene, has_universal: bool) -> None:
    """It comes back with the checkpoint, but where another number of ranks wants a form that is proven."""
    hf.commit(TAG, 10)
    if has_universal:
        hf.commit_universal(TAG, 10, below=f"{FORM}/", root=ROOT)
    hf.put_stock()
    hf.ship_late()
    hf.resume()
    assert hf.tree()[f"{TAG}/{FORM}/zero/embed.weight/fp32.pt"] == b"half of it", "nothing was to be done"
    hf.lose_node()
    hf.resume(world_size=4)
    assert hf.made_from(hf.form)
    assert (hf.save_dir / TAG / "latest_universal").read_text() == FORM
    for _ in range(2):
        hf.restore(world_size=4)
        assert hf.made_from(hf.dir / TAG / FORM)
        assert hf.named(f"{TAG}/latest_universal") == FORM


def test_nor_does_one_that_was_there_when_the_save_was_sealed(tmp_path: Path) -> None:
    """Found at the first start, say: a part of the save, whose place in the remote is our own form's."""
    save = sealed(10, tag=TAG)
    shard = save.files[0].model_copy(update={"path": f"{ROOT}/{save.files[0].path}"})
    theirs = [shard.model_copy(update={"path": name, "role": Role.SIDE}) for name in STOCK]
    update = {"files": (shard, *theirs), "roots": (ROOT,)}
    row = SaveRow(
        id=1,
        save=save.model_copy(update=update),
        state="present",
        found_first=True,
        adopted=True,
        held=False,
        derived=DerivedRecord(),
        seen_at=0.0,
        sealed_at=0.0,
        ended_at=None,
    )
    with files.opened_dir(tmp_path) as fd:
        order = files_to_upload(
            row, Upload(save_id=1, remote="nas", form="zero", generation=1, attempt=1), fd
        )
    keys = {file.path: file.key for file in order or ()}
    assert keys[shard.path] == f"{TAG}/{shard.path}"
    assert {keys[name] for name in STOCK} == {f"{TAG}/_late/f10.1.0100/{name}" for name in STOCK}


@pytest.mark.parametrize("comes", ["before our own", "after our own"])
def test_a_late_form_and_our_own_share_no_object(hf: HfScene, comes: str) -> None:
    """In the remote our universal form lies in the very folder that somebody else's had here."""
    hf.commit(TAG, 10)
    if comes == "after our own":
        hf.commit_universal(TAG, 10, below=f"{FORM}/", root=ROOT)
    hf.put_stock()
    hf.ship_late()
    if comes == "before our own":
        hf.commit_universal(TAG, 10, below=f"{FORM}/", root=ROOT)
    verified = Verifier(read_remote_inventory("nas", str(hf.nas), None), read=Slice()).run()
    assert [(row.form, row.verdict) for row in verified.commits] == [("zero", "good"), ("universal", "good")]
    hf.lose_node()
    hf.resume()
    assert hf.tree()[f"{TAG}/{FORM}/zero/embed.weight/fp32.pt"] == b"half of it"


@pytest.mark.parametrize("ranks", [None, 4])
def test_a_commit_of_an_earlier_release_that_lists_one_keeps_its_objects(
    hf: HfScene, ranks: int | None
) -> None:
    """They lie under the very names of our form, which went over them: nothing could be resumed."""
    hf.put_stock()
    (hf.form / "mp_rank_00_model_states.pt").unlink()
    hf.commit(TAG, 10)
    assert (hf.nas / TAG / FORM / "zero" / "embed.weight" / "fp32.pt").exists()
    first = hf.commit_universal(TAG, 10, keep=True, below=f"{FORM}/", root=ROOT)
    assert first.outcome == "conflict", first.reason
    shutil.rmtree(hf.save_dir / "_ckptd")
    second = hf.commit_universal(TAG, 10, below=f"{FORM}/", root=ROOT, attempt=2)
    assert second.outcome == "committed", second.reason
    verified = Verifier(read_remote_inventory("nas", str(hf.nas), None), read=Slice()).run()
    assert [(row.form, row.verdict) for row in verified.commits] == [("zero", "good"), ("universal", "good")]
    hf.lose_node()
    hf.resume(world_size=ranks)
    theirs = hf.tree()[f"{TAG}/{FORM}/zero/embed.weight/fp32.pt"] == b"half of it"
    assert theirs == (ranks is None), "a form for other ranks is never somebody else's"
    assert ranks is None or hf.made_from(hf.form)


def test_restore_says_that_a_form_is_in_the_way(hf: HfScene) -> None:
    """DIR may be a person's: nothing in it is moved."""
    hf.commit(TAG, 10)
    hf.put_stock()
    hf.ship_late()
    hf.restore()
    assert (hf.dir / TAG / FORM / "zero" / "embed.weight" / "fp32.pt").read_bytes() == b"half of it"
    with pytest.raises(TargetExists, match="was not made from"):
        hf.restore(world_size=4)


def test_what_our_form_went_over_is_no_reason_to_give_the_shards_up(
    hf: HfScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases left it: the COMMIT's own shards are whole, and were not resumed from."""
    hf.put_stock()
    (hf.form / "mp_rank_00_model_states.pt").unlink()
    hf.commit(TAG, 10)
    monkeypatch.setattr(derive_attempts, "folder_in_use", lambda *_: False)
    assert hf.commit_universal(TAG, 10, below=f"{FORM}/", root=ROOT).outcome == "committed"
    shards = {name: data for name, data in hf.tree().items() if name.startswith(f"{TAG}/{ROOT}/")}
    for _ in range(2):
        hf.restore()
        assert {n: data for n, data in hf.everything().items() if n.startswith(f"{TAG}/{ROOT}/")} == shards
        assert not (hf.dir / TAG / FORM).exists()
    hf.lose_node()
    hf.resume()
    assert {name: data for name, data in hf.tree().items() if name.startswith(f"{TAG}/{ROOT}/")} == shards
    assert not hf.form.exists()
