"""`ckptd status URL`: is the whole job safe, which nodes are alive? From the remote alone, from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from ckptd.maintenance.status.fleet import FleetStatus
    from ckptd.recover.select.runs import RunView


def show_url(url: str, config_dir: Path | None, *, as_json: bool) -> int:
    """Look once and print; the exit code.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd (69).
    """
    from ckptd.maintenance.status.fleet import read_fleet

    found = read_fleet(url, config_dir)
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    return found.exit_code


def _print(found: FleetStatus) -> None:
    from ckptd.cli.screen import screen
    from ckptd.cli.status.drawing import ELSEWHERE, Drawing, headline, prose

    parts: list[Any] = [headline(found.job, found.headline.partition(": ")[0], found.clauses)]
    parts += [prose(f"! {problem}", "red") for problem in found.problems]
    for row in found.uncommitted:
        nodes = ", ".join(row.nodes)
        text = f"{row.tag} (generation {row.generation}): {nodes} uploaded their parts; {row.text}"
        parts.append(prose(f"~ {text}", "yellow"))
    for run in found.runs[1:]:
        if run.checkpoints:
            parts.append(prose(f"~ {_left(run)}", "yellow"))
    if found.nodes:
        parts.append(Drawing(lambda _, width: _table(found, width)))
    if found.clock == "reader":
        parts.append(prose("ages: the store's times, by this machine's clock", "dim"))
    if found.clock == "nodes":
        parts.append(prose("ages: by the nodes' own clocks; this store keeps no times", "dim"))
    console = screen(ELSEWHERE)
    for part in parts:
        console.print(part, soft_wrap=True)


def _left(run: RunView) -> str:
    from ckptd.base.humanize import size_of
    from ckptd.core.model.runs import short

    place = f" of {run.user}@{run.host}:{run.save_dir}" if run.host else ""
    held = f"{run.checkpoints} checkpoints ({size_of(run.bytes)})"
    return (
        f"earlier run {short(run.run_id)}{place}: {held} stay until `ckptd gc JOB --run {short(run.run_id)}`"
    )


def _table(found: FleetStatus, width: int) -> list[Text]:
    """Return a line for each node, with the columns that there is room for."""
    from ckptd.base.humanize import ago
    from ckptd.cli.output import cell, cells
    from ckptd.cli.status.drawing import table

    rows = []
    for row in found.nodes:
        newest = "–" if row.newest_step is None else f"step {row.newest_step}"
        state = cell("✗ dead?", "red") if row.is_dead else cell(row.state)
        heard = "never" if row.heard_seconds_ago is None else f"{ago(row.heard_seconds_ago)} ago"
        in_safe = cell("✓" if row.is_in_safe else "", "green")
        rows.append(
            [*cells(row.node, row.ranks, newest), state, *cells(heard, row.ckptd_version or ""), in_safe]
        )
    titles = ("node", "ranks", "newest", "state", "heard of", "version", "in safe COMMIT")

    def laid_out(*left_out: str) -> list[Text]:
        shown = [n for n, title in enumerate(titles) if title not in left_out]
        return table([titles[n] for n in shown], [[row[n] for n in shown] for row in rows])

    choices = (laid_out(), laid_out("version"), laid_out("version", "ranks"))
    fitting = (lines for lines in choices if max(line.cell_len for line in lines) <= width)
    return next(fitting, choices[-1])
