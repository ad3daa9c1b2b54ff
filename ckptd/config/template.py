"""Render a commented job file with every key, its default and its unit, from the models (`ckptd init`)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckptd.config.retention import Retention
from ckptd.config.s3 import S3Keys
from ckptd.config.schema import JobConfig, LayoutConfig, LocalConfig, RemoteConfig
from ckptd.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMENT_COLUMN = 40

_OF_S3 = frozenset(S3Keys.model_fields) | {"part_size"}
_OF_SERVERS = frozenset({"credentials"})
_OF_DIRECTORIES = frozenset({"same_filesystem"})


def job_template(save_dir: str, url: str, name: str, *, remote_name: str = "nas") -> str:
    """Render TOML: what is required is set, every other key stands commented out with its default."""
    top = _lines(JobConfig, {"save_dir": save_dir, "name": name})
    layout, local = _lines(LayoutConfig, {}), _lines(LocalConfig, {})
    foreign = _OF_SERVERS if url.startswith(("/", "file://")) else _OF_DIRECTORIES
    foreign |= frozenset() if url.startswith("s3://") else _OF_S3
    remote = _lines(RemoteConfig, {"name": remote_name, "url": url}, without=foreign)
    head = (
        "# A job of ckptd: one save_dir and where its checkpoints go. Keys without # are set; the others\n"
        "# show their default, or an example where nothing is the default. Test it with: ckptd check FILE"
    )
    return "\n".join(
        [head, "", *top, "", "[layout]", *layout, "", "[local]", *local, "", "[[remote]]", *remote, ""]
    )


def _lines(
    section: type[Section], values: Mapping[str, object], without: frozenset[str] = frozenset()
) -> list[str]:
    lines: list[str] = []
    parts = [set(part.model_fields) for part in (Retention, S3Keys) if part is not section]
    own_first = sorted(section.model_fields.items(), key=lambda item: [item[0] in part for part in parts])
    for _, field in own_first:
        extra = field.json_schema_extra
        if not isinstance(extra, dict):
            continue
        example = str(extra["toml"])
        key = example.split(" ", 1)[0]
        if key in without:
            continue
        text = f"{key} = {_toml(values[key])}" if key in values else f"# {example}"
        lines.append(f"{text.ljust(_COMMENT_COLUMN - 1)} # {field.description}")
    return lines


def _toml(value: object) -> str:
    """Render a TOML basic string or integer; JSON escapes are TOML's."""
    return json.dumps(value, ensure_ascii=False)
