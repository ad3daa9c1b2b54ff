"""The mistakes that people make, as docs/internals/mistakes.md lists them: typed for real, answer by answer.

Each row of the page is a command in one scene: `/nvme` and `/mnt/nas` are directories of the test, and the
job files that it names are those below. `…` in an answer stands for anything; runs of blanks are one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support import console

PAGE = console.ROOT / "docs" / "internals" / "mistakes.md"
_ROW = re.compile(
    r"^\| (?P<number>\d+) \| (?P<what>[^|]+) \| (?P<before>[^|]) \| `(?P<command>[^`|]+)` \| (?P<code>\d+) "
    r"\| `(?P<answer>[^`|]+(?:`[^`|]+)*)` \|$",
    re.MULTILINE,
)
_REMOTE = '[[remote]]\nname = "nas"\nurl = "/mnt/nas/llama-7b"\nsame_filesystem = true\n'
_SAVE_DIR = 'save_dir = "/nvme/llama-7b"\n'
FILES = {
    "typo": f"{_SAVE_DIR}[local]\nsave_total_limt = 3\nkep = 1\n{_REMOTE}",
    "values": f'{_SAVE_DIR}settle = "5 sekunden"\nmemory_budget = "much"\n{_REMOTE}keep_last = "ten"\n',
    "notoml": "save_dir = /nvme/llama-7b\n",
    "noremote": _SAVE_DIR,
    "single": f'{_SAVE_DIR}[remote]\nname = "nas"\nurl = "/mnt/nas/llama-7b"\n',
    "topurl": f'{_SAVE_DIR}url = "/mnt/nas/llama-7b"\n',
    "empty": "",
    "relative": f'save_dir = "nvme/llama-7b"\n{_REMOTE}',
    "tilde": f'save_dir = "~/llama-7b"\n{_REMOTE}',
    "dollar": f'save_dir = "$HOME/llama-7b"\n{_REMOTE}',
    "llama": f"{_SAVE_DIR}{_REMOTE}",
    "other": f'save_dir = "/nvme/other"\n{_REMOTE}',
    "moved": f"{_SAVE_DIR}{_REMOTE}".replace("/mnt/nas/llama-7b", "/mnt/nas/elsewhere"),
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A row of the page."""

    number: int
    command: str
    exit_code: int
    answer: str


def mistakes() -> list[Mistake]:
    """The rows of the page."""
    found = _ROW.finditer(PAGE.read_text())
    return [Mistake(int(m["number"]), m["command"], int(m["code"]), m["answer"]) for m in found]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[console.Scene]:
    with console.scene(tmp_path_factory.mktemp("mistakes")) as here:
        for name, text in FILES.items():
            (here.here / f"{name}.toml").write_text(here.mapped(text))
        here.save("global_step5")
        yield here


def typed(scene: console.Scene, command: str) -> tuple[int, str]:
    """Exit code and all that a command prints."""
    done = subprocess.run(
        ["sh", "-c", scene.mapped(command)],
        cwd=scene.here,
        env=scene.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, " ".join(scene.unmapped(done.stdout).split())
