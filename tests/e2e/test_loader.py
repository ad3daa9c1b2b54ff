"""Universal checkpoints in DeepSpeed's own loader: source stage x ranks to stage x ranks, by optimizer.

Sixteen resumes cover every pair of the five choices; CKPTD_FULL=1 (`make loader-matrix`) runs all 432 and
writes their table, docs/loader-matrix.md. Every resume starts from other weights than the saved run had.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import Compat, ConvertOptions
from tests.e2e.loader_table import Row, write
from tests.support.real import (
    TAG,
    Recipe,
    Resume,
    Resumed,
    copy_of,
    expect,
    facts_of,
    losses_of,
    prepare,
    resumed,
    save_dir_of,
)

FULL = bool(os.environ.get("CKPTD_FULL"))
pytestmark = [pytest.mark.real, pytest.mark.timeout(7200 if FULL else 1200)]

OPTIMIZERS = ("adamw", "fused_adam", "cpu_adam")
RANKS = (1, 2, 3, 4)
TOLERANCE = 1e-3
"""Other ranks add in another order, and bf16 rounds what they add."""
UNIVERSAL = f"{TAG}_universal"
TOGETHER = 24
"""Resumes that share one start, which must end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One resume of a converted source."""

    source: Recipe
    stage: int
    ranks: int
    compat: Compat = "superset"
    load_optimizer_states: bool = True
    load: str = "universal"

    @property
    def is_exact(self) -> bool:
        """Same ranks and the same sums: stages 1 and 2 are one class, BF16_Optimizer partitions as they do.

        On three ranks and more stages 1 and 2 add gradients in different orders: there uninterrupted
        runs of the two differ as well.
        """
        if self.source.world_size != self.ranks or self.source.stage == 0:
            return False
        return self.source.stage == self.stage or (
            self.ranks <= 2 and 3 not in (self.source.stage, self.stage)
        )

    @property
    def reference(self) -> Case | None:
        """The same resume from the ZeRO form, where DeepSpeed itself does not go on to the last bit.

        Its Adams in C++ multiply the powers of beta up step by step, and take pow() after a load.
        """
        if not self.is_exact or self.source.optimizer not in ("fused_adam", "cpu_adam"):
            return None
        return Case(source=self.source, stage=self.source.stage, ranks=self.ranks, load="zero")

    def __str__(self) -> str:
        extra = "" if self.load_optimizer_states else ", no optimizer states"
        kind = f"{self.source.optimizer}{', BF16_Optimizer' if self.source.grad_accum_dtype else ''}"
        return (
            f"{kind}, {self.compat}{extra}: stage {self.source.stage} on {self.source.world_size} "
            f"to stage {self.stage} on {self.ranks}"
        )


def pairwise() -> list[Case]:
    """The orthogonal array of 16 rows and 5 columns over GF(4): every pair of values of every two columns.

    A fourth level repeats another one where a choice has three.
    """
    twice, thrice = (0, 2, 3, 1), (0, 3, 1, 2)
    sources, targets, optimizers, ranks = (3, 1, 3, 2), (3, 3, 1, 2), (*OPTIMIZERS, "adamw"), (4, 2, 1, 3)
    return [
        Case(
            source=Recipe(stage=sources[a ^ twice[b]], world_size=ranks[a], optimizer=optimizers[a ^ b]),
            stage=targets[a ^ thrice[b]],
            ranks=ranks[b],
        )
        for a in range(4)
        for b in range(4)
    ]


def matrix() -> list[Case]:
    """Everything."""
    return [
        Case(source=Recipe(stage=s, world_size=n, optimizer=o), stage=t, ranks=m)
        for o in OPTIMIZERS
        for s in (1, 2, 3)
        for t in (1, 2, 3)
        for n in RANKS
        for m in RANKS
    ]


BF16 = Recipe(stage=1, world_size=2, grad_accum_dtype="fp32", two_groups=True)
OTHERS = [
    Case(source=BF16, stage=2, ranks=2),
    Case(source=Recipe(stage=3, world_size=2), stage=3, ranks=2, compat="strict"),
    Case(source=Recipe(stage=2, world_size=2, optimizer="group_step_adam"), stage=2, ranks=2),
]
OWN = ("sgd", "adagrad", "lion", *(("cpu_lion", "cpu_adagrad") if FULL else ()))
"""Optimizers with other states than Adam's; stage 3's loader knows Adam's alone."""
for name in OWN:
    first, second = (Recipe(stage=stage, world_size=2, optimizer=name) for stage in (1, 2))
    OTHERS += [
        Case(source=first, stage=2, ranks=2),
        Case(source=second, stage=1, ranks=3, compat="strict"),
    ]
    if FULL:
        OTHERS += [
            Case(source=second, stage=2, ranks=1),
            Case(source=first, stage=1, ranks=2, compat="strict"),
            Case(source=first, stage=2, ranks=4, compat="strict"),
        ]
