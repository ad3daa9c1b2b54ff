"""What a repair is asked for, and what it says of each damaged file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptd.recover.verified import Slice

HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """One damaged file. `where`: a remote's name, or `here`; `source`: where intact bytes lie (None: nowhere
    that is known); `outcome`: planned, repaired, or left, with the reason and the exit code it stands for."""

    where: str
    tag: str
    generation: int
    form: str
    key: str
    bytes: int
    damage: str
    source: str | None
    outcome: str
    reason: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be repaired: `targets`: names of remotes; `here`: save_dir as well."""

    targets: frozenset[str]
    here: bool = True
    tag: str | None = None
    read: Slice | None = None
    dry_run: bool = False
