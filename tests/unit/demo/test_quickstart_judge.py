"""The quickstart's judge: accepts a story in which all holds, and names what each change breaks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from examples.demo.checks_remote import everything_came_through
from examples.demo.evidence import load
from examples.demo.judge import main
from examples.demo.promises import PROMISES, judge, promises_for
from tests.support.quickstart_story import TAGS, Story, bucket_story, content, server_line, story

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def broken(root: Path) -> set[str]:
    return {v.text for v in judge(load(root)) if not v.held}


def test_accepts_what_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = story(tmp_path).write()
    assert broken(root) == set()
    assert main([str(root)]) == 0
    verdict = json.loads((root / "verdict.json").read_text())
    assert verdict["ok"]
    assert len(verdict["promises"]) == len(PROMISES)
    assert "every promise held" in capsys.readouterr().out


def test_says_how_to_call_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "usage" in capsys.readouterr().out


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def _no_commit(s: Story) -> None:
    s.audit[0]["commits"] = []


def _unknown_commit(s: Story) -> None:
    s.audit[0]["commits"] = [["_ckptd/commits/x.json", "f" * 64]]


def _commit_too_late(s: Story) -> None:
    for line in s.log:
        if line["kind"] == "seen" and line["key"].endswith("/global_step2~g1~zero.json"):
            line["created"] = line["at"] = 171.0


def _unlisted_file(s: Story) -> None:
    s.audit[1]["files"].append(["extra.pt", 7])


def _silent(s: Story) -> None:
    s.log.append({"at": 150.0, "kind": "vanished", "place": "save", "name": TAGS[3]})


def _object_differed(s: Story) -> None:
    next(x for x in s.log if x["kind"] == "object")["sha256"] = "0" * 64


def _replaced_commit(s: Story) -> None:
    key = s.commits[f"{TAGS[4]}/zero"][0]
    _, digest = s.commits[f"{TAGS[5]}/zero"]
    for line in s.log:
        if line["kind"] == "seen" and line["sha256"] == digest:
            line["key"] = key


def _newest_removed(s: Story) -> None:
    s.remove("prune", TAGS[7], 185.0)


def _pointer(s: Story) -> None:
    s.log.append({"at": 130.0, "kind": "pointer", "name": "latest", "value": "x", "committed": False})


def _no_kill(s: Story) -> None:
    s.records["driver"] = [x for x in s.records["driver"] if x["kind"] != "kill-daemon"]


def _kill_hit_nothing(s: Story) -> None:
    next(x for x in s.records["driver"] if x["kind"] == "kill-daemon")["at"] = 126.0


def _no_tombstone(s: Story) -> None:
    s.log[:] = [x for x in s.log if "/retired/" not in x.get("key", "")]


def _resume_failed(s: Story) -> None:
    next(x for x in s.records["driver"] if x["kind"] == "resume")["exit_code"] = 69


def _resume_elsewhere(s: Story) -> None:
    s.records["train-resumed"][0]["first_step"] = 7


def _loss(s: Story) -> None:
    s.records["train-resumed"][-2]["loss"] += 0.002


def _memory(s: Story) -> None:
    s.line("driver", 207.0, "memory", bytes=5000)


CHANGES: list[tuple[Callable[[Story], None], str]] = [
    (_no_commit, "removed local files"),
    (_unknown_commit, "removed local files"),
    (_commit_too_late, "removed local files"),
    (_unlisted_file, "removed local files"),
    (_silent, "nothing left the node"),
    (_object_differed, "files on the NAS"),
    (_object_differed, "one COMMIT holds"),
    (_replaced_commit, "COMMITs rest on"),
    (_newest_removed, "the newest stayed"),
    (_pointer, "`latest` on the NAS"),
    (_no_kill, "SIGKILL in mid-upload"),
    (_kill_hit_nothing, "SIGKILL in mid-upload"),
    (_no_tombstone, "remote retention"),
    (_resume_failed, "resume took"),
    (_resume_elsewhere, "resume took"),
    (_loss, "losses"),
    (_memory, "daemon and children"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_names_what_a_change_of_the_story_breaks(
    tmp_path: Path, change: Callable[[Story], None], text: str
) -> None:
    s = story(tmp_path)
    change(s)
    assert any(t.startswith(text) for t in broken(s.write()))


def _byte_on_the_nas(root: Path) -> None:
    _flip(root / f"nas/gpt/{TAGS[6]}/rank1.pt")


def _object_missing(root: Path) -> None:
    (root / f"nas/gpt/{TAGS[6]}/rank1.pt").unlink()


def _sent_again(root: Path) -> None:
    path = root / f"nas/gpt/{TAGS[6]}/rank1.pt"
    twin = path.with_suffix(".new")
    twin.write_bytes(path.read_bytes())
    twin.rename(path)


def _derived_byte(root: Path) -> None:
    _flip(root / f"nas/gpt/{TAGS[-1]}_universal/rank0.pt")


def _torn_gone(root: Path) -> None:
    (root / "nvme/gpt/_ckptd/aside/global_step9.1/rank0.pt").unlink()


def _trainer_file_changed(root: Path) -> None:
    _flip(root / f"nvme/gpt/{TAGS[-1]}/rank0.pt")


def _stray(root: Path) -> None:
    (root / "nvme/gpt/ours.tmp").write_text("x")


def _over_the_limit(root: Path) -> None:
    folder = root / f"nvme/gpt/{TAGS[7]}"
    folder.mkdir()
    for rank in range(2):
        (folder / f"rank{rank}.pt").write_bytes(content(TAGS[7], rank))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_byte_on_the_nas, "files on the NAS"),
        (_object_missing, "files on the NAS"),
        (_sent_again, "nothing committed was sent"),
        (_derived_byte, "derived files"),
        (_torn_gone, "the torn save"),
        (_trainer_file_changed, "the trainer's files"),
        (_stray, "the trainer's files"),
        (_over_the_limit, "save_total_limit"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_names_what_a_change_on_disk_breaks(
    tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    root = story(tmp_path).write()
    change(root)
    assert any(t.startswith(text) for t in broken(root))


def test_a_save_that_never_came_through(tmp_path: Path) -> None:
    s = story(tmp_path)
    s.save("resumed", "global_step11", 300.0)
    checked, failures = everything_came_through(load(s.write()))
    assert checked == 3
    assert "global_step11" in failures[0]


def test_nothing_checked_is_not_held(tmp_path: Path) -> None:
    s = story(tmp_path)
    s.audit.clear()
    s.log[:] = [x for x in s.log if x["kind"] != "vanished"]
    found: set[Any] = broken(s.write())
    assert {
        "removed local files: listed by a COMMIT of that moment",
        "the newest stayed at each removal",
    } <= found


def test_accepts_what_holds_in_a_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = bucket_story(tmp_path).write()
    assert broken(root) == set()
    assert main([str(root)]) == 0
    rows = json.loads((root / "verdict.json").read_text())["promises"]
    assert len(rows) == len(promises_for(True)) == len(PROMISES) + 2
    assert all(row["checked"] for row in rows)
    assert "files in the bucket" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_names_the_same_of_a_bucket(tmp_path: Path, change: Callable[[Story], None], text: str) -> None:
    s = bucket_story(tmp_path)
    change(s)
    if change is _commit_too_late:
        _server_says_late(s)
    text = text.replace("on the NAS", "in the bucket")
    assert any(t.startswith(text) for t in broken(s.write()))


def _server_says_late(s: Story) -> None:
    line = next(x for x in s.server if x["path"].endswith("/commits/global_step2~g1~zero.json"))
    line["at"] = 171.0


def _commit_written_twice(s: Story) -> None:
    s.server.append(server_line(280.0, "PUT", s.commits[f"{TAGS[5]}/zero"][0]))


def _commit_that_nobody_saw(s: Story) -> None:
    s.server.append(server_line(280.0, "PUT", "_ckptd/commits/global_step77~g1~zero.json"))


def _object_written_after_its_commit(s: Story) -> None:
    s.server.append(server_line(280.0, "PUT", f"{TAGS[5]}/rank0.pt"))


def _written_while_away(s: Story) -> None:
    s.server.append(server_line(243.0, "PUT", "latest"))
    s.server.sort(key=lambda line: float(line["at"]))


def _nothing_afterwards(s: Story) -> None:
    next(x for x in s.records["driver"] if x["kind"] == "remote-away")["at"] = 250.0


def _no_outage(s: Story) -> None:
    s.records["driver"] = [x for x in s.records["driver"] if x["kind"] != "remote-away"]


def _sent_from_the_start(s: Story) -> None:
    key = f"{TAGS[1]}/rank0.pt"
    for part in range(1, 7):
        s.server.append(server_line(122.5, "PUT", key, partNumber=str(part), uploadId="u"))
        s.server.append(server_line(123.1, "PUT", key, partNumber=str(part), uploadId="v"))
    s.server.sort(key=lambda line: float(line["at"]))


def _eyewitness_blind(s: Story) -> None:
    s.log.append({"at": 150.0, "kind": "blind", "error": "connection refused"})


def _removed_before_its_tombstone(s: Story) -> None:
    line = next(x for x in s.server if x["method"] == "DELETE")
    line["begin"] = 168.5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_commit_written_twice, "COMMITs rest on"),
        (_commit_that_nobody_saw, "COMMITs rest on"),
        (_object_written_after_its_commit, "nothing committed was sent"),
        (_written_while_away, "no way to the bucket"),
        (_nothing_afterwards, "no way to the bucket"),
        (_no_outage, "no way to the bucket"),
        (_sent_from_the_start, "broken off uploads"),
        (_eyewitness_blind, "`latest` in the bucket"),
        (_removed_before_its_tombstone, "remote retention"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_believes_the_server(tmp_path: Path, change: Callable[[Story], None], text: str) -> None:
    s = bucket_story(tmp_path)
    change(s)
    assert {t for t in broken(s.write()) if t.startswith(text)}


def test_the_parts_in_flight_may_come_twice(tmp_path: Path) -> None:
    s = bucket_story(tmp_path)
    for part in range(1, 5):
        s.server.append(server_line(122.5, "PUT", f"{TAGS[1]}/rank0.pt", partNumber=str(part), uploadId="u"))
        s.server.append(server_line(123.1, "PUT", f"{TAGS[1]}/rank0.pt", partNumber=str(part), uploadId="u"))
    s.server.sort(key=lambda line: float(line["at"]))
    assert broken(s.write()) == set()


@pytest.mark.parametrize("folder", [TAGS[6], f"{TAGS[-1]}_universal"])
def test_sees_a_changed_byte_of_a_bucket(tmp_path: Path, folder: str) -> None:
    root = bucket_story(tmp_path).write()
    _flip(root / f"bucket/objects/{folder}/rank0.pt")
    found = broken(root)
    assert len(found) == 1
    assert found.pop().startswith(("files in the bucket", "derived files in the bucket"))


def test_no_remote_is_no_excuse(tmp_path: Path) -> None:
    """Without a server that answers nothing can be compared, so nothing is called held."""
    root = bucket_story(tmp_path).write()
    (root / "bucket").rename(root / "elsewhere")
    assert {"files in the bucket = the trainer's SHA-256", "nothing committed was sent again"} <= broken(root)
