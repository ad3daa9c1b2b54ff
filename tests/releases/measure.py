"""`python -m tests.releases.measure RESULTS`: measure the release that is first on the path.

What is done already (in RESULTS) is not done again. Run by `python -m tests.releases`, which puts the release
and the shims of `hook/` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptd.conversion.engine.supervisor import convert
from ckptd.conversion.options import ConvertOptions
from ckptd.errors import CkptdError
from ckptd.maintenance.inspection import InspectedCheckpoint, inspect_folder
from tests.releases import kills
from tests.releases.cases import CASES, TRAINER_STAGES, Case, trainer_case
from tests.support import consolidated, hf, stock
from tests.support.hf import HfRun
from tests.support.real import TAG, Recipe, Resume, losses_of, prepare, resumed, save_dir_of

NOTED_DIFFERENCES = 6
TRAINER_STEPS = 4
LOADS = 4
"""Loads of one form until its losses are numbers. Up to 0.16 stage 3 reads memory that nothing wrote: of 17
loads of one form two gave NaN."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was seen of one case; an error is None when it went well, losses are by step."""

    train_error: str | None = None
    ds_version: str | None = None
    """As the save says it."""
    state: str = ""
    reason: str | None = None
    """Why it is not complete, as `inspect` says it."""
    stock_error: str | None = None
    """Of the release's own ds_to_universal."""
    own_error: str | None = None
    notes: list[str] = field(default_factory=list)
    """Of ckptd's report."""
    differences: list[str] | None = None
    """Between stock's folder and ckptd's strict one; None: one of them is not there."""
    stock_load_error: str | None = None
    own_load_error: str | None = None
    expected: dict[int, float] = field(default_factory=dict)
    """Losses of the run that went on without a stop."""
    stock_losses: dict[int, float] = field(default_factory=dict)
    own_losses: dict[int, float] = field(default_factory=dict)
    zero_error: str | None = None
    """Of loading the save itself; tried where ckptd does not call it complete."""
    zero_losses: dict[int, float] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    """Form of each load whose losses were not numbers, and that was done again."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tried:
    """A case under way."""

    case: Case
    outcome: Outcome
    place: Path

    @property
    def is_convertible(self) -> bool:
        """Trained, and called complete."""
        return self.outcome.train_error is None and self.outcome.state == "complete"


def measure(cases: Sequence[Case], work: Path) -> dict[str, Outcome]:
    """Train, convert both ways, load both forms and go on; by the case's name."""
    tried = [Tried(case, Outcome(), work / f"case{i}") for i, case in enumerate(cases)]
    for one in tried:
        one.place.mkdir()
    _train(tried)
    _inspect(one for one in tried if one.outcome.train_error is None)
    convertible = [one for one in tried if one.is_convertible]
    _convert(convertible)
    _load(convertible, work)
    _load_zero([one for one in tried if one.outcome.train_error is None and one not in convertible], work)
    return {one.case.name: one.outcome for one in tried}


def _train(tried: Sequence[Tried]) -> None:
    try:
        prepare([one.case.recipe for one in tried])
    except RuntimeError:
        for one in tried:  # each by itself: what was made is not made again
            one.outcome.train_error = _error_of(functools.partial(prepare, [one.case.recipe]))
    for one in tried:
        if one.outcome.train_error is None:
            one.outcome.expected = losses_of(one.case.recipe)


def _inspect(tried: Iterable[Tried]) -> None:
    for one in tried:
        seen = inspected(save_dir_of(one.case.recipe) / TAG)
        one.outcome.state, one.outcome.reason = seen.state, seen.reason
        one.outcome.ds_version = seen.ds_version


def inspected(folder: Path) -> InspectedCheckpoint:
    """Return the verdict of `ckptd inspect` on one tag folder."""
    (seen,) = inspect_folder(folder).checkpoints
    return seen


def _convert(tried: Sequence[Tried]) -> None:
    pairs = [(save_dir_of(one.case.recipe) / TAG, one.place / "stock") for one in tried]
    for one, error in zip(tried, stock.try_convert(pairs), strict=True):
        one.outcome.stock_error = error
    compared = []
    for one in tried:
        source = save_dir_of(one.case.recipe) / TAG
        try:
            report = convert(source, one.place / "own")
            one.outcome.notes = list(report.notes)
        except CkptdError as error:
            one.outcome.own_error = str(error)
            continue
        if one.outcome.stock_error is None:
            convert(source, one.place / "strict", ConvertOptions(compat="strict"))
            compared.append(one)
    found = stock.differences([(one.place / "stock", one.place / "strict") for one in compared])
    for one, differences in zip(compared, found, strict=True):
        one.outcome.differences = differences[:NOTED_DIFFERENCES]


