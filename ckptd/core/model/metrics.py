"""Read metrics that a trainer wrote: one number, or a file of metrics by step (`metrics_file`).

They let keep_best rank checkpoints of plain DeepSpeed, which records no metric of its own. The file may be
cut anywhere and hold anything: lines without a value are skipped. Restricted children load this too.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def finite(value: object) -> float | None:
    """A number that can be compared and written as JSON; a run that diverged writes NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def logged_name(metric: str) -> str:
    """Return the logged name of a metric's short name, as Hugging Face's `metric_for_best_model` does."""
    return f"eval_{metric}"


LONGEST_LINE_BYTES = 64 << 10
LARGEST_DOCUMENT_BYTES = 1 << 20
"""One that is parsed whole costs a multiple of its size (P12)."""
_STEP_NAMES = ("step", "global_step", "_step")

Values = dict[int, tuple[float, ...]]
"""Step → what was written for it, in order: a run that was rewound writes a step again."""


def parse_metrics(data: bytes, metric: str, *, is_tail: bool = False) -> Values | None:
    """Values of `metric` by step; None where the bytes have none of the accepted shapes.

    `is_tail`: the beginning of the file is missing, so the first line may be half a line.
    """
    if not is_tail and len(data) <= LARGEST_DOCUMENT_BYTES:
        whole = _loaded(data)
        if isinstance(whole, dict | list):
            return _collected(_rows(whole, metric), metric)
    lines = data.split(b"\n")[is_tail:]
    rows = [
        row for line in lines if len(line) <= LONGEST_LINE_BYTES and isinstance(row := _loaded(line), dict)
    ]
    return _collected(rows, metric) if rows or not data.strip() else None


def value_of(values: Values, step: int, *, earlier_saves: int) -> float | None:
    """The value of a save; `earlier_saves`: how often its step was saved before (a run that was rewound).

    What was written for those is theirs: a step written no oftener than it was saved has no value yet.
    """
    written = values.get(step, ())
    return written[-1] if len(written) > earlier_saves else None


def _loaded(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _rows(whole: dict[str, object] | list[object], metric: str) -> Iterator[dict[str, object]]:
    """A list of rows, a row alone, {"log_history": rows}, or {step: value} and {step: {name: value}}."""
    if isinstance(whole, dict) and isinstance(history := whole.get("log_history"), list):
        whole = history
    if isinstance(whole, list):
        yield from (row for row in whole if isinstance(row, dict))
    elif _step_of(whole) is not None:
        yield whole
    else:
        for key, value in whole.items():
            if key.isascii() and key.isdigit() and len(key) < 20:
                yield {**(value if isinstance(value, dict) else {metric: value}), "step": int(key)}


def _collected(rows: Iterable[dict[str, object]], metric: str) -> Values:
    """Collect a metric by step; values of evaluations, where there are any, replace those of training.

    A training loss is not comparable with an evaluation loss.
    """
    named: dict[int, list[float]] = {}
    evaluated: dict[int, list[float]] = {}
    for row in rows:
        step = _step_of(row)
        for found, name in ((named, metric), (evaluated, logged_name(metric))):
            value = finite(row.get(name))
            if step is not None and value is not None:
                found.setdefault(step, []).append(value)
    return {step: tuple(values) for step, values in (evaluated or named).items()}


def _step_of(row: dict[str, object]) -> int | None:
    step = next((row[name] for name in _STEP_NAMES if name in row), None)
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