FORGETFUL = [
    Case(source=Recipe(stage=3, world_size=2, odd=True), stage=stage, ranks=2, load_optimizer_states=False)
    for stage in (2, 3)
]
OTHERS += [
    Case(source=Recipe(stage=0, world_size=2, two_groups=True), stage=1, ranks=2),
    Case(source=Recipe(stage=0, world_size=2, dtype="fp32", two_groups=True), stage=2, ranks=1),
    Case(source=Recipe(stage=0, world_size=2), stage=3, ranks=2),
]
CPU_ADAM = Case(source=Recipe(stage=2, world_size=2, optimizer="cpu_adam"), stage=2, ranks=2)
CASES = list(dict.fromkeys([*(matrix() if FULL else pairwise()), CPU_ADAM, *OTHERS]))
REFERENCES = list(dict.fromkeys(case.reference for case in CASES if case.reference))
expect(*(case.source for case in [*CASES, *FORGETFUL]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Resumed]:
    work = tmp_path_factory.mktemp("loader")
    found = resume_all([*CASES, *REFERENCES, *FORGETFUL], work)
    if FULL:
        write([row(case, found) for case in CASES])
    return found


def resume_all(cases: Sequence[Case], work: Path) -> dict[Case, Resumed]:
    """Train, convert and resume; a start per number of ranks and `TOGETHER` cases."""
    prepare(list(dict.fromkeys(case.source for case in cases)))
    made: dict[tuple[Recipe, Compat], Path] = {}
    for case in cases:
        if (case.source, case.compat) not in made:
            # Beside the shards: with load_optimizer_states=False stage 3 of 0.19.8 reads those too.
            save_dir = copy_of(save_dir_of(case.source), work / f"source{len(made)}")
            made[case.source, case.compat] = save_dir
            convert(save_dir / TAG, save_dir / UNIVERSAL, ConvertOptions(compat=case.compat))
            if case.load_optimizer_states:  # what a resume reads then is the universal form alone
                shutil.rmtree(save_dir / TAG)
                (save_dir / "latest").unlink()
    found: dict[Case, Resumed] = {}
    for i, (ranks, batch) in enumerate(_batches(cases)):
        (work / f"start{i}").mkdir()
        resumes = [
            Resume(
                recipe=replace(case.source, stage=case.stage, grad_accum_dtype=None, world_size=ranks),
                save_dir=save_dir_of(case.source) if case.load == "zero" else made[case.source, case.compat],
                tag=TAG if case.load == "zero" else UNIVERSAL,
                load=case.load,
                load_optimizer_states=case.load_optimizer_states,
            )
            for case in batch
        ]
        found |= zip(batch, resumed(ranks, resumes, work / f"start{i}"), strict=True)
    return found


def _batches(cases: Sequence[Case]) -> Iterable[tuple[int, list[Case]]]:
    for ranks in RANKS:
        of = [case for case in cases if case.ranks == ranks]
        for first in range(0, len(of), TOGETHER):
            yield ranks, of[first : first + TOGETHER]


def difference(case: Case, outcomes: dict[Case, Resumed]) -> float:
    """The largest distance of a loss of the four steps after the save to the uninterrupted run's.

    Where DeepSpeed's own resume from the ZeRO form is the reference: to that one's.
    """
    expected = outcomes[case.reference].losses if case.reference else losses_of(case.source)
    losses = outcomes[case].losses
    assert set(losses) == {3, 4, 5, 6}
    return max(abs(loss - expected[step]) for step, loss in losses.items())


def row(case: Case, outcomes: dict[Case, Resumed]) -> Row:
    """What the table says of a case."""
    return Row(
        optimizer=case.source.optimizer + (" in BF16_Optimizer" if case.source.grad_accum_dtype else ""),
        source_stage=case.source.stage,
        source_ranks=case.source.world_size,
        target_stage=case.stage,
        target_ranks=case.ranks,
        compat=case.compat,
        difference=difference(case, outcomes),
        allowed=0.0 if case.is_exact else TOLERANCE,
        is_same_optimizer=same_optimizer(case, outcomes[case]) == [],
    )


def same_optimizer(case: Case, outcome: Resumed) -> list[str]:
    """What of steps, states and settings after load is not as it was saved (DeepSpeed PRs 5263, 5289)."""
    saved, loaded = facts_of(case.source)["saved2"], outcome.optimizer
    return [f"{key}: {saved[key]} became {loaded[key]}" for key in saved if saved[key] != loaded[key]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loader_goes_on_where_the_source_stopped(case: Case, outcomes: dict[Case, Resumed]) -> None:
    assert same_optimizer(case, outcomes[case]) == []
    assert difference(case, outcomes) <= (0.0 if case.is_exact else TOLERANCE)


def test_load_optimizer_states_false(outcomes: dict[Case, Resumed]) -> None:
    """Stage 3 takes the weights alone; stages 1 and 2 of 0.19.8 load the states all the same."""
    stage_2, stage_3 = FORGETFUL
    assert difference(stage_2, outcomes) <= TOLERANCE
    assert outcomes[stage_2].optimizer["steps"] == [2.0]
    losses, expected = outcomes[stage_3].losses, losses_of(stage_3.source)
    assert losses[3] == pytest.approx(expected[3], abs=TOLERANCE)
    assert outcomes[stage_3].optimizer["steps"] != [2.0]
    assert difference(stage_3, outcomes) > TOLERANCE


def test_the_sixteen_cover_every_pair() -> None:
    rows = [(c.source.stage, c.source.world_size, c.stage, c.ranks, c.source.optimizer) for c in pairwise()]
    levels = ((1, 2, 3), RANKS, (1, 2, 3), RANKS, OPTIMIZERS)
    assert len(rows) == 16
    for i in range(5):
        for j in range(i):
            assert {(r[i], r[j]) for r in rows} == {(x, y) for x in levels[i] for y in levels[j]}


def test_round_robin_gradients_resume_with_the_option_off(tmp_path: Path) -> None:
    """DeepSpeed's mappings name other parameters' elements; the true order resumes (ADR 0087)."""
    source = Recipe(stage=2, world_size=2, round_robin=True, odd=True, universal_info=False)
    prepare([source])
    report = convert(save_dir_of(source) / TAG, tmp_path / "u", ConvertOptions(compat="superset"))
    assert any("round_robin_gradients" in note for note in report.notes)
    stocklike = convert(save_dir_of(source) / TAG, tmp_path / "s", ConvertOptions(compat="strict"))
    assert any("nowhere else" in note for note in stocklike.notes)
    loads = [
        Resume(recipe=replace(source, round_robin=False), save_dir=tmp_path, tag=tag) for tag in ("u", "s")
    ]
    (tmp_path / "work").mkdir()
    ours, stock = (run.losses for run in resumed(2, loads, tmp_path / "work"))
    expected = {step: loss for step, loss in losses_of(source).items() if step > 2}
    assert ours == expected
    assert stock != pytest.approx(expected, abs=1e-2), "were it right, the note would be wrong"
