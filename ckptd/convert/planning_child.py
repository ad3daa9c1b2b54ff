"""`python -m ckptd.convert.planning_child`: reads a save's pickles and prints a plan (P14).

Request on stdin: {"folder", "files": [[path, role, d, mm]], "folders": [...], "compat", "block", "strict"}.
The plan goes to stdout; a refusal goes to stderr as one JSON line {"error", "message", "hint"}. It opens
no file for writing, has no network and no environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ckptd import files
from ckptd.convert.plan import Header, PlanWriter, SourceFile
from ckptd.convert.sandbox import peak_rss_bytes, restrict
from ckptd.convert.universal import UniversalLayout, choose_layout, refuse_unread
from ckptd.errors import CkptdError, RefusedError, StorageError
from ckptd.torchfile.skeleton import BLOCK_BYTES
from ckptd.zero.shards import Source
from ckptd.zero.survey import Surveyor

MEMORY_BYTES = 4 << 30
CPU_SECONDS_PER_FILE = 3
PLAN_BYTES = 16 << 30


def main() -> int:
    """Serve one request; exit status 0 = the plan is complete."""
    request = json.loads(sys.stdin.buffer.read())
    seconds = 120 + CPU_SECONDS_PER_FILE * len(request["files"])
    restrict(memory_bytes=MEMORY_BYTES, cpu_seconds=seconds, file_bytes=PLAN_BYTES)
    try:
        _plan(request)
        sys.stderr.write(json.dumps({"peak_rss_bytes": peak_rss_bytes()}) + "\n")
    except CkptdError as error:
        return _refuse(error)
    except OSError as error:
        return _refuse(StorageError(f"reading {request['folder']}: {error.strerror or error}"))
    except (MemoryError, RecursionError):
        return _refuse(RefusedError("planning needs more memory than it may have"))
    return 0


def _plan(request: dict[str, Any]) -> None:
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
        notes=save.experts.notes(),
    )
    writer = PlanWriter(sys.stdout.buffer, header, (r.identity for r in save.reads))
    for output in layout.outputs():
        writer.add(output)
    writer.finish()


def _refuse(error: CkptdError) -> int:
    line = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    sys.stderr.write(json.dumps(line) + "\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
