"""Make the tasks of one attempt, a handful at a time: a plan of terabytes is never all in memory.

An upload that several workers share is begun here, and noted, before the first task that sends parts of it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice
from typing import IO, TYPE_CHECKING

from ckptd.conversion.cluster.grouping import ANYWHERE, CutLayout, parts_of, tasks_of
from ckptd.conversion.cluster.messages import OutputProof, Task, TaskSource, UploadPiece
from ckptd.conversion.cluster.uploader import held_for, shares_uploads, upload_of
from ckptd.conversion.parts import ranges_of
from ckptd.errors import TargetExists
from ckptd.storage.stores.s3.uploads import part_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptd.conversion.cluster.destination import AttemptLog
    from ckptd.conversion.cluster.grouping import Home, Index, PlanLine, TaskOutput
    from ckptd.conversion.cluster.messages import ClusterJob
    from ckptd.conversion.parts import Part
    from ckptd.storage.stores.base import Store
    from ckptd.storage.stores.s3.parts import PartLayout

MIB = 1 << 20
LEAST_TASK_BYTES = 16 * MIB
MOST_TASK_BYTES = 256 * MIB
TASKS_PER_THREAD = 16
_PROOFS = 64


class TaskBuilder:
    """Makes tasks. `stream`: the plan; `known`: its sources by number; `holders`: who has which."""

    def __init__(
        self,
        job: ClusterJob,
        store: Store,
        note: AttemptLog,
        stream: IO[bytes],
        index: Index,
        known: Mapping[int, TaskSource],
        holders: Mapping[int, Home],
    ) -> None:
        self._job = job
        self._store = store
        self._note = note
        self._stream = stream
        self._index = index
        self._known = known
        self._holders = holders
        self._copies = True
        """Whether the server may copy parts: not once an output came to other bytes."""
        self.numbers = count(1)
        """Numbers of the tasks, one each."""

    def making(
        self, missing: dict[str, list[int]], there: Mapping[str, int], *, threads: int, verify: bool
    ) -> dict[Home, Iterator[list[Task]]]:
        """Tasks in handfuls, by whose they are.

        `missing`: parts that lack of open uploads; `there`: what lies at the end.
        """
        known = self._note.progress
        task_bytes = self._index.trailer.bytes // (TASKS_PER_THREAD * max(1, threads))
        task_bytes = max(LEAST_TASK_BYTES, min(MOST_TASK_BYTES, task_bytes))
        found = tasks_of(self._index, set(known.done), self._layout(), task_bytes=task_bytes, missing=missing)
        first = self._proving_sources() if verify and self._job.source_root else []
        if not self._holders:
            return {ANYWHERE: self._handfuls((batch for _, batch in found), first, there, threads)}
        # whose the last batch is nobody knows before all are made: lists of names, not of lines
        homes: dict[Home, list[list[TaskOutput]]] = {}
        for home, batch in found:
            homes.setdefault(home, []).append(batch)
        return {home: self._handfuls(iter(own), [], there, threads) for home, own in homes.items()}

    def remaking(self, path: str) -> list[Task]:
        """Return tasks that send one output anew; no task made from now on has parts copied."""
        self._copies = False
        item = next(item for item in self._index.items if path in item.names)
        alone = replace(self._index, items=[replace(item, names=(path,))], together=[0])
        found = tasks_of(alone, set(), self._layout(), task_bytes=MOST_TASK_BYTES, missing={})
        return [task for some in self._handfuls((one for _, one in found), [], {}, 1) for task in some]

    def _layout(self) -> CutLayout:
        store = shares_uploads(self._store)
        if store is None:
            return CutLayout(None, self._parts_of, self._holders)
        wanted, sizes = (
            store.access.part_size_bytes,
            {n: i.nbytes for i in self._index.items for n in i.names},
        )
        begun = {name: upload_of(t, sizes[name]).cuts for name, t in self._note.progress.uploads.items()}
        held = held_for(self._job, store, self._known) if self._copies else None
        return CutLayout(lambda nbytes: part_size(nbytes, wanted), self._parts_of, self._holders, begun, held)

    def _parts_of(self, item: PlanLine) -> tuple[Part, ...]:
        return parts_of(self._line(item))

    def _line(self, item: PlanLine) -> str:
        self._stream.seek(item.offset)
        return self._stream.read(item.line_bytes).decode()

    def _proving_sources(self) -> list[Task]:
        return [
            Task(number=next(self.numbers), sources=(source,), crc32s=(source.number,), nbytes=source.bytes)
            for source in self._known.values()
        ]

    def _handfuls(
        self, batches: Iterator[list[TaskOutput]], first: list[Task], there: Mapping[str, int], threads: int
    ) -> Iterator[list[Task]]:
        if first:
            yield first
        while some := list(islice(batches, max(1, threads))):
            self._begin_uploads({w.name: w.cuts for batch in some for w in batch if w.cuts is not None})
            yield [self._task_of(batch, there) for batch in some]

    def _begin_uploads(self, wanted: dict[str, PartLayout]) -> None:
        store, known = shares_uploads(self._store), self._note.progress.uploads
        new = {name: cuts for name, cuts in wanted.items() if name not in known}
        if store is None or not new:
            return

        def begin(name: str) -> str:
            key = f"{self._job.target_name}/{name}"
            try:
                return store.uploads.begin_shared(key, new[name]).token
            except TargetExists:
                # a joined upload that was killed before it was noted
                store.delete(key)
                return store.uploads.begin_shared(key, new[name]).token

        with ThreadPoolExecutor(8, thread_name_prefix="begin") as pool:
            known.update(zip(new, pool.map(begin, new), strict=True))
        self._note.write(force=True)

    def _task_of(self, batch: list[TaskOutput], there: Mapping[str, int]) -> Task:
        checks, pieces, used = [], [], set()
        for one in batch:
            line = self._line(one.item)
            used |= {r.source for part in parts_of(line) for r in ranges_of(part)}
            if not one.name:
                checks.append(line)
                continue
            token = self._note.progress.uploads[one.name] if one.parts else ""
            numbers = tuple(range(one.parts[0], one.parts[0] + one.parts[1])) if one.parts else ()
            is_there = there.get(one.name) == one.item.nbytes
            pieces.append(
                UploadPiece(
                    path=one.name,
                    nbytes=one.item.nbytes,
                    line=line,
                    token=token,
                    parts=numbers,
                    is_there=is_there,
                )
            )
        sources = tuple(self._known[number] for number in sorted(used))
        nbytes = sum(one.item.nbytes for one in batch)
        return Task(
            number=next(self.numbers),
            sources=sources,
            checks=tuple(checks),
            pieces=tuple(pieces),
            copies=self._copies,
            nbytes=nbytes,
        )

    def proving(self, sizes: Mapping[str, int]) -> Iterator[list[Task]]:
        """Every output is read back from where it is."""
        done = self._note.progress.done
        proofs = [OutputProof(path=p, nbytes=n, crc64=done[p]) for p, n in sizes.items()]
        for first in range(0, len(proofs), _PROOFS):
            yield [Task(number=next(self.numbers), proofs=tuple(proofs[first : first + _PROOFS]))]
