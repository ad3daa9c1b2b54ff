"""Declare the configuration: job files and ckptd.toml as frozen models, judged key by key (docs/contract.md,
P16).

Every key is declared once, here, with its unit, its default and one line of help; `ckptd init` prints that,
the refusals quote it. A key that this version does not act on is refused, never silently ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, Strict, model_validator

from ckptd.config.quantities import Bytes, BytesPerDay, Seconds, Share, ShareOrBytes
from ckptd.config.remote_names import shown_remote
from ckptd.config.retention import Retention
from ckptd.config.s3 import S3Keys
from ckptd.config.schemes import scheme_of
from ckptd.config.section import Section, key
from ckptd.config.section import key as _key
from ckptd.config.section import required as _required
from ckptd.config.timetable import Bandwidth, Timetable
from ckptd.config.values import (
    AbsoluteDir,
    CompleteWhen,
    Credentials,
    Endpoint,
    Form,
    LayoutFiles,
    MetricsFile,
    MetricsPlace,
    Name,
    Names,
    Trainer,
    Url,
    check_credentials,
    check_part_size,
    check_save_dir,
    check_takeover,
    local_form,
    not_shareable,
    parse_complete_when,
    reject,
)
from ckptd.core.model.other_layouts import DeclaredSave
from ckptd.core.policy.retention import RemoteKeys, RetentionKeys, Unuploaded

# ---------------------------------------------------------------------------------------------------------
# `[notify]` of ckptd.toml: who is notified of what and how; URLs that are secrets stay out of the file (P15).

_SECRET_HOSTS = ("hooks.slack.com", "discord.com", "webhook.office.com", "logic.azure.com")
"""Services whose URLs are all that is needed to post as you."""


def _check_place(value: str) -> str:
    """Check `file:PATH`, or a URL that holds no secret."""
    if value.startswith("file:"):
        return check_credentials(value)
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        reject('it is a URL (https://…), or "file:PATH" where the URL stands in a file')
    if parts.password or parts.hostname.endswith(_SECRET_HOSTS):
        reject('this URL is a secret; put it into a file and write "file:PATH" (systemd: LoadCredential=)')
    return value


def _check_command(value: tuple[str, ...]) -> tuple[str, ...]:
    if value and not value[0].startswith("/"):
        reject("a command starts with an absolute path; arguments follow as further strings")
    return value


Place = Annotated[str, AfterValidator(_check_place)]
Command = Annotated[tuple[str, ...], Strict(False), AfterValidator(_check_command)]
_Span = Annotated[Seconds, Field(gt=0)]


class NotifyConfig(Section):
    """Hold who is notified of what; nobody by default."""

    webhook: Place | None = key(
        None, "webhook", '"file:slack"', "POST of JSON with `text`, as Slack, Mattermost and Teams take it"
    )
    command: Command = key((), "command", '["/usr/local/bin/page"]', "the message as JSON on its stdin")
    severity: Literal["attention", "behind", "note"] = key(
        "attention", "severity", '"attention"', "least severity that is sent: attention | behind | note"
    )
    not_safe_after_seconds: _Span | None = key(
        None, "not_safe_after", '"2h"', "send when so much training would be lost with this node"
    )
    repeat_seconds: _Span = key(21_600.0, "repeat", '"6h"', "a problem that lasts is sent again so often")
    heartbeat: Place | None = key(
        None, "heartbeat", '"https://hc.example/uuid"', "GET this URL each minute while every job is well"
    )
    on_complete: Command = key(
        (), "on_complete", '["/path"]', "run when a save is complete; JSON on stdin, also for the next four"
    )
    on_committed: Command = key((), "on_committed", '["/path"]', "run when a checkpoint is safe on a remote")
    on_converted: Command = key((), "on_converted", '["/path"]', "run when a universal form was made")
    on_pruned: Command = key((), "on_pruned", '["/path"]', "run when a checkpoint was deleted here")
    on_problem: Command = key((), "on_problem", '["/path"]', "run when a problem begins, of any severity")

    @property
    def is_wanted(self) -> bool:
        """Tell whether anybody is notified of anything."""
        hooks = (self.on_complete, self.on_committed, self.on_converted, self.on_pruned, self.on_problem)
        return any((self.webhook, self.command, self.heartbeat, *hooks))


# ---------------------------------------------------------------------------------------------------------

MIN_MEMORY_BUDGET_BYTES = 256 << 20


class LocalConfig(Retention):
    """`[local]`: what stays on this node."""

    forms: Annotated[
        tuple[Annotated[Literal["universal"], BeforeValidator(local_form)], ...], Strict(False)
    ] = _key(
        ("universal",),
        "forms",
        '["universal"]',
        "universal forms kept here: of all on XFS and btrfs, else of the newest; []: none",
    )
    min_free: ShareOrBytes = _key(
        Share(percent=5.0),
        "min_free",
        '"5%"',
        "ckptd always leaves this and the next save's size free",
    )
    scrub_bytes_per_day: BytesPerDay = _key(
        None,
        "scrub",
        '"off"',
        '"500GB/day": read committed checkpoints here again while nothing else happens',
    )

    @model_validator(mode="after")
    def _ladder_of_own_forms(self) -> LocalConfig:
        for form in self.rungs_beyond(self.forms):
            reject(f'ladder: "{form}" does not stay on the node; [local] takes universal (in forms) and gone')
        return self


class LayoutConfig(Section):
    """`[layout]`: checkpoints that ckptd does not know by itself."""

    files: LayoutFiles | None = _key(
        None,
        "files",
        '"model_*.pt"',
        "files of torch.save in save_dir that are checkpoints; the last number is the step",
    )
    complete_when: Annotated[CompleteWhen | None, BeforeValidator(parse_complete_when)] = _key(
        None,
        "complete_when",
        '"marker DONE"',
        "folders of unknown layout are whole: marker NAME | manifest NAME | quiet 120s",
    )


class RemoteConfig(S3Keys, Retention):
    """One `[[remote]]`: where checkpoints go."""

    name: Name = _required("name", '"nas"', "its name in status and on the command line")
    url: Url = _required(
        "url",
        '"/mnt/nas/llama-7b"',
        "a directory on another file system than save_dir, s3://bucket/prefix, sftp://user@host/path …",
    )
    forms: Annotated[tuple[Form, ...], Strict(False)] = _key(
        ("zero", "universal"),
        "forms",
        '["zero", "universal"]',
        "zero is uploaded at once; universal and weights-bf16 (-fp16, -fp32) after it",
    )
    required: bool = _key(
        True, "required", "true", "a local file is deleted only once it is safe here; needs zero"
    )
    bandwidth: Bandwidth = _key(
        Timetable(),
        "bandwidth",
        '"none"',
        'upload limit; "8Gb/s" are bits, "1GB/s" bytes; by the clock: "08:00,1GB/s 20:00,none"',
    )
    credentials: Credentials = _key(
        "env", "credentials", '"env"', "env (AWS chain; ssh-agent and ~/.ssh; …) | profile:NAME | file:PATH"
    )
    part_size_bytes: Annotated[Bytes, AfterValidator(check_part_size)] | None = _key(
        None, "part_size", '"64MiB"', "size of S3 upload parts; default 16MiB, more for files above 140 GiB"
    )
    scrub_bytes_per_day: BytesPerDay = _key(
        None, "scrub", '"off"', '"50GB/day": read uploaded objects again while nothing else happens'
    )
    same_filesystem: bool = _key(
        False, "same_filesystem", "false", "allow a directory on save_dir's own disk (for tests)"
    )
    verify: Literal["auto", "read-back", "none"] = _key(
        "auto",
        "verify",
        '"auto"',
        "proof of uploads: auto (store's checksum, ETags, else read-back) | read-back | none",
    )

    @model_validator(mode="after")
    def _consistent(self) -> RemoteConfig:
        if len(set(self.forms)) != len(self.forms) or not self.forms:
            reject("forms names at least one form, each once")
        if self.required and "zero" not in self.forms:
            reject('a required remote takes "zero"; add it to forms or set required = false')
        if self.required and self.verify == "none":
            reject('verify = "none" proves nothing; set required = false')
        for form in self.rungs_beyond(self.forms):
            reject(f'ladder: "{form}" never comes to this remote; add it to forms')
        self._check_access()
        return self

    def _check_access(self) -> None:
        """Refuse keys of one kind of remote on another."""
        if self.url.startswith("s3://"):
            if self.addressing == "virtual" and "." in self.url.split("/")[2] and not self._is_plain:
                reject('addressing = "virtual": no TLS certificate covers a bucket with dots in its name')
            return
        for name in sorted(self.model_fields_set & {*S3Keys.model_fields, "part_size_bytes"}):
            reject(f"{name.removesuffix('_bytes')} is for s3:// remotes; {self.url} is none")
        if "credentials" in self.model_fields_set and self.url.startswith(("/", "file://")):
            reject(f"credentials is for servers and services; {self.url} is a directory")
        takes = ("env", "file") if scheme_of(self.url).takes_key_file else ("env",)
        if self.credentials.partition(":")[0] not in takes:
            reject(f"credentials for {self.url} is {' or '.join(takes)}, not {self.credentials!r}")

    @property
    def _is_plain(self) -> bool:
        return self.endpoint_url is not None and self.endpoint_url.startswith("http://")


_UNUPLOADED = {
    "thin": "checkpoints may be deleted before they are committed, once a newer one is",
    "delete": "the limit deletes checkpoints, committed or not",
}


Existing = Literal["newest", "all", "none"]


@cache
def _say_renamed(old: str, new: str) -> None:
    text = 'the key "%s" is called "%s" now; the old name is taken until the next release'
    logging.getLogger("ckptd.config").warning(f"ckptd: {text}", old, new)


class JobConfig(Section):
    """One job file: one save_dir and its remotes."""

    save_dir: Annotated[Path, BeforeValidator(check_save_dir)] = _required(
        "save_dir", '"/nvme/llama-7b"', "where the trainer saves; may appear later, its parent must exist"
    )
    trainer: Trainer = _key(
        "auto",
        "trainer",
        '"auto"',
        "auto | deepspeed | huggingface | accelerate | lightning | megatron",
    )
    settle_seconds: Seconds = _key(
        5.0, "settle", '"5s"', "a save is complete when nothing changed for so long"
    )
    existing: Existing = _key(
        "newest",
        "existing",
        '"newest"',
        "there before ckptd, uploaded: newest | all | none; never deleted but with all",
    )
    unuploaded: Unuploaded = _key(
        "keep",
        "unuploaded",
        '"keep"',
        "not safe yet: keep | thin (delete once a newer one is safe) | delete (by the limit)",
    )
    extra: Names | None = _key(
        None,
        "extra",
        '["tokenizer*"]',
        "files beside the checkpoints, uploaded with each; default: all up to 16 MiB",
    )
    name: Name = _key("", "name", '"llama-7b"', "the job's name; default: this file's name")
    save_spread_seconds: Seconds = _key(
        60.0, "save_spread", '"60s"', "shards written further apart belong to two saves"
    )
    metric: Name | None = _key(
        None, "metric", '"eval_loss"', "keep_best compares this: a name in trainer_state.json or metrics_file"
    )
    metrics_file: MetricsFile | None = _key(
        None,
        "metrics_file",
        '"metrics.jsonl"',
        "file in save_dir that the trainer writes: step and metric in each line",
    )
    metric_mode: Literal["min", "max"] | None = _key(
        None,
        "metric_mode",
        '"min"',
        "which value is better; default: min for names that end in loss, else max",
    )
    compare_masters: bool = _key(
        True,
        "compare_masters",
        "true",
        "forms: masters must round to the model's weights; false if the trainer changes those",
    )
    node_name: Name | None = _key(None, "node_name", '"node-0"', "this node's name; default: the host name")
    ready_dir: AbsoluteDir = _key(
        None,
        "ready_dir",
        '"/shared/ready/llama-7b"',
        "directory that gets TAG.json once a checkpoint is committed in every remote",
    )
    shared_fs: bool = _key(
        False,
        "shared_fs",
        "false",
        "save_dir is one directory on all hosts, each with a daemon (clusters.md)",
    )
    shared_takeover_seconds: Annotated[Seconds, AfterValidator(check_takeover)] = _key(
        180.0,
        "shared_takeover",
        '"3m"',
        "a node silent for so long is replaced by another (clusters.md)",
    )
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    local: LocalConfig = Field(default_factory=LocalConfig)
    remotes: Annotated[tuple[RemoteConfig, ...], Strict(False)] = Field(default=(), validation_alias="remote")
    _file: Path | None = PrivateAttr(default=None)
    _is_matched: bool = PrivateAttr(default=False)
    _given: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _existing_by_its_old_name(cls, values: Any) -> Any:
        """Take `backfill`, as `existing` was called until 0.2, with a note."""
        if not isinstance(values, dict) or "backfill" not in values or "existing" in values:
            return values
        _say_renamed("backfill", "existing")
        return {"existing" if key == "backfill" else key: value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_incomplete_after(cls, values: Any) -> Any:
        """Drop `incomplete_after = "never"`, which job files of earlier versions may hold."""
        if isinstance(values, dict) and values.get("incomplete_after") == "never":
            return {key: value for key, value in values.items() if key != "incomplete_after"}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        for field in ("name", "url"):
            values = [getattr(remote, field) for remote in self.remotes]
            for value in values:
                if values.count(value) > 1:
                    reject(f'two remotes have {field} = "{value}"')
        if self.deletes_locally and not any(r.required for r in self.remotes):
            reject("local checkpoints may be deleted, but no remote is required; set required = true on one")
        if self.unuploaded != "keep" and not self.deletes_locally:
            reject(
                f'unuploaded = "{self.unuploaded}" deletes nothing while [local] keeps everything; '
                "set save_total_limit or keep_bytes there"
            )
        if self.shared_fs and (
            problem := not_shareable([(r.url, r.required, r.forms) for r in self.remotes])
        ):
            reject(problem)
        if self.metric is None and any(s.keep_best is not None for s in (self.local, *self.remotes)):
            reject('keep_best compares a metric; name it: metric = "eval_loss"')
        if self.ready_dir is not None and self.ready_dir.is_relative_to(self.save_dir):
            reject("ready_dir lies in save_dir, where only the trainer writes; take another directory")
        if self.metric is None and self.metrics_file is not None:
            reject('metrics_file is read for one metric; name it: metric = "eval_loss"')
        return self

    @property
    def file(self) -> Path | None:
        """Return the job file; None for a job made from arguments."""
        return self._file

    @property
    def given(self) -> str | None:
        """Return the arguments and environment as JSON in the shape of a job file; None: the job has a
        file.
        """
        return self._given

    @property
    def is_matched(self) -> bool:
        """Tell whether a glob in its file's save_dir found it: the file stands for others too."""
        return self._is_matched

    @property
    def declared(self) -> DeclaredSave:
        """Return what `[layout]` says of checkpoints that no layout recognises."""
        when, files = self.layout.complete_when, self.layout.files or ""
        if when is None:
            return DeclaredSave(files=files)
        marker, manifest = (when.name if when.kind == kind else "" for kind in ("marker", "manifest"))
        return DeclaredSave(files=files, marker=marker, manifest=manifest, quiet_seconds=when.seconds)

    @property
    def retention_keys(self) -> RetentionKeys:
        """Return what the job file says of deletions."""
        return RetentionKeys(
            local=self.local.policy,
            local_forms=self.local.forms,
            remotes={
                remote.name: RemoteKeys(
                    retention=remote.policy, is_required=remote.required, forms=remote.forms
                )
                for remote in self.remotes
            },
            existing=self.existing,
            unuploaded=self.unuploaded,
            metric=self.metric,
            is_higher_better=self.is_higher_better,
        )

    @property
    def deletes_locally(self) -> bool:
        """Tell whether any local checkpoint may ever be deleted."""
        return self.local.policy.deletes

    @property
    def is_higher_better(self) -> bool:
        """Tell whether a higher metric is better, by Hugging Face's rule where the job file does not say."""
        mode = self.metric_mode or ("min" if (self.metric or "").endswith("loss") else "max")
        return mode == "max"

    @property
    def opt_outs(self) -> tuple[str, ...]:
        """Return the promises that the configuration weakens; the first line of status says them (P1)."""
        lax = [shown_remote(r.name, r.url) for r in self.remotes if r.verify == "none"]
        unproved = tuple(f'{shown}: verify = "none", copies are not proved' for shown in lax)
        if seconds := self.declared.quiet_seconds:
            quiet = f'complete_when = "quiet {seconds:g}s": nothing proves such a save whole'
            unproved = (*unproved, quiet)
        loose = _UNUPLOADED.get(self.unuploaded)
        return (*((f'unuploaded = "{self.unuploaded}": {loose}',) if loose else ()), *unproved)


