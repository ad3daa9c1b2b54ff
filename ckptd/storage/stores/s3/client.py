"""Make an S3 client from a job file's settings, and translate the server's failures into ours.

botocore's own by default: one credentials chain, one connection pool, least memory; s3fs's where the job asks
for it (docs/adr/0200). Bounded retries with jitter and time limits watch every request; what they cannot mend
is named (docs/internals/stores.md).
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from ckptd.errors import (
    ConfigError,
    NoSpaceError,
    NotPermitted,
    RemoteNotOurs,
    RemoteUnreachable,
    StorageError,
)
from ckptd.storage.stores.access import credentials_path
from ckptd.storage.stores.s3.body import Body

if TYPE_CHECKING:
    from collections.abc import Callable

    from botocore.config import Config

    from ckptd.errors import CkptdError
    from ckptd.storage.stores.access import Access


# --- credentials -----------------------------------------------------------------------------------------
# They come from the AWS chain, a profile or a file, with a role on top, and are read anew at every attempt:
# keys that were rotated, and roles whose permission came back, heal by themselves (docs/adr/0089).

_SERVICES = ("s3", "sts", "sso", "portal.sso", "oidc")
_METHOD = "assume-role"


def new_session(access: Access) -> Any:
    """Return a botocore session that finds the credentials that `access` names, and no others.

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
    session.register_component("data_loader", Loader(file_loader=SmallModels()))
    if kind == "file":
        session.set_config_variable("credentials_file", credentials_file(rest))
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
        """Return the credentials, fetched when they are first used."""
        return self._found


class SmallModels:
    """Reads botocore's models without their prose: most of their memory is documentation (P12)."""

    _openers: ClassVar[dict[str, Callable[[str], Any]]] = {".json": open, ".json.gz": gzip.open}

    def exists(self, path: str) -> bool:
        """Whether a model of that name is there."""
        return any(os.path.isfile(path + end) for end in self._openers)

    def load_file(self, path: str) -> Any:
        """Return the model, or None."""
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


def credentials_file(given: str) -> str:
    """Return the path of the file that `credentials = "file:GIVEN"` names.

    Raises:
        NotPermitted: it is not there, or cannot be read.
    """
    found = credentials_path(given)
    if not os.access(found, os.R_OK):
        msg = f"the credentials file {found} is not there or cannot be read"
        raise NotPermitted(msg, hint="an AWS credentials file; with systemd: LoadCredential= in the unit")
    return found


# --- the client ------------------------------------------------------------------------------------------


CONNECT_SECONDS = 20
READ_SECONDS = 75
"""Longer than an upload may stand still (daemon/uploads/session.py): a retry in here would be told to
nobody."""
ATTEMPTS = 5
CONNECTIONS = 32

