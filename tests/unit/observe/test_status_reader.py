"""status.json is read into the records that it is written from, of this version and of others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ckptd.observe.status import Status
from ckptd.observe.status_reader import read_status, status_of
from tests.support import status_gallery as gallery

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
    "change",
    [
        {"jobs": {}},
        {"jobs": [7]},
        {"generated_at": 1},
        {"daemon": []},
        {"daemon": {"pid": "7"}},
        {"daemon": {"alive": 1}},
        {"jobs": [{"checkpoints": [{"remotes": {"s3": {"zero": None}}}]}]},
        {"jobs": [{"opt_outs": [None]}]},
    ],
)
def test_other_types_are_no_status(change: dict[str, Any]) -> None:
    written = gallery.plain(DOCUMENTS["safe"]) | change
    with pytest.raises(ValueError, match="it is no status of ckptd"):
        status_of(written)


@pytest.mark.parametrize("key", ["generated_at", "daemon", "jobs"])
def test_without_what_every_version_writes_it_is_no_status(key: str) -> None:
    written = gallery.plain(DOCUMENTS["safe"])
    del written[key]
    with pytest.raises(ValueError, match="it is no status of ckptd"):
        status_of(written)
    assert isinstance(status_of(gallery.plain(DOCUMENTS["safe"])), Status)
