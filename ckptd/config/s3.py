"""Declare the keys of a `[[remote]]` on S3 beside its URL: address style, role, encryption, class, tags,
signatures.

None of them is a secret, and a value that looks like one is refused without being shown (P15). `ckptd check`
finds out which of them a server accepts: every vendor has words of its own.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Strict, model_validator

from ckptd.config.section import Section, holds_secret, is_secret, looks_secret
from ckptd.config.section import key as _key
from ckptd.config.values import Endpoint, Name, reject

_CLASSES = (
    *("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "EXPRESS_ONEZONE"),
    *("REDUCED_REDUNDANCY", "OUTPOSTS", "SNOW"),
)
_FROZEN = ("GLACIER", "DEEP_ARCHIVE")
_MOST_TAGS = 10
_TAG = re.compile(r"[\w .:/=+@-]*")


def _no_secret(value: str) -> str:
    if looks_secret(value):
        reject("a secret does not belong in a configuration file")
    return value


def check_role(value: str) -> str:
    """Check the ARN of a role, of AWS or of a server that speaks its STS (Ceph writes no account)."""
    if not re.fullmatch(r"arn:[a-z0-9-]+:iam::[\w-]*:role/[\w+=,.@/-]+", _no_secret(value)):
        reject('a role is written as its ARN, such as "arn:aws:iam::123456789012:role/ckptd"')
    return value


def check_external_id(value: str) -> str:
    """Return the external id that a role's owner may require, checked for its characters."""
    if not re.fullmatch(r"[\w+=,.@:/-]{2,1224}", _no_secret(value)):
        reject("an external id has 2 to 1224 letters, digits and _ + = , . @ : / -")
    return value


def check_kms_key(value: str) -> str:
    """Check a key's id, ARN or alias; the key itself stays in its service."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:/-]{0,255}", _no_secret(value)):
        reject('a KMS key is named by its id, its ARN or "alias/NAME"')
    return value


def check_storage_class(value: str) -> str:
    """Check a class that can be read at once: AWS's, or a name of the server's own."""
    if value in _FROZEN:
        reject("objects there cannot be read at once, so neither proved nor restored; GLACIER_IR can be")
    if not re.fullmatch(r"[A-Z][A-Z0-9_-]{1,63}", _no_secret(value)):
        reject(f"a storage class is a word in capitals: {', '.join(_CLASSES[:5])} or the server's own")
    close = difflib.get_close_matches(value, (*_CLASSES, *_FROZEN), n=1, cutoff=0.85)
    if close and close[0] != value:
        reject(f'did you mean "{close[0]}"?')
    return value


def read_tags(value: object) -> tuple[tuple[str, str], ...]:
    """Read a table of strings, or a list of "KEY=VALUE"."""
    if isinstance(value, dict):
        pairs: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple) and all(isinstance(item, str) and "=" in item for item in value):
        pairs = [tuple(item.split("=", 1)) for item in value]
    else:
        reject('tags are a table { team = "nlp" } or a list ["team=nlp"]')
    if len({key for key, _ in pairs}) != len(pairs) or len(pairs) > _MOST_TAGS:
        reject(f"an object has at most {_MOST_TAGS} tags, each key once")
    for key, text in pairs:
        if not isinstance(text, str):
            reject(f'the value of tag {key} is a string: {key} = "{text}"')
        if not 1 <= len(key) <= 128 or len(text) > 256 or not _TAG.fullmatch(key) or not _TAG.fullmatch(text):
            reject(
                "a tag's key has 1 to 128, its value at most 256 letters, digits, spaces and _ . : / = + - @"
            )
        if key.lower().startswith("aws:"):
            reject("keys of tags do not start with aws:")
        _no_secret(text)
    return tuple(sorted(pairs))


_UNTAKEN = {
    "session": "cannot stand in a file",
    "loop": "cannot stand in a file",
    "asynchronous": "is decided by ckptd",
    "skip_instance_cache": "is decided by ckptd",
    "use_listings_cache": "is decided by ckptd",
}
_SECRETS = ("key", "secret", "token", "username", "password")


def read_storage_options(value: object) -> tuple[tuple[str, str], ...]:
    """Read a table of s3fs's arguments, or a list of "NAME=VALUE"; the values become JSON."""
    if isinstance(value, dict):
        pairs = dict(value)
    elif isinstance(value, list | tuple) and all(isinstance(item, str) and "=" in item for item in value):
        pairs = {name.strip(): _from_text(text.strip()) for name, text in (i.split("=", 1) for i in value)}
    else:
        reject("storage_options are a table { requester_pays = true } of s3fs.S3FileSystem's arguments")
    for name in pairs.keys() & _UNTAKEN.keys():
        reject(f"{name} {_UNTAKEN[name]}")
    _refuse_secrets(pairs)
    try:
        return tuple(sorted((name, json.dumps(option, sort_keys=True)) for name, option in pairs.items()))
    except TypeError:
        reject("a value is a string, a number, true, false, a list or a table")


