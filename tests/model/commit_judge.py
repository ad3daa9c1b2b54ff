"""Whether what lies in a remote may lie there: one save a COMMIT, and all of it (P3, P4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core.model.manifest import folder_name
from ckptd.errors import CkptdError
from ckptd.storage.remote import documents, observe
from ckptd.storage.remote.observe import live_commits, manifests_of
from ckptd.storage.stores.checksums import crc64, to_hex
from tests.model.commit_code import IDENTITY, OVERWRITTEN, PlainStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptd.core.model.generation import KnownManifest
    from ckptd.core.model.manifest import ManifestFile
    from ckptd.storage.remote.documents import Stem


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What some objects mean."""

    wrong: str | None = None
    committed: frozenset[int] = frozenset()
    """Saves with a COMMIT that counts."""
    listed: frozenset[tuple[int, str]] = frozenset()
    """(save, path) of all that manifests list, of generations that are neither disputed nor retired."""
    keys: frozenset[str] = frozenset()
    """Objects that manifests list."""
    generations: int = 0
    """The highest that any document speaks of."""
    kept: frozenset[int] = frozenset()
    """Generations of which anything but a tombstone lies there."""


def judge(objects: dict[str, bytes]) -> Judged:
    """Whether these objects may be, and what they hold."""
    store = PlainStore(objects)
    seen = observe.observe(store, IDENTITY)  # type: ignore[arg-type]
    committed: set[int] = set()
    for view in live_commits(seen):
        try:
            files = [file for manifest in manifests_of(store, view) for file in manifest.files]  # type: ignore[arg-type]
        except CkptdError as error:
            return Judged(wrong=error.message)
        bad = _not_there(objects, files)
        if bad is not None:
            return Judged(wrong=f"{view.key}: {bad} is not what was committed")
        numbers = {int(objects[file.key].split()[1]) for file in files}
        if len(numbers) != 1:
            return Judged(wrong=f"{view.key} mixes saves {numbers}")
        committed |= numbers
    wheres = documents.generations_with_manifests(store)  # type: ignore[arg-type]
    held = {where: documents.read_generation(store, where) for where in wheres}  # type: ignore[arg-type]
    retired = set(documents.read_commits(store).stones)  # type: ignore[arg-type]
    made = {documents.stem_of(view.commit) for view in seen.commits}
    given_up = {documents.stem_of(view.commit) for view in seen.commits if view.disputed} | retired
    opened = {where: known for where, known in held.items() if where not in made | retired}
    folders = {folder_name(*where) for where in retired}
    return Judged(
        wrong=_replaced(objects) or _sent_twice(opened),
        committed=frozenset(committed),
        listed=frozenset(
            (known.manifest.save_seq, file.path)
            for where in held.keys() - given_up
            for known in held[where]
            for file in known.manifest.files
        ),
        keys=frozenset(
            file.key for manifests in held.values() for known in manifests for file in known.manifest.files
        ),
        generations=max((where[1] for where in wheres), default=0),
        kept=frozenset(where[1] for where in wheres | made)
        | frozenset(1 for key in objects if key.rpartition("/")[0] in folders),
    )


def _not_there(objects: dict[str, bytes], files: Iterable[ManifestFile]) -> str | None:
    return next(
        (f.key for f in files if to_hex(crc64(objects.get(f.key, b""))) != f.checksums.crc64nvme), None
    )


def _replaced(objects: dict[str, bytes]) -> str | None:
    """A COMMIT that was written over, as `perform` notes."""
    over = next((key for key in objects if key.startswith(OVERWRITTEN)), None)
    return f"{over.removeprefix(OVERWRITTEN)} was written over" if over else None


def _sent_twice(held: Mapping[Stem, tuple[KnownManifest, ...]]) -> str | None:
    """A node that ships one save into two open generations, though no other save spoilt the first."""
    seen: dict[tuple[str, int], int] = {}
    for where, manifests in sorted(held.items()):
        if len({known.manifest.save_seq for known in manifests}) != 1:
            continue
        for known in manifests:
            key = known.manifest.node, known.manifest.save_seq
            if seen.setdefault(key, where[1]) != where[1]:
                return f"{key[0]} sent save {key[1]} as generation {seen[key]} and as {where[1]}"
    return None
