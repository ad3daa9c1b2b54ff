"""From trainer_state.json to keep_best: the value of this very step, by the name in the job file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.loader import load_job
from ckptd.conversion.engine.inspect import inspect_files
from ckptd.core.completeness.sealing import best_of
from ckptd.errors import ConfigError

HISTORY: list[Any] = [
    {"step": 5, "loss": 3.0, "learning_rate": 1e-4},
    {"step": 5, "eval_loss": 2.5, "eval_accuracy": 0.25, "epoch": 1.0},
    {"step": 10, "loss": 2.0, "eval_loss": float("nan"), "eval_note": "x", "eval_on": True},
    {"step": 10, "eval_loss": 1.5, "n" * 200: 1.0},
    "no entry",
    {"step": "10", "eval_loss": 0.0},
]


def facts_of(tmp_path: Path, **state: Any) -> Any:
    text = json.dumps({"global_step": 10, "log_history": HISTORY, **state})
    (tmp_path / "trainer_state.json").write_text(text)
    return {f.path: f for f in inspect_files(tmp_path, ["trainer_state.json"])}


@pytest.mark.parametrize(
    ("metric", "value"), [("eval_loss", 1.5), ("loss", 1.5), ("accuracy", None), ("eval_note", None)]
)
def test_the_metric_is_what_was_logged_at_this_step(tmp_path: Path, metric: str, value: float | None) -> None:
    """Finite numbers alone, the last of each name; other steps say nothing of this checkpoint."""
    facts = facts_of(tmp_path, best_metric=1.5, best_model_checkpoint="/out/checkpoint-10/")
    best = best_of("checkpoint-10", facts, metric)
    assert (best and best.value) == value
    assert best is None or best.is_best
    assert best is None or best.metric == metric


def test_a_short_name_finds_the_evaluation(tmp_path: Path) -> None:
    """As metric_for_best_model does: "accuracy" means eval_accuracy."""
    facts = facts_of(tmp_path, global_step=5)
    best = best_of("checkpoint-5", facts, "accuracy")
    assert best is not None
    assert (best.value, best.is_best) == (0.25, False)


@pytest.mark.parametrize(("is_evaluated", "value"), [(True, None), (False, 2.0)])
def test_a_training_loss_is_not_compared_with_an_evaluation(
    tmp_path: Path, is_evaluated: bool, value: float | None
) -> None:
    """A step that was saved and not evaluated has no value, unless nothing is ever evaluated."""
    history = [{"step": 5, "eval_loss": 2.5}] if is_evaluated else []
    facts = facts_of(tmp_path, log_history=[*history, {"step": 10, "loss": 2.0}])
    best = best_of("checkpoint-10", facts, "loss")
    assert (best and best.value) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, 10**400, "1"])
def test_a_best_value_that_is_no_number_is_none(tmp_path: Path, value: object) -> None:
    """A run that diverged logs NaN: JSON has none, and the journal must read back what it wrote."""
    facts = facts_of(tmp_path, best_metric=value, best_model_checkpoint="/out/checkpoint-10")
    assert best_of("checkpoint-10", facts) is None


def test_without_a_name_only_the_best_so_far_has_a_value(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, best_metric=1.5, best_model_checkpoint="/out/checkpoint-10")
    best = best_of("checkpoint-10", facts)
    assert best is not None
    assert best.value == 1.5
    assert best_of("checkpoint-15", facts) is None


@pytest.mark.parametrize(
    ("lines", "higher"),
    [
        ('metric = "eval_loss"', False),
        ('metric = "eval_accuracy"', True),
        ('metric = "eval_perplexity"\nmetric_mode = "min"', False),
        ('metric = "eval_loss"\nmetric_mode = "max"', True),
    ],
)
def test_which_way_is_better(tmp_path: Path, lines: str, higher: bool) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'save_dir = "{tmp_path}/run"\n{lines}\n[[remote]]\nname = "nas"\nurl = "/mnt/nas/x"\nkeep_best = 2\n'
    )
    assert load_job(job).is_higher_better is higher


def test_keep_best_without_a_metric_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    text = (
        f'save_dir = "{tmp_path}/run"\n[local]\nkeep_best = 2\n[[remote]]\nname = "nas"\nurl = "/mnt/nas/x"'
    )
    job.write_text(text)
    with pytest.raises(ConfigError, match='metric = "eval_loss"'):
        load_job(job)
