"""What a run was resumed from stays until something that it saved since is committed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ckptd.base import files
from ckptd.core.model.layouts import Grid
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.core.model.resume_marker import RESUMED_PATH, ResumeMarker, read_resume_marker
from ckptd.core.policy.actions import DeleteLocal
from ckptd.core.policy.planner import plan
from ckptd.daemon.actions.local_deletion import _check_no_save_began
from ckptd.errors import SourceChanged
from ckptd.storage.local.scan import scan
from tests.support.core_views import job_view, save_view, sealed

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.core.policy.view import SaveView

WORD = ResumeMarker(tag="s1b1", written_ns={"s1b1": 1, "s2b1": 2, "s3b1": 3})


def three() -> list[SaveView]:
    return [save_view(n, sealed(n)) for n in (1, 2, 3)]


def goes(saves: list[SaveView], word: ResumeMarker = WORD) -> list[str]:
    return [a.permit.tag for a in plan(job_view(saves, resumed=word)).actions if isinstance(a, DeleteLocal)]


def test_it_stays_though_newer_ones_are_committed() -> None:
    assert goes(three()) == ["s2b1"]
    kept = plan(job_view(three(), resumed=WORD)).local_verdicts[1].keeps
    assert kept == ("resumed from, and nothing saved since is committed",)


def test_a_later_save_that_is_not_committed_or_is_a_model_alone_ends_nothing() -> None:
    assert goes([*three(), save_view(4, sealed(4), committed=False)]) == ["s2b1"]
    model = sealed(5).model_copy(update={"grid": Grid(dp=0, mm_count=0, zero_stage=0)})
    assert "s1b1" not in goes([*three(), save_view(5, model)])


def test_it_goes_once_a_later_save_is_committed() -> None:
    assert goes([*three(), save_view(4, sealed(2, 2))]) == ["s1b1"], "the others wait until it is passed"
    assert goes([*three(), save_view(4, sealed(9))]) == ["s1b1", "s2b1", "s3b1"]


def test_a_name_that_was_saved_again_since_is_a_later_save() -> None:
    again = WORD.model_copy(update={"written_ns": {"s1b1": 1, "s2b1": 2, "s3b1": 1}})
    assert goes(three(), again) == ["s1b1", "s2b1"]


def test_the_folder_itself_is_no_later_save() -> None:
    """It may have been fetched after the word was written, or have been fetched before."""
    fetched = WORD.model_copy(update={"written_ns": {"s2b1": 2, "s3b1": 3}})
    assert goes(three(), fetched) == ["s2b1"]


def test_a_word_for_what_is_not_here_keeps_nothing() -> None:
    assert goes(three(), WORD.model_copy(update={"tag": "s7b1"})) == ["s1b1", "s2b1"]


@pytest.mark.parametrize(
    "text", [None, "", "{", '{"tag": "s1b1"', "s1b1", '{"tag": 1, "written_ns": {}}', '{"tag": "s1b1"}', "[]"]
)
def test_what_is_no_such_word_says_nothing(text: str | None) -> None:
    assert read_resume_marker(text) is None


def test_a_later_release_may_say_more() -> None:
    assert read_resume_marker('{"tag": "a", "written_ns": {"b": 5}, "more": 1}') == ResumeMarker(
        tag="a", written_ns={"b": 5}
    )


@pytest.mark.parametrize("kind", ["file", "symlink", "pipe", "folder", "bytes", "linked folder"])
def test_nothing_but_a_plain_file_of_ours_is_read(tmp_path: Path, kind: str) -> None:
    save_dir = tmp_path / "run"
    place = save_dir / RESUMED_PATH
    place.parent.mkdir(parents=True)
    stranger = tmp_path / "resumed.json"
    stranger.write_text(WORD.model_dump_json())
    if kind == "file":
        place.write_text(WORD.model_dump_json())
    elif kind == "symlink":
        place.symlink_to(stranger)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "bytes":
        place.write_bytes(b"\xff\x00")
    else:
        place.parent.rmdir()
        place.parent.symlink_to(tmp_path)
    with files.opened_dir(save_dir) as fd:
        assert read_resume_marker(scan(fd).resumed) == (WORD if kind == "file" else None)


def test_what_was_handed_out_since_its_removal_was_planned_stays(tmp_path: Path) -> None:
    """`ckptd resume` gives away what is here: no folder changes, only its word."""
    (tmp_path / "global_step1").mkdir()
    with files.opened_dir(tmp_path) as fd:
        planned = scan(fd, "auto")
        _check_no_save_began(fd, planned, "global_step1", "auto", NOTHING_DECLARED)
        word = ResumeMarker(tag="global_step1", written_ns={})
        (tmp_path / RESUMED_PATH).parent.mkdir()
        (tmp_path / RESUMED_PATH).write_text(word.model_dump_json())
        with pytest.raises(SourceChanged, match="gave the trainer a checkpoint"):
            _check_no_save_began(fd, planned, "global_step1", "auto", NOTHING_DECLARED)
