"""Wrong plans of real saves: whatever gives a parameter other bytes than its own is refused.

Faults are seeded where the planner works addresses out, a thousand and more over saves of several kinds, and
judged by the bytes that they lead to.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ckptd.base import files
from ckptd.base.files import opened_real
from ckptd.conversion.plan import OutputCheck
from ckptd.conversion.reader import SourceFiles, refuse_unequal
from ckptd.conversion.universal import UniversalLayout
from ckptd.core.model.layouts import parse_shard_name
from ckptd.errors import DamagedError, RefusedError
from ckptd.formats.zero import round_robin, stage12
from ckptd.formats.zero.experts import Experts
from ckptd.formats.zero.proof import Proof
from ckptd.formats.zero.save import Save
from ckptd.formats.zero.shards import OptimShard, Parameter, Piece, SourceShard
from ckptd.formats.zero.survey import Surveyor
from tests.support import real
from tests.support.real import TAG, Recipe

RECIPES = {
    "stage 2": Recipe(stage=2, world_size=2),
    "stage 2, fp16": Recipe(stage=2, world_size=2, dtype="fp16"),
    "BF16_Optimizer": Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", two_groups=True),
    "fp32, four ranks": Recipe(stage=2, world_size=4, dtype="fp32", two_groups=True, tie=True, freeze=True),
    "pipeline": Recipe(stage=1, world_size=2, pipe=2),
}
ROUND_ROBIN = Recipe(stage=2, world_size=2, round_robin=True, odd=True, universal_info=False)
real.expect(*RECIPES.values(), ROUND_ROBIN)
FAULTS_EACH = 300
Bytes = dict[tuple[str, int, int, str], bytes]
"""(parameter, pipeline stage, tensor rank, state) → the elements that the plan gives it."""


@dataclass
class Scene:
    """A save as the planner sees it, and its files."""

    save: Save
    sources: SourceFiles
    truth: Bytes

    def bytes_planned(self) -> Bytes:
        """What the planner's addresses give each parameter, unproved."""
        found: Bytes = {}
        for model_rank in (model_rank for row in self.save.model_ranks for model_rank in row):
            for one in stage12.parameters(model_rank.shards, model_rank.shapes, None, self.save.experts):
                for state in one.states:
                    pieces = (os.pread(self.sources[p.source], p.nbytes, p.offset) for p in state.pieces)
                    found[one.name, model_rank.pp, model_rank.tp, state.name] = b"".join(pieces)
        return found

    def copied(self) -> Scene:
        """The same scene, whose addresses can be changed."""
        model_ranks = [
            [
                replace(model_rank, shards=[_copied(shard) for shard in model_rank.shards])
                for model_rank in row
            ]
            for row in self.save.model_ranks
        ]
        return replace(self, save=replace(self.save, model_ranks=model_ranks))

    def prove(self) -> int:
        """Plan and compare as a conversion does; the elements that were compared."""
        proof = self.save.prove = Proof(self.save)
        elements = 0
        for output in UniversalLayout(self.save, "superset", block=False, strict=False).outputs():
            if isinstance(output, OutputCheck):
                refuse_unequal(output, self.sources, lambda: None)
                elements += output.elements
        assert proof.finish() == ()
        return elements


def _copied(shard: OptimShard) -> OptimShard:
    groups = [replace(g, mapping=[*g.mapping], states={**g.states}) for g in shard.groups]
    return OptimShard(shard.source, groups)


@contextmanager
def scene_of(folder: Path) -> Iterator[Scene]:
    """Survey a save."""
    listed = []
    for path in sorted(folder.iterdir()):
        shard = parse_shard_name(path.name)
        if shard is not None:
            listed.append(SourceShard(0, path.name, shard.role.value, shard.shard.d, shard.shard.mm))
    with opened_real(str(folder)) as fd:
        save = Surveyor(lambda path: files.reading(fd, path), listed, []).survey()
        sources = SourceFiles(fd, [r.path for r in save.reads], [r.identity for r in save.reads])
        scene = Scene(save, sources, {})
        scene.truth = scene.bytes_planned()
        yield scene


# --- faults: each changes the save's addresses and says what it is; None: there is no place for it here ----

Fault = Callable[[Save, random.Random], str | None]


def _mapping(save: Save, rng: random.Random) -> list[tuple[str, int, int]]:
    model_rank = rng.choice(rng.choice(save.model_ranks))
    return rng.choice(rng.choice(model_rank.shards).groups).mapping


