"""A job over several nodes: a real daemon and a disk of its own for each, and one remote for all.

Trainers are replayed from real DeepSpeed saves of that many nodes (runs.py): a node gets its ranks' files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster import runs
from tests.e2e.harness import PATIENCE_SECONDS, Node
from tests.e2e.s3_node import PREFIX
from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = Path(__file__).with_name("short.py")


@dataclass
class ClusterNode(Node):
    """A node whose remote is the cluster's."""

    name: str = ""
    shared: str = ""
    """The directory remote of all nodes; else `url` at `endpoint`."""
    endpoint: str = ""
    step_in_seconds: float | None = None
    prefix: tuple[str, ...] = ()
    """What the daemon is started by: `ip netns exec …`."""

    def write_job(self, **changes: str) -> None:
        for key, value in changes.items():
            setattr(self, key, value)
        place = f'url = "{self.shared}"\nsame_filesystem = true'
        if self.url:
            place = f'url = "{self.url}"\nendpoint_url = "{self.endpoint}"'
        self.job_file.write_text(
            f'save_dir = "{self.save_dir}"\nname = "run"\nsettle = "0.5s"\n'
            f'node_name = "{self.name}"\n{self.job}\n'
            f"[local]\n{self.local}\n"
            f'[[remote]]\nname = "nas"\n{place}\n{self.remote}\n'
        )

    def start(self, *options: str, seconds: float = PATIENCE_SECONDS) -> subprocess.Popen[bytes]:
        """Start a daemon and wait until it watches."""
        module = ["-m", "ckptd"] if self.step_in_seconds is None else [str(SHORT), str(self.step_in_seconds)]
        with self.log.open("ab") as log:
            mark = log.tell()
            process = subprocess.Popen(
                [*self.prefix, sys.executable, *module, "run", "--job", str(self.job_file), *options],
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
            )
        self.processes.append(process)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            if b"watching" in self.log.read_bytes()[mark:]:
                break
            time.sleep(0.05)
        return process

    def write(self, run: runs.Run, number: int, step: int, *, tag: str = "", only: str = "") -> str:
        """What node `number` of a run saved at `step`; with `only` the files with that in their names."""
        source = run.save_dir(number) / f"global_step{step}"
        tag = tag or source.name
        folder = self.save_dir / tag
        folder.mkdir(exist_ok=True)
        for path in sorted(source.iterdir(), key=lambda p: ("optim" in p.name, p.name)):
            if only in path.name:
                shutil.copyfile(path, folder / path.name)
        if number == 0:
            (self.save_dir / "latest").write_text(tag)
        return tag


