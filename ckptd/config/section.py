"""Provide the base of every configuration section: frozen models whose keys carry their own help.

A key's name, default and one line of help are declared where the key is; `ckptd init` prints them and the
refusals quote them.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Iterable


def key(default: Any, name: str, shown: str, text: str) -> Any:
    """Declare a configuration key: its TOML name, its default as TOML text, one line of help."""
    return Field(
        default=default,
        validation_alias=name,
        description=text,
        json_schema_extra={"toml": f"{name} = {shown}"},
    )


def required(name: str, shown: str, text: str) -> Any:
    """Declare a key without a default."""
    return Field(validation_alias=name, description=text, json_schema_extra={"toml": f"{name} = {shown}"})


class Section(BaseModel):
    """Base of every section: frozen, strict types, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# ---------------------------------------------------------------------------------------------------------
# Words for wrong configuration: the nearest valid key, neighbours' names, keys of later versions, secrets.
# P16 asks that a refusal names the key, the value and what was probably meant; people arrive from tools that
# call the same things otherwise. Secrets are refused without being repeated.

_NEIGHBOURS = {
    "save_dir": "output_dir checkpoint_dir ckpt_dir dirpath default_root_dir watch_dir source src folder",
    "url": "bucket destination path dest dst target upload_to remote_dir s3 nas location save_folder uri",
    "keep_bytes": "max_bytes quota max_size keep_size size_limit bytes_limit",
    "save_total_limit": "keep max_to_keep keep_n num_checkpoints_to_keep total_limit save_top_k "
    "max_checkpoints limit keep_n_latest keep_latest_k",
    "keep_every_steps": "interval every_n_steps keep_period save_steps save_interval save_retain_interval "
    "keep_interval",
    "keep_best": "save_best best metric_for_best_model load_best_model_at_end",
    "settle": "quiet grace grace_period debounce settle_seconds settle_time stable_for",
    "existing": "initial upload_existing import",
    "unuploaded": "delete_unuploaded on_full policy",
    "extra": "extras include files additional_files",
    "forms": "form formats format convert",
    "min_free": "free reserve min_free_space min_free_gb headroom",
    "bandwidth": "bwlimit limit_rate speed rate max_bandwidth bandwidth_limit",
    "memory_budget": "memory ram max_memory memory_limit mem",
    "notify": "notifications alerts alerting hooks webhooks",
    "state_dir": "state data_dir work_dir journal",
    "remote": "remotes upload storage destinations targets store",
    "trainer": "framework engine backend",
    "required": "must mandatory",
    "same_filesystem": "same_fs samefs allow_same_filesystem",
    "endpoint_url": "endpoint s3_endpoint host server aws_endpoint_url",
    "region": "region_name aws_region location_constraint",
    "credentials": "profile aws_profile auth credential credentials_file",
    "storage_options": "s3fs_options fsspec_options filesystem_options fs_options",
    "addressing": "addressing_style path_style force_path_style s3_force_path_style use_path_style",
    "role_arn": "role assume_role iam_role aws_role_arn",
    "external_id": "externalid aws_external_id role_external_id",
    "sts_endpoint_url": "sts_endpoint sts_url aws_endpoint_url_sts",
    "sse": "encryption encrypt server_side_encryption s3_sse",
    "sse_kms_key_id": "kms_key kms_key_id kms_key_arn ssekmskeyid",
    "storage_class": "storageclass s3_storage_class tier",
    "tags": "tagging labels object_tags tagset",
    "sign_payload": "payload_signing payload_signing_enabled sign_body",
    "part_size": "chunk_size chunksize upload_chunk_size multipart_chunksize s3_chunk_size part_size_mb",
}
_OF_NEIGHBOUR = {word: key for key, words in _NEIGHBOURS.items() for word in words.split()}

LATER = {
    "abort_after": "giving up half uploads by their age (set a lifecycle rule of the bucket)",
    "run_id_env": "run ids from the environment",
    "incomplete_after": "cleaning up incomplete saves by their age (they are left alone)",
}
"""Keys of docs/contract.md that this version knows and does not act on: refused, never silently ignored."""

_SECRET = (
    *("secret", "password", "passwd", "token", "access_key", "api_key", "apikey", "private_key", "sas_"),
    *("customer_key", "sse_c", "mfa"),
)
_KEY_ID = re.compile(r"(AKIA|ASIA)[0-9A-Z]{12,}")


def is_secret(key: str) -> bool:
    """Tell whether a key's name says that its value must not be shown."""
    lowered = key.lower()
    return any(word in lowered for word in _SECRET)


def looks_secret(value: object) -> bool:
    """Tell whether a value has the shape of an AWS access key, whatever it was written under."""
    if not isinstance(value, str):
        return False
    is_key = bool(re.fullmatch(r"[A-Za-z0-9/+]{40}", value))
    is_mixed = all(re.search(kind, value) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return bool(_KEY_ID.search(value)) or (is_key and is_mixed)


def holds_secret(value: object) -> bool:
    """Tell whether any word of a value, or of a list or table of values, looks like a secret."""
    return any(looks_secret(word) for word in re.split(r"[\s'\"=,\[\]{}]+", str(value)))


def nearest(key: str, valid: Iterable[str], elsewhere: dict[str, str]) -> str:
    """Suggest the key that `key` was probably meant to be; `elsewhere` maps other sections' keys to
    `[section]` paths.
    """
    keys = list(valid)
    lowered = key.lower().replace("-", "_")
    meant = lowered if lowered in keys else _OF_NEIGHBOUR.get(lowered, lowered)
    if meant in keys:
        return f'did you mean "{meant}"?'
    if meant in elsewhere:
        return f'"{meant}" belongs in {elsewhere[meant]}'
    close = difflib.get_close_matches(lowered, keys, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    close = difflib.get_close_matches(lowered, elsewhere, n=1, cutoff=0.75)
    if close:
        return f'did you mean "{close[0]}" in {elsewhere[close[0]]}?'
    return f"valid keys here: {', '.join(sorted(keys))}"
