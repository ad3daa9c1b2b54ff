"""List save_dir, and report the checkpoints in it that nothing protects (P15, P17).

Those are links, which are not followed, and folders of none of the layouts of this job.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptd.base.names import shown
from ckptd.core.model.unprotected import warn_unprotected
from ckptd.storage.local.scan import scan

if TYPE_CHECKING:
    from ckptd.config.schema import JobConfig
    from ckptd.core.model.listing import SaveDirListing
    from ckptd.daemon.state.problems import Problem, Problems, Severity

log = logging.getLogger("ckptd.job")

_NEXT_STEP = (
    "ckptd follows no links below save_dir; move the folder itself into save_dir, or make save_dir the place "
    "where it lies"
)


def list_save_dir(
    config: JobConfig, problems: Problems, before: SaveDirListing | None, save_dir_fd: int
) -> SaveDirListing:
    """List save_dir, and say what in it is not protected."""
    listing = scan(save_dir_fd, config.trainer, before, config.declared)
    seen = {path.partition("/")[0]: path for path in listing.linked}
    for problem in problems.all():
        if problem.code == "linked-save" and problem.about not in seen:
            problems.clear("linked-save", problem.about)
    for tag, path in seen.items():
        is_newest = listing.is_at_risk(tag)
        names = " (latest names it)" if tag == listing.latest else ""
        what = "a link" if path == tag else f"made of links ({path})"
        text = f"{tag}{names} is {what}: it is not watched, and nothing of it is sent"
        problems.put("linked-save", tag, text, _NEXT_STEP, severity="attention" if is_newest else "note")
    _see_unprotected(config, problems, listing)
    return listing


def _see_unprotected(config: JobConfig, problems: Problems, listing: SaveDirListing) -> None:
    """Say it for as long as it lies there: a job that finds nothing else would wait for ever."""
    tags = [folder.tag for folder in listing.folders if not folder.is_model_only]
    said = warn_unprotected(listing.unprotected, str(config.save_dir), listing.latest, tags)
    for one in said:
        severity: Severity = "attention" if one.is_urgent else "note"
        if not any((p.code, p.about) == ("unprotected-save", shown(one.about)) for p in problems.all()):
            log.warning("%s; %s", one.text, one.next_step)
        problems.put("unprotected-save", one.about, one.text, one.next_step, severity=severity)
    # of a folder that had to be read to be known each turn says it anew
    about = {shown(one.about) for one in said} | {folder.tag for folder in listing.folders}
    for problem in problems.all():
        if problem.code == "unprotected-save" and problem.about not in about:
            problems.clear("unprotected-save", problem.about)


def unprotected_here(problems: Problems) -> tuple[str, ...]:
    """Checkpoints at risk that nothing will commit."""
    return tuple(problem.about for problem in problems.all() if _is_alarm(problem))


def _is_alarm(problem: Problem) -> bool:
    return problem.code in ("linked-save", "unprotected-save") and problem.lasting == "attention"
