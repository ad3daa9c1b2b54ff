"""Read which save each folder in `_ckptd/derived/universal` was made from, as its `ckptd.json` says.

A derived form is usable for a save exactly when its source fingerprints are the save's; with the journal
lost, or after a resume put it there, this is how it is recognised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from ckptd.base import files
from ckptd.base.identity import Model
from ckptd.base.names import DESCRIPTION
from ckptd.errors import CkptdError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIMIT_BYTES = 64 << 20


class DerivedOrigin(Model):
    """`source` of ckptd.json: the save that the form was made from, and each shard's fingerprint by path."""

    fingerprints: dict[str, str]
    step: int | None = None
    zero_stage: int | None = None


class DerivedDescription(Model):
    """`ckptd.json` at the root of a derived form (docs/design.md §4)."""

    form: str
    layout: str
    alignment: int = 0
    plan_sha256: str
    source: DerivedOrigin

    def is_made_from(self, fingerprints: Mapping[str, str]) -> bool:
        """Whether every source shard has the fingerprint given for its path."""
        marks = self.source.fingerprints
        return bool(marks) and all(fingerprints.get(path) == mark for path, mark in marks.items())


def describe(save_dir_fd: int, folder: str) -> DerivedDescription | None:
    """Read the description of a derived folder; None when there is none, or none of ours.

    Raises:
        OSError: the disk, or its rights, refuse: whose it is cannot be said.
    """
    try:
        data = files.read_beneath(save_dir_fd, f"{folder}/{DESCRIPTION}", limit_bytes=_LIMIT_BYTES)
        return DerivedDescription.model_validate_json(data)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, CkptdError, ValidationError):
        return None
