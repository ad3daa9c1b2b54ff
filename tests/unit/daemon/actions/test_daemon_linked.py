"""A checkpoint that is a link, or made of links: not followed, and never passed over in silence (P15)."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from ckptd.base import files
from ckptd.core.model.other_layouts import NOTHING_DECLARED
from ckptd.daemon.health.drain import drain_code, drained_words
from ckptd.daemon.intake.listing import list_save_dir, unprotected_here
from ckptd.daemon.state.problems import Problems
from ckptd.maintenance.status.verdict import Life
from ckptd.maintenance.status.words import headline
from tests.support import status_gallery as gallery
from tests.support.recover_scene import Scene

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.daemon.job import Job
    from ckptd.daemon.state.problems import Problem


class Watched:
    """A save_dir with global_step5, and one look after the other."""

    def __init__(self, root: Path) -> None:
        self.scene = Scene(root)
        self.scene.save(5)
        self.dir, self.elsewhere = self.scene.save_dir, root / "elsewhere"
        self.elsewhere.mkdir()
        (self.dir / "latest").write_text("global_step5")
        self.job = SimpleNamespace(
            state=None,
            view=None,
            turns=2,
            unseen="",
            problems=Problems(),
            config=SimpleNamespace(trainer="auto", declared=NOTHING_DECLARED, save_dir=self.dir),
        )

    def moved(self, tag: str, *, as_link: bool = True) -> None:
        """A copy of global_step5 that lies elsewhere, with a link, or links, to it here."""
        shutil.copytree(self.dir / "global_step5", self.elsewhere / tag)
        if as_link:
            (self.dir / tag).symlink_to(self.elsewhere / tag)
            return
        (self.dir / tag).mkdir()
        for path in (self.elsewhere / tag).iterdir():
            (self.dir / tag / path.name).symlink_to(path)

    def look(self) -> Problem | None:
        with files.opened_dir(self.dir) as fd:
            listing = list_save_dir(self.job.config, self.job.problems, None, fd)
        assert [one.tag for one in listing.folders] == ["global_step5"], "nothing is followed"
        return next(iter(self.job.problems.all()), None)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.parametrize("as_link", [True, False])
@pytest.mark.parametrize("tag", ["global_step6", "mine"])
def test_what_latest_names_is_an_alarm(watched: Watched, tag: str, as_link: bool) -> None:
    watched.moved(tag, as_link=as_link)
    (watched.dir / "latest").write_text(tag)
    found = watched.look()
    assert found is not None
    assert (found.code, found.about, found.severity) == ("linked-save", tag, "attention")
    assert "latest names it" in found.text
    assert "follows no links" in found.next_step
    (watched.dir / tag).unlink() if as_link else shutil.rmtree(watched.dir / tag)
    assert watched.look() is None, "it is over"


def test_a_newer_one_is_an_alarm_though_nothing_names_it_and_an_older_one_a_note(watched: Watched) -> None:
    watched.moved("global_step6")
    found = watched.look()
    assert found is not None
    assert found.severity == "attention"
    (watched.dir / "global_step6").rename(watched.dir / "global_step4")
    found = watched.look()
    assert found is not None
    assert (found.about, found.severity) == ("global_step4", "note"), "somebody keeps it elsewhere"


@pytest.mark.parametrize("target", ["global_step5", "./global_step5", "global_step5/"])
def test_a_second_name_of_what_lies_beside_it_is_none(watched: Watched, target: str) -> None:
    (watched.dir / "newest").symlink_to(target)
    (watched.dir / "latest").write_text("newest")
    assert watched.look() is None
    (watched.dir / "notes").symlink_to("/nowhere")
    assert watched.look() is None


def test_other_links_in_a_checkpoint_are_no_matter_of_its_shards(watched: Watched) -> None:
    (watched.dir / "global_step5" / "client").symlink_to("/etc/hostname")
    assert watched.look() is None


def test_status_says_not_safe(watched: Watched) -> None:
    for severity, verdict in (("attention", "NOT SAFE"), ("note", "SAFE")):
        problem = gallery.problem("linked-save", severity, "a link", "")
        job = gallery.job(state="attention", problems=(problem,))
        assert headline(job, Life(), 0.0).startswith(f"{verdict}  step 4000")


def test_a_drain_does_not_say_that_all_is_committed(watched: Watched) -> None:
    jobs = [cast("Job", watched.job)]
    watched.look()
    assert drain_code(jobs) == 0
    watched.moved("global_step6")
    watched.look()
    assert unprotected_here(jobs[0].problems) == ("global_step6",)
    assert drain_code(jobs) == 1
    assert "not global_step6" in drained_words(jobs)
