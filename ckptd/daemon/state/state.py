"""Hold what the deciding thread knows of one job between turns: memory that the next scan or the journal can
refill.

Only the deciding thread reads or writes it. Its records are changed by their own methods alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.daemon.state.deletions import HOUR_SECONDS, Deletions
from ckptd.daemon.state.local_saves import Folders, Holds, LocalSaves
from ckptd.daemon.state.problems import Failures, Problems
from ckptd.daemon.state.upload_records import Uploads

if TYPE_CHECKING:
    from ckptd.core.model.save import SealedSave
    from ckptd.core.policy.actions import Plan
    from ckptd.observe.audit import Audit
    from ckptd.storage.journal.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHost:
    """Name a host that uploads the files that lie here."""

    node: str
    tag: str
    stands_by: bool
    """We do: of two, the one with the lower node id goes on."""


class JobState:
    """The records of one job, and the journal that they are kept in."""

    def __init__(
        self,
        journal: Journal,
        *,
        config_digest: str,
        required: tuple[str, ...],
        problems: Problems,
        audit: Audit,
        is_shared: bool,
    ) -> None:
        self.journal = journal
        self.config_digest = config_digest
        """Digest of what all nodes of the job must agree on."""
        self.required = required
        """Remotes that must hold a save before its last copy here may go (P1); none: it stays."""
        self.audit = audit
        self.is_shared = is_shared
        """save_dir is shared by hosts on purpose (adr/0110)."""
        self.problems = problems
        self.failures = Failures()
        self.folders = Folders()
        self.saves = LocalSaves(journal)
        self.holds = Holds()
        self.uploads = Uploads(journal)
        self.deletions = Deletions(journal)
        self.plan: Plan | None = None
        self.run_id: str | None = None
        """The run that save_dir holds; None: not known yet, or runs are not told apart."""
        self.other_host: OtherHost | None = None
        """Another host over the same directory."""
        self.is_first_scan = True
        self._tidied_at_seconds: float | None = None

    def load(self) -> None:
        """Read everything from the journal."""
        self.saves.load()
        self.uploads.load()

    def reload(self, *ids: int) -> None:
        """Read changed saves again from the journal."""
        self.saves.reload(*ids)
        self.uploads.reload(*ids)

    def tidy(self, now_seconds: float) -> None:
        """Forget, now and then, what ended long ago: memory and the journal follow what is here (P12)."""
        last, listing = self._tidied_at_seconds, self.folders.listing
        if listing is None or (last is not None and now_seconds - last <= HOUR_SECONDS):
            return
        self._tidied_at_seconds = now_seconds
        saves, conversion = self.saves, self.saves.conversion
        alive = (file.identity for folder in listing.folders for file in folder.files)
        highest = max(saves.rows.values(), key=lambda row: row.save.order, default=None)
        spare = {row_id for row_id, count in saves.busy.items() if count}
        spare |= {key[0] for key in self.uploads.progress}
        spare |= {highest.id} if highest is not None else set()
        spare |= {conversion.save_id} if conversion is not None else set()
        for save_id in self.journal.tidy(alive, spare, saves.widest_save_seconds):
            saves.forget(save_id)
            self.uploads.forget(save_id)
            self.deletions.forget(save_id)

    def replace_sealed(self, save_id: int, save: SealedSave) -> None:
        """Record what is known of a save by now."""
        self.journal.replace_sealed(save_id, save)
        self.reload(save_id)

    def grow(self, save_id: int, save: SealedSave) -> None:
        """Record more shards of a part, and upload it again."""
        self.journal.replace_sealed(save_id, save)
        self.uploads.forget_waits(save_id)
        self.reload(save_id)

    def set_held(self, save_id: int, *, held: bool) -> None:
        """Record whether a save is held."""
        self.journal.set_held(save_id, held=held)
        self.reload(save_id)

    def set_run(self, run_id: str | None) -> None:
        """Take save_dir as of this run: the generation of a save was chosen among another run's."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.uploads.forget_generation()

    def set_plan(self, plan: Plan) -> None:
        """Record the plan of this turn."""
        self.plan = plan

    def note_other_host(self, host: OtherHost) -> None:
        """Record another host over the same directory: nothing here shows that it has stopped."""
        self.other_host = host

    def end_first_scan(self) -> None:
        """Record that the first scan is over: from here on deletions are planned."""
        self.is_first_scan = False
