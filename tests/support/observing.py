"""Ask a remote as the daemon does, under the identity that it shows now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.storage.remote import observe as real

if TYPE_CHECKING:
    from ckptd.core.model.decision import Decision
    from ckptd.storage.remote.documents import DocumentCache
    from ckptd.storage.remote.messages import Confirmed, Observation, TagView
    from ckptd.storage.stores.base import Store


def observe(store: Store, cache: DocumentCache | None = None) -> Observation:
    """Read everything that is in a remote."""
    return real.observe(store, real.require_identity(store), cache)


def describe(store: Store, tag: str, **asked: Any) -> TagView:
    """Read what a remote holds of one tag."""
    return real.describe(store, tag, real.require_identity(store), **asked)


def confirm(store: Store, commits: tuple[tuple[str, str], ...]) -> Confirmed:
    """Confirm that each COMMIT is there."""
    return real.confirm(store, commits, real.require_identity(store))


def record(store: Store, decision: Decision) -> Decision:
    """Put a person's decision in a remote as its newest."""
    return real.record(store, decision, real.require_identity(store))


def publish(store: Store, decision: Decision) -> None:
    """Put what was decided before in a remote that lacks it."""
    real.publish(store, decision, real.require_identity(store))
