"""The mistakes that people make, as docs/internals/mistakes.md lists them: typed for real, answer by answer.

Each row of the page is a command in one scene: `/nvme` and `/mnt/nas` are directories of the test, and the
job files that it names are those below. `…` in an answer stands for anything; runs of blanks are one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support import console

PAGE = console.ROOT / "docs" / "internals" / "mistakes.md"
_ROW = re.compile(
    r"^\| (?P<number>\d+) \| (?P<what>[^|]+) \| [GOB] \| `(?P<command>[^`|]+)` \| (?P<code>\d+) "
    r"\| (?P<mark>``?)(?P<answer>[^|]+?)(?P=mark) \|$",
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
    "twin": f'name = "llama"\nsave_dir = "/nvme/twin"\n{_REMOTE}',
    "away": f'save_dir = "/nvme/away"\n{_REMOTE}'.replace("/mnt/nas/llama-7b", "/mnt/unmounted/llama-7b"),
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
        prepare(here)
        yield here


def prepare(scene: console.Scene) -> None:
    """What the rows stand on: a committed checkpoint, folders that are none, daemons at work and killed."""
    for name, text in FILES.items():
        (scene.here / f"{name}.toml").write_text(scene.mapped(text))
    scene.save("global_step5")
    nvme = scene.at("/nvme")
    shutil.copytree(nvme / "llama-7b", nvme / "twin")
    assert typed(scene, "ckptd run llama.toml --once")[0] == 0
    shutil.copytree(nvme / "llama-7b" / "global_step5", nvme / "lacking")
    (nvme / "lacking" / "mp_rank_00_model_states.pt").unlink()
    for name in ("void", "away", "taken/of-somebody", "plain"):
        (nvme / name).mkdir(parents=True)
    (nvme / "plain" / "epoch_8.pt").write_bytes(b"{}")
    for name in ("watched", "killed"):
        shutil.copytree(nvme / "twin", nvme / name)
        scene.start(f"ckptd run /nvme/{name} /mnt/nas/{name} --same-filesystem")
    end = time.monotonic() + console.SETTLED_SECONDS
    while typed(scene, "ckptd status /nvme/killed")[0] == 66:
        assert time.monotonic() < end
    scene.daemons[-1].kill()
    scene.daemons[-1].wait()


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


@pytest.mark.parametrize("row", mistakes(), ids=lambda row: f"{row.number}-{row.command}")
def test_a_mistake_is_answered_as_the_page_says(scene: console.Scene, row: Mistake) -> None:
    code, said = typed(scene, row.command)
    assert code == row.exit_code, said
    assert console.is_like(f"…{row.answer}…", said), said


def test_the_page_has_all_of_them() -> None:
    """Those that need another user, another disk or a daemon that waits are tested where these are."""
    text = PAGE.read_text()
    elsewhere = {int(n) for n in re.findall(r"^\| (\d+) \|[^|]+\| `tests/", text, re.MULTILINE)}
    assert {row.number for row in mistakes()} | elsewhere == set(range(1, 62))
