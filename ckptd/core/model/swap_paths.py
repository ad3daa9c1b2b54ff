"""Know the paths of swapped tensors, without pydantic: restricted children import this, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

FOLDER = "offloaded_tensors"
END = ".tensor.swp"
BY_LOCAL_RANK = "with use_node_local_storage DeepSpeed names swapped tensors by local rank"
"""Reason why two nodes may have swapped tensors under one path."""


_PATH = re.compile(rf"{FOLDER}/rank(\d{{2,9}})/[^/]+{re.escape(END)}")


def is_swapped(path: str, roots: Collection[str]) -> bool:
    """Tell whether a file of a checkpoint is a swapped tensor of one of its shard roots."""
    head, found, rest = path.rpartition(f"{FOLDER}/")
    return bool(found) and path.endswith(END) and head.rstrip("/") in roots and rest.count("/") == 1


def is_state(path: str) -> bool:
    """Tell whether a path is of a swapped tensor, whatever shard root it lies in; no side file."""
    parts = path.split("/")
    return len(parts) > 2 and parts[-3] == FOLDER and path.endswith(END)


def is_state_folder(path: str) -> bool:
    """Tell whether a path is of the folder of one rank's swapped tensors."""
    return path.rpartition("/")[0].rpartition("/")[2] == FOLDER


def path_of(rank: int, ds_id: str) -> str:
    """Return the path in the shard root of a rank's tensor of that name."""
    return f"{folder_of(rank)}/{ds_id}{END}"


def folder_of(rank: int) -> str:
    """Return the folder of a rank's swapped tensors in the shard root."""
    return f"{FOLDER}/rank{rank:02d}"


def rank_of(path: str) -> int | None:
    """Return the rank of a swapped tensor's path in the shard root; None: it is no such path."""
    found = _PATH.fullmatch(path)
    return int(found[1]) if found else None