_CREDENTIALS_HINT = (
    'they are read again at every try; credentials = "env", "profile:NAME" or "file:PATH" says where they lie'
)
_RIGHTS_HINT = (
    "allow s3:ListBucket, GetObject, PutObject, DeleteObject, AbortMultipartUpload and "
    "ListMultipartUploadParts there; for tags PutObjectTagging, for a KMS key GenerateDataKey and Decrypt"
)
_WRONG_KEYS = {
    "InvalidAccessKeyId": "the access key is not known",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidToken": "the session token is wrong",
    "ExpiredToken": "the session token has expired",
    "TokenRefreshRequired": "the session token has expired",
    "InvalidClientTokenId": "the access key is not known",
    "AuthFailure": "the credentials are wrong",
    "InvalidSecurity": "the credentials are wrong",
}
_DENIED = {"AccessDenied", "Forbidden", "403", "AllAccessDisabled", "AccountProblem", "NotSignedUp"}
_ELSEWHERE = {
    "PermanentRedirect",
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_FULL = {
    "QuotaExceeded",
    "InsufficientStorage",
    "507",
    "XMinioStorageFull",
    "InsufficientCapacity",
    "NoSpaceLeft",
}
_BUSY = {
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "Throttling",
    "503",
    "500",
    "502",
}
ABSENT = {"NoSuchKey", "404", "NotFound"}
NOT_OFFERED = {"NotImplemented", "MethodNotAllowed", "405", "501"}
TAKEN = {"PreconditionFailed", "412"}
_SIGNS = {
    "GetObject": {"ETag", "LastModified"},
    "HeadObject": {"LastModified"},
    "UploadPart": {"ETag"},
    "UploadPartCopy": {"CopyPartResult"},
    "CreateMultipartUpload": {"UploadId"},
    "ListObjectsV2": {"Name", "Contents", "KeyCount", "MaxKeys"},
    "ListParts": {"UploadId", "Parts", "Bucket"},
}
"""Operation → at least one of these is in every S3 server's answer."""
_BAD_HEADER = ("Invalid header", "character detected in")
_NO_HTTP = ("BadStatusLine", "Bad status line")
"""Words by which http.client and aiohttp, below the two clients, say so."""
RACING = {"ConditionalRequestConflict", "OperationAborted", "409"}


class OpenedClient(NamedTuple):
    """A client; the credentials and authorities that it uses, as botocore's own objects.

    `client` is botocore's or `S3fsClient`, which answers the same operations. `credentials` None: there are
    none, or none but the client may use them.
    """

    client: Any
    credentials: Any
    verify: Any


def make_client(access: Access, open_one: Callable[[Access], OpenedClient]) -> OpenedClient:
    """Return a new client, its credentials looked up now; `open_one` is of the kind that `access` names.

    Raises:
        NotPermitted: the profile or file is not there.
        ConfigError: the settings around it cannot be read.
    """
    from botocore import exceptions

    kind, _, rest = access.credentials.partition(":")
    try:
        opened = open_one(access)
    except exceptions.ProfileNotFound as error:
        file = (
            f"the credentials file {credentials_path(rest)} has no section [default]"
            if kind == "file"
            else ""
        )
        msg = file or f"there is no AWS profile {error.kwargs.get('profile')!r}"
        raise NotPermitted(msg, hint=_CREDENTIALS_HINT) from error
    except _no_credentials() as error:
        raise _unusable(error) from error
    except (exceptions.BotoCoreError, ValueError) as error:
        msg = f"the settings for S3 cannot be used: {error}"
        raise ConfigError(msg, hint="see endpoint_url, region and the AWS configuration file") from error
    meta = opened.client.meta
    meta.events.register("after-call.s3", partial(_speaks_s3, meta.endpoint_url))
    return opened


def open_botocore(access: Access) -> OpenedClient:
    """Return botocore's own client."""
    from botocore.config import Config

    session = new_session(access)
    endpoint = access.endpoint
    region = access.region or session.get_config_variable("region") or "us-east-1"
    style = access.addressing if access.addressing != "auto" or not endpoint else "path"
    config = Config(**config_values(payload_signing_enabled=access.signs_payload, addressing_style=style))
    if access.role_arn is not None:
        assume_role(session, access, region, config)
    client = session.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
    client.meta.events.register("before-sign.s3", _before_signing)
    client.meta.events.register("before-send.s3", _before_sending)
    authorities = session.get_config_variable("ca_bundle")
    verify = authorities or os.environ.get("REQUESTS_CA_BUNDLE") or True
    return OpenedClient(client, session.get_credentials(), verify)


def config_values(**s3: Any) -> dict[str, Any]:
    """Return what botocore's Config says for each kind of client; `s3`: of S3 alone."""
    return {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        "max_pool_connections": CONNECTIONS,
        # bodies are proved by our checksum of the whole object, not by hashing each part twice
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": s3,
    }


def _before_signing(request: Any, **_: Any) -> None:
    """Make a body remember that bytes read for the signature are read again when they are sent."""
    if isinstance(request.data, Body):
        request.data.rehearse(True)


def _before_sending(request: Any, **_: Any) -> None:
    if isinstance(request.body, Body):
        request.body.rehearse(False)


def _speaks_s3(endpoint: str, http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    """Raise when a 200 lacks what every S3 server puts into it: a web page is no empty list."""
    wanted = _SIGNS.get(model.name)
    if wanted and http_response.status_code < 300 and not wanted & parsed.keys():
        raise _no_s3(endpoint, f"HTTP {http_response.status_code} without {' or '.join(sorted(wanted))}")


def _no_s3(endpoint: str, reason: str) -> RemoteNotOurs:
    msg = f"what answers at {endpoint} does not speak S3 ({reason})"
    return RemoteNotOurs(msg, hint="is endpoint_url right: host, port, http or https?")


def _no_credentials() -> tuple[type[Exception], ...]:
    """Return the errors that botocore raises when it finds no credentials."""
    from botocore import exceptions as e

    incomplete = (e.NoCredentialsError, e.PartialCredentialsError)
    return (
        *incomplete,
        e.CredentialRetrievalError,
        e.TokenRetrievalError,
        e.SSOError,
        e.MetadataRetrievalError,
    )


def _unusable(error: Exception) -> NotPermitted:
    """Report unusable credentials without the provider's own words: a helper program may print the secret
    (P15)."""
    from botocore import exceptions

    if isinstance(error, exceptions.NoCredentialsError):
        return NotPermitted("no AWS credentials were found", hint=_CREDENTIALS_HINT)
    details = getattr(error, "kwargs", {})
    if isinstance(error, exceptions.PartialCredentialsError):
        msg = f"{details.get('cred_var')} is missing from the AWS credentials ({details.get('provider')})"
    else:
        msg = f"the AWS credentials could not be got ({details.get('provider') or type(error).__name__})"
    return NotPermitted(msg, hint=_CREDENTIALS_HINT)


def code_of(error: Exception) -> str:
    """Return the server's error code; "" when it did not answer."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def status_of(error: Exception) -> int:
    """Return the HTTP status; 0 when it did not answer."""
    response = getattr(error, "response", None)
    meta = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(meta.get("HTTPStatusCode", 0))


def is_refused(error: Exception) -> bool:
    """Tell whether the server answered that it will not do this, however often it is asked."""
    return 400 <= status_of(error) < 500 or code_of(error) in NOT_OFFERED


def failure(error: Exception, what: str, url: str, endpoint: str) -> CkptdError:
    """Return a botocore exception as an error of the tree; `what` says what was tried."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    place = f"{url} at {endpoint}"
    cause = str(getattr(error, "kwargs", {}).get("error", error))
    if isinstance(error, _no_credentials()):
        unusable = _unusable(error)
        return NotPermitted(f"{place}: {unusable.message}", hint=unusable.hint)
    if isinstance(error, exceptions.ClientError):
        return _answered(error, what, url, endpoint)
    if isinstance(error, exceptions.SSLError):
        msg = f"{place}: the TLS connection is refused: {error.kwargs.get('error', error)}"
        return RemoteUnreachable(msg, hint="http or https? for an own authority set AWS_CA_BUNDLE")
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError):
        # a role is assumed elsewhere
        host = urlsplit(str(error.kwargs.get("endpoint_url") or endpoint)).netloc
        msg = f"{place}: nothing answers at {host} ({_cause(error)})"
        return RemoteUnreachable(msg, hint="is endpoint_url right, and the server up? ckptd tries again")
    if isinstance(error, exceptions.HTTPClientError) and any(words in cause for words in _BAD_HEADER):
        # the error quotes the header, and a session token is one
        msg = f"{place}: the AWS credentials hold a line break or another character that no key has"
        return NotPermitted(msg, hint=_CREDENTIALS_HINT)
    is_no_http = any(words in cause for words in _NO_HTTP)
    if isinstance(error, ResponseParserError) or is_no_http:
        return _no_s3(endpoint, "nor HTTP" if is_no_http else "its answer is no XML")
    if isinstance(error, exceptions.ProxyConnectionError):
        # botocore blots out the name and password in it
        msg = f"{place}: the proxy {error.kwargs.get('proxy_url')} does not answer"
        return RemoteUnreachable(msg, hint="see HTTP_PROXY, HTTPS_PROXY and NO_PROXY; ckptd tries again")
    if isinstance(
        error, exceptions.HTTPClientError | exceptions.ConnectionError | exceptions.IncompleteReadError
    ):
        msg = f"{place}: {what}: the connection was lost ({_cause(error)})"
        return RemoteUnreachable(msg, hint="ckptd tries again by itself")
    return StorageError(f"{place}: {what}: {' '.join(str(error).split())[:300]}")


def _cause(error: Exception) -> str:
    """Return the innermost reason, as short as it comes."""
    inner: object = getattr(error, "kwargs", {}).get("error", error)
    while isinstance(inner, Exception):
        reason = getattr(inner, "reason", None) or inner.__cause__
        if reason is None or reason is inner:
            break
        inner = reason
    text = " ".join(str(inner).split())
    return text.rsplit(": ", 1)[-1][:120] if text else type(error).__name__


def _answered(error: Any, what: str, url: str, endpoint: str) -> CkptdError:
    code, status = code_of(error), status_of(error)
    said = str(error.response.get("Error", {}).get("Message") or "")[:200]
    place = f"{url} at {endpoint}"
    if getattr(error, "operation_name", "") == "AssumeRole":
        msg = f"{place}: the role may not be assumed: {code} {said}".rstrip()
        return NotPermitted(
            msg, hint="role_arn, external_id, sts_endpoint_url; what does its trust policy say?"
        )
    if code in _WRONG_KEYS:
        return NotPermitted(f"{place}: {_WRONG_KEYS[code]} ({code})", hint=_CREDENTIALS_HINT)
    if code in _SKEWED:
        msg = f"{place}: this node's clock is {_skew(error)} ({code})"
        return RemoteUnreachable(msg, hint="correct the clock (NTP); ckptd tries again by itself")
    if code == "NoSuchBucket":
        bucket = urlsplit(url).netloc
        msg = f"there is no bucket {bucket} at {endpoint}"
        return RemoteNotOurs(msg, hint="create it, or correct url, endpoint_url and region")
    if code in _ELSEWHERE or status in (301, 307):
        return elsewhere(url, endpoint, _region(error))
    if code in _FULL:
        return NoSpaceError(f"{place}: {what}: {code} {said}".rstrip())
    if code in _DENIED or status in (401, 403):
        return NotPermitted(
            f"{place}: {what}: access is denied ({code or f'HTTP {status}'})", hint=_RIGHTS_HINT
        )
    if code in _BUSY or status >= 500 or status == 429:
        msg = f"{place}: {what}: the server answers {status} {code}"
        return RemoteUnreachable(msg, hint="ckptd tries again by itself")
    if not code:
        return _no_s3(endpoint, f"HTTP {status}")
    return StorageError(f"{place}: {what}: {code} {said}".rstrip())


def elsewhere(url: str, endpoint: str, region: str = "") -> RemoteNotOurs:
    """Return the error for a bucket that lies in another region than the one that is asked."""
    hint = f'set region = "{region}"' if region else "set region and endpoint_url to the bucket's own"
    return RemoteNotOurs(f"{url} at {endpoint}: the bucket lies in another region", hint=hint)


def _region(error: Any) -> str:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(error.response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or "")


def _skew(error: Any) -> str:
    """Say how far this clock is from the server's, when the answer carries the server's time."""
    from email.utils import parsedate_to_datetime
    from time import time

    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        minutes = (time() - parsedate_to_datetime(date).timestamp()) / 60
    except (TypeError, ValueError):
        return "too far from the server's"
    side = "ahead of" if minutes > 0 else "behind"
    return f"{abs(minutes):.0f} min {side} the server's"


def ran_in_circles(error: BaseException | None) -> bool:
    """A RecursionError that a layer below took for a broken connection."""
    while error is not None and not isinstance(error, RecursionError):
        error = error.__cause__ or error.__context__
    return error is not None
