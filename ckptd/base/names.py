"""Validate the relative names that may be a path of ours, on the node and in a remote.

Pure, and one rule for both sides: what `restore` would refuse is not uploaded in the first place, so nothing
is deleted here that could not come back.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import quote, unquote

ROOT = "_ckptd"
IDENTITY_KEY = f"{ROOT}/remote.json"
"""Key of the document at the root of every remote of ckptd."""
_RESERVED_END = re.compile(r"(_universal|_weights-.*|\.g\d+|\.a\d+)$")
_TAG_BYTES = 220
_ID = re.compile(r"^[A-Za-z0-9._=+-]+$")
TEMPORARY_PREFIX = ".ckptd-tmp-"
DESCRIPTION = "ckptd.json"
"""Document at the root of a form: what it was made from."""
NAME_BYTES = 255
"""Longest component of a path on every file system that matters."""


def stays_inside(name: str) -> bool:
    """Whether a `/`-name leads nowhere but below its root."""
    return bool(name) and not any(part in ("", ".", "..") or "\0" in part for part in name.split("/"))


def name_problem(name: str) -> str | None:
    """Return why a relative name may not be used as a path; None when it may."""
    if not stays_inside(name):
        return "leads out of its folder"
    try:
        encoded = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError:
        return "is no text"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "holds a control character"
    if any(len(part) > NAME_BYTES for part in encoded):
        return "is too long"
    if any(part.startswith(TEMPORARY_PREFIX) for part in name.split("/")):
        return "is the name of a temporary file of ckptd"
    return None


def shown(name: str) -> str:
    """Return the name as text that fits into JSON and a log: bytes that are no UTF-8 become `\\udcNN`."""
    return name.encode("utf-8", "backslashreplace").decode()


def encode_name(name: str) -> str:
    """Encode a name as a remote component: `[A-Za-z0-9._=+-]`, others percent-encoded; `~` is ours."""
    return name if _ID.match(name) else quote(name, safe="._=+-").replace("~", "%7E")


def decode_name(name: str) -> str:
    """Decode what `encode_name` encoded."""
    return unquote(name)


@lru_cache(maxsize=1024)
def tag_problem(tag: str) -> str | None:
    """Return why a tag cannot be uploaded; None when it can."""
    if "/" in tag:
        return "contains '/'"
    if tag.startswith((".", ROOT)):
        return "starts with '.' or '_ckptd'"
    if _RESERVED_END.search(tag):
        return "ends like a name of ours (_universal, _weights-…, .g<n>, .a<n>)"
    problem = name_problem(tag)
    if problem is None and len(encode_name(tag)) > _TAG_BYTES:
        return f"takes more than {_TAG_BYTES} bytes in a remote, where longer names are made from it"
    return problem
