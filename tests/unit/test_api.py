"""Call ckptd from Python: the examples of docstrings, errors, what is imported when, and what mypy sees."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckptd
from ckptd import Slice
from ckptd.errors import (
    CkptdError,
    DamagedError,
    NotFoundError,
    NothingCommitted,
    RemoteUnreachable,
    TargetExists,
    UsageError,
)
from tests.support import console
from tests.support.restore_scene import OPTIM, RestoreScene, scene

__all__ = ["scene"]

JOB = """
save_dir = "{root}/nvme/run"
[[remote]]
name = "nas"
url = "{root}/nas/run"
same_filesystem = true
[[remote]]
name = "far"
url = "{root}/far/run"
same_filesystem = true
"""


@pytest.mark.parametrize(
    "name", ["checkpoints", "convert", "inspect", "restore", "resume", "status", "verify"]
)
def test_each_example_is_true(scene: RestoreScene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scene.commit(scene.save(5), 5)
    monkeypatch.chdir(scene.root)
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(ckptd, name), name, globs={"ckptd": ckptd})
    assert found.examples, name
    assert doctest.DocTestRunner().run(found).failed == 0


def test_what_is_damaged_is_told_and_not_restored(scene: RestoreScene, tmp_path: Path) -> None:
    scene.commit(scene.save(5), 5)
    url, tag = str(scene.nas), "global_step5"
    assert [row.verdict for row in ckptd.verify(url, read=True)[0].commits] == ["good"]
    scene.turn_a_byte(tag)
    (verified,) = ckptd.verify(url, tag, read=Slice())
    assert OPTIM.format(0) in str(verified.commits[0].differences)
    with pytest.raises(DamagedError) as caught:
        ckptd.restore(url, tmp_path / "there", tag)
    assert caught.value.exit_code == 65
    assert caught.value.hint


def test_errors_are_those_of_the_commands(scene: RestoreScene, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ckptd.inspect(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a URL"):
        ckptd.inspect("s3://bucket/run")
    with pytest.raises(RemoteUnreachable):
        ckptd.checkpoints(str(scene.nas))
    scene.save(5)
    scene.ground()
    with pytest.raises(NothingCommitted):
        ckptd.restore(str(scene.nas), tmp_path / "there")
    for directory in ("", "s3://bucket/run"):
        with pytest.raises(UsageError):
            ckptd.restore(scene.nas, directory)
    with pytest.raises(UsageError, match="no numbers"):
        ckptd.restore(scene.nas, tmp_path / "there", ranks="0,2")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no remote is known of"):
        ckptd.checkpoints(scene.save_dir)
    (tmp_path / "taken").mkdir()
    with pytest.raises(TargetExists):
        ckptd.convert(scene.save_dir / "global_step5", tmp_path / "taken")


def test_a_remote_that_does_not_answer_is_raised_unless_it_is_asked_for(scene: RestoreScene) -> None:
    scene.commit(scene.save(5), 5)
    job = scene.root / "run.toml"
    job.write_text(JOB.format(root=scene.root))
    for call in (ckptd.checkpoints, ckptd.verify):
        with pytest.raises(RemoteUnreachable):
            call(str(job))
        failures: dict[str, CkptdError] = {}
        said: list[str] = []
        (found,) = call(str(job), failures=failures, say=said.append)
        assert (found.name, list(failures)) == ("nas", ["far"])
        assert any("far" in line for line in said)


def test_resume_takes_the_place_of_what_is_lost(scene: RestoreScene) -> None:
    scene.commit(scene.save(5), 5)
    shutil.rmtree(scene.save_dir / "global_step5")
    planned = ckptd.resume(str(scene.save_dir), str(scene.nas), dry_run=True)
    assert planned.plan.fetches
    assert not planned.path.exists()
    done = ckptd.resume(str(scene.save_dir), str(scene.nas), world_size=4)
    assert (done.path / "zero").is_dir(), "another grid: the universal form"


def test_convert_tells_how_far_it_is(scene: RestoreScene, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    scene.save(5)
    report = ckptd.convert(scene.save_dir, tmp_path / "made", on_progress=lambda *one: told.append(one))
    assert told[0][0] == "planning"
    assert told[-1] == ("publishing", report.bytes, report.bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"form": "wieghts"},
        {"form": "weights-f16"},
        {"compat": "x"},
        {"max_shard_bytes": 0},
        {"memory_budget_bytes": 1},
    ],
)
def test_convert_refuses_what_there_is_not(scene: RestoreScene, tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError) as caught:
        ckptd.convert(scene.save_dir, tmp_path / "made", **options)
    assert caught.value.hint


def test_import_loads_nothing_before_it_is_used() -> None:
    code = (
        "import sys; before = set(sys.modules); import ckptd\n"
        "from ckptd import __version__\n"
        "dir(ckptd)\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "ckptd.convert, ckptd.errors.CkptdError\n"
        "print(*sorted({'pydantic', 'torch', 'botocore', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["__future__ ckptd", ""]


def test_every_public_name_is_there() -> None:
    """As `__all__` and `dir` say, and on the page."""
    assert sorted(ckptd.__all__) == ckptd.__all__ == dir(ckptd)
    page = PAGE.read_text()
    for name in ckptd.__all__:
        assert getattr(ckptd, name) is not None
        assert name.startswith("__") or f"ckptd.{name}" in page or f"`{name}`" in page, name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = ckptd.nonsense  # type: ignore[attr-defined]


SCRIPT = """
import ckptd
from ckptd import ConvertReport, Recovered, errors