def compare_weights(cases: Sequence[Case], work: Path) -> dict[str, str]:
    """Compare ckptd's weights with the release's own zero_to_fp32, for saves that are there.

    Returns, by the case's name, "equal", or the first difference or failure.
    """
    found: dict[str, str] = {}
    made: list[str] = []
    compared = []
    for i, case in enumerate(cases):
        save_dir, ours = save_dir_of(case.recipe), work / f"weights{i}"
        try:
            convert(save_dir / TAG, ours, ConvertOptions(form="weights"))
        except CkptdError as error:
            found[case.name] = f"ckptd: {error}"[:200]
            continue
        made.append(case.name)
        compared.append((str(save_dir), TAG, str(ours)))
    for name, wrong in zip(made, consolidated.differences("fp32", compared), strict=True):
        found[name] = wrong[0][:200] if wrong else "equal"
    return found


def _load(tried: Sequence[Tried], work: Path) -> None:
    """Both forms of each case, those of one kind of start together; alone what one failure would end."""
    for form in ("stock", "own"):
        batches: dict[tuple[int, ...], list[tuple[Tried, Resume]]] = {}
        for one in tried:
            if (one.place / form).is_dir() and not _error(one, form):
                recipe = replace(one.case.recipe, world_size=one.case.ranks)
                if recipe.stage == 0 and one.outcome.stock_error:
                    recipe = replace(recipe, stage=1)  # without ZeRO these releases load no universal form
                start: tuple[int, ...] = (recipe.world_size, recipe.pipe, recipe.moe and recipe.ep)
                batches.setdefault(start, []).append((one, _resume(recipe, one.place, form)))
        for (world, *_), batch in batches.items():
            safe = [item for item in batch if not any("cannot load" in n for n in item[0].outcome.notes)]
            _together(world, safe, form, work)
            for item in batch:
                if item not in safe:
                    _alone(world, item, form, work)


def _error(one: Tried, form: str) -> str | None:
    return one.outcome.stock_error if form == "stock" else one.outcome.own_error


def _resume(recipe: Recipe, save_dir: Path, tag: str, load: str = "universal") -> Resume:
    recipe = replace(recipe, round_robin=False)  # else it goes on from round robin's own mappings
    return Resume(recipe=recipe, save_dir=save_dir, tag=tag, load=load)


def _together(world: int, batch: Sequence[tuple[Tried, Resume]], form: str, work: Path) -> None:
    if not batch:
        return
    try:
        runs = resumed(world, [resume for _, resume in batch], _fresh(work))
    except RuntimeError:
        for item in batch:
            _alone(world, item, form, work)
        return
    for item, run in zip(batch, runs, strict=True):
        if not _note_losses(item[0].outcome, form, run.losses):
            _alone(world, item, form, work)


def _alone(world: int, item: tuple[Tried, Resume], form: str, work: Path) -> None:
    one, resume = item

    def load() -> None:
        for _ in range(LOADS):
            (run,) = resumed(world, [resume], _fresh(work))
            if _note_losses(one.outcome, form, run.losses):
                return

    key = "zero_error" if form == "zero" else f"{form}_load_error"
    setattr(one.outcome, key, _error_of(load))


def _note_losses(outcome: Outcome, form: str, losses: dict[int, float]) -> bool:
    """Keep the losses of a load; False: they are not numbers, and it is to be done again."""
    setattr(outcome, f"{form}_losses", losses)
    is_finite = all(map(math.isfinite, losses.values()))
    if not is_finite:
        outcome.repeated.append(form)
    return is_finite


def _load_zero(tried: Sequence[Tried], work: Path) -> None:
    """What ckptd does not call complete: does the release go on from it?"""
    for one in tried:
        recipe = one.case.recipe
        resume = _resume(recipe, save_dir_of(recipe), TAG, "zero")
        _alone(recipe.world_size, (one, resume), "zero", work)


