"""`python -m bench.pictures`: draws the pictures of docs/performance.md from the tables of that page.

The tables are the record of what was measured: a benchmark writes its table and calls `draw`, and a picture
can be drawn again years after the raw data is gone. Every title is the finding, in figures of the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "performance.md"
CKPTD, OTHER, SECOND = "#1f6fb2", "#9aa0a6", "#d9822b"
"""Colours: ckptd, what it is compared with, a second quantity of ckptd."""
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "figure.constrained_layout.h_pad": 0.08,
}
WIDTH_INCHES = 7.0
"""At 200 dots per inch 1,400 pixels: sharp at the 700 that a page gives it."""
LINK_MEGABYTES = 125.0
"""Per second, of the 1 Gb/s link of bench.transfer."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one cell; `low` and `high` are equal to `value` where the cell gives no range."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    headings: tuple[str, ...]
    cells: tuple[str, ...]

    def text(self, heading: str) -> str:
        """Return the cell below a heading, without the marks of code.

        Raises:
            ValueError: the table has no such heading.
        """
        return self.cells[self.headings.index(heading)].replace("`", "")

    def measured(self, heading: str) -> Measured:
        """Return the figures of a cell: `43.75 (41.54 – 53.33)`, `+1.0 % (-1.1 – +3.1)`, `1,024`.

        Raises:
            ValueError: there is no such heading, or no figure below it.
        """
        text = self.text(heading)
        found = [float(one.replace(",", "")) for one in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", text)]
        if not found:
            raise ValueError(f"{heading}: no figure in {text!r}")
        low, high = (found[1], found[2]) if "(" in text else (found[0], found[0])
        return Measured(found[0], low, high)

    def value(self, heading: str) -> float:
        """Return the first figure of a cell.

        Raises:
            ValueError: there is no such heading, or no figure below it.
        """
        return self.measured(heading).value


def tables(part: str) -> list[list[Row]]:
    """Read the tables between the marks of a part of the page, each without its headings.

    Raises:
        ValueError: the page has no such part.
    """
    text = PAGE.read_text()
    begin, end = marks(part)
    found: list[list[Row]] = []
    headings: tuple[str, ...] = ()
    for line in text[text.index(begin) : text.index(end)].splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if not line.startswith("|"):
            headings = ()
        elif not headings:
            headings = cells
            found.append([])
        elif not set(line) <= set("|-"):
            found[-1].append(Row(headings, cells))
    return found


def marks(part: str) -> tuple[str, str]:
    """Return the lines of the page between which a part stands.

    Raises:
        ValueError: the page has no such part.
    """
    both = (f"<!-- {part}: begin -->", f"<!-- {part}: end -->")
    if not all(mark in PAGE.read_text() for mark in both):
        raise ValueError(f"{PAGE} has no {both[0]} … {both[1]}")
    return both


def _summary(found: list[list[Row]]) -> Any:
    """Every limit of the page as a point, by section: how many times better than it, 1 at the limit."""
    (rows,) = found
    marked = [(re.sub(r"\[(.+)\]\(.*\)", r"\1", row.text("section")), row) for row in rows]
    sections = list(dict.fromkeys(section for section, _ in marked))
    is_reached = [row.cells[-1] == "✓" for row in rows]
    title = f"{sum(is_reached)} of {len(rows)} limits are reached"
    made, (axis,) = _panels(title, 0.8 + 0.3 * len(sections), columns=1)
    for at, section in enumerate(reversed(sections)):
        here = [(row, ok) for (name, row), ok in zip(marked, is_reached, strict=True) if name == section]
        for row, ok in here:
            if row.text("times better than the limit") != "–":
                times = row.value("times better than the limit")
                axis.plot(times, at, "o", color=CKPTD if ok else SECOND, alpha=0.7)
        share = f"{sum(ok for _, ok in here)} of {len(here)}"
        axis.text(1.02, at, share, transform=axis.get_yaxis_transform(), va="center")
    axis.axvline(1.0, color=OTHER, linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(sections)), list(reversed(sections)))
    axis.set_xlabel("times better than the limit (orange: not reached)")
    return made


def replace_part(text: str, part: str) -> None:
    """Replace what stands between the marks of a part of the page, and draw the part's picture.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = marks(part)
    head, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{head}{begin}\n{text.rstrip()}\n{end}{rest.partition(end)[2]}")
    print(f"wrote {PAGE}")
    if part in PICTURES:
        print(f"wrote {draw(part)}")


def draw(part: str, folder: Path = DOCS) -> Path:
    """Draw the picture of a part of the page into `folder`, under the part's name."""
    path = folder / f"{part}.png"
    made = figure(part)
    made.savefig(path)
    _pyplot().close(made)
    return path