def _budget(value: Share) -> Share:
    if value.bytes is not None and value.bytes < MIN_MEMORY_BUDGET_BYTES:
        reject('the whole process tree needs at least "256MiB"')
    if value.percent is not None and value.percent <= 0:
        reject('the budget must be more than "0%"')
    return value


class DaemonConfig(Section):
    """`ckptd.toml`: what concerns the daemon as a whole."""

    memory_budget: Annotated[ShareOrBytes, AfterValidator(_budget)] = _key(
        Share(bytes=1 << 30),
        "memory_budget",
        '"1GiB"',
        'memory of all of ckptd\'s processes; at least "256MiB"; or "2%"',
    )
    bandwidth: Bandwidth = _key(
        Timetable(),
        "bandwidth",
        '"none"',
        "limit of all uploads together; or by the clock",
    )
    convert_bandwidth: Bandwidth = _key(
        Timetable(),
        "convert_bandwidth",
        '"none"',
        "limit of conversions on the node: bytes that they copy and compare; by the clock when one begins",
    )
    max_uploads: Annotated[int, Field(ge=1, le=64)] = _key(
        4, "max_uploads", "4", "checkpoints uploaded at once, of all jobs to all remotes"
    )
    state_dir: AbsoluteDir = _key(
        None, "state_dir", '"/var/lib/ckptd"', "where journal, status.json and audit.jsonl are"
    )
    metrics: MetricsPlace | None = _key(
        None,
        "metrics",
        '"127.0.0.1:9310"',
        "a page for Prometheus; or a file for node_exporter: /…/ckptd.prom",
    )
    node_name: Name | None = _key(None, "node_name", '"node-0"', "this node's name; default: the host name")
    termination: Literal["off", "aws", "gcp", "azure", "auto"] = _key(
        "off",
        "termination",
        '"off"',
        "drain when the cloud says that it takes this node: aws | gcp | azure | auto",
    )
    termination_url: Endpoint | None = _key(
        None,
        "termination_url",
        '"http://127.0.0.1:8111"',
        "of the metadata service, behind a proxy; default: the clouds' own",
    )
    notify: NotifyConfig = Field(default_factory=NotifyConfig)

    def memory_budget_bytes(self, total_memory_bytes: int) -> int:
        """Return the budget for a machine with that much memory, never below the minimum."""
        return max(MIN_MEMORY_BUDGET_BYTES, self.memory_budget.of(total_memory_bytes))


