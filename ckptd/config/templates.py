"""The texts that `ckptd init` prints: a commented job file made from the models, and the example files."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, NamedTuple

from ckptd.base.package_data import data_file
from ckptd.config.retention import Retention
from ckptd.config.s3 import S3Keys
from ckptd.config.schema import JobConfig, LayoutConfig, LocalConfig, RemoteConfig
from ckptd.config.section import Section
from ckptd.errors import NotFoundError

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


class Example(NamedTuple):
    """Name a file of the package and what it is for."""

    folder: str
    """Folder of the package that holds the file: examples or systemd."""
    file: str
    """Below that folder."""
    what: str
    """One line."""


EXAMPLES: dict[str, Example] = {
    "quickstart": Example(
        "examples", "quickstart.toml", "the smallest job: everything to a NAS, nothing deleted"
    ),
    "nas": Example("examples", "nas.toml", "a job: 3 checkpoints stay here, 20 and every 5000th on a NAS"),
    "s3": Example("examples", "s3.toml", "a job: a bucket of AWS or of anything that speaks S3"),
    "two-remotes": Example("examples", "two-remotes.toml", "a job: a NAS and an archive"),
    "huggingface": Example("examples", "huggingface.toml", "a job: output_dir of transformers.Trainer"),
    "sweep": Example("examples", "sweep.toml", "many runs in one file"),
    "daemon": Example(
        "examples", "ckptd.toml", "ckptd.toml: memory, bandwidth and notifications of the daemon"
    ),
    "slurm-dask": Example(
        "examples", "jobqueue.yaml", "workers of Slurm for `ckptd convert --cluster slurm:N`"
    ),
    "prometheus": Example("examples", "prometheus/ckptd.rules.yml", "alert rules"),
    "prometheus-test": Example(
        "examples",
        "prometheus/ckptd.test.yml",
        "for promtool: a test of ckptd.rules.yml beside it",
    ),
    "grafana": Example("examples", "grafana/ckptd.json", "a dashboard"),
    "systemd-system": Example("systemd", "ckptd@.service", "unit of one training user, as root"),
    "systemd-user": Example("systemd", "ckptd.service", "unit in your own systemd"),
    "systemd-slice": Example("systemd", "ckptd.slice", "what all these units share of the node"),
}
"""Examples in the order of `ckptd init --list`: every file of config/ and systemd/."""


def example_text(name: str) -> str:
    """Return the text of an example.

    Raises:
        NotFoundError: there is none of this name.
    """
    if name not in EXAMPLES:
        near = difflib.get_close_matches(name, EXAMPLES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        msg = f"no example {name!r}"
        raise NotFoundError(msg, hint=f"{meant}`ckptd init --list` lists them")
    example = EXAMPLES[name]
    return data_file(example.folder, example.file).read_text(encoding="utf-8")
