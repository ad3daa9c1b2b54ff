"""Turns the pairs of bench.interference into a part of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from bench.interference_stats import (
    Interval,
    Pair,
    Quantity,
    difference,
    left_cache,
    mean_save,
    median_cpu,
    median_step,
    p99_step,
    slowest,
)
from bench.report import machine

AIMS: tuple[tuple[str, Quantity, float], ...] = (
    ("step time, median", median_step, 1.0),
    ("step time, p99", p99_step, 2.0),
    ("save time, mean", mean_save, 2.0),
    ("data pages lost from cache", left_cache, 5.0),  # of a file that the trainer had read
)


@dataclass(frozen=True, slots=True)
class Work:
    """What ckptd did: counters at one moment, or the difference of two."""

    seconds: float
    cpu_seconds: float
    sent_bytes: int
    converted_bytes: int

    def since(self, before: Work) -> Work:
        """Between an earlier moment and this one."""
        return Work(
            self.seconds - before.seconds,
            self.cpu_seconds - before.cpu_seconds,
            self.sent_bytes - before.sent_bytes,
            self.converted_bytes - before.converted_bytes,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Highest marks of the daemon's cgroup over all segments; `is_known` is False where there was none."""

    anonymous_bytes: int = 0
    dirty_bytes: int = 0
    killed: int = 0
    is_known: bool = False

    def joined(self, anonymous_bytes: int, dirty_bytes: int, killed: int) -> Memory:
        """With one more segment."""
        return Memory(
            max(self.anonymous_bytes, anonymous_bytes),
            max(self.dirty_bytes, dirty_bytes),
            self.killed + killed,
            is_known=True,
        )


def render(
    both: Sequence[Pair],
    none: Sequence[Pair],
    memory: Memory,
    work: Sequence[Work],
    waiting_bytes: int,
    budget_bytes: int,
    cores: int,
) -> str:
    """The measured part of the page."""
    lines = [
        f"Machine: {machine()}; trainer on {cores} of the cores, ckptd on the others.",
        _scene(both, none),
        "",
        "| what | with ckptd, 95 % interval | A/A, 95 % interval | claim | aim |",
        "|---|---|---|---|---|",
    ]
    for words, quantity, aim in AIMS:
        ours, control = difference(both, quantity), difference(none, quantity)
        verdict = _verdict(ours.high <= aim or ours.high <= control.high)
        lines.append(
            f"| {words} | {_words(ours)} | {_words(control)} | at most {ours.high:+.1f} % "
            f"| ≤ {aim:g} %, or not above A/A: {verdict} |"
        )
    if all(pair.plain.cpu and pair.other.cpu for pair in (*both, *none)):
        ours, control = difference(both, median_cpu), difference(none, median_cpu)
        lines.append(
            f"| CPU time of a step, median | {_words(ours)} | {_words(control)} | | for comparison |"
        )
    if all(pair.plain.queued and pair.other.queued for pair in both):
        lines += ["", *_where(both)]
    lines += [
        "",
        *(_work(work, waiting_bytes) if work else ()),
        _memory(memory, budget_bytes),
    ]
    return "\n".join(lines) + "\n"


def _where(both: Sequence[Pair]) -> list[str]:
    """Where the time of the slowest of a hundred steps lies, beside that of all steps."""

    def ms(name: str, unit: float = 1e3) -> str:
        cells = [f"{unit * v:.1f}" for other in (False, True) for v in slowest(both, name, is_other=other)]
        return " | ".join(cells)

    stolen = [100 * fmean(each) for each in ([p.plain.stolen for p in both], [p.other.stolen for p in both])]
    return [
        "| of rank 0, all threads, each step | without ckptd: all | slowest 1 % | with: all | slowest 1 % |",
        "|---|---|---|---|---|",
        f"| step, ms | {ms('steps')} |",
        f"| on a core, ms | {ms('cpu')} |",
        f"| ready, without a core, ms | {ms('queued')} |",
        f"| waiting for a disk, ms | {ms('disk')} |",
        f"| times that a core was taken away | {ms('taken', 1.0)} |",
        f"| taken by the host, % of the cores' time | {stolen[0]:.2f} | | {stolen[1]:.2f} | |",
    ]


def _scene(both: Sequence[Pair], none: Sequence[Pair]) -> str:
    plain = [pair.plain for pair in both]
    step = median(seconds for segment in plain for seconds in segment.steps)
    save = fmean(seconds for segment in plain for seconds in segment.saves)
    return (
        f"{len(both)} A/B pairs and {len(none)} A/A pairs; a segment has {len(plain[0].steps)} steps "
        f"and {len(plain[0].saves)} saves; without ckptd a step takes {step:.3f} s, a save {save:.3f} s."
    )


def _work(work: Sequence[Work], waiting_bytes: int) -> list[str]:
    """Each figure: the median over segments, and the segment with the least."""

    def rate(amounts: list[float], form: str) -> str:
        rates = [amount / one.seconds for amount, one in zip(amounts, work, strict=True)]
        return f"{median(rates):{form}} (least {min(rates):{form}})"

    sent = rate([one.sent_bytes / 1e6 for one in work], ".0f")
    converted = rate([one.converted_bytes / 1e6 for one in work], ".0f")
    cpu = rate([one.cpu_seconds for one in work], ".2f")
    most = max(one.sent_bytes for one in work) / 1e9
    return [
        f"* ckptd during its segments, each second: {sent} MB sent, {converted} MB converted, {cpu} s of CPU",
        f"* {waiting_bytes / 1e9:.1f} GB waited beside each segment; at most {most:.1f} GB were sent in one",
    ]


def _words(one: Interval) -> str:
    return f"{one.seen:+.1f} % ({one.low:+.1f} – {one.high:+.1f})"


def _memory(memory: Memory, budget_bytes: int) -> str:
    budget = budget_bytes >> 20
    if not memory.is_known:
        return "* memory: no cgroup to measure it in here"
    return (
        f"* all processes of ckptd in a cgroup of its budget, {budget} MiB: anonymous memory at most "
        f"{memory.anonymous_bytes / 2**20:.0f} MiB, dirty pages {memory.dirty_bytes / 2**20:.0f} MiB, "
        f"killed for want of memory: {memory.killed} ({_verdict(memory.killed == 0)})"
    )


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "NOT reached"
