"""Documents of the remote: canonical bytes, whatever is in them."""

from __future__ import annotations

import json

import pytest

from ckptd.core.model.generation import KnownManifest, build_commit, is_after
from ckptd.core.model.layouts import Grid, Role, ShardKey
from ckptd.core.model.manifest import Checksums, ManifestFile, NodeManifest, manifest_key, to_bytes
from ckptd.core.model.save import SaveWindow, Writer


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
    manifest = made(tag, paths)
    whole = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
    assert to_bytes(manifest) == whole
    assert NodeManifest.model_validate_json(whole) == manifest


def made(tag: str, paths: list[str], window: tuple[int, int] = (0, 1)) -> NodeManifest:
    return NodeManifest(
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
        save_window=SaveWindow(first=window[0], last=window[1]),
        writer=Writer(),
        grid=Grid(dp=2, mm_count=1, zero_stage=2),
        files=tuple(entry(path) for path in paths),
    )


@pytest.mark.parametrize(("is_named", "until"), [(True, 1000), (False, 5000)])
def test_what_was_written_after_a_committed_save(is_named: bool, until: int) -> None:
    """By the save windows in names of manifests; what has none there was saved before it was committed."""
    known = []
    for window in ((900, 950), (940, 999)):
        manifest = made("t", ["a"], (window[0] * 10**9, window[1] * 10**9))
        key = manifest_key(manifest, "0" * 64) if is_named else "_ckptd/nodes/t~g1~zero/n~000000000000.json"
        known.append(KnownManifest(manifest=manifest, key=key, sha256="0" * 64))
    at = "1970-01-01T01:23:20+00:00"
    commit = build_commit(known, committed_by="n", committed_at=at, config_digest="c")
    assert not is_after((until + 60) * 10**9, commit, 60.0)
    assert is_after((until + 60) * 10**9 + 10**6, commit, 60.0)
    nowhen = commit.model_copy(update={"committed_at": "then"})
    assert is_after(10**15, nowhen, 60.0) is is_named, "in doubt it is not newer"
