"""`ckptd ui` by plain HTTP: the token, methods, paths, foreign host names, headers (docs/ui.md)."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import page_scene as scene
from tests.support import status_gallery as gallery
from tests.support.page_scene import Ui


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "state"
    scene.publish(place, scene.as_of_now(gallery.documents()["two jobs"]))
    return place


@pytest.fixture(scope="module")
def here(state: Path) -> Iterator[Ui]:
    with scene.ui("--state-dir", state) as found:
        yield found


Answer = tuple[int, dict[str, str], str]


def ask(ui: Ui, path: str, method: str = "GET", token: str | None = None, **headers: str) -> Answer:
    """Ask with the right token, unless one is given."""
    connection = http.client.HTTPConnection("127.0.0.1", ui.port, timeout=60)
    sent = {"Authorization": f"Bearer {ui.token if token is None else token}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    found = (
        answer.status,
        {name.lower(): value for name, value in answer.getheaders()},
        answer.read().decode(),
    )
    connection.close()
    return found


def test_the_page_holds_nothing_without_the_token(here: Ui) -> None:
    code, _, text = ask(here, "/", token="")
    assert code == 200 and "llama" not in text and here.token not in text
    code, _, text = ask(here, "/jobs")
    assert code == 200 and "llama" in text and "qwen" in text


@pytest.mark.parametrize("token", ["", "x", "ä"])
def test_a_wrong_token_gets_nothing(here: Ui, token: str) -> None:
    code, headers, text = ask(here, "/jobs", token=token.encode().decode("latin-1"))
    assert (code, headers["www-authenticate"]) == (401, "Bearer")
    assert "llama" not in text and "ckptd ui" in text
    # nor does one in the address, where logs would have it
    assert ask(here, f"/jobs?token={here.token}", token="")[0] == 401


def test_tokens_are_long_and_of_one_run_alone(here: Ui, state: Path) -> None:
    with scene.ui("--state-dir", state) as other:
        assert len(here.token) == len(other.token) == 32 and here.token != other.token
        assert ask(other, "/jobs", token=here.token)[0] == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "", "[::1]", "localhost.:1x"]
)
def test_a_foreign_name_of_this_host_is_refused(here: Ui, host: str) -> None:
    """DNS rebinding: a page of another site whose name leads to 127.0.0.1 by now."""
    code, headers, text = ask(here, "/jobs", Host=host)
    assert code in (400, 421) and "llama" not in text
    assert code == 400 or headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9999", "LOCALHOST:8765"])
def test_the_names_that_a_tunnel_gives_are_taken(here: Ui, host: str) -> None:
    assert ask(here, "/jobs", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_possible(here: Ui, method: str) -> None:
    code, headers, _ = ask(here, "/jobs", method)
    assert (code, headers["allow"]) == (405, "GET, HEAD")


def test_head_says_what_get_says_without_the_body(here: Ui) -> None:
    assert ask(here, "/", "HEAD")[::2] == (200, "")
    assert ask(here, "/jobs", "HEAD", token="")[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/status.json", "/page.js", "/jobs/", "/../etc/passwd", "/%2e%2e/etc/passwd", "//evil.example/",
        "/jobs/..%2f..%2fetc%2fpasswd", "/docs", "/openapi.json", "/favicon.ico",
    ],
)  # fmt: skip
def test_there_is_no_other_path(here: Ui, path: str) -> None:
    code, headers, text = ask(here, path)
    assert code in (404, 307) and "root:" not in text
    assert not headers.get("location", "").startswith("//")


@pytest.mark.parametrize(
    ("path", "method", "host"),
    [("/", "GET", ""), ("/jobs", "GET", ""), ("/no", "GET", ""), ("/", "POST", ""), ("/", "GET", "evil")],
)
def test_every_answer_has_strict_headers(here: Ui, path: str, method: str, host: str) -> None:
    _, headers, _ = ask(here, path, method, **({"Host": host} if host else {}))
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "base-uri 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert not {"server", "set-cookie", "access-control-allow-origin"} & headers.keys()


def test_what_is_closed_is_not_sent(here: Ui) -> None:
    every = ask(here, "/jobs")[2]
    none = ask(here, "/jobs?open=")[2]
    assert "global_step4500" in every and "Checkpoints" in every
    assert "qwen" in none and "<h3>Checkpoints</h3>" not in none
    # what is no key of ours is nobody's
    hostile = ask(here, "/jobs?open=%22%3E%3Cscript%3E,../../etc,j" + "0" * 12)
    assert hostile[0] == 200 and len(hostile[2]) == len(none)
    assert ask(here, "/jobs?open=" + "x," * 4000)[0] == 200


def test_it_listens_on_this_machine_alone(here: Ui) -> None:
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {
        "127.0.0.1"
    }
    for address in {*others, "127.0.0.2"}:
        with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
            socket.create_connection((str(address), here.port), timeout=5).close()


def test_a_status_that_goes_is_said_on_the_page_and_comes_back(tmp_path: Path) -> None:
    document = scene.as_of_now(gallery.documents()["safe"])
    scene.publish(tmp_path / "state", document)
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        (tmp_path / "state" / "status.json").write_text("{ half a")
        code, _, text = ask(ui, "/jobs")
        assert code == 200 and "cannot be read" in text and "No job." in text
        scene.publish(tmp_path / "state", document)
        assert "SAFE llama" in ask(ui, "/jobs")[2]


def test_hostile_texts_stay_texts_in_the_live_page(tmp_path: Path) -> None:
    document = scene.hostile(scene.as_of_now(gallery.documents()["behind, the remote is away"]))
    scene.publish(tmp_path / "state", document)
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        text = ask(ui, "/jobs")[2]
    assert "&lt;script&gt;window.pwned" in text
    assert "<script" not in text and "<img" not in text


def test_many_checkpoints_of_many_jobs_are_answered_fast(tmp_path: Path) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(scene.many(100, 500)))
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        begun = time.monotonic()
        closed = ask(ui, "/jobs")[2]
        took = time.monotonic() - begun
        assert closed.count('<details class="job') == 100
        assert len(closed) < 200_000 and took < 5
        key = closed.partition('id="')[2].partition('id="j')[2][:12]
        opened = ask(ui, f"/jobs?open=j{key}")[2]
        assert opened.count('<th role="rowheader"') >= 20 and "480 older ones, safe" in opened
        assert ask(ui, f"/jobs?open=j{key},j{key}.older")[2].count('<th role="rowheader"') >= 500


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nobody", "--state-dir", "{root}/none"], 66, "no daemon has published a status"),
        (["--state-dir", "{root}/state", "--port", "{port}"], 2, "another --port"),
        (["--state-dir", "{root}/state", "--port", "70000"], 2, "65535"),
    ],
)
def test_what_is_wrong_is_said_before_it_serves(
    tmp_path: Path, here: Ui, words: list[str], code: int, said: str
) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(gallery.documents()["safe"]))
    arguments = [word.format(root=tmp_path, port=here.port) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "ui", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr


def test_ctrl_c_ends_it_well(tmp_path: Path) -> None:
    scene.publish(tmp_path / "state", scene.as_of_now(gallery.documents()["safe"]))
    with scene.ui("--state-dir", tmp_path / "state") as ui:
        assert ask(ui, "/jobs")[0] == 200
        ui.process.send_signal(2)
        out, err = ui.process.communicate(timeout=60)
        assert ui.process.returncode == 0 and "Traceback" not in out + err
        assert "Ctrl-C ends it" in err
