"""`python -m bench.transfer`: moving checkpoints, side by side with other tools; writes docs/performance.md.

Against a null S3 server, over a link of 1 Gb/s and 20 ms, to a directory, through a server that keeps what it
gets, and under a real daemon (memory). Tools of a case run in turn, `--rounds` times. `--tiny` tries the
benchmark itself and writes nothing; `--only WORDS` runs the cases whose name has them, `--tool WORDS` the
tools whose name begins so (what is not the whole case is printed and not written).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median

from bench import native, saves, transfer_report
from bench import transfer_runs as runs
from bench.saves import CACHE, Save
from bench.transfer_runs import Sample, Way

LINK_BITS, LINK_SECONDS = 1e9, 0.02
OWN = ("ckptd", "cp", "daemon")
"""How the names of rows begin that need nothing beside this repository."""
MADE = ("zero", "universal", "weights-bf16")
"""Two of these lie nowhere: they are made of the shards while they are sent."""
LARGE = ("daemon, 4 GB", "daemon, 4 GB, made on the way")
SAME_WHEN_TINY = ("up, null server, 4 GB",)
RAW = CACHE / "runs.json"


@dataclass(slots=True)
class Series:
    """All runs of one tool in one case; `failed` says why one has no time."""

    case: str
    tool: str
    bytes: int
    files: int
    samples: list[Sample] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Median of a field of the samples."""
        return float(median(getattr(sample, what) for sample in self.samples))

    def spread(self, what: str) -> tuple[float, float]:
        """Least and greatest."""
        values = [getattr(sample, what) for sample in self.samples]
        return min(values), max(values)

    @property
    def megabytes_per_second(self) -> float:
        """At the median time."""
        return self.bytes / 1e6 / self.median("wall_seconds")


@dataclass(frozen=True, slots=True)
class Case:
    """Tools that move the same save the same way; `prepare` runs once before them."""

    name: str
    save: Save
    tools: Mapping[str, Callable[[], Sample]]
    rounds: int
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The saves of a series: two that are big, many small files, both together, one with its own names."""

    one: Save
    four: Save
    small: Save
    mixed: Save
    many: Save
    """A ZeRO save whose universal form has as many files as `small`."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Null servers that know CRC64NVME, nothing, or MD5 alone, and the first one at the end of the link."""

    near: Way
    plain: Way
    older: Way
    far: Way


def sizes(*, is_tiny: bool) -> Sizes:
    """Made where they are not there."""
    if is_tiny:
        one = saves.shards("tiny", 1, 2, hidden=512)
        small, many = saves.small("tiny-files", 12), saves.shards("tiny-many", 1, 2, hidden=64)
        return Sizes(one, one, small, saves.small("tiny-mixed", 12, one), many)
    four = saves.shards("4GB", 22, 4)
    return Sizes(
        one=saves.shards("1GB", 5, 2),
        four=four,
        small=saves.small("3000-files", 3000),
        mixed=saves.small("4GB-and-3000-files", 3000, four),
        many=saves.shards("small-tensors", 83, 2, hidden=64),
    )


def cases(it: Sizes, ways: Ways, rounds: int) -> list[Case]:
    """Everything that is measured, in the order of the page."""
    near, far = ways.near, ways.far

    def ups(save: Save, way: Way, tools: str) -> dict[str, Callable[[], Sample]]:
        return {tool: partial(runs.up, tool, save, way) for tool in tools.split()}

    def downs(save: Save, way: Way, tools: str) -> dict[str, Callable[[], Sample]]:
        return {tool: partial(runs.down, tool, save, way) for tool in tools.split()}

    def case(
        name: str,
        save: Save,
        tools: Mapping[str, Callable[[], Sample]],
        times: int,
        before: Way | None = None,
    ) -> Case:
        # what is brought back was sent by ckptd
        prepare = partial(runs.up, "ckptd", save, replace(before, endpoint=near.endpoint)) if before else None
        return Case(name, save, tools, times, prepare)

    proofs = {
        "ckptd, MD5": partial(runs.up, "ckptd, MD5", it.one, ways.older),
        "ckptd, read back": partial(runs.up, "ckptd, read back", it.one, ways.plain),
        "ckptd, no proof": partial(runs.up, "ckptd, no proof", it.one, ways.plain, verify="none"),
    }
    killed = {"ckptd, killed": partial(_killed, it.one, far)}
    disk = {
        "cp and sync": partial(runs.directory, "cp", it.one),
        "ckptd, no proof": partial(runs.directory, "ckptd", it.one),
        "ckptd, read back": partial(runs.directory, "ckptd", it.one, verify="read-back"),
    }
    daemons = {
        "daemon, 1 GB": partial(runs.under_daemon, it.one, near, ("zero",)),
        "daemon, 4 GB": partial(runs.under_daemon, it.four, near, ("zero",)),
        "daemon, 3,000 files": partial(runs.under_daemon, it.many, near, ("zero", "universal")),
        "daemon, 4 GB, made on the way": partial(runs.under_daemon, it.four, near, MADE),
    }
    few, once = max(1, rounds - 1), max(1, rounds - 2)
    return [
        case("up, null server", it.one, ups(it.one, near, "ckptd boto3 s3fs awscrt s5cmd rclone"), rounds),
        case("up, null server, 4 GB", it.four, ups(it.four, near, "ckptd boto3 awscrt"), few),
        case("up, null server, other proofs", it.one, proofs, few),
        case("up, null server, small files", it.small, ups(it.small, near, "ckptd s5cmd aws"), few),
        case("down, null server, 4 GB", it.four, downs(it.four, near, "ckptd boto3 s3fs s5cmd"), few, near),
        case("up, link, 4 GB", it.four, ups(it.four, far, "ckptd boto3"), once),
        case("down, link, 4 GB", it.four, downs(it.four, far, "ckptd boto3"), once, far),
        case("up, link, small files", it.small, ups(it.small, far, "ckptd s5cmd aws"), few),
        case("up, link, 4 GB and small files", it.mixed, ups(it.mixed, far, "ckptd"), once),
        case("up, link, killed", it.one, killed, few),
        case("directory", it.one, disk, rounds),
        case("rclone serve s3 and back", it.one, {"ckptd": partial(runs.there_and_back, it.one)}, 1),
        case("memory", it.one, daemons, 1),
    ]