def figure(part: str) -> Any:
    """Return the matplotlib figure of a part of the page."""
    with _pyplot().rc_context(STYLE):
        return PICTURES[part](tables(part))


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def _panels(title: str, height_inches: float, rows: int = 1, columns: int = 2) -> tuple[Any, list[Any]]:
    size = (WIDTH_INCHES, height_inches)
    made, axes = _pyplot().subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    made.suptitle(title)
    return made, list(axes.flat)


def _conversion(found: list[list[Row]]) -> Any:
    """Seconds of a conversion by ckptd, `cp -r` and DeepSpeed's tool, from a cold and from a warm cache."""
    tools = {"ckptd convert": CKPTD, "cp -r": OTHER, "ds_to_universal, 4 workers": SECOND}
    first = {row.text("tool"): row.value("wall s") for row in found[0] if row.text("cache") == "cold"}
    ours, copy, stock = (first[tool] for tool in tools)
    title = (
        f"ckptd converts 4.47 GB from a cold disk in {ours:.2f} s;\n"
        f"cp -r takes {copy:.2f} s, ds_to_universal {stock:.2f} s"
    )
    made, axes = _panels(title, 3.4)
    stages = (("ZeRO-2, 4.47 GB, 2 ranks", found[0]), ("ZeRO-3, 3.83 GB, 4 ranks", found[1]))
    for axis, (name, rows) in zip(axes, stages, strict=True):
        for place, cache in enumerate(("cold", "warm")):
            taken = {row.text("tool"): row.measured("wall s") for row in rows if row.text("cache") == cache}
            for at, (tool, colour) in enumerate(tools.items()):
                label = tool if place == 0 else None
                _bar(axis, 4 * place + at, taken[tool], colour, f"{taken[tool].value:.2f}", label=label)
        axis.set_xticks([1, 5], ["cold page cache", "warm page cache"])
        axis.set_title(name)
    highest = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, highest * 1.05)
    axes[0].set_ylabel("seconds, median (least – greatest)")
    _legend_below(made, axes[0], columns=3)
    return made


