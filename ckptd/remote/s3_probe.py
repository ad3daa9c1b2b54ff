"""What an S3 server keeps its word on: tried with small objects, because its answers do not say (adr/0040).

Measured: servers that accept a wrong checksum, that ignore If-None-Match on PUT, on Complete, or on both.
What is not enforced is not used as a proof or a lock (P2, P10).
"""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from ckptd.remote import s3_client as sc
from ckptd.remote.checksums import crc64
from ckptd.remote.store import Abilities

_DATA = b"ckptd"


def probe(client: Any, place: dict[str, str], *, is_read_back: bool) -> Abilities:
    """Try conditions and checksums on one key of ours, which is gone afterwards."""
    try:
        client.put_object(**place, Body=_DATA, IfNoneMatch="*")
        on_put = _refuses(client, sc.TAKEN, lambda: client.put_object(**place, Body=b"2", IfNoneMatch="*"))
        is_kept = on_put and client.get_object(**place)["Body"].read() == _DATA
        on_complete, has_parts = _multipart(client, place)
        checksum = _checksum(client, place)
    finally:
        client.delete_object(**place)
    notes = []
    if not is_kept:
        notes.append("If-None-Match is ignored: one writing node only, each creation is read again")
    elif not on_complete:
        notes.append("If-None-Match is ignored when parts are joined: looked at first instead")
    if not has_parts:
        notes.append("parts cannot be listed: an upload that was cut short starts over")
    if checksum is None:
        proof = "each object is read back" if is_read_back else "copies are not proved (verify = none)"
        notes.append(f"no checksum is enforced: {proof}")
    return Abilities(
        create_only=is_kept,
        checksum=checksum,
        resumable=has_parts,
        complete_only_absent=on_complete and is_kept,
        notes=tuple(notes),
    )


def _refuses(client: Any, codes: set[str], request: Any) -> bool:
    """True when the request is answered with one of the codes."""
    try:
        request()
    except client.exceptions.ClientError as error:
        if sc.code_of(error) in codes | sc.RACING:
            return True
        if sc.code_of(error) in ("NotImplemented", "InvalidArgument", "InvalidRequest", "501"):
            return False
        raise
    return False


def _multipart(client: Any, place: dict[str, str]) -> tuple[bool, bool]:
    """(joining parts over an object that is there is refused, parts are listed)."""
    upload_id = client.create_multipart_upload(**place)["UploadId"]
    try:
        part = client.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=_DATA)
        listed = _parts(client, place, upload_id)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        refused = _refuses(
            client,
            sc.TAKEN,
            lambda: client.complete_multipart_upload(
                **place, UploadId=upload_id, MultipartUpload=parts, IfNoneMatch="*"
            ),
        )
        return refused, [(p["PartNumber"], p["Size"]) for p in listed] == [(1, len(_DATA))]
    finally:
        with contextlib.suppress(client.exceptions.ClientError):
            client.abort_multipart_upload(**place, UploadId=upload_id)


def _parts(client: Any, place: dict[str, str], upload_id: str) -> list[dict[str, Any]]:
    try:
        return list(client.list_parts(**place, UploadId=upload_id).get("Parts", []))
    except client.exceptions.ClientError as error:
        if sc.code_of(error) in sc.NOT_OFFERED:
            return []
        raise


def _checksum(client: Any, place: dict[str, str]) -> str | None:
    """crc64nvme when the server computes it by itself *and* rejects a wrong one."""
    client.put_object(**place, Body=_DATA)
    head = client.head_object(**place, ChecksumMode="ENABLED")
    right = crc64(_DATA).to_bytes(8)
    if head.get("ChecksumCRC64NVME") != base64.b64encode(right).decode():
        return None
    wrong = base64.b64encode(bytes(8)).decode()
    codes = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidRequest"}
    request = dict(place, Body=_DATA, ChecksumCRC64NVME=wrong)
    try:
        client.put_object(**request)
    except client.exceptions.ClientError as error:
        if sc.code_of(error) in codes:
            return "crc64nvme"
        raise
    return None
