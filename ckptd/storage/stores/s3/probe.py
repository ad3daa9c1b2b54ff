"""Probe which guarantees an S3 server keeps, with small objects, because its answers do not say.

Measured: servers that accept a wrong checksum, that ignore If-None-Match on PUT, on Complete, or on both,
whose ETags are no MD5s (docs/adr/0089). A guarantee that is not seen to be enforced counts neither as
proof nor as lock.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ckptd.errors import ConfigError
from ckptd.storage.stores.base import Abilities
from ckptd.storage.stores.checksums import crc64
from ckptd.storage.stores.s3 import client as sc
from ckptd.storage.stores.s3.body import Body
from ckptd.storage.stores.s3.proof import CHANGED, bare, joined
from ckptd.storage.stores.sources import MemorySource

if TYPE_CHECKING:
    from ckptd.storage.stores.access import Access
    from ckptd.storage.stores.s3.direct import Direct

_LEFT_SECONDS = 86400.0
_NOT_UNDERSTOOD = {"NotImplemented", "InvalidArgument", "InvalidRequest", "501"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Record what a multipart upload showed."""

    refuses_to_replace: bool
    are_listed: bool
    part_etags: bool
    joined_etags: bool
    are_tagged: bool


def probe(client: Any, place: dict[str, str], access: Access, *, is_read_back: bool) -> Abilities:
    """Try conditions, checksums and ETags on one key of ours, which is gone afterwards.

    Encryption, class and tags are those of the job: a server that does not take them says so here.
    """
    # a server cannot know the MD5 of this before it has received it
    data = b"ckptd" + secrets.token_bytes(27)
    try:
        first = client.put_object(**place, **access.for_documents, Body=data, IfNoneMatch="*")
        on_put = _refuses(client, sc.TAKEN, lambda: client.put_object(**place, Body=b"2", IfNoneMatch="*"))
        is_kept = on_put and client.get_object(**place)["Body"].read() == data
        parts = _multipart(client, place, access, data)
        copies = parts.are_listed and _copies(client, place, access, len(data))
        checksum = _checksum(client, place, access, data)
        content_md5 = checksum is None and _enforces(client, place, data, ContentMD5=_encoded(bytes(16)))
    finally:
        client.delete_object(**place)
    etags = _is_md5(first.get("ETag"), data)
    can = Abilities(
        create_only=is_kept,
        checksum=checksum,
        resumable=parts.are_listed,
        complete_only_absent=parts.refuses_to_replace and is_kept,
        part_etags=parts.part_etags,
        joined_etags=parts.part_etags and parts.joined_etags and etags,
        content_md5=content_md5,
        copies=copies,
    )
    if access.verify == "read-back":
        # the MD5s would be computed for nothing
        can = replace(can, part_etags=False, joined_etags=False, content_md5=False)
    untagged = () if parts.are_tagged else ("tags are ignored on objects that are sent in parts",)
    return replace(can, notes=(*untagged, *_notes(can, access, is_read_back)))


def clear_left(client: Any, bucket: str, prefix: str) -> None:
    """Give up uploads that probes which were killed left open below `prefix`, the place of probes alone.

    Only what is older than a day by the server's own clock: another node may be probing now.
    """
    with contextlib.suppress(client.exceptions.ClientError):
        found = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        date = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        for one in found.get("Uploads", ()) if date else ():
            age_seconds = (parsedate_to_datetime(date) - one["Initiated"]).total_seconds()
            # some servers ignore the prefix
            if one["Key"].startswith(prefix) and age_seconds > _LEFT_SECONDS:
                client.abort_multipart_upload(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])


class WrongSum(Body):
    """A body whose checksum does not fit it."""

    @property
    def encoded_crc(self) -> bytes:
        """Return the checksum of other bytes, which a server that compares must refuse."""
        return _encoded(bytes(8)).encode()


def takes_trailers(client: Any, place: dict[str, str], direct: Direct, key: str, access: Access) -> bool:
    """Whether a checksum behind a body is compared, and no framing is stored (docs/internals/stores.md)."""

    def sent(data: bytes, kind: type[Body]) -> bool:
        source = MemorySource(data, mode=0, folder_mode=0, gid=None)
        body = kind(source, 0, len(data))
        return direct.stream(key, dict(access.for_data), body, with_trailer=True) is not None

    good, other = secrets.token_bytes(32), secrets.token_bytes(33)
    try:
        if not direct.streams or not sent(good, Body):
            return False
        is_refused = not sent(other, WrongSum)
        answer = client.get_object(**place, ChecksumMode="ENABLED")
        is_right = answer.get("ChecksumCRC64NVME") == _encoded(crc64(good).to_bytes(8))
        is_bare = "aws-chunked" not in answer.get("ContentEncoding", "")
        return is_refused and is_right and is_bare and answer["Body"].read() == good
    finally:
        # what was refused was no failure
        direct.wake()
        client.delete_object(**place)