_DIGEST_JOB = {
    "name", "trainer", "unuploaded", "extra", "save_spread_seconds", "metric", "metric_mode", "metrics_file",
}  # fmt: skip


def config_digest(job: JobConfig) -> str:
    """Hash (SHA-256, hex) what all nodes of a job must agree on: forms, retention, identity of remotes.

    Paths, speeds and times of one node are left out: they may differ without changing what is kept (§5).
    """
    layout: dict[str, Any] = job.layout.model_dump(mode="json", exclude_none=True)
    shape: dict[str, Any] = {
        # left out where nothing is declared: the digests of all other jobs stay
        **({"layout": layout} if layout else {}),
        # a key that is gone: without it every digest would change, and nodes of two versions would differ
        "job": {**job.model_dump(mode="json", include=_DIGEST_JOB), "incomplete_after_seconds": None},
        "local": _digest_retention(job.local, job.local.forms),
        "remotes": [
            {
                "name": remote.name,
                "required": remote.required,
                "verify": remote.verify,
                **_digest_retention(remote, remote.forms),
            }
            for remote in sorted(job.remotes, key=lambda remote: remote.name)
        ],
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_FIRST_KEYS = frozenset(
    [
        "save_total_limit",
        "keep_every_steps",
        "keep_every_seconds",
        "keep_within_seconds",
        "keep_best",
        "keep_steps",
        "ephemeral",
        "ladder",
    ]
)
"""Keys of `RetentionPolicy` that every digest has; any other only where it is set, so that digests stay."""


def _digest_retention(keeps: Retention, forms: tuple[str, ...]) -> dict[str, Any]:
    policy = keeps.policy
    unset = {
        name for name in type(policy).model_fields if name not in _FIRST_KEYS and not getattr(policy, name)
    }
    return {"forms": sorted(forms), **policy.model_dump(mode="json", exclude=unset)}
