"""Live progress of a quickstart: one line per event, and on a terminal a table that moves.

What the table shows of a checkpoint comes from status.json and from names in the remote, so it shows what
any user of the machine could see.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from examples.demo.launch import Training
    from examples.demo.scene import Scene

REFRESH_SECONDS = 0.25


class Progress:
    """Context manager; `say` events, `update` in every wait."""

    def __init__(self, scene: Scene, console: Console) -> None:
        self._scene, self._console = scene, console
        self._begin = self._last = time.monotonic()
        self._training: Training | None = None
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """An event, with the seconds since the beginning."""
        self._console.print(Text.assemble((f"{time.monotonic() - self._begin:6.1f} s", "dim"), f"  {text}"))

    def follow(self, training: Training) -> None:
        """Show this run's step and loss."""
        self._training = training

    def update(self) -> None:
        """Redraw, four times a second at most."""
        now = time.monotonic()
        if self._live is None or now - self._last < REFRESH_SECONDS:
            return
        self._last = now
        self._live.update(Group(self._table(), self._line()), refresh=True)

    def _line(self) -> Text:
        steps = self._training.lines("step") if self._training is not None else []
        if self._training is None or not steps:
            return Text("starting …", style="dim")
        last = steps[-1]
        return Text(f"{self._training.run}: step {last['step']}, loss {last['loss']:.4f}")

    def _table(self) -> Table:
        table = Table()
        for column in ("checkpoint", "state", "upload", "committed", "universal", "kept because"):
            table.add_column(column)
        committed, universal = self._scene.committed_tags(), self._scene.committed_tags("universal")
        known = {c["tag"]: c for c in self._scene.status().get("checkpoints", [])}
        local = set(self._scene.local_tags())
        for tag in sorted(committed | set(known) | local, key=_step):
            row = known.get(tag, {})
            table.add_row(
                tag,
                str(row.get("state", "")) if tag in local else "not here",
                _upload(row),
                "yes" if tag in committed else "",
                self._scene.remote.where if tag in universal else "",
                ", ".join(map(str, row.get("keep", []))),
            )
        return table


def _step(tag: str) -> int:
    digits = tag.removeprefix("global_step")
    return int(digits) if digits.isdigit() else -1


def _upload(row: dict[str, Any]) -> str:
    for forms in row.get("remotes", {}).values():
        zero = forms.get("zero", {})
        if zero.get("bytes_total") and zero.get("bytes_done") is not None:
            return f"{100 * zero['bytes_done'] // zero['bytes_total']} %"
    return ""
