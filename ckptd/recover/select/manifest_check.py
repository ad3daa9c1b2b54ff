"""Check the documents behind a COMMIT before a byte or a name of them is used.

A remote is written by others: a COMMIT copied from another job, a manifest with `../` or a control character
in a path is damage like a flipped bit; the checkpoint is named and not offered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.base.names import ROOT, name_problem, tag_problem
from ckptd.core.model.layouts import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from ckptd.core.model.manifest import Commit, ManifestFile, NodeManifest, RemoteIdentity

_POINTERS = ("latest", "latest_universal")
_INT64 = 1 << 63


def why_untrusted(identity: RemoteIdentity, commit: Commit, manifests: Iterable[NodeManifest]) -> str | None:
    """Return why a COMMIT and its manifests cannot be this remote's own; None when nothing speaks against
    them.
    """
    if commit.job_id != identity.job_id:
        return f"the COMMIT is of job {commit.job_id!r}, this remote is {identity.job_id!r}'s"
    problem = tag_problem(commit.tag) or name_problem(commit.tag)
    if problem is not None or commit.tag in _POINTERS:
        return f"tag {commit.tag!r} {problem or 'is the name of a pointer'}"
    members = tuple(manifests)
    for manifest in members:
        if manifest.job_id != commit.job_id:
            return f"the manifest of {manifest.node!r} is of job {manifest.job_id!r}"
        theirs = (manifest.tag, manifest.generation, manifest.form)
        if theirs != (commit.tag, commit.generation, commit.form):
            return f"the manifest of {manifest.node!r} speaks of {theirs[0]!r} ({theirs[2]}, g{theirs[1]})"
        for file in manifest.files:
            problem = _file_problem(file)
            if problem is not None:
                return problem
        for path in manifest.empty_folders:
            problem = name_problem(path)
            if problem is not None:
                return f"folder {path!r} {problem}"
    paths = {file.path for manifest in members for file in manifest.files}
    taken = sorted(path for manifest in members for path in manifest.empty_folders if _is_in(path, paths))
    if taken:
        return f"path {taken[0]!r} is listed as a file and as a folder"
    return path_problem(file for manifest in members for file in manifest.files)


def path_problem(listed: Iterable[ManifestFile]) -> str | None:
    """Two contents for one path, or a file where another one's folder must be."""
    found: dict[str, tuple[str, int, str]] = {}
    folders: set[str] = set()
    for file in listed:
        if file.role is Role.EXTRA:
            continue
        content = (file.key, file.bytes, file.checksums.crc64nvme)
        if found.setdefault(file.path, content) != content:
            return f"path {file.path!r} is listed with two contents"
        parts = file.path.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = sorted(folders & found.keys())
    return f"path {both[0]!r} is listed as a file and as a folder" if both else None


def _is_in(path: str, files: Set[str]) -> bool:
    """Whether a folder, or one above it, has the path of a file."""
    parts = path.split("/")
    return any("/".join(parts[:count]) in files for count in range(1, len(parts) + 1))


def _file_problem(file: ManifestFile) -> str | None:
    for what, name in (("path", file.path), ("key", file.key)):
        problem = name_problem(name)
        if problem is not None:
            return f"{what} {name!r} {problem}"
    if file.key.split("/")[0] == ROOT:
        return f"key {file.key!r} lies among the documents of ckptd"
    if not (0 <= file.bytes < _INT64 and 0 <= file.mtime_ns < _INT64):
        return f"size or time of {file.path!r} cannot be"
    return None
