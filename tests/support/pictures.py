"""`make pictures`: what people see, for the docs: docs/status.svg and docs/images/ui-*.png.

The SVG is made of the text that `ckptd status` prints, and a test compares it; the PNGs are taken from the
live page in a real browser, so their pixels depend on fonts and are not compared.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import parse_rgb_hex
from rich.terminal_theme import TerminalTheme

from ckptd.cli.screen import Screen
from ckptd.cli.status.command import screen
from ckptd.observe import status as st
from tests.support import page_scene as scene
from tests.support import status_gallery as gallery

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = DOCS / "status.svg"
IMAGES = DOCS / "images"
WIDTH = 80
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's own loads two fonts from elsewhere."""
_COLOURS = ("484f58", "ff7b72", "3fb950", "d29922", "58a6ff", "bc8cff", "39c5cf", "b1bac4")
"""As the page has them in dark mode."""
_THEME = TerminalTheme((13, 17, 23), (230, 237, 243), [parse_rgb_hex(one) for one in _COLOURS])
_HOUR_SECONDS = 3600.0


def status_svg() -> str:
    """The first screen of the README as a picture."""
    console = Screen(file=io.StringIO(), width=WIDTH)
    console.record = True
    document = gallery.read(gallery.of_the_readme())
    for part in screen(document, gallery.NOW, retention=False):
        console.print(part, soft_wrap=True)
    made = console.export_svg(title="ckptd status", theme=_THEME, code_format=_FORMAT, unique_id="status")
    return "\n".join(line.rstrip() for line in made.splitlines()) + "\n"


def two_jobs() -> st.Status:
    """A run with some hours behind it, and one that needs a person."""
    newest, *_ = gallery.of_the_readme().jobs[0].checkpoints
    older = [_saved(4000 - 500 * n, 1.2 * (n + 1), is_here=n < 2) for n in range(6)]
    newest = replace(newest, local=replace(newest.local, seen_at=gallery.before(620)))
    rows = (newest, *older)
    run = gallery.of_the_readme().jobs[0]
    assert run.safe is not None
    committed = 1.2 * _HOUR_SECONDS - 700
    safe = replace(run.safe, committed_at=gallery.before(committed), age_seconds=committed)
    run = replace(run, checkpoints=rows, safe=safe, seconds_at_risk=1.2 * _HOUR_SECONDS - 80)
    full = gallery.behind(
        name="qwen-72b", save_dir="/nvme/qwen-72b", state="attention", problems=(gallery.FULL,)
    )
    return st.Status(generated_at=gallery.before(3.0), daemon=gallery.daemon(), jobs=(run, full))


def _saved(step: int, hours_ago: float, *, is_here: bool) -> st.CheckpointStatus:
    """One that was committed a while after it was complete, and left the node two saves later."""
    at = hours_ago * _HOUR_SECONDS
    form = st.FormStatus(
        state="committed", commit_sha256="3fa9c2d17b0e" * 5, generation=1, started_at=gallery.before(at - 90)
    )
    made = gallery.checkpoint(step, state="committed" if is_here else "pruned")
    ended = None if is_here else gallery.before(at - 2 * 1.2 * _HOUR_SECONDS)
    return replace(
        made,
        local=replace(
            made.local,
            present=is_here,
            held=False,
            universal="ready" if is_here else "none",
            seen_at=gallery.before(at),
            complete_at=gallery.before(at - 80),
            ended_at=ended,
        ),
        remotes={
            "nas": {
                "zero": replace(form, ended_at=gallery.before(at - 700)),
                "universal": replace(form, ended_at=gallery.before(at - 1300)),
            }
        },
        keep=("one of the newest 2",) if is_here else (),
    )


def main() -> int:
    """Write all of them."""
    from tests.support.browser import browser

    SVG.write_text(status_svg())
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptd-pictures-") as folder, browser() as window:
        state = Path(folder) / "state"
        scene.publish(state, scene.as_of_now(two_jobs()))
        for name, job, is_dark in (("ui-light", ["llama-7b"], False), ("ui-dark", [], True)):
            with scene.ui(*job, "--state-dir", state) as ui:
                window.open(ui.address)
                window.show(width=1100, height=760, is_dark=is_dark)
                window.wait(lambda: window.text("table.timeline"), "the page")
                window.picture(IMAGES / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
