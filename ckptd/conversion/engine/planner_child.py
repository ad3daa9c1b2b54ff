"""`python -m ckptd.conversion.engine.planner_child`: reads a save's pickles and prints a plan (P14).

Request on stdin: see `ckptd.conversion.engine.supervisor`; shards lie in `root`/`prefix`.
The plan goes to stdout (nowhere when `dry`), what it comes to goes to stderr as one JSON line; a
refusal goes there too: {"error", "message", "hint"}. It opens no file for writing, has no network and no
environment.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from ckptd.base import files
from ckptd.base.extents import identity_of
from ckptd.base.files import opened_real
from ckptd.conversion import dcp
from ckptd.conversion.engine.executor import Tally
from ckptd.conversion.engine.sandbox import fail, peak_rss_bytes, restrict
from ckptd.conversion.from_dcp import Sharded, UniversalFromDcp, items_of
from ckptd.conversion.plan import ARCHIVES, Header, OutputFile, PlanWriter, SourceFile
from ckptd.conversion.universal import UniversalLayout, choose_layout, refuse_unread
from ckptd.conversion.weights import COMPANION, LAYOUT, WeightsLayout, companion_files
from ckptd.errors import CkptdError, RefusedError, from_os_error
from ckptd.formats.torchfile.fingerprint import fingerprint
from ckptd.formats.torchfile.sharded import METADATA, read_metadata
from ckptd.formats.torchfile.skeleton import BLOCK_BYTES, MirrorFd
from ckptd.formats.zero import round_robin
from ckptd.formats.zero.facts import as_dict
from ckptd.formats.zero.proof import Proof
from ckptd.formats.zero.save import Read, notes
from ckptd.formats.zero.shards import SourceShard
from ckptd.formats.zero.survey import SAFE, Surveyor
from ckptd.formats.zero.universal_save import UniversalReader, is_universal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptd.conversion.plan import Output
    from ckptd.formats.zero.save import Save
    from ckptd.formats.zero.survey import Opening

MEMORY_BYTES = 4 << 30
CPU_SECONDS_PER_FILE = 3
PLAN_BYTES = 16 << 30


def main() -> int:
    """Serve one request; exit status 0 = the plan is complete."""
    request = json.loads(sys.stdin.buffer.read())
    seconds = 120 + CPU_SECONDS_PER_FILE * len(request["files"])
    restrict(memory_bytes=MEMORY_BYTES, cpu_seconds=seconds, file_bytes=PLAN_BYTES)
    try:
        words = _plan(request, Nowhere() if request.get("dry") else sys.stdout.buffer)
        sys.stderr.write(json.dumps({**words, "peak_rss_bytes": peak_rss_bytes()}) + "\n")
    except CkptdError as error:
        return fail(error)
    except OSError as error:
        return fail(from_os_error(error, f"planning the conversion of {request['root']}"))
    except (MemoryError, RecursionError):
        return fail(RefusedError("planning needs more memory than it may have"))
    except Exception as error:  # noqa: BLE001 - whatever a hostile value leads to, it is a refusal
        kind = type(error).__name__
        return fail(RefusedError(f"the metadata of this save cannot be read ({kind})", hint=SAFE))
    return 0


class Nowhere(io.BytesIO):
    """Swallows a plan that is only counted."""

    def write(self, data: Any, /) -> int:
        """Keep nothing."""
        return len(memoryview(data))


def _plan(request: dict[str, Any], out: IO[bytes]) -> dict[str, Any]:
    """Write the plan; returns what it comes to."""
    sources = [SourceShard(0, path, role, d, mm) for path, role, d, mm in request["files"]]
    of_mirror = MirrorFd if request["partial"] else int
    prefix, form = request["prefix"], request["form"]
    with opened_real(request["root"]) as dir_fd:

        @contextmanager
        def opening(path: str) -> Iterator[int]:
            with files.reading(dir_fd, prefix + path) as fd:
                yield of_mirror(fd)

        if form == ARCHIVES:
            return _list_archives(opening, out)
        if any(source.role == "extra" for source in sources):
            return _from_dcp(request, Sharded(opening, [source.path for source in sources]), out)
        save = _read(request, opening, sources)
        paths = [prefix + read.path for read in save.reads] + request["companions"]
        save.reads.extend(_companion(dir_fd, name) for name in request["companions"])
    header = Header(
        form="universal",
        layout=choose_layout(request["compat"], save.ds_version),
        block_bytes=BLOCK_BYTES if request["block"] else 0,
        stage=save.stage,
        dp=save.dp,
        ds_version=save.ds_version,
        step=save.global_steps if save.global_steps is not None else save.optimizer_step,
        parameters=len(save.trained_shapes),
        sources=tuple(
            SourceFile(path, r.size_bytes, r.fingerprint) for path, r in zip(paths, save.reads, strict=True)
        ),
    )
    unread = "read from a URL, which is told by checksums alone" if request["partial"] else ""
    proof = save.prove = Proof(
        save, _why_no_copy(request, save), unread, is_wanted=request["compare_masters"]
    )
    header, outputs = {"universal": _universal, "weights": _weights, "dcp": _dcp}[form](request, save, header)
    return _written(out, header, save.reads, outputs, proof.finish)


def _why_no_copy(request: dict[str, Any], save: Save) -> str:
    """Return why the model's weights are no copies of a save's masters; empty: they are."""
    if not request["compare_masters"]:
        return "not asked for (--no-strict, or compare_masters = false)"
    config = as_dict(save.rank0_model.root.get("ds_config"))
    if as_dict(config.get("zero_optimization")).get("zenflow") is not None:
        return "ZenFlow changes the weights between steps of their masters"
    quantization = as_dict(as_dict(config.get("compression_training")).get("weight_quantization"))
    if as_dict(quantization.get("shared_parameters")).get("enabled"):
        return "the weights are quantized after each step (compression_training)"
    if as_dict(config.get("hybrid_engine")).get("enabled"):
        return "the hybrid engine adds LoRA to the weights and takes it off again"
    if request["form"] == "universal" and request["compat"] == "strict" and round_robin.is_shuffled(save):
        return "parameters are under each other's names, as the stock converter writes it"
    return ""


def _read(request: dict[str, Any], opening: Opening, sources: list[SourceShard]) -> Save:
    """Read a folder of shards; for dcp, a universal one as well."""
    form = request["form"]
    if form == "dcp" and request["partial"] and "zero" in request["folders"]:
        raise RefusedError(
            "a universal form at a URL is not converted to dcp",
            hint="name the ZeRO folder there, or copy the universal form to this machine and convert that",
        )
    if form == "dcp" and is_universal(sources):
        return UniversalReader(opening, sources).read()
    return Surveyor(
        opening,
        sources,
        request["folders"],
        contents=form != "universal",
        masters_only=form == "weights",
        layers=form != "universal" or not request["partial"],
    ).survey()


def _written(
    out: IO[bytes],
    header: Header,
    reads: list[Read],
    outputs: Iterable[Output],
    uncompared: Callable[[], tuple[str, ...]],
) -> dict[str, Any]:
    """Write header and outputs; returns what they come to."""
    writer = PlanWriter(out, header, (r.identity for r in reads))
    tally = Tally()
    for output in outputs:
        writer.add(output)
        if isinstance(output, OutputFile):
            tally.add(output)
    words = {name: getattr(header, name) for name in ("layout", "stage", "dp", "step", "parameters", "notes")}
    return words | asdict(tally) | asdict(writer.finish(uncompared()))


def _universal(request: dict[str, Any], save: Save, header: Header) -> tuple[Header, Iterator[Output]]:
    if request["compat"] == "auto":
        refuse_unread(save)
    if request["compat"] != "strict":
        round_robin.restore_addresses(save)
    layout = UniversalLayout(save, header.layout, block=request["block"], strict=request["strict"])
    said = notes(save) + save.experts.notes()
    if round_robin.is_shuffled(save):
        said += (round_robin.NOTE if request["compat"] != "strict" else round_robin.STRICT_NOTE,)
    return replace(header, notes=said), layout.outputs()


def _weights(request: dict[str, Any], save: Save, header: Header) -> tuple[Header, Iterator[Output]]:
    limit, strict = request["max_shard_bytes"], request["strict"]
    layout = WeightsLayout(
        save, request["dtype"], max_shard_bytes=limit, block=request["block"], strict=strict
    )
    header = replace(
        header,
        form=f"weights-{request['dtype']}",
        layout=LAYOUT,
        parameters=layout.tensor_count,
        notes=layout.notes(),
    )
    return header, chain(layout.outputs(), companion_files(save.reads, layout.folders))


def _dcp(request: dict[str, Any], save: Save, header: Header) -> tuple[Header, Iterator[Output]]:
    layout = dcp.DcpLayout(save, max_shard_bytes=request["max_shard_bytes"], block=request["block"])
    return replace(header, form="dcp", layout=dcp.LAYOUT, notes=layout.notes()), layout.outputs()


def _from_dcp(request: dict[str, Any], held: Sharded, out: IO[bytes]) -> dict[str, Any]:
    """Plan the universal form of a folder of torch.distributed.checkpoint."""
    if request["form"] == "dcp":
        raise RefusedError(
            "this is a folder of torch.distributed.checkpoint already",
            hint="it loads on any number of ranks; leave out --form for DeepSpeed's universal form",
        )
    if request["form"] != "universal" or request["compat"] == "strict":
        raise RefusedError(
            "a folder of torch.distributed.checkpoint is converted to the universal form alone, as superset",
            hint="leave out --form and --compat; torch.distributed.checkpoint.format_utils.dcp_to_torch_save "
            "makes one file of weights",
        )
    layout = UniversalFromDcp(held, block=request["block"])
    header = Header(
        form="universal",
        layout="superset",
        block_bytes=BLOCK_BYTES if request["block"] else 0,
        stage=0,
        dp=len(held.numbers),
        ds_version="",
        step=layout.step,
        parameters=layout.parameter_count,
        sources=tuple(SourceFile(r.path, r.size_bytes, r.fingerprint) for r in held.reads),
        notes=layout.notes(),
    )
    return _written(out, header, held.reads, layout.outputs(), lambda: ("the folder holds each weight once",))


def _list_archives(opening: Opening, out: IO[bytes]) -> dict[str, Any]:
    """Write a line [file, offset, bytes] for each archive that a `.metadata` names."""
    with opening(METADATA) as fd:
        entries = read_metadata(os.pread(fd, os.fstat(fd).st_size, 0), METADATA)
    found = sorted({(i.path, i.offset, i.nbytes) for entry in entries.values() for i in items_of(entry)})
    for row in found:
        out.write(json.dumps(row).encode() + b"\n")
    out.flush()
    return {"archives": len(found)}


def _companion(dir_fd: int, name: str) -> Read:
    """Return a small file of the trainer's folder that weights take along."""
    with files.reading(dir_fd, name) as fd:
        status = os.fstat(fd)
        return Read(name, COMPANION, status.st_size, identity_of(status), fingerprint(fd, None))


if __name__ == "__main__":
    sys.exit(main())