def measure_trainer(stage: int, work: Path) -> Outcome:
    """Save by transformers.Trainer on two processes; go on from either form.

    On two again: up to 4.57 it logs losses in 16 bits, so that those of another number are no proof.
    """
    outcome = Outcome()
    run = HfRun(stage=stage, steps=TRAINER_STEPS)
    outcome.train_error = _error_of(lambda: hf.prepare([run]))
    if outcome.train_error is not None:
        return outcome
    outcome.expected = hf.losses_of(run)
    saved = f"checkpoint-{run.save_steps}"
    seen = inspected(hf.tree_of(run) / saved)
    outcome.state, outcome.reason, outcome.ds_version = seen.state, seen.reason, seen.ds_version
    tag = f"global_step{run.save_steps}"
    places = {form: work / form for form in ("stock", "own")}
    for place in places.values():
        hf.copy_checkpoint(hf.tree_of(run), saved, place)
        (place / saved / "latest_universal").write_text(f"{tag}_universal")
    pairs = {form: (p / saved / tag, p / saved / f"{tag}_universal") for form, p in places.items()}
    (outcome.stock_error,) = stock.try_convert([pairs["stock"]])
    try:
        outcome.notes = list(convert(*pairs["own"]).notes)
    except CkptdError as error:
        outcome.own_error = str(error)
    if outcome.stock_error is None and outcome.own_error is None:
        convert(pairs["own"][0], work / "strict", ConvertOptions(compat="strict"))
        (differences,) = stock.differences([(pairs["stock"][1], work / "strict")])
        outcome.differences = differences[:NOTED_DIFFERENCES]
    for form, place in places.items():
        if getattr(outcome, f"{form}_error") is None:
            resume = replace(run, resume=place / saved, universal=True, init_seed=11)

            def load(form: str = form, resume: HfRun = resume) -> None:
                setattr(
                    outcome, f"{form}_losses", hf.train(resume, work / f"{form}-on", work, name=f"{form}-run")
                )

            setattr(outcome, f"{form}_load_error", _error_of(load))
    return outcome


def _fresh(work: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="start-", dir=work))


def _error_of(act: Callable[[], object]) -> str | None:
    """Return the last line that the failing ranks said."""
    try:
        act()
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = [line for line in lines if _is_error(line)]
        return (said or lines)[-1][:300]
    return None


def _is_error(line: str) -> bool:
    name = line.partition(":")[0]
    return name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Exit"))


def read_results(path: Path) -> dict[str, Any]:
    """Return what was measured of a release; empty when nothing was."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_results(path: Path, found: dict[str, Any]) -> None:
    """Replace the file in one step: a run that is killed leaves the one before."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1))
    partial.rename(path)


def main() -> None:
    """Measure what RESULTS lacks; what could not be trained is tried again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--only", nargs="*", help="names of cases; anew, and no kills")
    arguments = parser.parse_args()
    found = read_results(arguments.results)
    packages = ("deepspeed", "torch", "transformers", "accelerate")
    found["versions"] = {name: importlib.metadata.version(name) for name in packages}
    done = found.setdefault("cases", {})
    only = arguments.only

    def is_due(name: str) -> bool:
        return name in only if only else name not in done or done[name]["train_error"] is not None

    def note(outcomes: dict[str, Outcome], begun: float) -> None:
        seconds = (time.monotonic() - begun) / max(1, len(outcomes))
        for name, outcome in outcomes.items():
            outcome.seconds = round(seconds, 1)
            done[name] = dataclasses.asdict(outcome)
        write_results(arguments.results, found)

    with tempfile.TemporaryDirectory(prefix="ckptd-releases-") as root:
        work, begun = Path(root), time.monotonic()
        note(measure([case for case in CASES if is_due(case.name)], work), begun)
        complete = [c for c in CASES if c.name in done and done[c.name]["state"] == "complete"]
        if "weights" not in found and not only:
            found["weights"] = compare_weights([c for c in complete if not done[c.name]["own_error"]], work)
            write_results(arguments.results, found)
        for stage in TRAINER_STAGES:
            if is_due(trainer_case(stage)):
                (work / f"trainer{stage}").mkdir()
                begun = time.monotonic()
                note({trainer_case(stage): measure_trainer(stage, work / f"trainer{stage}")}, begun)
        if "kills" not in found and not only:
            (work / "kills").mkdir()
            begun = time.monotonic()
            tally = kills.run(arguments.kills, seed=1, work=work / "kills")
            found["kills"] = dataclasses.asdict(tally) | {"seconds": round(time.monotonic() - begun, 1)}
            write_results(arguments.results, found)


if __name__ == "__main__":
    main()
