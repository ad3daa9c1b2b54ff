"""What `ckptd inspect` says of folders that training does not make in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptd.cli.main import build_app
from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import NotFoundError
from ckptd.maintenance.inspection import inspect_folder
from tests.support.synthetic import Shapes, write_stage3, write_stage12

GROUPS: list[Shapes] = [{f"w{i}": (5, 3) for i in range(20)}]


def shown(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(["inspect", "convert"]), [str(a) for a in arguments])
    return result.exit_code, result.stdout


def test_save_dir_with_many_tags_in_natural_order(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_stage12(tmp_path / f"global_step{step}", GROUPS, 2, step=step)
    (tmp_path / "latest").write_text("global_step10")
    (tmp_path / "logs").mkdir()
    seen = inspect_folder(tmp_path)
    assert [c.tag for c in seen.checkpoints] == ["global_step2", "global_step9", "global_step10"]
    assert seen.is_sound
    code, text = shown("inspect", tmp_path)
    assert code == 0
    assert "latest" in text


def test_a_missing_parameter_state_in_a_universal_folder(tmp_path: Path) -> None:
    write_stage3(tmp_path / "in", GROUPS, 2)
    convert(tmp_path / "in", tmp_path / "u", ConvertOptions())
    assert inspect_folder(tmp_path / "u").is_sound
    (tmp_path / "u" / "zero" / "w3" / "fp32.pt").unlink()
    seen = inspect_folder(tmp_path / "u")
    assert not seen.is_sound
    assert seen.checkpoints[0].reason == "zero/w3/fp32.pt is missing"
    (tmp_path / "u" / "zero" / "optimizer_state.pt").unlink()
    assert "optimizer_state" in str(inspect_folder(tmp_path / "u").checkpoints[0].reason)
    code, text = shown("inspect", tmp_path / "u")
    assert code == 65
    assert "--all-files" in text


def test_stale_shards_are_noted_not_counted(tmp_path: Path) -> None:
    write_stage12(tmp_path / "tag", GROUPS, 2)
    write_stage12(tmp_path / "larger", GROUPS, 4)
    name = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    (tmp_path / "larger" / name).rename(tmp_path / "tag" / name)
    seen = inspect_folder(tmp_path / "tag")
    assert seen.is_sound
    assert name in seen.checkpoints[0].notes[0]


def test_convert_reports_in_a_table_and_names_what_it_made(tmp_path: Path) -> None:
    write_stage12(tmp_path / "save" / "global_step7", GROUPS, 2)
    (tmp_path / "save" / "latest").write_text("global_step7")
    code, text = shown("convert", tmp_path / "save", tmp_path / "u", "--verify")
    assert code == 0
    assert "superset" in text
    assert (tmp_path / "latest_universal").read_text() == "u"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        inspect_folder(tmp_path)
    with pytest.raises(NotFoundError):
        inspect_folder(tmp_path / "no")