def _from_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refuse_secrets(options: dict[str, Any]) -> None:
    for name, option in options.items():
        if name in _SECRETS or is_secret(name) or holds_secret(option):
            reject(
                "a secret does not belong in a configuration file: FSSPEC_S3_KEY and FSSPEC_S3_SECRET, "
                "a file in ~/.config/fsspec, or credentials"
            )
        if isinstance(option, dict):
            _refuse_secrets(option)


class S3Keys(Section):
    """Declare the keys that only remotes on S3 take; every one may be left out."""

    client: Literal["botocore", "s3fs"] = _key(
        "botocore", "client", '"botocore"', "what speaks S3: botocore | s3fs, with fsspec's settings (s3.md)"
    )
    storage_options: Annotated[
        tuple[tuple[str, str], ...], BeforeValidator(read_storage_options), Strict(False)
    ] = _key(
        (), "storage_options", "{ requester_pays = true }", "of s3fs.S3FileSystem; secrets in FSSPEC_S3_*"
    )
    endpoint_url: Endpoint | None = _key(
        None, "endpoint_url", '"https://s3.example.org"', "of an S3 server that is not AWS"
    )
    region: Annotated[Name, AfterValidator(_no_secret)] | None = _key(
        None, "region", '"eu-central-1"', "of the bucket; default: the AWS settings'"
    )
    addressing: Literal["auto", "path", "virtual"] = _key(
        "auto", "addressing", '"auto"', "host/bucket: path; bucket.host: virtual; auto: virtual on AWS alone"
    )
    role_arn: Annotated[str, AfterValidator(check_role)] | None = _key(
        None, "role_arn", '"arn:aws:iam::123456789012:role/ckptd"', "assumed with credentials"
    )
    external_id: Annotated[str, AfterValidator(check_external_id)] | None = _key(
        None, "external_id", '"training"', "what the role's owner asks for"
    )
    sts_endpoint_url: Endpoint | None = _key(
        None, "sts_endpoint_url", '"https://s3.example.org"', "where a role is assumed, if not at AWS"
    )
    sse: Literal["AES256", "aws:kms"] | None = _key(
        None, "sse", '"aws:kms"', "encryption on the server: AES256 | aws:kms; default: the bucket's own"
    )
    sse_kms_key_id: Annotated[str, AfterValidator(check_kms_key)] | None = _key(
        None, "sse_kms_key_id", '"alias/checkpoints"', "with aws:kms; default: the account's key"
    )
    storage_class: Annotated[str, AfterValidator(check_storage_class)] | None = _key(
        None, "storage_class", '"STANDARD_IA"', "of the data; ckptd's documents stay in the default class"
    )
    tags: Annotated[tuple[tuple[str, str], ...], BeforeValidator(read_tags), Strict(False)] = _key(
        (), "tags", '{ team = "nlp" }', "of every object; needs the right PutObjectTagging"
    )
    sign_payload: bool | None = _key(
        None, "sign_payload", "true", "SHA-256 of every body; default: over http:// to another machine"
    )

    @model_validator(mode="after")
    def _fits(self) -> S3Keys:
        if self.client == "s3fs":
            if self.role_arn is not None:
                reject('with s3fs a profile names the role: leave role_arn out, credentials = "profile:NAME"')
            if self.endpoint_url is not None and "endpoint_url" in dict(self.storage_options):
                reject("endpoint_url stands in storage_options too; leave one out")
        elif self.storage_options:
            reject('storage_options are of s3fs; set client = "s3fs"')
        if self.role_arn is None:
            for key in ("external_id", "sts_endpoint_url"):
                if getattr(self, key) is not None:
                    reject(f"{key} is for a role; set role_arn")
        if self.sse_kms_key_id is not None and self.sse != "aws:kms":
            reject('sse_kms_key_id needs sse = "aws:kms"')
        if self.addressing == "virtual" and self.endpoint_url and _is_address(self.endpoint_url):
            reject('addressing = "virtual" puts the bucket before a name; endpoint_url is an IP address')
        return self


def _is_address(url: str) -> bool:
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True
