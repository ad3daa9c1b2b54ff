"""`ckptd status URL`: is the whole job safe, which nodes are alive? From the remote alone, from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from ckptd.maintenance.fleet_status import FleetStatus
    from ckptd.recover.select.runs import RunView


def is_remote(job: str) -> bool:
    """Tell whether it is a URL, or the directory of a remote.

    Raises:
        RemoteUnreachable: the path does not answer.
    """
    import os

    from ckptd.base.process import must_answer

    if "://" in job:
        return True
    must_answer(job)
    return os.path.exists(os.path.join(job, "_ckptd", "remote.json"))


def show_url(url: str, config_dir: Path | None, *, as_json: bool) -> int:
    """Look once and print; the exit code.

    Raises:
        RemoteError: it does not answer, or is no remote of ckptd (69).
    """
    import os

    from ckptd.maintenance.fleet_status import FleetReader
    from ckptd.recover.select.sources import where_of

    where = where_of(url, dict(os.environ), config_dir=config_dir)
    found = FleetReader(where.read_one(where.remotes[0].name)).look()
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    return found.exit_code


def _print(found: FleetStatus) -> None:
    from ckptd.cli.output import cell
    from ckptd.cli.screen import screen

    console = screen()
    headline = cell(found.headline, {0: "green", 3: "yellow"}.get(found.exit_code, "red"))
    console.print(cell(f"{found.job}  ", "bold").append_text(headline))
    for problem in found.problems:
        console.print(cell(f"  ! {problem}", "red"))
    for row in found.uncommitted:
        nodes = ", ".join(row.nodes)
        said = f"{row.tag} (generation {row.generation}): {nodes} uploaded their parts; {row.text}"
        console.print(cell(f"  ~ {said}", "yellow"))
    for run in found.runs[1:]:
        if run.checkpoints:
            console.print(cell(f"  ~ {_left(run)}", "yellow"))
    if found.clock == "reader":
        console.print(cell("  ages: the store's times, by this machine's clock", "dim"))
    if found.clock == "nodes":
        console.print(cell("  ages: by the nodes' own clocks; this store keeps no times", "dim"))
    console.print(_table(found))


def _left(run: RunView) -> str:
    from ckptd.config.quantities import show_bytes
    from ckptd.core.model.runs import short

    place = f" of {run.user}@{run.host}:{run.save_dir}" if run.host else ""
    held = f"{run.checkpoints} checkpoints ({show_bytes(run.bytes)})"
    return (
        f"earlier run {short(run.run_id)}{place}: {held} stay until `ckptd gc JOB --run {short(run.run_id)}`"
    )


def _table(found: FleetStatus) -> Table:
    from rich.table import Table

    from ckptd.base.humanize import ago
    from ckptd.cli.output import cells

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("node", "ranks", "newest", "state", "heard of", "version", ""):
        table.add_column(column)
    for row in found.nodes:
        heard = "never" if row.heard_seconds_ago is None else f"{ago(row.heard_seconds_ago)} ago"
        texts = (
            row.node,
            row.ranks or "-",
            "-" if row.newest_step is None else f"step {row.newest_step}",
            "dead?" if row.is_dead else row.state,
            heard,
            row.ckptd_version or "-",
            "in the safe COMMIT" if row.is_in_safe else "",
        )
        table.add_row(*cells(*texts))
    return table
