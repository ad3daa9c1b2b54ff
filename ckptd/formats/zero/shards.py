"""Open the shards of a save, cut them down to what conversion needs, and model parameters as their ranges.

A shard's pickle is dropped as soon as its offsets are known, so that memory follows the number of
fragments and not the number of ranks times the size of a pickle (docs/formats.md §2, P12).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptd.base.extents import identity_of
from ckptd.core.model.shard_facts import ShardFacts
from ckptd.errors import RefusedError
from ckptd.formats.torchfile.archive import Directory
from ckptd.formats.torchfile.fingerprint import fingerprint, tensor_fingerprint
from ckptd.formats.torchfile.legacy import read_archive
from ckptd.formats.torchfile.unpickler import unpickle
from ckptd.formats.torchfile.values import Tensor
from ckptd.formats.zero.facts import shard_facts, shown

# --- parameters: ranges of source files, for all stages alike (docs/formats.md §4) --------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes at `offset` of source file `source`."""

    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateRanges:
    """One state of one parameter: its pieces in order make the flattened full tensor."""

    name: str
    dtype: str
    item_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A full parameter: name, real shape, states (fp32 first), scalar states (the step) as they are.

    `scalar_source` is the index of the file that scalar tensors lie in. `experts` > 0: that many
    expert-parallel ranks' tensors, each of `shape`, follow one another in the pieces (docs/formats.md §7.1).
    """

    name: str
    shape: tuple[int, ...]
    states: tuple[StateRanges, ...]
    scalars: dict[str, Any]
    scalar_source: int
    experts: int = 0
    weight: StateRanges | None = None
    """The model's own copy of it, which the fp32 state must round to."""
    is_compared: bool = True
    """False: nobody reads both."""

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return max(1, self.experts) * prod(self.shape)


@dataclass(frozen=True, slots=True)
class SourceShard:
    """One file to read from; `index` is its number in the plan."""

    index: int
    path: str
    role: str
    d: int | None
    mm: int | None


@dataclass(frozen=True, slots=True)
class OpenedShard:
    """A shard as read: `root` is the unpickled value."""

    source: SourceShard
    size_bytes: int
    identity: tuple[int, int, int, int, int]
    fingerprint: str
    tensor_fingerprint: str
    directory: Directory
    facts: ShardFacts
    root: dict[Any, Any]
    pickle: bytes
    """SHA-256 of data.pkl."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat, contiguous 1-D buffer in a source file: byte offset, elements, dtype name."""

    source: int
    offset: int
    numel: int
    dtype: str
    item_bytes: int


@dataclass(slots=True)
class ShardGroup:
    """One optimizer group (stage ≤ 2) or sub-group (stage 3) of one rank.

    `states` maps "fp32" and the optimizer's own names to buffers; `scalars` its other state (the step);
    `mapping` is (name, start, numel) in elements, stage ≤ 2 only; paddings in elements. `whole`: states that
    have all of each mapped parameter, in order of address (Muon's momentum, docs/formats.md §3.2). `ranks`:
    the data-parallel ranks that a sub-group is cut over, in the order of their pieces; empty: all of them.
    """

    states: dict[str, Flat]
    scalars: dict[str, Any]
    mapping: list[tuple[str, int, int]] = field(default_factory=list)
    padding: int = 0
    alignment_padding: int = 0
    whole: dict[str, Flat] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    def buffer(self, name: str) -> Flat:
        """Return the buffer of a state, by parts or whole."""
        return self.whole[name] if name in self.whole else self.states[name]


@dataclass(slots=True)
class OptimShard:
    """One rank's optimizer shard, without its pickle."""

    source: SourceShard
    groups: list[ShardGroup]


def open_shard(fd: int, source: SourceShard, like: OpenedShard | None = None) -> OpenedShard:
    """Read directory, fingerprint and pickle of the shard open at `fd`.

    With `like`, a shard whose pickle and records (place and size) are the same shares its value and facts:
    the model states of a thousand stage 3 ranks say the same a thousand times.

    Raises:
        RefusedError: an archive that is no DeepSpeed shard.
        TornArchiveError: truncated or garbled.
    """
    status = os.fstat(fd)
    directory = read_archive(fd, source.path)
    record = directory.records["data.pkl"]
    data = os.pread(fd, record.size, record.offset)
    digest = hashlib.sha256(data).digest()
    if like is not None and like.pickle == digest and _places(directory) == _places(like.directory):
        root, facts = like.root, like.facts
    else:
        value = unpickle(data, source.path, directory)
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise RefusedError(f"{source.path} is no DeepSpeed shard (its pickle is a {kind})")
        root, facts = value, shard_facts(value, fd)
    return OpenedShard(
        source=source,
        size_bytes=status.st_size,
        identity=identity_of(status),
        fingerprint=fingerprint(fd, directory),
        tensor_fingerprint=tensor_fingerprint(fd, directory),
        directory=directory,
        facts=facts,
        root=root,
        pickle=digest,
    )


def _places(directory: Directory) -> list[tuple[str, int, int]]:
    return [(record.name, record.offset, record.size) for record in directory.storages()]


def flat(value: Any, source: SourceShard, what: str) -> Flat:
    """`value` as a flat buffer.

    Raises:
        RefusedError: it is no tensor, or not contiguous.
    """
    if not isinstance(value, Tensor) or not value.contiguous:
        raise RefusedError(
            f"{source.path}: {what} is no flat tensor",
            hint="NVMe-offloaded or swapped state is not in the shard; the ZeRO form is safe all the same",
        )
    return Flat(source.index, value.byte_offset, value.numel, value.dtype, value.item_bytes)


def split_state(
    state: dict[Any, Any], fp32: Flat, source: SourceShard, where: str, padding: int = 0
) -> tuple[dict[str, Flat], dict[str, Any]]:
    """Sort one group's optimizer state into flat buffers and scalars (a step is 0-d or a number).

    A buffer has one value per element of `fp32`, and may have `padding` elements more.

    Raises:
        RefusedError: a state that is neither (factored moments, for example).
    """
    buffers: dict[str, Flat] = {"fp32": fp32}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        name = str(key)
        if isinstance(value, Tensor) and value.shape != () and 0 <= value.numel - fp32.numel <= padding:
            if not name.isidentifier() or name in ("fp32", "step"):
                raise RefusedError(f"{source.path}: an optimizer state is called {shown(name)}")
            buffers[name] = flat(value, source, f"{where} state {name}")
        elif value is None or (isinstance(value, bool | int | float | str | Tensor) and _is_scalar(value)):
            scalars[name] = value
        else:
            raise RefusedError(
                f"{source.path}: {where} optimizer state {name} is not one value per parameter element",
                hint="this optimizer's state has no universal form; the ZeRO form is safe all the same",
            )
    return buffers, scalars


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel == 1
