"""Convert from one end to another, each a folder of this machine or a URL.

What speaks to remotes is imported only where an end is one: a conversion of local folders starts sooner.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.process import must_answer
from ckptd.conversion.engine.staging import list_source
from ckptd.conversion.engine.supervisor import convert, forecast
from ckptd.core.model.layouts import TORCH_FILES
from ckptd.core.model.other_layouts import TORCH_FILE
from ckptd.errors import NotFoundError, RefusedError
from ckptd.storage.local.scan import read_pointer, scan_folder
from ckptd.storage.stores.open import directory_path, directory_remote, within_remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptd.conversion.engine.supervisor import Forecast
    from ckptd.conversion.options import ConvertOptions, ConvertProgress, ConvertReport


def ends_of(source: str, destination: str) -> tuple[Path | str, Path | str]:
    """Return the checkpoint folder and the folder to make, each here or a URL.

    Raises:
        NotFoundError: there is no checkpoint in `source`.
        RefusedError: `destination` lies in a directory remote, whose daemons keep what is there.
    """
    here, there = end_of(source), end_of(destination)
    if isinstance(there, Path) and (root := directory_remote(there)) is not None:
        raise within_remote(str(there), root)
    return here if isinstance(here, str) else resolve_source(here), there


def end_of(text: str) -> Path | str:
    """Return a path of this machine, or the URL of a place elsewhere."""
    path = directory_path(text)
    if "://" in text and path is None:
        return text
    must_answer(str(path or text))
    return path or Path(text)


def resolve_source(source: Path) -> Path:
    """Return the checkpoint folder that SRC means: itself, or what `latest` in it names.

    Raises:
        NotFoundError: neither. RefusedError: it is a checkpoint without ZeRO shards.
    """
    if source.is_file():
        _refuse_other_layout(source)
    folder = list_source(source)
    if folder.shards or "offloaded_tensors" in folder.folders:
        return source
    with files.opened_dir(folder.path) as fd:
        tag = read_pointer(fd, "latest")
    if tag is None:
        _refuse_other_layout(source)
        named = [name for name in folder.folders if not name.startswith(("_ckptd", "."))]
        there = ", ".join(named[:5]) or "global_step500, checkpoint-500"
        hint = f"name a checkpoint folder: {there}"
        raise NotFoundError(f"{source} holds no shards and no `latest`", hint=hint)
    files.check_relative(tag)
    return source / tag


def _refuse_other_layout(source: Path) -> None:
    """Refuse a checkpoint of which no other form is made, by the name of its layout."""
    parent, name = os.path.split(os.path.realpath(source))
    if not name or not os.path.exists(source):
        return
    with files.opened_dir(parent) as fd:
        listing = scan_folder(fd, name)
    other = listing.other_layout if listing is not None else None
    if other is None or (other is TORCH_FILE and not name.endswith(TORCH_FILES)):
        return
    load = other.opened_by.replace("PATH", repr(str(source)))
    hint = f"load it in its trainer, {load}, and save from there what you need"
    raise RefusedError(f"{source} is {other.words}: other forms are made of ZeRO shards alone", hint=hint)


def forecast_ends(source: Path | str, destination: Path | str, options: ConvertOptions) -> Forecast:
    """Return the forecast of a conversion without doing it."""
    if isinstance(source, str) or isinstance(destination, str):
        from ckptd.conversion.remote.convert import RemoteConversion

        return RemoteConversion(source, destination, options, os.environ).forecast()
    return forecast(source, destination, options)


def convert_ends(
    source: Path | str,
    destination: Path | str,
    options: ConvertOptions,
    *,
    on_progress: Callable[[ConvertProgress], None] | None,
    should_stop: Callable[[], bool],
) -> ConvertReport:
    """Convert; blocks until the result is published."""
    if isinstance(source, str) or isinstance(destination, str):
        from ckptd.conversion.remote.convert import RemoteConversion

        conversion = RemoteConversion(
            source, destination, options, os.environ, on_progress=on_progress, should_stop=should_stop
        )
        return conversion.run()
    return convert(source, destination, options, on_progress=on_progress, should_stop=should_stop)
