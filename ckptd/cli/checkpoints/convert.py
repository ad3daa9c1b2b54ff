"""`ckptd convert SRC DST`: a ZeRO checkpoint as universal, as weights or for FSDP2 (docs/design.md §4)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypedDict, cast

import typer

from ckptd.base.humanize import size_of
from ckptd.cli.completion import complete_form
from ckptd.cli.output import cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.conversion.cluster.pool import Address
    from ckptd.conversion.engine.supervisor import Forecast
    from ckptd.conversion.options import Compat, ConvertOptions, ConvertProgress, ConvertReport, Dtype, Form


_HELP = (
    "Convert a checkpoint to universal, weights or dcp. The universal form loads on any number of GPUs; "
    "weights are safetensors; dcp is for FSDP2, and becomes universal again."
)
_EXAMPLES = """\
ckptd convert /nvme/llama-7b/global_step4000 ./llama-7b-universal
ckptd convert /nvme/llama-7b ./weights --form weights-bf16
ckptd convert /nvme/llama-7b ./step-4000 --form dcp"""
_NO_STRICT_HELP = "Allow unused patterns, and masters other than the weights."


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(help=_HELP, epilog=_EXAMPLES)
    def convert(
        source: str = typer.Argument(
            ..., metavar="SRC", help="A tag folder, or a save_dir with `latest`; a path or a URL."
        ),
        destination: str = typer.Argument(
            ..., metavar="DST", help="Folder to make; must not exist; a path or a URL."
        ),
        form: str = typer.Option(
            "universal",
            autocompletion=complete_form,
            help="universal, weights-fp32, weights-bf16, weights-fp16 (safetensors), dcp.",
        ),
        dtype: str = typer.Option("", hidden=True),
        max_shard_size: str = typer.Option(
            "", "--max-shard-size", "--max_shard_size", help="Of weights and dcp: largest file (default 5GB)."
        ),
        compat: str = typer.Option(
            "auto", help="strict: as ds_to_universal writes; superset: loads in stages 1, 2 and 3; auto."
        ),
        memory_budget: str = typer.Option(
            "512MiB", "--memory-budget", "--memory_budget", metavar="SIZE", help="Memory it may take."
        ),
        verify: bool = typer.Option(False, help="Check the source's CRCs, and the output against the plan."),
        no_strict: bool = typer.Option(False, "--no-strict", "--no_strict", help=_NO_STRICT_HELP),
        inject_missing_state: bool = typer.Option(  # noqa: ARG001  accepted, and needless
            False,
            "--inject-missing-state",
            "--inject_missing_state",
            help="Accepted because ds_to_universal has it. One tensor-parallel rank needs no "
            "universal_checkpoint_info; several are not joined without it.",
        ),
        cluster: str = typer.Option(
            "", metavar="ADDRESS", help="Dask workers: tcp://HOST:PORT, local:N, slurm[:N]."
        ),
        dry_run: bool = typer.Option(
            False, "--dry-run", help="Only plan, and say what converting would make and cost."
        ),
        as_json: bool = typer.Option(
            False, "--json", help="Result as JSON on stdout; progress as JSON lines on stderr."
        ),
    ) -> None:
        from dataclasses import replace

        from ckptd.conversion.remote.ends import ends_of, forecast_ends

        options = replace(
            _options(compat, memory_budget, verify, not no_strict),
            **_form(form, dtype, max_shard_size, compat),
        )
        address = _address(cluster)
        if dry_run:
            seen = forecast_ends(*ends_of(source, destination), options)
            _print_json(seen) if as_json else _print_rows(forecast_rows(seen))
            return
        report = run(source, destination, options, as_json=as_json, address=address)
        _print_json(report) if as_json else _print_rows(_report_rows(report))


class FormOptions(TypedDict):
    """Hold the options that say what is made."""

    form: Form
    dtype: Dtype
    max_shard_bytes: int


def _form(form: str, dtype: str, max_shard_size: str, compat: str) -> FormOptions:
    from ckptd.conversion.options import parse_form
    from ckptd.errors import UsageError

    kind, element = parse_form(form, dtype)
    for option, value, of in (
        ("--max-shard-size", max_shard_size, ("weights", "dcp")),
        ("--compat", compat.removeprefix("auto"), ("universal",)),
    ):
        if value and kind not in of:
            other = "weights-fp32" if "weights" in of else "universal"
            raise UsageError(f"{option} is of the form {of[0]}", hint=f"leave it out, or say --form {other}")
    max_shard_size = max_shard_size or "5GB"
    size = _size("--max-shard-size", max_shard_size, "5GB")
    if size < 1:
        raise UsageError(f"--max-shard-size {max_shard_size} is too small", hint="for example 5GB")
    return FormOptions(form=kind, dtype=element, max_shard_bytes=size)


def _size(option: str, text: str, example: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from ckptd.errors import UsageError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"{option} {text!r} is no size", hint=f"for example {example}") from error


def _options(compat: str, budget: str, verify: bool, strict: bool) -> ConvertOptions:
    from ckptd.conversion.options import ConvertOptions
    from ckptd.errors import UsageError

    if compat not in ("auto", "strict", "superset"):
        raise UsageError(f"--compat {compat!r} is none of auto, strict, superset")
    size = _size("--memory-budget", budget, "512MiB")
    if size < 64 << 20:
        raise UsageError(f"--memory-budget {budget} is too small", hint="at least 64MiB")
    return ConvertOptions(
        compat=cast("Compat", compat),
        memory_budget_bytes=size,
        verify=verify,
        strict=strict,
        compare_masters=strict,
        write_latest=True,
    )


def _address(cluster: str) -> Address | None:
    if not cluster:
        return None
    from ckptd.conversion.cluster.pool import parse

    return parse(cluster)


def run(
    source: str, destination: str, options: ConvertOptions, *, as_json: bool, address: Address | None = None
) -> ConvertReport:
    """Convert and show progress; SIGTERM and Ctrl-C stop cleanly and leave it resumable."""
    import importlib
    import threading

    from ckptd.api import converted
    from ckptd.base.process import calling_on_stop_signals

    if not as_json:  # what the report is printed with is loaded meanwhile, or afterwards
        with contextlib.suppress(RuntimeError):  # no thread is to be had
            threading.Thread(target=importlib.import_module, args=("rich.table",)).start()
    stop = threading.Event()
    with calling_on_stop_signals(stop.set), showing(as_json=as_json) as tell:
        return converted(
            source, destination, options, address=address, on_progress=tell, should_stop=stop.is_set
        )


def _print_json(report: ConvertReport | Forecast) -> None:
    import json
    from dataclasses import asdict
    from pathlib import Path

    plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(report).items()}
    print(json.dumps(plain, indent=1))


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    from rich.table import Table

    from ckptd.cli.screen import Screen

    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(name, cell(value))
    Screen().print(table)


def _report_rows(report: ConvertReport) -> list[tuple[str, str]]:
    rate = report.bytes / max(report.seconds, 1e-9)
    how = f"{size_of(report.bytes_cloned)} cloned, {size_of(report.bytes_copied)} copied"
    before = f" ({report.resumed_files} from before)" if report.resumed_files else ""
    return [
        (report.form.replace("universal", "universal checkpoint"), str(report.destination)),
        ("layout", report.layout),
        ("step", str(report.step)),
        ("tensors" if report.form.startswith("weights") else "parameters", str(report.parameters)),
        ("files", f"{report.files}{before}"),
        ("size", f"{size_of(report.bytes)} ({how})"),
        ("time", f"{report.seconds:.2f} s ({size_of(rate)}/s)"),
        ("peak memory of children", size_of(report.peak_rss_bytes)),
        ("verified", "yes" if report.verified else "no (--verify reads everything back)"),
        *_cluster_rows(report),
        (
            "masters are the weights",
            f"in {report.compared_tensors} tensors, {report.compared_elements:,} elements",
        ),
        *(("not compared", reason) for reason in report.not_compared),
        *(("note", note) for note in report.notes),
    ]


def _cluster_rows(report: ConvertReport) -> list[tuple[str, str]]:
    seen = report.cluster
    if seen is None:
        return []
    share = seen.bytes_read / max(1, seen.bytes_needed)
    local = f"; {size_of(seen.bytes_local)} on the workers' own disks" if seen.bytes_local else ""
    again = f", {seen.tasks_again} again" if seen.tasks_again else ""
    return [
        ("by", f"{seen.workers} workers, {seen.tasks} tasks{again}"),
        ("read", f"{size_of(seen.bytes_read)}, {share:.3f} of what was needed{local}"),
    ]


# ---------------------------------------------------------------------------------------------------------
# How a conversion tells of itself: a bar on a terminal, JSON lines elsewhere, a forecast beforehand.


@contextlib.contextmanager
def showing(*, as_json: bool) -> Iterator[Callable[[ConvertProgress], None] | None]:
    """Yield the progress callback: a bar on a terminal, JSON lines on stderr where JSON is wanted, else
    None.
    """
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
    """Write one JSON object per report; docs/contract.md names its keys."""

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
        """Compute it from the rate since copying began, leaving out an earlier attempt; None: unknown."""
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


def _source_of(seen: Forecast) -> str:
    """Return what is converted: a ZeRO save, or parts of torch.distributed.checkpoint."""
    if seen.zero_stage:
        return f"ZeRO stage {seen.zero_stage}, {seen.ranks} ranks"
    return f"torch.distributed.checkpoint, {seen.ranks} parts"


def forecast_rows(seen: Forecast) -> list[tuple[str, str]]:
    """Return the forecast's names and values for a table."""
    made = f"{size_of(seen.bytes)} in {seen.files:,} files, {seen.layout} layout"
    if seen.clones:
        how = f"{size_of(seen.bytes_cloned)} cloned, {size_of(seen.bytes_copied)} copied"
        if seen.bytes_misplaced:
            how += f" (of these {size_of(seen.bytes_misplaced)} because shards do not meet at whole blocks)"
    else:
        how = f"{size_of(seen.bytes_copied)} copied (extents cannot be shared here)"
    fits = "" if seen.disk_bytes <= seen.free_bytes else ": DOES NOT FIT"
    return [
        (
            "converts",
            f"yes: {_source_of(seen)}, {seen.parameters:,} parameters",
        ),
        ("makes", made),
        ("by", how),
        ("new disk", f"about {size_of(seen.disk_bytes)} of {size_of(seen.free_bytes)} free{fits}"),
        ("memory", f"at most {size_of(seen.memory_bytes)} with the pages it dirties"),
        ("planned in", f"{seen.seconds:.2f} s, {size_of(seen.peak_rss_bytes)}"),
    ]
