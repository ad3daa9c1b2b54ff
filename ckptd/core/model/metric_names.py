"""One number out of what a trainer wrote; by itself, because restricted children load it too."""

from __future__ import annotations

import math


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
