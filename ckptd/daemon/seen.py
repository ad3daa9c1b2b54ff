"""What a remote knows of one tag, in the words of `choose_generation`: messages in, core's data out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.generation import SeenCommit, SeenManifest

if TYPE_CHECKING:
    from ckptd.remote.messages import TagView


def seen_in(view: TagView) -> tuple[list[SeenManifest], list[SeenCommit]]:
    """Manifests and COMMITs of a tag."""
    manifests = [
        SeenManifest(
            generation=v.manifest.generation,
            form=v.manifest.form,
            manifest=v.manifest,
            committed=v.committed,
        )
        for v in view.manifests
    ]
    commits = [
        SeenCommit(
            generation=v.commit.generation,
            form=v.commit.form,
            key=v.key,
            sha256=v.sha256,
            disputed=v.disputed,
        )
        for v in view.commits
    ]
    return manifests, commits
