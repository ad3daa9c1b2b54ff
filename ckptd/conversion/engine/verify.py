"""Proof on request: the source's own CRCs before, the output against the plan after (docs/design.md §4).

Cloning reads no byte and copying trusts the kernel; `--verify` and the daemon's rule that a cloned
conversion is named only after its source passed its CRCs both come here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptd.base import extents, files
from ckptd.conversion.plan import Header, OutputFile, PlanReader
from ckptd.conversion.reader import Readable, blocks_of
from ckptd.core.model.swap_paths import is_state
from ckptd.errors import VerifyError
from ckptd.formats.torchfile.archive import Directory, Framing, frame, read_directory
from ckptd.formats.torchfile.fingerprint import check_crcs, fingerprint, raw_fingerprint
from ckptd.formats.torchfile.sharded import METADATA, SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def verify_sources(header: Header, sources: Sequence[int], check_stop: Callable[[], None]) -> None:
    """Compare every record of every source with its CRC32, and its fingerprint with the plan's.

    Raises:
        DamagedError: a bit flipped since `torch.save`.
    """
    for source, fd in zip(header.sources, sources, strict=True):
        check_stop()
        verify_source(source.path, source.fingerprint, fd)


def verify_source(path: str, planned: str, fd: int) -> None:
    """Compare every record of one source with its CRC32, and its fingerprint with the planned one.

    Raises:
        DamagedError: a bit flipped since `torch.save`.
    """
    if is_state(path) or path == METADATA or path.endswith(SUFFIX):  # files without a directory of their own
        if raw_fingerprint(fd) != planned:
            raise VerifyError(f"{path} is not the file that was planned")
        return
    directory: Directory | None = None
    archive = path.endswith(".pt")  # weights take configuration along
    if archive and frame(fd, expected=True) is not Framing.LEGACY:  # which has no CRCs, and no directory
        directory = read_directory(fd, path)
        check_crcs(fd, directory, path)
    if fingerprint(fd, directory) != planned:
        raise VerifyError(f"{path} is not the file that was planned")


def verify_outputs(plan: PlanReader, sources: Readable, out_fd: int, check_stop: Callable[[], None]) -> None:
    """Read every output back from disk and compare it with what the plan says.

    Raises:
        VerifyError: a byte differs.
    """
    for output in plan:
        check_stop()
        if not isinstance(output, OutputFile):
            continue
        with files.reading(out_fd, output.path) as fd:
            extents.drop_pages(fd)
            size = os.fstat(fd).st_size
            if size != output.nbytes:
                raise VerifyError(f"{output.path} holds {size} bytes instead of {output.nbytes}")
            at = 0
            for part in output.parts:
                for expected in blocks_of(part, sources):
                    if os.pread(fd, len(expected), at) != expected:
                        raise VerifyError(f"{output.path} differs from its source near byte {at}")
                    at += len(expected)
            extents.drop_pages(fd)