def _notes(can: Abilities, access: Access, is_read_back: bool) -> tuple[str, ...]:
    """List in words what a person should know of a server that does less than it might."""
    notes = []
    if not can.create_only:
        notes.append("If-None-Match is ignored: one writing node only, each creation is read again")
    elif not can.complete_only_absent:
        notes.append("If-None-Match is ignored when parts are joined: looked at first instead")
    if not can.resumable:
        notes.append("parts cannot be listed: an upload that was cut short starts over")
    if not is_read_back and can.checksum is None:
        notes.append("no checksum is enforced: copies are not proved (verify = none)")
    elif can.proof == "read-back" and access.verify == "auto":
        whose = "ETags of joined parts" if can.part_etags else "ETags"
        notes.append(f"no checksum is enforced and {whose} are no MD5s: each object is read back")
    return tuple(notes)


def _refuses(client: Any, codes: set[str], request: Any) -> bool:
    """Whether the request is answered with one of the codes."""
    try:
        request()
    except client.exceptions.ClientError as error:
        if sc.code_of(error) in codes | sc.RACING:
            return True
        if sc.code_of(error) in _NOT_UNDERSTOOD:
            return False
        raise
    return False


def _multipart(client: Any, place: dict[str, str], access: Access, data: bytes) -> _Parts:
    """Join one part over an object that is there: with the condition; where that is refused, without."""
    upload_id = client.create_multipart_upload(**place, **access.for_data)["UploadId"]
    try:
        part = client.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=data)
        listed = _listed(client, place, upload_id)
        join = {
            **place,
            "UploadId": upload_id,
            "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
        }
        refused = _refuses(
            client, sc.TAKEN, lambda: client.complete_multipart_upload(**join, IfNoneMatch="*")
        )
        head = _joined(client, place, join, is_open=refused)
        _check_encryption(head, access)
        return _Parts(
            refuses_to_replace=refused,
            are_listed=[(p["PartNumber"], p["Size"]) for p in listed] == [(1, len(data))],
            part_etags=_is_md5(part["ETag"], data),
            joined_etags=bare(str(head.get("ETag", ""))) == joined([_md5(data)]),
            are_tagged=not access.tags or head.get("TagCount") != 0,
        )
    finally:
        with contextlib.suppress(client.exceptions.ClientError):
            client.abort_multipart_upload(**place, UploadId=upload_id)


def _copies(client: Any, place: dict[str, str], access: Access, size_bytes: int) -> bool:
    """Whether a part is copied from the object that lies there: some servers take an empty one instead."""
    upload_id = client.create_multipart_upload(**place, **access.for_data)["UploadId"]
    try:
        source = {"Bucket": place["Bucket"], "Key": place["Key"]}
        client.upload_part_copy(**place, UploadId=upload_id, PartNumber=1, CopySource=source)
        return [part["Size"] for part in _listed(client, place, upload_id)] == [size_bytes]
    except client.exceptions.ClientError:
        return False
    finally:
        with contextlib.suppress(client.exceptions.ClientError):
            client.abort_multipart_upload(**place, UploadId=upload_id)


def _joined(client: Any, place: dict[str, str], join: dict[str, Any], *, is_open: bool) -> dict[str, Any]:
    """Join the parts and ask afresh about the object; empty when it could not be joined."""
    try:
        if is_open:
            client.complete_multipart_upload(**join)
        return dict(client.head_object(**place))
    except client.exceptions.ClientError as error:
        if sc.status_of(error) in (400, 404, 409, 412):
            return {}
        raise


def _check_encryption(head: dict[str, Any], access: Access) -> None:
    """Raise when what lies there is not encrypted as the job asks: some servers ignore that in silence."""
    found = head.get("ServerSideEncryption")
    if head and access.sse is not None and found != access.sse:
        msg = f'sse = "{access.sse}" is ignored by the server: objects there have {found or "no"} encryption'
        raise ConfigError(msg, hint="nothing was uploaded; remove sse, or let the bucket itself encrypt")


def _listed(client: Any, place: dict[str, str], upload_id: str) -> list[dict[str, Any]]:
    try:
        return list(client.list_parts(**place, UploadId=upload_id).get("Parts", []))
    except client.exceptions.ClientError as error:
        if sc.code_of(error) in sc.NOT_OFFERED:
            return []
        raise


def _checksum(client: Any, place: dict[str, str], access: Access, data: bytes) -> str | None:
    """crc64nvme when the server computes it by itself *and* rejects a wrong one."""
    client.put_object(**place, **access.for_data, Body=data)
    head = client.head_object(**place, ChecksumMode="ENABLED")
    _check_encryption(head, access)
    if head.get("ChecksumCRC64NVME") != _encoded(crc64(data).to_bytes(8)):
        return None
    return "crc64nvme" if _enforces(client, place, data, ChecksumCRC64NVME=_encoded(bytes(8))) else None


def _enforces(client: Any, place: dict[str, str], data: bytes, **wrong: str) -> bool:
    """Whether a body that does not fit its checksum is refused."""
    return _refuses(
        client, CHANGED | {"InvalidRequest"}, lambda: client.put_object(**place, Body=data, **wrong)
    )


def _is_md5(etag: str | None, data: bytes) -> bool:
    return etag is not None and bare(etag) == _md5(data).hex()


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
