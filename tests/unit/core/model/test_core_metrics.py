"""A trainer's metrics file: the shapes that are taken, cut anywhere, full of nonsense, rewound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.model.metrics import LARGEST_DOCUMENT_BYTES, parse_metrics, value_of

ROWS: list[dict[str, Any]] = [
    {"step": 100, "loss": 3.0},
    {"step": 100, "eval_loss": 2.5, "epoch": 1},
    {"step": 200, "eval_loss": 1.5},
]


def lines(rows: list[Any]) -> bytes:
    """One row a line."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize(
    "data",
    [
        lines(ROWS),
        lines(ROWS).rstrip(),
        json.dumps(ROWS, indent=1).encode(),
        json.dumps({"log_history": ROWS, "best_metric": 1.5}).encode(),
        json.dumps({"100": {"eval_loss": 2.5}, "200": {"eval_loss": 1.5, "epoch": 2}}).encode(),
        json.dumps({"100": 2.5, "200": 1.5}).encode(),
        lines([{"global_step": 100, "eval_loss": 2.5}, {"_step": 200, "eval_loss": 1.5}]),
        lines(
            ["nonsense", 5, None, *ROWS, {"step": "300", "eval_loss": 0.5}, {"step": True, "eval_loss": 0.1}]
        ),
        lines(ROWS) + b'{"step": 300, "eval_lo',
        b"\xff\xfe garbage\n" + lines(ROWS),
        lines(ROWS) + b"[" * 60_000 + b"\n",
        lines(ROWS) + b'{"step": 300, "eval_loss": ' + b"9" * 70_000 + b"}\n",
        lines(ROWS) + b'{"step": 300, "eval_loss": 1e999}\n{"step": 300, "eval_loss": NaN}\n',
    ],
)
def test_every_shape_says_the_same(data: bytes) -> None:
    """Rows, a list, trainer_state.json, values by step; what is cut, too long or no number is left out."""
    assert parse_metrics(data, "eval_loss") == {100: (2.5,), 200: (1.5,)}


@pytest.mark.parametrize(
    "data",
    [
        lines(ROWS),
        lines([{"step": 100, "loss": 3.0, "eval_loss": 2.5}, {"step": 200, "eval_loss": 1.5}]),
        json.dumps({"100": {"eval_loss": 2.5, "loss": 3.0}, "200": {"eval_loss": 1.5}}).encode(),
        lines([*ROWS, {"step": 300, "loss": 0.1}]),
    ],
)
def test_a_short_name_means_the_evaluation_where_there_is_one(data: bytes) -> None:
    """As metric_for_best_model does; what the training lost at another step is not compared with it."""
    assert parse_metrics(data, "loss") == {100: (2.5,), 200: (1.5,)}


def test_a_short_name_is_itself_where_nothing_was_evaluated() -> None:
    assert parse_metrics(lines([{"step": 5, "loss": 0.25}]), "loss") == {5: (0.25,)}
    assert parse_metrics(b'{"5": {"loss": 0.25}, "6": 0.5}', "loss") == {5: (0.25,), 6: (0.5,)}


def test_what_is_no_metrics_file() -> None:
    """Nothing at all is an empty file; anything else is said."""
    assert parse_metrics(b"", "loss") == {}
    assert parse_metrics(b"step,loss\n100,2.5\n", "loss") is None
    assert parse_metrics(b'{"step": 1, ' + b" " * LARGEST_DOCUMENT_BYTES + b'"loss": 1}', "loss") is None


def test_the_end_of_a_long_file() -> None:
    """Its first line is half a line, even where that half is JSON of its own."""
    data = b'{"step": 1, "loss": 9.0}\n' + lines([{"step": 2, "loss": 1.0}])
    assert parse_metrics(data, "loss", is_tail=True) == {2: (1.0,)}


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(data: bytes) -> None:
    found = parse_metrics(data, "loss")
    assert found is None or all(values for values in found.values())


def test_a_rewound_run_takes_no_value_of_the_branch_it_left() -> None:
    """Step 100 was saved before with 2.5; until it is written again the second save has none."""
    before = parse_metrics(lines(ROWS), "eval_loss")
    assert before is not None
    first = value_of(before, 100, earlier_saves=0)
    assert first is not None
    assert first == 2.5
    assert value_of(before, 100, earlier_saves=1) is None
    after = parse_metrics(lines([*ROWS, {"step": 100, "eval_loss": 0.5}]), "eval_loss")
    assert after is not None
    again = value_of(after, 100, earlier_saves=1)
    assert again is not None
    assert again == 0.5
    assert value_of(before, 300, earlier_saves=0) is None
