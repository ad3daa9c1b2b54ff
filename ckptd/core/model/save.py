"""Describe a save: what one `save_checkpoint` call left in one folder, its order, how it differs.

Order is (branch, step, save_seq), never a clock and never the step alone. Comparisons of saves only veto:
nothing proves that two halves are of one save, but any difference proves that they are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptd.base.identity import FileIdentity, FolderIdentity, Model
from ckptd.core.model.layouts import Grid, Role, ShardKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class SaveWindow(Model):
    """Least and greatest mtime of a save's shards, unix time in nanoseconds, by the node's clock."""

    first: int
    last: int


class Writer(Model):
    """Identify who wrote the save."""

    trainer: str = "deepspeed"
    engine: str | None = None
    ds_version: str | None = None
    zero_stage: int | None = None
    dtype: str | None = None
    optimizer: str | None = None


# --- The best checkpoint: the trainer names it, COMMITs carry the name to every node ---------------------
# trainer_state.json and metrics lie beside one node's shards; what all nodes keep must rest on data that
# all can read.


class Best(Model):
    """The metric that a trainer recorded for this checkpoint."""

    metric: str
    value: float
    is_best: bool = False


def best_named(words: Iterable[tuple[Order, str | None]]) -> str | None:
    """The tag that the newest save calls the best so far; `words`: of each save its order and what it names.

    A save that names none (a part without trainer_state.json) says nothing against what an older one named.
    """
    named = [(order, tag) for order, tag in words if tag is not None]
    return max(named)[1] if named else None


# --- Orders, sealed files and saves ----------------------------------------------------------------------


class Order(NamedTuple):
    """Position of a save among all saves of a job."""

    branch: int
    step: int
    save_seq: int


class SealedFile(Model):
    """A file as it was when its save was complete and flushed."""

    path: str
    """Relative to the checkpoint folder (or, for role `extra`, the name in save_dir)."""
    identity: FileIdentity
    fingerprint: str
    tensor_fingerprint: str | None = None
    role: Role
    shard: ShardKey = ShardKey()
    mode: int = 0o644


class SealedSave(Model):
    """A complete, flushed save: the unit that is uploaded, held, converted, committed, deleted."""

    tag: str
    folder: FolderIdentity
    files: tuple[SealedFile, ...]
    extras: tuple[SealedFile, ...] = ()
    grid: Grid
    branch: int
    step: int
    save_seq: int
    window: SaveWindow
    writer: Writer
    run_id: str | None = None
    optimizer_step: int | None = None
    roots: tuple[str, ...] = ("",)
    """Folders below the checkpoint's that hold its shards (core/model/layouts.py)."""
    best: Best | None = None
    is_part: bool = False
    """True: a save over several nodes, of which other nodes' shards are not here
    (core/completeness/markers.py)."""
    best_checkpoint: str | None = None
    """The tag that this save's trainer calls the best so far."""
    late: tuple[SealedFile, ...] = ()
    """Files that appeared in the folder after it was sealed, durable and at rest: for a supplement."""
    beside: tuple[str, ...] = ()
    """Tags that lay here, not sealed yet, when this one was sealed: perhaps saved later (adr/0102)."""
    empty: tuple[str, ...] = ()
    """Folders below the checkpoint's with nothing in them, which its loader opens."""
    rivals: tuple[int, ...] = ()
    """Saves of the journal, sealed before, of which nothing proves that they are older, or newer."""

    @property
    def shard_fingerprints(self) -> dict[str, str]:
        """Fingerprint by name in the shard root, as a conversion's description has them."""
        return {path.rpartition("/")[2]: mark for path, mark in self.fingerprints}

    @property
    def order(self) -> Order:
        """Return (branch, step, save_seq)."""
        return Order(self.branch, self.step, self.save_seq)

    @property
    def total_bytes(self) -> int:
        """Bytes of the sealed files, without extras."""
        return sum(f.identity.size_bytes for f in self.files)

    @property
    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """Return (path, fingerprint) of every sealed file, sorted: the identity of the save's content."""
        return tuple(sorted((f.path, f.fingerprint) for f in self.files))


class SaveMark(Model):
    """Hold the values by which two descriptions of saves are compared."""

    run_id: str | None
    step: int
    grid: tuple[int, int, int]
    """(dp, mm_count, zero_stage)."""
    ds_version: str | None
    window: SaveWindow
    tensors: tuple[tuple[str, str], ...]
    """(path, tensor fingerprint or fingerprint) of shards, sorted."""


def mark_of_save(save: SealedSave) -> SaveMark:
    """Return the mark of a sealed save."""
    return SaveMark(
        run_id=save.run_id,
        step=save.step,
        grid=(save.grid.dp, save.grid.mm_count, save.grid.zero_stage),
        ds_version=save.writer.ds_version,
        window=save.window,
        tensors=_tensors((f.path, f.tensor_fingerprint or f.fingerprint, f.role) for f in save.files),
    )


def _tensors(rows: object) -> tuple[tuple[str, str], ...]:
    assert hasattr(rows, "__iter__")
    return tuple(sorted((path, mark) for path, mark, role in rows if role not in (Role.SIDE, Role.EXTRA)))


def differs(a: SaveMark, b: SaveMark, *, save_spread_seconds: float) -> str | None:
    """Return why `a` and `b` cannot be of one save; None: they can (§3 *Generations*)."""
    if a.run_id and b.run_id and a.run_id != b.run_id:
        return f"run {a.run_id} against {b.run_id}"
    if a.step != b.step:
        return f"step {a.step} against {b.step}"
    if a.grid != b.grid:
        return f"grid {a.grid} against {b.grid}"
    if a.ds_version != b.ds_version:
        return f"DeepSpeed {a.ds_version} against {b.ds_version}"
    theirs = dict(b.tensors)
    for path, mark in a.tensors:
        if theirs.get(path, mark) != mark:
            return f"{path} holds other tensors"
    apart_ns = max(a.window.first - b.window.last, b.window.first - a.window.last, 0)
    if apart_ns > save_spread_seconds * 1e9:
        return f"written {apart_ns / 1e9:.0f} s apart"
    return None


def agree(marks: Sequence[SaveMark], *, save_spread_seconds: float) -> bool:
    """True exactly where no two of them differ; in one pass, since nodes may be thousands."""
    if not marks:
        return True
    runs = {mark.run_id for mark in marks if mark.run_id}
    if len(runs) > 1 or len({(mark.step, mark.grid, mark.ds_version) for mark in marks}) > 1:
        return False
    tensors: dict[str, str] = {}
    for mark in marks:
        # within a mark a path may stand twice; only others are compared with it
        if any(tensors.get(path, held) != held for path, held in mark.tensors):
            return False
        tensors.update(mark.tensors)
    apart_ns = max(mark.window.first for mark in marks) - min(mark.window.last for mark in marks)
    return apart_ns <= save_spread_seconds * 1e9
