"""status.json is read into the records that it is written from, of this version and of others."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ckptd import __version__
from ckptd.cli.daemon.wait import judge_step
from ckptd.cli.status.command import screen
from ckptd.cli.status.detail import story_of
from ckptd.maintenance.status.verdict import Life, exit_code, life_of, unread, verdict
from ckptd.maintenance.status.words import headline, problem_lines
from ckptd.observe.status import Status
from ckptd.observe.status_reader import read_status, status_of
from tests.support import status_gallery as gallery

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = gallery.documents()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_written_is_read(name: str) -> None:
    written = gallery.plain(DOCUMENTS[name])
    assert read_status(json.dumps(written).encode()) == (DOCUMENTS[name], written)


def test_keys_of_a_newer_version_are_passed_over() -> None:
    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_more(one) for key, one in value.items()} | {"mood": {"x": [1]}}
        return [with_more(one) for one in value] if isinstance(value, list) else value

    document = DOCUMENTS["behind"]
    written = gallery.plain(document)
    (job,) = written["jobs"]
    # names of remotes and forms are no keys
    shown = with_more({key: one for key, one in job.items() if key != "checkpoints"})
    written = with_more(written | {"jobs": []}) | {"jobs": [shown | {"checkpoints": job["checkpoints"]}]}
    written["jobs"][0]["state"] = "splendid"
    (read,) = status_of(written).jobs
    assert str(read.state) == "splendid"
    assert replace(read, state="behind") == document.jobs[0]


def test_keys_that_an_older_version_did_not_write_are_empty() -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    written["daemon"] = {"pid": 5, "alive": False}
    written["jobs"] = [{"name": "llama", "remotes": [{"name": "s3"}], "safe": None}]
    read = status_of(written)
    assert (read.daemon.pid, read.daemon.version, read.daemon.start_command) == (5, "", "")
    (job,) = read.jobs
    assert (job.name, job.safe, job.checkpoints, job.job_id) == ("llama", None, (), None)
    assert (job.remotes[0].url, job.remotes[0].attached, job.remotes[0].held) == ("", False, ())


@pytest.mark.parametrize(
    "change", [{"jobs": {}}, {"jobs": [7]}, {"generated_at": 1}, {"generated_at": "now"}, {"daemon": []}]
)
def test_without_time_daemon_and_jobs_it_is_no_status(change: dict[str, Any]) -> None:
    written = gallery.plain(DOCUMENTS["safe"]) | change
    with pytest.raises(ValueError, match=r"it is no status of ckptd|isoformat"):
        status_of(written)


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"jobs": ' * 200_000, b"[" + b'"x",' * 100_000 + b"1]"])
def test_a_hostile_document_is_refused_in_a_line(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is no status of ckptd") as caught:
        read_status(data)
    assert len(str(caught.value)) < 100


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a document stand; of a list the first."""
    yield path
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:1] if isinstance(value, list) else ())
    )
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(written: Any, path: tuple[Any, ...]) -> Any:
    """The document with a value of a type that its field never has."""
    written = copy.deepcopy(written)
    inner = written
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = 7 if isinstance(inner[path[-1]], dict | list) else [7]
    return written


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_wrong_type_never_says_safe_and_hides_nothing_else(name: str) -> None:
    """Whichever value it is: the document is read and shown, and nothing of that job counts as safe."""
    written = gallery.plain(DOCUMENTS[name])
    for path in places(written):
        if len(path) < 2 or path == ("jobs", 0):
            continue
        read = status_of(changed(written, path))
        screen(read, gallery.NOW, retention=True)
        for row in read.jobs[0].checkpoints:
            story_of(read.jobs, row.tag)
        if path[0] == "jobs":
            said = verdict(read.jobs[0], Life()), exit_code(read.jobs, is_alive=True)
            assert said in {(word, 1) for word in ("NOT SAFE", "PAUSED")}, path
            assert "cannot read: nothing counts as safe" in unread(read.jobs[0]), path
            assert read.jobs[1:] == DOCUMENTS[name].jobs[1:]


def test_what_is_safe_stays_so_whatever_the_daemon_says_of_its_memory() -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    written["daemon"]["memory_bytes"] = 3.0
    read = status_of(written)
    assert read.daemon.memory_bytes == 0
    assert (verdict(read.jobs[0], life_of(read, gallery.NOW)), exit_code(read.jobs, is_alive=True)) == (
        "SAFE",
        0,
    )


@pytest.mark.parametrize("odd", [{"pid": None}, {"pid": 0}, {"pid": -1}, {"pid": 10**30}, {"alive": 1}])
def test_no_daemon_watches_that_is_not_named(odd: dict[str, Any]) -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    written["daemon"] |= odd
    read = status_of(written)
    assert verdict(read.jobs[0], life_of(read, gallery.NOW)) == "NOT WATCHED"


@pytest.mark.parametrize("key", ["problems", "paused", "steps_at_risk", "safe", "checkpoints", "state"])
def test_a_job_of_which_part_is_odd_is_not_safe(key: str) -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    written["daemon"]["version"] = "9.9.9"
    written["jobs"][0][key] = 3.5
    (job,) = status_of(written).jobs
    assert headline(job, Life(), gallery.NOW).startswith("NOT SAFE")
    (_, line), (_, hint), *_ = problem_lines(job, gallery.NOW)
    assert f"{key} is a number, which ckptd {__version__} cannot read" in line
    assert "ckptd 9.9.9 wrote it" in hint
    assert judge_step(job, 4000)[0] == "cannot"


def test_a_checkpoint_without_its_place_is_not_here() -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    for odd in ({}, {"local": None}):
        del written["jobs"][0]["checkpoints"][0]["local"]
        written["jobs"][0]["checkpoints"][0] |= odd
        read = status_of(written)
        local = read.jobs[0].checkpoints[0].local
        assert (local.present, local.held, local.universal) == (False, False, "")
        assert bool(unread(read.jobs[0])) == bool(odd)
        screen(read, gallery.NOW, retention=True)
        written["jobs"][0]["checkpoints"][0]["local"] = None


@pytest.mark.parametrize("key", ["generated_at", "daemon", "jobs"])
def test_without_what_every_version_writes_it_is_no_status(key: str) -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    del written[key]
    with pytest.raises(ValueError, match="it is no status of ckptd"):
        status_of(written)
    assert isinstance(status_of(gallery.plain(DOCUMENTS["safe"])), Status)
