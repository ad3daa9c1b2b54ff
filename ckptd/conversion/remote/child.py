"""Run `python -m ckptd.conversion.remote.child`: make the files of a plan from or in a remote.

It is the executor of `ckptd.conversion.engine.executor_child` with other ends: ranges come out of a store
(`RemoteRanges`), or outputs go into one (`Uploader`), or both. It holds network and credentials, and never
unpickles. Request, progress and the last error are those of the executor; `Endpoints` says what is added.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.conversion.engine.executor import StoppedByParent
from ckptd.conversion.engine.executor_child import Execution, Request, serve
from ckptd.conversion.plan import OutputLink, PlanReader
from ckptd.conversion.remote.reader import RemoteRanges
from ckptd.conversion.remote.source import RemoteFile
from ckptd.conversion.remote.uploader import HeldSources, Target, Uploader, held_sources
from ckptd.errors import CkptdError, SourceChanged
from ckptd.storage.child.apart import open_apart
from ckptd.storage.stores.access import Access

if TYPE_CHECKING:
    import threading

    from ckptd.conversion.engine.executor import Maker
    from ckptd.conversion.reader import Ranges

CACHE_BYTES = 8 << 20
WINDOW_BYTES = 8 << 20
"""Bytes that a directory or an SFTP server gets between two flushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Name the source and the target of a conversion; an empty URL: this machine."""

    source_url: str = ""
    source_access: dict[str, Any]
    source_files: list[dict[str, Any]]
    """`RemoteFile`s: by path, those of the plan among them."""
    prove: bool = False
    """Compare every source with its manifest, whatever of it was needed."""
    target_url: str = ""
    target_access: dict[str, Any]
    target_name: str = ""
    pointer: str | None = None
    """Pointer file beside the target that names it in the end."""


class RangedExecution(Execution):
    """See the module's first lines."""

    def __init__(
        self, request: Request, ends: Endpoints, work_fd: int, source_fd: int, stop: threading.Event
    ) -> None:
        super().__init__(request, work_fd, source_fd, stop)
        self.ends = ends
        self.remote: RemoteRanges | None = None
        self.target: Target | None = None
        self.held: HeldSources | None = None
        self.links: dict[str, tuple[str, ...]] = {}
        if ends.target_url:
            access = Access(**ends.target_access)
            url, owner = ends.target_url, _owner(ends.target_name)
            store = open_apart(url, url, access, owner=owner, window_bytes=WINDOW_BYTES)
            modes = request.file_mode, request.folder_mode
            self.target = Target(store, ends.target_name, mode=modes[0], folder_mode=modes[1])

    def run(self) -> None:
        """Run the executor; a target that stays unfinished is emptied again, unless it was stopped."""
        if self.target is None:
            super().run()
            return
        digest = self._look_through_plan()
        self.target.begin(digest)
        try:
            super().run()
        except StoppedByParent:
            raise
        except (CkptdError, OSError):
            self.target.give_up()
            raise

    def _look_through_plan(self) -> str:
        """Digest of the plan; second names of outputs are noted: an object has one name alone."""
        with open(os.open("plan.jsonl", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.work_fd), "rb") as stream:
            plan = PlanReader(stream)
            for output in plan:
                if isinstance(output, OutputLink):
                    self.links[output.target] = (*self.links.get(output.target, ()), output.path)
        assert plan.trailer is not None
        return plan.trailer.sha256

    def open_sources(self, plan: PlanReader) -> Ranges:
        """Return the objects that the plan's names stand for."""
        if not self.ends.source_url:
            return super().open_sources(plan)
        known = {f.path: f for f in (RemoteFile(**raw) for raw in self.ends.source_files)}
        allowed = set(self.request.files)
        for source in plan.header.sources:
            if source.path not in allowed or source.path not in known:
                raise SourceChanged(f"the plan names {source.path}, which was not listed")
        url, access = self.ends.source_url, Access(**self.ends.source_access)
        store = open_apart(url, url, access)
        wanted = [known[source.path] for source in plan.header.sources]
        target = self.ends.target_url, Access(**self.ends.target_access)
        self.held = held_sources((url, access), target, {n: file.key for n, file in enumerate(wanted)})
        self.remote = RemoteRanges(store, wanted, cache_bytes=CACHE_BYTES, check_stop=self.check_stop)
        return self.remote

    def verify_outputs(self, plan: PlanReader) -> None:
        """An upload was verified when it ended."""
        if self.target is None:
            super().verify_outputs(plan)

    def recheck_sources(self, plan: PlanReader) -> None:
        """Objects are as they were, and what was read of them is what was committed."""
        if self.remote is None:
            super().recheck_sources(plan)
            return
        # outputs that an earlier attempt left here are of bytes that nobody compared
        is_gone_on_with = self.target is None and self.counters.resumed > 0
        self.remote.recheck()
        self.remote.prove(everything=self.ends.prove or is_gone_on_with)

    def worker(self, number: int) -> Maker:
        """One thread's worker."""
        if self.target is None:
            return super().worker(number)
        return Uploader(self.target, self.sources, self.links, self.counters, self.check_stop, self.held)

    def name_again(self, link: OutputLink) -> None:
        """Make the second name in a folder; a store got it together with its target."""
        if self.target is None:
            super().name_again(link)

    def finish(self, description: bytes) -> None:
        """Publish."""
        if self.target is None:
            super().finish(description)
        else:
            self.target.publish(description, pointer=self.ends.pointer)


def _owner(name: str) -> str:
    return f"convert-{name}"


def main() -> int:
    """Serve one request."""
    raw = json.loads(sys.stdin.buffer.read())
    ends = Endpoints(**raw.pop("ends"))
    return serve(
        Request(**raw),
        lambda request, work_fd, source_fd, stop: RangedExecution(request, ends, work_fd, source_fd, stop),
    )


if __name__ == "__main__":
    sys.exit(main())