@dataclass
class Cluster:
    """Nodes by name, on one remote."""

    root: Path
    server: servers.Server | None = None
    nodes: dict[str, ClusterNode] = field(default_factory=dict)

    @property
    def nas(self) -> Path:
        """The directory remote."""
        return self.root / "nas"

    @property
    def url(self) -> str:
        """Of the remote, as a command takes it."""
        return str(self.nas) if self.server is None else f"s3://{servers.BUCKET}/{PREFIX}"

    def add(self, name: str, **more: Any) -> ClusterNode:
        """A node that is not started yet."""
        given: dict[str, Any] = {"shared": str(self.nas), "name": name} | more
        if self.server is not None:
            at = {"url": self.url, "endpoint": self.server.endpoint}
            given |= at | {"environment": servers.environment()}
        self.nas.mkdir(exist_ok=True)
        node = ClusterNode(self.root / name, **given)
        self.nodes[name] = node
        return node

    def documents(self, folder: str) -> dict[str, dict[str, Any]]:
        """Every JSON below `_ckptd/<folder>/`, straight from the remote."""
        found: dict[str, dict[str, Any]] = {}
        if self.server is None:
            base = self.nas / "_ckptd" / folder
            for path in sorted(base.rglob("*.json")) if base.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):
                    found[str(path.relative_to(base))] = json.loads(path.read_bytes())
            return found
        client = self.server.client()
        prefix = f"{PREFIX}/_ckptd/{folder}/"
        listed = client.list_objects_v2(Bucket=servers.BUCKET, Prefix=prefix)
        for entry in listed.get("Contents", ()):
            body = client.get_object(Bucket=servers.BUCKET, Key=entry["Key"])["Body"].read()
            found[entry["Key"].removeprefix(prefix)] = json.loads(body)
        return found

    def objects(self, prefix: str) -> list[str]:
        """Keys of whole objects that begin so; what a directory keeps of half an upload is none."""
        if self.server is None:
            # os.walk passes over what is swept under it
            files = (Path(root, name) for root, _, names in os.walk(self.nas) for name in names)
            below = sorted(str(path.relative_to(self.nas)) for path in files)
            return [key for key in below if key.startswith(prefix) and "/.ckptd-part-" not in f"/{key}"]
        pages = self.server.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=servers.BUCKET, Prefix=f"{PREFIX}/{prefix}")
        rows = (entry for page in found for entry in page.get("Contents", ()))
        return [entry["Key"].removeprefix(f"{PREFIX}/") for entry in rows]

    def contents(self, folder: str) -> dict[str, bytes]:
        """Every object below a folder."""
        keys = self.objects(f"{folder}/")
        return {key.removeprefix(f"{folder}/"): self.read_bytes(key) for key in keys}

    def read(self, key: str) -> str:
        """A small object."""
        return self.read_bytes(key).decode()

    def read_bytes(self, key: str) -> bytes:
        """An object."""
        if self.server is None:
            return (self.nas / key).read_bytes()
        answer = self.server.client().get_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{key}")
        return bytes(answer["Body"].read())

    def write_bytes(self, key: str, data: bytes) -> None:
        """Something else under a key, behind ckptd's back."""
        if self.server is None:
            (self.nas / key).write_bytes(data)
        else:
            self.server.client().put_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{key}", Body=data)

    def commits(self) -> dict[str, dict[str, Any]]:
        """`<tag>~g<n>` → COMMIT of the ZeRO form."""
        return {
            name.removesuffix("~zero.json"): document
            for name, document in self.documents("commits").items()
            if name.endswith("~zero.json")
        }

    def manifests(self, tag: str, generation: int = 1) -> dict[str, dict[str, Any]]:
        """Node → newest manifest."""
        newest: dict[str, dict[str, Any]] = {}
        for name, document in self.documents("nodes").items():
            if name.startswith(f"{tag}~g{generation}~zero/"):
                held = newest.get(document["node"])
                if held is None or held["revision"] < document["revision"]:
                    newest[document["node"]] = document
        return newest

    def wait(self, what: str, done: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Until `done`; every node's log is in the failure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(KeyError, IndexError, json.JSONDecodeError):
                if done():
                    return
            time.sleep(0.1)
        told = "\n".join(
            f"--- {name}\n{node.log.read_text()[-2500:] if node.log.exists() else ''}\n"
            f"{json.dumps(node.status().get('problems', []))}"
            for name, node in self.nodes.items()
        )
        raise AssertionError(f"waited {seconds} s for {what}; commits {sorted(self.commits())}\n{told}")

    def wait_committed(self, key: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until `<tag>~g<n>` is committed."""
        self.wait(f"the COMMIT {key}", lambda: key in self.commits(), seconds)

    def wait_told(self, key: str, *names: str) -> None:
        """Until the nodes know of it."""
        tag = key.partition("~")[0]
        for name in names or tuple(self.nodes):
            node = self.nodes[name]
            self.wait(f"{name} to hear of {key}", lambda n=node: n.checkpoint(tag)["state"] == "committed")  # type: ignore[misc]


@contextlib.contextmanager
def cluster(root: Path, server: servers.Server | None = None) -> Iterator[Cluster]:
    """A cluster whose processes end with the test; its bucket is emptied first."""
    here = Cluster(root, server)
    if server is not None:
        for key in here.objects(""):
            server.client().delete_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{key}")
    try:
        yield here
    finally:
        for node in here.nodes.values():
            node.end()
