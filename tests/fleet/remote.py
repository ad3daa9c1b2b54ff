"""The one remote of a fleet: objects without bytes, strongly consistent; each request counts and takes time.

What is stored of a shard is a line that says which save wrote it. Answers may get lost after the deed, the
last request of a process that dies may still arrive, and a request may be delivered twice.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import may_cover, name_in
from ckptd.errors import RemoteUnreachable, TargetExists, VerifyError
from ckptd.storage.stores.base import ObjectInfo
from ckptd.storage.stores.checksums import crc64
from tests.fleet.engine import Killed
from tests.fleet.nap import Asked
from tests.stores.offers import OffersNothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from tests.fleet.engine import Program

PAGE = 1000
"""Keys that one request of a listing gives."""
_POINTERS = ("latest", "latest_universal")
_DOCUMENTS = (
    "_ckptd",
    *(f"_ckptd/{name}" for name in ("commits", "retired", "disputes", "decisions", "pins")),
)
LATE_SECONDS = 30.0
"""How long after its sender's death a request may arrive, and how long after its answer a second time."""
_REPEATED = ("create", "upload", "put")
"""What a network may deliver twice: a removal that comes late hits what a successor sent."""


@dataclass
class Remote:
    """What lies there, by folder; `on_change(verb, key, before, after)` hears of each change after it."""

    folders: dict[str, dict[str, bytes]] = field(default_factory=dict)
    on_change: Callable[[str, str, bytes | None, bytes | None], None] = lambda *_: None
    changes: int = 0
    is_late: bool = False
    """What changes now was asked for a while ago, by somebody who may have done other things since."""
    version: int = 0
    """Changes of anything that an observation tells."""
    _manifests: int = 0
    _whole: dict[str, bool] = field(default_factory=dict)
    _listed: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    _below: dict[str, tuple[int, list[ObjectInfo]]] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)

    def get(self, key: str) -> bytes | None:
        """The object, or None."""
        return self.folders.get(key.rpartition("/")[0], {}).get(key)

    def put(self, verb: str, key: str, data: bytes | None) -> None:
        """Create, replace or (None) remove an object."""
        name = key.rpartition("/")[0]
        folder = self.folders.setdefault(name, {})
        before = folder.pop(key, None)
        if data is not None:
            folder[key] = data
            self._times[key] = self.changes + 1
        elif not folder:
            del self.folders[name]
        self.changes += 1
        self.version += self._is_seen(key, name, (data is not None) - (before is not None), len(folder))
        self._listed.pop(name, None)
        self.on_change(verb, key, before, data)

    def _is_seen(self, key: str, name: str, more: int, left: int) -> bool:
        """Whether an observation differs by this change: of manifests it tells only where there are some."""
        if not name.startswith("_ckptd/nodes/"):
            return key in _POINTERS or name in _DOCUMENTS
        pages, self._manifests = -(-self._manifests // PAGE), self._manifests + more
        is_first_or_last = (more > 0 and left == 1) or left == 0
        is_other = self._is_otherwise_whole(name)
        return is_other or is_first_or_last or pages != -(-self._manifests // PAGE)

    def _is_otherwise_whole(self, name: str) -> bool:
        """Whether all parts of what is not committed are listed, and were not, or the other way round."""
        stem = name.rpartition("/")[2]
        if any(self.get(f"_ckptd/{kind}/{stem}.json") is not None for kind in ("commits", "retired")):
            return False
        names = (name_in(key) for key in self.folders.get(name, ()))
        is_whole = may_cover([one for one in names if one is not None])
        was_whole, self._whole[name] = self._whole.get(name, False), is_whole
        return is_whole != was_whole

    def listing(self, prefix: str) -> list[ObjectInfo]:
        """Everything below a folder."""
        name = prefix.rstrip("/")
        if name not in ("_ckptd", "_ckptd/nodes", "_ckptd/leases"):
            return self._of(name)
        known = self._below.get(name)
        if known is None or known[0] != self.changes:
            below = sorted(folder for folder in self.folders if f"{folder}/".startswith(prefix))
            known = self._below[name] = (self.changes, [info for one in below for info in self._of(one)])
        return known[1]

    def _of(self, name: str) -> list[ObjectInfo]:
        found = self._listed.get(name)
        if found is None:
            rows = sorted(self.folders.get(name, {}).items())
            found = [ObjectInfo(key=k, bytes=len(v), mtime_ns=self._times[k]) for k, v in rows]
            self._listed[name] = found
        return found


@dataclass
class Network:
    """How requests fare; chances are per request."""

    latency_seconds: float = 0.02
    jitter: float = 0.0
    lost: float = 0.0
    """The deed is done, its answer does not come."""
    refused: float = 0.0
    late: float = 0.5
    """Of a process that dies while it waits: its request was under way."""
    twice: float = 0.0
    """A write that was answered is delivered again, a while later."""


class FleetStore(OffersNothing):
    """The store verbs as one node's process has them."""

    url = "memory:"
    lanes = 1

    def __init__(self, remote: Remote, network: Network, chance: Random, counts: Counter[str]) -> None:
        self.program: Program | None = None
        self.remote = remote
        self._network = network
        self._chance = chance
        self._counts = counts
        self.log: list[Asked] = []
        """What was read since the log was emptied."""
        self.ahead: deque[Asked] = deque()
        """Requests that were answered already (after a nap)."""
        self.due: float | None = None
        """When the answer comes of the one that is under way."""

    def delay_seconds(self, verb: str, requests: int) -> float:
        """How long the answer of a request takes that is asked now."""
        network = self._network
        self._counts[verb] += requests
        seconds = network.latency_seconds * requests
        return seconds * (1 + network.jitter * self._chance.random()) if network.jitter else seconds

    def is_refused(self) -> bool:
        """Whether the request that is under way gets no answer."""
        return bool(self._network.refused) and self._chance.random() < self._network.refused

    def _ask(self, verb: str, deed: Callable[[], None] | None = None, requests: int = 1) -> None:
        """Wait for the answer of a request, whose deed is done meanwhile."""
        network, chance = self._network, self._chance
        assert self.program is not None
        when, self.due = self.due, None
        if when is None:
            when = self.program.engine.now + self.delay_seconds(verb, requests)
        try:
            self.program.wait_until(when)
        except Killed:
            # a removal that comes late may hit what a successor sent: no order survives that
            if deed is not None and verb in ("create", "upload") and chance.random() < network.late:
                self._deliver_later(deed)
            raise
        if self.is_refused():
            raise RemoteUnreachable("no answer")
        if deed is not None:
            deed()
            if network.twice and verb in _REPEATED and chance.random() < network.twice:
                self._deliver_later(deed)
            if network.lost and chance.random() < network.lost:
                raise RemoteUnreachable("the answer was lost")

    def _deliver_later(self, deed: Callable[[], None]) -> None:
        assert self.program is not None
        engine = self.program.engine

        def deliver() -> None:
            self.remote.is_late = True
            deed()
            self.remote.is_late = False

        engine.at(engine.now + self._chance.random() * LATE_SECONDS, deliver)

    def get(self, key: str) -> bytes | None:
        if self.ahead:
            return self._again("get", key).found
        self._ask("get")
        self.log.append(Asked("get", key, 1, found=self.remote.get(key)))
        return self.log[-1].found

    def put(self, key: str, data: bytes) -> None:
        self._ask("put", lambda: self.remote.put("put", key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        made: list[bool] = []

        def deed() -> None:
            made.append(self.remote.get(key) is None)
            if made[-1]:
                self.remote.put("create", key, data)

        self._ask("create", deed)
        return made[-1]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.ahead:
            return iter(self._again("list", prefix).listed)
        requests = max(1, -(-len(self.remote.listing(prefix)) // PAGE))
        self._ask("list", requests=requests)
        self.log.append(Asked("list", prefix, requests, listed=self.remote.listing(prefix)))
        return iter(self.log[-1].listed)

    def _again(self, verb: str, key: str) -> Asked:
        asked = self.ahead.popleft()
        assert (asked.verb, asked.key) == (verb, key), f"{verb} {key} after a nap, {asked} before it"
        return asked

    def stat(self, key: str) -> ObjectInfo | None:
        self._ask("stat")
        data = self.remote.get(key)
        return None if data is None else ObjectInfo(key=key, bytes=len(data))

    def stream(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        yield (self.get(key) or b"")[offset : offset + length]

    def delete(self, key: str) -> None:
        def deed() -> None:
            if self.remote.get(key) is not None:
                self.remote.put("delete", key, None)

        self._ask("delete", deed)

    def discard(self, key: str, token: str = "") -> None:
        """Nothing is left half done here."""

    def free_bytes(self) -> int | None:
        return None

    def upload(self, key: str, source: object, **_: object) -> int:
        """What the source holds when it is read, in one request."""
        size = source.size_bytes  # type: ignore[attr-defined]
        buffer = memoryview(bytearray(size))
        data = bytes(buffer[: source.read_into(0, buffer)])  # type: ignore[attr-defined]
        taken: list[bool] = []

        def deed() -> None:
            taken.append(self.remote.get(key) is not None)
            if not taken[-1]:
                self.remote.put("upload", key, data)

        self._ask("upload", deed)
        if taken[-1]:
            raise TargetExists(f"{key} appeared")
        return crc64(data)

    def verify(self, key: str, size_bytes: int, crc: int, _: object) -> str:
        self._ask("stat")
        data = self.remote.get(key) or b""
        if (len(data), crc64(data)) != (size_bytes, crc):
            raise VerifyError(f"{key} differs")
        return "store-checksum"