def _killed(save: Save, far: Way) -> Sample:
    """The remote's child gets SIGKILL at a random time and goes on."""
    seconds = 8 * save.bytes / LINK_BITS
    return runs.up("ckptd", save, far, kill_after=random.uniform(0.15, 0.9) * seconds)


def own(case: Case) -> Case:
    """The same without other projects' tools."""
    tools = {t: once for t, once in case.tools.items() if t.startswith(OWN) and t not in LARGE}
    return replace(case, tools=tools)


def chosen(case: Case, words: str) -> Case:
    """Its tools whose name begins so."""
    return replace(case, tools={tool: once for tool, once in case.tools.items() if tool.startswith(words)})


def run(case: Case) -> list[Series]:
    """Its tools in turn, each from another place in the row."""
    save, found = case.save, {}
    for tool in case.tools:
        found[tool] = Series(case.name, tool, save.bytes, len(save.files))
        if not tool.startswith(OWN) and runs.program(tool) is None:
            found[tool].failed.append("not installed")
    if case.prepare is not None:
        case.prepare()
    for number in range(case.rounds):
        tools = list(case.tools)
        for tool in tools[number % len(tools) :] + tools[: number % len(tools)]:
            if found[tool].failed:
                continue
            try:
                sample = case.tools[tool]()
            except (RuntimeError, ValueError, OSError) as error:
                found[tool].failed.append(str(error)[-2000:])
                print(f"{case.name}: {tool}: {error}", flush=True)
                continue
            found[tool].samples.append(sample)
            rate = save.bytes / 1e6 / sample.wall_seconds
            print(f"{case.name}: {tool}: {sample.wall_seconds:.2f} s, {rate:.0f} MB/s", flush=True)
    return list(found.values())


@contextlib.contextmanager
def ways() -> Iterator[Ways]:
    """The servers and the link, running."""
    with (
        native.null_server(CACHE) as server,
        native.null_server(CACHE, "plain") as plain,
        native.null_server(CACHE, "md5") as older,
        native.link(server.port, bits_per_second=LINK_BITS, round_trip_seconds=LINK_SECONDS) as url,
    ):
        yield Ways(
            near=Way(server, server.endpoint),
            plain=Way(plain, plain.endpoint),
            older=Way(older, older.endpoint),
            far=Way(server, url),
        )


def main() -> None:
    """Run the cases, keep the raw runs, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--tool", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--from-raw", action="store_true", help="write the page from the last raw runs")
    given = parser.parse_args()
    if given.from_raw:
        transfer_report.write(load())
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    started, found = time.monotonic(), list[Series]()
    it = sizes(is_tiny=given.tiny)
    with ways() as running:
        every = cases(it, running, 1 if given.tiny else given.rounds)
        for case in every:
            if given.only in case.name and not (given.tiny and case.name in SAME_WHEN_TINY):
                found += run(chosen(own(case) if given.tiny else case, given.tool))
    if not given.tool:
        _keep(found, is_part=bool(given.only), is_tiny=given.tiny)
    print(f"{time.monotonic() - started:.0f} s")
    if given.tool:
        print(transfer_report.render([series for series in found if series.samples]))
    elif given.tiny:
        print(transfer_report.render(found))
        failed = [f"{s.case}: {s.tool}: {s.failed}" for s in found if s.failed]
        if failed:
            raise SystemExit("\n".join(failed))
    else:
        _write([case.name for case in every])


def _write(cases: list[str]) -> None:
    """The page, in this order of its cases; printed alone where one of them was never measured here."""
    series = sorted(load(), key=lambda one: cases.index(one.case))
    if left := [name for name in cases if name not in {one.case for one in series}]:
        print(transfer_report.render(series))
        print(f"docs/performance.md is left as it is: not measured here: {', '.join(left)}")
    else:
        transfer_report.write(series)


def _keep(found: list[Series], *, is_part: bool, is_tiny: bool) -> None:
    """The raw runs; a part replaces those of its cases alone."""
    raw = RAW.with_name("tiny.json") if is_tiny else RAW
    cases_here = {series.case for series in found}
    before = [series for series in load() if series.case not in cases_here] if is_part and not is_tiny else []
    kept = [asdict(series) for series in before + found]
    raw.write_text(json.dumps({"load": os.getloadavg(), "series": kept}, indent=1))


def load() -> list[Series]:
    """The raw runs of the last time."""
    if not RAW.exists():
        return []
    read = json.loads(RAW.read_text())["series"]
    return [Series(**{**one, "samples": [Sample(**sample) for sample in one["samples"]]}) for one in read]


if __name__ == "__main__":
    main()
