"""Sequence parallelism (Ulysses): to ZeRO its ranks are data parallel; resumed with it and without."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.conversion.engine.supervisor import convert
from tests.e2e.test_inspect_real import inspect
from tests.support import stacked
from tests.support.real import TAG, Recipe, Resume, losses_of, prepare, resume, save_dir_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
STAGE_3 = Recipe(stage=3, world_size=4, sp=2)
STAGE_2 = replace(STAGE_3, stage=2)


def test_the_grid_is_data_parallel(tmp_path: Path) -> None:
    """0.19.8 records the sequence degree as tp_degree beside mp_world_size 1: no tensor rank is missing."""
    prepare([STAGE_2, STAGE_3])
    for recipe in (STAGE_2, STAGE_3):
        code, seen = inspect(save_dir_of(recipe) / TAG)
        grid = seen["checkpoints"][0]["grid"]
        assert (code, grid["dp"], grid["sp"], grid["tp"], grid["mm_count"]) == (0, 4, 2, 1, 1)
    convert(save_dir_of(STAGE_2) / TAG, tmp_path / "u")
    assert stacked.differences([(save_dir_of(STAGE_2) / TAG, tmp_path / "u", 1, False)]) == [[]]


if os.environ.get("CKPTD_FULL"):  # two starts of torchrun

    def test_it_resumes_with_and_without_sequence_parallelism(tmp_path: Path) -> None:
        """With it at stage 3: the stage 1/2 loader of 0.19.8 asks Ulysses' mpu for what it does not have.

        At stages 1 and 2 DeepSpeed's gradients are larger by the degree, so the moments are of another
        scale and losses drift from the third step on (docs/formats.md §2.6); the bytes are those of the save.
        """
        prepare([STAGE_2, STAGE_3])
        for name, recipe in (("two", STAGE_2), ("three", STAGE_3)):
            convert(save_dir_of(recipe) / TAG, tmp_path / name)
        zero, universal = resume(
            4,
            [
                Resume(recipe=STAGE_3, save_dir=save_dir_of(STAGE_3), tag=TAG, load="zero"),
                Resume(recipe=STAGE_3, save_dir=tmp_path, tag="three"),
            ],
            tmp_path,
        )
        assert zero == universal
        plain = replace(STAGE_2, sp=0)
        two, three = resume(
            2, [Resume(recipe=plain, save_dir=tmp_path, tag=name) for name in ("two", "three")], tmp_path
        )
        assert three == pytest.approx(zero, abs=1e-3)
        assert two == pytest.approx({s: v for s, v in losses_of(STAGE_2).items() if s > 2}, abs=1e-2)
        assert two[3] == zero[3]
