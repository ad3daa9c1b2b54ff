"""How a conversion tells of itself: a bar on a terminal, JSON lines elsewhere, a forecast beforehand."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptd.convert.forecast import Forecast
    from ckptd.convert.options import ConvertProgress


@contextlib.contextmanager
def showing(*, as_json: bool) -> Iterator[Callable[[ConvertProgress], None] | None]:
    """What to tell progress to: a bar on a terminal, JSON lines on stderr where JSON is wanted, else None."""
    import sys

    if sys.stderr is not None and sys.stderr.isatty():  # None: started with it closed
        with _bar() as tell:
            yield tell
    else:
        yield _Lines().tell if as_json and sys.stderr is not None else None


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[ConvertProgress], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ckptd.cli.screen import Screen

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Screen(stderr=True), transient=True) as progress:
        task = progress.add_task("planning", total=None)

        def show(p: ConvertProgress) -> None:
            progress.update(task, description=p.phase, completed=p.bytes_done, total=p.bytes_total or None)

        yield show


class _Lines:
    """One JSON object per report: docs/contract.md names its keys."""

    def __init__(self) -> None:
        import time

        self._clock = time.monotonic
        self._started = self._clock()
        self._copying: tuple[float, int] | None = None

    def tell(self, p: ConvertProgress) -> None:
        """Print one line."""
        import json
        import sys

        line = {
            "phase": p.phase,
            "bytes_done": p.bytes_done,
            "bytes_total": p.bytes_total,
            "files_done": p.files_done,
            "files_total": p.files_total,
            "bytes_cloned": p.bytes_cloned,
            "seconds": round(self._clock() - self._started, 3),
            "eta_seconds": self._eta_seconds(p),
        }
        with contextlib.suppress(OSError):  # a reader that went away does not end the conversion
            sys.stderr.write(json.dumps(line) + "\n")
            sys.stderr.flush()

    def _eta_seconds(self, p: ConvertProgress) -> float | None:
        """From the rate since copying began, without what an earlier attempt finished; None: unknown."""
        now = self._clock()
        if p.phase == "publishing":
            return 0.0
        if p.phase != "copying":
            return None
        if self._copying is None:
            self._copying = (now, p.bytes_done)
            return None
        since, before = self._copying
        done = p.bytes_done - before
        return round((p.bytes_total - p.bytes_done) * (now - since) / done, 1) if done else None


def forecast_rows(seen: Forecast) -> list[tuple[str, str]]:
    """Names and values for a table."""
    made = f"{seen.bytes:,} bytes in {seen.files:,} files, {seen.layout} layout"
    if seen.clones:
        how = f"{seen.bytes_cloned:,} bytes cloned, {seen.bytes_copied:,} copied"
        if seen.bytes_misplaced:
            how += f" (of these {seen.bytes_misplaced:,} because shards do not meet at whole blocks)"
    else:
        how = f"{seen.bytes_copied:,} bytes copied (extents cannot be shared here)"
    fits = "" if seen.disk_bytes <= seen.free_bytes else ": DOES NOT FIT"
    return [
        (
            "converts",
            f"yes: ZeRO stage {seen.zero_stage}, {seen.ranks} ranks, {seen.parameters:,} parameters",
        ),
        ("makes", made),
        ("by", how),
        ("new disk", f"about {seen.disk_bytes:,} bytes of {seen.free_bytes:,} free{fits}"),
        ("memory", f"at most {seen.memory_bytes / 1048576:.0f} MiB with the pages it dirties"),
        ("planned in", f"{seen.seconds:.2f} s, {seen.peak_rss_bytes / 1048576:.0f} MiB"),
    ]
