"""Where an S3 client's credentials come from: the AWS chain, a profile, a file, and a role on top (adr/0089).

Apart from the client because it is read anew at every attempt: keys that were rotated, and roles whose
permission came back, heal by themselves.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ckptd.errors import NotPermitted
from ckptd.remote.access import credentials_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from botocore.config import Config

    from ckptd.remote.access import Access

_SERVICES = ("s3", "sts", "sso", "portal.sso", "oidc")
_METHOD = "assume-role"


def new_session(access: Access) -> Any:
    """A botocore session that finds the credentials that `access` names, and no others.

    Raises:
        NotPermitted: the file is not there.
    """
    from botocore.loaders import Loader
    from botocore.session import Session

    # it logs what we raise, with a traceback
    logging.getLogger("botocore.credentials").setLevel(logging.CRITICAL)
    kind, _, rest = access.credentials.partition(":")
    # a profile that is named keeps the environment's keys from winning over it
    session = Session(profile={"profile": rest, "file": "default"}.get(kind))
    session.register_component("data_loader", Loader(file_loader=_SmallModels()))
    if kind == "file":
        session.set_config_variable("credentials_file", _credentials_file(rest))
    return session


def assume_role(session: Any, access: Access, region: str, config: Config) -> None:
    """Let the session act in `access.role_arn`; assumed at the first request and again before it expires.

    Raises:
        botocore's NoCredentialsError: there is nothing to assume it with.
    """
    from botocore import credentials as bc
    from botocore.exceptions import NoCredentialsError

    source = new_session(access)
    own = source.get_credentials()
    if own is None:
        raise NoCredentialsError
    node = re.sub(r"[^\w+=,.@-]", "-", socket.gethostname())[:48]
    more = {"ExternalId": access.external_id} if access.external_id else {}
    fetcher = bc.AssumeRoleCredentialFetcher(
        partial(
            source.create_client, region_name=region, endpoint_url=access.sts_endpoint_url, config=config
        ),
        own,
        access.role_arn,
        extra_args={"RoleSessionName": f"ckptd-{node}", **more},
    )
    found = bc.DeferredRefreshableCredentials(refresh_using=fetcher.fetch_credentials, method=_METHOD)
    session.register_component("credential_provider", bc.CredentialResolver([_Assumed(found)]))


class _Assumed:
    """The one provider of a session that acts in a role."""

    METHOD = _METHOD
    CANONICAL_NAME = "ckptd-role"

    def __init__(self, found: Any) -> None:
        self._found = found

    def load(self) -> Any:
        """The credentials, fetched when they are first used."""
        return self._found


class _SmallModels:
    """Reads botocore's models without their prose: most of their memory is documentation (P12)."""

    _openers: ClassVar[dict[str, Callable[[str], Any]]] = {".json": open, ".json.gz": gzip.open}

    def exists(self, path: str) -> bool:
        """Whether a model of that name is there."""
        return any(os.path.isfile(path + end) for end in self._openers)

    def load_file(self, path: str) -> Any:
        """The model, or None."""
        for end, opener in self._openers.items():
            if os.path.isfile(path + end):
                with opener(path + end) as stream:
                    return json.load(stream, object_hook=_without_prose)
        return None


def _without_prose(part: dict[str, Any]) -> dict[str, Any]:
    if isinstance(part.get("documentation"), str):
        part["documentation"] = ""
    if "regions" in part and isinstance(services := part.get("services"), dict):
        # the endpoints of some three hundred services, of which credentials and S3 need these
        part["services"] = {name: services[name] for name in _SERVICES if name in services}
    return part


def _credentials_file(given: str) -> str:
    found = credentials_path(given)
    if not os.access(found, os.R_OK):
        msg = f"the credentials file {found} is not there or cannot be read"
        raise NotPermitted(msg, hint="an AWS credentials file; with systemd: LoadCredential= in the unit")
    return found
