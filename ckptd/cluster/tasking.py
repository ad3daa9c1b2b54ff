"""The tasks of one attempt, made one handful after the other: a plan of terabytes is never all in memory.

An upload that several workers share is begun here, and noted, before the first task that sends parts of it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import IO, TYPE_CHECKING

from ckptd.cluster.grouping import parts_of, tasks_of
from ckptd.cluster.messages import Join, Piece, Proof, Task, TaskSource
from ckptd.cluster.sending import shares_uploads
from ckptd.convert.parts import ranges_of
from ckptd.errors import TargetExists
from ckptd.remote.s3_upload import part_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptd.cluster.grouping import Index, Wanted
    from ckptd.cluster.messages import Job
    from ckptd.cluster.note import Note
    from ckptd.remote.store import Store

MIB = 1 << 20
LEAST_TASK_BYTES = 16 * MIB
MOST_TASK_BYTES = 256 * MIB
TASKS_PER_THREAD = 16
_PROOFS = 64


class Tasking:
    """Makes tasks. `stream`: the plan; `known`: every source that it names, by number."""

    def __init__(
        self,
        job: Job,
        store: Store,
        note: Note,
        stream: IO[bytes],
        index: Index,
        known: Mapping[int, TaskSource],
    ) -> None:
        self._job = job
        self._store = store
        self._note = note
        self._stream = stream
        self._index = index
        self._known = known
        self._serial = 0

    def making(
        self, missing: dict[str, list[int]], there: Mapping[str, int], *, threads: int, verify: bool
    ) -> Iterator[list[Task]]:
        """Tasks in handfuls. `missing`: parts that lack of open uploads; `there`: what lies at the end."""
        if verify and self._job.source_root:
            yield [
                self.task(sources=(source,), crc32s=(source.number,), nbytes=source.bytes)
                for source in self._known.values()
            ]
        known = self._note.progress
        room = max(1, threads)
        task_bytes = self._index.trailer.bytes // (TASKS_PER_THREAD * room)
        store = shares_uploads(self._store)
        wanted = None if store is None else store.access.part_size_bytes
        batches = tasks_of(
            self._index,
            set(known.done),
            task_bytes=max(LEAST_TASK_BYTES, min(MOST_TASK_BYTES, task_bytes)),
            part_bytes=None if store is None else lambda nbytes: part_size(nbytes, wanted),
            missing=missing,
        )
        while some := list(islice(batches, room)):
            self._begin_uploads({w.name: w.item.nbytes for batch in some for w in batch if w.parts})
            yield [self._task_of(batch, there) for batch in some]

    def _begin_uploads(self, wanted: dict[str, int]) -> None:
        store, known = shares_uploads(self._store), self._note.progress.uploads
        new = {name: nbytes for name, nbytes in wanted.items() if name not in known}
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

    def _task_of(self, batch: list[Wanted], there: Mapping[str, int]) -> Task:
        checks, pieces, used = [], [], set()
        for one in batch:
            self._stream.seek(one.item.offset)
            line = self._stream.read(one.item.line_bytes).decode()
            used |= {r.source for part in parts_of(line) for r in ranges_of(part)}
            if not one.name:
                checks.append(line)
                continue
            token = self._note.progress.uploads[one.name] if one.parts else ""
            numbers = tuple(range(one.parts[0], one.parts[0] + one.parts[1])) if one.parts else ()
            is_there = there.get(one.name) == one.item.nbytes
            pieces.append(
                Piece(
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
        return self.task(sources=sources, checks=tuple(checks), pieces=tuple(pieces), nbytes=nbytes)

    def task(
        self,
        *,
        sources: tuple[TaskSource, ...] = (),
        checks: tuple[str, ...] = (),
        pieces: tuple[Piece, ...] = (),
        joins: tuple[Join, ...] = (),
        proofs: tuple[Proof, ...] = (),
        crc32s: tuple[int, ...] = (),
        nbytes: int = 0,
    ) -> Task:
        self._serial += 1
        return Task(
            number=self._serial,
            sources=sources,
            checks=checks,
            pieces=pieces,
            joins=joins,
            proofs=proofs,
            crc32s=crc32s,
            nbytes=nbytes,
        )

    def proving(self, sizes: Mapping[str, int]) -> Iterator[list[Task]]:
        """Every output is read back from where it is."""
        done = self._note.progress.done
        proofs = [Proof(path=p, nbytes=n, crc64=done[p]) for p, n in sizes.items()]
        for first in range(0, len(proofs), _PROOFS):
            yield [self.task(proofs=tuple(proofs[first : first + _PROOFS]))]
