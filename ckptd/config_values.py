"""Values of single keys: names, paths, URLs, patterns, and what this version does not take yet.

A validator raises ValueError with the reason; `config_explain` adds file, key and value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from ckptd.config_places import NAME_CHARACTERS
from ckptd.config_quantities import parse_optional_duration
from ckptd.config_schemes import url_fault
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

SHORTEST_TAKEOVER_SECONDS = 6.0

UNNAMED = "remote"
"""Name of a remote that only a command line gives."""


def shown_remote(name: str, url: str) -> str:
    """How messages call a remote: by its name, or its URL where nobody gave it one."""
    return url if name == UNNAMED else f"remote {name}"


def reject(text: str) -> NoReturn:
    """End a validation with this reason."""
    raise ValueError(text)


def check_name(value: str) -> str:
    """A name of a job, remote or node."""
    if not value or not set(value) <= NAME_CHARACTERS or value[0] in ".-":
        reject("a name is made of letters, digits and . _ = + -, and starts with none of . and -")
    return value


def absolute_path(value: object) -> Path:
    """An absolute path without `..`."""
    if not isinstance(value, str | Path):
        reject('a path is a string, such as "/nvme/llama-7b"')
    path = Path(str(value))
    if not path.is_absolute():
        reject("the path must be absolute")
    if "\0" in str(value) or ".." in path.parts:
        reject("the path must not contain '..' or NUL")
    return path


def check_save_dir(value: object) -> Path:
    """An absolute path that is neither a glob nor the root directory."""
    if isinstance(value, str) and any(c in value for c in "*?["):
        reject("a glob stands in a job file alone, not in arguments")
    path = absolute_path(value)
    if path == Path("/"):
        reject("save_dir cannot be the root directory")
    return path


def check_url(value: str) -> str:
    """A directory as absolute path or file:// URL, s3://bucket/prefix or a URL of another kind; no secret."""
    parts = urlsplit(value)
    if parts.password is not None:
        reject("a secret does not belong in a URL")
    if parts.scheme == "s3":
        return _check_s3_url(value)
    if parts.scheme not in ("", "file"):
        fault = url_fault(parts)
        if fault is not None:
            reject(fault)
        return value.rstrip("/")
    if parts.netloc not in ("", "localhost"):
        here, there = f"file:///{parts.netloc}{parts.path}", f"sftp://{parts.netloc}{parts.path}"
        reject(f"file:// names no other machine: write {here} for a directory here, or {there}")
    path = url_path(value)
    if path is None or not path.is_absolute() or ".." in path.parts or path == Path("/"):
        reject("the path must be absolute, without '..', and not the root directory")
    return value


def check_spelling(url: str) -> None:
    """Refuse what is typed like an address of another machine and would become a directory in this one.

    Raises:
        ConfigError: `host:/path`, `s3:/bucket`, `C:\\x`; a directory with a colon is named ./x:y or absolute.
    """
    head, colon, rest = url.partition(":")
    if not colon or "/" in head or rest.startswith("//") or head.startswith((".", "~")):
        return
    path = rest.lstrip("/\\")
    if head in _SCHEMES:
        hint = f"write {head}://{'/' if head == 'file' else ''}{path or 'bucket/prefix'}"
    elif len(head) == 1:
        hint = "ckptd runs on Linux: mount that drive there and name the mounted path"
    else:
        hint = f"write sftp://{head}/{path or 'path'}, or mount it and name the mounted path"
    msg = f'"{url}" is neither a URL nor an absolute path'
    raise ConfigError(msg, hint=f"{hint}; a directory of that name here: ./{url}")


def _check_s3_url(value: str) -> str:
    parts = urlsplit(value)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        reject("the bucket must be 3 to 63 small letters, digits, dots and dashes: s3://bucket/prefix")
    prefix = parts.path.strip("/")
    if not prefix or parts.query or parts.fragment or any(p in ("", ".", "..") for p in prefix.split("/")):
        reject("a job has a prefix of its own in the bucket: s3://bucket/llama-7b")
    return f"s3://{parts.netloc}/{prefix}"


