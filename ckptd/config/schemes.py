"""List the kinds of remote by their URL's scheme: which package speaks it, what it reads from the
environment.

One table serves the judgement of job files, opening a remote, and what its child process may know.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Describe one URL scheme before anything is imported for it."""

    package: str
    """Package to install for it with pip."""
    variables: tuple[str, ...] = ()
    """Beginnings of the environment variables that its driver reads credentials and settings from."""
    takes_key_file: bool = False
    """`credentials = "file:PATH"` means something to it."""
    creates_only: bool = False
    """Its driver sends a create-only condition that the service enforces (tried again when it is opened)."""


_SSH = Scheme(package="ckptd[sftp]", variables=("SSH_AUTH_SOCK", "USER", "LOGNAME"), takes_key_file=True)
_GOOGLE = Scheme(
    package="gcsfs",
    variables=("GOOGLE_", "CLOUDSDK_", "GCE_METADATA_", "STORAGE_EMULATOR_HOST", "FSSPEC_"),
    takes_key_file=True,
    creates_only=True,
)
_AZURE = Scheme(package="adlfs", variables=("AZURE_", "IDENTITY_", "MSI_", "FSSPEC_"))

SCHEMES = {
    "sftp": _SSH,
    "ssh": _SSH,
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "hf": Scheme(package="huggingface_hub", variables=("HF_", "HUGGING_FACE_", "FSSPEC_")),
    "oci": Scheme(package="ocifs", variables=("OCI_", "OCIFS_", "FSSPEC_")),
    "oss": Scheme(package="ossfs", variables=("OSS_", "ALIBABA_CLOUD_", "FSSPEC_")),
}
"""Remotes beside directories and s3://. Others that fsspec finds installed are spoken to the same way."""

_UNKNOWN = Scheme(package="", variables=("FSSPEC_",))

REFUSED = {
    "ftp": "ftp:// sends data and passwords in the clear; use sftp://",
    "http": "http:// cannot be written to",
    "https": "https:// cannot be written to",
    "s3a": "write s3:// for s3a://",
    "local": "write an absolute path for local://",
    "memory": "memory:// ends with the process",
}
_NO_PLACES = [
    "arrow_hdfs",
    "async_wrapper",
    "asyncwrapper",
    "asynclocal",
    "blockcache",
    "cached",
    "dask",
    "data",
    "dir",
    "dvc",
    "filecache",
    "generic",
    "gist",
    "git",
    "github",
    "jlab",
    "jupyter",
    "libarchive",
    "pyscript",
    "reference",
    "simplecache",
    "tar",
    "wandb",
    "zip",
]


def scheme_of(url: str) -> Scheme:
    """Return the scheme of a URL; an empty record for a path or an unknown scheme."""
    return SCHEMES.get(urlsplit(url).scheme, _UNKNOWN)


def supported() -> str:
    """Return the kinds of URL that are supported, as text."""
    return f"a directory, s3://, {', '.join(f'{name}://' for name in SCHEMES)}"


def url_fault(parts: SplitResult) -> str | None:
    """Return why a URL that is neither a path nor s3:// cannot be a remote; None when it can."""
    scheme = parts.scheme
    if scheme in REFUSED:
        return REFUSED[scheme]
    if scheme in _NO_PLACES or (scheme not in SCHEMES and not _is_installed(scheme)):
        return f"{scheme}:// is no place that ckptd knows; it takes {supported()}"
    if parts.query or parts.fragment or "::" in parts.geturl():
        return "a URL with '?', '#' or '::' may hold secrets or another URL; write the plain place"
    folders = parts.path.strip("/").split("/")
    if not parts.netloc or any(part in ("", ".", "..") for part in folders):
        return f"a job has a folder of its own there: {scheme}://{parts.netloc or 'host'}/backup/llama-7b"
    if SCHEMES.get(scheme) is _SSH:
        return _ssh_fault(parts, folders)
    return None


def _ssh_fault(parts: SplitResult, folders: list[str]) -> str | None:
    if folders[0].startswith("~"):
        return "'~' is not known here; write the whole path on the server"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or not parts.hostname or parts.hostname.startswith("-"):
        return f"the server is user@host:port, {parts.netloc} is not"
    return None


def _is_installed(scheme: str) -> bool:
    """Tell whether fsspec or a plugin of it knows the scheme."""
    from fsspec.registry import available_protocols

    return scheme in available_protocols()
