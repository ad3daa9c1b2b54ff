"""A remote's settings and what its store was seen to do, as rows of words for `ckptd check` (adr/0089)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.remote.open import is_s3

if TYPE_CHECKING:
    from ckptd.config_model import RemoteConfig
    from ckptd.remote.access import Access
    from ckptd.remote.store import Abilities

_PROOFS = {
    "store-checksum": "store-checksum: the store computes CRC64NVME, keeps it and refuses a wrong one",
    "part-etags": "part-etags: its ETags are the MD5s of what arrived, compared with what was sent",
    "read-back": "read-back: each object is read again and compared",
}


def settings_rows(remote: RemoteConfig, access: Access) -> tuple[tuple[str, str], ...]:
    """What the job file says of the way there; never a secret, only where secrets lie."""
    if not is_s3(remote.url):
        return ()
    if access.signs_payload:
        saved = "" if access.sign_payload else "; sign_payload = false saves some 3 CPU-seconds per GB"
        signed = f"signed with SHA-256{saved}"
    elif access.is_tls:
        signed = "not signed: TLS protects them"
    else:
        signed = "not signed: plain http"
    rows = [(key, value) for key, value in access.shown() if key != "sign_payload"]
    return (*rows, ("bodies", signed))


def abilities_rows(can: Abilities, *, is_read_back: bool) -> tuple[tuple[str, str], ...]:
    """What the probe saw."""
    proof = _PROOFS[can.proof] if is_read_back or can.checksum else 'none: verify = "none"'
    rows = [
        ("create-only", "enforced by the store" if can.create_only else "looked at first, read again after"),
        ("proof", proof),
        ("a part that changed on its way", _guard(can)),
        ("an upload that was cut short", "goes on" if can.resumable else "starts over"),
    ]
    if can.part_etags or can.content_md5 or can.checksum or can.complete_only_absent:
        joins = "refused by the store" if can.complete_only_absent else "looked for first"
        rows.append(("joining parts over an object", joins))
    return tuple(rows)


def _guard(can: Abilities) -> str:
    if can.checksum:
        return f"refused by the store ({can.checksum})"
    if can.part_etags:
        return "seen in the part's ETag, sent again at once"
    if can.content_md5:
        return "refused by the store (Content-MD5)"
    return "found when the object is read back"