def check_endpoint(value: str) -> str:
    """Where an S3 server listens: http(s)://host[:port], without a secret in it."""
    parts = urlsplit(value)
    if parts.username or parts.password:
        reject("a secret does not belong in a URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        reject('an endpoint is http(s)://host[:port], such as "https://s3.example.org:9000"')
    return value


def check_credentials(value: str) -> str:
    """Where secrets lie, never the secrets."""
    kind, _, rest = value.partition(":")
    if value != "env" and (kind not in ("profile", "file") or not rest):
        reject('it is "env", "profile:NAME" or "file:PATH"; secrets themselves stay out of job files')
    name = rest.removeprefix("$CREDENTIALS_DIRECTORY/")
    if (
        kind == "file"
        and not name.startswith("/")
        and ("/" in name or name in ("", ".", "..") or "$" in name)
    ):
        reject(
            "a credentials file is an absolute path, or a name in $CREDENTIALS_DIRECTORY (LoadCredential=)"
        )
    return value


def check_part_size(value: int) -> int:
    """Within what S3 takes."""
    if not 5 << 20 <= value <= 5 << 30:
        reject('a part has at least "5MiB" and at most "5GiB"')
    return value


def check_pattern(value: str) -> str:
    """A shell pattern for names directly in save_dir."""
    if not value or "/" in value or value.startswith("_ckptd"):
        reject("a pattern names files directly in save_dir, such as tokenizer*")
    return value


def check_metrics_place(value: str) -> str:
    """HOST:PORT, or the absolute path of a file that node_exporter reads."""
    if value.startswith("/"):
        if not value.endswith(".prom"):
            reject("node_exporter reads files that end in .prom")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject('it is "HOST:PORT" ("127.0.0.1:9310"), or the path of a file that ends in .prom')
    return value


def check_metrics_file(value: str) -> str:
    """A file below save_dir: no link is followed there (P15)."""
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in value or parts[0].startswith("_ckptd"):
        reject('metrics_file is a relative path below save_dir, such as "metrics.jsonl"')
    return value


def url_path(url: str) -> Path | None:
    """The directory that a remote's URL names; None for other kinds of stores."""
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


_SCHEMES = frozenset(("s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "sftp", "ssh", "file", "http", "https"))

Name = Annotated[str, AfterValidator(check_name)]
Url = Annotated[str, AfterValidator(check_url)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Credentials = Annotated[str, AfterValidator(check_credentials)]
StateDir = Annotated[Path | None, BeforeValidator(lambda v: None if v is None else absolute_path(v))]
MetricsPlace = Annotated[str, AfterValidator(check_metrics_place)]
MetricsFile = Annotated[str, AfterValidator(check_metrics_file)]
Names = Annotated[tuple[Annotated[str, AfterValidator(check_pattern)], ...], Strict(False)]
Count = Annotated[int, Field(ge=1)]


def local_form(value: object) -> object:
    """Refuse forms that are made for remotes alone."""
    if isinstance(value, str) and value.startswith("weights-"):
        reject(f'the form "{value}" is made for remotes; name it in the forms of a [[remote]]')
    return value


def only_never(value: object) -> float | None:
    """ "never" is the only value so far."""
    seconds = parse_optional_duration(value)
    if seconds is not None:
        reject('only "never" is in this version: an incomplete save is left alone')
    return None


def check_takeover(seconds: float) -> float:
    """Six heartbeats of a second at least."""
    if seconds < SHORTEST_TAKEOVER_SECONDS:
        reject(f'a host is silent for at least "{SHORTEST_TAKEOVER_SECONDS:.0f}s" before it is replaced')
    return seconds


def not_shareable(remotes: Iterable[tuple[str, bool, tuple[str, ...]]]) -> str:
    """Why hosts over one directory could not meet in these remotes (URL, required, forms); "": they can."""
    known = list(remotes)
    if not any(required and "zero" in forms for _, required, forms in known):
        return "shared_fs = true: the hosts agree in a remote; set required = true on one"
    kept = next((url for url, _, _ in known if url.startswith("hf://")), None)
    return f"shared_fs = true: {kept} keeps every heartbeat for ever; use another remote" if kept else ""


Trainer = Literal["auto", "deepspeed", "huggingface", "accelerate", "lightning", "megatron"]
Form = Literal["zero", "universal", "weights-fp32", "weights-bf16", "weights-fp16"]
