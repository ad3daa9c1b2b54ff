"""Check the values of single keys: names, paths, URLs, patterns, rules.

A validator raises ValueError with the reason; `config.messages` adds file, key and value.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NoReturn
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Strict

from ckptd.base.humanize import NAME_CHARACTERS
from ckptd.base.names import stays_inside
from ckptd.config.quantities import parse_duration, text_of
from ckptd.config.remote_names import url_path
from ckptd.config.schemes import url_fault
from ckptd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

SHORTEST_TAKEOVER_SECONDS = 6.0


def reject(text: str) -> NoReturn:
    """End a validation with this reason."""
    raise ValueError(text)


def check_name(value: str) -> str:
    """Check a name of a job, remote or node."""
    if not value or not set(value) <= NAME_CHARACTERS or value[0] in ".-":
        reject("a name is made of letters, digits and . _ = + -, and starts with none of . and -")
    return value


def absolute_path(value: object) -> Path:
    """Check an absolute path without `..`."""
    if not isinstance(value, str | Path):
        reject('a path is a string, such as "/nvme/llama-7b"')
    path = Path(str(value))
    if not path.is_absolute():
        # whoever reads the file may have another home, so nothing is expanded
        full = os.path.expandvars(os.path.expanduser(str(value)))
        reject("the path must be absolute" + (f': write "{full}"' if os.path.isabs(full) else ""))
    if "\0" in str(value) or ".." in path.parts:
        reject("the path must not contain '..' or NUL")
    return path


def check_save_dir(value: object) -> Path:
    """Check an absolute path that is neither a glob nor the root directory."""
    if isinstance(value, str) and any(c in value for c in "*?["):
        reject("a glob stands in a job file alone, not in arguments")
    path = absolute_path(value)
    if path == Path("/"):
        reject("save_dir cannot be the root directory")
    return path


def check_url(value: str) -> str:
    """Check a directory (absolute path or file:// URL), s3://bucket/prefix or another URL; refuse secrets."""
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
    if head == "rclone" or ":" in rest:
        hint = "rclone's remotes are no URLs: `rclone mount` it and name the mounted path"
    elif head in _SCHEMES:
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
    """Return the URL of an S3 server, checked: http(s)://host[:port], without a secret in it."""
    parts = urlsplit(value)
    if parts.username or parts.password:
        reject("a secret does not belong in a URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        reject('an endpoint is http(s)://host[:port], such as "https://s3.example.org:9000"')
    return value


def check_credentials(value: str) -> str:
    """Return the place of credentials, checked: env, a profile or a file, never the secrets themselves."""
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
    """Check that it is within what S3 takes."""
    if not 5 << 20 <= value <= 5 << 30:
        reject('a part has at least "5MiB" and at most "5GiB"')
    return value


def check_pattern(value: str) -> str:
    """Check a shell pattern for names directly in save_dir."""
    if not value or "/" in value or value.startswith("_ckptd"):
        reject("a pattern names files directly in save_dir, such as tokenizer*")
    return value


def check_metrics_place(value: str) -> str:
    """Check HOST:PORT, or the absolute path of a file that node_exporter reads."""
    if value.startswith("/"):
        if not value.endswith(".prom"):
            reject("node_exporter reads files that end in .prom")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        reject('it is "HOST:PORT" ("127.0.0.1:9310"), or the path of a file that ends in .prom')
    return value


def check_metrics_file(value: str) -> str:
    """Check a file below save_dir, where no link is followed (P15)."""
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in value or parts[0].startswith("_ckptd"):
        reject('metrics_file is a relative path below save_dir, such as "metrics.jsonl"')
    return value


def check_layout_files(value: str) -> str:
    """Accept a pattern of files directly in save_dir."""
    if "/" in value or not value or value.startswith("_ckptd"):
        reject('files is a pattern of names directly in save_dir, such as "model_*.pt"')
    return value


class CompleteWhen(NamedTuple):
    """Say what makes a checkpoint whole that no layout knows: a file, or quiet time."""

    kind: Literal["marker", "manifest", "quiet"]
    name: str = ""
    """Path of the marker or manifest in the folder of each checkpoint."""
    seconds: float = 0.0


def parse_complete_when(value: object) -> CompleteWhen | None:
    """Parse "marker DONE", "manifest files.json" and "quiet 120s"."""
    if value is None or isinstance(value, CompleteWhen):
        return value
    text = text_of(value, "a rule", "marker DONE")
    kind, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    if kind == "quiet" and rest:
        seconds = parse_duration(rest)
        if seconds <= 0:
            reject('"quiet" names a time, such as "quiet 120s"')
        return CompleteWhen("quiet", seconds=seconds)
    if kind in ("marker", "manifest") and stays_inside(rest):
        return CompleteWhen("marker" if kind == "marker" else "manifest", name=rest)
    msg = f'{text!r} is no rule; write "marker DONE" or "manifest files.json", a file in each checkpoint\'s '
    msg += 'folder that is written last, or "quiet 120s"'
    raise ValueError(msg)


_SCHEMES = frozenset(("s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "sftp", "ssh", "file", "http", "https"))
Name = Annotated[str, AfterValidator(check_name)]
Url = Annotated[str, AfterValidator(check_url)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Credentials = Annotated[str, AfterValidator(check_credentials)]
AbsoluteDir = Annotated[Path | None, BeforeValidator(lambda v: None if v is None else absolute_path(v))]
MetricsPlace = Annotated[str, AfterValidator(check_metrics_place)]
LayoutFiles = Annotated[str, AfterValidator(check_layout_files)]
MetricsFile = Annotated[str, AfterValidator(check_metrics_file)]
Names = Annotated[tuple[Annotated[str, AfterValidator(check_pattern)], ...], Strict(False)]


def local_form(value: object) -> object:
    """Refuse forms that are made for remotes alone."""
    if isinstance(value, str) and value.startswith("weights-"):
        reject(f'the form "{value}" is made for remotes; name it in the forms of a [[remote]]')
    return value


def check_takeover(seconds: float) -> float:
    """Refuse less than six heartbeats of a second."""
    if seconds < SHORTEST_TAKEOVER_SECONDS:
        reject(f'a host is silent for at least "{SHORTEST_TAKEOVER_SECONDS:.0f}s" before it is replaced')
    return seconds


def not_shareable(remotes: Iterable[tuple[str, bool, tuple[str, ...]]]) -> str:
    """Return why hosts over one directory could not meet in these remotes (URL, required, forms); "": they
    can.
    """
    known = list(remotes)
    if not any(required and "zero" in forms for _, required, forms in known):
        return "shared_fs = true: the hosts agree in a remote; set required = true on one"
    kept = next((url for url, _, _ in known if url.startswith("hf://")), None)
    return f"shared_fs = true: {kept} keeps every heartbeat for ever; use another remote" if kept else ""


Trainer = Literal["auto", "deepspeed", "huggingface", "accelerate", "lightning", "megatron", "torch"]
Form = Literal["zero", "universal", "weights-fp32", "weights-bf16", "weights-fp16"]
