"""ckptd.json: what a made form is of, at its root, so that it can be told whose it is (docs/design.md §4)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ckptd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptd.convert.plan import Header, Trailer

NAME = "ckptd.json"
MADE_BY: Mapping[str, Any] = {"format": "1.0", "ckptd_version": ckptd.__version__}


def description_of(header: Header, trailer: Trailer, made_by: Mapping[str, Any] = MADE_BY) -> bytes:
    """Return the content of `ckptd.json`."""
    text = {
        **made_by,
        "form": header.form,
        "layout": header.layout,
        "alignment": header.block_bytes,
        "plan_sha256": trailer.sha256,
        "source": {
            "step": header.step,
            "zero_stage": header.stage,
            "ds_version": header.ds_version,
            "dp": header.dp,
            "fingerprints": {s.path: s.fingerprint for s in header.sources},
        },
    }
    return json.dumps(text, indent=1, sort_keys=True).encode() + b"\n"
