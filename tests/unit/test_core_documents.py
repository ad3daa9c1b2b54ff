"""Documents of the remote: canonical bytes, whatever is in them."""

from __future__ import annotations

import json

import pytest

from ckptd.core.layouts import Grid, Role, ShardKey
from ckptd.core.manifest import Checksums, ManifestFile, NodeManifest, SaveWindow, Writer, to_bytes


def entry(path: str) -> ManifestFile:
    return ManifestFile(
        path=path,
        key=f"t/{path}",
        bytes=3,
        role=Role.OPTIM,
        shard=ShardKey(d=1),
        checksums=Checksums(crc64nvme="0" * 16),
        fingerprint="f",
        tensor_fingerprint=None,
        proof="read-back",
    )


@pytest.mark.parametrize("paths", [[], ["a"], ["z", "a", 'odd"files":[]"ü\n', "b\\"]])
@pytest.mark.parametrize("tag", ["global_step1", '"files":[]', '\\"files":[]'])
def test_a_manifest_is_written_row_by_row_as_it_would_be_whole(tag: str, paths: list[str]) -> None:
    manifest = NodeManifest(
        job_id="j",
        tag=tag,
        generation=1,
        form="zero",
        folder=tag,
        node="n",
        node_id="i",
        ckptd_version="0",
        config_digest="c",
        branch=1,
        step=1,
        save_seq=0,
        save_window=SaveWindow(first=0, last=1),
        writer=Writer(),
        grid=Grid(dp=2, mm_count=1, zero_stage=2),
        files=tuple(entry(path) for path in paths),
    )
    whole = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
    assert to_bytes(manifest) == whole
    assert NodeManifest.model_validate_json(whole) == manifest
