"""Several real daemons over one directory, `shared_fs = true`: nothing is done twice (adr/0110).

Three hosts of one machine: a node name and a state directory each, one save_dir, one remote.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptd.core.policy.leases import share_of
from tests.cluster.harness import Cluster, cluster
from tests.e2e.harness import RUN, Node
from tests.stores import servers
from tests.support.real import prepare, save_dir_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.stores.servers import Server

pytestmark = [pytest.mark.real, pytest.mark.faults]
SECONDS = 200
SLOW = 'forms = ["zero"]\nbandwidth = "100KB/s"'
"""The largest file takes about eight seconds: there is time to die in it."""
ON_S3 = pytest.mark.parametrize(
    "on_s3", [False, pytest.param(True, marks=pytest.mark.full)], ids=["nas", "s3"]
)


@pytest.fixture(scope="module", autouse=True)
def real_saves() -> None:
    """The training, once."""
    prepare([RUN])


class Host(Node):
    """A node whose save_dir and remote are those of all, and whose state is its own."""

    def __init__(self, here: Cluster, name: str, local: str, remote: str, takeover: str) -> None:
        self.name = name
        server = here.server
        place = f'endpoint_url = "{server.endpoint}"' if server is not None else "same_filesystem = true"
        super().__init__(
            here.root,
            job=f'node_name = "{name}"\nshared_fs = true\nshared_takeover = "{takeover}"',
            local=local,
            remote=f"{place}\n{remote}",
            url=here.url,
            environment=servers.environment() if server is not None else {},
        )

    def __post_init__(self) -> None:
        self.environment["STATE_DIRECTORY"] = str(self.root / self.name / "state")
        super().__post_init__()
        self.state = self.root / self.name / "state" / "run"
        self.job_file = self.root / self.name / "run.toml"
        self.log = self.root / self.name / "ckptd.log"
        self.job_file.parent.mkdir(parents=True, exist_ok=True)
        (self.root / "run.toml").unlink(missing_ok=True)
        self.write_job()

    def shared(self) -> dict[str, Any]:
        """What its status says of the shared directory."""
        found: dict[str, Any] = self.status().get("shared") or {}
        return found

    @property
    def holds(self) -> bool:
        """It says that it holds the lease."""
        return bool(self.shared().get("holds_lease"))

    def has_met(self, count: int) -> bool:
        """It knows so many hosts, itself included."""
        return len(self.shared().get("hosts", ())) == count

    def knows_committed(self, step: int) -> bool:
        """It has heard that the save of that step is committed."""
        return bool(self.checkpoint(f"global_step{step}")["state"] == "committed")


class Hosts:
    """All of them; `here`: their remote."""

    def __init__(self, here: Cluster, count: int, local: str, remote: str, takeover: str) -> None:
        self.here = here
        self.all = [Host(here, f"host-{n}", local, remote, takeover) for n in range(count)]
        self.first = self.all[0]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.all)

    def start(self) -> None:
        """Start them and wait until each knows of the others, and who holds the lease."""
        for host in self:
            host.start()

    def wait_met(self) -> Host:
        """Until every host knows all others and whose the lease is; the holder."""
        for host in self:
            host.wait("to meet", partial(host.has_met, len(self.all)), SECONDS)
        self.first.wait("the lease", lambda: sum(h.holds for h in self) == 1, SECONDS)
        return next(host for host in self if host.holds)

    def wait(self, what: str, done: Callable[[], object]) -> None:
        self.first.wait(what, done, SECONDS)

    def manifests(self, tag: str) -> dict[str, list[str]]:
        """Node → keys that its manifests of a tag's first generation list."""
        found: dict[str, list[str]] = {}
        for document in self.here.documents(f"nodes/{tag}~g1~zero").values():
            found.setdefault(document["node"], []).extend(f["key"] for f in document["files"])
        return found

    def audit(self, action: str) -> Counter[str]:
        """Tag → audit lines of that action, on all hosts together."""
        return Counter(line["tag"] for host in self for line in host.audit(action))

    def has_committed(self, key: str) -> bool:
        return key in self.here.commits()

    def save(self, step: int) -> str:
        """A save, until it is committed; each of its files was sent by one host alone."""
        tag = self.first.save(step)
        self.wait(f"the COMMIT of {tag}", partial(self.has_committed, f"{tag}~g1"))
        each_file_once(self, tag)
        return tag


@contextlib.contextmanager
def hosts(
    root: Path, server: Server | None, count: int, *, local: str, remote: str, takeover: str
) -> Iterator[Hosts]:
    """Hosts whose processes end with the test."""
    with cluster(root, server) as here:
        found = Hosts(here, count, local, remote, takeover)
        try:
            yield found
        finally:
            for host in found:
                for process in host.processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGCONT)
                host.end()


