"""`ckptd gc JOB`: delete what nothing depends on: interrupted deletions, replaced objects, our own
leftovers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer

from ckptd.cli.completion import complete_job, complete_tag
from ckptd.cli.output import ENV_JOB_OR_URL, JOB_HELP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ckptd.config.schema import JobConfig
    from ckptd.errors import CkptdError
    from ckptd.maintenance.gc import Collector
    from ckptd.recover.select.inventory import RemoteInventory
    from ckptd.recover.select.sources import Where

_HELP = (
    "Delete leftovers that nothing needs. Only what is provably ckptd's: deletions that were cut short, "
    "objects of replaced manifests, leftovers of killed work. Checkpoints are never garbage."
)


_HELP_RUN = "All checkpoints of this earlier run in the remotes (see `ckptd list`), nothing else."


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog="ckptd gc llama-7b --dry-run\nckptd gc llama-7b")
    def gc(
        job: str = typer.Argument(
            ..., metavar="JOB", autocompletion=complete_job, envvar=ENV_JOB_OR_URL, help=JOB_HELP
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Only list it, with bytes."),
        incomplete: str = typer.Option(
            None,
            metavar="TAG",
            autocompletion=complete_tag,
            help="Remove this incomplete, torn or damaged folder from save_dir, nothing else.",
        ),
        aside: bool = typer.Option(False, "--aside", help="Also what was moved to _ckptd/aside."),
        gone: str = typer.Option(
            None,
            metavar="NODE",
            help="That node never comes back: what it was replacing holds up nothing more.",
        ),
        run: str | None = typer.Option(None, metavar="RUN", help=_HELP_RUN),
        remote: str = typer.Option(None, metavar="NAME", help="Only this remote of the job."),
        config_dir: str = typer.Option(None, help="Where ckptd.toml and jobs.d/ lie."),
    ) -> None:
        import os
        from pathlib import Path

        from ckptd.cli.checkpoints.verify import job_of, job_state_dir
        from ckptd.cli.output import print_note
        from ckptd.errors import CkptdError
        from ckptd.maintenance.gc import Collector
        from ckptd.observe.audit import Audit
        from ckptd.recover.select.sources import where_of

        directory = Path(config_dir) if config_dir else None
        where = where_of(job, dict(os.environ), only=remote, config_dir=directory)
        needs_job = "--incomplete" if incomplete else "--aside" if aside else ""
        config = job_of(where, needs_job) if needs_job else where.job
        state_dir = job_state_dir(config, directory, make=not dry_run) if config is not None else None
        audit = Audit(state_dir / "audit.jsonl") if state_dir is not None else None
        collector = Collector(audit, print_note, dry_run=dry_run)
        code = 0
        try:
            if incomplete and config is not None:
                _incomplete(collector, config, incomplete, where, (state_dir, job, directory))
            else:
                if run is not None:
                    code = _run(collector, where, run)
                elif config is not None or not _conversion(collector, where):
                    code = _everything(collector, where, state_dir, gone)
                if aside and config is not None:
                    collector.aside(config)
        except CkptdError:
            if collector.removed:
                _show(collector, dry_run=dry_run)
            raise
        _show(collector, dry_run=dry_run)
        if code:
            raise typer.Exit(code)


def _conversion(collector: Collector, where: Where) -> bool:
    """Tell whether the URL is where a conversion was killed; what it left open is given up."""
    from ckptd.errors import RemoteError
    from ckptd.storage.child.apart import open_apart
    from ckptd.storage.stores.access import access_of

    (remote,) = where.remotes
    try:
        return collector.conversion(remote.url, open_apart(remote.name, remote.url, access_of(remote)))
    except RemoteError:
        # said by whoever looks at it as a remote
        return False


def _everything(collector: Collector, where: Where, state_dir: Path | None, gone: str | None) -> int:
    """Collect garbage in all remotes and on the node; return the exit code of what failed first."""
    from ckptd.cli.checkpoints.verify import open_remotes
    from ckptd.cli.output import print_note
    from ckptd.maintenance.repair import Unfinished
    from ckptd.storage.local.state_dir import own_state

    inventories, failures = open_remotes(where)
    if where.job is not None and own_state(state_dir, where.job.save_dir) is None and state_dir is not None:
        print_note(
            f"{state_dir} came with a copy of another save_dir: uploads of which it tells are not this node's"
        )
        state_dir = None
    good: list[RemoteInventory] = []
    unfinished = Unfinished(state_dir)

    def collect(inventory: RemoteInventory) -> None:
        if gone is not None:
            collector.gone(inventory, gone)
            return
        collector.remote(inventory, unfinished, state_dir)
        good.append(inventory)

    with unfinished.alone():
        code = _each(inventories, failures, collect)
        if where.job is not None and gone is None:
            collector.node(where.job, good, state_dir)
    return code


def _each(
    inventories: Sequence[RemoteInventory],
    failures: Mapping[str, CkptdError],
    collect: Callable[[RemoteInventory], None],
) -> int:
    """Collect in every remote that answers; the exit code of what failed first."""
    from ckptd.cli.output import print_note
    from ckptd.errors import CkptdError

    codes = [error.exit_code for error in failures.values()]
    for inventory in inventories:
        try:
            collect(inventory)
        except CkptdError as error:
            print_note(f"{inventory.name}: {error}")
            codes.append(error.exit_code)
    return codes[0] if codes else 0


def _run(collector: Collector, where: Where, run: str) -> int:
    """Remove one run from every remote; the exit code of what failed first."""
    from ckptd.cli.checkpoints.verify import open_remotes
    from ckptd.errors import RefusedError
    from ckptd.recover.select.runs import RemoteRuns, held_by

    inventories, failures = open_remotes(where)
    runs = RemoteRuns(inventories)
    run_id = runs.named(run)
    held = held_by(where.job.save_dir) if where.job is not None else None
    if where.job is not None and held is not None and runs.is_same(held, run_id):
        msg = f"{where.job.save_dir} holds {runs.words(run_id)}: its checkpoints stay"
        raise RefusedError(msg, hint="only earlier runs are removed by name; see `ckptd list`")
    return _each(inventories, failures, lambda inventory: collector.run(inventory, run_id))


def _incomplete(
    collector: Collector,
    config: JobConfig,
    tag: str,
    where: Where,
    asked: tuple[Path | None, str, Path | None],
) -> None:
    """`asked`: state directory as it is here, and what names the job: a service's lies elsewhere."""
    from ckptd.errors import CkptdError
    from ckptd.maintenance.gc import sealed_here
    from ckptd.maintenance.status.places import state_places

    state_dir, job, directory = asked
    places = {state_dir: None}
    for name in (job, config.name):
        with contextlib.suppress(CkptdError):
            places |= dict.fromkeys(state_places(name, directory))
    sealed = [save for place in places for save in sealed_here(place, tag)]
    collector.incomplete(config, tag, _pins(where, state_dir), sealed)


