"""Documents of a remote as its child process read them: parts of what `messages` carries to the daemon."""

from __future__ import annotations

from ckptd.core.identity import Model
from ckptd.core.manifest import Commit, NodeManifest
from ckptd.core.manifest_names import ManifestName


class CommitView(Model):
    """A COMMIT as read, with the digest of its bytes and its key."""

    key: str
    sha256: str
    commit: Commit
    disputed: bool = False


class SupplementView(Model):
    """A SUPPLEMENT as read, and the files that it lists: (path, bytes, fingerprint)."""

    key: str
    sha256: str
    files: tuple[tuple[str, int, str], ...]


class ManifestView(Model):
    """A node manifest as read; `committed` when a COMMIT lists its digest."""

    key: str
    sha256: str
    manifest: NodeManifest
    committed: bool


class NamedManifest(Model):
    """A node manifest that was not read: what its name tells."""

    generation: int
    form: str
    name: ManifestName