report: ConvertReport = ckptd.convert("a", "b", form="weights-bf16", on_progress=print)
recovered: Recovered = ckptd.restore("s3://bucket/run", "here", world_size=16)
steps: list[int] = [one.step for one in ckptd.checkpoints("s3://bucket/run")[0].checkpoints]
sound: bool = ckptd.inspect("here").is_sound and ckptd.verify("run", read=ckptd.Slice(1, 7))[0].is_good
try:
    path: str = str(ckptd.resume("run").path)
except errors.NothingCommitted as error:
    print(error.exit_code, error.hint)
report_of_one: ckptd.JobReport = ckptd.status("run")
worst: int = max(one.exit_code for one in ckptd.status())
"""


def test_a_type_checker_sees_the_signatures(tmp_path: Path) -> None:
    """`mypy --strict` of a script that uses all of it, and of two lines that are wrong."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert (found := checked(script)).startswith("Success"), found
    script.write_text('import ckptd\nckptd.nonsense\nckptd.convert("a", "b", form=3)\n')
    found = checked(script)
    assert 'script.py:2: error: Module has no attribute "nonsense"' in found
    assert 'script.py:3: error: Argument "form" to "convert" has incompatible type "Literal[3]"' in found


def checked(script: Path) -> str:
    """What mypy says of it, with ckptd as installed for this interpreter."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file="]
    command += ["--cache-dir", str(script.parent / "cache"), script.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parent)
    return done.stdout + done.stderr


PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
JOB_OF_PAGE = """# llama-7b.toml
save_dir = "/nvme/llama-7b"
[[remote]]
name = "nas"
url = "/mnt/nas/llama-7b"
"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block marked `pycon` of docs/python.md, from its top, beside a real daemon; `…` is anything."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with console.scene(tmp_path) as scene:
        scene.save("global_step5")
        scene.write(JOB_OF_PAGE)
        for command in ("ckptd run --job llama-7b.toml", "ckptd wait /nvme/llama-7b --step 5"):
            assert scene.run(console.Command(command, None)) is None
        monkeypatch.chdir(scene.here)
        committed = {"zero": "committed", "universal": "committed"}
        while ckptd.status(scene.at("/nvme/llama-7b")).checkpoints[0].remotes["nas"] != committed:
            time.sleep(0.2)
        blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        assert len(blocks) > 5
        examples = scene.mapped("\n".join(blocks))
        page = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
        told: list[str] = []
        checker = SimilarOutput()
        assert doctest.DocTestRunner(checker).run(page, out=told.append).failed == 0, "".join(told)


class SimilarOutput(doctest.OutputChecker):
    """As for `console` blocks: `…` stands for anything, and alone on a line for any number of lines."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Compare line by line."""
        lines = (tuple(line for line in text.splitlines() if line.strip()) for text in (want, got))
        return console.agree(next(lines), list(next(lines)))


def test_the_fields_that_the_page_names_are_there() -> None:
    rows = re.findall(r"^\| `([A-Z]\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 8
    for name, fields in rows:
        kinds = [name, *re.findall(r"`([A-Z]\w+)` with", fields)]
        known = {field for kind in kinds for field in dir(getattr(ckptd, kind))}
        known |= {field for kind in kinds for field in getattr(ckptd, kind).__annotations__}
        named = set(re.findall(r"`(\w+)`", fields)) - set(kinds) - {"form", "steps"}
        assert named <= known, name
