"""What a remote's processes may know of the environment: credentials of their own remotes alone (P15).

Apart from the client because conversions and commands start such processes too.
"""

from __future__ import annotations

import os
from pathlib import Path

import ckptd
from ckptd.config_schemes import scheme_of
from ckptd.remote.open import directory_path, is_s3

_PASSED_ON = ("PATH", "LANG")
FOR_SERVERS = (
    "HOME",
    "CREDENTIALS_DIRECTORY",
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_ADDED = {
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""No third-party code at start; one heap, of which large blocks are given back: it spares memory (P12)."""


def clean_environment(*urls: str) -> dict[str, str]:
    """What a child may know: where programs and this package lie; credentials only of its own remotes.

    The usual AWS chain, ssh-agent and the drivers of fsspec read variables and files of the user, so a child
    gets those of its schemes; nothing secret passes through a message, a log or the journal (P15; adr/0040).
    """
    wanted = [name for name in os.environ if name in _PASSED_ON]
    for url in urls:
        if directory_path(url) is None:
            prefixes = ("AWS_",) if is_s3(url) else scheme_of(url).variables
            wanted += [n for n in os.environ if n.startswith(prefixes) or n in FOR_SERVERS]
    environment = _ADDED | {name: os.environ[name] for name in wanted}
    package = str(Path(ckptd.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package, inherited] if inherited else [package])
    return environment
