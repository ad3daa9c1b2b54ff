"""Identify a file by inode and its content by fingerprint.

An identity that differs means "written, replaced or touched since"; an equal one means that the bytes are
those we read. It exists so that no decision about deleting or committing rests on a path alone
(docs/design.md §3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Base of every model that crosses a process or a module border: frozen, unknown fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def model_post_init(self, _context: Any, /) -> None:
        """One set of names for all instances of a class: a daemon remembers thousands of small ones.

        Which fields were given is never asked; a set of its own doubles what an instance occupies.
        """
        object.__setattr__(self, "__pydantic_fields_set__", _names_of(type(self)))


@cache
def _names_of(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of a regular file: device, inode, size in bytes, mtime and ctime in nanoseconds (H50)."""

    dev: int
    ino: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderIdentity:
    """Identity of a directory: what a permit names beside the path (P1, H10)."""

    dev: int
    ino: int
