"""How a remote is reached beyond its URL: endpoint, region, where credentials lie, part size (P15).

`credentials` names where secrets lie: the usual chain of the environment, a profile, or a file that systemd's
LoadCredential put there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.identity import Model

if TYPE_CHECKING:
    from ckptd.config_model import RemoteConfig


class Access(Model):
    """Keys of `[[remote]]` that only object stores and servers need; all None: their own defaults."""

    endpoint_url: str | None = None
    region: str | None = None
    credentials: str = "env"
    """env | profile:NAME | file:PATH."""
    part_size_bytes: int | None = None


def access_of(remote: RemoteConfig) -> Access:
    """What a job file says of a remote."""
    return Access(
        endpoint_url=remote.endpoint_url,
        region=remote.region,
        credentials=remote.credentials,
        part_size_bytes=remote.part_size_bytes,
    )
