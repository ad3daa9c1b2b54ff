"""What the planning child is asked, from a folder and options: for converting and for forecasts alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.convert.companions import Origin, look_around
from ckptd.convert.rounding import numpy_folder
from ckptd.errors import UsageError

if TYPE_CHECKING:
    from ckptd.convert.options import ConvertOptions
    from ckptd.convert.workplace import SourceFolder


def numpy_for(options: ConvertOptions) -> str:
    """Where the executor imports numpy from; empty when nothing is rounded.

    Raises:
        UsageError: an unknown form; numpy is needed and not installed.
    """
    if options.form not in ("universal", "weights"):
        raise UsageError(f"there is no form {options.form!r} to convert to", hint="universal and weights are")
    return numpy_folder() if options.form == "weights" and options.dtype != "fp32" else ""


def origin_of(folder: SourceFolder, options: ConvertOptions) -> Origin:
    """The folder that paths of the plan are relative to."""
    return look_around(folder) if options.form == "weights" else Origin(folder.path, "", ())


def plan_request(
    folder: SourceFolder, origin: Origin, options: ConvertOptions, *, block: bool, dry: bool = False
) -> dict[str, Any]:
    """The request of `ckptd.convert.planning_child`."""
    return {
        "root": origin.root,
        "prefix": origin.prefix,
        "files": [[n, s.role.value, s.shard.d, s.shard.mm] for n, s in folder.shards],
        "folders": list(folder.folders),
        "companions": list(origin.companions),
        "form": options.form,
        "dtype": options.dtype,
        "max_shard_bytes": options.max_shard_bytes,
        "compat": options.compat,
        "block": block,
        "strict": options.strict,
        "dry": dry,
        "partial": folder.partial,
    }
