"""The page in a real browser, over a real daemon: clicks, live updates, a narrow window, dark mode."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUN, made_before, node
from tests.support import page_scene as scene
from tests.support import status_gallery as gallery
from tests.support.browser import Browser, browser

pytestmark = pytest.mark.real
SLOW = 'bandwidth = "250kB/s"'
MOST_CONTRAST = 4.5
"""Of WCAG 2, AA."""

real_saves = made_before(RUN)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


def test_a_run_is_followed_live(window: Browser, tmp_path: Path) -> None:
    """From the first COMMIT over an upload to a daemon that is gone, in one tab, never loaded again."""
    with node(tmp_path, remote=f"{SLOW}\nkeep_last = 3") as here:
        here.start()
        here.save(1)
        here.wait_committed("global_step1~g1")
        here.wait("safe", lambda: (here.status()["safe"] or {}).get("tag") == "global_step1")
        with scene.ui(here.save_dir) as ui:
            window.open(ui.address)
            window.wait(lambda: "SAFE" in window.text("details.job > summary"), "the verdict")
            assert "token" not in window.driver.current_url and ui.token not in window.driver.current_url
            assert window.driver.title == "SAFE run · ckptd"
            assert "✓ zero committed" in " ".join(window.text("table[aria-label^=Checkpoints] tbody").split())

            # what a person opened, closed and selected stays as it is while the page changes
            window.run("window.loaded = 1")
            window.click("details[id$='.why'] > summary")
            window.wait(lambda: "this node" in window.text("details[id$='.why'] table"), "why it is kept")
            window.run("getSelection().selectAllChildren(document.querySelector('p.where'))")
            here.save(2)
            window.wait(lambda: "global_step2 zero → nas" in window.text(".uploads"), "the upload")
            shown = window.run("return document.querySelector('progress').value")
            window.wait(
                lambda: window.run("return document.querySelector('progress')?.value ?? 100") > shown, "bytes"
            )
            window.wait(
                lambda: "SAFE step 2 on nas" in " ".join(window.text("details.job > summary").split()), "2"
            )
            window.wait(lambda: window.driver.title == "SAFE run · ckptd", "the title")
            assert window.run("return window.loaded") == 1
            assert window.run("return String(getSelection())") == str(here.save_dir)
            assert window.run("return document.querySelector(\"details[id$='.why']\").open")
            assert "global_step2" in window.text("table.timeline")
            assert window.run("return document.querySelectorAll('table.timeline rect.safe').length") == 2
            times = window.run(
                "return [...document.querySelectorAll('table.timeline time')].map((t) => t.title)"
            )
            assert times and all(title.endswith(" UTC") for title in times)

            here.kill()
            window.wait(lambda: "NOT WATCHED" in window.text("details.job > summary"), "the daemon is gone")
            assert "ckptd run" in window.text(".problems code")
            window.allow_clipboard()
            window.click(".problems button.copy")
            window.wait(lambda: window.text(".problems button.copy") == "Copied", "the click")
            copied = window.run("return navigator.clipboard.readText()")
            assert copied == window.text(".problems code")

            # a reload in this tab needs no token again; another tab does
            window.driver.refresh()
            window.wait(lambda: "NOT WATCHED" in window.text("details.job > summary"), "the reload")
            assert window.errors() == []
            window.open(ui.address.partition("#")[0])
            window.wait(lambda: "no valid token" in window.text("#offline"), "that there is none")
            assert "run" not in window.text("main")
            # Chromium reports the 401 itself
            assert all("401" in line for line in window.errors())

            window.open(ui.address)
            window.wait(lambda: "NOT WATCHED" in window.text("details.job > summary"), "the page")
            assert window.errors() == []
            ui.process.send_signal(signal.SIGTERM)
            window.wait(lambda: "does not answer" in window.text("#offline"), "that it ended")
            assert "NOT WATCHED" in window.text("details.job > summary")


def test_a_whole_job_is_shown_from_its_remote_alone(window: Browser, tmp_path: Path) -> None:
    with node(tmp_path) as here:
        here.save(1)
        here.save(2)
        assert here.comes_to_rest()
        with scene.ui(here.nas) as ui:
            window.open(ui.address)
            window.wait(lambda: "SAFE" in window.text("details.job > summary"), "the verdict")
            rows = window.text("table[aria-label^=Checkpoints] tbody")
            assert "global_step2" in rows and "committed" in rows
            assert (
                window.run("return document.querySelectorAll('table[aria-label^=Nodes] tbody tr').length")
                == 1
            )
            assert "Committed" in window.text("table.timeline thead") and "Saved" not in window.text(
                "table.timeline"
            )
            here.nas.rename(here.root / "away")
        with scene.ui(here.nas) if here.nas.exists() else scene.ui(f"file://{here.nas}") as ui:
            window.open(ui.address)
            window.wait(lambda: "NOT READ" in window.text("details.job > summary"), "that it is away")
            assert window.text(".problems")
            assert window.errors() == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_state_can_be_read_in_a_narrow_window(window: Browser, tmp_path: Path, is_dark: bool) -> None:
    """No scroll bar at 360 pixels, and enough contrast, of everything that status can say."""
    states = gallery.documents()
    for number, name in enumerate(states):
        scene.publish(tmp_path / f"{number}", _renamed(scene.as_of_now(states[name]), name))
    with scene.ui("--state-dir", tmp_path) as ui:
        window.open(ui.address)
        window.show(width=360, is_dark=is_dark)
        window.wait(lambda: window.text("details.job"), "the page")
        window.run("for (const one of document.querySelectorAll('details.job')) one.open = true")
        window.wait(lambda: "two jobs" in window.text("main") and window.run(_ALL_FILLED), "the details")
        window.run("for (const one of document.querySelectorAll('details details')) one.open = true")
        window.wait(lambda: window.run(_ALL_FILLED), "what is folded")
        assert not window.is_too_wide()
        ratio, element = window.least_contrast()
        assert ratio >= MOST_CONTRAST, (ratio, element)
        back = window.run("return getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(13, 17, 23)" if is_dark else "rgb(246, 248, 250)")
        window.show(width=1100, is_dark=is_dark)
        assert not window.is_too_wide()
        assert window.errors() == []


_ALL_FILLED = (
    "return [...document.querySelectorAll('details[open] > div')].every((one) => one.textContent.trim())"
)


def _renamed(document: dict[str, object], name: str) -> dict[str, object]:
    jobs = document["jobs"]
    assert isinstance(jobs, list)
    for job in jobs:
        job["name"], job["save_dir"] = f"{name} {job['name']}", f"{job['save_dir']}/{name}"
    return document


def test_of_a_hundred_jobs_one_is_found(window: Browser, tmp_path: Path) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(scene.many(100, 500)))
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        window.open(ui.address)
        window.wait(
            lambda: window.run("return document.querySelectorAll('details.job').length") == 100, "all"
        )
        assert "10 BEHIND 90 SAFE" in " ".join(window.text(".counts").replace("●", " ").split())
        window.driver.find_element("css selector", "#filter").send_keys("JOB-00")
        visible = (
            "return [...document.querySelectorAll('details.job')].filter((j) => j.checkVisibility()).length"
        )
        window.wait(lambda: window.run(visible) == 10, "ten of them")
        window.click("details.job > summary")
        window.wait(lambda: "480 older ones, safe" in window.text("details.job"), "the first one")
        window.click("details[id$='.older'] > summary")
        count = "return document.querySelectorAll('details.job table[aria-label^=Older] tbody tr').length"
        window.wait(lambda: window.run(count) == 480, "its older ones")
        # an update of it all keeps what was typed
        window.run("window.before = document.querySelector('.as-of').textContent")
        window.wait(
            lambda: window.run("return document.querySelector('.as-of').textContent !== before"), "another"
        )
        assert window.run(visible) == 10 and window.run(count) == 480
        assert window.errors() == []


def test_hostile_texts_do_nothing_in_a_browser(window: Browser, tmp_path: Path) -> None:
    document = scene.hostile(scene.as_of_now(gallery.documents()["behind, the remote is away"]))
    scene.publish(tmp_path / "state", document)
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        window.open(ui.address)
        window.wait(lambda: "<script>window.pwned" in window.text("main"), "the text")
        assert window.run(
            "return window.pwned === undefined && !document.querySelector('main img, main script')"
        )
        assert window.errors() == []


def test_a_page_in_a_file_works_alone(window: Browser, tmp_path: Path) -> None:
    with node(tmp_path) as here:
        here.save(1)
        assert here.comes_to_rest()
        page = tmp_path / "page.html"
        assert here.ckptd("status", here.save_dir, "--html", page).stdout == f"NOT WATCHED run: {page}\n"
    window.open(page.as_uri())
    assert "NOT WATCHED" in window.text("details.job > summary")
    assert "✓ zero" in window.text("table[aria-label^=Checkpoints]")
    assert not window.text("details[id$='.why'] table")
    window.click("details[id$='.why'] > summary")
    assert "this node" in window.text("details[id$='.why'] table")
    window.click("details.job > summary")
    assert not window.text("table[aria-label^=Checkpoints]")
    window.show(width=360)
    assert not window.is_too_wide()
    loaded = window.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert window.errors() == []