def swapped(save: Save, rng: random.Random) -> str | None:
    """Two pieces of equal length in one rank's slice change places."""
    mapping = _mapping(save, rng)
    pairs = [(i, j) for i, a in enumerate(mapping) for j, b in enumerate(mapping[:i]) if a[2] == b[2]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    (a, start, n), (b, other, _) = mapping[i], mapping[j]
    mapping[i], mapping[j] = (a, other, n), (b, start, n)
    return "equal shapes swapped"


def shifted(save: Save, rng: random.Random) -> str | None:
    """One piece, or all of a slice, begins an element later or earlier."""
    mapping = _mapping(save, rng)
    by = rng.choice((-1, 1))
    chosen = range(len(mapping)) if rng.random() < 0.5 else [rng.randrange(len(mapping))] if mapping else []
    for i in chosen:
        name, start, n = mapping[i]
        mapping[i] = (name, max(0, start + by), n)
    return "shifted by one" if mapping else None


def reordered(save: Save, rng: random.Random) -> str | None:
    """Two ranks change places."""
    model_rank = rng.choice(rng.choice(save.model_ranks))
    if len(model_rank.shards) < 2:
        return None
    i, j = rng.sample(range(len(model_rank.shards)), 2)
    model_rank.shards[i], model_rank.shards[j] = model_rank.shards[j], model_rank.shards[i]
    return "other rank order"


def borrowed(save: Save, rng: random.Random) -> str | None:
    """A rank's buffer of masters is that of another rank."""
    model_rank = rng.choice(rng.choice(save.model_ranks))
    if len(model_rank.shards) < 2:
        return None
    one, other = rng.sample(model_rank.shards, 2)
    g = rng.randrange(len(one.groups))
    one.groups[g].states = {**one.groups[g].states, "fp32": other.groups[g].states["fp32"]}
    return "masters of another rank"


FAULTY: tuple[Fault, ...] = (swapped, shifted, reordered, borrowed)


def _moment(parameter: Parameter, rng: random.Random, others: list[Parameter]) -> Parameter:
    """A moment from elsewhere: of another parameter, of the other moment, one element on, of another rank."""
    number = rng.randrange(1, len(parameter.states))
    state = parameter.states[number]
    alike = [o for o in others if o.shape == parameter.shape and o.name != parameter.name]
    kind = rng.randrange(4)
    if kind == 0 and alike:
        pieces = rng.choice(alike).states[number].pieces
    elif kind == 1 and len(parameter.states) > 2:
        pieces = parameter.states[3 - number].pieces
    elif kind == 2 and len({p.source for p in state.pieces}) > 1:
        pieces = state.pieces[::-1]
    else:
        by = rng.choice((-1, 1)) * state.item_bytes
        pieces = tuple(Piece(p.source, p.offset + by, p.nbytes) for p in state.pieces)
    states = list(parameter.states)
    states[number] = replace(state, pieces=pieces)
    return replace(parameter, states=tuple(states))


def stale_moments(scene: Scene, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> str:
    """One parameter's moment is read from a place that is not its own."""
    address = stage12.parameters
    every = [
        one
        for model_rank in (model_rank for row in scene.save.model_ranks for model_rank in row)
        for one in address(model_rank.shards, model_rank.shapes, None, scene.save.experts)
    ]
    victim, seed = rng.choice([p for p in every if len(p.states) > 1 and p.numel]).name, rng.random()

    def parameters(
        shards: list[OptimShard], shapes: stage12.Shapes, only: str | None, experts: Experts
    ) -> Iterator[Parameter]:
        for made in address(shards, shapes, None, experts):
            found = _moment(made, random.Random(seed), every) if made.name == victim else made
            yield replace(found, states=tuple(s for s in found.states if only in (None, s.name)))

    monkeypatch.setattr(stage12, "parameters", parameters)
    return "moments from elsewhere"


# --- the judge ----------------------------------------------------------------------------------------------


def changed_bytes(scene: Scene) -> Bytes | None:
    """What the addresses give, where it is not the truth; None: the planner itself refuses them."""
    try:
        return {key: value for key, value in scene.bytes_planned().items() if scene.truth[key] != value}
    except (RefusedError, DamagedError):
        return None


def is_rounding(key: tuple[str, int, int, str], value: bytes, scene: Scene, dtype: str) -> bool:
    """Whether masters changed in bits alone that their 16-bit weights do not have."""
    if key[3] != "fp32" or dtype == "float32":
        return False
    return _rounded(value, dtype) == _rounded(scene.truth[key], dtype)


def _rounded(masters: bytes, dtype: str) -> bytes:
    values = torch.frombuffer(bytearray(masters), dtype=torch.float32).to(getattr(torch, dtype))
    return bytes(values.view(torch.int16).numpy().tobytes())


def outcome(scene: Scene, dtype: str, what: str) -> str:
    """What a seeded fault led to; fails where it changed a byte and was believed."""
    changed = changed_bytes(scene)
    try:
        scene.prove()
    except (RefusedError, DamagedError):
        return "found" if changed is None or changed else "found, and harmless"
    assert changed is not None, f"{what}: not even planned"
    below = [key for key, value in changed.items() if is_rounding(key, value, scene, dtype)]
    assert len(below) == len(changed), f"{what}: believed, and {sorted(set(changed) - set(below))} are wrong"
    return "below the rounding" if changed else "harmless"


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_addresses_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand and more over all recipes; what is believed changed no bit that a weight has."""
    recipe = RECIPES[name]
    real.prepare([recipe])
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.dtype]
    told: Counter[tuple[str, str]] = Counter()
    with scene_of(real.save_dir_of(recipe) / TAG) as scene:
        assert scene.copied().prove() == sum(len(v) // 4 for k, v in scene.truth.items() if k[3] == "fp32")
        for number in range(FAULTS_EACH):
            rng, faulty = random.Random(f"{name} {number}"), scene.copied()
            with monkeypatch.context() as patched:
                kind = rng.randrange(len(FAULTY) + 1)
                if kind < len(FAULTY):
                    what = FAULTY[kind](faulty.save, rng)
                else:
                    what = stale_moments(faulty, rng, patched)
                if what is not None:
                    told[what, outcome(faulty, dtype, f"{name}, seed {number}, {what}")] += 1
    print(name, dict(told))
    assert sum(n for (_, came), n in told.items() if came == "found") >= FAULTS_EACH // 3


def test_shuffled_addresses_are_found() -> None:
    """round_robin_gradients without the repair of its addresses, which are right after it."""
    real.prepare([ROUND_ROBIN])
    with scene_of(real.save_dir_of(ROUND_ROBIN) / TAG) as scene:
        with pytest.raises(RefusedError, match="is not the weight of the model: element"):
            scene.copied().prove()
        mended = scene.copied()
        round_robin.restore_addresses(mended.save)
        assert mended.prove() > 100_000
