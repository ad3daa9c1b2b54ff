"""`ckptd inspect DIR`: what a folder is, whether it is whole, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ckptd.base.humanize import size_of
from ckptd.cli.output import cell, cells

if TYPE_CHECKING:
    from rich.console import Console

    from ckptd.maintenance.inspection import ConversionForecast, InspectedCheckpoint, Inspection

_MANY_FILES = 40


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        help="Show what a folder of checkpoints or weights holds. Exit code 65: it is not whole.",
        epilog="ckptd inspect /nvme/llama-7b\nckptd inspect /nvme/llama-7b/global_step4000",
    )
    def inspect(
        folder: str = typer.Argument(
            ..., metavar="DIR", help="A tag folder, save_dir, or what convert made."
        ),
        as_json: bool = typer.Option(False, "--json", help="Everything as JSON on stdout."),
        all_files: bool = typer.Option(False, "--all-files", help="List every file of large folders."),
    ) -> None:
        import json

        from ckptd.api import inspect as inspect_place
        from ckptd.errors import DamagedError

        seen = inspect_place(folder)
        if as_json:
            print(json.dumps(seen.model_dump(mode="python"), indent=1))  # names need not be UTF-8
        else:
            _print(seen, all_files=all_files)
        if not seen.is_sound:
            raise typer.Exit(DamagedError.exit_code)


def _print(seen: Inspection, *, all_files: bool) -> None:
    from ckptd.cli.screen import Screen

    console = Screen()
    if seen.kind == "save_dir":
        _print_overview(console, seen)
        for checkpoint in seen.checkpoints:
            if not checkpoint.is_complete:
                console.print(cell(f"{checkpoint.tag}: {checkpoint.reason}"))
        return
    checkpoint = seen.checkpoints[0]
    _print_facts(console, checkpoint)
    _print_files(console, checkpoint, all_files=all_files)


def _print_overview(console: Console, seen: Inspection) -> None:
    from rich.table import Table

    table = Table("tag", "kind", "state", "step", "stage", "dtype", "ranks", "size", "", box=None)
    for c in seen.checkpoints:
        marks = [
            n
            for n, tag in (("latest", seen.latest), ("latest_universal", seen.latest_universal))
            if tag == c.tag
        ]
        kind = (c.layout or c.kind) if c.kind == "zero" else c.kind
        has_ranks = c.grid is not None and c.grid.has_shards
        ranks = f"{c.grid.dp} × {c.grid.mm_count}" if c.grid and has_ranks else ""
        stage = "" if c.zero_stage is None else str(c.zero_stage)
        step = "" if c.step is None else str(c.step)
        row = (
            c.tag,
            kind,
            c.state,
            step,
            stage,
            c.dtype or "",
            ranks,
            size_of(c.bytes),
            " ".join(marks),
        )
        table.add_row(*cells(*row))
    console.print(table)


def _print_facts(console: Console, c: InspectedCheckpoint) -> None:
    from rich.table import Table

    grid = None
    if c.grid is not None and c.grid.has_shards:
        grid = f"{c.grid.dp} data-parallel × {c.grid.mm_count} model-parallel ({c.grid.proof})"
    table = Table(show_header=False, box=None)
    for name, value in (
        ("checkpoint", c.tag),
        ("kind", c.kind),
        ("state", c.state),
        ("reason", c.reason),
        ("step", c.step),
        ("ZeRO stage", c.zero_stage),
        ("dtype", c.dtype),
        ("optimizer", c.optimizer),
        ("DeepSpeed", c.ds_version),
        ("ranks", grid),
        ("layout", c.layout),
        ("parameters", f"{c.parameters:,} elements" if c.parameters is not None else None),
        ("tensors", f"{c.tensors:,}" if c.tensors is not None else None),
        ("size", size_of(c.bytes)),
    ):
        if value is not None:
            table.add_row(name, cell(str(value)))
    for note in c.notes:
        table.add_row("note", cell(note))
    for row in _conversion_rows(c.conversion) if c.conversion is not None else ():
        table.add_row(*cells(*row))
    console.print(table)


def _conversion_rows(seen: ConversionForecast) -> list[tuple[str, str]]:
    """Return table rows on what converting would make here, or why it would not."""
    if not seen.converts:
        return [("converts", f"no: {seen.reason}"), *([("", f"→ {seen.hint}")] if seen.hint else [])]
    how = f"{size_of(seen.bytes_cloned or 0)} cloned, {size_of(seen.bytes_copied or 0)} copied"
    if seen.bytes_misplaced:
        how += f" (of these {size_of(seen.bytes_misplaced)} because shards do not meet at whole blocks)"
    return [
        ("converts", f"yes: {size_of(seen.bytes or 0)} in {seen.files or 0:,} files, {seen.layout} layout"),
        ("", f"by {how}"),
        ("", f"about {size_of(seen.disk_bytes or 0)} of new disk of {size_of(seen.free_bytes or 0)} free"),
        ("", f"at most {size_of(seen.memory_bytes or 0)} of memory with the pages it dirties"),
        *(("", note) for note in seen.notes),
    ]


def _print_files(console: Console, c: InspectedCheckpoint, *, all_files: bool) -> None:
    from rich.table import Table

    shown = (
        c.files
        if all_files or len(c.files) <= _MANY_FILES
        else [f for f in c.files if f.reason][:_MANY_FILES]
    )
    table = Table(box=None)
    for column in ("file", "role", "size", "archive", "fingerprint", "problem"):
        table.add_column(column, overflow="fold")
    for f in shown:
        row = (f.path, f.role, size_of(f.bytes), f.archive, f.fingerprint[:12], f.reason or "")
        table.add_row(*cells(*row))
    if shown:
        console.print(table)
    if len(shown) < len(c.files):
        console.print(f"{len(c.files)} files (--all-files lists them)")
