"""The page as a file: what `ckptd status` says, escaped, with nothing from outside (docs/ui.md)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ckptd.maintenance.status import words
from ckptd.maintenance.status.verdict import exit_code, life_of, verdict
from ckptd.observe.audit import Audit, Deleted, read_retired
from ckptd.observe.status import Status
from ckptd.observe.status_reader import status_of
from ckptd.page.render import page_html
from ckptd.page.sources import page_of, read_page, wanted
from ckptd.page.timeline import WIDTH
from ckptd.page.view import Detail, jobs_of
from tests.support import page_scene as scene
from tests.support import status_gallery as gallery

STATES = gallery.documents()
TAGS = {
    "html", "head", "meta", "title", "link", "style", "body", "p", "main", "header", "h1", "h2", "h3", "span",
    "time", "label", "input", "nav", "ul", "li", "a", "details", "summary", "div", "section", "table",
    "thead", "tbody", "tr", "th", "td", "b", "code", "button", "br", "dl", "dt", "dd", "svg", "rect",
    "progress", "footer", "noscript", "script",
}  # fmt: skip


class Page(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._hidden = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
        self._hidden = False


def html_of(document: Status) -> str:
    return page_html(page_of(jobs_of(document, gallery.NOW), [], gallery.NOW, None))


def detail_of(document: Status) -> Detail:
    make = jobs_of(document, gallery.NOW)[0].make_detail
    assert make is not None
    return make()


@pytest.mark.parametrize("name", STATES)
def test_the_page_says_what_status_says(name: str) -> None:
    document = gallery.read(STATES[name])
    life = life_of(document, gallery.NOW)
    jobs = jobs_of(document, gallery.NOW)
    page = page_of(jobs, [], gallery.NOW, None)
    text = " ".join(Page(page_html(page)).text.split())
    for job, shown in zip(document.jobs, jobs, strict=True):
        assert shown.verdict == verdict(job, life)
        assert " · ".join(words.clauses(job, life, gallery.NOW)) in text
        for problem in job.problems:
            assert problem.text in text and problem.next_step in text
    assert page.exit_code == exit_code(document.jobs, is_alive=life.is_well)


def test_hostile_texts_stay_texts() -> None:
    """No element, attribute or control character comes from a name, a tag, an error or a URL."""
    for name, document in STATES.items():
        dirty = status_of(scene.hostile(gallery.plain(document)))
        page = Page(html_of(dirty))
        assert {tag for tag, _ in page.elements} <= TAGS
        assert not [found for _, found in page.elements if any(key.startswith("on") for key in found)], name
        assert [tag for tag, _ in page.elements].count("script") == 1
        assert not any("src" in found for _, found in page.elements)
        assert all(
            found["href"].startswith(("#j", "data:image/svg"))
            for _, found in page.elements
            if "href" in found
        )
        assert not re.search("[\u202e\x1b]", page.text)
        assert "<script>window.pwned" in page.text and "{{7*7}}" in page.text
        assert document.jobs[0].name in page.text


def test_a_file_has_all_it_needs_and_asks_nobody() -> None:
    html = html_of(gallery.read(STATES["behind, two remotes"]))
    elements = Page(html).elements
    assert not [found for tag, found in elements if tag in ("script", "img", "iframe") and found]
    assert [found["href"][:5] for tag, found in elements if tag == "link"] == ["data:"]
    policy = next(f["content"] for _, f in elements if f.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert not re.search(r"https?://|@import|url\(", text)


def test_times_are_relative_with_the_absolute_one_beside_them() -> None:
    elements = Page(html_of(gallery.read(STATES["behind"]))).elements
    times = [found for tag, found in elements if tag == "time" and "title" in found]
    assert {"datetime": "2026-03-01T11:57:00.000Z", "title": "2026-03-01 11:57:00 UTC"} in times
    assert all(found["title"].endswith(" UTC") for found in times)


def test_a_bar_tells_saving_waiting_and_safe() -> None:
    timeline = detail_of(gallery.read(STATES["behind"])).timeline
    assert timeline is not None
    uploading, committed = timeline.tracks
    assert [part.kind for part in uploading.bar] == ["saving", "uploading"]
    assert [part.kind for part in committed.bar] == ["saving", "uploading", "safe"]
    # seen 620 s ago, complete 560 s ago, committed 180 s ago
    assert [part.x for part in committed.bar] == [0, round(WIDTH * 60 / 620), round(WIDTH * 440 / 620)]
    assert sum(part.width for part in committed.bar) == WIDTH


def test_what_was_deleted_is_on_the_timeline(tmp_path: Path) -> None:
    (job,) = STATES["safe"].jobs
    gone = replace(job.checkpoints[0].local, present=False, ended_at=gallery.before(100))
    job = replace(job, checkpoints=(replace(job.checkpoints[0], local=gone), *job.checkpoints[1:]))
    document = gallery.read(replace(STATES["safe"], jobs=(job,)))
    Audit(tmp_path / "audit.jsonl").write(
        "retire", tag="global_step4000", generation=1, form="zero", reason="limit", commits=[("key", "sha")]
    )
    with (tmp_path / "audit.jsonl").open("a") as out:
        out.write('{"action": "prune", "tag": "x"}\n[1]\nnonsense\n{"action": "retire"}\n')
    (deleted,) = read_retired(tmp_path)
    assert (deleted.tag, deleted.form) == ("global_step4000", "zero")
    make = jobs_of(
        document,
        gallery.NOW,
        [Deleted(tag="global_step4000", generation=1, form="zero", at=gallery.before(50))],
    )[0].make_detail
    assert make is not None
    timeline = make().timeline
    assert timeline is not None
    (track,) = timeline.tracks
    assert track.deleted_here is not None and track.deleted_here.relative == "2 min ago"
    assert [when.relative for when in track.deleted_there] == ["50 s ago"]
    assert [part.kind for part in track.bar][-1] == "gone"
    assert read_retired(tmp_path / "nowhere") == []


def test_a_command_can_be_copied_and_a_sentence_cannot() -> None:
    problems = jobs_of(gallery.read(STATES["behind, the remote is away"]), gallery.NOW)[0].problems
    assert [(one.next_step, one.is_typed) for one in problems] == [("ckptd check llama", True)]
    problems = jobs_of(gallery.read(STATES["a person is needed"]), gallery.NOW)[0].problems
    assert [one.is_typed for one in problems] == [False]
    (dead,) = jobs_of(gallery.read(STATES["daemon dead"]), gallery.NOW)[0].problems
    assert dead.next_step == "cd /home/alice && ckptd run --job llama.toml" and dead.is_typed
    assert dead.text.startswith("the daemon (process") and "start it" in dead.text
    # as a next step is typed for a job without a file
    assert replace(dead, next_step="CKPTD_URL=/nas/run ckptd accept /nvme/run global_step5").is_typed


def test_few_jobs_are_open_and_of_many_those_that_need_a_person() -> None:
    jobs = jobs_of(gallery.read(scene.many(100, 3)), gallery.NOW)
    assert page_of(jobs, [], gallery.NOW, None).open_keys == frozenset()
    few = jobs_of(gallery.read(STATES["two jobs"]), gallery.NOW)
    assert page_of(few, [], gallery.NOW, None).open_keys == {job.key for job in few}


def ckptd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_status_writes_the_page_whole_and_says_how_it_stands(tmp_path: Path) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(STATES["behind"]))
    page = tmp_path / "page.html"
    page.write_text("what was there before")
    done = ckptd("status", "llama", "--state-dir", tmp_path / "state", "--html", page)
    assert (done.returncode, done.stdout) == (3, f"BEHIND llama: {page}\n"), done.stderr
    assert page.read_text().startswith("<!doctype html>") and "global_step4500" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "state"]
    assert read_page(wanted(["llama"], tmp_path / "state")).exit_code == 3


@pytest.mark.parametrize(
    ("words_", "code", "said"),
    [
        (("--json",), 2, "it takes no other form"),
        (("TAG",), 2, "no TAG"),
        ((), 2, "is a directory"),
    ],
)
def test_a_page_that_cannot_be_written_is_said(
    tmp_path: Path, words_: tuple[str, ...], code: int, said: str
) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(STATES["safe"]))
    done = ckptd("status", "llama", *words_, "--state-dir", tmp_path / "state", "--html", tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


def test_without_the_extra_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    scene.publish(tmp_path / "state", json.loads(json.dumps(scene.as_of_now(STATES["safe"]))))
    for module, words_ in (
        ("jinja2", ["status", "--html", str(tmp_path / "page.html")]),
        ("starlette", ["ui"]),
        ("uvicorn", ["ui"]),
    ):
        program = (
            f"import sys\nsys.modules[{module!r}] = None\nfrom ckptd.cli.main import main\n"
            f"main({[*words_, '--state-dir', str(tmp_path / 'state')]})"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "pip install 'ckptd[ui]'" in done.stderr, done.stderr
