"""Describe how a remote is reached beyond its URL: place, identity, what each request says of an object.

`credentials` names where secrets lie: the usual chain of the environment, a profile, or a file that systemd's
LoadCredential put there. Nothing in here is a secret.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote_plus, urlsplit

from ckptd.base.identity import Model
from ckptd.errors import NotPermitted

if TYPE_CHECKING:
    from ckptd.config.schema import RemoteConfig

_CREDENTIALS_VARIABLE = "$CREDENTIALS_DIRECTORY"


class Access(Model):
    """Keys of `[[remote]]` that only object stores and servers need; their own defaults otherwise."""

    client: Literal["botocore", "s3fs"] = "botocore"
    storage_options: tuple[tuple[str, str], ...] = ()
    """Arguments of s3fs.S3FileSystem: name, value as JSON."""
    endpoint_url: str | None = None
    region: str | None = None
    credentials: str = "env"
    """env | profile:NAME | file:PATH."""
    part_size_bytes: int | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    role_arn: str | None = None
    external_id: str | None = None
    sts_endpoint_url: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    sign_payload: bool | None = None
    verify: Literal["auto", "read-back", "none"] = "auto"
    """read-back: ETags are not looked at, what no checksum proves is read again."""

    @property
    def for_documents(self) -> dict[str, str]:
        """Return the arguments of each S3 request that begins one of our documents: encryption and tags.

        No storage class: they are small, read at every look and replaced or removed early, all of which the
        classes for rare access charge for.
        """
        given = {
            "ServerSideEncryption": self.sse,
            "SSEKMSKeyId": self.sse_kms_key_id,
            "Tagging": "&".join(f"{quote_plus(k)}={quote_plus(v)}" for k, v in self.tags),
        }
        return {name: value for name, value in given.items() if value}

    @property
    def for_data(self) -> dict[str, str]:
        """Return the arguments of each S3 request that begins an object of a checkpoint."""
        storage_class = {"StorageClass": self.storage_class} if self.storage_class else {}
        return self.for_documents | storage_class

    @property
    def endpoint(self) -> str | None:
        """Return the S3 server's URL; None: AWS, over TLS."""
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        return self.endpoint_url or next(filter(None, map(os.environ.get, names)), None)

    @property
    def is_tls(self) -> bool:
        """Whether the server is authenticated and nobody on the way can change a byte."""
        return self.endpoint is None or self.endpoint.startswith("https://")

    @property
    def signs_payload(self) -> bool:
        """Whether bodies are signed: by default where neither TLS nor this machine alone carries them."""
        if self.sign_payload is not None:
            return self.sign_payload
        host = urlsplit(self.endpoint or "").hostname or ""
        is_here = host in ("localhost", "::1") or host.endswith(".localhost") or host.startswith("127.")
        return not self.is_tls and not is_here

    def shown(self) -> tuple[tuple[str, str], ...]:
        """Key → value of what is set, in words, for `ckptd check`."""
        given: dict[str, str | None] = {
            "client": None if self.client == "botocore" else self.client,
            "storage_options": ", ".join(f"{k} = {v}" for k, v in self.storage_options) or None,
            "endpoint_url": self.endpoint_url,
            "region": self.region,
            "addressing": None if self.addressing == "auto" else self.addressing,
            "credentials": self.credentials,
            "role_arn": self.role_arn,
            "external_id": self.external_id,
            "sts_endpoint_url": self.sts_endpoint_url,
            "sse": self.sse,
            "sse_kms_key_id": self.sse_kms_key_id,
            "storage_class": self.storage_class and f"{self.storage_class}; documents in the default class",
            "tags": ", ".join(f"{k}={v}" for k, v in self.tags) or None,
            "sign_payload": None if self.sign_payload is None else str(self.sign_payload).lower(),
        }
        return tuple((name, value) for name, value in given.items() if value)


def access_of(remote: RemoteConfig) -> Access:
    """Return how a remote is reached, as its job file says."""
    return Access.model_validate({name: getattr(remote, name) for name in Access.model_fields})


def credentials_path(given: str) -> str:
    """Return the path of the file that `credentials = "file:GIVEN"` names; a bare name is a systemd
    credential.

    Raises:
        NotPermitted: a name, and no unit gave this process credentials.
    """
    if given.startswith("/"):
        return os.path.expandvars(given)
    name = given.removeprefix(f"{_CREDENTIALS_VARIABLE}/")
    place = os.environ.get(_CREDENTIALS_VARIABLE[1:])
    if not place:
        msg = f'credentials = "file:{given}" is a name in {_CREDENTIALS_VARIABLE}, which is not set here'
        raise NotPermitted(
            msg, hint=f"systemd sets it: LoadCredential={name}:PATH in the unit; by hand, set it to a folder"
        )
    return os.path.join(place, name)
