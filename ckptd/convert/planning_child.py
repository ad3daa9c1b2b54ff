"""`python -m ckptd.convert.planning_child`: reads a save's pickles and prints a plan (P14).

Request on stdin: {"folder", "files": [[path, role, d, mm]], "folders": [...], "compat", "block", "strict",
"dry"}. The plan goes to stdout (nowhere when `dry`), what it comes to goes to stderr as one JSON line; a
refusal goes there too: {"error", "message", "hint"}. It opens no file for writing, has no network and no
environment.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from typing import IO, Any

from ckptd import files
from ckptd.convert.cloning import Tally
from ckptd.convert.plan import Header, OutputFile, PlanWriter, SourceFile
from ckptd.convert.sandbox import peak_rss_bytes, restrict
from ckptd.convert.universal import UniversalLayout, choose_layout, refuse_unread
from ckptd.errors import CkptdError, RefusedError, StorageError
from ckptd.torchfile.skeleton import BLOCK_BYTES
from ckptd.zero.optimizers import notes
from ckptd.zero.shards import Source
from ckptd.zero.survey import SAFE, Surveyor

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
        return _refuse(error)
    except OSError as error:
        return _refuse(StorageError(f"reading {request['folder']}: {error.strerror or error}"))
    except (MemoryError, RecursionError):
        return _refuse(RefusedError("planning needs more memory than it may have"))
    except Exception as error:  # noqa: BLE001 - whatever a hostile value leads to, it is a refusal
        kind = type(error).__name__
        return _refuse(RefusedError(f"the metadata of this save cannot be read ({kind})", hint=SAFE))
    return 0


class Nowhere(io.BytesIO):
    """Swallows a plan that is only counted."""

    def write(self, data: Any, /) -> int:
        """Keep nothing."""
        return len(memoryview(data))


def _plan(request: dict[str, Any], out: IO[bytes]) -> dict[str, Any]:
    """Write the plan; returns what it comes to."""
    with files.opened_dir(request["folder"]) as dir_fd:
        sources = [Source(0, path, role, d, mm) for path, role, d, mm in request["files"]]
        save = Surveyor(lambda path: files.reading(dir_fd, path), sources, request["folders"]).survey()
    layout_name = choose_layout(request["compat"], save.ds_version)
    if request["compat"] == "auto":
        refuse_unread(save)
    layout = UniversalLayout(save, layout_name, block=request["block"], strict=request["strict"])
    header = Header(
        form="universal",
        layout=layout_name,
        block_bytes=BLOCK_BYTES if request["block"] else 0,
        stage=save.stage,
        dp=save.dp,
        ds_version=save.ds_version,
        step=save.global_steps if save.global_steps is not None else save.optimizer_step,
        parameters=save.parameter_count,
        sources=tuple(SourceFile(r.path, r.size_bytes, r.fingerprint) for r in save.reads),
        notes=notes(save) + save.experts.notes(),
    )
    writer = PlanWriter(out, header, (r.identity for r in save.reads))
    tally = Tally()
    for output in layout.outputs():
        writer.add(output)
        if isinstance(output, OutputFile):
            tally.add(output)
    words = {name: getattr(header, name) for name in ("layout", "stage", "dp", "step", "parameters")}
    return words | asdict(tally) | asdict(writer.finish())


def _refuse(error: CkptdError) -> int:
    line = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    sys.stderr.write(json.dumps(line) + "\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
