"""Expand a glob in save_dir: one job per directory that matches, now and later (docs/contract.md
*Configuration*).

`{dir}` is what the wildcards stood for; each URL needs it, so that no two jobs share a remote.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import itertools
import os
from typing import Any

from ckptd.errors import ConfigError

_WILD = frozenset("*?[")
PLACEHOLDER = "{dir}"


def is_glob(value: object) -> bool:
    """Tell whether a save_dir stands for several."""
    return isinstance(value, str) and not _WILD.isdisjoint(value)


def glob_root(pattern: str) -> str:
    """Return the directory below which everything that matches lies.

    >>> root_of("/nvme/runs/*/ckpt")
    '/nvme/runs'
    """
    parts = os.path.normpath(pattern).split(os.sep)
    fixed = itertools.takewhile(lambda name: not is_glob(name), parts)
    return os.sep.join(fixed) or os.sep


def expand_glob(data: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return job tables, one per directory that matches; symlinks and files do not count, none is fine.

    Raises:
        ConfigError: a URL without {dir}.
        OSError: the directory that the pattern begins with is there and cannot be listed; `glob` would find
            nothing there, and every job of it would end.
    """
    pattern = os.path.normpath(data["save_dir"])
    remotes = data.get("remote", [])
    for index, remote in enumerate(remotes if isinstance(remotes, list) else []):
        url = remote.get("url") if isinstance(remote, dict) else None
        if isinstance(url, str) and PLACEHOLDER not in url:
            msg = f'{where}: remote[{index}].url = "{url}": save_dir is a glob ({pattern}), '
            msg += "so several jobs would share it"
            raise ConfigError(msg, hint=f"put {PLACEHOLDER} into the url, for example {url}/{PLACEHOLDER}")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.listdir(glob_root(pattern))
    folders = [p for p in sorted(glob.glob(pattern)) if os.path.isdir(p) and not os.path.islink(p)]
    return [_one(data, path, matched_part(pattern, path)) for path in folders]


def matched_part(pattern: str, path: str) -> str:
    """Return the components of `path` that wildcards stand for, joined by dashes.

    >>> matched("/nvme/*/ckpt", "/nvme/llama-7b/ckpt")
    'llama-7b'
    """
    pairs = zip(pattern.split(os.sep), path.split(os.sep), strict=True)
    return "-".join(name for wild, name in pairs if is_glob(wild))


def _one(data: dict[str, Any], path: str, name: str) -> dict[str, Any]:
    made = copy.deepcopy(data)
    made["save_dir"] = path
    given = str(made.get("name", ""))
    made["name"] = given.replace(PLACEHOLDER, name) if PLACEHOLDER in given else f"{given}-{name}"
    for remote in made.get("remote", []):
        if isinstance(remote, dict) and isinstance(remote.get("url"), str):
            remote["url"] = remote["url"].replace(PLACEHOLDER, name)
    return made
