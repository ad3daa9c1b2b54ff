"""Turns the runs of bench.transfer into a part of docs/performance.md and docs/transfer.png."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.pictures import LINK_MEGABYTES, replace_part
from bench.report import machine
from bench.transfer_runs import PART_BYTES

if TYPE_CHECKING:
    from bench.transfer import Series

HEAD = (
    "| case | tool | wall s | MB/s | CPU s per GB | peak RSS MiB | requests |",
    "|---|---|---|---|---|---|---|",
)
Found = dict[tuple[str, str], "Series"]
NEAR, FAR, DOWN = "up, null server", "up, link, 4 GB", "down, null server, 4 GB"
BACK, FILES = "down, link, 4 GB", "up, link, small files"
MIXED, DISK = "up, link, 4 GB and small files", "directory"


def render(series: list[Series]) -> str:
    """The measured part of the page."""
    load = os.getloadavg()
    lines = [
        f"Machine: {machine()}; load {load[2]:.1f} over the last quarter of an hour.",
        "",
        *HEAD,
        *(_row(one) for one in series),
        "",
        *(f"* {words}" for words in verdicts({(s.case, s.tool): s for s in series if s.samples})),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Series) -> str:
    head = f"| {one.case} | {one.tool} "
    if not one.samples:
        words = (one.failed or ["not run"])[-1].strip().splitlines()
        return f"{head}| {words[-1][:80] if words else 'failed'} | – | – | – | – |"
    low, high = one.spread("wall_seconds")
    cpu = one.median("cpu_seconds") / (one.bytes / 1e9)
    wall = f"{one.median('wall_seconds'):.2f} ({low:.2f} – {high:.2f})"
    rate, cpu_words = f"{one.megabytes_per_second:.0f}", f"{cpu:.2f}"
    if one.case == "memory":
        # from the start of the daemon, which waits for the save to settle
        rate = cpu_words = "–"
    requests = f"{one.median('requests'):.0f}" if one.median("requests") else "–"
    peak = one.spread("peak_rss_bytes")[1] / 2**20
    return f"{head}| {wall} | {rate} | {cpu_words} | {peak:.0f} | {requests} |"


def verdicts(found: Found) -> list[str]:
    """Each aim with the figure that was reached; aims whose runs are not there are left out."""
    said = []
    for words, figure, is_reached in AIMS:
        try:
            value = figure(found)
        except KeyError:
            continue
        said.append(f"{words}: {value:.3g} ({'reached' if is_reached(value) else 'NOT reached'})")
    return said


def _faster(case: str, other: str, ours: str = "ckptd") -> Callable[[Found], float]:
    return lambda found: found[case, other].median("wall_seconds") / found[case, ours].median("wall_seconds")


def _of_link(case: str) -> Callable[[Found], float]:
    return lambda found: found[case, "ckptd"].megabytes_per_second / LINK_MEGABYTES


def _cpu(case: str, tool: str) -> Callable[[Found], float]:
    return lambda found: found[case, tool].median("cpu_seconds") / (found[case, tool].bytes / 1e9)


def _peak(tool: str) -> Callable[[Found], float]:
    return lambda found: found["memory", tool].spread("peak_rss_bytes")[1] / 2**20


def _parts_again(found: Found) -> float:
    one = found["up, link, killed", "ckptd, killed"]
    return (one.spread("sent_bytes")[1] - one.bytes) / PART_BYTES


def _commit_after(found: Found) -> float:
    afters = [
        sample.commit_after_seconds
        for (case, tool), one in found.items()
        for sample in one.samples
        if tool == "ckptd" and case.startswith("up") and sample.commit_after_seconds is not None
    ]
    if not afters:
        raise KeyError
    return max(afters)


def _cached(found: Found) -> float:
    tools = ("ckptd, no proof", "ckptd, read back")
    return max(found[DISK, tool].spread("cached_bytes")[1] for tool in tools) / 2**20


def _least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


AIMS: tuple[tuple[str, Callable[[Found], float], Callable[[float], bool]], ...] = (
    ("upload, at least 0.95 × boto3", _faster(NEAR, "boto3"), _least(0.95)),
    ("upload, at least 1.0 × s3fs", _faster(NEAR, "s3fs"), _least(1.0)),
    ("upload, at least 0.95 of the link", _of_link(FAR), _least(0.95)),
    ("CPU s per GB with CRC64NVME, at most 0.8", _cpu("up, null server, 4 GB", "ckptd"), _most(0.8)),
    (
        "CPU s per GB where the server knows MD5 alone, at most 2.4",
        _cpu("up, null server, other proofs", "ckptd, MD5"),
        _most(2.4),
    ),
    ("daemon and its children, 1 GB, at most 128 MiB", _peak("daemon, 1 GB"), _most(128)),
    ("daemon and its children, 4 GB, at most 128 MiB", _peak("daemon, 4 GB"), _most(128)),
    ("daemon and its children, 3,000 files, at most 128 MiB", _peak("daemon, 3,000 files"), _most(128)),
    (
        "daemon and its children, 4 GB with two forms made on the way, at most 128 MiB",
        _peak("daemon, 4 GB, made on the way"),
        _most(128),
    ),
    ("restore, at least 1.0 × boto3", _faster(DOWN, "boto3"), _least(1.0)),
    ("restore, at least 1.0 × s3fs", _faster(DOWN, "s3fs"), _least(1.0)),
    ("restore, at least 0.6 × s5cmd", _faster(DOWN, "s5cmd"), _least(0.6)),
    ("restore, at least 0.95 of the link", _of_link(BACK), _least(0.95)),
    ("small files over the link, at least 2 × aws s3 sync", _faster(FILES, "aws"), _least(2)),
    ("4 GB and 3,000 files, at least 0.95 of the link", _of_link(MIXED), _least(0.95)),
    ("sent again after SIGKILL, parts of 16 MiB, at most 4", _parts_again, _most(4)),
    ("COMMIT after the last byte, s, at most 2", _commit_after, _most(2)),
    (
        "directory, write pass, at least 1.0 × cp and sync",
        _faster(DISK, "cp and sync", "ckptd, no proof"),
        _least(1.0),
    ),
    (
        "directory, written and read back, at least 0.5 × cp and sync",
        _faster(DISK, "cp and sync", "ckptd, read back"),
        _least(0.5),
    ),
    ("directory, MiB in the page cache that were not there before, 0", _cached, _most(0)),
)


def write(series: list[Series]) -> None:
    """Replace the measured part of the page and draw it."""
    text = render(series)
    print(text)
    replace_part(text, "transfer")
