"""`remove` and holds: the word beside a hold goes with it, and is nothing to keep alone."""

from __future__ import annotations

from contextlib import closing

import pytest

from ckptd.cli.main import main
from ckptd.errors import RefusedError
from ckptd.maintenance.uninstall import JobUninstall
from ckptd.storage.local import clones, fs
from tests.support.recover_scene import Scene, scene

__all__ = ["scene"]


def lay(scene: Scene, name: str, *, with_hold: bool) -> None:
    """The word about a hold, and the hold where it is still there."""
    place = scene.save_dir / fs.HOLD
    (place / name if with_hold else place).mkdir(parents=True, exist_ok=True)
    (place / clones.about_name(name)).write_text("{}")


def test_a_word_whose_hold_is_gone_is_nothing_to_keep(scene: Scene) -> None:
    """The hold was released, the save is committed: what is left of it held up every removal."""
    lay(scene, "global_step2.2", with_hold=False)
    with closing(JobUninstall(scene.job(), None)) as removal:
        gone = removal.carry_out(removal.plan(), with_uncommitted=False)
    assert [piece.path for piece in gone] == [f"{fs.HOLD}/global_step2.2.json"]
    assert not (scene.save_dir / "_ckptd").exists()


def test_a_word_goes_with_its_hold(scene: Scene) -> None:
    lay(scene, "global_step2.2", with_hold=True)
    with closing(JobUninstall(scene.job(), None)) as removal:
        pieces = removal.plan()
        assert [(piece.name, piece.fate) for piece in pieces] == [("global_step2.2", "only here")]
        with pytest.raises(RefusedError, match=r"global_step2\.2: no journal knows"):
            removal.carry_out(pieces, with_uncommitted=False)
        assert (scene.save_dir / fs.HOLD / "global_step2.2.json").exists()
        removal.carry_out(pieces, with_uncommitted=True)
    assert not (scene.save_dir / "_ckptd").exists()


def test_a_dry_run_refuses_what_a_removal_refuses(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    lay(scene, "global_step2.2", with_hold=True)
    codes = []
    for options in (["--dry-run"], [], ["--dry-run", "--uncommitted"]):
        with pytest.raises(SystemExit) as ended:
            main(["uninstall", str(scene.save_dir), *options])
        codes.append(ended.value.code)
    assert codes == [65, 65, 0]
    assert "refused without --uncommitted: _ckptd/hold/global_step2.2 " in capsys.readouterr().out
    assert (scene.save_dir / fs.HOLD / "global_step2.2").exists()
