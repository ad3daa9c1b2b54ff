"""Plan a recovery, as data: `resume` in save_dir, `restore` in another directory.

One planner says which form is wanted and where it comes from; two kinds of places differ in what they do with
what lies there. In save_dir, what is in the way is renamed into `_ckptd/aside/`; in another directory nothing
is replaced but bad files of this very save (docs/internals/recover.md). Every step is idempotent, and the
pointers come last, so that a recovery that is killed half-way leaves nothing that DeepSpeed would load.

Where trainers find a universal form: DeepSpeed follows `latest_universal` in save_dir. Of the layouts with
shards one level deeper none does: the Trainer finds it beside its shards, Accelerate opens `pytorch_model` by
name, Lightning wants a folder `checkpoint`; for those two it lies under that name in a folder of ours
(docs/adr/0050).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptd.base import files
from ckptd.base.humanize import ranks_in_words
from ckptd.base.names import tag_problem
from ckptd.core.completeness.judge import State
from ckptd.core.model.layouts import BY_NAME, LATEST_UNIVERSAL, Role, Trainer, universal_name
from ckptd.core.model.other_layouts import STAGE_0, words_of
from ckptd.core.model.records import UNIVERSAL, WEIGHTS, ZERO
from ckptd.errors import RefusedError, TargetExists, UsageError
from ckptd.recover.files import compare_folder
from ckptd.recover.select.choose import Candidate
from ckptd.recover.select.copies import Copy, Nodes, files_for_node, files_for_ranks
from ckptd.recover.select.steps import (
    DERIVED_ACCELERATE,
    DERIVED_UNIVERSAL,
    ConvertFrom,
    CopyBeside,
    Delete,
    Fetch,
    Install,
    MakeUniversal,
    Mend,
    MoveAside,
    RestoreExtras,
    Step,
    WritePointer,
    is_plain,
    name_of_extra,
)
from ckptd.storage.local.derived import describe
from ckptd.storage.local.fs import names_in
from ckptd.storage.local.scan import read_pointer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptd.core.model.listing import SaveDirListing
    from ckptd.recover.select.inventory import LocalCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """Hold what the command line asks for.

    Raises:
        UsageError: it contradicts itself.
    """

    tag: str | None = None
    """Only this one; None: the newest."""
    run: str | None = None
    """Beginning of the id of a run; None: the job's own run, else the newest."""
    form: str | None = None
    world_size: int | None = None
    ranks: frozenset[int] | None = None
    """Data-parallel ranks as in file names; None: all."""
    nodes: Nodes = field(default_factory=Nodes)
    remote: str | None = None
    """Only this one of the job's remotes."""
    state_dir: Path | None = None
    """Directory in which the daemon's status may lie."""
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.form not in (None, ZERO, UNIVERSAL, *WEIGHTS):
            msg = f"there is no form {self.form!r} to restore"
            raise UsageError(msg, hint=f"--form zero, universal, {', '.join(WEIGHTS)}")
        if self.ranks is not None and self.form not in (None, ZERO):
            msg = f"--ranks picks ZeRO shards, the {self.form} form has none"
        elif self.world_size is not None and self.form in WEIGHTS:
            msg = "--world-size is of checkpoints to resume from, weights are none"
        elif self.ranks is not None and self.nodes.count > 1:
            msg = "--ranks and --nnodes both say which shards are wanted"
        else:
            return
        raise UsageError(msg, hint="leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """A chosen checkpoint and the steps to it; `path` is relative to the directory."""

    candidate: Candidate
    form: str
    path: str
    world_size: int | None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """Return the steps that need bytes from a remote."""
        return tuple(step for step in self.steps if isinstance(step, Fetch))


def needs_universal(candidate: Candidate, world_size: int | None) -> bool:
    """Whether so many ranks need the universal form."""
    if not candidate.grid.has_shards or world_size is None:
        return False
    return world_size != candidate.saved_world_size


class Planner:
    """Plans one committed candidate into another directory. `fd` None: the directory does not exist yet."""

    def __init__(self, candidate: Candidate, options: RecoveryOptions, root: Path, fd: int | None) -> None:
        self._candidate = candidate
        self._options = options
        self._root = root
        self._fd = fd
        self._first: list[Step] = []
        """Steps before all others."""

    def plan(self) -> RecoveryPlan:
        """Return the steps to the candidate.

        Raises:
            RefusedError: the form or the number of ranks cannot be had.
            NotFoundError: ranks beyond the grid. TargetExists: another content under the tag (73).
        """
        candidate, options = self._candidate, self._options
        pointers: list[Step] = []
        if options.form in WEIGHTS:
            # beside the checkpoints, as in the remote; no pointer names weights
            form, path = options.form, f"{candidate.tag}_{options.form}"
            steps = self._bring(form, candidate.universals[0], candidate.universals[0], path)
        else:
            form = UNIVERSAL if self._is_universal() else ZERO
            path, steps, pointers = self._universal() if form == UNIVERSAL else self._zero()
            steps += self._extras()
        steps = [*self._first, *steps, *pointers]
        return RecoveryPlan(
            candidate=candidate,
            form=form,
            path=path,
            world_size=options.world_size,
            steps=tuple(steps),
            notes=tuple(self._notes(form, steps)),
        )

    # --- which form ------------------------------------------------------------------------------------

    def _is_universal(self) -> bool:
        candidate, options = self._candidate, self._options
        differs = needs_universal(candidate, options.world_size)
        if options.form == ZERO and differs:
            saved = f"{candidate.tag} was saved by {candidate.saved_world_size} ranks"
            msg = f"{saved}: in ZeRO form no others load it"
            raise RefusedError(msg, hint="leave --form out, or ask for --form universal")
        if options.form == ZERO and candidate.is_universal_alone:
            msg = f"only the universal form of {candidate.tag} is left"
            raise RefusedError(msg, hint="leave --form out: it loads on any number of ranks")
        is_universal = differs or options.form == UNIVERSAL or candidate.is_universal_alone
        if is_universal and options.ranks is not None:
            msg = f"{candidate.tag} is wanted in universal form, which has no ranks"
            hint = "leave --ranks out, or ask for --form zero without another --world-size"
            raise RefusedError(msg, hint=hint)
        return is_universal

    def _zero(self) -> tuple[str, list[Step], list[Step]]:
        """Return the path, the steps to the ZeRO form, and the pointers to it."""
        candidate = self._candidate
        if candidate.local is not None:
            steps = self._stale_forms()
        else:
            whole, share = (_unreplaced(candidate, one) for one in (candidate.copies[0], self._share()))
            steps = self._bring(ZERO, whole, share, candidate.tag)
        is_plain_layout = candidate.layout[0] is Trainer.DEEPSPEED
        return candidate.tag, steps, self._point("latest", candidate.tag) if is_plain_layout else []

    def _share(self) -> Copy:
        """Return what of the ZeRO form is wanted here."""
        whole, options = self._candidate.copies[0], self._options
        if options.ranks is not None:
            return files_for_ranks(whole, options.ranks)
        return files_for_node(whole, options.nodes) if options.nodes.count > 1 else whole

    def _universal(self) -> tuple[str, list[Step], list[Step]]:
        """Return the path, the steps to the universal form where the trainer finds it, and the pointers."""
        tag, trainer = self._candidate.tag, self._candidate.layout[0]
        if trainer is not Trainer.DEEPSPEED or not self._candidate.grid.has_shards:
            root = _only_engine(self._candidate)
            return self._loadable(root) if trainer in BY_NAME else self._beside_shards(root)
        target = f"{DERIVED_UNIVERSAL}/{tag}"
        steps = self._form_at("", target, self._candidate.copies[:1])
        has_zero = self._candidate.local is not None or any(isinstance(step, MakeUniversal) for step in steps)
        pointers = self._point("latest", tag) if has_zero else self._unpoint()
        return target, steps, pointers + self._point(LATEST_UNIVERSAL, target)

    def _beside_shards(self, root: str) -> tuple[str, list[Step], list[Step]]:
        """Put the universal form beside the shards (Hugging Face).

        Measured: the Trainer wants some `global_step*` folder and follows `latest_universal`; the raw shards
        may be absent (docs/formats.md §1.2), so only what lies beside them is fetched with a committed form.
        """
        candidate, name = self._candidate, universal_name(root)
        wholes = [_without_form(copy, name) for copy in candidate.copies[:1]]
        steps: list[Step] = []
        if candidate.local is None and candidate.universals:
            steps += self._bring(ZERO, wholes[0], _side_files(wholes[0], root), candidate.tag)
        steps += self._form_at(root, f"{candidate.tag}/{name}", wholes)
        return candidate.tag, steps, self._point(f"{candidate.tag}/{LATEST_UNIVERSAL}", name)

    def _loadable(self, root: str) -> tuple[str, list[Step], list[Step]]:
        """Make a folder of ours that the trainer opens: what lies beside the shards, then the universal form.

        `load_state` hands the tag `pytorch_model` to DeepSpeed, which then reads no `latest_universal`.
        Lightning loads without a tag: DeepSpeed then follows that pointer in the folder it is given.
        """
        candidate, tag = self._candidate, self._candidate.tag
        folder = f"{DERIVED_ACCELERATE}/{tag}"
        steps = self._other_forms(root)
        is_lightning = candidate.layout[0] is Trainer.LIGHTNING
        pointers = self._point(f"{folder}/{LATEST_UNIVERSAL}", root) if is_lightning else []
        if self._is_loadable(folder):
            return folder, steps, pointers
        if candidate.local is None and candidate.universals:
            whole = candidate.copies[0]
            steps += self._bring(ZERO, whole, _side_files(whole, root), folder)
            return folder, steps + self._form_at(root, f"{folder}/{root}", [whole]), pointers
        if candidate.local is not None:
            here = [file.path for file in candidate.local.listing.files]
            sides = [path for path in here if not path.startswith(f"{root}/")]
        else:
            sides = [file.path for file in _side_files(candidate.copies[0], root).files]
        for step in self._form_at(root, f"{folder}/{root}", candidate.copies[:1]):
            if isinstance(step, MakeUniversal):
                # the sides first: what is cut short before the form is there loads nowhere
                steps.append(CopyBeside(tag=tag, target=folder, paths=tuple(sides)))
            steps.append(step)
        return folder, steps, pointers

    def _form_at(self, root: str, target: str, wholes: Sequence[Copy]) -> list[Step]:
        """Return the steps to the universal form in `target`: there already, else fetched, else converted.

        It is converted from the ZeRO form where that lies here or trainers want what lies beside it, else
        from the remote's. What lies in `target` is used only if it says that it was made from this very save
        (H15): the Trainer saves over a checkpoint in place, and a converter of DeepSpeed's that was killed
        leaves half a folder.
        """
        candidate = self._candidate
        is_made = self._is_made_from(root, target)
        if candidate.universals and not (root and candidate.local):
            copy = candidate.universals[0]
            copy = _within(copy, universal_name(root)) if root else copy
            return self._bring(UNIVERSAL, copy, copy, target, is_made=is_made)
        if is_made:
            return []
        cleared = self._cleared(target)
        if self._is_read_by_ranges(root):
            return [ConvertFrom(copy=wholes[0], target=target)]
        brought = self._bring(ZERO, wholes[0], wholes[0], candidate.tag) if candidate.local is None else []
        source = f"{candidate.tag}/{root}" if root else candidate.tag
        return [
            *brought,
            *cleared,
            MakeUniversal(tag=source, target=target, verify=not candidate.is_committed),
        ]

    def _is_made_from(self, root: str, target: str) -> bool:
        """Whether the universal form in `target` says that it was made from this very save."""
        sources, candidate = self._source_of(target), self._candidate
        marks = [candidate.fingerprints, *([candidate.local.fingerprints] if candidate.local else [])]
        prefix = f"{root}/" if root else ""
        return bool(sources) and all(
            any(ours.get(f"{prefix}{path}", ours.get(path)) == mark for ours in marks)
            for path, mark in (sources or {}).items()
        )

    def _extras(self) -> list[Step]:
        """Return the files of save_dir that travelled along, where the directory has none of that name."""
        for copy in (self._candidate.copies or self._candidate.universals)[:1]:
            names = {name_of_extra(file): file for file in copy.extras}
            absent = tuple(file for name, file in names.items() if is_plain(name) and not self._has(name))
            return [RestoreExtras(copy=copy, files=absent)] if absent else []
        return []

    # --- the directory ---------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        """Whether a name is taken."""
        return self._fd is not None and files.stat_beneath(self._fd, name) is not None

    def _source_of(self, folder: str) -> dict[str, str] | None:
        """Return the fingerprints of what a universal folder says it was made from; None: it does not say."""
        if self._fd is None:
            return None
        try:
            found = describe(self._fd, folder)
        except OSError:
            return None
        return None if found is None else found.source.fingerprints

    def _point(self, name: str, value: str) -> list[Step]:
        has_it = self._fd is not None and read_pointer(self._fd, name) == value
        return [] if has_it else [WritePointer(name=name, value=value)]

    # --- what lies there already -----------------------------------------------------------------------

    def _bring(
        self, form: str, whole: Copy, wanted: Copy, target: str, /, *, is_made: bool = False
    ) -> list[Step]:
        """Fetch what is missing or bad of a form. `is_made`: an earlier call converted it here: same content,
        other bytes.
        """
        try:
            lacking = compare_folder(self._root, self._fd, target, whole, wanted)
        except TargetExists:
            if is_made:
                return []
            raise
        if lacking is None:
            return [Fetch(form=form, copy=wanted), Install(form=form, copy=wanted, target=target)]
        part = replace(wanted, files=lacking)
        return [Fetch(form=form, copy=part), Mend(form=form, copy=part, target=target)] if lacking else []

    def _cleared(self, target: str) -> list[Step]:
        """Return steps that make room for a conversion."""
        if self._has(target):
            tag = self._candidate.tag
            msg = f"{target} is there and was not made from the save of {tag} that was committed"
            raise TargetExists(msg, hint="move it away, or restore into another directory")
        return []

    def _is_read_by_ranges(self, root: str, /) -> bool:
        """Whether the form is converted straight from the remote: no ZeRO form is wanted here."""
        return not root and not self._has(self._candidate.tag)

    def _is_loadable(self, _folder: str, /) -> bool:
        return False  # what lies there is compared

    def _stale_forms(self) -> list[Step]:
        return []

    def _other_forms(self, _root: str, /) -> list[Step]:
        return []

    def _unpoint(self) -> list[Step]:
        return []

    def _notes(self, form: str, _steps: Sequence[Step], /) -> list[str]:
        options, tag = self._options, self._candidate.tag
        if form != ZERO or (options.ranks is None and options.nodes.count == 1):
            return []
        every = self._share().all_for_each
        if every is not None and options.ranks is None:
            return [every]
        ranks = ranks_in_words(options.ranks or ()).replace(" ", "")
        whose = f"ranks {ranks}" if options.ranks is not None else f"node {options.nodes.rank}"
        return [f"only the shards of {whose} of {tag} are wanted here: no other rank can load from it"]


class SaveDirPlanner(Planner):
    """Plans into save_dir, where the candidate may lie already and what is in the way is moved aside.

    `aside`: what has to go first.
    """

    def __init__(
        self,
        candidate: Candidate,
        options: RecoveryOptions,
        root: Path,
        fd: int | None,
        *,
        listing: SaveDirListing,
        local: Sequence[LocalCheckpoint],
        aside: Sequence[MoveAside] = (),
    ) -> None:
        super().__init__(candidate, options, root, fd)
        self._listing = listing
        self._local = local
        unusable = [
            MoveAside(name=checkpoint.tag, label=checkpoint.tag, reason=_why(checkpoint))
            for checkpoint in _in_the_way(candidate, local)
        ]
        self._first = [*aside, *unusable]
        self._gone = {step.name for step in (*aside, *unusable)}

    def _has(self, name: str) -> bool:
        """Whether a name is taken once the steps so far are done."""
        is_below_replaced = self._candidate.local is None and name.startswith(f"{self._candidate.tag}/")
        is_gone = any(name == gone or name.startswith(f"{gone}/") for gone in self._gone)
        return not is_below_replaced and not is_gone and super()._has(name)

    def _source_of(self, folder: str) -> dict[str, str] | None:
        return super()._source_of(folder) if self._has(folder) else None

    def _bring(
        self, form: str, _whole: Copy, wanted: Copy, target: str, /, *, is_made: bool = False
    ) -> list[Step]:
        if is_made:
            return []
        fetch, install = Fetch(form=form, copy=wanted), Install(form=form, copy=wanted, target=target)
        return [fetch, *self._cleared(target), install]

    def _cleared(self, target: str) -> list[Step]:
        """Move aside another save, or something that is no checkpoint at all."""
        tag = self._candidate.tag
        if not self._has(target):
            return []
        if target == tag:
            label, reason = tag, "another save under the name of the one to resume from"
        elif target.startswith(f"{DERIVED_UNIVERSAL}/"):
            label, reason = f"{tag}_universal", "made from another save of that tag"
        else:
            label = f"{tag}.{target.rpartition('/')[2]}"
            reason = "nothing says that it was made from this very save"
        return [self._aside(target, label, reason)]

    def _aside(self, name: str, label: str, reason: str) -> MoveAside:
        self._gone.add(name)
        return MoveAside(name=name, label=label, reason=reason)

    def _is_read_by_ranges(self, _root: str, /) -> bool:
        return False  # save_dir keeps the ZeRO form

    def _is_loadable(self, folder: str, /) -> bool:
        return self._has(folder)  # one of another save is gone by then

    def _stale_forms(self) -> list[Step]:
        """Move aside forms that say that they were made from another save: a trainer told to load one would
        follow them.
        """
        tag, steps = self._candidate.tag, list[Step]()
        for root in filter(None, self._candidate.layout[1]):
            target = f"{tag}/{universal_name(root)}"
            if self._source_of(target) and not self._is_made_from(root, target):
                for name in (f"{tag}/{LATEST_UNIVERSAL}", target):
                    label = f"{tag}.{name.rpartition('/')[2]}"
                    steps.append(self._aside(name, label, "made from another save of that tag"))
        return steps

    def _other_forms(self, root: str, /) -> list[Step]:
        """Delete derived forms of ours that were made from other saves; they can be made again."""
        steps: list[Step] = []
        for name in names_in(self._fd, DERIVED_ACCELERATE) if self._fd is not None else ():
            place = f"{DERIVED_ACCELERATE}/{name}"
            is_its = name == self._candidate.tag and self._is_made_from(root, f"{place}/{root}")
            if not is_its and not name.startswith("."):
                self._gone.add(place)
                steps.append(Delete(folder=DERIVED_ACCELERATE, name=name))
        return steps

    def _point(self, name: str, value: str) -> list[Step]:
        # those in a folder that is replaced are written in any case
        return super()._point(name, value) if "/" not in name else [WritePointer(name=name, value=value)]

    def _unpoint(self) -> list[Step]:
        """Move `latest` aside where it names a checkpoint that is not there."""
        latest = self._listing.latest
        there = {folder.tag for folder in self._listing.folders} - self._gone
        if latest is None or latest in there:
            return []
        return [self._aside("latest", "latest", f"names {latest}, which is not there")]

    def _notes(self, _form: str, steps: Sequence[Step], /) -> list[str]:
        candidate = self._candidate
        notes = [s.copy.all_for_each for s in steps if isinstance(s, Fetch) and s.copy.all_for_each]
        for checkpoint in self._local:
            if (problem := tag_problem(checkpoint.tag)) is not None and checkpoint.is_complete:
                rename = "rename it to have it sent"
                notes.append(f"{checkpoint.tag!r} is not sent to any remote: the tag {problem}; {rename}")
            if checkpoint.verdict.state is State.REFUSED:
                notes.append(
                    f"{checkpoint.tag} is {checkpoint.verdict.reason}: not resumed from, and left where it is"
                )
            if checkpoint.verdict.state is State.SUSPECT:
                cure = f"`ckptd accept JOB {shlex.quote(checkpoint.tag)}` makes it usable"
                notes.append(f"{checkpoint.tag} is suspect: {checkpoint.verdict.reason}; {cure}")
            elif checkpoint.is_complete and checkpoint.listing.is_model_only:
                notes.append(f"{checkpoint.tag} is only a model: nothing to resume from")
            elif self._options.nodes.count > 1 and checkpoint.is_complete and checkpoint.tag != candidate.tag:
                notes.append(
                    f"{checkpoint.tag} is whole here but not committed: other nodes could not choose it"
                )
        # a run that was rewound while nobody watched looks like a crash right before `latest` was written
        named = next((s for s in self._local if s.tag == self._listing.latest and s.is_complete), None)
        if named and named.tag != candidate.tag and (named.step or 0) < candidate.order.step:
            newer = f"latest names {named.tag}, which is whole here too, and {candidate.tag} counts as newer"
            rewound = f"if the run was rewound to before that, `--tag {named.tag}` takes the other"
            notes.append(f"{newer}: {rewound}")
        return notes


def _in_the_way(candidate: Candidate, local: Sequence[LocalCheckpoint]) -> list[LocalCheckpoint]:
    """Return the unusable folders that are newer than the chosen one, or bear its name (H54)."""
    found = []
    for checkpoint in local:
        # refused: whole, and none that ckptd knows
        is_refused = checkpoint.verdict.state is State.REFUSED and checkpoint.tag != candidate.tag
        is_chosen = candidate.local is not None and checkpoint.tag == candidate.local.tag
        if checkpoint.is_complete or is_refused or is_chosen:
            continue
        step = checkpoint.step
        if checkpoint.tag == candidate.tag or step is None or step >= candidate.order.step:
            found.append(checkpoint)
    return found


def _why(checkpoint: LocalCheckpoint) -> str:
    return f"{checkpoint.verdict.state.value}: {checkpoint.verdict.reason or 'not whole'}"


# --- parts of copies -------------------------------------------------------------------------------------


def _only_engine(candidate: Candidate) -> str:
    """Return where the only engine's shards lie in a folder of another trainer.

    Raises:
        RefusedError: there are several: no universal load by one call; or none, in another layout.
    """
    roots = candidate.layout[1]
    if not candidate.grid.has_shards:
        layout, hint = candidate.grid.layout, "leave --form out"
        msg = f"{candidate.tag} is {words_of(layout)}: there is no universal form of it"
        if layout == STAGE_0:
            msg = f"{candidate.tag} is {words_of(layout)}: it is brought back in this form alone"
            hint += ", and `ckptd convert` what comes"
        raise RefusedError(msg, hint=hint)
    if len(roots) > 1:
        msg = f"{candidate.tag} holds two engines ({', '.join(roots)}): no universal load by one call"
        raise RefusedError(msg, hint="resume on the ranks that saved it, or `ckptd convert` each engine")
    return roots[0]


def _unreplaced(candidate: Candidate, copy: Copy) -> Copy:
    """Return a ZeRO form, or a share of it, without objects that our universal form went over: of
    what a person had put beside the shards no byte is left, and the shards are what is wanted.
    """
    there = (universal for universal in candidate.universals if universal.remote.name == copy.remote.name)
    taken = {file.key for universal in there for file in universal.files}
    return replace(copy, files=tuple(file for file in copy.files if file.key not in taken))


def _side_files(copy: Copy, root: str) -> Copy:
    """Return the files of a ZeRO form that lie beside its shards: all that a trainer reads with a universal
    load.
    """
    chosen = tuple(f for f in copy.files if f.role is Role.SIDE and not f.path.startswith(f"{root}/"))
    return replace(copy, files=chosen)


def _without_form(copy: Copy, name: str) -> Copy:
    """Return a ZeRO form without a universal form `name` that somebody put beside its shards before it was
    uploaded.

    Nothing proves what that was made from; the one that is wanted takes its place.
    """
    taken = (name, LATEST_UNIVERSAL)
    kept = tuple(f for f in copy.files if not f.path.startswith(f"{name}/") and f.path not in taken)
    return replace(copy, files=kept)


def _within(universal: Copy, name: str) -> Copy:
    """Return a universal form as it lies in its own folder `name` beside the shards."""
    inside = tuple(
        f.model_copy(update={"path": f.path.removeprefix(f"{name}/")})
        for f in universal.files
        if f.path.startswith(f"{name}/")
    )
    return replace(universal, files=inside)