def _bar(
    axis: Any,
    at: float,
    one: Measured,
    colour: str,
    text: str,
    *,
    width: float = 0.8,
    label: str | None = None,
) -> None:
    """Draw a bar with its range, and its figure above both."""
    axis.bar(at, one.value, width=width, color=colour, label=label)
    if one.low != one.high:
        spread = [[one.value - one.low], [one.high - one.value]]
        axis.errorbar(at, one.value, yerr=spread, color="black", linewidth=0.8, capsize=3)
    axis.annotate(text, (at, one.high), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def _scale(found: list[list[Row]]) -> Any:
    """Seconds of a conversion without its data over ranks, and over parameters × ranks."""
    rows = [row for row in found[0] if row.text("whole s") != "–"]
    first = sorted((row for row in rows if row.text("checkpoint") == "104B ZeRO-1"), key=_ranks)
    sharded = sorted((row for row in rows if row.text("checkpoint").startswith("70B")), key=_ranks)
    layers = [row for row in rows if "layers" in row.text("checkpoint")]
    most = sharded[-1]
    title = (
        f"Where data is cloned, 104B of {_ranks(first[-1]):,.0f} ranks converts "
        f"in {first[-1].value('whole s'):.2f} s,\n"
        f"70B ZeRO-3 of {_ranks(most):,.0f} ranks in {most.value('whole s'):.2f} s"
    )
    made, (left, right) = _panels(title, 3.9)
    for heading, colour, label in (("whole s", CKPTD, "whole"), ("planning s", OTHER, "planning alone")):
        _line(left, first, _ranks, heading, "o-", colour)
        _line(right, sharded, _pieces, heading, "o-", colour, f"{label}, ranks vary")
        _line(right, layers, _pieces, heading, "^:", colour, f"{label}, layers vary (256 ranks)")
    left.set_xscale("log", base=2)
    left.set_xticks([_ranks(row) for row in first], [f"{_ranks(row):,.0f}" for row in first])
    left.set_xlabel("ranks")
    left.set_title("104B, ZeRO-1")
    right.set_title("70B, ZeRO-3")
    right.set_xlabel("parameters × ranks, thousands")
    left.set_ylim(bottom=0)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xticks([25, 50, 100, 200, 400], ["25", "50", "100", "200", "400"])
    right.set_yticks([0.5, 1, 2, 5, 10, 20, 30], ["0.5", "1", "2", "5", "10", "20", "30"])
    right.minorticks_off()
    for axis in (left, right):
        axis.set_ylabel("seconds")
    _legend_below(made, right, columns=2)
    return made


def _ranks(row: Row) -> float:
    return row.value("ranks")


def _pieces(row: Row) -> float:
    return row.value("parameters × ranks") / 1e3


def _line(
    axis: Any,
    rows: list[Row],
    place: Callable[[Row], float],
    heading: str,
    style: str,
    colour: str,
    label: str | None = None,
) -> None:
    across = [place(row) for row in rows]
    axis.plot(across, [row.value(heading) for row in rows], style, color=colour, markersize=4, label=label)


def _legend_below(made: Any, axis: Any, columns: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=columns)


def _transfer(found: list[list[Row]]) -> Any:
    """Megabytes per second of uploads and downloads by each tool."""
    rows = found[0]

    def of(case: str, tool: str) -> str:
        return next(row.text("MB/s") for row in rows if (row.text("case"), row.text("tool")) == (case, tool))

    up, down = "up, null server", "down, null server, 4 GB"
    title = (
        f"ckptd uploads {of(up, 'ckptd')} MB/s (boto3 {of(up, 'boto3')}, awscrt {of(up, 'awscrt')})\n"
        f"and downloads {of(down, 'ckptd')} MB/s (boto3 {of(down, 'boto3')}, s5cmd {of(down, 's5cmd')})"
    )
    made, axes = _panels(title, 4.9, rows=2)
    shown = (
        (up, "upload of 1 GB, the server discards it"),
        (down, "download of 4 GB"),
        ("directory", "directory on the same disk, 1 GB"),
        ("link", "link of 1 Gb/s (dotted), 4 GB"),
    )
    for axis, (case, words) in zip(axes, shown, strict=True):
        if case == "link":
            ways = {"up, link, 4 GB": "up", "down, link, 4 GB": "down"}
            bars = [
                (f"{row.text('tool')}, {ways[row.text('case')]}", row)
                for row in rows
                if row.text("case") in ways
            ]
            axis.axvline(LINK_MEGABYTES, color="black", linewidth=0.8, linestyle=":")
        else:
            bars = [(row.text("tool"), row) for row in rows if row.text("case") == case]
        bars.sort(key=lambda bar: not bar[0].startswith("ckptd"))
        for at, (_, row) in enumerate(bars):
            _speed(axis, at, row, beyond=LINK_MEGABYTES if case == "link" else 0)
        axis.set_yticks(range(len(bars)), [name for name, _ in bars])
        axis.invert_yaxis()
        axis.set_xlim(0, axis.get_xlim()[1] * 1.12)
        axis.set_title(words)
    for axis in axes[2:]:
        axis.set_xlabel("MB/s, median (least – greatest)")
    return made


def _speed(axis: Any, at: int, row: Row, beyond: float) -> None:
    """Draw a lying bar with its range; its figure stands right of both, and right of `beyond`."""
    rate, wall = row.value("MB/s"), row.measured("wall s")
    low, high = rate * wall.value / wall.high, rate * wall.value / wall.low
    axis.barh(at, rate, height=0.7, color=CKPTD if row.text("tool").startswith("ckptd") else OTHER)
    if low != high:
        spread = [[rate - low], [high - rate]]
        axis.errorbar(rate, at, xerr=spread, color="black", linewidth=0.8, capsize=3)
    right = max(high, beyond)
    axis.annotate(f"{rate:.0f}", (right, at), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _fleet(found: list[list[Row]]) -> Any:
    """Requests of a node and seconds to COMMIT over the number of nodes."""
    rows = found[0]
    one, most = rows[0], rows[-1]
    title = (
        f"From the last upload to COMMIT: {one.value('to COMMIT')} s on one node, "
        f"{most.value('to COMMIT')} s on {most.value('nodes'):,.0f}"
    )
    made, (left, right) = _panels(title, 3.2)
    nodes = [row.value("nodes") for row in rows]
    _line(left, rows, lambda row: row.value("nodes"), "to COMMIT", "o-", CKPTD)
    for heading, style in (("requests, mean node", "o-"), ("busiest node", "^:")):
        words = heading.removeprefix("requests, ")
        _line(right, rows, lambda row: row.value("nodes"), heading, style, CKPTD, words)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(nodes[::2], [f"{count:,.0f}" for count in nodes[::2]])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("nodes")
    left.set_ylabel("seconds (20 ms a request)")
    right.set_ylabel("requests per node and checkpoint")
    right.legend(loc="upper left")
    return made


def _interference(found: list[list[Row]]) -> Any:
    """Differences of steps and saves with 95 % intervals: beside ckptd, and with none in both segments."""
    kinds = (
        ("with ckptd, 95 % interval", CKPTD, "one segment beside ckptd"),
        ("A/A, 95 % interval", OTHER, "without it in both (what the machine does by itself)"),
    )
    rows = found[0]
    step, slowest, save, *_ = (row.measured(kinds[0][0]).value for row in rows)
    title = (
        f"Beside ckptd: steps {step:+.1f} %, the slowest of a hundred {slowest:+.1f} %, saves {save:+.1f} %"
    )
    made, (axis,) = _panels(title, 3.1, columns=1)
    for shift, (heading, colour, label) in zip((-0.16, 0.16), kinds, strict=True):
        for at, row in enumerate(rows):
            one = row.measured(heading)
            spread = [[one.value - one.low], [one.high - one.value]]
            axis.errorbar(
                one.value,
                at + shift,
                xerr=spread,
                fmt="o",
                color=colour,
                capsize=3,
                label=label if at == 0 else None,
            )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row.text("what") for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("difference between neighbouring segments, % (95 % interval)")
    _legend_below(made, axis, columns=2)
    return made


def _cluster(found: list[list[Row]]) -> Any:
    """Speed and traffic of a conversion by more and more workers."""
    rows = found[0]
    names = [row.text("workers").replace(", ", ",\n").replace("placed", "own\nshards") for row in rows]
    ranged, placed, copied = rows[-3:]
    title = (
        f"{ranged.value('workers'):.0f} workers are {ranged.value('speed-up'):.2f} times as fast as one, "
        f"{placed.value('speed-up'):.2f} with shards on their own disks,\n"
        f"{copied.value('speed-up'):.2f} within a server that copies parts"
    )
    made, (left, right) = _panels(title, 3.7)
    for at, row in enumerate(rows):
        _bar(left, at, row.measured("MB/s"), CKPTD, f"{row.value('MB/s'):.0f}")
        for shift, heading, colour in ((-0.2, "read, of it sources", CKPTD), (0.2, "sent", SECOND)):
            label = heading.split(",")[0] if at == 0 else None
            amount = row.value(heading)
            _bar(
                right,
                at + shift,
                Measured(amount, amount, amount),
                colour,
                f"{amount:.0f}",
                width=0.4,
                label=label,
            )
    left.set_ylabel("output, MB/s")
    right.set_ylabel("bytes on the wire per parameter")
    for axis in (left, right):
        axis.margins(y=0.1)
    for axis in (left, right):
        axis.set_xticks(range(len(rows)), names)
        axis.set_xlabel("workers")
    _legend_below(made, right, columns=2)
    return made


def _in_store(found: list[list[Row]]) -> Any:
    """Share of a universal form that is sent, for each model and grid; the store copies the rest."""
    rows = [row for row in found[0] if row.text("form") == "universal"]
    least, most = (
        pick(row.value("sent") for row in rows if "stage 3" not in row.text("checkpoint"))
        for pick in (min, max)
    )
    title = f"Stages 1 and 2: {least:.1f} to {most:.1f} % of a universal form is sent, S3 copies the rest"
    made, (axis,) = _panels(title, 3.4, columns=1)
    for at, row in enumerate(reversed(rows)):
        share = row.value("sent")
        colour = OTHER if "dp 64" in row.text("checkpoint") and "stage 3" in row.text("checkpoint") else CKPTD
        axis.barh(at, share, color=colour)
        axis.text(share + 1, at, f"{share:.1f} %", va="center")
    axis.set_yticks(range(len(rows)), [row.text("checkpoint") for row in reversed(rows)])
    axis.set_xlabel("sent, % of the form's bytes (grey: pieces below S3's 5 MiB)")
    axis.set_xlim(0, 110)
    return made


PICTURES: dict[str, Callable[[list[list[Row]]], Any]] = {
    "conversion": _conversion,
    "scale": _scale,
    "transfer": _transfer,
    "in_store": _in_store,
    "fleet": _fleet,
    "interference": _interference,
    "cluster": _cluster,
    "summary": _summary,
}
"""How the picture of each part of the page is made from its tables."""


def main(parts: Sequence[str]) -> None:
    """Draw the pictures of these parts of the page, of all where none is named."""
    for part in parts or PICTURES:
        print(f"wrote {draw(part)}")


if __name__ == "__main__":
    main(sys.argv[1:])
