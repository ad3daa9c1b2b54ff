"""List the example files that `ckptd init --list` names and `ckptd init --example NAME` prints."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from ckptd.base.package_data import data_file
from ckptd.errors import NotFoundError


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