def _pins(where: Where, state_dir: Path | None) -> frozenset[str]:
    """Return the pinned tags, by decisions here and in every remote that answers."""
    from ckptd.cli.checkpoints.verify import open_remotes
    from ckptd.cli.output import print_note
    from ckptd.core.model.decision import PINS, pinned_tags
    from ckptd.daemon.intake.decisions import read_decisions
    from ckptd.errors import CkptdError

    decisions = read_decisions(state_dir, PINS) if state_dir is not None else []
    try:
        inventories, _ = open_remotes(where)
    except CkptdError as error:
        if state_dir is None:
            raise
        print_note(f"going by the pins that are known here: {error.message}")
        inventories = []
    seen = [s.observation for s in inventories]
    known = {(d.kind, d.tag, d.serial): d for s in seen for d in (*s.damaged_pins, *s.decisions)}
    known |= {(d.kind, d.tag, d.serial): d for d in decisions}
    return pinned_tags(sorted(known.values(), key=lambda d: d.serial))


def _show(collector: Collector, *, dry_run: bool) -> None:
    from rich.table import Table

    from ckptd.base.humanize import size_of
    from ckptd.cli.output import cells
    from ckptd.cli.screen import screen

    if not collector.removed:
        print("nothing to remove")
        return
    total = sum(row.bytes for row in collector.removed)
    title = f"{'would remove' if dry_run else 'removed'} {size_of(total)}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("where", "what", "size", "why"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in collector.removed:
        table.add_row(*cells(row.where, row.what, size_of(row.bytes), row.why))
    screen().print(table)
