"""Temporaries in a directory remote bear their writer's id: a daemon removes its own old ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckptd.base import names
from ckptd.storage.child.service import Service
from ckptd.storage.remote.messages import Attach, Attached
from tests.stores.scene import Node

if TYPE_CHECKING:
    from pathlib import Path

    from ckptd.storage.remote.messages import Answer

KILLED = """
import os, sys
from ckptd.storage.stores.directory import DirectoryStore
root, owner, put, event = sys.argv[1:]
sys.addaudithook(lambda name, _: os.kill(os.getpid(), 9) if name == event else None)
getattr(DirectoryStore(root, owner=owner), put)("_ckptd/commits/x.json", b"1")
"""
LONG_AGO = 10**9


def killed(root: Path, owner: str, put: str = "put_if_absent", event: str = "os.link") -> Path:
    """The temporary that a process leaves which is killed before its document has its name."""
    before = set(temporaries(root))
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), owner, put, event], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = set(temporaries(root)) - before
    return left


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob(f"{names.TEMPORARY_PREFIX}*"))


def attach(node: Node, root: Path) -> None:
    """As the daemon does at its start."""
    answers: list[Answer] = []
    Service(lambda _, answer: answers.append(answer)).carry_out(1, Attach(settings=node.settings(root)))
    assert isinstance(answers[-1], Attached), answers


@pytest.mark.parametrize(("put", "event"), [("put_if_absent", "os.link"), ("put", "os.rename")])
def test_a_daemon_removes_its_own_old_ones(tmp_path: Path, put: str, event: str) -> None:
    node, root = Node(tmp_path / "save"), tmp_path / "nas"
    node.save_dir.mkdir()
    attach(node, root)
    old, fresh, others = (
        killed(root, owner, put, event) for owner in (f"id-{node.name}", f"id-{node.name}", "id-n1")
    )
    nobodys = killed(root, "", put, event)
    for path in (old, others, nobodys):
        os.utime(path, (LONG_AGO, LONG_AGO))
    attach(node, root)
    assert temporaries(root) == sorted([fresh, others, nobodys])


def test_another_nodes_document_is_written_all_the_same(tmp_path: Path) -> None:
    """Its temporary lies there, old by the share's clock, while it is about to be given its name."""
    node, root = Node(tmp_path / "save"), tmp_path / "nas"
    node.save_dir.mkdir()
    attach(node, root)
    other = killed(root, "id-n1")
    os.utime(other, (LONG_AGO, LONG_AGO))
    attach(node, root)
    os.link(other, other.with_name("x.json"))
    assert (root / "_ckptd/commits/x.json").read_bytes() == b"1"