def each_file_once(found: Hosts, tag: str) -> None:
    """Every file of the save is listed by exactly one host, and lies in the remote as it was saved."""
    by_host = found.manifests(tag)
    listed = Counter(key for keys in by_host.values() for key in keys)
    step = int(tag.removeprefix("global_step"))
    assert set(listed.values()) == {1}, listed
    folder = {f"{tag}/{path.name}" for path in (found.first.save_dir / tag).iterdir()}
    assert folder <= set(listed)
    for path in (save_dir_of(RUN) / f"global_step{step}").iterdir():
        assert found.here.read_bytes(f"{tag}/{path.name}") == path.read_bytes()


@ON_S3
def test_three_hosts_share_the_work_and_delete_and_convert_once(
    tmp_path: Path, moto: Server, on_s3: bool
) -> None:
    with hosts(
        tmp_path,
        moto if on_s3 else None,
        3,
        local='save_total_limit = 2\nforms = ["universal"]',
        remote='forms = ["zero", "universal"]\nsave_total_limit = 3',
        takeover="60s",
    ) as found:
        found.start()
        holder = found.wait_met()
        for step in range(1, 6):
            found.save(step)
        found.wait("local retention", lambda: len(found.first.local_tags()) == 2)
        found.wait("remote retention", lambda: len(found.here.commits()) == 3)
        universal = "global_step5~g1~universal.json"
        found.wait("the universal form", lambda: universal in found.here.documents("commits"))
        for host in found:
            host.wait("all safe", partial(host.knows_committed, 5), SECONDS)
            assert host.audit("prune") == [] or host is holder
            assert not host.problems() & {"vanished-uncommitted", "save-dir-shared", "retire-blocked"}
        assert found.audit("prune") == Counter({"global_step1": 1, "global_step2": 1, "global_step3": 1})
        assert {host.name for host in found if host.audit("retire")} == {holder.name}
        converted = [host.name for host in found if "has its universal form" in host.log.read_text()]
        assert converted == [holder.name]
        assert len(found.here.documents("shared/lease")) == 1


@pytest.mark.full
@ON_S3
def test_a_holder_that_is_stopped_or_killed_is_replaced_and_does_nothing_late(
    tmp_path: Path, moto: Server, on_s3: bool
) -> None:
    """SIGSTOP the holder, let another delete in its place, wake it; then SIGKILL that one while it sends."""
    server, local = moto if on_s3 else None, "save_total_limit = 1\nforms = []"
    with hosts(tmp_path, server, 3, local=local, remote=SLOW, takeover="15s") as found:
        found.start()
        stopped = found.wait_met()
        found.save(1)
        found.wait("it to hear", partial(stopped.knows_committed, 1))
        stopped.processes[-1].send_signal(signal.SIGSTOP)
        others = [host for host in found if host is not stopped]
        found.wait("another lease", lambda: any(host.holds for host in others))
        heir = next(host for host in others if host.holds)
        found.save(2)
        heir.wait("its retention", lambda: found.first.local_tags() == {"global_step2"}, SECONDS)
        stopped.processes[-1].send_signal(signal.SIGCONT)
        stopped.wait("it hears of it", lambda: stopped.shared()["holder"] == heir.name, SECONDS)
        stopped.wait("it to hear", partial(stopped.knows_committed, 2), SECONDS)
        assert not stopped.holds
        assert stopped.audit("prune") == []

        found.wait_met()
        step = next(s for s in range(3, 9) if falls_to(heir, found, s))
        tag = found.first.save(step)
        heir.wait("it sends", lambda: heir.checkpoint(tag)["state"] == "uploading", SECONDS)
        assert not found.has_committed(f"{tag}~g1")
        heir.kill()
        found.wait("the COMMIT without it", partial(found.has_committed, f"{tag}~g1"))
        assert heir.name not in found.manifests(tag)
        each_file_once(found, tag)
        found.wait("a third lease", lambda: any(h.holds for h in found if h is not heir))
        found.wait("its retention", lambda: found.first.local_tags() == {tag})
        assert found.audit("prune") == Counter({"global_step1": 1, "global_step2": 1})
        assert len(found.here.commits()) == 3


def falls_to(host: Host, found: Hosts, step: int) -> bool:
    """Whether a file of that save is that host's to send."""
    names = [path.name for path in (save_dir_of(RUN) / f"global_step{step}").iterdir()]
    return bool(share_of(f"global_step{step}", names, [one.name for one in found], host.name))
